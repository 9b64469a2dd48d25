"""AllReduce latency against message size, from measured or published points."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kimi_eagle.errors import BadInput


@dataclass(frozen=True)
class Curve:
    """Latency [us] at a message size [bytes]: flat below the first point, straight between points, and past the last at the
    bandwidth `tail_gb_s` (message bytes per time; 0: the slope of the last two points). scale multiplies all of it.

    Straight between points is the usual latency-plus-bandwidth model, applied piecewise.
    """

    bytes: tuple[float, ...]
    us: tuple[float, ...]
    tail_gb_s: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]], tail_gb_s: float = 0.0) -> "Curve":
        """From (bytes, us) pairs in any order; BadInput unless sizes are positive and differ."""
        ordered = sorted((float(b), float(u)) for b, u in points)
        sizes = [b for b, _ in ordered]
        if not ordered or sizes[0] <= 0 or len(set(sizes)) != len(sizes):
            raise BadInput(f"AllReduce points need positive, distinct message sizes in bytes, not {sizes[:6]}.")
        return cls(tuple(sizes), tuple(u for _, u in ordered), tail_gb_s)

    def __call__(self, size: float) -> float:
        """Latency in microseconds of one AllReduce of `size` bytes."""
        if size <= self.bytes[-1] or len(self.bytes) == 1:
            value = float(np.interp(size, self.bytes, self.us))
        else:
            slope = (self.us[-1] - self.us[-2]) / (self.bytes[-1] - self.bytes[-2])
            if self.tail_gb_s:
                slope = 1e-3 / self.tail_gb_s
            value = self.us[-1] + max(slope, 0.0) * (size - self.bytes[-1])
        return self.scale * value

    def scaled(self, factor: float) -> "Curve":
        """The same curve with every latency multiplied by `factor` (0.5: twice as fast)."""
        return replace(self, scale=self.scale * factor)
