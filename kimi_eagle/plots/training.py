"""Figures of notebook 04: what a chain is trained on, the course of the loss, and the acceptance that chose the head."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kimi_eagle.eagle3.config import HeadConfig
from kimi_eagle.plots import style

if TYPE_CHECKING:
    from kimi_eagle.target import Target


def alignment(target: "Target", row: Any, steps: int, shown: int = 1) -> pd.DataFrame:
    """(state, token fed, label) of each unrolled step for the first `shown` chains of a stored row, with the tokens' texts."""
    tokens = row.token_ids.tolist()
    first = int(row.loss_mask.int().argmax())
    text = {i: repr(target.tokenizer.decode([t])) for i, t in enumerate(tokens)}
    records = [
        {
            "origin t": t,
            "step": j,
            "state": f"target's at {t}" if j == 0 else f"head's own, step {j - 1}",
            "token fed": f"{t + 1 + j}: {text[t + 1 + j]}",
            "label": f"{t + 2 + j}: {text[t + 2 + j]}",
        }
        for t in range(first - 1, first - 1 + shown)
        for j in range(steps)
        if t + 2 + j < len(tokens)
    ]
    return pd.DataFrame(records).set_index(["origin t", "step"])


def size_table(config: HeadConfig, dtype: str) -> pd.DataFrame:
    """Parameters and bytes of the head's parts; the embedding is the target's own and costs nothing."""
    parts = {
        "fc, attention, MLP, norms": config.core_parameters(),
        "lm_head": config.draft_vocab_size * config.hidden_size,
    }
    parts["together"] = config.parameters()
    size = config.bytes(dtype) / config.parameters()
    return pd.DataFrame(
        {"parameters [M]": {k: v / 1e6 for k, v in parts.items()}, "MB": {k: v * size / 1e6 for k, v in parts.items()}}
    )


def course(metrics: Path) -> pd.DataFrame:
    """metrics.jsonl as one row per optimizer step: loss, learning rate, tokens per second, accuracy of each unrolled step."""
    entries = [e for e in _read(metrics) if "loss" in e]
    frame = pd.DataFrame([{k: v for k, v in e.items() if k != "steps"} for e in entries]).set_index("step")
    for j in range(len(entries[0]["steps"])):
        frame[f"accuracy {j}"] = [e["steps"][j]["matched"] / max(1, e["steps"][j]["trained"]) for e in entries]
    return frame


def evaluations(metrics: Path) -> pd.DataFrame:
    """The held-out evaluations: step, simulated acceptance length, its interval, unconditional rate per position."""
    rows = [{"step": e["step"], **e["evaluation"]} for e in _read(metrics) if "evaluation" in e]
    frame = pd.DataFrame(
        [
            {
                "step": r["step"],
                "acceptance length": r["acceptance_length"],
                "low": r["interval"][0],
                "high": r["interval"][1],
                **{f"position {i + 1}": rate for i, rate in enumerate(r["unconditional"])},
            }
            for r in rows
        ]
    )
    return frame.set_index("step")


def curves(metrics: Path) -> None:
    """Loss and accuracy per unrolled step, smoothed over a twentieth of the run; the raw loss in grey."""
    frame = course(metrics)
    smooth = frame.rolling(max(1, len(frame) // 20), min_periods=1).mean()
    fig, (left, right) = style.new(1, 2, figsize=(9.0, 3.4))
    left.plot(frame.index, frame["loss"], color=style.QUIET, linewidth=0.7)
    left.plot(smooth.index, smooth["loss"], color=style.MAIN)
    left.set(xlabel="optimizer step", ylabel="loss [nats per label]", title="Training loss")
    for j, name in enumerate(c for c in frame if c.startswith("accuracy")):
        right.plot(smooth.index, 100 * smooth[name], color=style.COLORS[j % len(style.COLORS)], label=f"step {j}")
    right.set(xlabel="optimizer step", ylabel="arg-max agrees [%]", title="Agreement with the target, by unrolled step")
    right.legend()
    style.show(fig, "Training loss, and agreement with the target per unrolled step")


def selection(metrics: Path) -> None:
    """Simulated acceptance length on held-out answers at each evaluation, with its 95 % interval; the ring is the chosen head."""
    frame = evaluations(metrics)
    length = frame["acceptance length"]
    best = length.idxmax()
    fig, axis = style.new(figsize=(7.0, 3.0))
    axis.errorbar(
        frame.index, length, [length - frame["low"], frame["high"] - length], fmt="o-", color=style.MAIN, capsize=3
    )
    axis.plot(best, length[best], "o", markersize=13, markerfacecolor="none", color=style.OTHER, label="chosen head")
    axis.set(xlabel="optimizer step", ylabel="tokens per target forward", title="Held-out acceptance length, simulated")
    axis.set_ylim(bottom=1.0)
    axis.legend(loc="lower right")
    style.show(fig, "Held-out acceptance length at each evaluation")


def _read(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(metrics).read_text().splitlines()]
