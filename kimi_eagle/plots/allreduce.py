"""Figures of notebook 01: who owns a step, latency against message size, one layer's timeline, one trace read in several ways."""

import numpy as np
import pandas as pd

from kimi_eagle.allreduce import intervals, names
from kimi_eagle.plots import style

# AllReduce in the loud colour, what a step does besides in the quieter ones, gaps in grey.
PART_COLORS = {
    names.ALLREDUCE: style.COLORS[1], "other collectives": style.COLORS[4], "attention": style.COLORS[0], "MoE": style.COLORS[3],
    "matmul": style.COLORS[5], "memory": style.COLORS[2], "other compute": "#B8C4CE", names.DISPATCH: "#F2B48A", names.GAP: "#E3E3E3",
}  # fmt: skip


def shares(results: dict, title: str = "Where a decode step goes, per rank") -> None:
    """Stacked percentage bars, one a rank, a group a window; the AllReduce share is printed beside each bar. results: label -> Breakdown."""
    rows = [(label, rank, part) for label, r in results.items() for rank, part in r.parts.groupby("rank")]
    fig, axes = style.new(figsize=(7.2, 0.8 + 0.34 * len(rows)))
    used = set()
    for place, (_label, _, part) in enumerate(rows):
        left = 0.0
        shown = part.set_index("part")["share"]
        for name in intervals.PARTS:
            width = 100 * float(shown[name])
            axes.barh(
                place,
                width,
                left=left,
                height=0.75,
                color=PART_COLORS[name],
                label=name if name not in used and width else None,
            )
            used |= {name} if width else set()
            left += width
        axes.text(
            101, place, f"{100 * float(shown[names.ALLREDUCE]):.0f} %", va="center", color=PART_COLORS[names.ALLREDUCE]
        )
    axes.set_yticks(range(len(rows)), [f"{label} rank {rank}" for label, rank, _ in rows])
    axes.invert_yaxis()
    axes.set(xlim=(0, 108), xlabel="share of step wall time [%] (AllReduce printed right)", title=title)
    axes.grid(False)
    fig.legend(loc="outside lower center", ncols=4, fontsize=8)
    style.show(fig, alt=f"{title}: stacked bars of {len(rows)} ranks")


def latency(own: pd.DataFrame, published: pd.DataFrame, bench: pd.DataFrame | None = None) -> None:
    """AllReduce latency against message size, log-log: own traces (bars from the 10th to the 90th percentile; hollow: transfer
    alone), own microbenchmark as lines, published points in grey."""
    fig, axes = style.new(figsize=(7.2, 4.2))
    for implementation, points in published[published["box"].str.startswith("8x RTX PRO 6000")].groupby(
        "implementation"
    ):
        points = points.sort_values("bytes")
        axes.plot(points["bytes"], points["latency_us"], "o--", color=style.QUIET, markersize=4, linewidth=0.8)
        last = points.iloc[-1]
        axes.annotate(
            implementation,
            (last["bytes"], last["latency_us"]),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=7,
            color="#707070",
        )
    for place, (variant, rows) in enumerate(bench.groupby("variant") if bench is not None else ()):
        axes.plot(rows["bytes"], rows["median_us"], "s-", color=style.COLORS[(0, 2, 3, 4)[place % 4]], markersize=4,
                  label=f"microbenchmark, {variant} ({rows['backend'].iloc[0]}, {rows['ranks'].iloc[0]} ranks)")  # fmt: skip
    if len(own):
        spread = np.array([own["us"] - own["low"], own["high"] - own["us"]]).clip(min=0)
        axes.errorbar(
            own["bytes"], own["us"], yerr=spread, fmt="D", color=style.OTHER, label="in the engine's trace, median"
        )
        axes.plot(
            own["bytes"],
            own["transfer_us"],
            "D",
            color=style.OTHER,
            markerfacecolor="none",
            label="same, transfer alone",
        )
    axes.set(xscale="log", yscale="log", xlabel="message [bytes]", ylabel="latency of one AllReduce [us]",
             title="AllReduce latency against message size (grey: published, 8x RTX PRO 6000)")  # fmt: skip
    axes.axvline(14336, color=style.QUIET, linewidth=0.8, linestyle=":")
    axes.text(14336, axes.get_ylim()[0] * 1.1, " one Kimi token", fontsize=7, color="#707070")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    style.show(fig, alt="AllReduce latency against message size on logarithmic axes")


def timeline(pieces: pd.DataFrame, title: str = "One layer, rank by rank") -> None:
    """A lane a rank: who owns each moment between two layers' ends. pieces: as allreduce.reading.layer_timeline gives them."""
    ranks = sorted(pieces["rank"].unique())
    fig, axes = style.new(figsize=(7.2, 1.4 + 0.45 * max(1, len(ranks))))
    for part in [p for p in intervals.PARTS if (pieces["part"] == p).any()]:
        for place, rank in enumerate(ranks):
            rows = pieces[(pieces["part"] == part) & (pieces["rank"] == rank)]
            spans = list(zip(rows["start_us"], rows["end_us"] - rows["start_us"], strict=True))
            axes.broken_barh(
                spans,
                (place - 0.35, 0.7),
                color=PART_COLORS[part],
                label=part if place == 0 or part not in axes.get_legend_handles_labels()[1] else None,
            )
    axes.set_yticks(range(len(ranks)), [f"rank {r}" for r in ranks])
    axes.set(xlabel="time from the layer's start on the first rank [us]", title=title)
    axes.grid(False)
    fig.legend(loc="outside lower center", ncols=4, fontsize=8)
    style.show(fig, alt=f"{title}: {len(ranks)} ranks")


def readings(own: pd.DataFrame, published: pd.DataFrame) -> None:
    """The same trace read in several ways (bars from the lowest to the highest rank) beside the published and founding shares."""
    fig, axes = style.new(figsize=(7.2, 3.6))
    names_ = [*own["reading"], *published["what"]]
    low = [*own["lowest"], *published["share_low"]]
    high = [*own["highest"], *published["share_high"]]
    middle = [*own["share"], *((published["share_low"] + published["share_high"]) / 2)]
    for place, (a, b, m) in enumerate(zip(low, high, middle, strict=True)):
        color = style.MAIN if place < len(own) else style.QUIET
        axes.plot([100 * a, 100 * b], [place, place], color=color, linewidth=5, alpha=0.5, solid_capstyle="butt")
        axes.plot(100 * m, place, "o", color=color)
        axes.text(100 * max(b, m) + 1.5, place, f"{100 * m:.0f} %", va="center", fontsize=8)
    axes.axvline(51.5, color=style.OTHER, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names_)), [n if len(n) < 46 else n[:44] + "..." for n in names_], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="AllReduce share [%] (dashed: the founding 51.5 %)", title="One AllReduce time, many shares")
    style.show(fig, alt="AllReduce share by way of reading, own trace and published")


def explore_timeline(result: object, title: str = "One layer, rank by rank") -> None:
    """A slider over the layers of `result` (a Breakdown) above the same picture as `timeline`; nothing where no layer is marked."""
    from IPython.display import display
    from ipywidgets import IntSlider, interactive_output

    from kimi_eagle.allreduce.reading import layer_count, layer_timeline

    count = layer_count(result)
    if not count:
        return
    slider = IntSlider(value=0, min=0, max=count - 1, description="layer", continuous_update=False)
    display(
        slider,
        interactive_output(
            lambda layer: timeline(layer_timeline(result, layer), f"{title}: layer {layer}"), {"layer": slider}
        ),
    )
