"""Layer states of engine steps into one raw file, without holding up the engine.

A step of n rows appends its S states one after the other, each [n, H]: every state can leave for the host while later layers
still compute. On a GPU the sum of the two streams goes into a buffer on the device and from there over a side stream into pinned
memory; a thread waits for the copies and writes. The engine waits only where all host buffers still wait for the file.
"""

import json
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HOST_BUFFERS = 3  # steps between the device and the file: one filled, one written, one to spare


@dataclass
class _Step:
    """One step on its way: host buffers [S, >= n, H] and [>= 2 n] (token ids, positions), and the copies to wait for."""

    rows: int
    note: Any
    states: Any
    numbers: Any
    copied: list = field(default_factory=list)


class Buffers:
    """What outlives a file: the device's buffer [S, n, H], its side stream, and the host's buffers that are free."""

    def __init__(self, slots: int):
        self.slots, self.device, self.side = slots, None, None
        self.copied: list = [None] * slots  # per state: the end of the last step's copy out of the device's buffer
        self.free: queue.Queue = queue.Queue()
        for _ in range(HOST_BUFFERS):
            self.free.put((None, None))

    def fit(self, step: _Step, like: Any) -> None:
        """Make buffers for a step larger than any before it."""
        import torch

        shape = (self.slots, step.rows, like.shape[-1])
        step.states = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
        if like.is_cuda and (self.device is None or self.device.shape[1] < step.rows):
            self.side = self.side or torch.cuda.Stream()
            torch.cuda.current_stream().wait_stream(self.side)  # before the old buffer's memory is used again
            self.device = torch.empty(shape, dtype=like.dtype, device=like.device)


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
        self.pieces: list[tuple] = []  # (request, first value of the step, its rows, row, position, rows)
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

        step, buffers = self._step, self.buffers
        parts = [s.reshape(-1, s.shape[-1])[: step.rows] for s in streams[:2] if s is not None]
        if step.states is None or step.states.shape[1] < step.rows:
            buffers.fit(step, parts[0])
        host = step.states[slot, : step.rows]
        if not parts[0].is_cuda:
            _sum(parts, host)
            return
        device, stream, side = buffers.device[slot, : step.rows], torch.cuda.current_stream(), buffers.side
        if buffers.copied[slot] is not None:
            stream.wait_event(buffers.copied[slot])
        _sum(parts, device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            host.copy_(device, non_blocking=True)
            buffers.copied[slot] = side.record_event()
        step.copied.append(buffers.copied[slot])

    def end(self) -> None:
        """The step is complete: to the thread."""
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

        for event in step.copied:
            event.synchronize()
        ids, positions = step.numbers[: 2 * step.rows].view(2, step.rows).numpy()
        states = step.states[:, : step.rows]
        for request, row, start, count in self.place(ids, positions, step.note):
            self.pieces.append((request, self.written, step.rows, row, start, count))
            self.token_ids.append(ids[row : row + count].astype("int32"))
        for state in states:
            self.file.write(state.view(torch.uint8).numpy())
        self.width, self.dtype = states.shape[-1], str(states.dtype).removeprefix("torch.")
        self.written += states.numel()

    def _write_index(self) -> None:
        import numpy as np
        from safetensors.numpy import save_file

        requests = list(dict.fromkeys(piece[0] for piece in self.pieces))
        number = {request: i for i, request in enumerate(requests)}
        numbers = [(number[piece[0]], *piece[1:]) for piece in self.pieces]
        tensors = {
            "pieces": np.array(numbers, dtype=np.int64).reshape(-1, 6),
            "token_ids": np.concatenate([*self.token_ids, np.empty(0, np.int32)]),
        }
        about = {"slots": self.buffers.slots, "width": self.width, "dtype": self.dtype, "error": self.error}
        partial = f"{self.path}.partial"
        save_file(tensors, partial, metadata={"about": json.dumps({**about, "requests": requests})})
        os.replace(partial, f"{self.path}.index")


def _sum(parts: list, out: Any) -> None:
    import torch

    if len(parts) > 1:
        torch.add(*parts, out=out)
    else:
        out.copy_(parts[0])
