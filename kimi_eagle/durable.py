"""Files that survive a kill: atomic replacement, syncing, checksums, and JSON entries that vouch for themselves."""

import json
import os
import zlib
from pathlib import Path
from typing import Any


def file_crc32(path: Path) -> int:
    """CRC-32 of a file, read in blocks."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one, also after a power cut."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_bytes(data)
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's or a folder's content durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def signed(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with a CRC-32 over its own content, so that a changed line of an index is found too."""
    plain = {k: v for k, v in entry.items() if k != "self_crc32"}
    return {**plain, "self_crc32": zlib.crc32(json.dumps(plain, sort_keys=True).encode())}


def verified(entry: dict[str, Any]) -> bool:
    """True where the entry's own checksum fits; the checksum is taken out of it."""
    return entry.pop("self_crc32", None) == zlib.crc32(json.dumps(entry, sort_keys=True).encode())
