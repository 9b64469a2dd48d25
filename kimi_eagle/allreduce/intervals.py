"""Arithmetic on time intervals: who owns each moment, unions, and how much of them falls into each step."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kimi_eagle.allreduce import names

# At each moment the first of these that is running owns it: so overlapping streams and nested operators count once.
# Communication before computation: AllReduce time that computation hides is still AllReduce time (`hidden` says how much).
OWNERS = (names.ALLREDUCE, "other collectives", *names.COMPUTE, names.DISPATCH)
PARTS = (*OWNERS, names.GAP)


def union(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The intervals merged where they touch or overlap, in order; two arrays of equal length."""
    if not len(starts):
        return np.empty(0), np.empty(0)
    order = np.argsort(starts, kind="stable")
    starts, ends = np.asarray(starts, float)[order], np.maximum.accumulate(np.asarray(ends, float)[order])
    first = np.r_[True, starts[1:] > ends[:-1]]
    last = np.r_[first[1:], True]
    return starts[first], ends[last]


def covered(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Covered time up to each of `edges`, for merged intervals; differences of it are the time within windows."""
    if not len(starts):
        return np.zeros(len(edges))
    times = np.column_stack([starts, ends]).ravel()
    total = np.column_stack([np.zeros(len(starts)), ends - starts]).ravel().cumsum()
    return np.interp(edges, times, total, left=0.0, right=total[-1])


def within(starts: np.ndarray, ends: np.ndarray, windows: pd.DataFrame) -> np.ndarray:
    """Covered time [us] of the (unmerged) intervals in each row of `windows` (start, end)."""
    merged = union(starts, ends)
    return covered(*merged, windows["end"].to_numpy()) - covered(*merged, windows["start"].to_numpy())


def owner(kinds: pd.Series) -> np.ndarray:
    """The owner's name of each kind: all collectives but AllReduce are one part."""
    other = [k for k in names.COLLECTIVES if k != names.ALLREDUCE]
    return np.where(kinds.isin(other), "other collectives", kinds.astype(str))


def segments(events: pd.DataFrame, start: float, end: float, owners: Sequence[str] = OWNERS) -> pd.DataFrame:
    """The span from `start` to `end` cut into pieces of one owner each: columns start, end, part. Their lengths sum to the span."""
    events = events[(events["end"] > start) & (events["start"] < end)]
    begins, ends = events["start"].clip(lower=start).to_numpy(), events["end"].clip(upper=end).to_numpy()
    edges = np.unique(np.r_[start, begins, ends, end])
    part = np.full(len(edges) - 1, len(owners), dtype=np.int8)
    mine = owner(events["kind"])
    for code in range(len(owners) - 1, -1, -1):  # the highest priority is written last
        chosen = mine == owners[code]
        low, high = union(begins[chosen], ends[chosen])
        change = np.zeros(len(edges), dtype=np.int32)
        np.add.at(change, np.searchsorted(edges, low), 1)
        np.add.at(change, np.searchsorted(edges, high), -1)
        part[change.cumsum()[:-1] > 0] = code
    change = np.flatnonzero(np.diff(part)) + 1
    first, last = np.r_[0, change], np.r_[change, len(part)]
    labels = np.array([*owners, names.GAP], dtype=object)
    return pd.DataFrame({"start": edges[first], "end": edges[last], "part": labels[part[first]]})
