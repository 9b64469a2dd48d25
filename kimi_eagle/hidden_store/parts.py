"""A store written in parts by several jobs, each in a folder of its own, and read as one."""

import re
import zlib
from pathlib import Path
from typing import Any

from kimi_eagle.errors import BadInput
from kimi_eagle.hidden_store.files import read_index, read_manifest

NAME = re.compile(r"part-(\d+)-of-(\d+)")


def part_name(number: int, count: int) -> str:
    """Folder name of part `number` (from 0) of `count`."""
    return f"part-{number:04d}-of-{count:04d}"


def part_of(sample_id: str, count: int) -> int:
    """The part that a sample belongs to: by its id alone, so that every job knows it without the others."""
    return zlib.crc32(sample_id.encode()) % count


def parts(folder: Path) -> list[Path]:
    """The folders of a store's parts in order; none where it is a single store. BadInput where one is not there."""
    found = {NAME.fullmatch(p.name): p for p in folder.iterdir() if p.is_dir()} if folder.is_dir() else {}
    found = {(int(m[2]), int(m[1])): p for m, p in found.items() if m}
    if not found:
        return []
    counts = sorted({count for count, _ in found})
    if len(counts) > 1:
        raise BadInput(
            f"store {folder.name}: parts of {counts[0]} and of {counts[1]}; keep those of one division only."
        )
    missing = [i for i in range(counts[0]) if not (found.get((counts[0], i), folder) / "manifest.json").is_file()]
    if missing:
        raise BadInput(f"store {folder.name}: {part_name(missing[0], counts[0])} is not there; extract it first.")
    return [found[key] for key in sorted(found)]


def read_parts(folder: Path, pieces: list[Path]) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Manifest, shards (named from `folder`) and index faults of all parts as one.

    BadInput where their manifests differ or a sample is in two of them.
    """
    manifests = [read_manifest(p) for p in pieces]
    for path, manifest in zip(pieces, manifests, strict=True):
        if changed := sorted(
            k for k in manifest.keys() | manifests[0].keys() if manifest.get(k) != manifests[0].get(k)
        ):
            raise BadInput(
                f"store {folder.name}: {path.name} was made with other {', '.join(changed)} than {pieces[0].name}; "
                "extract it again."
            )
    shards, faults, owner = [], [], {}
    for path in pieces:
        found, torn = read_index(path)
        faults += [f"{path.name}/{fault}" for fault in torn]
        for shard in found:
            shards.append({**shard, "shard": f"{path.name}/{shard['shard']}"})
            for row in shard["rows"]:
                if (other := owner.setdefault(row["sample_id"], path.name)) != path.name:
                    raise BadInput(f"store {folder.name}: sample {row['sample_id']} is in {other} and in {path.name}.")
    return manifests[0], shards, faults
