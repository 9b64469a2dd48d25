"""Figures of the extraction: what the answers are like, what the masks cover, how far the states are from right."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kimi_eagle.chat import Answer, distinct_bigram_ratio
from kimi_eagle.hidden_store import Store
from kimi_eagle.plots import style
from kimi_eagle.target import Target


def lengths(answers: Sequence[Answer]) -> None:
    """Histograms of prompt and answer lengths in tokens, medians marked."""
    fig, axes = style.new(1, 2, sharey=True)
    columns = {
        "prompt tokens": [a.prompt_tokens for a in answers],
        "answer tokens": [len(a.answer_ids) for a in answers],
    }
    for axis, (name, values), color in zip(axes, columns.items(), (style.QUIET, style.MAIN), strict=True):
        axis.hist(values, bins=24, color=color)
        axis.axvline(np.median(values), color="black", linewidth=1, linestyle="--")
        axis.set(xlabel=name, title=f"median {np.median(values):.0f}, 90 % below {np.quantile(values, 0.9):.0f}")
    axes[0].set_ylabel("rows")
    style.show(fig, "Histograms of prompt and answer lengths in tokens")


def lengths_table(answers: Sequence[Answer]) -> pd.DataFrame:
    """Per split: rows, tokens, answer tokens, answers that ended by themselves, median distinct-bigram ratio."""
    rows = []
    for split in ("train", "heldout"):
        some = [a for a in answers if a.split == split]
        rows.append(
            {
                "split": split,
                "rows": len(some),
                "tokens": sum(len(a.token_ids) for a in some),
                "answer tokens": sum(len(a.answer_ids) for a in some),
                "ended by themselves": sum(a.finish_reason == "stop" for a in some),
                "distinct bigrams": float(np.median([distinct_bigram_ratio(a.answer_ids) for a in some] or [0.0])),
            }
        )
    return pd.DataFrame(rows).set_index("split")


def mask_view(target: Target, answer: Answer) -> Any:
    """One conversation with the tokens that are trained on coloured; every token is its own piece (hover: its id)."""
    from IPython.display import HTML

    pieces = []
    for token, trained in zip(answer.token_ids, answer.loss_mask, strict=True):
        text = html.escape(target.tokenizer.decode([token])).replace("\n", "\\n<br>")
        look = "background:#cfe3f5" if trained else "color:#777"
        pieces.append(f'<span title="{token}" style="{look}">{text}</span>')
    return HTML(f'<div style="font-family:monospace;line-height:1.5">{"".join(pieces)}</div>')


def verification(found: dict[str, Any]) -> None:
    """Every check's error against its bar, on a log scale: left of the dashed bar is right."""
    table = verification_table(found).iloc[::-1]
    fig, axis = style.new(figsize=(7.0, 0.5 + 0.42 * len(table)))
    for place, (error, bar) in enumerate(zip(table["error"], table["bar"], strict=True)):
        axis.plot(max(error, 1e-9), place, "o", color=style.MAIN if error < bar else style.OTHER)
        axis.plot([bar, bar], [place - 0.35, place + 0.35], color="black", linestyle="--", linewidth=1)
    axis.set(xscale="log", yticks=range(len(table)), xlabel="error (0 is drawn at 1e-9); dashed: the bar")
    axis.set_yticklabels(table.index)
    axis.set_title("The stored states are the target's" if found["right"] else "The stored states are NOT the target's")
    style.show(fig, "Errors of each verification check against its bar")


def verification_table(found: dict[str, Any]) -> pd.DataFrame:
    """The checks of `verify.verify` as a table: error, bar, unit, right."""
    bars = found["bars"]
    rows = [
        (
            "log-probs from the last state, mean",
            found["reconstruction"]["mean_abs_nats"],
            bars["reconstruction"],
            "nats",
        ),
        ("other batch order", found["order"]["max_relative_l2"], bars["order"], "relative L2"),
    ]
    for layer, error in found.get("hugging_face", {}).get("relative_l2", {}).items():
        rows.append((f"Hugging Face, layer id {layer}", error, bars["hugging_face"], "relative L2"))
    table = pd.DataFrame(rows, columns=["check", "error", "bar", "unit"]).set_index("check")
    return table.assign(right=table["error"] < table["bar"])


def norms(store: Store, rows: int = 16) -> pd.DataFrame:
    """Per layer id: median and largest L2 norm of a token's state, over the first rows (the largest are massive activations)."""
    import torch

    states = torch.cat([store.row(i).hidden_states.float() for i in range(min(rows, len(store)))])
    size = states.norm(dim=-1)
    table = {"median": size.median(0).values.tolist(), "largest": size.amax(0).tolist()}
    return pd.DataFrame(table, index=pd.Index(store.layer_ids, name="layer id"))
