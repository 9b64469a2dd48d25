"""Figures of notebook 03: how skewed the target's tokens are, and what a draft vocabulary covers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kimi_eagle.plots import style
from kimi_eagle.vocab_map import TokenCounts, VocabMap

if TYPE_CHECKING:
    from kimi_eagle.target import Target


def frequencies(trained: TokenCounts, chosen: int) -> None:
    """Count of each answer token by rank, log-log; the line marks where the draft vocabulary ends."""
    counts = np.sort(trained.counts.numpy())[::-1]
    counts = counts[counts > 0]
    fig, axis = style.new()
    axis.loglog(np.arange(1, len(counts) + 1), counts, color=style.MAIN)
    axis.axvline(chosen, color=style.OTHER, linestyle="--", label=f"draft vocabulary {chosen:,}")
    axis.set(
        xlabel="rank of the token",
        ylabel="times in the answers",
        title=f"{len(counts):,} distinct tokens in the answers",
    )
    axis.legend()
    style.show(fig, "Token frequency by rank, log-log")


def coverage(table: Sequence[dict[str, float]], chosen: int) -> None:
    """Share of answer tokens that a draft vocabulary of each size holds: in training answers, and in held-out ones."""
    frame = pd.DataFrame(table)
    fig, axis = style.new()
    for column, color in (("trained", style.QUIET), ("held_out", style.MAIN)):
        axis.semilogx(
            frame["draft_vocab_size"], 100 * frame[column], "o-", color=color, label=column.replace("_", "-"), base=2
        )
    axis.axvline(chosen, color=style.OTHER, linestyle="--", label=f"chosen: {chosen:,}")
    axis.set(
        xlabel="draft vocabulary [tokens]",
        ylabel="answer tokens covered [%]",
        title="What is left out can never be drafted",
    )
    axis.set_xticks(frame["draft_vocab_size"], [f"{n:,}" for n in frame["draft_vocab_size"]], rotation=45)
    axis.minorticks_off()
    axis.legend()
    style.show(fig, "Coverage of answer tokens against draft vocabulary size")


def coverage_table(table: Sequence[dict[str, float]]) -> pd.DataFrame:
    """The coverage table in percent, by draft vocabulary size."""
    return 100 * pd.DataFrame(table).set_index("draft_vocab_size").rename(
        columns={"trained": "trained [%]", "held_out": "held-out [%]"}
    )


def kind_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """`vocab_map.coverage_by_kind` as a table, the share in percent."""
    frame = pd.DataFrame(rows).set_index("kind")
    return frame.assign(coverage=100 * frame["coverage"]).rename(columns={"coverage": "covered [%]"})


def trade(frame: pd.DataFrame, chosen: int) -> None:
    """What a draft vocabulary loses in acceptance length against what it costs in bytes, from `speedup.vocabulary.trade`."""
    fig, axis = style.new()
    x = frame["pass_bytes"] / 1e6
    axis.fill_between(x, 100 * frame["relative"], 100 * frame["relative_at_most"], color=style.QUIET, alpha=0.25)
    axis.plot(
        x, 100 * frame["relative_at_most"], "o--", color=style.QUIET, label="at most: rates cut off at the coverage"
    )
    axis.plot(x, 100 * frame["relative"], "o-", color=style.MAIN, label="each rate times the coverage")
    axis.plot(
        x[chosen], 100 * frame["relative"][chosen], "o", markersize=13, markerfacecolor="none", color=style.OTHER,
        label=f"chosen: {chosen:,}",
    )  # fmt: skip
    for size in frame.index:
        axis.annotate(
            f"{size:,}", (x[size], 100 * frame["relative"][size]), (3, -11), textcoords="offset points", fontsize=8
        )
    axis.set(
        xlabel="weights that a draft pass reads for a token [MB]",
        ylabel="acceptance length [% of the\nwhole vocabulary's]",
        title="A larger draft vocabulary is read in every pass",
    )
    axis.legend(loc="lower right")
    style.show(
        fig, "Acceptance length relative to the whole vocabulary against the bytes of a draft pass, by vocabulary size"
    )


def trade_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The same numbers as a table, bytes in MB and shares in percent."""
    shares = ["coverage", "relative", "relative_at_most"]
    megabytes = {name: name.replace("bytes", "MB") for name in ("lm_head_bytes", "pass_bytes")}
    scaled = frame.assign(**100 * frame[shares], **frame[list(megabytes)] / 1e6)
    return scaled.rename(columns=megabytes | {name: f"{name} [%]" for name in shares})


def missed(made: VocabMap, held_out: TokenCounts, target: "Target", most: int = 12) -> pd.DataFrame:
    """The held-out answers' most frequent tokens that the draft vocabulary lacks: each occurrence is a sure rejection."""
    counts = held_out.counts * ~made.t2d
    ids = counts.sort(descending=True, stable=True).indices[:most].tolist()
    rows: list[dict[str, Any]] = [
        {"id": i, "token": repr(target.tokenizer.decode([i])), "times": int(counts[i])} for i in ids if counts[i]
    ]
    return pd.DataFrame(rows, columns=["id", "token", "times"]).set_index("id")
