"""Weights to start from that use what the target knows already."""

from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from kimi_eagle.eagle3.config import HeadConfig
from kimi_eagle.eagle3.model import Head
from kimi_eagle.errors import BadInput

if TYPE_CHECKING:
    from kimi_eagle.target import Target

WIDENED = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")


def initial_head(config: HeadConfig, target: "Target", d2t: Tensor | None, layer: str, seed: int) -> Head:
    """A head that starts as close to the target as its shape allows, float32 on the CPU.

    Always: the shared embedding, lm_head from the target's rows of the draft vocabulary, the final norm, and an fc that
    passes the deepest auxiliary state through. `layer` "target" also takes what fits of the target's last layer; what does
    not (experts for the dense MLP, other widths, quantized weights) starts random.
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


def take_over(head: Head, published: Head) -> None:
    """Start `head` from another one of its shape and layer ids: every tensor, and the output rows of the tokens that both have.

    BadInput where the two differ in more than their draft vocabularies.
    """
    ours, theirs = head.config.model_dump(), published.config.model_dump()
    changed = [k for k in ours if ours[k] != theirs[k] and k not in ("draft_vocab_size", "max_position_embeddings")]
    if changed:
        said = ", ".join(f"{k} {theirs[k]} where {ours[k]} is trained" for k in changed)
        raise BadInput(
            f"initial head: it has {said}; extract the layers it reads and set its flags, or start without it."
        )
    weights = published.state_dict()
    rows = weights.pop("lm_head.weight")
    place = torch.full((head.config.vocab_size,), -1)
    place[published.target_ids] = torch.arange(len(published.target_ids))
    at = place[head.target_ids]
    with torch.no_grad():
        head.lm_head.weight[at >= 0] = rows[at[at >= 0]]
    head.load_state_dict(weights, strict=False)


def copy_layer(head: Head, target: "Target", number: int) -> list[str]:
    """Copy what fits of the target's decoder layer `number`: attention, MLP and their norms, each whole or not at all.

    A matrix that reads the attention's input is twice as wide in the head ([embedding, state]): the target's goes into the
    state's half. Returns which of "self_attn" and "mlp" were copied.
    """
    prefix = target.tensor_name("norm").removesuffix("norm.weight") + f"layers.{number}."
    mine, H, copied = head.layers[0].state_dict(), head.config.hidden_size, []
    norms = {
        "self_attn": ("input_layernorm.weight", "hidden_norm.weight"),
        "mlp": ("post_attention_layernorm.weight",) * 2,
    }
    for group, (source_norm, norm) in norms.items():
        names = [n for n in mine if n.startswith(group + ".")]
        if any(prefix + n not in target.weight_map for n in [*names, source_norm]):
            continue
        found = {n: _tensor(target, prefix + n) for n in names}
        places = {n: mine[n][:, H:] if n.split(".")[1] in WIDENED else mine[n] for n in names}
        if any(found[n].shape != places[n].shape for n in names):
            continue
        with torch.no_grad():
            for name in names:
                places[name].copy_(found[name])
                if name.split(".")[1] in WIDENED:
                    mine[name][:, :H] *= 0.5  # the embedding's half keeps its random start
            mine[norm].copy_(_tensor(target, prefix + source_norm))
        copied.append(group)
    return copied


def parameter_table(head: Head) -> list[dict[str, Any]]:
    """One record per tensor of the head, the target's shared embedding included: name, shape, whether it is trained."""
    shared = {"name": "embed_tokens.weight", "shape": list(head.embedding.shape), "trained": False}
    own = [{"name": n, "shape": list(p.shape), "trained": p.requires_grad} for n, p in head.named_parameters()]
    return [shared, *own]


def _tensor(target: "Target", name: str) -> Tensor:
    with safe_open(target.path / target.weight_map[name], "pt") as tensors:
        return tensors.get_tensor(name).float()
