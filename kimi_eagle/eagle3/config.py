"""The shape of an EAGLE-3 head: one validated record from which the model, its size and its exported config.json follow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kimi_eagle.errors import BadInput
from kimi_eagle.layer_ids import checked_auxiliary

if TYPE_CHECKING:
    from kimi_eagle.target import Target

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MLA_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class HeadConfig(BaseModel):
    """One decoder layer, its input projection and its output matrix (names as in vLLM's llama_eagle3 / deepseek_eagle3)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attention: Literal["llama", "mla"] = "llama"
    hidden_size: int = Field(gt=0, description="draft width H; equal to the target's where the embedding is shared")
    target_hidden_size: int = Field(gt=0, description="target width Ht")
    intermediate_size: int = Field(gt=0, description="width of the dense gated MLP")
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0, description="key/value heads (Llama attention)")
    head_dim: int = Field(gt=0, description="width of a query head; MLA: nope and rotary part together")
    q_lora_rank: int | None = Field(None, description="MLA: rank of the query projection, None for a full one")
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rms_norm_eps: float = Field(1e-5, gt=0)
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = Field(gt=0, description="positions; never below the target's")
    vocab_size: int = Field(gt=0, description="target vocabulary V")
    draft_vocab_size: int = Field(gt=0, description="draft vocabulary Vd <= V")
    layer_ids: tuple[int, ...] = Field(description="vLLM ids of the auxiliary hidden states, ascending")
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @model_validator(mode="after")
    def _check(self) -> "HeadConfig":
        problems = []
        if self.draft_vocab_size > self.vocab_size:
            problems.append(f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.vocab_size}")
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            problems.append(f"layer_ids {self.layer_ids} must be ascending and distinct")
        if self.attention == "llama" and (self.num_heads % self.num_kv_heads or self.head_dim % 2):
            problems.append("num_kv_heads must divide num_heads and head_dim must be even")
        mla = (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        if self.attention == "mla" and not all(mla):
            problems.append("MLA needs kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim")
        if self.norm_before_fc and (self.fc_norm or self.attention == "mla"):
            problems.append("norm_before_fc excludes fc_norm, and vLLM's MLA head does not have it")
        kind = self.rope_parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            problems.append(f"rope_type {kind!r} is none of {', '.join(ROPE_TYPES)}")
        if problems:
            raise BadInput(f"head config: {'; '.join(problems)}.")
        return self

    @property
    def num_aux(self) -> int:
        """Number A of auxiliary hidden states that enter fc."""
        return len(self.layer_ids)

    @property
    def has_map(self) -> bool:
        """True where the draft vocabulary is a cut of the target's, so that d2t exists."""
        return self.draft_vocab_size != self.vocab_size

    def core_parameters(self) -> int:
        """Parameters without lm_head and embedding: fc, attention, MLP and norms."""
        H, two_h = self.hidden_size, 2 * self.hidden_size
        if self.attention == "llama":
            queries = self.num_heads * self.head_dim
            attention = two_h * (queries + 2 * self.num_kv_heads * self.head_dim) + queries * H
        else:
            per_head = self.qk_nope_head_dim + self.qk_rope_head_dim
            queries = self.num_heads * per_head
            if self.q_lora_rank:
                attention = two_h * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * queries
            else:
                attention = two_h * queries
            attention += two_h * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
            attention += self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
            attention += self.num_heads * self.v_head_dim * H
        fc_input = self.num_aux * self.target_hidden_size
        norms = 4 * H + (fc_input if self.fc_norm or self.norm_before_fc else 0)
        return fc_input * H + attention + 3 * H * self.intermediate_size + norms

    def parameters(self, with_embedding: bool = False) -> int:
        """Core and lm_head, and the embedding where it is the head's own (counted: it is not when shared with the target)."""
        return self.core_parameters() + (self.draft_vocab_size + with_embedding * self.vocab_size) * self.hidden_size

    def bytes(self, dtype: str = "bfloat16", with_embedding: bool = False) -> int:
        """Size of the served weights in bytes."""
        return self.parameters(with_embedding) * BYTES[dtype]


def for_target(
    target: "Target",
    attention: str = "llama",
    draft_vocab_size: int | None = None,
    layer_ids: Sequence[int] = (),
    **overrides: Any,
) -> HeadConfig:
    """The head that fits `target`: its width, heads, RoPE and positions; every field can be overridden by name.

    `layer_ids` are vLLM's, empty for the default. An MLA head needs a target with MLA, whose dimensions it takes; a Llama
    head for such a target has as many key/value as query heads of 128 (the shape of the published Kimi head).
    Raises BadInput where the two do not fit.
    """
    text = target.text_config
    is_mla = bool(text.get("kv_lora_rank"))
    if attention == "mla" and not is_mla:
        raise BadInput(f"head_attention 'mla': target {target.name} has no latent attention to follow; use 'llama'.")
    heads = int(text["num_attention_heads"])
    fields: dict[str, Any] = {
        "attention": attention,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": int(text["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": heads if is_mla else int(text.get("num_key_value_heads") or heads),
        "head_dim": 128 if is_mla else int(text.get("head_dim") or target.hidden_size // heads),
        "rms_norm_eps": float(text.get("rms_norm_eps", 1e-6)),
        "rope_parameters": rope_of(text),
        "max_position_embeddings": int(text.get("max_position_embeddings", 4096)),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size or target.vocab_size,
        "layer_ids": tuple(checked_auxiliary(layer_ids, target.num_layers)),
    }
    if attention == "mla":
        fields |= {k: text.get(k) for k in MLA_FIELDS}
        fields["head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    return HeadConfig(**(fields | overrides))


def rope_of(text: dict[str, Any]) -> dict[str, Any]:
    """RoPE of a text config in the form `{"rope_type", "rope_theta", ...}`, from the new (`rope_parameters`) or old keys."""
    rope = dict(text.get("rope_parameters") or {})
    scaling = dict(text.get("rope_scaling") or {})
    rope = {k: v for k, v in (scaling | rope).items() if v is not None}
    legacy = rope.pop("type", None)  # transformers 4 calls it "type"; checkpoints often carry both
    rope["rope_type"] = rope.get("rope_type") or legacy or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0)
    if rope["rope_type"].startswith("deepseek_"):
        rope["rope_type"] = "yarn"  # the name vLLM gives it in memory
    return rope
