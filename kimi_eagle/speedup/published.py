"""Figures that others measured, and the forecast held against them: Kimi-K2.6 on 8x RTX PRO 6000, fitted at two points.

The model is given two free parameters, the fixed cost of a step and the skew of expert routing, and sees four numbers: the published
rates with and without the draft at concurrency 1 and 64. What carries it besides: `CONSTANTS`.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from kimi_eagle.speedup.curve import Curve
from kimi_eagle.speedup.outlook import Acceptance
from kimi_eagle.speedup.sizes import KIMI_K2, draft_sizes, target_sizes
from kimi_eagle.speedup.step import Draft, Observation, StepModel, fit

# name: (value, unit, source). Only `memory_efficiency` and `compute_tflops` are assumptions; `sensitivity` shows what they carry.
CONSTANTS: dict[str, tuple[float, str, str]] = {
    "gpus": (8, "", "the published box"),
    "memory_gb_s": (1792.0, "GB/s a GPU", "NVIDIA's data sheet of the RTX PRO 6000 Blackwell"),
    "memory_efficiency": (0.8, "", "assumed; 0.5 to 0.9 give the same picture (sensitivity table)"),
    "compute_tflops": (250.0, "TFLOP/s a GPU", "assumed: half of the data sheet's dense bf16 rate"),
    "expert_bits": (4.5, "bits a weight", "INT4 in groups of 32 with a 16-bit scale (model card)"),
    "nccl_bus_gb_s": (37.6, "GB/s", "local-inference-lab/rtx6kpro, optimization/nccl-tuning.md: tuned NCCL, large messages"),
    "draft_pass_us": (600.0, "us a pass", "own run, SmolLM2 with an EAGLE-3 head on one H200, vLLM 0.26.0: "
                      "(1.754 / 454.5 - 1 / 490.6) s over three passes"),
    "acceptance_1": (0.645, "", "local-inference-lab/rtx6kpro, models/kimi-k26-v4.md: mean over the runs' logs"),
    "acceptance_2": (0.393, "", "same"),
    "acceptance_3": (0.240, "", "same"),
    "length_sd": (0.222, "tokens", "same: 0.074 standard deviation of accepted over drafted, times three"),
}  # fmt: skip
FREE = ("fixed_us", "routing_skew")
FITTED = (1, 64)


@dataclass(frozen=True)
class Published:
    """The published case as the forecast sees it."""

    model: StepModel
    draft: Draft
    acceptance: Acceptance
    report: dict[str, Any]


def allreduce_points() -> pd.DataFrame:
    """Published AllReduce latencies: box, gpus, bytes, implementation, latency_us, source."""
    return _table("allreduce_published.csv")


def decode_rows() -> pd.DataFrame:
    """Published decode rates by concurrency: draft_on_tok_s, draft_off_tok_s, accepted_over_drafted, source."""
    return _table("decode_published.csv")


def pcie_curve() -> Curve:
    """The published box's latency: its custom one-stage kernel up to 32 KB, PyNCCL from 56 KB (the switch that the box was run
    with), and beyond the last point the bus bandwidth of tuned NCCL (message bandwidth = bus x n / 2 (n - 1))."""
    points = allreduce_points()
    points = points[points["implementation"].isin(["custom", "PyNCCL"]) & (points["bytes"] != 16384)]
    n = CONSTANTS["gpus"][0]
    return Curve.of(
        zip(points["bytes"], points["latency_us"], strict=True), CONSTANTS["nccl_bus_gb_s"][0] * n / (2 * (n - 1))
    )


def kimi_on_pcie(fitted: tuple[int, ...] = FITTED, own_acceptance: bool = False, **constants: float) -> Published:
    """The model of the published box, fitted to the rows at concurrencies `fitted`.

    constants replace CONSTANTS by name. own_acceptance: the fitted rows' steps come from each row's own acceptance instead of
    the pooled one.
    """
    value = {name: entry[0] for name, entry in CONSTANTS.items()} | constants
    gpus = int(value["gpus"])
    model = StepModel(
        target_sizes(KIMI_K2, gpus, expert_bits=value["expert_bits"]), value["memory_gb_s"], value["compute_tflops"], pcie_curve(),
        memory_efficiency=value["memory_efficiency"],
    )  # fmt: skip
    draft = Draft(draft_sizes(KIMI_K2, gpus, attention="mla"), value["draft_pass_us"])
    acceptance = Acceptance(tuple(value[f"acceptance_{i}"] for i in (1, 2, 3)), length_sd=value["length_sd"])
    observations = []
    for row in decode_rows().itertuples():
        if row.concurrency in fitted:
            c, k = row.concurrency, row.draft_tokens
            length = 1 + k * row.accepted_over_drafted if own_acceptance else acceptance.length(k)
            observations += [
                Observation(c / row.draft_off_tok_s * 1e6, c),
                Observation(c * length / row.draft_on_tok_s * 1e6, c, k),
            ]
    model, report = fit(model, observations, FREE, draft)
    return Published(model, draft, acceptance, report)


def against_published(case: Published | None = None, own_acceptance: bool = False) -> pd.DataFrame:
    """A row per published concurrency: measured and forecast rates, their errors, the power law through 1 and 64, `fitted`.

    own_acceptance: forecast each row with its own measured acceptance (then an input) instead of the pooled one.
    """
    case = case or kimi_on_pcie(own_acceptance=own_acceptance)
    table = decode_rows()
    ends = table.set_index("concurrency")["draft_on_tok_s"].loc[list(FITTED)]
    power = np.log(ends.iloc[1] / ends.iloc[0]) / np.log(FITTED[1] / FITTED[0])
    rows = []
    for row in table.itertuples():
        c, k = row.concurrency, row.draft_tokens
        length = 1 + k * row.accepted_over_drafted if own_acceptance else case.acceptance.length(k)
        off = c / case.model.step_us(c) * 1e6
        on = c * length / (case.model.step_us(c * (k + 1), c) + case.draft.draft_us(case.model, k, c)) * 1e6
        law = ends.iloc[0] * (c / FITTED[0]) ** power
        rows.append({
            "concurrency": c, "fitted": c in FITTED, "off": row.draft_off_tok_s, "off_forecast": off, "off_error": off / row.draft_off_tok_s - 1,
            "on": row.draft_on_tok_s, "on_forecast": on, "on_error": on / row.draft_on_tok_s - 1, "power_law_error": law / row.draft_on_tok_s - 1,
            "ratio": row.draft_on_tok_s / row.draft_off_tok_s, "ratio_forecast": on / off,
            "ratio_error": (on / off) / (row.draft_on_tok_s / row.draft_off_tok_s) - 1,
        })  # fmt: skip
    return pd.DataFrame(rows)


# SmolLM2-135M: 30 Llama layers, bf16, tied head.
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
           "intermediate_size": 1536, "vocab_size": 49152}  # fmt: skip


def smollm2_on_h200() -> pd.DataFrame:
    """A small target whose step is launch-bound, where a draft must lose: measured and forecast speed-up per concurrency and k.

    The step is fitted to the two plain rows alone (fixed and per-request cost); a pass costs what the k = 5 row at one stream says,
    so that row is no forecast (`fitted`).
    """
    table = _table("decode_own_h200.csv")
    sizes = target_sizes(SMOLLM2)
    model = StepModel(
        sizes, memory_gb_s=4800.0, compute_tflops=400.0
    )  # NVIDIA's data sheet of the H200; half its bf16 rate
    plain = table[table["draft_tokens"] == 0]
    steps = [Observation(r.concurrency / r.tok_s * 1e6, r.concurrency) for r in plain.itertuples()]
    model, _ = fit(model, steps, ("fixed_us", "per_sequence_us"))
    row = table[(table["concurrency"] == 1) & (table["draft_tokens"] == 5)].iloc[0]
    head = draft_sizes(SMOLLM2, attention="llama", draft_vocab=16000)
    without = Draft(head).draft_us(model, 5, 1)
    spent = row.acceptance_length / row.tok_s * 1e6 - model.step_us(6, 1)
    draft = Draft(head, max(0.0, (spent - without) / 5))
    rows = []
    for r in table[table["draft_tokens"] > 0].itertuples():
        c, k = r.concurrency, r.draft_tokens
        rate = c * r.acceptance_length / (model.step_us(c * (k + 1), c) + draft.draft_us(model, k, c)) * 1e6
        base = float(plain.loc[plain["concurrency"] == c, "tok_s"].iloc[0])
        rows.append(
            {"concurrency": c, "k": k, "measured": r.tok_s / base, "forecast": rate / base, "fitted": (c, k) == (1, 5)}
        )
    return pd.DataFrame(rows)


def sensitivity(values: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9), name: str = "memory_efficiency") -> pd.DataFrame:
    """The errors at concurrency 4 and 16 when the constant `name` takes each of `values` and the fit is made anew."""
    rows = []
    for value in values:
        case = kimi_on_pcie(**{name: value})
        table = against_published(case).set_index("concurrency")
        errors = {f"{what}_{c}": table.loc[c, f"{what}_error"] for c in (4, 16) for what in ("off", "on", "ratio")}
        rows.append({name: value, **case.report["free"], **errors})
    return pd.DataFrame(rows)


def _table(name: str) -> pd.DataFrame:
    with (files("kimi_eagle") / "data" / name).open("rb") as source:
        return pd.read_csv(source)
