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

    def lazy(self, request: Any) -> tuple[Any, Any]:
        """The same as `row`: such a file is read whole."""
        return self.row(request)

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
        """token_ids [T] as the model was given them, and hidden_states [T, S, H].

        KeyError where the request has none; StageFailed where the file was not finished.
        """
        import torch

        ids, states = self.lazy(request)
        out = torch.empty(states.shape, dtype=states.dtype)
        states.copy_to(out)
        return ids, out

    def lazy(self, request: Any) -> tuple[Any, "Pieces"]:
        """`row` with the states still in the file; they can be read while they are held, even after `remove`."""
        import torch

        if self._pieces is None:
            self._open()
        ids, places, position = [], [], 0
        for start, tokens, first in sorted(self._pieces[str(request)], key=lambda piece: piece[0]):
            if start != position:
                raise KeyError(f"the states of {request} lack the tokens from {position}")
            ids.append(tokens)
            places.append((first, len(tokens)))
            position = start + len(tokens)
        dtype = getattr(torch, self._about["dtype"])
        return torch.cat(ids), Pieces(self._file, places, (position, self._about["slots"], self._about["width"]), dtype)

    def remove(self) -> None:
        """Delete the file."""
        for path in (self.path, self._index):
            path.unlink(missing_ok=True)

    @property
    def _index(self) -> Path:
        return self.path.with_name(f"{self.path.name}.index")

    def _open(self) -> None:
        from safetensors import safe_open

        self._wait()
        with safe_open(self._index, "pt") as file:
            self._about = json.loads(file.metadata()["about"])
            pieces, token_ids = file.get_tensor("pieces").tolist(), file.get_tensor("token_ids")
        if self._about["error"]:
            raise StageFailed(f"the engine's states were not written: {self._about['error']}")
        self._file = open(self.path, "rb", buffering=0)
        names = [_given(name) for name in self._about["requests"]]
        self._pieces, begin = {}, 0
        for number, first, start, count in pieces:
            for name in names[number]:
                self._pieces.setdefault(name, []).append((start, token_ids[begin : begin + count], first))
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


class Pieces:
    """States [T, S, H] of one request, in pieces of a file: (first byte, tokens) in order."""

    def __init__(self, file: Any, places: list[tuple[int, int]], shape: tuple[int, int, int], dtype: Any):
        self.file, self.places, self.shape, self.dtype = file, places, shape, dtype

    def copy_to(self, out: Any) -> None:
        """Read into `out` [T, S, H], contiguous: read, not mapped, since a page fault costs more than its page's copy."""
        import torch

        target, begin = memoryview(out.view(torch.uint8).numpy()).cast("B"), 0
        token = out[0].nbytes if len(out) else 0
        for first, tokens in self.places:
            end = begin + tokens * token
            while begin < end:
                got = os.preadv(self.file.fileno(), [target[begin:end]], first)
                if not got:
                    raise OSError(f"{self.file.name} ends before its states do")
                begin, first = begin + got, first + got


def _given(name: str) -> tuple[str, ...]:
    """The request ids that vLLM's internal one may stand for: newer versions add a dash and eight characters to the given one."""
    given, dash, suffix = name.rpartition("-")
    return (name, given) if dash and len(suffix) == 8 else (name,)
