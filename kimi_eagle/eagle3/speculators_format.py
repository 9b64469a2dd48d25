"""config.json in speculators' own format, which vLLM reads too: the decoder layer's config nested, the method's beside it.

The tensors are the plain ones, and the embedding, which speculators keeps in the head. Its drafts have Llama's or Qwen3's
attention; latent attention cannot be said in it.
"""

from typing import Any

from kimi_eagle.errors import BadInput

VERSION = "0.9.0"  # of the library whose loader the tests hold this against
PROPOSED = 3  # tokens drafted a step where the one who serves says nothing else
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BESIDE = (*FLAGS, "draft_vocab_size", IDS)  # keys that stand outside the nested layer's config


def nested(plain: dict[str, Any], verifier: str, architectures: list[str]) -> dict[str, Any]:
    """The plain config.json `plain` of a Llama head in speculators' format.

    `verifier`: the target's Hub name or folder, which speculators' loader and `vllm serve HEAD` open; `architectures`: the
    target's. BadInput for a head that the format cannot say.
    """
    if plain["model_type"] != "llama":
        raise BadInput("speculators: its format has no head with latent attention (MLA); export it for vllm or sglang.")
    if plain["target_hidden_size"] != plain["hidden_size"]:
        raise BadInput("speculators: its format has no head of another width than its target; export it for vllm.")
    left = {*BESIDE, "architectures", "eagle_config", "layer_id_convention", "torch_dtype", "target_hidden_size"}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": PROPOSED}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        **{key: plain[key] for key in (*BESIDE, "target_hidden_size", "torch_dtype")},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        # vLLM sizes fc from num_aux_hidden_states, which it finds only inside
        "transformer_layer_config": {key: value for key, value in plain.items() if key not in left},
    }


def is_nested(written: dict[str, Any]) -> bool:
    """True where a config.json is in speculators' format."""
    return "speculators_model_type" in written


def plain(written: dict[str, Any]) -> dict[str, Any]:
    """A config.json of either format in the plain form."""
    if not is_nested(written):
        return written
    layer, ids = written.get("transformer_layer_config") or {}, written.get(IDS)
    kept = {key: written[key] for key in (*BESIDE, "target_hidden_size", "torch_dtype") if written.get(key) is not None}
    return {
        **{key: value for key, value in layer.items() if value is not None},
        **kept,
        "architectures": [f"Eagle3{str(layer.get('model_type', 'llama')).capitalize()}ForCausalLM"],
        "model_type": layer.get("model_type", "llama"),
        "tie_word_embeddings": written.get("tie_word_embeddings", False),
        "eagle_config": {IDS: ids},
        "layer_id_convention": "speculators",
    }


def faults(written: dict[str, Any]) -> list[str]:
    """What is wrong with the parts of a config.json that speculators' format has and the plain one has not."""
    kind, found = written["speculators_model_type"], []
    if kind != "eagle3":
        found.append(f"speculators_model_type {kind!r}: only eagle3 is known here.")
    if not isinstance(written.get("transformer_layer_config"), dict):
        found.append("transformer_layer_config is missing: the decoder layer has no shape.")
    if "norm_before_residual" not in written:
        found.append("norm_before_residual is missing: vLLM takes true for it and speculators false.")
    method = written.get("speculators_config")
    try:
        if not method["proposal_methods"][0]["speculative_tokens"] or not method["verifier"]["name_or_path"]:
            raise KeyError
    except (KeyError, IndexError, TypeError):
        found.append(
            "speculators_config lacks proposal_methods with speculative_tokens, or verifier with name_or_path."
        )
    return found
