"""A step's time from what it reads, computes and exchanges; fitted to measured steps.

    step = fixed + sequences x per sequence + (dense + touched experts + context) bytes / memory + tokens x flops / compute
           + AllReduces x latency(message of all tokens)

Only what is named in `free` is fitted; every other constant is given with its source by whoever builds the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from kimi_eagle.errors import BadInput
from kimi_eagle.speedup.curve import Curve
from kimi_eagle.speedup.sizes import Sizes

# Bounds of what may be fitted: outside of them a parameter no longer means what its name says.
BOUNDS = {
    "fixed_us": (0.0, 1e7), "per_sequence_us": (0.0, 1e6), "memory_efficiency": (0.02, 1.0), "routing_skew": (0.0, 2.5),
    "compute_tflops": (1e-4, 5000.0), "allreduce_scale": (0.02, 50.0),
}  # fmt: skip


@dataclass(frozen=True)
class StepModel:
    """Constants of a step on one box. memory_gb_s: peak of one GPU; memory_efficiency: the part of it that decode reaches;
    compute_tflops: what decode reaches on one GPU; routing_skew: Zipf exponent of the experts' popularity (0: all alike);
    residuals: (log tokens, log factor) pairs that `calibrate` adds.
    """

    sizes: Sizes
    memory_gb_s: float
    compute_tflops: float
    curve: Curve | None = None
    fixed_us: float = 0.0
    per_sequence_us: float = 0.0
    memory_efficiency: float = 0.8
    routing_skew: float = 0.0
    allreduce_scale: float = 1.0
    residuals: tuple[tuple[float, float], ...] = ()

    def terms(self, tokens: float, sequences: float | None = None, context: float = 0.0) -> dict[str, float]:
        """Microseconds of each term for a step of `tokens` tokens of `sequences` requests (default: one token each)."""
        s, sequences = self.sizes, tokens if sequences is None else sequences
        per_us = self.memory_gb_s * 1e3 * self.memory_efficiency  # bytes per microsecond
        touched = (
            touched_experts(s.experts, s.experts_per_token, float(tokens), self.routing_skew) if s.experts else 0.0
        )
        allreduce = s.allreduces * self.curve(tokens * s.message_bytes) * self.allreduce_scale if self.curve else 0.0
        return {
            "fixed": self.fixed_us,
            "per sequence": self.per_sequence_us * sequences,
            "dense weights": s.dense_bytes / per_us,
            "experts": s.moe_layers * touched * s.expert_bytes / per_us,
            "context": sequences * context * s.kv_bytes / per_us,
            "compute": tokens * s.flops / (self.compute_tflops * 1e6),
            "allreduce": allreduce,
        }

    def step_us(self, tokens: float, sequences: float | None = None, context: float = 0.0) -> float:
        """Microseconds of a step."""
        time = sum(self.terms(tokens, sequences, context).values())
        if self.residuals:
            at, factor = zip(*self.residuals, strict=True)
            time *= float(np.exp(np.interp(np.log(tokens), at, factor)))
        return time


@dataclass(frozen=True)
class Draft:
    """A draft's own cost: k passes, the first over the k + 1 tokens of the last verification, the others over one token each.

    pass_us: what the host spends on a pass (launches, sampling, preparing the next one), a step's cost per request on top. The
    host works ahead of the GPU, so a pass takes the longer of the two, not their sum: a 135M head waits for its launches, a
    Kimi-width one hides them under its reading.
    """

    sizes: Sizes
    pass_us: float = 0.0

    def draft_us(self, model: StepModel, k: int, sequences: float) -> float:
        """Microseconds of drafting k tokens for each of `sequences` requests on the box of `model`."""
        if k < 1:
            return 0.0
        plain = replace(model, sizes=self.sizes, fixed_us=0.0, per_sequence_us=0.0, residuals=())
        first, later = plain.step_us(sequences * (k + 1), sequences), plain.step_us(sequences)
        host = self.pass_us + model.per_sequence_us * sequences
        return max(host, first) + (k - 1) * max(host, later)


@dataclass(frozen=True)
class Observation:
    """A measured step: `us` microseconds for `sequences` requests that each verify `draft_tokens` drafted tokens (0: plain)."""

    us: float
    sequences: int
    draft_tokens: int = 0
    context: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in the step."""
        return self.sequences * (self.draft_tokens + 1)


def predicted_us(model: StepModel, observation: Observation, draft: Draft | None = None) -> float:
    """Microseconds that `model` (and `draft`) give for the step of `observation`."""
    o = observation
    if o.draft_tokens and draft is None:
        raise BadInput("a step with drafted tokens needs the draft's cost: pass draft=Draft(...).")
    drafting = draft.draft_us(model, o.draft_tokens, o.sequences) if draft and o.draft_tokens else 0.0
    return model.step_us(o.tokens, o.sequences, o.context) + drafting


def fit(
    model: StepModel, observations: Sequence[Observation], free: Sequence[str], draft: Draft | None = None
) -> tuple[StepModel, dict[str, Any]]:
    """The model with the parameters in `free` set to the least squared log error over `observations`, and a report.

    The report: {free: {name: value}, rms: root mean square of log errors, errors: predicted / measured - 1 per observation}.
    Raises BadInput for an unknown parameter, or for more of them than observations.
    """
    unknown = [name for name in free if name not in BOUNDS]
    if unknown or len(free) > len(observations):
        raise BadInput(
            f"cannot fit {list(free)} to {len(observations)} steps: choose from {', '.join(BOUNDS)}, no more than steps."
        )
    measured = np.log([o.us for o in observations])

    def residuals(values: np.ndarray) -> np.ndarray:
        tried = replace(model, **dict(zip(free, map(float, values), strict=True)))
        return np.log([predicted_us(tried, o, draft) for o in observations]) - measured

    low, high = np.array([BOUNDS[name] for name in free]).T
    typical = float(np.exp(measured.min()))
    scale = np.array(
        [typical if name == "fixed_us" else typical / 10 if name == "per_sequence_us" else 1.0 for name in free]
    )
    starts = [np.array([getattr(model, name) for name in free])]
    starts += [np.clip(scale * f, low, high) for f in (0.1, 0.3, 0.7)]
    best = min(
        (_descend(residuals, s, low, high, scale) for s in starts), key=lambda v: float((residuals(v) ** 2).sum())
    )
    fitted = replace(model, **dict(zip(free, map(float, best), strict=True)))
    errors = residuals(best)
    return fitted, {
        "free": dict(zip(free, map(float, best), strict=True)),
        "rms": float(np.sqrt((errors**2).mean())),
        "errors": [float(np.exp(e) - 1) for e in errors],
    }


def calibrate(model: StepModel, observations: Sequence[Observation]) -> StepModel:
    """The model times its own residuals at the measured (plain) steps, straight in log tokens between them, constant outside.

    For what no smooth term has: kernels that switch with the batch, CUDA graphs that pad to a captured size.
    """
    by_tokens: dict[int, list[float]] = {}
    for o in observations:
        if not o.draft_tokens:
            by_tokens.setdefault(o.tokens, []).append(
                float(np.log(o.us / replace(model, residuals=()).step_us(o.tokens, o.sequences, o.context)))
            )
    return replace(model, residuals=tuple((float(np.log(t)), float(np.mean(r))) for t, r in sorted(by_tokens.items())))


def _descend(residuals: Any, start: np.ndarray, low: np.ndarray, high: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Levenberg-Marquardt with numeric slopes, within bounds: two or three parameters need no library."""
    x, damping = np.clip(start, low, high), 1e-2
    r = residuals(x)
    for _ in range(200):
        step = np.maximum(np.abs(x), scale) * 1e-5
        inward = np.where(x + step > high, -step, step)
        slopes = np.column_stack([(residuals(x + d) - r) / d.sum() for d in np.diag(inward)])
        hessian = slopes.T @ slopes
        move = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian) + 1e-12), -slopes.T @ r)
        tried = np.clip(x + move, low, high)
        new = residuals(tried)
        if (new**2).sum() < (r**2).sum():
            done = np.all(np.abs(tried - x) < 1e-9 * scale)
            x, r, damping = tried, new, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return x


def touched_experts(experts: int, per_token: int, tokens: float, skew: float) -> float:
    """Expected number of distinct routed experts that `tokens` tokens touch in one layer, `per_token` each.

    Tokens choose independently; an expert is chosen with a chance proportional to rank^-skew, at most 1.
    """
    return float((1 - (1 - _chances(experts, per_token, round(skew, 6))) ** tokens).sum())


@lru_cache(maxsize=4096)
def _chances(experts: int, per_token: int, skew: float) -> np.ndarray:
    weights = np.arange(1, experts + 1, dtype=float) ** -skew
    low, high = 0.0, float(per_token) / weights.min()
    for _ in range(100):  # the factor at which the chances, none above 1, sum to per_token
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * weights).sum() < per_token else (low, middle)
    return np.minimum(1, high * weights)
