"""config.json of a head: written for a reader, and read back.

The layer ids stand at the top level *and* inside `eagle_config`: vLLM takes what it captures from the first and sizes `fc`
from the second. No entry is null.
"""

import json
from pathlib import Path
from typing import Any

from kimi_eagle.eagle3 import speculators_format
from kimi_eagle.eagle3.config import MLA_FIELDS, HeadConfig, rope_of
from kimi_eagle.eagle3.speculators_format import FLAGS
from kimi_eagle.errors import BadInput
from kimi_eagle.layer_ids import from_vllm, to_vllm

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
MODEL_TYPES = {
    "llama": "llama",
    "mla": "deepseek_v2",
}  # vLLM turns deepseek_v3 into an MTP model, whatever its architecture
LAYER_NAMES = {"vllm": "layers.0.", "sglang": "midlayer.", "speculators": "layers.0."}  # one entry a reader


def config_json(
    config: HeadConfig, reader: str = "vllm", dtype: str = "bfloat16", special: dict[str, Any] | None = None
) -> dict:
    """config.json of a head in the plain form, the layer ids in the convention of `reader` (a key of LAYER_NAMES), without nulls."""
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    ids = from_vllm(config.layer_ids, reader)
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.attention]],
        "model_type": MODEL_TYPES[config.attention],
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "num_aux_hidden_states": config.num_aux,
        "eagle_aux_hidden_state_layer_ids": ids,
        "layer_id_convention": reader,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        **{flag: getattr(config, flag) for flag in FLAGS},
    }
    if config.norm_before_fc:
        written["eagle_config"]["norm_before_fc"] = True
    if kind != "default":
        # transformers 4's keys; transformers 5 converts them, the other way round does not work
        written["rope_scaling"] = {"rope_type": kind, **rope}
    if config.attention == "llama":
        written["head_dim"] = config.head_dim
    else:
        # without routed experts: the head's MLP is dense
        written |= {k: getattr(config, k) for k in MLA_FIELDS} | {"first_k_dense_replace": 1, "moe_layer_freq": 1}
    return {k: v for k, v in (written | (special or {})).items() if v is not None}


def config_from_json(written: dict[str, Any]) -> HeadConfig:
    """The HeadConfig that a config.json describes; BadInput where it lacks something."""
    written = speculators_format.plain(written)
    architecture = (written.get("architectures") or [""])[0]
    attention = "mla" if "Deepseek" in architecture else "llama"
    inner = written.get("eagle_config") or {}
    ids = written.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    try:
        heads, hidden = written["num_attention_heads"], written["hidden_size"]
        head_dim = written.get("head_dim", hidden // heads)
        if attention == "mla":
            head_dim = written["qk_nope_head_dim"] + written["qk_rope_head_dim"]
        return HeadConfig(
            attention=attention,
            hidden_size=hidden,
            target_hidden_size=written.get("target_hidden_size", hidden),
            intermediate_size=written["intermediate_size"],
            num_heads=heads,
            num_kv_heads=written.get("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=written["rms_norm_eps"],
            rope_parameters=rope_of(written),
            max_position_embeddings=written["max_position_embeddings"],
            vocab_size=written["vocab_size"],
            draft_vocab_size=written.get("draft_vocab_size", written["vocab_size"]),
            layer_ids=tuple(to_vllm(ids or (), written.get("layer_id_convention", "vllm"))),
            norm_before_fc=bool(inner.get("norm_before_fc", written.get("norm_before_fc", False))),
            **{flag: bool(written.get(flag, False)) for flag in FLAGS if flag != "norm_before_fc"},
            **(
                {k: written.get(k) or (None if k == "q_lora_rank" else 0) for k in MLA_FIELDS}
                if attention == "mla"
                else {}
            ),
        )
    except KeyError as missing:
        raise BadInput(f"head config.json: lacks {missing}; export the head again.") from None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head folder; BadInput where there is none or it is not JSON."""
    try:
        written = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise BadInput(f"head {folder.name}: no config.json in the folder.") from None
    except ValueError as error:
        raise BadInput(f"head {folder.name}: config.json is not JSON ({error}).") from None
    if not isinstance(written, dict):
        raise BadInput(f"head {folder.name}: config.json is not a JSON object.")
    return written


def reader_of(written: dict[str, Any]) -> str:
    """Whom a config.json was written for."""
    if speculators_format.is_nested(written):
        return "speculators"
    return "sglang" if written.get("layer_id_convention") == "sglang" else "vllm"


def known_reader(reader: str) -> None:
    """BadInput for a reader that is none of LAYER_NAMES."""
    if reader not in LAYER_NAMES:
        raise BadInput(f"reader {reader!r}: use one of {', '.join(LAYER_NAMES)}.")
