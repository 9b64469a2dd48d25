"""What a head folder must be for its reader; the faults found in the field (wrong or lost) are silent when serving."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from kimi_eagle.eagle3 import speculators_format
from kimi_eagle.eagle3.config import HeadConfig, rope_of
from kimi_eagle.eagle3.format import LAYER_NAMES, config_from_json, known_reader, read_config
from kimi_eagle.eagle3.model import Head
from kimi_eagle.errors import BadInput
from kimi_eagle.layer_ids import meaning, to_vllm
from kimi_eagle.vocab_map import consistency

if TYPE_CHECKING:
    from kimi_eagle.target import Target

LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
MLA = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
OPTIONAL = ("d2t", "t2d", "embed_tokens.weight")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = speculators_format.IDS


def check_head(path: str | Path, target: "Target | None" = None, reader: str = "vllm") -> list[str]:
    """Every breach of the contract of `reader` ("vllm", "sglang" or "speculators"), one sentence each; an empty list is a sound head.

    With `target`, what must agree with it is checked too: vocabulary, widths, positions, RoPE, layer ids.
    """
    folder = Path(path)
    try:
        written = read_config(folder)
    except BadInput as error:
        return [str(error)]
    known_reader(reader)
    if speculators_format.is_nested(written) != (reader == "speculators"):
        found = "speculators' format (which vLLM reads too)" if reader != "speculators" else "the plain format"
        return [
            f"config.json is in {found}, not in the one for {reader}: check it for the other, or export the head again."
        ]
    faults = [f"config.json: {key} is null, which servers reject; leave the key out." for key in _nulls(written)]
    if reader == "speculators":
        faults += [f"config.json: {f}" for f in speculators_format.faults(written)]
    written = speculators_format.plain(written)
    faults += [f"config.json: {f}" for f in _config_faults(written, reader)]
    if target is not None:
        faults += [f"config.json: {f}" for f in _target_faults(written, target)]
    try:
        config = config_from_json(written)
    except (BadInput, ValueError, TypeError) as error:
        return [*faults, str(error)]
    faults += [f"model.safetensors: {f}" for f in _tensor_faults(folder, config, reader)]
    return faults


def _config_faults(written: dict[str, Any], reader: str) -> list[str]:
    faults = []
    architecture, kind = (written.get("architectures") or [""])[0], written.get("model_type")
    if architecture not in LLAMA + MLA:
        faults.append(f"architecture {architecture!r} is none of {', '.join(LLAMA + MLA)}.")
    elif architecture in MLA and kind != "deepseek_v2":
        faults.append(f"model_type {kind!r}: vLLM rewrites deepseek_v3 to an MTP model; an MLA head needs deepseek_v2.")
    elif architecture in LLAMA and kind != "llama":
        faults.append(f"model_type {kind!r}: a Llama head needs llama.")
    if "quantization_config" in written:
        faults.append(
            "quantization_config is present: the head's tensors are plain, and the target's entry must not be inherited."
        )
    if written.get("tie_word_embeddings", False):
        faults.append("tie_word_embeddings is true: lm_head would be taken for the embedding.")
    if not written.get("max_position_embeddings"):
        faults.append("max_position_embeddings is missing: the server assumes 2048.")
    return faults + _id_faults(written, reader)


def _id_faults(written: dict[str, Any], reader: str) -> list[str]:
    outer, inner = written.get(IDS), (written.get("eagle_config") or {}).get(IDS)
    if not outer or not inner:
        where = "at the top level" if not outer else "inside eagle_config"
        return [f"{IDS} is missing {where}: the server would capture its default layers or size fc for three states."]
    faults = []
    if outer != inner:
        both = f"{_taken(outer)}; {_taken(inner)}"
        faults.append(f"{IDS} at the top level {outer} and inside eagle_config {inner} differ ({both}).")
    convention = written.get("layer_id_convention")
    if convention != reader:
        faults.append(
            f"layer_id_convention is {convention!r} but {reader} reads its own: the head could get other layers' states "
            f"({_taken(inner)})."
        )
    if written.get("num_aux_hidden_states", len(inner)) != len(inner):
        faults.append(f"num_aux_hidden_states {written['num_aux_hidden_states']} does not fit {len(inner)} layer ids.")
    return faults


def _taken(ids: list[int]) -> str:
    """Which tensors each reader takes for `ids`."""
    return "; ".join(f"{ids} for {reader}: {meaning(ids, reader)}" for reader in ("vllm", "sglang"))


def _target_faults(written: dict[str, Any], target: "Target") -> list[str]:
    text, faults = target.text_config, []
    if written.get("vocab_size") != target.vocab_size:
        faults.append(f"vocab_size {written.get('vocab_size')} is not the target's {target.vocab_size}.")
    width = written.get("target_hidden_size", written.get("hidden_size"))
    if width != target.hidden_size:
        faults.append(f"target_hidden_size {width} is not the target's {target.hidden_size}.")
    positions = int(text.get("max_position_embeddings", 0))
    if written.get("max_position_embeddings", 0) < positions:
        faults.append(
            f"max_position_embeddings {written.get('max_position_embeddings')} is below the target's {positions}."
        )
    ours, theirs = rope_of(written), rope_of(text)
    if ours["rope_type"] != theirs["rope_type"]:
        faults.append(
            f"RoPE is {ours['rope_type']!r} but the target's is {theirs['rope_type']!r}: rope_scaling was lost or replaced."
        )
    convention = written.get("layer_id_convention", "vllm")
    ids = to_vllm(written.get(IDS) or [], convention if convention in LAYER_NAMES else "vllm")
    if any(not 0 <= i <= target.num_layers for i in ids):
        faults.append(f"{IDS}: vLLM ids {ids} do not all exist in a target of {target.num_layers} layers.")
    return faults


def _tensor_faults(folder: Path, config: HeadConfig, reader: str) -> list[str]:
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except Exception as error:  # missing, truncated, or of another format: safetensors has its own error types
        return [f"cannot be read ({type(error).__name__}); export the head again."]
    expected = expected_tensors(config, reader)
    names = set(tensors) - set(OPTIONAL)
    faults = [f"{n} is missing." for n in sorted(set(expected) - names)]
    faults += [f"{n} is not a name that {reader} loads." for n in sorted(names - set(expected))]
    for name in sorted(names & set(expected)):
        found = tensors[name]
        if tuple(found.shape) != expected[name]:
            faults.append(f"{name} has shape {tuple(found.shape)} where {expected[name]} is expected.")
        elif found.dtype not in FLOATS:
            faults.append(f"{name} is {found.dtype}, not a floating type.")
        elif not torch.isfinite(found).all():
            faults.append(f"{name} holds values that are not finite.")
    faults += _map_faults(tensors, config)
    if reader == "speculators" and config.has_map and "t2d" not in tensors:
        faults.append("t2d is missing: speculators needs it beside d2t.")
    own = tensors.get("embed_tokens.weight")
    if own is None and config.hidden_size != config.target_hidden_size:
        faults.append("embed_tokens.weight is missing, and the target's embedding has another width.")
    if own is not None and (reader == "sglang" or tuple(own.shape) != (config.vocab_size, config.hidden_size)):
        faults.append(f"embed_tokens.weight of shape {tuple(own.shape)} does not belong there for {reader}.")
    return faults


def _map_faults(tensors: dict[str, torch.Tensor], config: HeadConfig) -> list[str]:
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if not config.has_map:
        return (
            ["d2t is present although the draft vocabulary is the target's; leave it out."] if d2t is not None else []
        )
    if d2t is None:
        return ["d2t is missing: the server keeps zeros and takes draft ids for target ids."]
    if len(d2t) != config.draft_vocab_size:
        return [f"d2t has {len(d2t)} entries for a draft vocabulary of {config.draft_vocab_size}."]
    return [f"{fault}." for fault in consistency(d2t, t2d, config.vocab_size)]


def expected_tensors(config: HeadConfig, reader: str = "vllm") -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that `reader` needs for a head of this config (maps and embedding apart)."""
    with torch.device("meta"):
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        state = Head(config, torch.empty(config.vocab_size, config.hidden_size), offsets).state_dict()
    return {n.replace("layers.0.", LAYER_NAMES[reader]): tuple(t.shape) for n, t in state.items()}


def _nulls(value: Any, prefix: str = "") -> list[str]:
    """Dotted names of the entries that are null."""
    if not isinstance(value, dict):
        return [prefix] if value is None else []
    return [name for key, inner in value.items() for name in _nulls(inner, f"{prefix}.{key}" if prefix else key)]
