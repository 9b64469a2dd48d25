"""A store opened for writing, new or resumed."""

import contextlib
import fcntl
import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kimi_eagle.durable import file_crc32, signed, sync, write_atomically
from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.hidden_store.files import (
    NAMES,
    SCHEMA,
    Row,
    read_index,
    read_manifest,
    row_crc32,
    shard_fault,
    unindexed,
    whole_rows,
)
from kimi_eagle.hidden_store.parts import parts


class StoreWriter:
    """Adds rows to a store, new or resumed. Shards are written by a thread, so that the engine does not wait for the disk.

    Resuming under another manifest is refused (BadInput): rows of two targets or layer sets must never mix. Shards that
    are gone or cut leave the index; their rows that are still whole are written again, the others are named in `dropped`
    and stand no longer in `done`. `every_byte` finds changed bytes too, which takes reading the whole store.
    """

    def __init__(
        self, folder: str | Path, manifest: dict[str, Any], shard_bytes: int = 64 << 20, every_byte: bool = False
    ):
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self.done: set[str] = set()
        self.rejected: dict[str, str] = {}
        self._rows: list[Row] = []
        self._bytes = 0
        self._error: BaseException | None = None
        with self._say_disk_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(
                    f"store {self.folder.name}: another process writes to it; wait for it or end it."
                ) from None
            self._open_manifest(manifest)
            damaged = self._open_index(every_byte)
        self._next = 1 + max((int(s["shard"][6:11]) for s in [*self._shards, *damaged]), default=-1)
        self._queue: queue.Queue[list[Row] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._write_shards, daemon=True)
        self._thread.start()
        self.dropped = self._save_rows(damaged)

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
        row = Row(sample_id, token_ids.to(torch.int32), loss_mask.to(torch.bool), hidden_states.contiguous())
        self.done.add(sample_id)
        self._rows.append(row)
        self._bytes += hidden_states.nbytes
        if self._bytes >= self.shard_bytes:
            self.flush()
        return True

    def reject(self, sample_id: str, reason: str) -> None:
        """Note a sample that cannot be stored; the run goes on without it."""
        self.rejected[sample_id] = reason
        with self._say_disk_errors(), open(self.folder / "rejected.jsonl", "a") as file:
            file.write(json.dumps({"sample_id": sample_id, "reason": reason}) + "\n")

    def flush(self) -> None:
        """Hand the rows at hand to the writing thread as one shard."""
        self._raise()
        if self._rows:
            self._queue.put(self._rows)
            self._rows, self._bytes = [], 0

    def close(self) -> None:
        """Write what is left and wait for the disk."""
        try:
            self.flush()
        finally:
            if self._thread.is_alive():
                self._queue.put(None)
            self._thread.join()
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
        return "" if torch.isfinite(hidden_states).all() else "states that are not finite"

    def _raise(self) -> None:
        if self._error:
            raise StageFailed(
                f"store {self.folder.name}: writing failed ({self._error}); what is indexed is whole, free the cause and resume."
            )

    @contextlib.contextmanager
    def _say_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error
            self._raise()

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

    def _open_index(self, every_byte: bool) -> list[dict[str, Any]]:
        """Read the index, write it again without torn lines and damaged shards, and remove files that it does not name."""
        found, faults = read_index(self.folder)
        damaged = [s for s in found if shard_fault(self.folder, s, every_byte)]
        self._shards = [s for s in found if s not in damaged]
        self.done = {row["sample_id"] for shard in self._shards for row in shard["rows"]}
        if faults or damaged:
            lines = [json.dumps(signed(s)) + "\n" for s in self._shards]
            write_atomically(self.folder / "index.jsonl", "".join(lines).encode())
        for path in [*self.folder.glob("*.tmp"), *unindexed(self.folder, found)]:
            path.unlink()
        return damaged

    def _save_rows(self, damaged: list[dict[str, Any]]) -> list[str]:
        """Store the whole rows of damaged shards again and remove those files; the sample ids of the rows that are lost."""
        lost = []
        for shard in damaged:
            for row in whole_rows(self.folder, shard):
                self.add(*row)
            lost += [e["sample_id"] for e in shard["rows"] if e["sample_id"] not in self.done]
            (self.folder / shard["shard"]).unlink(missing_ok=True)
        return lost

    def _write_shards(self) -> None:
        while (rows := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._write_shard(rows)
            except BaseException as error:
                self._error = error

    def _write_shard(self, rows: list[Row]) -> None:
        name = f"shard-{self._next:05d}.safetensors"
        tensors = {key: torch.cat([getattr(r, key) for r in rows]) for key in NAMES}
        ends = torch.tensor([0] + [len(r.token_ids) for r in rows]).cumsum(0)
        partial = self.folder / f"{name}.tmp"
        save_file({**tensors, "offsets": ends}, partial)
        sync(partial)
        entry = {"shard": name, "bytes": partial.stat().st_size, "crc32": file_crc32(partial)}
        entry["rows"] = [
            {"sample_id": r.sample_id, "start": int(a), "end": int(b), "crc32": row_crc32(*r[1:])}
            for r, a, b in zip(rows, ends[:-1], ends[1:], strict=True)
        ]
        partial.rename(self.folder / name)
        sync(self.folder)
        with open(self.folder / "index.jsonl", "a") as file:
            file.write(json.dumps(signed(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._next += 1


def repair(folder: Path) -> list[str]:
    """Take what is damaged out of a store (or of its parts): a sentence per loss. Extraction then redoes exactly that.

    Whole rows of a damaged shard are kept, in a new shard. BadInput where the manifest itself is damaged.
    """
    said = []
    for place in parts(folder) or [folder]:
        manifest = read_manifest(place)
        faults = read_index(place)[1]
        with StoreWriter(place, manifest, every_byte=True) as writer:
            said += [f"{place.name}/{fault}: the rows of that shard are dropped" for fault in faults]
            said += [f"{place.name}: row {sample_id} is dropped" for sample_id in writer.dropped]
    return said
