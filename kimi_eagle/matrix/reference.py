"""What every cell is held against: prompts, and the states that Hugging Face computes for them here, once."""

import json
import shutil
from pathlib import Path

from kimi_eagle import made_targets
from kimi_eagle.layer_ids import default_auxiliary

TARGETS = ("smollm2", "tiny-kimi")
LENGTHS = (17, 5, 64, 33, 1, 150, 48, 21)  # tokens; the longest is cut by a step budget of CHUNK_TOKENS
CHUNK_TOKENS = 128


def prepare(name: str, folder: Path) -> Path:
    """Folder with the checkpoint as every release can read it, the prompts, and the reference states; made once."""
    work = folder / name
    if (work / "complete").exists():
        return work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    checkpoint = _portable(made_targets.make(name), work / "checkpoint")
    _reference(name, checkpoint, work)
    (work / "complete").touch()
    return work


def _portable(source: Path, target: Path) -> Path:
    """A copy by links that transformers 4 reads as well: it ignores `rope_parameters` and has no class TokenizersBackend."""
    target.mkdir()
    for file in source.iterdir():
        if file.name not in ("config.json", "tokenizer_config.json"):
            (target / file.name).symlink_to(file.resolve())
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    config = json.loads((source / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    config |= {key: rope[key] for key in ("rope_theta",) if key in rope and key not in config}
    config.setdefault("torch_dtype", config.get("dtype", "float32"))
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def _reference(name: str, checkpoint: Path, work: Path) -> None:
    """`prompts.json` {layer_ids, prompts} and `reference.safetensors` {str(i): [T, S, H]}, float32."""
    import torch
    from safetensors.torch import save_file

    model = _model(name, checkpoint)
    layers = model.model.layers
    ids = [*default_auxiliary(len(layers)), len(layers)]
    random = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size, 1792 if name == "tiny-kimi" else 40000)
    prompts = [torch.randint(10, vocabulary, (n,), generator=random).tolist() for n in LENGTHS]
    kept: dict[int, torch.Tensor] = {}
    for k in ids[:-1]:
        layers[k].register_forward_pre_hook(lambda _, args, k=k: kept.__setitem__(k, args[0]))
    layers[-1].register_forward_hook(
        lambda _, __, out: kept.__setitem__(ids[-1], out[0] if isinstance(out, tuple) else out)
    )
    states = {}
    with torch.no_grad():
        for index, prompt in enumerate(prompts):
            model(torch.tensor([prompt]))
            states[str(index)] = torch.stack([kept[k].reshape(len(prompt), -1) for k in ids], dim=1).contiguous()
    save_file(states, work / "reference.safetensors")
    (work / "prompts.json").write_text(json.dumps({"layer_ids": ids, "prompts": prompts}))


def _model(name: str, checkpoint: Path):
    if name == "tiny-kimi":
        from kimi_eagle.tiny_kimi import text_model

        return text_model(checkpoint)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
