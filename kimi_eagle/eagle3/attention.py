"""The two attentions of an EAGLE-3 head, rotary embedding included, as vLLM computes them when it serves the head.

Shapes: T tokens of a packed row, M chain origins (rows that are asked for an answer), h query heads, g key/value heads.
Attention runs over the T keys of step 0 and, per later step of a chain, one key of that chain's own (`attend`).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kimi_eagle.eagle3.config import HeadConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding: default, linear, llama3, YaRN, and DeepSeek's YaRN for MLA.

    Follows vLLM's rotary classes: YaRN (arXiv 2309.00071) blends interpolated and plain frequencies between the two
    correction dimensions and scales cos/sin by a magnitude; DeepSeek's form takes the ratio of two magnitudes instead.
    `interleaved`: MLA rotates neighbouring pairs (x0, x1), Llama rotates the two halves of a head.
    """

    def __init__(self, dim: int, parameters: dict, deepseek: bool) -> None:
        super().__init__()
        self.interleaved = deepseek
        frequencies, self.magnitude = inverse_frequencies(dim, parameters, deepseek)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [N] -> cos and sin, each [N, dim / 2] in float32."""
        angles = positions.float()[:, None] * self.inverse_frequencies[None]
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def rotate(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x [N, heads, dim] turned by its position."""
        cos, sin = (t[:, None].to(x.dtype) for t in tables)
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def inverse_frequencies(dim: int, parameters: dict, deepseek: bool) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] and the factor on cos and sin, for a `rope_parameters` dictionary."""
    kind = parameters.get("rope_type", "default")
    base = float(parameters.get("rope_theta", 10000.0))
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "default":
        return plain, 1.0
    factor = float(parameters["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    original = float(parameters["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        turns = original * plain / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1) if low != high else (turns >= high).float()
        return plain * (smooth + (1 - smooth) / factor), 1.0

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(float(parameters.get("beta_fast", 32)))
    high = dimension(float(parameters.get("beta_slow", 1)))
    if parameters.get("truncate", True) or deepseek:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _magnitude(parameters, factor, deepseek)


def _magnitude(parameters: dict, factor: float, deepseek: bool) -> float:
    """Factor on cos and sin under YaRN."""
    one, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if deepseek:
        return yarn_magnitude(factor, float(1 if one is None else one)) / yarn_magnitude(factor, float(all_dims or 0))
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if one and all_dims:
        return yarn_magnitude(factor, float(one)) / yarn_magnitude(factor, float(all_dims))
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's magnitude 0.1 * mscale * ln(factor) + 1, one where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class LlamaAttention(nn.Module):
    """Grouped-query attention over inputs of width 2H (embedding and state side by side)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        H, self.dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * H, config.num_heads * self.dim, bias=False)
        self.k_proj = nn.Linear(2 * H, config.num_kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(2 * H, config.num_kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * self.dim, H, bias=False)
        self.rotary = Rotary(self.dim, config.rope_parameters, deepseek=False)
        self.scale = self.dim**-0.5

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [M, 2H] -> [M, h, dim]."""
        return self.rotary.rotate(self.q_proj(x).unflatten(-1, (-1, self.dim)), self.rotary.tables(positions))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, 2H] -> keys and values, each [T, g, dim]."""
        k, v = (p(x).unflatten(-1, (-1, self.dim)) for p in (self.k_proj, self.v_proj))
        return self.rotary.rotate(k, self.rotary.tables(positions)), v


class MlaAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with the key/value projection written out.

    vLLM folds kv_b_proj into the query when it decodes; that is the same product in another order. DeepSeek's YaRN also
    multiplies the softmax scale by the squared magnitude of `mscale_all_dim`.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config, H = config, config.hidden_size
        self.nope, self.rope, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        width, heads = self.nope + self.rope, config.num_heads
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(2 * H, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        else:
            self.q_proj = nn.Linear(2 * H, heads * width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * H, config.kv_lora_rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.v_dim, H, bias=False)
        rope = config.rope_parameters
        self.rotary = Rotary(self.rope, rope, deepseek=True)
        self.scale = width**-0.5
        if rope.get("rope_type", "default") != "default" and rope.get("attention_factor") != 1.0:
            self.scale *= yarn_magnitude(float(rope["factor"]), float(rope.get("mscale_all_dim") or 0)) ** 2

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [M, 2H] -> [M, h, nope + rope]."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.config.q_lora_rank else self.q_proj(x)
        q_nope, q_rope = q.unflatten(-1, (-1, self.nope + self.rope)).split([self.nope, self.rope], dim=-1)
        return torch.cat((q_nope, self.rotary.rotate(q_rope, self.rotary.tables(positions))), dim=-1)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, 2H] -> keys [T, h, nope + rope] and values [T, h, v_head_dim]; all heads share the rotary part."""
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, self.rope], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, self.nope + self.v_dim))
        k_nope, v = both.split([self.nope, self.v_dim], dim=-1)
        k_rope = self.rotary.rotate(k_rope[:, None], self.rotary.tables(positions))
        return torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1)), dim=-1), v


def attend(
    q: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], mask: Tensor, scale: float
) -> Tensor:
    """Attention of M chains: softmax over step 0's keys where `mask` allows, and over each chain's own later keys.

    q [M, h, D]; base keys [T, g, D] and values [T, g, Dv]; own: per later step [M, g, D] and [M, g, Dv];
    mask [M, T] bool. Returns [M, h * Dv]. The later keys enter as one column each instead of an M x M block.
    """
    (k0, v0), M = base, q.shape[0]
    q = q.unflatten(1, (k0.shape[1], -1)) * scale  # [M, g, h/g, D]
    scores = torch.einsum("mgrd,tgd->gmrt", q, k0).masked_fill(~mask[None, :, None], float("-inf"))
    diagonal = [torch.einsum("mgrd,mgd->gmr", q, k)[..., None] for k, _ in own]
    weights = torch.cat([scores, *diagonal], dim=-1).float().softmax(-1).to(v0.dtype)
    out = torch.einsum("gmrt,tgd->mgrd", weights[..., : k0.shape[0]], v0)
    for i, (_, v) in enumerate(own):
        out = out + torch.einsum("gmr,mgd->mgrd", weights[..., k0.shape[0] + i], v)
    return out.reshape(M, -1)


def row_mask(documents: Tensor, origins: Tensor) -> Any:
    """Flex attention's block mask [M, T] of a row: an origin sees its own document up to itself. Made once a row, for all steps."""
    from torch.nn.attention.flex_attention import create_block_mask

    of_origin = documents[origins]

    def seen(_batch: Tensor, _head: Tensor, m: Tensor, key: Tensor) -> Tensor:
        return (documents[key] == of_origin[m]) & (key <= origins[m])

    on_gpu = documents.is_cuda
    return create_block_mask(seen, None, None, len(origins), len(documents), device=documents.device, _compile=on_gpu)


def attend_flex(
    q: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], mask: Any, scale: float
) -> Tensor:
    """`attend` with PyTorch's flex attention over step 0's keys, which never holds an M x T matrix: for long rows on a GPU.

    `mask` from `row_mask`. The chains' own keys are one score each, joined to the rest by its log-sum-exp, so that every step runs
    the same kernel on the same shapes: compiled once.
    """
    from torch.nn.attention.flex_attention import flex_attention

    run = _compiled(flex_attention) if q.is_cuda else flex_attention
    k0, v0 = (x.to(q.dtype) for x in base)
    grouped = [x.transpose(0, 1)[None] for x in (q, k0, v0)]  # [1, heads, N, D]
    enable = q.shape[1] != k0.shape[1]
    out, lse = run(*grouped, block_mask=mask, scale=scale, enable_gqa=enable, return_lse=True)
    out, lse = out[0].transpose(0, 1), lse[0].T  # [M, h, Dv], [M, h]
    if not own:
        return out.flatten(1)
    per_group = q.unflatten(1, (k0.shape[1], -1))  # [M, g, h/g, D]
    # One key a chain: a product and a sum; as a batched matrix product of one column each it is ten times slower on a GPU.
    scores = [(per_group * k.to(q.dtype)[:, :, None]).sum(-1, dtype=torch.float32).flatten(1) * scale for k, _ in own]
    weights = torch.stack([lse.float(), *scores], dim=-1).softmax(-1).to(out.dtype)  # [M, h, 1 + steps]
    joined = out * weights[..., :1]
    for i, (_, v) in enumerate(own, 1):
        joined = joined + weights[..., i : i + 1] * v.to(out.dtype).repeat_interleave(per_group.shape[2], dim=1)
    return joined.flatten(1)


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)
