"""How the processes of a run share the head: each a whole one (ddp), or each a share of every tensor (fsdp2).

Either way the gradients are summed, not averaged: the loss of a row is scaled by the trained positions of the whole batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kimi_eagle.eagle3.model import Head


class Replicas:
    """A whole head in every process; also the one process of a run without others."""

    collective = False  # whether every process must take part in `whole` and `state`

    def __init__(self, head: Head, world: int, loss: Callable[..., Any]) -> None:
        """`loss(head, ...)` is called through `loss`."""
        self.head, self.world, self._loss = head, world, loss

    def loss(self, *arguments: Any) -> Any:
        """The loss function on this head."""
        return self._loss(self.head, *arguments)

    def summed(self, values: Tensor) -> Tensor:
        """`values` summed over all processes, on the CPU."""
        if self.world > 1:
            values = values.to(self.head.embedding.device)
            torch.distributed.all_reduce(values)
        return values.cpu()

    def reduce(self) -> None:
        """Sum the gradients of all processes."""
        if self.world == 1:
            return
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
        torch.distributed.all_reduce(flat)
        for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)

    def whole(self) -> Head:
        """The head with all its weights, for evaluation and export."""
        return self.head

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Weights and optimizer state, whole."""
        return {"head": self.head.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Take what `state` gave."""
        self.head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])


class Shards(Replicas):
    """FSDP2: between steps a process holds its share of weights, gradients and moments; within one, the whole weights.

    The head is one decoder layer, so it is one unit. Processes may have different numbers of rows, and rows without a trained
    position have no backward pass; so rows add to whole gradients without communication, and `reduce` alone communicates,
    once a step in every process, in the backward pass of a loss that is zero.
    """

    collective = True

    def __init__(self, head: Head, world: int, loss: Callable[..., Any]) -> None:
        super().__init__(head, world, loss)
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh(head.embedding.device.type, (world,))
        self.unit = fully_shard(_Unit(head), mesh=mesh, reshard_after_forward=False)
        self.unit.set_gradient_divide_factor(1.0)
        self.unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum

    def loss(self, *arguments: Any) -> Any:
        """The loss function on the head's whole weights, gathered where they are not yet."""
        self._communicate(False)
        return self.unit(lambda head: self._loss(head, *arguments))

    def reduce(self) -> None:
        """Give every process its share of the summed gradients, and let go of the whole weights."""
        self._communicate(True)
        self.unit(lambda head: sum(p.sum() * 0 for p in head.parameters() if p.requires_grad)).backward()

    def whole(self) -> Head:
        """A copy with all weights; empty of them in every process but the first."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        weights = get_model_state_dict(self.unit, options=_options())
        offsets = self.head.target_ids - torch.arange(len(self.head.target_ids), device=self.head.target_ids.device)
        copy = Head(self.head.config, self.head.embedding, offsets.cpu())
        if weights:
            copy.load_state_dict(_bare(weights))
        return copy.to(self.head.embedding.device)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Weights and optimizer state, whole in the first process and empty in the others."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self.unit, optimizer, options=_options())
        return {"head": _bare(weights), "optimizer": moments}

    def restore(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Take this process's share of what `state` gave."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        weights = {PREFIX + name: tensor for name, tensor in state["head"].items()}
        set_state_dict(
            self.unit, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"], options=_options()
        )

    def _communicate(self, on: bool) -> None:
        self.unit.set_requires_gradient_sync(on)
        self.unit.set_reshard_after_backward(on)


PREFIX = "head."


class _Unit(nn.Module):
    """What FSDP2 wraps: it gathers weights when a module is called, and the head is read by its methods, never called."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, function: Callable[[Head], Any]) -> Any:
        """`function` of the head with its whole weights."""
        return function(self.head)


def _options() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def _bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
