"""The one definition of acceptance, from raw counts; every ratio in the project is made here.

A *draft* is one chain of k tokens offered to the target. Per position i (0-based) three raw counts suffice:
`drafted` (drafts that offered a token there), `tested` (drafts in which every earlier token was accepted, so the token at i
was decided on) and `accepted`. When serving, tested at i is accepted at i - 1; a simulation over recorded text knows fewer.

    conditional rate at i    = accepted_i / tested_i
    unconditional rate at i  = product of the conditional rates up to i  (served: accepted_i / drafts)
    acceptance length        = 1 + sum of the unconditional rates

in tokens emitted per target forward, the bonus token included once (the 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kimi_eagle.errors import BadInput


@dataclass(frozen=True)
class RequestCounts:
    """Raw counts of one request (or text): three lists of k integers."""

    request_id: str
    drafted: list[int]
    accepted: list[int]
    tested: list[int]

    @classmethod
    def of(
        cls, request_id: str, drafted: Sequence[int], accepted: Sequence[int], tested: Sequence[int] | None = None
    ) -> "RequestCounts":
        """Counts after a check; `tested` defaults to what serving implies. BadInput where they contradict each other."""
        drafted, accepted = [int(n) for n in drafted], [int(n) for n in accepted]
        reached = [int(n) for n in tested] if tested is not None else drafted[:1] + accepted[:-1]
        if len({len(drafted), len(accepted), len(reached)}) != 1:
            raise BadInput(f"request {request_id}: drafted, tested and accepted must have one count per position.")
        if any(a > t or a < 0 for a, t in zip(accepted, reached, strict=True)):
            raise BadInput(f"request {request_id}: accepted {accepted} exceeds what was tested {reached}.")
        return cls(request_id, drafted, accepted, reached)

    def record(self) -> dict[str, Any]:
        """The counts as plain data for a JSON file."""
        return {"request": self.request_id, "drafted": self.drafted, "tested": self.tested, "accepted": self.accepted}


def per_position(requests: Sequence[RequestCounts]) -> list[dict[str, int]]:
    """Sums over requests: a list of `{drafted, accepted, tested}`, one per position."""
    drafted, accepted, tested = (total.astype(int) for total in _arrays(requests).sum(0))
    return [
        {"drafted": int(d), "accepted": int(a), "tested": int(t)}
        for d, a, t in zip(drafted, accepted, tested, strict=True)
    ]


def rates(counts: Sequence[Mapping[str, int]]) -> tuple[list[float], list[float]]:
    """Conditional and unconditional acceptance rates from `[{drafted, accepted[, tested]}]`.

    A list without `tested` is a served one. A position that was never tested has rate 0.
    """
    conditional, unconditional, reach, before = [], [], 1.0, None
    for entry in counts:
        tested = entry.get("tested", entry["drafted"] if before is None else before)
        rate = entry["accepted"] / tested if tested else 0.0
        reach *= rate
        before = entry["accepted"]
        conditional.append(rate)
        unconditional.append(reach)
    return conditional, unconditional


def acceptance_length(counts: Sequence[Mapping[str, int]]) -> float:
    """Tokens emitted per target forward, bonus included: 1 + sum of the unconditional rates."""
    return 1.0 + sum(rates(counts)[1])


def interval(
    requests: Sequence[RequestCounts], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> list[float]:
    """Percentile bootstrap interval [low, high] of the acceptance length, resampling whole requests.

    Drafts within a request are not independent, so requests are the unit (Efron's bootstrap over clusters).
    """
    counts = _arrays(requests)[:, 1:]  # accepted and tested
    draws = np.random.default_rng(seed).multinomial(
        len(requests), np.full(len(requests), 1 / len(requests)), size=resamples
    )
    accepted, tested = np.moveaxis(np.tensordot(draws, counts, axes=1), 1, 0)
    conditional = np.divide(accepted, tested, out=np.zeros_like(accepted, dtype=float), where=tested > 0)
    lengths = 1 + conditional.cumprod(axis=1).sum(axis=1)
    tail = (1 - level) / 2
    return [float(q) for q in np.quantile(lengths, [tail, 1 - tail])]


def summarize(requests: Sequence[RequestCounts], resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Everything a notebook shows: length, interval, rates and the raw counts; BadInput where there is no draft at all."""
    if not requests or not sum(r.drafted[0] for r in requests):
        raise BadInput(
            "no draft was made in these requests, so there is no acceptance to report; serve longer answers."
        )
    counts = per_position(requests)
    conditional, unconditional = rates(counts)
    return {
        "acceptance_length": 1.0 + sum(unconditional),
        "interval": interval(requests, resamples=resamples, seed=seed),
        "per_position": counts,
        "conditional": conditional,
        "unconditional": unconditional,
        "drafts": counts[0]["drafted"],
        "requests": len(requests),
    }


def _arrays(requests: Sequence[RequestCounts]) -> np.ndarray:
    """Counts as one array [requests, (drafted, accepted, tested), k]."""
    if not requests:
        raise BadInput("no request to take acceptance from.")
    return np.array([[r.drafted, r.accepted, r.tested] for r in requests], dtype=np.int64)
