"""The forecast held against own measurements at Kimi width: one H200, real vLLM, acceptance set by its synthetic sampler.

`benchmarks/forecast_h200.py` measures; here its records become a model fitted to the plain steps alone, and a table of forecasts for
every cell with a draft. `data/forecast_h200.json` holds one run: H200, vLLM 0.26.0, torch 2.11.0, CUDA graphs, bfloat16.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from kimi_eagle.errors import BadInput
from kimi_eagle.speedup.outlook import Acceptance
from kimi_eagle.speedup.sizes import draft_sizes, target_sizes
from kimi_eagle.speedup.step import Draft, Observation, StepModel, calibrate, fit

H200 = {
    "memory_gb_s": 4800.0,
    "compute_tflops": 400.0,
}  # memory from NVIDIA's data sheet; the computing rate is where the fit starts, below half of the dense bf16 rate
FREE = ("fixed_us", "memory_efficiency", "compute_tflops")


@dataclass(frozen=True)
class Case:
    """A measured box as the forecast sees it: `table` rows {concurrency, k, measured, forecast, speedup, length, error}."""

    model: StepModel
    draft: Draft
    acceptance: Acceptance
    table: pd.DataFrame
    report: dict[str, Any]


def records() -> list[dict[str, Any]]:
    """The kept run's records, one an engine: {shape, k, rates, rows, target, draft, context}."""
    return json.loads((files("kimi_eagle") / "data" / "forecast_h200.json").read_text())


def host_cost(small: list[dict[str, Any]]) -> dict[str, float]:
    """What speculation costs the host, from a target whose step waits for it: {pass_us, step_us} at one stream; the first is used.

    A step with k drafts is longer than a plain one by `step_us + k x pass_us` (straight line through the measured k).
    """
    at = {r["k"]: next(row["median_us"] for row in r["rows"] if row["concurrency"] == 1) for r in small}
    ks = sorted(k for k in at if k)
    slope, rest = np.polyfit(ks, [at[k] - at[0] for k in ks], 1)
    return {"pass_us": float(slope), "step_us": float(rest)}


def hold_against(measured: list[dict[str, Any]]) -> Case:
    """Fit the plain steps of the target, forecast each of its cells with a draft.

    A pass of a Kimi-width head is bound by its reading: the host's cost is taken as 0 unless a `small` shape was measured too.
    """
    small = [r for r in measured if r["shape"] == "small"]
    wide = [r for r in measured if r["shape"] != "small"]
    plain = next((r for r in wide if r["k"] == 0), None)
    if plain is None:
        raise BadInput("the records hold no engine without a draft (k = 0), which is what the forecast is fitted to.")
    target, own, context = plain["target"], plain["draft"], plain["context"]
    width = 4.0 if target["torch_dtype"] == "float32" else 2.0
    seen = [Observation(r["median_us"], r["concurrency"], context=context) for r in plain["rows"]]
    sizes = target_sizes(target, 1, weight_bytes=width, expert_bits=8 * width)
    model, report = fit(StepModel(sizes, **H200), seen, FREE)
    model = calibrate(model, seen)
    shape = target | {"head_dim": own["head_dim"], "num_key_value_heads": own["num_key_value_heads"]}
    head = draft_sizes(shape, attention="llama", intermediate=own["intermediate_size"], weight_bytes=width)
    found = {r["k"] for r in small}
    host = host_cost(small) if 0 in found and len(found) > 2 else {"pass_us": 0.0, "step_us": 0.0}
    draft = Draft(head, max(0.0, host["pass_us"]))
    base = {r["concurrency"]: r["emitted"] / r["seconds"] for r in plain["rows"]}
    rows, rates = [], ()
    for record in sorted((r for r in wide if r["k"]), key=lambda r: r["k"]):
        k, rates = record["k"], tuple(record["rates"])
        for r in record["rows"]:
            c, found = r["concurrency"], r["emitted"] / r["seconds"]
            time_us = model.step_us(c * (k + 1), c, context) + draft.draft_us(model, k, c)
            ahead = c * Acceptance(rates).length(k) / time_us * 1e6
            rows.append({"concurrency": c, "k": k, "measured": found, "forecast": ahead, "error": ahead / found - 1, "speedup": found / base[c],
                         "length": r["emitted"] / r["steps"] / c, "step_us": r["median_us"], "forecast_us": time_us})  # fmt: skip
    table = pd.DataFrame(rows)
    summary = {
        "cells": len(table),
        "median_error": float(table["error"].abs().median()) if rows else float("nan"),
        "worst_error": float(table["error"].abs().max()) if rows else float("nan"),
        "fit": report["free"],
        "fit_rms": report["rms"],
        "host": host,
    }
    return Case(model, draft, Acceptance(rates or (0.0,)), table, summary)
