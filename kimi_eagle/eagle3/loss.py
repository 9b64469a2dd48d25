"""What a head learns from: the target's own next-token distribution, restricted to the draft vocabulary.

The distribution is never stored. It is made, slice by slice, from the stored last state: the target's final norm, then the
rows of its lm_head that the draft vocabulary keeps. p below is the target's softmax over those rows (renormalised), q the
head's; alpha = sum min(p, q) is the acceptance rate of speculative sampling (Leviathan et al., arXiv 2211.17192).

| name | objective                                    | source                                              |
|------|----------------------------------------------|-----------------------------------------------------|
| kl   | KL(p || q); gradient of EAGLE-3's soft cross-entropy | EAGLE-3, arXiv 2503.01840; speculators' default |
| ce   | -log q(arg-max of p): what greedy decoding compares | hard-label distillation (SpecForge, speculators) |
| tv   | 1 - alpha (total variation)                  | arXiv 2211.17192, lemma 3.3                          |
| nla  | -log alpha                                   | LK losses, Samarin et al., arXiv 2602.23881          |
| lk   | w KL + (1 - w) TV, w = exp(-3 alpha), w held constant | same, hybrid form, eta = 3                  |
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kimi_eagle.target import Target

LK_ETA = 3.0  # the value arXiv 2602.23881 found best
SLICE = 256  # positions whose logits exist at once
GPU_SLICE_BYTES = (
    256 << 20
)  # on a GPU as many positions as fit into this: large products, few sums into the weight's gradient


def kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) per position [N]."""
    return (p * (log_p - log_q)).sum(-1)


def ce(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Cross-entropy against the arg-max of p, per position [N]."""
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True)).squeeze(-1)


def overlap(p: Tensor, log_q: Tensor) -> Tensor:
    """alpha = sum min(p, q) per position [N]."""
    return torch.minimum(p, log_q.exp()).sum(-1)


def tv(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation 1 - alpha per position [N]."""
    return 1 - overlap(p, log_q)


def nla(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Negative log-acceptance -log alpha per position [N]; the floor keeps disjoint distributions finite."""
    return -overlap(p, log_q).clamp_min(1e-6).log()


def lk(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Adaptive blend of KL (far apart) and TV (close) per position [N]."""
    alpha = overlap(p, log_q)
    weight = (-LK_ETA * alpha.detach()).exp()
    return weight * kl(p, log_p, log_q) + (1 - weight) * (1 - alpha)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"kl": kl, "ce": ce, "tv": tv, "nla": nla, "lk": lk}


class TargetOutput:
    """The target's last step from a stored final state: norm, then lm_head, over the draft or the full vocabulary."""

    def __init__(self, norm: Tensor, lm_head: Tensor, eps: float, target_ids: Tensor) -> None:
        """norm [Ht], lm_head [V, Ht] (any dtype), target_ids [Vd]: the target id of each draft id."""
        self.norm, self.lm_head, self.eps = norm, lm_head, eps
        same = len(target_ids) == len(lm_head)
        self.draft_rows = lm_head if same else lm_head[target_ids.to(lm_head.device)]

    @classmethod
    def of(
        cls,
        target: "Target",
        target_ids: Tensor,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "TargetOutput":
        """From a target's checkpoint: norm and lm_head alone are read, never the whole model."""
        norm, lm_head = (target.load_tensor(part).to(device, dtype) for part in ("norm", "lm_head"))
        return cls(norm, lm_head, float(target.text_config.get("rms_norm_eps", 1e-6)), target_ids)

    def _normed(self, states: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(states.float(), states.shape[-1:], self.norm.float(), self.eps)
        return x.to(self.lm_head.dtype)

    def draft_log_probs(self, states: Tensor) -> Tensor:
        """Final states [N, Ht] -> log p over the draft vocabulary [N, Vd], float32."""
        return (self._normed(states) @ self.draft_rows.T).float().log_softmax(-1)

    def arg_max(self, states: Tensor) -> Tensor:
        """Final states [N, Ht] -> the target's greedy token over its FULL vocabulary [N], SLICE positions at a time."""
        picked = [(self._normed(s) @ self.lm_head.T).argmax(-1) for s in states.split(SLICE)]
        return torch.cat(picked) if picked else torch.empty(0, dtype=torch.int64, device=self.lm_head.device)


class _Sliced(torch.autograd.Function):
    """Sum of a per-position loss through lm_head, with gradients taken slice by slice, so logits never pile up."""

    @staticmethod
    def forward(ctx, hidden, weight, loss, log_p_of, counts):
        kept_dtype, weight = weight.dtype, weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=kept_dtype) if ctx.needs_input_grad[1] else None
        total = hidden.new_zeros((), dtype=torch.float64)  # a sum over up to millions of positions
        size = max(SLICE, GPU_SLICE_BYTES // (4 * len(weight))) if hidden.is_cuda else SLICE
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            with torch.no_grad():
                log_p = log_p_of(part)
                logits = (hidden[part] @ weight.T).float()
            with torch.enable_grad():
                logits.requires_grad_()
                value = loss(log_p.exp(), log_p, logits.log_softmax(-1)).sum()
                (gradient,) = torch.autograd.grad(value, logits)
            gradient = gradient.to(hidden.dtype)
            grad_hidden[part] = gradient @ weight
            if grad_weight is not None:
                grad_weight += (gradient.T @ hidden[part]).to(kept_dtype)
            total += value.detach()
            counts["matched"] += (logits.argmax(-1) == log_p.argmax(-1)).sum()
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, upstream):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream, None if grad_weight is None else grad_weight * upstream, None, None, None


def sliced_loss(name: str, hidden: Tensor, lm_head: Tensor, log_p_of: Callable[[slice], Tensor]) -> tuple[Tensor, int]:
    """Sum of the loss `name` over N positions, and at how many of them the two arg-maxes agree.

    hidden [N, H] normed outputs of the head, lm_head [Vd, H], log_p_of(slice) -> the target's log p [n, Vd] for those
    positions. N = 0 (nothing trained in this row) gives a zero without NaN. Divide by the count of trained positions.
    """
    counts = {"matched": torch.zeros((), dtype=torch.int64, device=hidden.device)}
    total = _Sliced.apply(hidden, lm_head, LOSSES[name], log_p_of, counts)
    return total, counts["matched"]
