"""Extraction spread over machines: the rows in parts, each a store of its own with its own index, read together as one.

A part is the work of one job of a batch scheduler (`--shard i/n`), or of one of the Ray actors that take part after part. Which
part a row belongs to follows from its id; what a part holds already is not extracted again, so a killed job or actor costs
time and no row, and no row comes twice.
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kimi_eagle import chat
from kimi_eagle import target as targets
from kimi_eagle.errors import BadInput, KimiEagleError, MissingCapability, StageFailed
from kimi_eagle.extract import loop, session
from kimi_eagle.extract.configure import engine_config
from kimi_eagle.extract.engine import Engine
from kimi_eagle.hidden_store.parts import part_name, part_of

PARTS_PER_ENGINE = 4  # so that a slow engine's last part does not keep the others waiting for long
RESTARTS = 3  # of an actor and of its part; what fails more often than that has a cause


def shard_of(text: str) -> tuple[int, int]:
    """(part, parts) of `i/n`, counted from 0; BadInput for anything else."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not part < parts:
        raise BadInput(f"--shard {text}: give i/n with i from 0 to n - 1, e.g. 0/8 in the first of eight jobs.")
    return part, parts


def extract_part(plan: loop.Plan, engine: Engine, answers: Path, states: Path, part: int, parts: int) -> int:
    """Extract one part of the rows in the file `answers` into `states`/KEY/SPLIT/part-i-of-n; the rows it holds."""
    held = 0
    rows = chat.read_answers(answers)
    for split in sorted({row.split for row in rows}):
        mine = [row for row in rows if row.split == split and part_of(row.sample_id, parts) == part]
        held += len(loop.extract(plan, engine, mine, states / plan.key / split / part_name(part, parts)))
    return held


def opened(values: dict[str, Any]) -> tuple[loop.Plan, Engine]:
    """Plan and running engine for the parameters of a run. Each group of GPUs of a machine has an engine of its own."""
    cfg = SimpleNamespace(**values)
    target = targets.describe(cfg.target)
    plan = loop.plan(
        target, cfg.auxiliary_layers, backend=cfg.extract_backend, dtype=cfg.dtype, tensor_parallel=cfg.tensor_parallel
    )
    config = engine_config(target, "extract", **session.options(cfg), **plan.engine_options)
    if group := os.environ.get("CUDA_VISIBLE_DEVICES"):
        config = replace(config, env={**config.env, "CUDA_VISIBLE_DEVICES": group})
    return plan, session.start(cfg, config)


class Worker:
    """A Ray actor: one engine, kept from part to part. `open_engine` gives the plan and the engine, on the actor's machine."""

    def __init__(self, open_engine: Callable[[], tuple[loop.Plan, Engine]]) -> None:
        self.plan, self.engine = open_engine()

    def extract(self, answers: str, states: str, part: int, parts: int) -> int:
        """`extract_part` with this actor's engine; the files must lie where every machine sees them."""
        return extract_part(self.plan, self.engine, Path(answers), Path(states), part, parts)


def with_ray(
    open_engine: Callable[[], tuple[loop.Plan, Engine]], answers: Path, states: Path, engines: int, gpus: int = 0
) -> int:
    """Extract all rows with `engines` Ray actors of `gpus` GPUs each, spread over the machines of the cluster; the rows held.

    An actor that dies is started again and its part resumed. MissingCapability where ray is not installed.
    """
    try:
        import ray
        from ray.util import ActorPool
    except ImportError:
        raise MissingCapability("extraction: --ray needs ray; pip install 'kimi_eagle[ray]'.") from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    options = {
        "num_gpus": gpus,
        "max_restarts": RESTARTS,
        "max_task_retries": RESTARTS,
        "scheduling_strategy": "SPREAD",
    }
    workers = [ray.remote(**options)(Worker).remote(open_engine) for _ in range(engines)]
    parts = engines * PARTS_PER_ENGINE
    try:
        done = ActorPool(workers).map_unordered(
            lambda worker, part: worker.extract.remote(str(answers), str(states), part, parts), range(parts)
        )
        return sum(done)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, KimiEagleError):
            raise cause from None
        raise StageFailed(
            f"extraction: an actor failed ({str(error).splitlines()[0]}); run it again to go on."
        ) from error
