"""A head on disk, in the plain format that vLLM (or SGLang) loads, or in speculators': `config.json` and `model.safetensors`.

Tensors are named as the loaders read them (`layers.0.*`, no `model.` prefix); the embedding is left out, since the server
shares the target's (speculators keeps it in the head). `check_head` holds a folder against the reader's contract before anything large is loaded.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_eagle.eagle3 import speculators_format
from kimi_eagle.eagle3.contract import check_head
from kimi_eagle.eagle3.format import LAYER_NAMES, config_from_json, config_json, known_reader, read_config, reader_of
from kimi_eagle.eagle3.model import Head
from kimi_eagle.errors import BadInput

if TYPE_CHECKING:
    from kimi_eagle.target import Target

__all__ = ["check_head", "convert", "export", "load", "map_tensors", "replace_folder"]


def export(
    head: Head,
    folder: Path,
    target: "Target | None" = None,
    *,
    reader: str = "vllm",
    dtype: str = "float32",
    note: dict | None = None,
) -> Path:
    """Write `head` into `folder` (replaced as a whole at the end, so no reader sees half of it) and return the folder.

    `reader`: "vllm", "sglang" or "speculators". `target` gives the special token ids; `note` is kept under `kimi_eagle` in config.json (provenance). BadInput where the
    written folder would break the reader's contract, or the reader's format cannot express the head.
    """
    special = {k: target.text_config.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")} if target else {}
    known_reader(reader)
    written = config_json(head.config, reader, dtype, special)
    values = dict(head.state_dict())
    if reader == "speculators":
        if target is None:
            raise BadInput("speculators: its format names the head's target, which its loader opens; give the target.")
        place = target.name if "/" in target.name else str(target.path)
        written = speculators_format.nested(written, place, [target.architecture])
        values["embed_tokens.weight"] = head.embedding
    written |= {"kimi_eagle": note} if note else {}
    tensors = {
        name.replace("layers.0.", LAYER_NAMES[reader]): value.detach().to("cpu", getattr(torch, dtype)).contiguous()
        for name, value in values.items()
    }
    if head.config.has_map:
        tensors |= map_tensors(head)
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        os.chmod(partial, 0o755)  # mkdtemp's folders are private
        (partial / "config.json").write_text(json.dumps(written, indent=2))
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        if faults := check_head(partial, target, reader):
            raise BadInput(f"head {folder.name}: not written, since {faults[0]}")
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def map_tensors(head: Head) -> dict[str, Tensor]:
    """d2t [Vd] int64 offsets and t2d [V] bool of a head with a cut vocabulary."""
    ids = head.target_ids.cpu()
    t2d = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def replace_folder(partial: Path, folder: Path) -> None:
    """Put `partial` in the place of `folder`; an older one is moved aside first and removed last."""
    aside = folder.with_name(f".{folder.name}-old-{os.getpid()}")
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def load(folder: Path, target: "Target") -> Head:
    """The head in `folder`, float32 on the CPU, with the target's embedding; BadInput where it breaks the contract."""
    folder = Path(folder)
    written = read_config(folder)
    if faults := check_head(folder, target, reader_of(written)):
        raise BadInput(f"head {folder.name}: {faults[0]}")
    tensors = load_file(folder / "model.safetensors")
    d2t = tensors.pop("d2t", None)
    for name in ("t2d", "embed_tokens.weight"):
        tensors.pop(name, None)
    head = Head(config_from_json(written), target.load_tensor("embed_tokens").float(), d2t)
    head.load_state_dict({n.replace("midlayer.", "layers.0."): t.float() for n, t in tensors.items()})
    return head.eval()


def convert(source: Path, folder: Path, target: "Target", reader: str) -> Path:
    """Write the head of `source` into `folder` for another `reader`, in its own dtype and with its provenance."""
    written = read_config(source)
    dtype = written.get("torch_dtype") or written.get("dtype") or "bfloat16"
    return export(load(source, target), folder, target, reader=reader, dtype=dtype, note=written.get("kimi_eagle"))
