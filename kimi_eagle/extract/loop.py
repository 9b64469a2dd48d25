"""The extraction loop: answered rows through an engine into the hidden-state store, resumable at any moment."""

import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.chat import Answer
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import CallFailed, StageFailed
from kimi_eagle.extract import backends, budget
from kimi_eagle.extract.engine import Engine
from kimi_eagle.extract.singly import Singly, must_answer
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.target import Target

# Rows handed to the engine at once: a group is to take about GROUP_SECONDS (its end leaves the engine's last steps half empty),
# and its states wait in memory for the store, so GROUP_BYTES bounds it.
GROUP_SECONDS = 20.0
GROUP_BYTES = 1 << 30
FIRST_GROUP_TOKENS, FIRST_ROWS = 16384, 20  # the time left is told from the first group, and what fails, fails early
SAVE_SECONDS = 60.0  # a store's open shard is written at least this often: what a kill may cost
REJECT_LIMIT = 0.02  # share of rows without usable states above which the run stops
SPEED = "speed.json"  # beside the shards: how fast the last extraction into the store was
SPEED_UNITS = {"tokens_per_second": "tokens/s", "mb_per_second": "MB/s"}


@dataclass(frozen=True)
class Plan:
    """What an extraction will do: which layers, by which back end and why."""

    target: Target
    layer_ids: list[int]
    backend: str
    reason: str
    dtype: str

    @property
    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of vllm.LLM that the back end asks for."""
        return backends.backend(self.backend).engine_options(self.layer_ids)

    @property
    def key(self) -> str:
        """Short digest of everything that decides the states' values: one store folder per key."""
        text = json.dumps([self.target.identity(), self.layer_ids, self.backend, self.dtype], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def manifest(self, engine: Engine) -> dict[str, Any]:
        """The store's manifest for states that `engine` gives."""
        return {
            "target": {"name": self.target.name, **self.target.identity()},
            "layer_ids": self.layer_ids,
            "layer_id_convention": "vllm",
            "axes": ["token", "layer", "hidden"],
            "hidden_size": self.target.hidden_size,
            "dtype": self.dtype,
            "backend": self.backend,
            "engine": engine.call("describe"),
        }


def plan(target: Target, auxiliary_layers: list[int], *, backend: str, dtype: str, tensor_parallel: int = 1) -> Plan:
    """Choose layers and back end before anything is loaded; BadInput or MissingCapability where that cannot be right."""
    from kimi_eagle.layer_ids import checked_auxiliary

    ids = [*checked_auxiliary(auxiliary_layers, target.num_layers), target.num_layers]
    facts = backends.installed_facts(dtype=dtype, tensor_parallel=tensor_parallel)
    module, verdict = backends.choose(backend, target, facts)
    return Plan(target, ids, module.NAME, verdict.reason, dtype)


def extract(plan: Plan, engine: Engine, rows: list[Answer], folder: Path, say: Callable[[str], None] = print) -> Store:
    """States of `rows` in the store at `folder` (rows that it holds already are kept); the store, opened for reading.

    The engine works on one group of rows while the states of the one before are read and stored. A row that the engine cannot
    take, or without usable states, is named in rejected.jsonl and skipped; above REJECT_LIMIT, or where the engine ends, the
    run stops with StageFailed. `say` is told the speed and the time left after the first group, and the speed at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with StoreWriter(folder, plan.manifest(engine)) as writer:
        missing = [r for r in rows if r.sample_id not in writer.done]
        budget.check_space(
            folder, sum(len(r.token_ids) for r in missing), len(plan.layer_ids), plan.target.hidden_size, plan.dtype
        )
        if excess := budget.cache_excess(plan, engine):
            say(excess)
        allowed, pace = max(1, REJECT_LIMIT * len(rows)), _Pace(plan, missing)
        staging = _staging(folder)
        groups = _Groups(missing, plan)
        reader = ThreadPoolExecutor(1)
        pending: Future | None = None
        try:
            for done, group in groups:
                begun = time.monotonic()
                states = _run(plan, engine, group, staging, allowed)
                groups.took(time.monotonic() - begun)
                if pending:
                    pending.result()
                pending = reader.submit(_store, writer, group, states, allowed)
                if done == len(group) < len(missing):
                    say(pace.line(done))
            if pending:
                pending.result()
                say(pace.line(len(missing)))
                write_atomically(folder / SPEED, json.dumps(pace.figures(len(missing))).encode())
        finally:
            reader.shutdown()
            shutil.rmtree(staging, ignore_errors=True)
    return Store(folder)


def figures(
    answers: list[Answer], stores: dict[str, Store], found: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and units of notebook 02: rows, tokens, bytes and the verification's errors."""
    tree: dict[str, Any] = {"states": {}, "verification": {}}
    units: dict[str, Any] = {"states": {}, "verification": {}}
    for split, store in stores.items():
        kept = [a for a in answers if a.split == split]
        size = sum(s["bytes"] for s in store.shards)
        tree["states"][split] = {
            "rows": len(store), "tokens": store.tokens, "bytes": size, "answer_tokens": sum(len(a.answer_ids) for a in kept),
        }  # fmt: skip
        speed = store.folder / SPEED
        tree["states"][split] |= json.loads(speed.read_text()) if speed.is_file() else {}
        units["states"][split] = {"rows": "rows", "tokens": "tokens", "bytes": "bytes", "answer_tokens": "tokens"} | {
            name: unit for name, unit in SPEED_UNITS.items() if name in tree["states"][split]
        }
    tree["states"]["layer_ids"] = next(iter(stores.values())).layer_ids
    units["states"]["layer_ids"] = "vLLM layer id"
    tree["verification"] = {
        "log_prob_difference": found["reconstruction"]["mean_abs_nats"],
        "batch_order": found["order"]["max_relative_l2"],
        "right": found["right"],
    }
    units["verification"] = {"log_prob_difference": "nats", "batch_order": "relative L2"}
    if "hugging_face" in found:
        tree["verification"]["hugging_face"] = list(found["hugging_face"]["relative_l2"].values())
        units["verification"]["hugging_face"] = "relative L2 per layer id"
    return tree, units


def _staging(folder: Path) -> Path:
    """An empty folder for states on their way: in memory where there is room, so that they reach the disk once.

    Its name follows from the store's, so that what a killed run left there goes first (the writer's lock is held).
    """
    name = f"kimi-eagle-{os.getuid()}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
    places = [Path("/dev/shm") / name, folder / ".staging"]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * GROUP_BYTES
    staging = places[0] if roomy else places[1]
    staging.mkdir(mode=0o700)
    return staging


class _Pace:
    """Speed and time left of one extraction, over the rows that it began with."""

    def __init__(self, plan: Plan, rows: list[Answer]):
        self.ends = list(itertools.accumulate(len(r.token_ids) for r in rows))
        self.each = budget.bytes_per_token(len(plan.layer_ids), plan.target.hidden_size, plan.dtype)
        self.begun = time.perf_counter()

    def figures(self, done: int) -> dict[str, float]:
        """Speeds with the first `done` rows behind, by the names of SPEED_UNITS."""
        speed = self.ends[done - 1] / max(time.perf_counter() - self.begun, 1e-9)
        return {"tokens_per_second": speed, "mb_per_second": speed * self.each / 1e6}

    def line(self, done: int) -> str:
        """The same in words, with the time that the rest will take."""
        speed, size = self.figures(done).values()
        left = (self.ends[-1] - self.ends[done - 1]) / speed / 60
        rest = f", about {left:.1f} minutes left" if left else ""
        return f"states: {done:,} of {len(self.ends):,} rows, {speed:,.0f} tokens/s, {size:,.2f} MB/s{rest}"


def _run(plan: Plan, engine: Engine, group: list[Answer], staging: Path, allowed: float) -> Any:
    requests = [{"id": r.sample_id, "prompt_token_ids": r.token_ids} for r in group]

    def run(some: list[dict[str, Any]]) -> Any:
        return backends.backend(plan.backend).run(engine, some, plan.layer_ids, str(staging))

    try:
        return run(requests)
    except CallFailed as error:
        must_answer(engine, error)
        return Singly(run, engine, requests, allowed)


def _store(writer: StoreWriter, group: list[Answer], states: Any, allowed: float) -> None:
    for row in group:
        try:
            token_ids, found = states.row(row.sample_id)
        except (OSError, KeyError, CallFailed) as error:
            writer.reject(row.sample_id, f"no states came out of the engine ({error})")
            _stop_above(allowed, writer)
            continue
        if token_ids.tolist() != row.token_ids:
            writer.reject(row.sample_id, f"states of {len(token_ids)} other tokens than the row's {len(row.token_ids)}")
        else:
            writer.add(row.sample_id, token_ids, torch.tensor(row.loss_mask), found)
    _stop_above(allowed, writer)
    states.remove()
    if writer.idle_seconds > SAVE_SECONDS:
        writer.flush()


class _Groups:
    """(rows done after it, group) by turns; their size follows from how long the last one took."""

    def __init__(self, rows: list[Answer], plan: Plan):
        self.rows = rows
        self.most = GROUP_BYTES // budget.bytes_per_token(len(plan.layer_ids), plan.target.hidden_size, plan.dtype)
        self.tokens = min(FIRST_GROUP_TOKENS, self.most)

    def took(self, seconds: float) -> None:
        """The group before took so long."""
        self.tokens = max(1, min(self.most, int(self.tokens * min(4.0, GROUP_SECONDS / max(seconds, 1e-3)))))

    def __iter__(self) -> Iterator[tuple[int, list[Answer]]]:
        begin = 0
        while begin < len(self.rows):
            end, tokens = begin, 0
            while end < len(self.rows) and (end == begin or tokens + len(self.rows[end].token_ids) <= self.tokens):
                if end == FIRST_ROWS and begin == 0:
                    break
                tokens += len(self.rows[end].token_ids)
                end += 1
            yield end, self.rows[begin:end]
            begin = end


def _stop_above(allowed: float, writer: StoreWriter) -> None:
    if len(writer.rejected) > allowed:
        name, reason = next(iter(writer.rejected.items()))
        raise StageFailed(f"extraction: {len(writer.rejected)} rows have no usable states ({name}: {reason}).")
