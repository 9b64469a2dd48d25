"""Layer states of engine steps into one raw file, without holding up the engine.

A step of n rows appends its S states one after the other, each [n, H]: every state can leave for the host while later layers
still compute. On a GPU the sum of the two streams goes into a buffer on the device and from there over a side stream into pinned
memory; a thread waits for the copies and writes. The engine waits only where all host buffers still wait for the disk.
"""

import os
import queue
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HOST_BUFFERS = 3  # steps between the device and the disk: one filled, one written, one to spare


@dataclass
class _Step:
    """One step on its way: host buffers [S, n, H] and [2, n] (token ids, positions), and the copies to wait for."""

    rows: int
    note: Any
    states: Any
    numbers: Any
    copied: list = field(default_factory=list)


class Recorder:
    """Takes the states of one step after another: `begin`, `keep` per layer, `end`; `finish` closes the file.

    `place(ids, positions, note)` says to whom the rows of a finished step belong (it runs in the thread, and its answer stands in
    `finish`'s list beside the step's place in the file); what it raises is raised by `finish`.
    """

    def __init__(self, folder: str, slots: int, place: Callable[[Any, Any, Any], Any]):
        os.makedirs(folder, exist_ok=True)
        handle, self.path = tempfile.mkstemp(dir=folder, prefix="states-", suffix=".bin")
        self.file, self.slots, self.place = os.fdopen(handle, "wb"), slots, place
        self.steps: list[tuple[int, int, Any]] = []  # first value in the file, rows, what `place` said
        self.written, self.width, self.dtype = 0, 0, ""
        self.error: BaseException | None = None
        self._free: queue.Queue = queue.Queue()
        for _ in range(HOST_BUFFERS):
            self._free.put((None, None))
        self._queue: queue.Queue = queue.Queue()
        self._device: Any = None
        self._copied: list = [None] * slots
        self._side: Any = None
        self._step: _Step | None = None
        self._thread = threading.Thread(target=self._write_steps, daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        """True between `begin` and `end`."""
        return self._step is not None

    def begin(self, rows: int, note: Any) -> None:
        """A step of `rows` rows starts; waits where the disk is behind by all buffers."""
        states, numbers = self._free.get()
        self._step = _Step(rows, note, states, numbers)

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
        if step.states is None or step.states.shape[1] < step.rows:
            self._allocate(step, parts[0])
        host = step.states[slot, : step.rows]
        if self._side is None:
            self._sum(parts, host)
            return
        buffer, stream = self._device[slot, : step.rows], torch.cuda.current_stream()
        if self._copied[slot] is not None:
            stream.wait_event(self._copied[slot])  # the last step's copy out of this buffer
        self._sum(parts, buffer)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            host.copy_(buffer, non_blocking=True)
            self._copied[slot] = self._side.record_event()
        step.copied.append(self._copied[slot])

    def end(self) -> None:
        """The step is complete: to the thread."""
        self._queue.put(self._step)
        self._step = None

    def finish(self) -> list[tuple[int, int, Any]]:
        """Wait for the file to be whole: its steps as (first value, rows, what `place` said)."""
        self._queue.put(None)
        self._thread.join()
        self.file.close()
        if self.error:
            raise self.error
        return self.steps

    def abandon(self) -> None:
        """End without a result, where `finish` was not called: thread and file go."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self.file.close()
            os.unlink(self.path)

    @staticmethod
    def _sum(parts: list, out: Any) -> None:
        import torch

        if len(parts) > 1:
            torch.add(*parts, out=out)
        else:
            out.copy_(parts[0])

    def _allocate(self, step: _Step, like: Any) -> None:
        import torch

        self.width, self.dtype = like.shape[-1], str(like.dtype).removeprefix("torch.")
        shape = (self.slots, step.rows, self.width)
        step.states = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
        if like.is_cuda and (self._device is None or self._device.shape[1] < step.rows):
            self._side = self._side or torch.cuda.Stream()
            if self._device is not None:
                torch.cuda.current_stream().wait_stream(self._side)  # before the old buffer's memory is used again
            self._device = torch.empty(shape, dtype=like.dtype, device=like.device)

    def _write_steps(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                if self.error is None:
                    self._write(step)
            except BaseException as error:
                self.error = error
            self._free.put((step.states, step.numbers))

    def _write(self, step: _Step) -> None:
        import torch

        for event in step.copied:
            event.synchronize()
        ids, positions = step.numbers[: 2 * step.rows].view(2, step.rows).numpy()
        owners = self.place(ids, positions, step.note)
        for slot in range(self.slots):
            self.file.write(step.states[slot, : step.rows].view(torch.uint8).numpy())
        self.steps.append((self.written, step.rows, owners))
        self.written += self.slots * step.rows * self.width
