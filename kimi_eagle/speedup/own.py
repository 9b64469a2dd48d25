"""The forecast for one's own box, from what notebook 01 measured: plain step times and AllReduce latency in the engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from kimi_eagle.errors import BadInput
from kimi_eagle.speedup.curve import Curve
from kimi_eagle.speedup.sizes import draft_sizes, target_sizes
from kimi_eagle.speedup.step import Draft, Observation, StepModel, fit


def from_profile(
    text_config: Mapping[str, Any], windows: Mapping[str, Mapping[str, Any]], ranks: int, *, element_bytes: float, memory_gb_s: float,
    compute_tflops: float, attention: str = "llama", draft_vocab: int = 0, pass_us: float = 0.0, expert_bits: float = 0.0,
) -> tuple[StepModel, Draft, pd.DataFrame]:  # fmt: skip
    """(model, draft, table of measured and fitted steps) from `windows`, the figures of notebook 01's result.json.

    Fitted: the fixed cost and, with three windows or more, the rate of computing; memory_gb_s is given, compute_tflops is where the
    fit starts. pass_us 0: a pass costs its layers' part of the fixed cost (one layer and the head).
    """
    seen = [w for w in windows.values() if w.get("plain_step_us")]
    if len({w["tokens"] for w in seen}) < 2:
        raise BadInput(
            "the forecast needs plain step times at two step sizes or more: set profile_batch_sizes in notebook 01."
        )
    config = dict(text_config)
    sizes = target_sizes(config, ranks, weight_bytes=element_bytes, expert_bits=expert_bits or 8 * element_bytes)
    points = {
        float(w["message_bytes"]): float(w["call_us"]) for w in seen if w.get("message_bytes") and w.get("call_us")
    }
    curve = Curve.of(points.items()) if points and ranks > 1 else None
    model = StepModel(sizes, memory_gb_s, compute_tflops, curve)
    steps = [Observation(float(w["plain_step_us"]), int(w["tokens"])) for w in seen]
    free = ("fixed_us", "compute_tflops") if len(steps) > 2 else ("fixed_us",)
    model, _ = fit(model, steps, free)
    head = draft_sizes(config, ranks, attention=attention, draft_vocab=draft_vocab, weight_bytes=element_bytes)
    draft = Draft(head, pass_us or model.fixed_us * (head.layers + 1) / (sizes.layers + 1))
    rows = [
        {"tokens": o.tokens, "measured_ms": o.us / 1000, "fitted_ms": model.step_us(o.tokens) / 1000} for o in steps
    ]
    table = pd.DataFrame(rows).sort_values("tokens").reset_index(drop=True)
    return model, draft, table.assign(error=table["fitted_ms"] / table["measured_ms"] - 1)


def without_allreduce(model: StepModel) -> StepModel:
    """The same box if AllReduce cost nothing: the bound on what any faster one can give."""
    return replace(model, curve=model.curve.scaled(1e-9) if model.curve else None)


def element_bytes(dtype: str) -> float:
    """Bytes of an element of float32, bfloat16 or float16."""
    return 4.0 if dtype == "float32" else 2.0


def figures(
    check: pd.DataFrame, held: dict[str, Any], outlook: pd.DataFrame, turn: float | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures, units) of the forecast for result.json: `check` against published rows, `held` the report of kimi_width.Case.

    `crossover` is -1 where a draft still pays at the largest concurrency.
    """
    held_out = check[~check["fitted"]]
    ahead = outlook.sort_values(["concurrency", "k"])
    values = {
        "published": {
            name: held_out[name].tolist() for name in ("concurrency", "off_error", "on_error", "ratio_error")
        },
        "h200": {name: held[name] for name in ("cells", "median_error", "worst_error")},
        "own": {name: ahead[name].tolist() for name in ("concurrency", "k", "speedup", "low", "high")},
        "crossover": -1.0 if turn is None else turn,
    }
    units = {
        "published": {
            "concurrency": "requests",
            "off_error": "ratio - 1",
            "on_error": "ratio - 1",
            "ratio_error": "ratio - 1",
        },
        "h200": {"cells": "cells", "median_error": "ratio - 1", "worst_error": "ratio - 1"},
        "own": {"concurrency": "requests", "k": "tokens", "speedup": "ratio", "low": "ratio", "high": "ratio"},
        "crossover": "requests",
    }
    return {"forecast": values}, {"forecast": units}
