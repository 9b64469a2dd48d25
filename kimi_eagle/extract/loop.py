"""The extraction loop: answered rows through an engine into the hidden-state store, resumable at any moment."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kimi_eagle.chat import Answer
from kimi_eagle.errors import StageFailed
from kimi_eagle.extract import backends, budget
from kimi_eagle.extract.engine import Engine
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.hidden_store.parts import parts
from kimi_eagle.target import Target

GROUP_TOKENS = 32768  # tokens handed to the engine at once: enough to fill its batches, little to redo after a kill
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

    The engine works on one group of rows while the states of the one before are read and stored. A row without usable
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
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder))
        reader = ThreadPoolExecutor(1)
        pending: Future | None = None
        try:
            for done, group in _groups(missing):
                paths = _run(plan, engine, group, staging)
                if pending:
                    pending.result()
                pending = reader.submit(_store, writer, group, paths)
                if len(writer.rejected) > max(1, REJECT_LIMIT * len(rows)):
                    raise StageFailed(
                        f"extraction: {len(writer.rejected)} rows have no usable states ({_sample(writer)})."
                    )
                if tell:
                    tell(done, len(missing))
            if pending:
                pending.result()
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


def _run(plan: Plan, engine: Engine, group: list[Answer], staging: Path) -> dict[str, str]:
    requests = [{"id": r.sample_id, "prompt_token_ids": r.token_ids} for r in group]
    return backends.backend(plan.backend).run(engine, requests, plan.layer_ids, str(staging))


def _store(writer: StoreWriter, group: list[Answer], paths: dict[str, str]) -> None:
    for row in group:
        try:
            found = load_file(paths[row.sample_id])
        except (OSError, KeyError) as error:
            writer.reject(row.sample_id, f"no states came out of the engine ({error})")
            continue
        if found["token_ids"].tolist() != row.token_ids:
            writer.reject(
                row.sample_id, f"states of {len(found['token_ids'])} other tokens than the row's {len(row.token_ids)}"
            )
        else:
            writer.add(row.sample_id, found["token_ids"], torch.tensor(row.loss_mask), found["hidden_states"])
        Path(paths[row.sample_id]).unlink()


def _groups(rows: list[Answer]) -> Any:
    """(rows done after it, group) with about GROUP_TOKENS tokens each."""
    group: list[Answer] = []
    tokens = 0
    for index, row in enumerate(rows):
        group.append(row)
        tokens += len(row.token_ids)
        if tokens >= GROUP_TOKENS or index + 1 == len(rows):
            yield index + 1, group
            group, tokens = [], 0


def _sample(writer: StoreWriter) -> str:
    name, reason = next(iter(writer.rejected.items()))
    return f"{name}: {reason}"
