"""Figures of acceptance: rates per draft position, and what they do to speed."""

from typing import Any

import numpy as np

from kimi_eagle.plots import style


def positions(ways: dict[str, dict[str, Any]]) -> None:
    """Unconditional acceptance rate per draft position for each way ({name: statistics.summarize(...)}), from 0 on.

    The whisker of a served or simulated rate is its binomial standard error over drafts, a lower bound of the real spread.
    """
    fig, axis = style.new()
    width = 0.8 / len(ways)
    for place, ((name, found), color) in enumerate(
        zip(ways.items(), (style.MAIN, style.OTHER, style.QUIET), strict=False)
    ):
        rates = np.array(found["unconditional"])
        x = np.arange(1, len(rates) + 1) + (place - (len(ways) - 1) / 2) * width
        error = np.sqrt(rates * (1 - rates) / max(1, found["drafts"]))
        low, high = found["interval"]
        label = f"{name}: length {found['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]"
        axis.bar(x, rates, width, yerr=error, color=color, label=label, error_kw={"linewidth": 1})
        for at, rate in zip(x, rates, strict=True):
            axis.annotate(f"{rate:.2f}", (at, rate), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=8)
    axis.set(xlabel="draft position", ylabel="unconditional acceptance rate", xticks=range(1, len(rates) + 1))
    axis.set_ylim(0, max(0.05, 1.3 * max(max(w["unconditional"]) for w in ways.values())))
    axis.set_title("Acceptance by draft position (length: tokens per target forward, bonus included)")
    axis.legend(loc="upper right")
    style.show(fig, "Unconditional acceptance rate by draft position")


def speed(speeds: dict[int, dict[str, Any]]) -> None:
    """Speculative over plain tokens per second at each concurrency: median, and the range over turns; 1 is break-even."""
    fig, axis = style.new(figsize=(7.0, 3.0))
    for place, found in enumerate(speeds.values()):
        ratio = found["ratio"]
        color = style.MAIN if ratio["median"] >= 1 else style.OTHER
        axis.plot([place, place], [ratio["low"], ratio["high"]], color=color)
        axis.plot(place, ratio["median"], "o", color=color)
        axis.annotate(f"{ratio['median']:.2f}x", (place, ratio["median"]), xytext=(8, -3), textcoords="offset points")
    axis.axhline(1, color="black", linestyle="--", linewidth=1)
    axis.set(
        xticks=range(len(speeds)),
        xlim=(-0.6, len(speeds) - 0.4),
        xlabel="concurrent requests",
        ylabel="with head / plain",
    )
    axis.set_xticklabels(list(speeds))
    axis.set_ylim(bottom=0)
    axis.set_title("Tokens per second with the head, over without (above 1: the head pays here)")
    style.show(fig, "Speed ratio with and without the head at each concurrency")
