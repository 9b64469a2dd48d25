"""What lies in a store's folder: rows, where they lie, the manifest, the index and the checksums."""

import contextlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from kimi_eagle.durable import file_crc32, verified
from kimi_eagle.errors import BadInput

SCHEMA = 1
NAMES = ("token_ids", "loss_mask", "hidden_states")


class Row(NamedTuple):
    """One sample: token_ids [T] int32, loss_mask [T] bool (True where the token is an answer's), hidden_states [T, S, H]."""

    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a row lies: its shard's file name, its token range in it, and the CRC-32 of its bytes."""

    sample_id: str
    shard: str
    start: int
    end: int
    crc32: int


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store folder; BadInput where it is missing, damaged or of another schema."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise BadInput(f"{folder.name}: no manifest.json, so it is not a hidden-state store.")
    manifest: Any = {}
    with contextlib.suppress(ValueError):
        manifest = json.loads(path.read_text())
    if not verified(manifest):
        raise BadInput(f"store {folder.name}: its manifest.json is damaged; restore it or extract again.")
    if manifest["schema"] != SCHEMA:
        raise BadInput(f"store {folder.name}: schema {manifest['schema']}, this version reads {SCHEMA}; extract again.")
    return manifest


def read_index(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The index's whole lines, and a fault for each torn or changed one and each shard file that none of them names."""
    path = folder / "index.jsonl"
    shards, faults = [], []
    with open(path, errors="replace") if path.is_file() else contextlib.nullcontext(()) as lines:
        for number, line in enumerate(lines, 1):
            entry: Any = None
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
            if isinstance(entry, dict) and verified(entry):
                shards.append(entry)
            else:
                faults.append(f"index.jsonl: line {number} is torn or changed")
    return shards, faults + [f"{p.name}: is not in the index" for p in unindexed(folder, shards)]


def row_crc32(token_ids: torch.Tensor, loss_mask: torch.Tensor, hidden_states: torch.Tensor) -> int:
    """CRC-32 over a row's bytes: it finds every single changed byte."""
    crc = 0
    for tensor in (token_ids, loss_mask, hidden_states):
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), crc)
    return crc


def shard_fault(folder: Path, shard: dict[str, Any], every_byte: bool = True) -> str:
    """What is wrong with an indexed shard's file, or ""; `every_byte` False: by its size alone, which a cut file lacks."""
    path = folder / shard["shard"]
    if not path.is_file():
        return "missing"
    whole = path.stat().st_size == shard["bytes"] and (not every_byte or file_crc32(path) == shard["crc32"])
    return "" if whole else "changed or cut since it was written"


def whole_rows(folder: Path, shard: dict[str, Any]) -> list[Row]:
    """The rows of a damaged shard whose own bytes still fit their checksums; none where the file cannot be read at all."""
    rows = []
    # A broken header ends in safetensors' own error types, or names slices that do not exist or cannot be summed.
    with contextlib.suppress(Exception), safe_open(folder / shard["shard"], "pt") as file:
        for e in shard["rows"]:
            row = Row(e["sample_id"], *(file.get_slice(name)[e["start"] : e["end"]] for name in NAMES))
            if row_crc32(*row[1:]) == e["crc32"]:
                rows.append(row)
    return rows


def unindexed(folder: Path, shards: list[dict[str, Any]]) -> list[Path]:
    """Shard files that the index does not name: of a kill between the two, or of an index that was cut."""
    named = {s["shard"] for s in shards}
    return sorted(p for p in folder.glob("shard-*.safetensors") if p.name not in named)
