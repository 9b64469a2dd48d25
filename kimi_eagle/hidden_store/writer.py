"""A store opened for writing, new or resumed."""

import contextlib
import fcntl
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.durable import signed, write_atomically
from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.hidden_store.files import (
    SCHEMA,
    read_index,
    read_manifest,
    shard_fault,
    unindexed,
    whole_rows,
)
from kimi_eagle.hidden_store.parts import parts
from kimi_eagle.hidden_store.shard import Shard

SHARD_BYTES = 64 << 20
WRITERS = 4  # threads that gather, sum, write and sync: one alone is slower than the states of a GPU come


class StoreWriter:
    """Adds rows to a store, new or resumed. Shards are written by WRITERS threads, so that the engine does not wait for the disk.

    Resuming under another manifest is refused (BadInput): rows of two targets or layer sets must never mix. Shards that
    are gone or cut leave the index; their rows that are still whole are written again, the others are named in `dropped`
    and stand no longer in `done`. `every_byte` finds changed bytes too, which takes reading the whole store.
    """

    def __init__(
        self, folder: str | Path, manifest: dict[str, Any], shard_bytes: int = SHARD_BYTES, every_byte: bool = False
    ):
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self.done: set[str] = set()
        self.rejected: dict[str, str] = {}
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
        self._shard = Shard(self.shard_bytes)
        self._written: dict[int, dict[str, Any] | None] = {}  # shards whose turn in the index has not come
        self._turn, self._order = self._next, threading.Lock()
        self._pool = ThreadPoolExecutor(WRITERS)
        self._blocks: queue.Queue[torch.Tensor] = (
            queue.Queue()
        )  # memory is used again: fresh pages cost more than a copy
        for _ in range(WRITERS):
            self._blocks.put(torch.empty(0, dtype=torch.uint8))
        self._flushed = time.monotonic()
        self.dropped = self._save_rows(damaged)

    def add(
        self, sample_id: str, token_ids: torch.Tensor, loss_mask: torch.Tensor, hidden_states: torch.Tensor
    ) -> bool:
        """Take one row: token_ids [T], loss_mask [T], hidden_states [T, S, H] (a tensor, or `shard.States`).

        False where its shapes do not fit. A row whose states are not finite is named in `rejected` once its shard is written.
        """
        if sample_id in self.done:
            raise ValueError(f"sample {sample_id} is stored already")
        reason = self._fault(token_ids, loss_mask, hidden_states)
        if reason:
            self.reject(sample_id, reason)
            return False
        if not self._shard.fits(hidden_states):
            self.flush()
        self._shard.add(sample_id, token_ids, loss_mask, hidden_states)
        self.done.add(sample_id)
        return True

    @property
    def idle_seconds(self) -> float:
        """Seconds since a shard was last handed to the disk."""
        return time.monotonic() - self._flushed

    def reject(self, sample_id: str, reason: str) -> None:
        """Note a sample that cannot be stored; the run goes on without it."""
        self.rejected[sample_id] = reason
        with self._say_disk_errors(), open(self.folder / "rejected.jsonl", "a") as file:
            file.write(json.dumps({"sample_id": sample_id, "reason": reason}) + "\n")

    def settle(self) -> None:
        """Read what waits for its shard to be full, so that the place it lies in is free."""
        self._shard.settle()

    def flush(self) -> None:
        """Hand the rows at hand to the writing threads as one shard; waits where all of them are busy."""
        self._raise()
        self._flushed = time.monotonic()
        if self._shard.rows:
            self._pool.submit(self._write_shard, self._shard, self._next, self._blocks.get())
            self._next, self._shard = self._next + 1, Shard(self.shard_bytes)

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
        return ""

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

    def _write_shard(self, shard: Shard, number: int, block: torch.Tensor) -> None:
        try:
            if self._error is None:
                if len(block) < shard.bytes:
                    block = torch.empty(max(shard.bytes, shard.size), dtype=torch.uint8)
                entry, not_finite = shard.write(self.folder / f"shard-{number:05d}.safetensors", block)
                with self._order:
                    for name in not_finite:
                        self.done.discard(name)
                        self.reject(name, "states that are not finite")
                    self._written[number] = entry
                    while self._turn in self._written:  # so the index ends where a shard failed
                        self._index(self._written.pop(self._turn))
                        self._turn += 1
        except BaseException as error:
            self._error = error
        finally:
            self._blocks.put(block)

    def _index(self, entry: dict[str, Any] | None) -> None:
        if entry is None:
            return
        with open(self.folder / "index.jsonl", "a") as file:
            file.write(json.dumps(signed(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())


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
