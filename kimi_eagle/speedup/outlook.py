"""From step times and acceptance to tokens per second per concurrency, the best k, the crossover, and back again.

With c requests and k drafted tokens a step emits c x length(k) tokens and takes step(c (k + 1) tokens) + drafting. Acceptance length
counts tokens emitted per target forward, the bonus token included: 1 + the sum of the unconditional acceptance of positions 1..k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd

from kimi_eagle.errors import BadInput
from kimi_eagle.speedup.curve import Curve
from kimi_eagle.speedup.step import Draft, StepModel


@dataclass(frozen=True)
class Acceptance:
    """Unconditional acceptance at positions 1, 2, ...; drafted: how many drafts it was counted over (0: taken as exact).

    length_sd: a spread of the acceptance length beyond counting noise, such as that between prompts or runs.
    """

    per_position: tuple[float, ...]
    drafted: int = 0
    length_sd: float = 0.0

    def __post_init__(self) -> None:
        rates = self.per_position
        if not rates or any(not 0 <= r <= 1 for r in rates) or any(b > a + 1e-9 for a, b in pairwise(rates)):
            raise BadInput(f"unconditional acceptance must lie in 0..1 and fall with the position, not {list(rates)}.")

    def at(self, k: int) -> np.ndarray:
        """Unconditional acceptance of positions 1..k; past the known ones the last conditional rate is kept."""
        rates = list(self.per_position[:k])
        before = self.per_position[-2] if len(self.per_position) > 1 else 1.0
        conditional = self.per_position[-1] / before if before else 0.0
        while len(rates) < k:
            rates.append(rates[-1] * conditional)
        return np.array(rates)

    def length(self, k: int) -> float:
        """Acceptance length with k drafted tokens."""
        return 1.0 + float(self.at(k).sum()) if k else 1.0

    def drawn(self, rng: np.random.Generator) -> "Acceptance":
        """One draw of what acceptance might be, given the counts and the spread of the length."""
        rates = np.array(self.per_position)
        before = np.r_[1.0, rates[:-1]]
        conditional = np.divide(rates, before, out=np.zeros_like(rates), where=before > 0)
        if self.drafted:
            trials = np.maximum(self.drafted * before, 1)
            conditional = rng.beta(conditional * trials + 0.5, (1 - conditional) * trials + 0.5)
        drawn = np.cumprod(conditional)
        if self.length_sd and drawn.sum() > 0:
            drawn = drawn * max(0.0, 1 + rng.normal(0, self.length_sd) / rates.sum())
        return Acceptance(tuple(float(r) for r in np.minimum.accumulate(np.clip(drawn, 0, 1))))


def rates(
    model: StepModel, draft: Draft, acceptance: Acceptance, c: float, k: int, context: float = 0.0
) -> tuple[float, float]:
    """(tokens per second with k drafted tokens, without a draft) at `c` requests."""
    plain = c / model.step_us(c, c, context) * 1e6
    time = model.step_us(c * (k + 1), c, context) + draft.draft_us(model, k, c)
    return c * acceptance.length(k) / time * 1e6, plain


def forecast(
    model: StepModel, draft: Draft, acceptance: Acceptance, concurrency: Sequence[int], ks: Sequence[int] = (1, 2, 3, 4, 5), *,
    context: float = 0.0, step_error: float = 0.0, draft_error: float = 0.2, draws: int = 400, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """A row per concurrency and k: tokens_per_s, plain_tokens_per_s, speedup and its 80 % interval (low, high), length.

    The interval comes from the spread of the inputs: acceptance as drawn, each step time times a log-normal of `step_error` (the
    fit's rms), the draft's pass times one of `draft_error`.
    """
    rng = np.random.default_rng(seed)
    worlds = [
        (acceptance.drawn(rng), *np.exp(rng.normal(0, 1, 3) * [step_error, step_error, draft_error]))
        for _ in range(draws)
    ]
    rows = []
    for c in concurrency:
        plain_us = model.step_us(c, c, context)
        for k in ks:
            verify, drafting = model.step_us(c * (k + 1), c, context), draft.draft_us(model, k, c)
            drawn = [a.length(k) * plain_us * p / (verify * v + drafting * d) for a, p, v, d in worlds]
            low, high = np.quantile(drawn, [0.1, 0.9]) if draws else (np.nan, np.nan)
            fast, plain = rates(model, draft, acceptance, c, k, context)
            rows.append({"concurrency": c, "k": k, "length": acceptance.length(k), "tokens_per_s": fast, "plain_tokens_per_s": plain,
                         "speedup": fast / plain, "low": low, "high": high})  # fmt: skip
    return pd.DataFrame(rows)


def best(table: pd.DataFrame) -> pd.DataFrame:
    """Per concurrency the row with the highest speed-up; k = 0 (no draft) where every draft loses."""
    rows = table.loc[table.groupby("concurrency")["speedup"].idxmax()].reset_index(drop=True)
    loses = rows["speedup"] < 1
    rows.loc[loses, ["k", "length", "speedup", "low", "high"]] = [0, 1.0, 1.0, 1.0, 1.0]
    rows.loc[loses, "tokens_per_s"] = rows.loc[loses, "plain_tokens_per_s"]
    return rows


def crossings(
    model: StepModel, draft: Draft, acceptance: Acceptance, ks: Sequence[int] = (1, 2, 3, 4, 5), *, context: float = 0.0, limit: int = 1024
) -> list[tuple[float, bool]]:  # fmt: skip
    """Every concurrency up to `limit` at which the best k of `ks` turns from losing to paying (True) or back (False), ascending."""

    def pays(c: float) -> bool:
        return any(fast > plain for fast, plain in (rates(model, draft, acceptance, c, k, context) for k in ks))

    grid = np.unique(np.geomspace(1, limit, 80).round())
    found = [pays(c) for c in grid]
    turns = []
    for i in range(1, len(grid)):
        if found[i] != found[i - 1]:
            low, high = grid[i - 1], grid[i]
            for _ in range(20):
                middle = (low + high) / 2
                low, high = (middle, high) if pays(middle) == found[i - 1] else (low, middle)
            turns.append((float(high), found[i]))
    return turns


def crossover(
    model: StepModel, draft: Draft, acceptance: Acceptance, ks: Sequence[int] = (1, 2, 3, 4, 5), *, context: float = 0.0, limit: int = 1024
) -> float | None:  # fmt: skip
    """The concurrency from which on no k of `ks` pays any more; 0 where none ever does, None where one still does at `limit`."""
    turns = crossings(model, draft, acceptance, ks, context=context, limit=limit)
    if turns:
        return None if turns[-1][1] else turns[-1][0]
    fast, plain = max((rates(model, draft, acceptance, 1, k, context) for k in ks), key=lambda r: r[0])
    return None if fast > plain else 0.0


def needed_length(model: StepModel, draft: Draft, k: int, c: int, gain: float, *, context: float = 0.0) -> float:
    """The acceptance length at which k drafted tokens at concurrency `c` give `gain` times the plain rate.

    Above k + 1 it cannot be reached: no step emits more.
    """
    time = model.step_us(c * (k + 1), c, context) + draft.draft_us(model, k, c)
    return gain * time / model.step_us(c, c, context)


def faster_allreduce(
    model: StepModel, draft: Draft, acceptance: Acceptance, concurrency: Sequence[int], k: int, curve: Curve | float, *,
    context: float = 0.0,
) -> pd.DataFrame:  # fmt: skip
    """What another AllReduce gives, without and with the draft: `curve` is a new Curve, or a factor on today's latency.

    Columns: concurrency, share (AllReduce of the plain step), plain_gain, drafted_gain, and the draft's speed-up before and after.
    """
    if model.curve is None:
        raise BadInput(
            "this model has no AllReduce curve (one rank?): give it one before asking what a faster one gives."
        )
    changed = replace(model, curve=curve if isinstance(curve, Curve) else model.curve.scaled(curve))
    rows = []
    for c in concurrency:
        (fast, plain), (fast2, plain2) = (rates(m, draft, acceptance, c, k, context) for m in (model, changed))
        terms = model.terms(c, c, context)
        rows.append({"concurrency": c, "share": terms["allreduce"] / sum(terms.values()), "plain_gain": plain2 / plain,
                     "drafted_gain": fast2 / fast, "speedup_before": fast / plain, "speedup_after": fast2 / plain2})  # fmt: skip
    return pd.DataFrame(rows)


def what_if(
    model: StepModel,
    draft: Draft,
    *,
    k: int,
    acceptance: float,
    allreduce: float,
    concurrency: int,
    context: float = 0.0,
) -> dict[str, float]:
    """One point for a slider: `acceptance` is the conditional rate of every position, `allreduce` a factor on its latency."""
    rates_ = Acceptance(tuple(acceptance ** (i + 1) for i in range(max(k, 1))))
    changed = replace(model, curve=model.curve.scaled(allreduce)) if model.curve else model
    fast, plain = rates(changed, draft, rates_, concurrency, k, context)
    share = changed.terms(concurrency, concurrency, context)
    return {"length": rates_.length(k), "tokens_per_s": fast, "plain_tokens_per_s": plain, "speedup": fast / plain,
            "allreduce_share": share["allreduce"] / sum(share.values())}  # fmt: skip
