"""The tables that stand beside figures and say the same, and the view of a loss mask."""

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kimi_eagle.chat import Answer, distinct_bigram_ratio
from kimi_eagle.hidden_store import Store
from kimi_eagle.target import Target


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


@dataclass(frozen=True)
class View:
    """What Jupyter shows as HTML, and everything else as plain text."""

    text: str
    page: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.page


def mask_view(target: Target, answer: Answer) -> View:
    """One conversation with the tokens that are trained on coloured; every token is its own piece (hover: its id).

    As plain text the trained stretches stand in [[double brackets]].
    """
    tokens, pieces, stretches = list(zip(answer.token_ids, answer.loss_mask, strict=True)), [], []
    for token, trained in tokens:
        shown = html.escape(target.tokenizer.decode([token])).replace("\n", "\\n<br>")
        look = "background:#cfe3f5" if trained else "color:#777"
        pieces.append(f'<span title="{token}" style="{look}">{shown}</span>')
    for trained, stretch in itertools.groupby(tokens, key=lambda pair: pair[1]):
        text = target.tokenizer.decode([token for token, _ in stretch])
        stretches.append(f"[[{text}]]" if trained else text)
    look = "font-family:monospace;line-height:1.5;white-space:pre-wrap"
    return View("".join(stretches), f'<div style="{look}">{"".join(pieces)}</div>')


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


def speed_table(speeds: dict[int, dict[str, Any]]) -> pd.DataFrame:
    """Medians and ranges of `serve.speed` at each concurrency."""
    rows = {
        c: {
            "plain tok/s": found["plain"]["median"],
            "speculative tok/s": found["speculative"]["median"],
            "ratio": found["ratio"]["median"],
            "lowest ratio": found["ratio"]["low"],
            "highest ratio": found["ratio"]["high"],
        }
        for c, found in speeds.items()
    }
    return pd.DataFrame(rows).T.rename_axis("concurrent requests")
