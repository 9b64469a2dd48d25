"""Figures of the extraction: what the answers are like, how far the states are from right (tables: kimi_eagle.tables)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kimi_eagle import tables
from kimi_eagle.chat import Answer
from kimi_eagle.plots import style


def lengths(answers: Sequence[Answer]) -> None:
    """Histograms of prompt and answer lengths in tokens, medians marked."""
    fig, axes = style.new(1, 2, sharey=True)
    columns = {
        "prompt tokens": [len(a.token_ids) - len(a.answer_ids) for a in answers],
        "answer tokens": [len(a.answer_ids) for a in answers],
    }
    for axis, (name, values), color in zip(axes, columns.items(), (style.QUIET, style.MAIN), strict=True):
        axis.hist(values, bins=24, color=color)
        axis.axvline(np.median(values), color="black", linewidth=1, linestyle="--")
        axis.set(xlabel=name, title=f"median {np.median(values):.0f}, 90 % below {np.quantile(values, 0.9):.0f}")
    axes[0].set_ylabel("rows")
    style.show(fig, "Histograms of prompt and answer lengths in tokens")


def verification(found: dict[str, Any]) -> None:
    """Every check's error against its bar, on a log scale: left of the dashed bar is right."""
    table = tables.verification_table(found).iloc[::-1]
    fig, axis = style.new(figsize=(7.0, 0.5 + 0.42 * len(table)))
    for place, (error, bar) in enumerate(zip(table["error"], table["bar"], strict=True)):
        axis.plot(max(error, 1e-9), place, "o", color=style.MAIN if error < bar else style.OTHER)
        axis.plot([bar, bar], [place - 0.35, place + 0.35], color="black", linestyle="--", linewidth=1)
    axis.set(xscale="log", yticks=range(len(table)), xlabel="error (0 is drawn at 1e-9); dashed: the bar")
    axis.set_yticklabels(table.index)
    axis.set_title("The stored states are the target's" if found["right"] else "The stored states are NOT the target's")
    style.show(fig, "Errors of each verification check against its bar")
