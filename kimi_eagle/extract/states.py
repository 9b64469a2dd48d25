"""States that a back end has made, by request id, read where they lie when they are asked for."""

import itertools
import json
import os
import queue
import time
import weakref
from pathlib import Path
from typing import Any

from kimi_eagle.errors import StageFailed
from kimi_eagle.extract.attribution import attribute

FILES = 3  # one that the engine fills, one for the call at its door, one that is being stored
WAIT_SECONDS = 1800.0  # for the disk to take a group
STILL_SECONDS = 120.0  # an index that has not come by then will not come


class Staging:
    """The folder where states lie on their way, and its FILES raw files, taken by turns and used again."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._free: queue.Queue[Path] = queue.Queue()
        self._maps: dict[Path, Any] = {}
        for number in range(FILES):
            self._free.put(self.folder / f"states-{number}.bin")

    def take(self) -> "Lease":
        """A file that nobody reads any more; waits for one."""
        try:
            path = self._free.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise StageFailed(f"extraction: nothing was stored for {WAIT_SECONDS:.0f} s; look at the disk.") from None
        path.touch(mode=0o600)
        path.with_name(f"{path.name}.index").unlink(missing_ok=True)
        lease = Lease(path)
        weakref.finalize(lease, self._free.put, path)
        return lease

    def map(self, path: Path) -> Any:
        """The file as bytes; mapped once, since a page's first touch costs more than its copy."""
        import torch

        size = os.path.getsize(path)
        if path not in self._maps or len(self._maps[path]) != size:
            self._maps[path] = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return self._maps[path]


class Lease:
    """A file in use, until the last holder lets go of this."""

    def __init__(self, path: Path):
        self.path = path


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
    """A file of whole engine steps with its index, as `recorder.Recorder` makes them; the index may still be to come.

    `requests` are those of the call, {id, prompt_token_ids}: whose a row is, is decided here (`attribution.attribute`).
    """

    def __init__(self, staging: Staging, lease: Lease, requests: list[dict[str, Any]]):
        self.staging, self.lease = staging, lease
        self.prompts = {str(r["id"]): r["prompt_token_ids"] for r in requests}
        self._pieces: dict[str, list[tuple[int, Any, Any]]] | None = None

    def row(self, request: Any) -> tuple[Any, Any]:
        """token_ids [T] as the model was given them, and hidden_states [T, S, H].

        KeyError where the request has none; StageFailed where rows cannot be told apart, or the file was not finished.
        """
        import torch

        ids, pieces = self.lazy(request)
        out = torch.empty(pieces.shape, dtype=pieces.dtype)
        pieces.copy_to(out)
        return ids, out

    def lazy(self, request: Any) -> tuple[Any, "Pieces"]:
        """`row` with the states still in the file, which stays untouched while they are held."""
        import torch

        if self._pieces is None:
            self._open()
        found = sorted(self._pieces[str(request)], key=lambda piece: piece[0])
        ends = itertools.accumulate(len(ids) for _, ids, _ in found)
        for (start, _, _), end in zip(found, [0, *ends], strict=False):
            if start != end:
                raise KeyError(f"the states of {request} lack the tokens from {end}")
        if sum(len(ids) for _, ids, _ in found) != len(self.prompts[str(request)]):
            raise KeyError(f"the states of {request} end before its tokens do")
        return torch.cat([ids for _, ids, _ in found]), Pieces([states for _, _, states in found], self.lease)

    def remove(self) -> None:
        """Let go of the file."""
        self._pieces = {}

    def _open(self) -> None:
        import torch
        from safetensors import safe_open

        index = self.lease.path.with_name(f"{self.lease.path.name}.index")
        until = time.monotonic() + STILL_SECONDS
        while not index.exists():
            if time.monotonic() > until:
                raise StageFailed(f"{index.name}: did not come; the engine was ended while it wrote.")
            time.sleep(0.001)
        with safe_open(index, "pt") as file:
            about, numbers = json.loads(file.metadata()["about"]), file.get_tensor("numbers")
        if about["error"]:
            raise StageFailed(f"the engine's states did not arrive: {about['error']}")
        self._pieces, begin = {}, 0
        shape = (-1, about["slots"], about["width"])
        values = self.staging.map(self.lease.path) if len(numbers[0]) else torch.empty(0, dtype=torch.uint8)
        dtype = getattr(torch, about["dtype"] or "float32")
        values = values[: len(numbers[0]) * shape[1] * shape[2] * dtype.itemsize].view(dtype).view(shape)
        for scheduled in about["steps"]:
            end = begin + sum(count for _, count in scheduled.values())
            ids, positions = numbers[:, begin:end]
            named = {self._given(rid): span for rid, span in scheduled.items()}
            for name, row, start, count in attribute(ids.numpy(), positions.numpy(), named, self.prompts):
                piece = (start, ids[row : row + count], values[begin + row : begin + row + count])
                self._pieces.setdefault(name, []).append(piece)
            begin = end

    def _given(self, name: str) -> str:
        """The id that was given: newer versions of vLLM add a dash and eight characters to it."""
        return name if name in self.prompts or name[-9:-8] != "-" else name[:-9]


class Pieces:
    """States [T, S, H] of one request as consecutive parts of a mapped file, and the file's lease."""

    def __init__(self, parts: list[Any], lease: Lease):
        self.parts, self.lease = parts, lease
        self.shape, self.dtype = (sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype

    def copy_to(self, out: Any) -> None:
        """Copy into `out` [T, S, H], contiguous, in this thread alone (torch would start a team of threads in each)."""
        import torch

        begin = 0
        for part in self.parts:
            out[begin : begin + len(part)].view(torch.uint8).numpy()[...] = part.view(torch.uint8).numpy()
            begin += len(part)
