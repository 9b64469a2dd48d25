"""The hidden-state store: bounded shards, an index that alone says what exists, checksums over every byte.

    manifest.json            what the rows are: target identity, layer ids and their convention, axes, width, dtype, engine
    shard-NNNNN.safetensors  token_ids [T] int32, loss_mask [T] bool, hidden_states [T, S, H], offsets [n + 1] int64
    index.jsonl              one line a shard, appended after the shard is synced and renamed: rows, ranges, checksums
    rejected.jsonl           rows that were not stored, with the reason

A kill at any moment leaves whole shards and at most one temporary file and one torn index line; both are dropped when the
store is opened for writing again, and `done` says which samples need not be extracted again.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kimi_eagle.durable import file_crc32, signed, sync, verified, write_atomically
from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.shard import Shard, is_finite, row_crc32

SCHEMA = 1
NAMES = ("token_ids", "loss_mask", "hidden_states")
SHARD_BYTES = 64 << 20
WRITERS = 3  # threads that check sums, write and sync: one alone is slower than the states of a GPU come


class Row(NamedTuple):
    """One sample: token_ids [T] int32, loss_mask [T] bool (True where the token is an answer's), hidden_states [T, S, H]."""

    sample_id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """Where a row lies: its shard's file name, its token range in it, and the CRC-32 of its bytes."""

    sample_id: str
    shard: str
    start: int
    end: int
    crc32: int


class Store:
    """A store opened for reading. Rows are read one slice at a time from the mapped file, never a whole shard."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.shards, _ = read_index(self.folder)
        self.entries = [Entry(shard=s["shard"], **row) for s in self.shards for row in s["rows"]]
        self.position = {e.sample_id: i for i, e in enumerate(self.entries)}
        self._open: tuple[str, Any] | None = None

    @property
    def sample_ids(self) -> list[str]:
        """Sample ids in the order they were stored."""
        return [e.sample_id for e in self.entries]

    @property
    def layer_ids(self) -> list[int]:
        """The S layer ids of axis 1 in vLLM's convention, the final state's last."""
        return list(self.manifest["layer_ids"])

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(e.end - e.start for e in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def row(self, sample: str | int) -> Row:
        """The row of a sample id, or of a position in the store."""
        if isinstance(sample, str) and sample not in self.position:
            raise BadInput(f"store {self.folder.name}: no sample {sample!r}.")
        entry = self.entries[self.position[sample] if isinstance(sample, str) else sample]
        file = self._file(entry.shard)
        return Row(entry.sample_id, *(file.get_slice(name)[entry.start : entry.end] for name in NAMES))

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(len(self)))

    def check(self) -> list[str]:
        """Every fault found: changed or cut files, row checksums, values that are not finite. Empty: the store is whole."""
        faults = [f"index.jsonl: {fault}" for fault in read_index(self.folder)[1]]
        for shard in self.shards:
            path = self.folder / shard["shard"]
            if not path.is_file():
                faults.append(f"{path.name}: missing")
            elif path.stat().st_size != shard["bytes"] or file_crc32(path) != shard["crc32"]:
                faults += [f"{path.name}: changed or cut since it was written", *self._damaged_rows(shard)]
            else:
                faults += self._damaged_rows(shard) + [
                    f"{path.name}: row {e['sample_id']} holds values that are not finite"
                    for e in shard["rows"]
                    if not is_finite(self.row(e["sample_id"]).hidden_states)
                ]
        return faults

    def _damaged_rows(self, shard: dict) -> list[str]:
        """Names the rows of a shard whose ids, length or states are not the ones indexed, as far as it can still be read."""
        try:
            rows = {e["sample_id"]: row_crc32(*self.row(e["sample_id"])[1:]) == e["crc32"] for e in shard["rows"]}
        except Exception:  # safetensors raises its own error type for a broken header
            return [f"{shard['shard']}: unreadable, rows {', '.join(e['sample_id'] for e in shard['rows'])} are lost"]
        return [f"{shard['shard']}: row {name} does not fit its checksum" for name, whole in rows.items() if not whole]

    def _file(self, shard: str) -> Any:
        if self._open is None or self._open[0] != shard:
            self._open = (shard, safe_open(self.folder / shard, "pt"))
        return self._open[1]


class StoreWriter:
    """Adds rows to a store, new or resumed. Shards are written by WRITERS threads, so that the engine does not wait for the disk.

    Resuming under another manifest is refused (BadInput): rows of two targets or layer sets must never mix.
    """

    def __init__(self, folder: str | Path, manifest: dict[str, Any], shard_bytes: int = SHARD_BYTES):
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"store {self.folder.name}: another process writes to it; wait for it or end it.") from None
        self._open_manifest(manifest)
        self._drop_leftovers()
        self.done = {row["sample_id"] for shard in self._shards for row in shard["rows"]}
        self.rejected: dict[str, str] = {}
        self._next = 1 + max((int(s["shard"][6:11]) for s in self._shards), default=-1)
        self._shard: Shard | None = None
        self._error: BaseException | None = None
        self._written: dict[int, dict[str, Any]] = {}  # shards whose turn in the index has not come
        self._indexed, self._indexing = self._next, threading.Lock()
        self._pool, self._room = ThreadPoolExecutor(WRITERS), threading.Semaphore(WRITERS)
        self._flushed = time.monotonic()

    def add(
        self, sample_id: str, token_ids: torch.Tensor, loss_mask: torch.Tensor, hidden_states: torch.Tensor
    ) -> bool:
        """Take one row: token_ids [T], loss_mask [T], hidden_states [T, S, H]. False where it was rejected, by name."""
        if sample_id in self.done:
            raise ValueError(f"sample {sample_id} is stored already")
        reason = self._fault(token_ids, loss_mask, hidden_states)
        if reason:
            self.reject(sample_id, reason)
            return False
        self.done.add(sample_id)
        if self._shard is not None and not self._shard.fits(hidden_states):
            self.flush()
        if self._shard is None:
            self._shard = Shard(hidden_states, self.shard_bytes)
        self._shard.add(sample_id, token_ids, loss_mask, hidden_states)
        return True

    @property
    def idle_seconds(self) -> float:
        """Seconds since a shard was last handed to the disk."""
        return time.monotonic() - self._flushed

    def reject(self, sample_id: str, reason: str) -> None:
        """Note a sample that cannot be stored; the run goes on without it."""
        self.rejected[sample_id] = reason
        with open(self.folder / "rejected.jsonl", "a") as file:
            file.write(json.dumps({"sample_id": sample_id, "reason": reason}) + "\n")

    def flush(self) -> None:
        """Hand the rows at hand to the writing threads as one shard; waits where all of them are busy."""
        self._raise()
        self._flushed = time.monotonic()
        if self._shard is not None:
            self._room.acquire()
            self._pool.submit(self._write_shard, self._shard, self._next)
            self._next, self._shard = self._next + 1, None

    def close(self) -> None:
        """Write what is left and wait for the disk."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()
            self._lock.close()
        self._raise()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fault(self, token_ids: torch.Tensor, loss_mask: torch.Tensor, hidden_states: torch.Tensor) -> str:
        expected = (len(token_ids), len(self.manifest["layer_ids"]), self.manifest["hidden_size"])
        if tuple(hidden_states.shape) != expected or len(loss_mask) != len(token_ids):
            return f"states of shape {tuple(hidden_states.shape)} and {len(loss_mask)} mask entries where {expected} is expected"
        return "" if is_finite(hidden_states) else "states that are not finite"

    def _raise(self) -> None:
        if self._error:
            raise StageFailed(
                f"store {self.folder.name}: writing failed ({self._error}); what is indexed is whole, free the cause and resume."
            )

    def _open_manifest(self, manifest: dict[str, Any]) -> None:
        path = self.folder / "manifest.json"
        self.manifest = {"schema": SCHEMA, **manifest}
        if path.is_file():
            found = read_manifest(self.folder)
            changed = sorted(k for k in self.manifest.keys() | found.keys() if self.manifest.get(k) != found.get(k))
            if changed:
                raise BadInput(
                    f"store {self.folder.name}: was begun with other {', '.join(changed)}; extract into a new folder."
                )
        else:
            write_atomically(path, json.dumps(signed(self.manifest), indent=1).encode())
        self._shards, torn = read_index(self.folder)
        if torn:
            lines = [json.dumps(signed(s)) + "\n" for s in self._shards]
            write_atomically(self.folder / "index.jsonl", "".join(lines).encode())

    def _drop_leftovers(self) -> None:
        indexed = {s["shard"] for s in self._shards}
        for path in [*self.folder.glob("*.tmp"), *self.folder.glob("shard-*.safetensors")]:
            if path.name not in indexed:
                path.unlink()

    def _write_shard(self, shard: "Shard", number: int) -> None:
        try:
            if self._error is None:
                entry = self._save(shard, self.folder / f"shard-{number:05d}.safetensors")
                with self._indexing:
                    self._written[number] = entry
                    while (
                        self._indexed in self._written
                    ):  # in order, so that the index ends where a failed shard would stand
                        self._index(self._written.pop(self._indexed))
                        self._indexed += 1
        except BaseException as error:
            self._error = error
        finally:
            self._room.release()

    def _save(self, shard: "Shard", path: Path) -> dict[str, Any]:
        """Write a shard's file, synced before it is renamed; its entry for the index."""
        partial = path.with_name(f"{path.name}.tmp")
        tensors, rows = shard.content()
        save_file(tensors, partial)
        sync(partial)
        entry = {"shard": path.name, "bytes": partial.stat().st_size, "crc32": file_crc32(partial), "rows": rows}
        partial.rename(path)
        sync(self.folder)
        return entry

    def _index(self, entry: dict[str, Any]) -> None:
        with open(self.folder / "index.jsonl", "a") as file:
            file.write(json.dumps(signed(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())


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
    """The index's whole lines, and a fault for each torn or changed one (a kill tears the last line only)."""
    path = folder / "index.jsonl"
    shards, faults = [], []
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.is_file() else [], 1):
        entry: Any = None
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
        if isinstance(entry, dict) and verified(entry):
            shards.append(entry)
        else:
            faults.append(f"line {number} is torn or changed")
    return shards, faults
