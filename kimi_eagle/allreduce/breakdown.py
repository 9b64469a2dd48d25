"""The AllReduce share of a decode step, per rank, without the usual ways of fooling oneself.

* Wall time of a step: from its annotation to the next one, so sampling and scheduling belong to it. Only pure decode steps count.
* Overlap counts once: shares come from unions of intervals, never from sums of event durations.
* A rank that arrives early at an AllReduce waits in it. Waiting is told from transfer by the ranks' starts: transfer lasts from
  the last rank's start, waiting is what comes before. Clocks are aligned by the ends, which ranks reach together.
* All parts of a step sum to its wall time; what nothing runs in is `host gap`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kimi_eagle.allreduce import intervals, names
from kimi_eagle.allreduce.read import RankTrace, read
from kimi_eagle.errors import BadInput

PROFILER_LIMIT = 1.10  # a profiled step may take this much longer than a plain one before its shares are rescaled


@dataclass(frozen=True)
class Breakdown:
    """What a set of traces of one window says. Times in microseconds per step, shares of the step's wall time.

    ranks: a row a rank (wall, share of AllReduce with its 10th and 90th percentile over steps, transfer, waiting, hidden).
    parts: rank, part, us, share; implementations: rank, collective, implementation, fused, calls, us, share;
    calls: a row an AllReduce (rank, step, call, bytes, us, waiting_us, transfer_us, bus_gb_s). window: what was measured.
    """

    window: dict[str, Any]
    ranks: pd.DataFrame
    parts: pd.DataFrame
    implementations: pd.DataFrame
    calls: pd.DataFrame
    traces: list[RankTrace] = field(repr=False, default_factory=list)
    steps: list[pd.DataFrame] = field(repr=False, default_factory=list)


def find(folder: str | Path) -> list[Path]:
    """The traces of a folder, one a rank, in order of their names; BadInput where there are none."""
    folder = Path(folder)
    files = sorted(p for pattern in ("*.json", "*.json.gz") for p in folder.glob(pattern) if p.name != "window.json")
    if not files:
        raise BadInput(f"{folder}: no .json or .json.gz trace there; capture one first (notebook 01).")
    return files


def breakdown(
    traces: str | Path | Sequence[str | Path | RankTrace], *, bytes_per_token: float | None = None,
    plain_step_us: Sequence[float] = (),
) -> Breakdown:  # fmt: skip
    """Break down the traces (a folder, or one file or RankTrace a rank) of one decode window.

    bytes_per_token (hidden size x bytes of an element) sizes messages of implementations whose events carry none. plain_step_us:
    equal steps without the profiler; where profiled ones take over 10 % longer, `rescaled_share` sets AllReduce against these and
    a note says so.
    """
    sources = find(traces) if isinstance(traces, (str, Path)) else list(traces)
    loaded = sorted((t if isinstance(t, RankTrace) else read(t) for t in sources), key=lambda t: t.rank)
    notes: list[str] = []
    steps, window = _windows(loaded, notes)
    calls = _calls(loaded, steps, bytes_per_token, notes)
    rows, parts, kinds = [], [], []
    for trace, mine in zip(loaded, steps, strict=True):
        span = trace.events[
            (trace.events["end"] > mine["start"].iloc[0]) & (trace.events["start"] < mine["end"].iloc[-1])
        ]
        rows.append(_rank(trace.rank, span, mine, calls[calls["rank"] == trace.rank]))
        parts += _parts(trace.rank, span, mine)
        kinds += _implementations(trace.rank, span, mine)
    table = pd.DataFrame(rows)
    window |= _against_plain(table, plain_step_us, notes)
    if not len(calls):
        notes.append("no AllReduce in these traces: one rank, or communication that the profiler does not see")
    sized = calls["bytes"].dropna()
    window |= {
        "message_bytes": float(sized.median()) if len(sized) else None,
        "calls_per_step": len(calls) / max(1, len(loaded) * window["steps"]),
        "notes": notes,
    }
    columns = ["rank", "collective", "implementation", "fused", "calls", "us", "share"]
    return Breakdown(window, table, pd.DataFrame(parts), pd.DataFrame(kinds, columns=columns), calls, loaded, steps)


def _against_plain(ranks: pd.DataFrame, plain_step_us: Sequence[float], notes: list[str]) -> dict[str, Any]:
    """What the profiler cost: profiled over plain step time, and in `ranks` the share of a plain step where it cost too much."""
    ranks["rescaled_share"] = ranks["share"]
    if not len(plain_step_us):
        return {"plain_step_us": None, "profiled_over_plain": None, "rescaled": False}
    plain = float(np.mean(plain_step_us))
    ratio = float(ranks["wall_us"].mean() / plain)
    if ratio > PROFILER_LIMIT:
        ranks["rescaled_share"] = ranks["allreduce_us"] / plain
        notes.append(
            f"profiled steps are {100 * (ratio - 1):.0f} % slower than plain ones: rescaled_share is of a plain step"
        )
    return {"plain_step_us": plain, "profiled_over_plain": ratio, "rescaled": ratio > PROFILER_LIMIT}


def _windows(traces: list[RankTrace], notes: list[str]) -> tuple[list[pd.DataFrame], dict[str, Any]]:
    """Per rank the wall-clock window of each pure decode step of the most frequent size; and what the window is."""
    found = []
    for trace in traces:
        steps = trace.steps.copy()
        if len(steps) > 1:
            steps["end"] = np.r_[steps["start"].to_numpy()[1:], np.nan]  # until the next step begins
            steps = steps.dropna(subset=["end"])
        decode = steps[(steps["prefill_requests"] == 0) & (steps["tokens"] > 0)]
        if len(decode):
            size = decode.groupby(["requests", "tokens"]).size().idxmax()
            decode = decode[(decode["requests"] == size[0]) & (decode["tokens"] == size[1])]
        elif len(steps):
            notes.append(f"rank {trace.rank}: no pure decode step, all {len(steps)} steps are taken")
            decode = steps
        elif len(trace.events):
            notes.append(f"rank {trace.rank}: no step annotations, the whole trace is taken as one step")
            whole = {"start": trace.events["start"].min(), "end": trace.events["end"].max()}
            decode = pd.DataFrame([{**whole, "prefill_requests": 0, "prefill_tokens": 0, "requests": 0, "tokens": 0}])
        else:
            raise BadInput(
                f"trace {trace.path}: no operators and no kernels in it; was anything running in the window?"
            )
        found.append(decode.reset_index(drop=True))
    count = min(map(len, found))
    if any(len(f) != count for f in found):
        notes.append(f"ranks hold {sorted(map(len, found))} steps: the first {count} of each are compared")
        found = [f.iloc[:count] for f in found]
    first = found[0]
    kind = "prefill" if (first["prefill_tokens"] > 0).any() else "decode" if (first["tokens"] > 0).any() else "unknown"
    return found, {
        "steps": count,
        "kind": kind,
        "requests": int(first["requests"].median()),
        "tokens": int((first["tokens"] + first["prefill_tokens"]).median()),
        "ranks_read": len(traces),
        "world_size": max(max(t.world_size for t in traces), len(traces)),
    }


def _calls(
    traces: list[RankTrace], steps: list[pd.DataFrame], per_token: float | None, notes: list[str]
) -> pd.DataFrame:
    """Every AllReduce of the window, with waiting and transfer where all ranks can be compared (NaN otherwise)."""
    tables = []
    for trace, mine in zip(traces, steps, strict=True):
        events = trace.events[trace.events["kind"] == names.ALLREDUCE]
        step = np.searchsorted(mine["start"].to_numpy(), events["start"].to_numpy(), side="right") - 1
        inside = (step >= 0) & (events["start"].to_numpy() < mine["end"].to_numpy()[np.maximum(step, 0)])
        table = events.loc[inside, ["start", "end", "implementation", "fused", "bytes"]].assign(
            rank=trace.rank, step=step[inside]
        )
        table["call"] = table.groupby("step").cumcount()
        if per_token:
            tokens = (mine["tokens"] + mine["prefill_tokens"]).to_numpy()[table["step"].to_numpy(dtype=int)]
            table["bytes"] = table["bytes"].fillna(pd.Series(tokens * per_token, index=table.index))
        tables.append(table)
    calls = pd.concat(tables, ignore_index=True)
    calls["us"] = calls["end"] - calls["start"]
    calls["waiting_us"] = np.nan
    if len(traces) > 1 and len(calls):
        _align(calls, len(traces), notes)
    calls["transfer_us"] = calls["us"] - calls["waiting_us"]
    n = max(max(t.world_size for t in traces), len(traces))
    time = calls["transfer_us"].fillna(calls["us"])
    # nccl-tests' bus bandwidth: an AllReduce moves 2 (n - 1) / n of the message over each link. Bytes per us = MB/s.
    calls["bus_gb_s"] = calls["bytes"] / time.where(time > 0) * 2 * (n - 1) / n / 1000
    return calls


def _align(calls: pd.DataFrame, ranks: int, notes: list[str]) -> None:
    """Fill `waiting_us`: how long each call ran before the last rank joined, clocks aligned by the calls' ends."""
    per_step = calls.groupby(["step", "rank"]).size().unstack(fill_value=0)
    equal = per_step.index[per_step.nunique(axis=1).eq(1) & (per_step.shape[1] == ranks)]
    if len(equal) < len(per_step):
        notes.append(
            f"{len(per_step) - len(equal)} steps with unequal numbers of AllReduces on the ranks: no waiting told there"
        )
    chosen = calls["step"].isin(equal)
    ends = calls[chosen].pivot(index=["step", "call"], columns="rank", values="end")
    starts = calls[chosen].pivot(index=["step", "call"], columns="rank", values="start")
    offsets = ends.sub(ends.iloc[:, 0], axis=0).median()
    starts, ends = starts - offsets, ends - offsets
    last = starts.max(axis=1)
    waiting = starts.rsub(last, axis=0).clip(lower=0)
    waiting = waiting.where(waiting < ends - starts, ends - starts)  # a rank cannot wait longer than its call lasts
    keys = pd.MultiIndex.from_frame(calls.loc[chosen, ["step", "call", "rank"]])
    calls.loc[chosen, "waiting_us"] = waiting.stack().reindex(keys).to_numpy()


def _rank(rank: int, events: pd.DataFrame, steps: pd.DataFrame, calls: pd.DataFrame) -> dict[str, Any]:
    wall = (steps["end"] - steps["start"]).to_numpy()
    mine = events["kind"] == names.ALLREDUCE
    busy = intervals.within(events["start"][mine], events["end"][mine], steps)
    rest = events["kind"].isin(names.COMPUTE)
    # Only kernels of another stream hide communication; an operator that merely wraps it (on the CPU) does not.
    other = rest & ~_wraps(events, mine)
    computing = intervals.within(events["start"][other], events["end"][other], steps)
    either = intervals.within(events["start"][other | mine], events["end"][other | mine], steps)
    share = busy / wall
    sums = calls[["waiting_us", "transfer_us"]].sum(min_count=1) / len(steps)
    return {
        "rank": rank, "steps": len(steps), "wall_us": wall.mean(), "wall_us_median": float(np.median(wall)),
        "allreduce_us": busy.mean(), "share": busy.sum() / wall.sum(),
        "share_low": float(np.quantile(share, 0.1)), "share_high": float(np.quantile(share, 0.9)),
        "transfer_us": sums["transfer_us"], "waiting_us": sums["waiting_us"], "hidden_us": (busy + computing - either).mean(),
    }  # fmt: skip


def _wraps(events: pd.DataFrame, mine: pd.Series) -> np.ndarray:
    """True for events within which an AllReduce of the same lane runs (a caller's operator)."""
    wraps = np.zeros(len(events), bool)
    for lane in events["lane"][mine].unique():
        here = (events["lane"] == lane).to_numpy()
        starts = np.sort(events["start"][mine & here].to_numpy())
        next_start = np.r_[starts, np.inf][np.searchsorted(starts, events["start"].to_numpy(), side="left")]
        wraps |= here & (next_start < events["end"].to_numpy())
    return wraps


def _parts(rank: int, events: pd.DataFrame, steps: pd.DataFrame) -> list[dict[str, Any]]:
    wall, count = float((steps["end"] - steps["start"]).sum()), len(steps)
    pieces = intervals.segments(events, steps["start"].iloc[0], steps["end"].iloc[-1])
    rows = []
    for part in intervals.PARTS:
        chosen = pieces["part"] == part
        time = intervals.within(pieces["start"][chosen].to_numpy(), pieces["end"][chosen].to_numpy(), steps).sum()
        rows.append({"rank": rank, "part": part, "us": time / count, "share": time / wall})
    return rows


def _implementations(rank: int, events: pd.DataFrame, steps: pd.DataFrame) -> list[tuple[Any, ...]]:
    wall, count, rows = float((steps["end"] - steps["start"]).sum()), len(steps), []
    collectives = events[events["kind"].isin(names.COLLECTIVES)]
    for key, group in collectives.groupby(["kind", "implementation", "fused"], observed=True):
        time = intervals.within(group["start"].to_numpy(), group["end"].to_numpy(), steps).sum()
        rows.append((rank, *key, len(group) / count, time / count, time / wall))
    return rows
