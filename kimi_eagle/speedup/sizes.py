"""What one decode step of a target or a draft must read and compute on each GPU, from its configuration."""

from dataclasses import dataclass
from typing import Any

# The text model of Kimi-K2, K2.5 and K2.6 (DeepSeek-V3 classes), as their model cards and configurations give it.
KIMI_K2: dict[str, Any] = {
    "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 1, "num_attention_heads": 64, "vocab_size": 163840,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Per GPU: dense_bytes read in every step, expert_bytes of one routed expert, flops of a token, kv_bytes per token of context.

    message_bytes: an AllReduce's message per token; allreduces: how many a step has.
    """

    dense_bytes: float
    flops: float
    kv_bytes: float
    layers: int
    allreduces: int
    message_bytes: float
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: float = 0.0


def target_sizes(
    config: dict[str, Any],
    gpus: int = 1,
    *,
    weight_bytes: float = 2.0,
    expert_bits: float = 16.0,
    kv_element_bytes: float = 2.0,
) -> Sizes:
    """Sizes of a target (its text configuration) under tensor parallelism over `gpus`.

    weight_bytes: of an element of all but the routed experts, and of activations; expert_bits: of a routed expert's weight, scales
    included (INT4 in groups of 32 with a 16-bit scale: 4.5). AllReduces: two a layer and one after the embedding, which a trace
    of vLLM made here shows (61 a step for 30 layers).
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = config.get("n_routed_experts") or 0
    moe_layers = layers - (config.get("first_k_dense_replace") or 0) if experts else 0
    split, whole, kv = _attention(config, hidden, gpus)
    expert = 3 * hidden * (config.get("moe_intermediate_size") or 0)
    shared = (config.get("n_shared_experts") or 0) * expert
    dense_mlp = 3 * hidden * config["intermediate_size"]
    head = hidden * config["vocab_size"]
    split_parameters = layers * split + moe_layers * shared + (layers - moe_layers) * dense_mlp + head
    gates = moe_layers * hidden * experts
    active = config.get("num_experts_per_tok") or 0
    per_gpu = split_parameters / gpus + layers * whole + gates
    return Sizes(
        dense_bytes=per_gpu * weight_bytes,
        flops=2 * (per_gpu + moe_layers * active * expert / gpus),
        kv_bytes=layers * kv * kv_element_bytes,
        layers=layers,
        allreduces=2 * layers + 1 if gpus > 1 else 0,
        message_bytes=hidden * weight_bytes,
        moe_layers=moe_layers,
        experts=experts,
        experts_per_token=active,
        expert_bytes=expert * expert_bits / 8 / gpus,
    )


def draft_sizes(
    config: dict[str, Any], gpus: int = 1, *, attention: str = "mla", draft_vocab: int = 0, intermediate: int = 0, layers: int = 1,
    aux_states: int = 3, weight_bytes: float = 2.0,
) -> Sizes:  # fmt: skip
    """Sizes of an EAGLE-3 head for the target `config`: fc over the states, attention on twice the width, a dense MLP, a head.

    draft_vocab 0: the target's whole vocabulary; intermediate 0: the target's dense one.
    """
    hidden = config["hidden_size"]
    own = dict(config, intermediate_size=intermediate or config["intermediate_size"])
    if attention != "mla":
        own = {k: v for k, v in own.items() if k != "kv_lora_rank"}
    split, whole, kv = _attention(own, hidden, gpus, inputs=2 * hidden)
    mlp = 3 * hidden * own["intermediate_size"]
    head = hidden * (draft_vocab or config["vocab_size"])
    fc = aux_states * hidden * hidden
    per_gpu = (layers * (split + mlp) + head) / gpus + layers * whole + fc  # vLLM keeps fc whole on every rank
    return Sizes(
        dense_bytes=per_gpu * weight_bytes, flops=2 * per_gpu, kv_bytes=layers * kv * weight_bytes, layers=layers,
        allreduces=2 * layers + 1 if gpus > 1 else 0, message_bytes=hidden * weight_bytes,
    )  # fmt: skip


def _attention(config: dict[str, Any], hidden: int, gpus: int, inputs: int = 0) -> tuple[float, float, float]:
    """(parameters split over GPUs, parameters whole on each, cached elements per token and layer on each GPU) of one layer."""
    inputs, heads = inputs or hidden, config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        latent, query = config["kv_lora_rank"], config.get("q_lora_rank") or 0
        split = latent * heads * (nope + value) + heads * value * hidden + (query or inputs) * heads * (nope + rope)
        whole = inputs * (latent + rope) + inputs * query
        return split, whole, latent + rope  # each rank holds the whole latent cache
    width = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    split = inputs * width * (heads + 2 * groups) + heads * width * hidden
    return split, 0.0, 2 * width * max(groups / gpus, 1)
