"""The extraction loop: answered rows through an engine into the hidden-state store, resumable at any moment."""

import hashlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.chat import Answer
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import CallFailed, StageFailed
from kimi_eagle.extract import backends, budget
from kimi_eagle.extract.engine import Engine
from kimi_eagle.extract.groups import ahead, remove, staging_for
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.hidden_store.parts import parts
from kimi_eagle.target import Target

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

    The engine works on a group of rows, with the next one waiting at its door, while the one before is stored. A row that the engine
    cannot take, or without usable states, is named in rejected.jsonl and skipped; above REJECT_LIMIT, or where the engine ends, the
    run stops with StageFailed. `say` is told the speed and the time left after the first group, and the speed at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if parts(folder):
        return _joined(rows, folder)
    with StoreWriter(folder, plan.manifest(engine)) as writer:
        missing = [r for r in rows if r.sample_id not in writer.done]
        budget.check_space(
            folder, sum(len(r.token_ids) for r in missing), len(plan.layer_ids), plan.target.hidden_size, plan.dtype
        )
        if excess := budget.cache_excess(plan, engine):
            say(excess)
        allowed, pace = max(1, REJECT_LIMIT * len(rows)), _Pace(plan, missing)
        staging = staging_for(folder)
        try:
            for done, group, states in ahead(plan, engine, missing, staging, allowed):
                _store(writer, group, states, allowed)
                del states  # the staging file is free when its last reader lets go
                if done == len(group) < len(missing):
                    say(pace.line(done))
            if missing:
                say(pace.line(len(missing)))
                write_atomically(folder / SPEED, json.dumps(pace.figures(len(missing))).encode())
        finally:
            remove(staging, plan, engine)
    _stop_above(allowed, writer)
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


def _joined(rows: list[Answer], folder: Path) -> Store:
    """The store of parts that jobs of their own extracted, if it holds the rows."""
    store = Store(folder)
    missing = [row.sample_id for row in rows if row.sample_id not in store.position]
    if len(missing) > max(1, REJECT_LIMIT * len(rows)):
        raise StageFailed(
            f"extraction: {len(missing)} rows (e.g. {missing[0]}) are in no part; run `kimi-eagle extract` again."
        )
    return store


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


def _store(writer: StoreWriter, group: list[Answer], states: Any, allowed: float) -> None:
    for row in group:
        try:
            token_ids, found = states.lazy(row.sample_id)
        except (OSError, KeyError, CallFailed) as error:
            writer.reject(row.sample_id, f"no states came out of the engine ({error})")
            _stop_above(allowed, writer)
            continue
        if token_ids.tolist() != row.token_ids:
            writer.reject(row.sample_id, f"states of {len(token_ids)} other tokens than the row's {len(row.token_ids)}")
        else:
            writer.add(row.sample_id, token_ids, torch.tensor(row.loss_mask), found)
    writer.settle()
    _stop_above(allowed, writer)
    states.remove()
    if writer.idle_seconds > SAVE_SECONDS:
        writer.flush()


def _stop_above(allowed: float, writer: StoreWriter) -> None:
    if len(writer.rejected) > allowed:
        name, reason = next(iter(writer.rejected.items()))
        raise StageFailed(f"extraction: {len(writer.rejected)} rows have no usable states ({name}: {reason}).")
