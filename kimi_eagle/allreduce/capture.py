"""Capture a short decode window of a real tensor-parallel engine: one gz trace a rank, and what a step costs unprofiled.

Traces land in `<stage folder>/traces/<label>/rankN.json.gz`. The window is short (a few dozen steps), without stacks and shapes,
and bounded by the profiler itself (`max_iterations`): long windows give traces of gigabytes that nothing opens.

Prompts are random token ids: a step's time depends on how many tokens it holds, not on which. Verify sizes are measured as
plain decode of batch x (k + 1) requests: the same message, matrix and step sizes as verifying k drafted tokens per request.
"""

import json
import random
import re
import shutil
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.errors import BadInput, MissingCapability, StageFailed
from kimi_eagle.extract.configure import engine_config, on_cpu
from kimi_eagle.extract.engine import Engine, start
from kimi_eagle.target import Target

SPARE_STEPS = 2  # the last step has no successor that ends it; the first decode step follows the prefill
_RANK_FILE = re.compile(r"rank[_-]?(\d+).*\.json(\.gz)?$")


@dataclass(frozen=True)
class Window:
    """One captured window. batch: requests decoding together, and so tokens in the step; stands_for: in words; plain_step_us: mean step of equal runs without the profiler."""

    label: str
    batch: int
    stands_for: str
    steps: int
    folder: str
    plain_step_us: list[float]
    megabytes: float
    graphs: bool

    @property
    def files(self) -> list[Path]:
        """The trace files, in order of ranks."""
        return sorted(Path(self.folder).glob("rank*.json*"))


def start_engine(
    target: Target, folder: Path, *, tensor_parallel: int, steps: int = 24, dtype: str = "float32", graphs: bool = False,
    communicator: str = "auto", shapes: bool = False, port: int = 0, idle_minutes: float = 10, **llm: Any,
) -> Engine:  # fmt: skip
    """An engine with the profiler armed, its raw traces under `folder`/traces/raw.

    communicator: "auto" (vLLM's choice) or, on a CPU, "gloo". graphs: CUDA graphs on (GPUs only).
    """
    if communicator not in ("auto", "gloo"):
        raise BadInput(f"profile_communicator {communicator!r}: use auto or gloo.")
    if graphs and on_cpu():
        raise MissingCapability(
            "CUDA graphs were asked for, and this vLLM is a CPU build: set profile_graphs to False."
        )
    llm["worker_extension_cls"] = "kimi_eagle.allreduce.profile_worker.TraceOnly"
    if communicator == "gloo":
        if not on_cpu():
            raise BadInput("profile_communicator gloo: only the CPU back end can be kept on gloo; use auto.")
        llm["worker_extension_cls"] = "kimi_eagle.allreduce.gloo_worker.GlooAllReduce"
    raw = Path(folder).absolute() / "traces" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    profiler = {
        "profiler": "torch", "torch_profiler_dir": str(raw), "torch_profiler_with_stack": False,
        "torch_profiler_record_shapes": shapes, "torch_profiler_use_gzip": True,
        "max_iterations": steps + SPARE_STEPS + 8,
    }  # fmt: skip
    llm.setdefault("enforce_eager", not graphs)
    config = engine_config(
        target, "profile", dtype=dtype, tensor_parallel=tensor_parallel, port=port, profiler_config=profiler, **llm
    )
    return start(config, idle_minutes=idle_minutes)


def capture(
    engine: Engine, folder: Path, batch: int, *, vocab_size: int, steps: int = 24, context: int = 64, label: str = "",
    graphs: bool = False, limit_mb: float = 64.0, repeats: int = 1, seed: int = 0, stands_for: str = "",
) -> Window:  # fmt: skip
    """Profile `steps` decode steps of `batch` requests, with `repeats` plain runs before and after for the plain step time.

    Raises StageFailed when the traces are larger than `limit_mb` each: choose fewer steps.
    """
    label = label or f"tokens{batch}"
    requests = _requests(batch, context, vocab_size, seed)
    length = steps + SPARE_STEPS
    engine.generate(requests, max_tokens=2, ignore_eos=True)  # compiles and warms up what the first call would pay for
    plain = [_plain_step(engine, requests, length) for _ in range(repeats)]
    raw = Path(folder).absolute() / "traces" / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    engine.call("start_profile")
    engine.rpc("kimi_eagle_trace_only")
    try:
        engine.generate(requests, max_tokens=length, ignore_eos=True)
    finally:
        engine.call("stop_profile")
    plain += [_plain_step(engine, requests, length) for _ in range(repeats)]
    return collect(raw, Path(folder), label, batch, steps, plain, graphs, limit_mb, stands_for)


def collect(
    raw: Path,
    folder: Path,
    label: str,
    batch: int,
    steps: int,
    plain: list[float],
    graphs: bool,
    limit_mb: float,
    stands_for: str = "",
) -> Window:
    """Move the newest trace of each rank from `raw` to `folder`/traces/`label`/rankN.json.gz and write window.json beside them."""
    newest: dict[int, Path] = {}
    for path in sorted(raw.glob("*.json*"), key=lambda p: p.stat().st_mtime_ns):
        if found := _RANK_FILE.search(path.name):
            newest[int(found[1])] = path
    if not newest:
        raise StageFailed(
            f"the profiler wrote no trace of a rank into {raw}; see the engine's log for why it did not start."
        )
    sizes = {rank: path.stat().st_size / 1e6 for rank, path in newest.items()}
    if max(sizes.values()) > limit_mb:
        raise StageFailed(
            f"a trace of {max(sizes.values()):.0f} MB is above the limit of {limit_mb:.0f} MB: set profile_steps lower than {steps}."
        )
    place = Path(folder).absolute() / "traces" / label
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for rank, path in newest.items():
        path.rename(place / f"rank{rank}.json{'.gz' if path.name.endswith('.gz') else ''}")
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    window = Window(label, batch, stands_for or f"batch {batch}", steps, str(place), plain, sum(sizes.values()), graphs)
    (place / "window.json").write_text(json.dumps({**asdict(window), "folder": "."}, indent=1))
    return window


def capture_all(
    target: Target, folder: Path, *, tensor_parallel: int, batches: list[int], verify_tokens: int = 0, steps: int = 24,
    context: int = 64, dtype: str = "float32", graphs: tuple[bool, ...] = (False,), communicator: str = "auto",
    limit_mb: float = 64.0, port: int = 0, seed: int = 0, **llm: Any,
) -> list[Window]:  # fmt: skip
    """Windows at every batch and, with `verify_tokens` k > 0, at batch x (k + 1): an engine per entry of `graphs`, ended after."""
    sizes: dict[int, list[str]] = {}
    for batch in batches:
        sizes.setdefault(batch, []).append(f"batch {batch}")
    for batch in batches if verify_tokens else ():
        sizes.setdefault(batch * (verify_tokens + 1), []).append(f"verify {verify_tokens} of batch {batch}")
    windows = []
    for with_graphs in graphs:
        engine = start_engine(
            target, folder, tensor_parallel=tensor_parallel, steps=steps, dtype=dtype, graphs=with_graphs,
            communicator=communicator, port=port, max_sequences=max(sizes), **llm,
        )  # fmt: skip
        try:
            for batch, meanings in sorted(sizes.items()):
                label = f"tokens{batch}" + ("-graphs" if with_graphs else "")
                windows.append(
                    capture(engine, folder, batch, vocab_size=target.vocab_size, steps=steps, context=context, label=label,
                            graphs=with_graphs, limit_mb=limit_mb, seed=seed, stands_for=", ".join(meanings))
                )  # fmt: skip
        finally:
            engine.down()
    return windows


def capture_server(
    url: str, raw: Path, folder: Path, batch: int, *, model: str, vocab_size: int, steps: int = 24, context: int = 64,
    label: str = "", limit_mb: float = 64.0, timeout_s: float = 600.0, seed: int = 0,
) -> Window:  # fmt: skip
    """The same from a running `vllm serve` that was started with a profiler config whose folder is `raw`.

    Raises MissingCapability where the server has no /start_profile, which it offers only with a profiler config.
    """
    requests, length = _requests(batch, context, vocab_size, seed), steps + SPARE_STEPS

    def run() -> float:
        begun = time.perf_counter()
        with ThreadPoolExecutor(batch) as pool:
            list(pool.map(lambda r: _post(url, "/v1/completions", timeout_s, model=model, prompt=r["prompt_token_ids"],
                                          max_tokens=length, temperature=0.0, ignore_eos=True), requests))  # fmt: skip
        return (time.perf_counter() - begun) * 1e6 / length

    run()
    plain = [run()]
    try:
        _post(url, "/start_profile", timeout_s)
    except urllib.error.HTTPError as error:
        raise MissingCapability(
            f"{url} answers {error.code} to /start_profile: start vllm serve with --profiler-config and a torch_profiler_dir."
        ) from None
    try:
        run()
    finally:
        _post(url, "/stop_profile", timeout_s)
    plain.append(run())
    return collect(Path(raw), Path(folder), label or f"tokens{batch}-server", batch, steps, plain, True, limit_mb)


def _requests(batch: int, context: int, vocab_size: int, seed: int) -> list[dict[str, Any]]:
    source = random.Random(seed)
    low = min(1000, vocab_size // 2)  # below lie the special tokens
    return [
        {"id": f"w{i}", "prompt_token_ids": [source.randrange(low, vocab_size) for _ in range(context)]}
        for i in range(batch)
    ]


def _plain_step(engine: Engine, requests: list[dict[str, Any]], length: int) -> float:
    """Mean microseconds of a decode step: a long run less a short one, so that prefill and start-up cancel."""
    long = max(r["seconds"] for r in engine.generate(requests, max_tokens=length, ignore_eos=True))
    short = max(r["seconds"] for r in engine.generate(requests, max_tokens=2, ignore_eos=True))
    return (long - short) * 1e6 / (length - 2)


def _post(url: str, path: str, timeout_s: float, **body: Any) -> bytes:
    request = urllib.request.Request(
        url.rstrip("/") + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read()


def bytes_per_token(target: Target, dtype: str) -> float:
    """Bytes that an AllReduce of one token carries: the hidden size times an element of `dtype`."""
    return float(target.hidden_size * (4 if dtype == "float32" else 2))
