"""One trace, several answers: how the same AllReduce time becomes 20 % or 50 % of decode, and a layer's timeline.

The user's profile said 51.5 %; published latencies give 19 to 25 %. Each reading here is one way to make such a number; side by
side on a reader's own trace they show which of them makes the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kimi_eagle.allreduce import intervals, names
from kimi_eagle.allreduce.breakdown import Breakdown, breakdown

if TYPE_CHECKING:  # figures read this module, and no engine may stand behind a figure
    from kimi_eagle.allreduce.capture import Window

# 61 layers x 2 AllReduces of one 14,336-byte token, against a step of 12.5 ms (80.1 tokens/s on one stream with plain NCCL).
CALLS, STEP_MS = 122, 12.5
FOUNDING = 0.515


def published_shares() -> pd.DataFrame:
    """The founding number beside what published latencies give: what, share_low, share_high, from."""

    def share(us: float) -> float:
        return CALLS * us / 1000 / STEP_MS

    rows = [
        ("the founding profile (8x RTX PRO 6000, Kimi-K2.5)", FOUNDING, FOUNDING, "the user's own trace; how it was read is not known"),
        ("published latency, 19.8-25 us a call", share(19.84), share(25.0), "122 calls in a 12.5 ms step"),
        ("published latency with the add, 56.2 us a call", share(56.2), share(56.2), "NCCL and add in graph replay, same step"),
        ("published latency of the fused one-stage kernel, 11.8 us", share(11.8), share(11.8), "same page, same step"),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["what", "share_low", "share_high", "from"])


def readings(result: Breakdown) -> pd.DataFrame:
    """The AllReduce share of the same steps, read in six ways: reading, share (mean over ranks), lowest and highest rank, why.

    "union of wall" is the definition used everywhere else.
    """
    rows: dict[str, list[float]] = {}
    for trace, steps, row in zip(result.traces, result.steps, result.ranks.itertuples(), strict=True):
        wall = float((steps["end"] - steps["start"]).sum())
        inside = trace.events[
            (trace.events["end"] > steps["start"].iloc[0]) & (trace.events["start"] < steps["end"].iloc[-1])
        ]
        mine = inside["kind"] == names.ALLREDUCE
        caller = mine | (
            (inside["kind"] == names.DISPATCH) & inside["name"].astype(str).str.contains("all_?reduce", regex=True)
        )
        length = inside["end"] - inside["start"]
        busy = float(intervals.within(inside["start"].to_numpy(), inside["end"].to_numpy(), steps).sum())
        union = row.share * wall
        rows.setdefault("sum of all AllReduce events", []).append(float(length[caller].sum()) / wall)
        rows.setdefault("union of busy time", []).append(union / busy if busy else 0.0)
        rows.setdefault("union of wall", []).append(row.share)
        rows.setdefault("union of plain wall", []).append(
            row.allreduce_us / result.window["plain_step_us"] if result.window["plain_step_us"] else np.nan
        )
        rows.setdefault("transfer alone", []).append(row.transfer_us / row.wall_us)
        exposed = max(0.0, row.allreduce_us - row.hidden_us)
        rows.setdefault("not hidden by computation", []).append(exposed / row.wall_us)
    why = {
        "sum of all AllReduce events": "counts the caller's event and the transfer's, and overlap twice",
        "union of busy time": "kernel time against kernel time: gaps are left out of the step",
        "union of wall": "overlap once, the whole step: the definition",
        "union of plain wall": "the same time against a step without the profiler",
        "transfer alone": "without waiting for the slowest rank",
        "not hidden by computation": "what a step would lose if AllReduce cost nothing",
    }
    return pd.DataFrame(
        [{"reading": k, "share": float(np.mean(v)), "lowest": float(np.min(v)), "highest": float(np.max(v)), "why": why[k]} for k, v in rows.items()]
    )  # fmt: skip


def latency_points(results: dict[str, Breakdown]) -> pd.DataFrame:
    """Per window the median AllReduce as a point: window, bytes, us (as measured), transfer_us (without waiting), low, high, calls."""
    rows = []
    for label, result in results.items():
        calls = result.calls
        if len(calls) and calls["bytes"].notna().any():
            rows.append({"window": label, "bytes": float(calls["bytes"].median()), "us": float(calls["us"].median()),
                         "transfer_us": float(calls["transfer_us"].median()), "low": float(calls["us"].quantile(0.1)),
                         "high": float(calls["us"].quantile(0.9)), "calls": len(calls)})  # fmt: skip
    return pd.DataFrame(rows, columns=["window", "bytes", "us", "transfer_us", "low", "high", "calls"])


def layer_count(result: Breakdown) -> int:
    """How many layers a step's AllReduces mark (two a layer, and one after the embedding where their number is odd)."""
    return int(result.window["calls_per_step"]) // 2


def layer_timeline(result: Breakdown, layer: int, step: int = 0) -> pd.DataFrame:
    """Who owns each moment of one layer, per rank: rank, part, start_us, end_us from the layer's start on the first rank.

    The layer runs from the end of the AllReduce before it to the end of its second one. Empty where there is no AllReduce.
    """
    tables, origin = [], None
    for trace in result.traces:
        mine = result.calls[(result.calls["rank"] == trace.rank) & (result.calls["step"] == step)].sort_values("start")
        ends = mine["end"].to_numpy()
        first = len(ends) % 2 + 2 * layer
        if first + 1 >= len(ends):
            continue
        steps = next(s for t, s in zip(result.traces, result.steps, strict=True) if t is trace)
        begin = ends[first - 1] if first else float(steps["start"].iloc[step])
        origin = begin if origin is None else origin
        pieces = intervals.segments(trace.events, float(begin), float(ends[first + 1]))
        pieces = pieces.assign(rank=trace.rank, start_us=pieces["start"] - origin, end_us=pieces["end"] - origin)
        tables.append(pieces[["rank", "part", "start_us", "end_us"]])
    return (
        pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["rank", "part", "start_us", "end_us"])
    )


def break_down_all(windows: list[Window], bytes_per_token: float) -> dict[str, Breakdown]:
    """Each captured window broken down, by its label."""
    return {
        w.label: breakdown(w.files, bytes_per_token=bytes_per_token, plain_step_us=w.plain_step_us) for w in windows
    }


def summary(windows: list[Window], results: dict[str, Breakdown]) -> pd.DataFrame:
    """A row a window: what it stands for, tokens, step time, AllReduce share over ranks, transfer and waiting, profiler's cost."""
    rows = []
    for w in windows:
        r = results[w.label].ranks
        rows.append({
            "window": w.label, "stands for": w.stands_for, "tokens": results[w.label].window["tokens"], "steps": results[w.label].window["steps"],
            "step_ms": r["wall_us"].mean() / 1000, "plain_step_ms": float(np.mean(w.plain_step_us)) / 1000,
            "share": r["share"].mean(), "share_low": r["share_low"].min(), "share_high": r["share_high"].max(),
            "transfer_share": (r["transfer_us"] / r["wall_us"]).mean(), "waiting_share": (r["waiting_us"] / r["wall_us"]).mean(),
            "rescaled_share": r["rescaled_share"].mean(),
            "profiled_over_plain": results[w.label].window["profiled_over_plain"],
        })  # fmt: skip
    return pd.DataFrame(rows)


def figures(windows: list[Window], results: dict[str, Breakdown]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures, units) of the stage's result.json: per window the share with its interval, times, and the latency per call."""
    values: dict[str, Any] = {}
    for w, row in zip(windows, summary(windows, results).to_dict("records"), strict=True):
        calls = results[w.label].calls
        values[w.label] = {
            "tokens": int(row["tokens"]), "steps": int(row["steps"]), "step_us": row["step_ms"] * 1000, "plain_step_us": row["plain_step_ms"] * 1000,
            "allreduce_share": row["share"], "rescaled_share": row["rescaled_share"], "interval": [row["share_low"], row["share_high"]],
            "waiting_share": _number(row["waiting_share"]), "profiled_over_plain": row["profiled_over_plain"],
            "call_us": _number(calls["us"].median()), "call_transfer_us": _number(calls["transfer_us"].median()),
            "message_bytes": _number(calls["bytes"].median()),
        }  # fmt: skip
    units = {"tokens": "tokens", "steps": "steps", "step_us": "us", "plain_step_us": "us", "allreduce_share": "share of wall time", "rescaled_share": "share of a plain step",
             "interval": "share of wall time", "waiting_share": "share of wall time", "profiled_over_plain": "ratio", "call_us": "us",
             "call_transfer_us": "us", "message_bytes": "bytes"}  # fmt: skip
    return {"windows": values}, {"windows": {w.label: units for w in windows}}


def _number(value: float) -> float:
    return 0.0 if value is None or np.isnan(value) else float(value)
