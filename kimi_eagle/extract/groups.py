"""Rows to the engine in groups, always one ahead, and the place where their states wait for the store."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.chat import Answer
from kimi_eagle.errors import CallFailed, StageFailed
from kimi_eagle.extract import backends, budget
from kimi_eagle.extract.engine import Engine
from kimi_eagle.extract.singly import Singly, must_answer
from kimi_eagle.extract.states import Staging

if TYPE_CHECKING:
    from kimi_eagle.extract.loop import Plan

# Rows handed to the engine at once: a group is to take about GROUP_SECONDS (its end leaves the engine's last steps half empty),
# and its states wait in memory for the store, so GROUP_BYTES bounds it.
GROUP_SECONDS = 20.0
GROUP_BYTES = 512 << 20
FIRST_GROUP_TOKENS, FIRST_ROWS = 16384, 20  # the time left is told from the first group, and what fails, fails early
SHARED = Path("/dev/shm")


def ahead(
    plan: "Plan", engine: Engine, rows: list[Answer], staging: Staging, allowed: float
) -> Iterator[tuple[int, list[Answer], Any]]:
    """(rows done after it, group, its states) by turns; the engine works on one group and finds the next at its door.

    Of a group that the engine cannot take, the rows are asked for one by one; no more once over `allowed` have failed.
    """
    groups = Groups(rows, plan, _step_tokens(engine))
    pool, waiting, coming = ThreadPoolExecutor(2), deque[tuple[int, list[Answer], Future]](), iter(groups)
    last = time.monotonic()
    try:
        while True:
            while len(waiting) < 2 and (found := next(coming, None)):
                waiting.append((*found, pool.submit(_run, plan, engine, found[1], staging, allowed)))
            if not waiting:
                return
            done, group, running = waiting.popleft()
            states = running.result()
            del running  # the staging file is free when its last reader lets go
            yield done, group, states
            del states
            groups.took(time.monotonic() - last)
            last = time.monotonic()
    finally:
        pool.shutdown(cancel_futures=True)


def staging_for(folder: Path) -> Staging:
    """An empty place for states on their way to the store `folder`: in memory where there is room, so that they reach the disk once.

    Its name follows from the store's, so that what a killed run left there goes first (the writer's lock is held).
    """
    name = f"kimi-eagle-{os.getuid()}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
    places = [SHARED / name, folder / ".staging"]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    roomy = SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > 4 * GROUP_BYTES
    place = places[0] if roomy else places[1]
    place.mkdir(mode=0o700)
    return Staging(place)


def remove(staging: Staging, plan: "Plan", engine: Engine) -> None:
    """Take the place away, also from an engine that keeps its files mapped."""
    shutil.rmtree(staging.folder, ignore_errors=True)
    release = getattr(backends.backend(plan.backend), "release", None)
    with contextlib.suppress(StageFailed):  # an engine that ended
        if release:
            release(engine)


class Groups:
    """(rows done after it, group) by turns; their size follows from how long the last one took.

    `step`: tokens of a full engine step, 0 where not known; a large group is a whole number of them, since its last step costs as
    much as a full one.
    """

    def __init__(self, rows: list[Answer], plan: "Plan", step: int = 0):
        self.rows, self.step = rows, step
        self.most = GROUP_BYTES // budget.bytes_per_token(len(plan.layer_ids), plan.target.hidden_size, plan.dtype)
        self.tokens = min(FIRST_GROUP_TOKENS, self.most)

    def took(self, seconds: float) -> None:
        """The group before took so long."""
        self.tokens = max(1, min(self.most, int(self.tokens * min(4.0, GROUP_SECONDS / max(seconds, 1e-3)))))

    def __iter__(self) -> Iterator[tuple[int, list[Answer]]]:
        begin = 0
        while begin < len(self.rows):
            end, tokens = begin, 0
            limit = self.tokens // self.step * self.step if 0 < self.step <= self.tokens else self.tokens
            while end < len(self.rows) and (end == begin or tokens + len(self.rows[end].token_ids) <= limit):
                if end == FIRST_ROWS and begin == 0:
                    break
                tokens += len(self.rows[end].token_ids)
                end += 1
            yield end, self.rows[begin:end]
            begin = end


def _run(plan: "Plan", engine: Engine, group: list[Answer], staging: Staging, allowed: float) -> Any:
    requests = [{"id": r.sample_id, "prompt_token_ids": r.token_ids} for r in group]

    def run(some: list[dict[str, Any]]) -> Any:
        return backends.backend(plan.backend).run(engine, some, plan.layer_ids, staging)

    try:
        return run(requests)
    except CallFailed as failed:
        error = failed.with_traceback(None)  # its frames hold the staging file
    must_answer(engine, error)
    return Singly(run, engine, requests, allowed)


def _step_tokens(engine: Engine) -> int:
    with contextlib.suppress(AttributeError, OSError, KeyError, ValueError):
        return int(json.loads((engine.folder / "config.json").read_text())["llm"]["max_num_batched_tokens"])
    return 0
