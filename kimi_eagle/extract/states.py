"""States that a back end has written, by request id, read when they are asked for."""

import os
from pathlib import Path
from typing import Any


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
    """One raw file of whole engine steps, as `recorder.Recorder` writes it.

    `pieces`: request -> [(first value of the step in the file, rows of the step, first row, first position, rows)];
    `token_ids`: request -> the ids that the model was given, in order of position.
    """

    def __init__(self, path: str, dtype: str, slots: int, width: int, pieces: dict[Any, list], token_ids: dict):
        self.path, self.dtype, self.slots, self.width = path, dtype, slots, width
        self.pieces, self.token_ids = pieces, token_ids
        self._values: Any = None

    def row(self, request: Any) -> tuple[Any, Any]:
        """token_ids [T] and hidden_states [T, S, H] (a view of the mapped file where one step holds them all).

        KeyError where the request has no states.
        """
        import torch

        if self._values is None:
            dtype = getattr(torch, self.dtype)
            size = os.path.getsize(self.path) // torch.empty(0, dtype=dtype).element_size()
            self._values = torch.from_file(self.path, shared=True, size=size, dtype=dtype)
        parts = []
        for first, rows, row, _, count in sorted(self.pieces[request], key=lambda piece: piece[3]):
            step = self._values[first : first + self.slots * rows * self.width].view(self.slots, rows, self.width)
            parts.append(step[:, row : row + count])
        states = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return torch.from_numpy(self.token_ids[request]), states.transpose(0, 1)

    def remove(self) -> None:
        """Delete the file; rows that were read before stay valid while they are held."""
        Path(self.path).unlink(missing_ok=True)
