"""Acceptance measured where it counts: target and head together in vLLM's own speculative decoding."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.acceptance.statistics import RequestCounts
from kimi_eagle.chat import Prompt, read_answers
from kimi_eagle.durable import file_crc32
from kimi_eagle.eagle3.contract import check_head
from kimi_eagle.errors import BadInput
from kimi_eagle.extract.configure import cpu_mla_arguments, engine_config, on_cpu
from kimi_eagle.extract.engine import Engine, EngineConfig
from kimi_eagle.target import Target

# A first difference between plain and speculative greedy text counts as a tie where the plain engine's best two tokens were
# closer than this there (nats): the two engines add up the same numbers in other orders.
TIE_GAP = 1e-4


@dataclass(frozen=True)
class Greedy:
    """One prompt's greedy continuation: token ids, tokens per engine step, top-1 minus top-2 log-prob per token (or empty)."""

    prompt_id: str
    token_ids: list[int]
    steps: list[int]
    gaps: list[float]


def speculative_config(target: Target, head: Path, k: int, **options: Any) -> EngineConfig:
    """The engine that serves `target` with `head` proposing `k` tokens a step (vLLM's `eagle3` method).

    Raises BadInput, before any engine starts, where the head breaks vLLM's contract.
    """
    faults = check_head(head, target, "vllm")
    if faults:
        raise BadInput(f"head {head.name}: vLLM would load it wrongly ({'; '.join(faults[:3])}); export it again.")
    # In the draft's name its content is not seen: the digest makes a retrained head another engine.
    digest = f"{file_crc32(head / 'model.safetensors'):08x}"
    draft = {"method": "eagle3", "model": str(head), "num_speculative_tokens": k}
    if target.is_mla and on_cpu():  # vLLM chooses the draft's attention anew, whatever the target's was
        draft |= {k: v for k, v in cpu_mla_arguments().items() if k == "attention_backend"}
    config = engine_config(target, "speculative", speculative_config=draft, **options)
    return EngineConfig(config.role, config.target, config.llm, {**config.env, "KIMI_EAGLE_HEAD": digest}, config.port)


def refuse_trained_prompts(prompts: list[Prompt], answers: Path) -> None:
    """BadInput where one of `prompts` was answered for the training store: acceptance on it would flatter the head."""
    trained = {tuple(a.token_ids[: a.prompt_tokens]) for a in read_answers(answers) if a.split == "train"}
    found = [p.prompt_id for p in prompts if tuple(p.token_ids) in trained]
    if found:
        raise BadInput(
            f"{len(found)} of the prompts to serve are in the training store ({', '.join(found[:5])}); serve others."
        )


def greedy(
    engine: Engine, prompts: list[Prompt], *, max_tokens: int, concurrency: int, gaps: bool = False
) -> list[Greedy]:
    """Greedy continuations, at most `concurrency` at a time; with `gaps` the two best log-probs are asked for too."""
    results = engine.generate(
        _requests(prompts), max_tokens=max_tokens, logprobs=2 if gaps else None, concurrency=concurrency
    )
    return [Greedy(r["id"], r["token_ids"], r["steps"], r["gaps"]) for r in results]


def compare(plain: list[Greedy], speculative: list[Greedy]) -> dict[str, Any]:
    """How many continuations are token for token the same; first differences split into ties and real ones, each named."""
    other = {g.prompt_id: g for g in speculative}
    identical, ties, different = 0, [], []
    for expected in plain:
        found = other[expected.prompt_id].token_ids
        if found == expected.token_ids:
            identical += 1
            continue
        pairs = zip(expected.token_ids, found, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected.token_ids), len(found)))
        gap = expected.gaps[place] if place < len(expected.gaps) else float("inf")
        (ties if gap < TIE_GAP else different).append({"prompt": expected.prompt_id, "token": place, "gap_nats": gap})
    return {"prompts": len(plain), "identical": identical, "ties": ties, "different": different}


def request_counts(results: list[Greedy], k: int) -> list[RequestCounts]:
    """Raw counts per request from the tokens each engine step emitted: a step with n tokens accepted n - 1 of k drafted.

    The first step is the prefill, which verifies nothing. The last is left out: the end of the text cuts it short, so how
    many of its drafts were right is not known from what it emitted.
    """
    counts = []
    for result in results:
        accepted = [min(n - 1, k) for n in result.steps[1:-1]]
        per_place = [sum(a > i for a in accepted) for i in range(k)]
        counts.append(RequestCounts.of(result.prompt_id, [len(accepted)] * k, per_place))
    return counts


def engine_counts(before: dict[str, Any], after: dict[str, Any], k: int) -> list[dict[str, int]]:
    """vLLM's own per-position counters between two readings of its metrics: [{drafted, accepted}] for positions 0..k-1."""
    drafts = after["vllm:spec_decode_num_drafts"] - before.get("vllm:spec_decode_num_drafts", 0)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    old = before.get(name) or [0] * k
    return [{"drafted": int(drafts), "accepted": int(n - o)} for n, o in zip(after[name][:k], old, strict=False)]


def speed(
    engines: dict[str, Engine],
    prompts: list[Prompt],
    *,
    max_tokens: int,
    concurrency: int,
    repeats: int = 3,
    in_turns: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Tokens per second of each engine on the same prompts: the engines take turns, `repeats` times after one warm-up
    (`in_turns` False: one engine after the other, where memory holds one only).

    Answers run to exactly `max_tokens`, so that both emit the same number. {name: {median, low, high}, ratio: {...}}, the
    ratio (speculative over plain) pair by pair.
    """
    rates: dict[str, list[float]] = {name: [] for name in engines}
    turns = [(turn, name) for turn in range(repeats + 1) for name in engines]
    for turn, name in turns if in_turns else sorted(turns, key=lambda t: list(engines).index(t[1])):
        requests = _requests(prompts)
        results = engines[name].generate(requests, max_tokens=max_tokens, ignore_eos=True, concurrency=concurrency)
        tokens, seconds = sum(len(r["token_ids"]) for r in results), max(r["seconds"] for r in results)
        if turn:
            rates[name].append(tokens / seconds)
        tell(f"concurrency {concurrency}: {name}, turn {turn} of {repeats}")
    found = {name: _spread(values) for name, values in rates.items()}
    if {"plain", "speculative"} <= engines.keys():
        found["ratio"] = _spread([s / p for s, p in zip(rates["speculative"], rates["plain"], strict=True)])
    return found


def _requests(prompts: list[Prompt]) -> list[dict[str, Any]]:
    return [{"id": p.prompt_id, "prompt_token_ids": p.token_ids} for p in prompts]


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
