"""Layer states of engine steps into a mapped file, without holding up the engine.

A step of n rows appends [n, S, H]. On a CPU the sum of the two streams is computed into the file's memory. On a GPU it goes into one of
two buffers on the device, and from there, while the next step computes, over a side stream into the file's memory, which is pinned.
The file lies in memory (/dev/shm) and is used again and again: its pages exist, nothing is written, and the reader maps the same ones.
"""

import json
import os
import threading
from collections import deque
from typing import Any

MAPPED_FILES = 4  # that stay mapped and pinned from call to call; a caller uses three by turns


class Memory:
    """What outlives a call: the mapped files, and two buffers [n, S, H] on the device with the side stream."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, int], Any] = {}
        self.device: deque = deque([None, None])
        self.copied: deque = deque([None, None])  # of each buffer: the end of the last copy out of it
        self.side: Any = None

    def mapped(self, path: str, size: int, pin: bool) -> Any:
        """The file as bytes [>= size], made as large as needed first."""
        import torch

        key = (path, os.stat(path).st_ino)
        found = self.files.get(key)
        if found is not None and len(found) >= size:
            return found
        while len(self.files) >= MAPPED_FILES or key in self.files:
            self._forget(key if key in self.files else next(iter(self.files)))
        os.truncate(path, max(size, os.path.getsize(path)))
        made = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
        if pin:
            # Where it cannot be pinned (a small limit, a file on a disk), copies still are right: they wait for their end.
            torch.cuda.cudart().cudaHostRegister(made.data_ptr(), len(made), 0)
        self.files[key] = made
        return made

    def forget(self) -> None:
        """Let go of all files."""
        for key in [*self.files]:
            self._forget(key)

    def _forget(self, key: tuple[str, int]) -> None:
        import torch

        old = self.files.pop(key)
        if self.side is not None:
            self.side.synchronize()
            torch.cuda.cudart().cudaHostUnregister(old.data_ptr())

    def turn(self, rows: int, slots: int, like: Any) -> Any:
        """The other device buffer [rows, S, H], once what was in it has left."""
        import torch

        self.side = self.side or torch.cuda.Stream()
        self.device.rotate()
        self.copied.rotate()
        if self.copied[0] is not None:
            torch.cuda.current_stream().wait_event(self.copied[0])
        if self.device[0] is None or self.device[0].shape[1:] != (slots, like.shape[-1]) or len(self.device[0]) < rows:
            self.device[0] = torch.empty((rows, slots, like.shape[-1]), dtype=like.dtype, device=like.device)
        return self.device[0][:rows]

    def send(self, source: Any, target: Any) -> None:
        """Start the copy of a step from the device into the file."""
        import torch

        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
            self.copied[0] = self.side.record_event()


class Recorder:
    """Takes the states of one step after another into the file `path`: `begin`, `tell`, `keep` per layer, `end`.

    After `close` the file's index appears beside it, once all copies have arrived: token ids and positions of all rows, and what
    the scheduler said of each step (`states.StepStates` reads both). `tokens` is how many rows are expected.
    """

    def __init__(self, path: str, slots: int, tokens: int, memory: Memory):
        self.path, self.slots, self.tokens, self.memory = path, slots, tokens, memory
        self.begun, self.width, self.dtype = 0, 0, ""
        self.numbers: list = []  # per step [2, n]: token ids and positions
        self.steps: list[dict[str, tuple[int, int]]] = []
        self.error = ""
        self._out: Any = None
        self._rows = 0
        self._closed = False

    @property
    def active(self) -> bool:
        """True between `begin` and `end`."""
        return self._rows > 0

    def begin(self, rows: int, scheduled: dict[str, tuple[int, int]]) -> None:
        """A step of `rows` rows starts, of these requests: (first position, rows)."""
        self._rows, self._out = rows, None
        self.steps.append(scheduled)

    def tell(self, ids: Any, positions: Any) -> None:
        """Token ids and positions [>= rows] of the step, on whatever device."""
        import torch

        both = torch.stack((ids[: self._rows].int(), positions[: self._rows].int()))
        host = torch.empty(both.shape, dtype=torch.int32, pin_memory=both.is_cuda)
        self.numbers.append(host.copy_(both, non_blocking=True))

    def keep(self, slot: int, streams: list) -> None:
        """State number `slot`: the sum of one or two streams [>= rows, H]. The sum is a new tensor: fused norms write in place."""
        import torch

        parts = [s.reshape(-1, s.shape[-1])[: self._rows] for s in streams[:2] if s is not None]
        if self._out is None:
            self._target = self._place(parts[0])
            on_device = parts[0].is_cuda
            self._out = self.memory.turn(self._rows, self.slots, parts[0]) if on_device else self._target
        out = self._out[:, slot]
        if len(parts) > 1:
            torch.add(*parts, out=out)
        else:
            out.copy_(parts[0])

    def _place(self, like: Any) -> Any:
        """The step's part of the file, [rows, S, H]."""
        self.width, self.dtype = like.shape[-1], str(like.dtype).removeprefix("torch.")
        row = self.slots * self.width * like.dtype.itemsize
        begin = self.begun
        self.begun += self._rows * row
        # More rows than expected: prompts that the scheduler had to begin again. The file grows.
        size = max(self.tokens * row, self.begun if begin + self._rows * row <= self.tokens * row else 2 * self.begun)
        file = self.memory.mapped(self.path, size, like.is_cuda)
        return file[begin : self.begun].view(like.dtype).view(self._rows, self.slots, self.width)

    def end(self) -> None:
        """The step is complete."""
        if self.memory.side is not None:
            self.memory.send(self._out, self._target)
        self._rows = 0

    def close(self) -> str:
        """No more steps: the path of the file, whose index follows."""
        if not self._closed:
            self._closed = True
            # Listed here: the next call's first step turns the buffers, while the thread still waits.
            copies = [event for event in self.memory.copied if event is not None]
            threading.Thread(target=self._write_index, args=(copies,), daemon=True).start()
        return self.path

    def _write_index(self, copies: list) -> None:
        import torch
        from safetensors.torch import save_file

        try:
            for event in copies:
                event.synchronize()
            numbers = torch.cat([*self.numbers, torch.empty((2, 0), dtype=torch.int32)], dim=1)
        except Exception as error:
            self.error, numbers = f"{type(error).__name__}: {error}", torch.empty((2, 0), dtype=torch.int32)
        about = {"slots": self.slots, "width": self.width, "dtype": self.dtype, "error": self.error}
        save_file({"numbers": numbers}, f"{self.path}.partial", {"about": json.dumps({**about, "steps": self.steps})})
        os.replace(f"{self.path}.partial", f"{self.path}.index")
