"""What notebook 05 puts side by side: the served figures, the simulated ones, and what explains their difference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kimi_eagle.acceptance import statistics
from kimi_eagle.acceptance.serve import Greedy
from kimi_eagle.chat import Answer, Prompt, distinct_bigram_ratio
from kimi_eagle.errors import StageFailed

LOOP_RATIO = 0.5  # a text with fewer distinct bigrams than this is a loop: easy to draft, and no evidence


def served_rows(prompts: Sequence[Prompt], plain: Sequence[Greedy]) -> list[Answer]:
    """The plain engine's greedy texts as rows to extract: what the served head walks along, token for token."""
    texts = {g.prompt_id: g.token_ids for g in plain}
    return [
        Answer(
            f"{p.prompt_id}.greedy",
            p.prompt_id,
            "heldout",
            p.token_ids + texts[p.prompt_id],
            len(p.token_ids),
            "length",
        )
        for p in prompts
        if texts[p.prompt_id]
    ]


def side_by_side(served: dict[str, Any], simulated: dict[str, Any], everywhere: dict[str, Any]) -> pd.DataFrame:
    """Acceptance length, interval and unconditional rate per position of each way to get them (statistics.summarize)."""
    ways = {"served": served, "simulated, same walk": simulated, "simulated, every position": everywhere}
    rows = {
        name: {
            "acceptance length": found["acceptance_length"],
            "95 % low": found["interval"][0],
            "95 % high": found["interval"][1],
            **{f"position {i + 1}": rate for i, rate in enumerate(found["unconditional"])},
            "drafts": found["drafts"],
        }
        for name, found in ways.items()
    }
    return pd.DataFrame(rows).T


def difference(served: dict[str, Any], simulated: dict[str, Any]) -> float:
    """Relative difference of the simulated acceptance length from the served one."""
    return simulated["acceptance_length"] / served["acceptance_length"] - 1


def explain(served: dict[str, Any], simulated: dict[str, Any], bar: float = 0.05) -> str:
    """One sentence for the page: whether the two agree, and where to look when they do not."""
    gap = difference(served, simulated)
    if abs(gap) < bar:
        return f"Simulated and served agree: {gap:+.1%} (bar {bar:.0%}). What serves computes what was trained."
    return (
        f"Simulated and served differ by {gap:+.1%} (bar {bar:.0%}). In this order: layer ids in the head's config against the "
        "store's manifest, d2t, norm and fc options, positions, then the engine (eager, other attention back end)."
    )


def agreement(engine: Sequence[dict[str, int]], requests: Sequence[statistics.RequestCounts]) -> pd.DataFrame:
    """vLLM's own counters beside the counts taken from its steps (which leave out the last step of each text)."""
    ours = statistics.per_position(requests)
    rows = [
        {
            "position": i + 1,
            "vLLM drafted": e["drafted"],
            "vLLM accepted": e["accepted"],
            "steps drafted": o["drafted"],
            "steps accepted": o["accepted"],
        }
        for i, (e, o) in enumerate(zip(engine, ours, strict=True))
    ]
    return pd.DataFrame(rows).set_index("position")


def loops(texts: Sequence[Greedy]) -> list[str]:
    """Prompts whose greedy text is a loop."""
    return [g.prompt_id for g in texts if distinct_bigram_ratio(g.token_ids) < LOOP_RATIO]


def require_identical(compared: dict[str, Any], dtype: str) -> str:
    """A sentence on how far the head left the greedy text alone; StageFailed where it changed it by more than ties in float32.

    In 16 bits plain greedy text itself differs between batch shapes, so a difference there is counted, not judged.
    """
    said = f"{compared['identical']} of {compared['prompts']} texts identical, {len(compared['ties'])} ties"
    if not compared["different"]:
        return said + "."
    first = compared["different"][0]
    where = f"first: {first['prompt']} at token {first['token']}, top-2 gap {first['gap_nats']:.3g} nats"
    if dtype == "float32":
        raise StageFailed(
            f"the head changes the greedy text of {len(compared['different'])} of {compared['prompts']} prompts ({where}): "
            "the engine's verification is wrong."
        )
    return f"{said}, {len(compared['different'])} others ({where}): {dtype} sums differ with the batch's shape, head or no head."


def figures(
    served: dict[str, Any], simulated: dict[str, Any], compared: dict[str, Any], speeds: dict[int, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and units of notebook 05. `tokens_per_second.plain` and `.speculative` are medians at the first concurrency."""
    per_stream = {
        "concurrency": list(speeds),
        "plain": [s["plain"]["median"] for s in speeds.values()],
        "speculative": [s["speculative"]["median"] for s in speeds.values()],
        "ratio": [[s["ratio"][k] for k in ("median", "low", "high")] for s in speeds.values()],
    }
    tree = {
        "acceptance": {name: _acceptance(found) for name, found in (("served", served), ("simulated", simulated))},
        "tokens_per_second": {
            "plain": per_stream["plain"][0],
            "speculative": per_stream["speculative"][0],
            "by_concurrency": per_stream,
        },
        "greedy_identical": not compared["different"],
        "greedy": {"prompts": compared["prompts"], "identical": compared["identical"], "ties": len(compared["ties"])},
    }
    lengths = {"length": "tokens per target forward", "interval": "tokens per target forward", "per_position": "drafts"}
    units = {
        "acceptance": {"served": lengths, "simulated": lengths},
        "tokens_per_second": {
            "plain": "tokens/s", "speculative": "tokens/s",
            "by_concurrency": {"concurrency": "requests", "plain": "tokens/s", "speculative": "tokens/s", "ratio": "median, low, high"},
        },
        "greedy": "prompts",
    }  # fmt: skip
    return tree, units


def write_counts(
    file: Path, served: Sequence[statistics.RequestCounts], simulated: Sequence[statistics.RequestCounts]
) -> Path:
    """Raw counts per request, one JSON object a line, so that every ratio can be made again."""
    import json

    from kimi_eagle.durable import write_atomically

    lines = [{"way": way, **r.record()} for way, rows in (("served", served), ("simulated", simulated)) for r in rows]
    write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return file


def _acceptance(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "length": found["acceptance_length"],
        "interval": list(found["interval"]),
        "per_position": [{"drafted": p["drafted"], "accepted": p["accepted"]} for p in found["per_position"]],
    }
