"""What lies in a store's folder: rows, where they lie, the manifest, the index and the checksums."""

import contextlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open

from kimi_eagle.durable import verified
from kimi_eagle.errors import BadInput

SCHEMA = 2
NAMES = ("token_ids", "loss_mask", "hidden_states")


class Row(NamedTuple):
    """One sample: token_ids [T] int32, loss_mask [T] bool (True where the token is an answer's), hidden_states [T, S, H]."""

    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a row lies: its shard's file name, its token range in it, and the sum over its bytes (`row_sum`)."""

    sample_id: str
    shard: str
    start: int
    end: int
    xxh3: str


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


def row_sum(token_ids: torch.Tensor, loss_mask: torch.Tensor, hidden_states: torch.Tensor) -> str:
    """XXH3 of 64 bits over a row's bytes, in hexadecimal: a changed byte stays unseen once in 2^64, at the speed of memory."""
    digest = xxhash.xxh3_64()
    for tensor in (token_ids, loss_mask, hidden_states):
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def frame_crc32(path: Path) -> int:
    """CRC-32 over what the rows' own sums leave out of a shard's file: its header, and the tensor `offsets`."""
    with open(path, "rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        begin, end = json.loads(header)["offsets"]["data_offsets"]
        file.seek(begin, os.SEEK_CUR)
        return zlib.crc32(file.read(end - begin), zlib.crc32(length + header))


def is_finite(states: torch.Tensor) -> bool:
    """Whether no value of a contiguous floating tensor is NaN or infinite.

    By its bits: both have all exponent bits set, so read as integers they are the largest, with the sign as the top bit. Two maxima
    of numpy cost a thirtieth of `torch.isfinite` on 16 bits, and no team of threads in each thread that writes.
    """
    if not states.numel():
        return True
    bits = states.dtype.itemsize * 8
    integer = getattr(torch, f"int{bits}")
    values = states.view(integer).numpy()
    infinite = int(torch.tensor(float("inf"), dtype=states.dtype).view(integer))
    return bool(values.max() < infinite and values.view(f"uint{bits}").max() < infinite + (1 << (bits - 1)))


def shard_fault(folder: Path, shard: dict[str, Any], every_byte: bool = True) -> str:
    """What is wrong with an indexed shard's file, or ""; `every_byte` False: by its size alone, which a cut file lacks."""
    path = folder / shard["shard"]
    if not path.is_file():
        return "missing"
    whole = path.stat().st_size == shard["bytes"]
    if whole and every_byte:
        whole = False
        with contextlib.suppress(Exception):  # a broken header: it may name anything
            whole = frame_crc32(path) == shard["frame_crc32"] and len(whole_rows(folder, shard)) == len(shard["rows"])
    return "" if whole else "changed or cut since it was written"


def whole_rows(folder: Path, shard: dict[str, Any]) -> list[Row]:
    """The rows of a shard whose own bytes still fit their checksums (views of the mapped file); none where it cannot be read."""
    rows = []
    # A broken header ends in safetensors' own error types, or names slices that do not exist or cannot be summed.
    with contextlib.suppress(Exception), safe_open(folder / shard["shard"], "pt") as file:
        for e in shard["rows"]:
            row = Row(e["sample_id"], *(file.get_slice(name)[e["start"] : e["end"]] for name in NAMES))
            if row_sum(*row[1:]) == e["xxh3"]:
                rows.append(row)
    return rows


def unindexed(folder: Path, shards: list[dict[str, Any]]) -> list[Path]:
    """Shard files that the index does not name: of a kill between the two, or of an index that was cut."""
    named = {s["shard"] for s in shards}
    return sorted(p for p in folder.glob("shard-*.safetensors") if p.name not in named)
