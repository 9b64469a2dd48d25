"""One shard on its way to a file: rows named first, their states brought together when it is written."""

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from kimi_eagle.durable import sync
from kimi_eagle.hidden_store.files import frame_crc32, is_finite, row_sum


class States(Protocol):
    """States [T, S, H] that lie somewhere: a tensor, or what a back end has written to a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def copy_to(self, out: torch.Tensor) -> None:
        """Bring them into `out` [T, S, H], contiguous."""


class Shard:
    """Rows until they are `size` bytes of states. The states of a row are not touched before `write`."""

    def __init__(self, size: int):
        self.size, self.bytes = size, 0
        self.rows: list[tuple[str, torch.Tensor, torch.Tensor, Any]] = []

    def fits(self, states: Any) -> bool:
        """Whether another row belongs here: there is room, and its states are of the same type."""
        same = not self.rows or states.dtype == self.rows[0][3].dtype
        return same and (not self.rows or self.bytes + _bytes(states) <= self.size)

    def add(self, name: str, ids: torch.Tensor, mask: torch.Tensor, states: Any) -> None:
        """One more row."""
        self.rows.append((name, ids.to(torch.int32), mask.to(torch.bool), states))
        self.bytes += _bytes(states)

    def settle(self) -> None:
        """Bring states that lie elsewhere into memory of their own."""
        for place, (name, ids, mask, states) in enumerate(self.rows):
            if not isinstance(states, torch.Tensor):
                own = torch.empty(states.shape, dtype=states.dtype)
                states.copy_to(own)
                self.rows[place] = (name, ids, mask, own)

    def write(self, path: Path, block: torch.Tensor) -> tuple[dict[str, Any] | None, list[str]]:
        """Write the file, synced before it is renamed; its index entry (None: nothing in it was finite), and the rows left out.

        `block`: uint8 memory of at least `bytes` that this shard may use.
        """
        kept, left_out, end = [], [], 0
        width, dtype = self.rows[0][3].shape[1:], self.rows[0][3].dtype
        values = block.view(dtype)[: self.bytes // dtype.itemsize].view(-1, *width)
        for name, ids, mask, states in self.rows:
            place = values[end : end + len(ids)]
            if isinstance(states, torch.Tensor):
                # numpy copies in this thread alone; torch would start a team of threads in each writer
                place.view(torch.uint8).numpy()[...] = states.view(torch.uint8).numpy()
            else:
                states.copy_to(place)
            if not is_finite(place):
                left_out.append(name)
                continue
            kept.append((name, ids, mask, end, end + len(ids), row_sum(ids, mask, place)))
            end += len(ids)
        self.rows = []  # what the states were read from may go
        if not kept:
            return None, left_out
        tensors = {
            "token_ids": torch.cat([row[1] for row in kept]),
            "loss_mask": torch.cat([row[2] for row in kept]),
            "hidden_states": values[:end],
            "offsets": torch.tensor([0, *(row[4] for row in kept)]),
        }
        partial = path.with_name(f"{path.name}.tmp")
        save_file(tensors, partial)
        sync(partial)
        entry = {"shard": path.name, "bytes": partial.stat().st_size, "frame_crc32": frame_crc32(partial)}
        entry["rows"] = [{"sample_id": n, "start": a, "end": b, "xxh3": total} for n, _, _, a, b, total in kept]
        partial.rename(path)
        sync(path.parent)
        return entry, left_out


def _bytes(states: Any) -> int:
    tokens, slots, width = states.shape
    return tokens * slots * width * states.dtype.itemsize
