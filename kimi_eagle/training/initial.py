"""Weights to start from that use what the target knows already."""

from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from kimi_eagle.eagle3.config import HeadConfig
from kimi_eagle.eagle3.model import Head

if TYPE_CHECKING:
    from kimi_eagle.target import Target


def initial_head(config: HeadConfig, target: "Target", d2t: Tensor | None, layer: str, seed: int) -> Head:
    """A head that starts as close to the target as its shape allows, float32 on the CPU.

    Always: the shared embedding, lm_head from the target's rows of the draft vocabulary, the final norm, and an fc that
    passes the deepest auxiliary state through. `layer` "target" also takes the decoder layer of a Llama-like target: its
    last layer's MLP, norms and attention, the attention reading the state; the embedding's half starts small and random.
    Another kind of layer (MLA, experts, other widths) starts random, whatever `layer` says.
    """
    generator = torch.Generator().manual_seed(seed)
    head = Head(config, target.load_tensor("embed_tokens"), d2t)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2:
                # truncation and fan-in scaling as usual for residual networks; small outputs leave the state's path clear
                deviation = 0.02 if "o_proj" in name or "down_proj" in name else parameter.shape[1] ** -0.5 / 2
                parameter.normal_(0, deviation, generator=generator)
        head.lm_head.weight.copy_(target.load_tensor("lm_head")[head.target_ids].float())
        head.norm.weight.copy_(target.load_tensor("norm").float())
        if config.hidden_size == config.target_hidden_size:
            head.fc.weight.mul_(0.1)
            head.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        if layer == "target":
            copy_layer(head, target, target.num_layers - 1)
    return head


def copy_layer(head: Head, target: "Target", number: int) -> bool:
    """Copy decoder layer `number` of a Llama-like target into the head; False, and nothing done, where shapes do not fit."""
    prefix = target.tensor_name("norm").removesuffix("norm.weight") + f"layers.{number}."
    mine = head.layers[0].state_dict()
    found = {
        n: _tensor(target, prefix + n) for n in mine if n != "hidden_norm.weight" and prefix + n in target.weight_map
    }
    H = head.config.hidden_size
    if head.config.attention != "llama" or len(found) != len(mine) - 1:
        return False
    if any(tuple(t.shape) != _source_shape(n, mine[n]) for n, t in found.items()):
        return False
    with torch.no_grad():
        for name, tensor in found.items():
            if name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                mine[name][:, H:] = tensor  # input is [embedding, state]; the embedding's half keeps its random start
                mine[name][:, :H] *= 0.5
            elif name == "input_layernorm.weight":
                mine["hidden_norm.weight"].copy_(tensor)  # that norm saw the state; the embedding's stays at one
            else:
                mine[name].copy_(tensor)
    return True


def _source_shape(name: str, mine: Tensor) -> tuple[int, ...]:
    if name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
        return (mine.shape[0], mine.shape[1] // 2)
    return tuple(mine.shape)


def _tensor(target: "Target", name: str) -> Tensor:
    with safe_open(target.path / target.weight_map[name], "pt") as tensors:
        return tensors.get_tensor(name).float()
