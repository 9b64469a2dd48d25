"""The extraction loop: answered rows through an engine into the hidden-state store, resumable at any moment."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.chat import Answer
from kimi_eagle.errors import StageFailed
from kimi_eagle.extract import backends, budget
from kimi_eagle.extract.engine import Engine
from kimi_eagle.extract.states import Staging
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.hidden_store.parts import parts
from kimi_eagle.target import Target

# Rows handed to the engine at once: a group is to take about GROUP_SECONDS (its end leaves the engine's last steps half empty),
# and its states wait in memory for the store, so GROUP_BYTES bounds it.
GROUP_SECONDS = 20.0
GROUP_BYTES = 1 << 30
FIRST_GROUP_TOKENS = 16384
SAVE_SECONDS = 60.0  # a store's open shard is written at least this often: what a kill may cost
REJECT_LIMIT = 0.02  # share of rows without usable states above which the run stops


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


def extract(
    plan: Plan, engine: Engine, rows: list[Answer], folder: Path, tell: Callable[[int, int], None] | None = None
) -> Store:
    """States of `rows` in the store at `folder` (rows that it holds already are kept); the store, opened for reading.

    The engine works on a group of rows, with the next one waiting at its door, while the one before is stored. A row without usable
    states is named in rejected.jsonl and skipped; above REJECT_LIMIT the run stops with StageFailed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if parts(folder):
        return _joined(rows, folder)
    with StoreWriter(folder, plan.manifest(engine)) as writer:
        missing = [r for r in rows if r.sample_id not in writer.done]
        budget.check_space(
            folder, sum(len(r.token_ids) for r in missing), len(plan.layer_ids), plan.target.hidden_size, plan.dtype
        )
        staging = Staging(_staging(folder))
        try:
            for done, group, states in _ahead(plan, engine, _Groups(missing, plan), staging):
                _store(writer, group, states)
                del states
                _limit(writer, len(rows))
                if tell:
                    tell(done, len(missing))
        finally:
            shutil.rmtree(staging.folder, ignore_errors=True)
            with contextlib.suppress(
                StageFailed, AttributeError
            ):  # an engine that ended; a back end without such files
                backends.backend(plan.backend).release(engine)
    _limit(writer, len(rows))
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
        units["states"][split] = {"rows": "rows", "tokens": "tokens", "bytes": "bytes", "answer_tokens": "tokens"}
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


def _joined(rows: list[Answer], folder: Path) -> Store:
    """The store of parts that jobs of their own extracted, if it holds the rows."""
    store = Store(folder)
    missing = [row.sample_id for row in rows if row.sample_id not in store.position]
    if len(missing) > max(1, REJECT_LIMIT * len(rows)):
        raise StageFailed(
            f"extraction: {len(missing)} rows (e.g. {missing[0]}) are in no part; run `kimi-eagle extract` again."
        )
    return store


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


def _ahead(plan: Plan, engine: Engine, groups: "_Groups", staging: Staging) -> Iterator[tuple[int, list[Answer], Any]]:
    """(rows done after it, group, its states) by turns; the engine works on one group and finds the next at its door."""
    pool, waiting, coming = ThreadPoolExecutor(2), deque[tuple[int, list[Answer], Future]](), iter(groups)
    last = time.monotonic()
    try:
        while True:
            while len(waiting) < 2 and (found := next(coming, None)):
                waiting.append((*found, pool.submit(_run, plan, engine, found[1], staging)))
            if not waiting:
                return
            done, group, coming_states = waiting.popleft()
            states = coming_states.result()
            del coming_states  # the staging file is free when its last reader lets go
            yield done, group, states
            del states
            groups.took(time.monotonic() - last)
            last = time.monotonic()
    finally:
        pool.shutdown(cancel_futures=True)


def _run(plan: Plan, engine: Engine, group: list[Answer], staging: Staging) -> Any:
    requests = [{"id": r.sample_id, "prompt_token_ids": r.token_ids} for r in group]
    return backends.backend(plan.backend).run(engine, requests, plan.layer_ids, staging)


def _store(writer: StoreWriter, group: list[Answer], states: Any) -> None:
    for row in group:
        try:
            token_ids, found = states.lazy(row.sample_id)
        except (OSError, KeyError) as error:
            writer.reject(row.sample_id, f"no states came out of the engine ({error})")
            continue
        if token_ids.tolist() != row.token_ids:
            writer.reject(row.sample_id, f"states of {len(token_ids)} other tokens than the row's {len(row.token_ids)}")
        else:
            writer.add(row.sample_id, token_ids, torch.tensor(row.loss_mask), found)
    writer.settle()
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
                tokens += len(self.rows[end].token_ids)
                end += 1
            yield end, self.rows[begin:end]
            begin = end


def _limit(writer: StoreWriter, rows: int) -> None:
    if len(writer.rejected) > max(1, REJECT_LIMIT * rows):
        name, reason = next(iter(writer.rejected.items()))
        raise StageFailed(f"extraction: {len(writer.rejected)} rows have no usable states ({name}: {reason}).")
