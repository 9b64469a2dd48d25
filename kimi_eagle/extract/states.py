"""States that a back end has written, by request id, read when they are asked for."""

import json
import os
import time
from pathlib import Path
from typing import Any

from kimi_eagle.errors import StageFailed

STILL_SECONDS = 120.0  # a file that has not grown for so long will have no index either


class FileStates:
    """One safetensors file a request, with token_ids [T] and hidden_states [T, S, H]."""

    def __init__(self, files: dict[Any, str]):
        self.files = files

    def row(self, request: Any) -> tuple[Any, Any]:
        """token_ids [T] and hidden_states [T, S, H]; KeyError or OSError where there are none."""
        from safetensors.torch import load_file

        found = load_file(self.files[request])
        return found["token_ids"], found["hidden_states"]

    def remove(self) -> None:
        """Delete the files."""
        for path in self.files.values():
            Path(path).unlink(missing_ok=True)


class StepStates:
    """One raw file of whole engine steps with its index, as `recorder.Recorder` writes them; the index may still be to come."""

    def __init__(self, path: str):
        self.path = Path(path)
        self._pieces: dict[str, list] | None = None

    def row(self, request: Any) -> tuple[Any, Any]:
        """token_ids [T] as the model was given them, and hidden_states [T, S, H], a view of the mapped file where one step
        holds them all. KeyError where the request has none; StageFailed where the file was not finished."""
        import torch

        if self._pieces is None:
            self._open()
        slots, width = self._about["slots"], self._about["width"]
        ids, parts, place = [], [], 0
        for start, tokens, (first, rows, row, count) in sorted(self._pieces[str(request)], key=lambda piece: piece[0]):
            if start != place:
                raise KeyError(f"the states of {request} lack the tokens from {place}")
            step = self._values[first : first + slots * rows * width].view(slots, rows, width)
            parts.append(step[:, row : row + count])
            ids.append(tokens)
            place = start + count
        states = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return torch.cat(ids), states.transpose(0, 1)

    def remove(self) -> None:
        """Delete the file; rows that were read before stay valid while they are held."""
        for path in (self.path, self._index):
            path.unlink(missing_ok=True)

    @property
    def _index(self) -> Path:
        return self.path.with_name(f"{self.path.name}.index")

    def _open(self) -> None:
        import torch
        from safetensors import safe_open

        self._wait()
        with safe_open(self._index, "pt") as file:
            self._about = json.loads(file.metadata()["about"])
            pieces, token_ids = file.get_tensor("pieces").tolist(), file.get_tensor("token_ids")
        if self._about["error"]:
            raise StageFailed(f"the engine's states were not written: {self._about['error']}")
        if pieces:
            dtype = getattr(torch, self._about["dtype"])
            size = os.path.getsize(self.path) // dtype.itemsize
            self._values = torch.from_file(str(self.path), shared=True, size=size, dtype=dtype)
        names = [_given(name) for name in self._about["requests"]]
        self._pieces, begin = {}, 0
        for number, first, rows, row, start, count in pieces:
            piece = (start, token_ids[begin : begin + count], (first, rows, row, count))
            for name in names[number]:
                self._pieces.setdefault(name, []).append(piece)
            begin += count

    def _wait(self) -> None:
        size, since = -1, time.monotonic()
        while not self._index.exists():
            now = os.path.getsize(self.path)
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STILL_SECONDS:
                raise StageFailed(f"{self.path.name}: no index came; the engine was ended while it wrote.")
            time.sleep(0.002)


def _given(name: str) -> tuple[str, ...]:
    """The request ids that vLLM's internal one may stand for: newer versions add a dash and eight characters to the given one."""
    given, dash, suffix = name.rpartition("-")
    return (name, given) if dash and len(suffix) == 8 else (name,)
