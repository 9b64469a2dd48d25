"""Layer states of engine steps into one raw file, without holding up the engine.

A step of n rows appends [n, S, H]. On a GPU the sum of the two streams goes into one of two buffers on the device, and from there,
while the next step computes, over a side stream into pinned memory; a thread waits for the copy and writes. The engine waits only
where all host buffers still wait for the file.
"""

import json
import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOST_BUFFERS = 3  # steps between the device and the file: one filled, one written, one to spare


@dataclass
class _Step:
    """One step on its way: host buffers [>= n, S, H] and [>= 2 n] (token ids, positions), and the copy to wait for."""

    rows: int
    note: Any
    states: Any
    numbers: Any
    kept: int = 0
    copied: Any = None


class Buffers:
    """What outlives a file: two buffers [n, S, H] on the device, the side stream, and the host's buffers that are free."""

    def __init__(self, slots: int):
        self.slots, self.device, self.side = slots, deque([None, None]), None
        self.copied: deque = deque([None, None])  # of each: the end of the last copy out of it
        self.free: queue.Queue = queue.Queue()
        for _ in range(HOST_BUFFERS):
            self.free.put((None, None))

    def turn(self, step: _Step, like: Any) -> None:
        """Take the other device buffer, when what was in it has left, and make buffers larger where this step needs it."""
        import torch

        shape = (step.rows, self.slots, like.shape[-1])
        if step.states is None or len(step.states) < step.rows:
            step.states = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
        if not like.is_cuda:
            return
        self.side = self.side or torch.cuda.Stream()
        self.device.rotate()
        self.copied.rotate()
        if self.copied[0] is not None:
            torch.cuda.current_stream().wait_event(self.copied[0])
        if self.device[0] is None or len(self.device[0]) < step.rows:
            self.device[0] = torch.empty(shape, dtype=like.dtype, device=like.device)

    def send(self, step: _Step) -> None:
        """Start the step's copy from the device to the host."""
        import torch

        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            step.states[: step.rows].copy_(self.device[0][: step.rows], non_blocking=True)
            step.copied = self.copied[0] = self.side.record_event()


class Recorder:
    """Takes the states of one step after another into a file in `folder`: `begin`, `tell`, `keep` per layer, `end`.

    `place(ids [n], positions [n], note)` says whose the rows of a finished step are, as (request, row, position, rows); it runs in
    the thread. After `close` the file's index appears beside it (`states.StepStates` reads both), also where something failed.
    """

    def __init__(self, folder: str, buffers: Buffers, place: Callable[[Any, Any, Any], list]):
        os.makedirs(folder, exist_ok=True)
        handle, self.path = tempfile.mkstemp(dir=folder, prefix="states-", suffix=".bin")
        self.file, self.buffers, self.place = os.fdopen(handle, "wb"), buffers, place
        self.written, self.width, self.dtype = 0, 0, ""
        self.pieces: list[tuple] = []  # (request, first byte, position, rows)
        self.token_ids: list = []
        self.error = ""
        self._queue: queue.Queue = queue.Queue()
        self._step: _Step | None = None
        self._closed = False
        threading.Thread(target=self._write_steps, daemon=True).start()

    @property
    def active(self) -> bool:
        """True between `begin` and `end`."""
        return self._step is not None

    def begin(self, rows: int, note: Any) -> None:
        """A step of `rows` rows starts; waits where the file is behind by all buffers."""
        self._step = _Step(rows, note, *self.buffers.free.get())

    def tell(self, ids: Any, positions: Any) -> None:
        """Token ids and positions [>= rows] of the step, on whatever device."""
        import torch

        step = self._step
        both = torch.stack((ids[: step.rows].long(), positions[: step.rows].long()))
        if step.numbers is None or step.numbers.numel() < both.numel():
            step.numbers = torch.empty(both.numel(), dtype=torch.long, pin_memory=both.is_cuda)
        step.numbers[: both.numel()].view_as(both).copy_(both, non_blocking=True)

    def keep(self, slot: int, streams: list) -> None:
        """State number `slot`: the sum of one or two streams [>= rows, H]. The sum is a new tensor: fused norms write in place."""
        import torch

        step = self._step
        parts = [s.reshape(-1, s.shape[-1])[: step.rows] for s in streams[:2] if s is not None]
        if not step.kept:
            self.buffers.turn(step, parts[0])
        step.kept += 1
        out = (self.buffers.device[0] if parts[0].is_cuda else step.states)[: step.rows, slot]
        if len(parts) > 1:
            torch.add(*parts, out=out)
        else:
            out.copy_(parts[0])

    def end(self) -> None:
        """The step is complete: to the thread."""
        if self.buffers.side is not None:
            self.buffers.send(self._step)
        self._queue.put(self._step)
        self._step = None

    def close(self) -> str:
        """No more steps: the path of the file, whose index follows when the thread is done."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        return self.path

    def _write_steps(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                if not self.error:
                    self._write(step)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
            self.buffers.free.put((step.states, step.numbers))
        self.file.close()
        self._write_index()

    def _write(self, step: _Step) -> None:
        import torch

        if step.copied is not None:
            step.copied.synchronize()
        ids, positions = step.numbers[: 2 * step.rows].view(2, step.rows).numpy()
        states = step.states[: step.rows]
        for request, row, start, count in self.place(ids, positions, step.note):
            self.pieces.append((request, self.written + row * states[0].nbytes, start, count))
            self.token_ids.append(ids[row : row + count].astype("int32"))
        self.file.write(states.view(torch.uint8).numpy())
        self.width, self.dtype = states.shape[-1], str(states.dtype).removeprefix("torch.")
        self.written += states.nbytes

    def _write_index(self) -> None:
        import numpy as np
        from safetensors.numpy import save_file

        requests = list(dict.fromkeys(piece[0] for piece in self.pieces))
        number = {request: i for i, request in enumerate(requests)}
        numbers = [(number[piece[0]], *piece[1:]) for piece in self.pieces]
        tensors = {
            "pieces": np.array(numbers, dtype=np.int64).reshape(-1, 4),
            "token_ids": np.concatenate([*self.token_ids, np.empty(0, np.int32)]),
        }
        about = {"slots": self.buffers.slots, "width": self.width, "dtype": self.dtype, "error": self.error}
        partial = f"{self.path}.partial"
        save_file(tensors, partial, metadata={"about": json.dumps({**about, "requests": requests})})
        os.replace(partial, f"{self.path}.index")
