"""AllReduce latency against message size, outside of any model: torch.distributed, and vLLM's own communicator.

Conventions of nccl-tests: some untimed calls first, then many timed ones; bus bandwidth = bytes / time x 2 (n - 1) / n. Ranks are
started with torchrun from this importable module, never from a notebook's cells.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kimi_eagle.errors import BadInput, MissingCapability, StageFailed

SIZES_KIB = (
    1,
    4,
    14,
    56,
    224,
    1024,
    4096,
    16384,
    65536,
)  # 14 KiB: one Kimi token in bf16; 56 KiB: a verify step of four
WARMUP, MOST_CALLS, FEWEST_CALLS, BUDGET_S = 5, 200, 10, 1.5
LIMIT_S = 900.0
COLUMNS = ["variant", "bytes", "median_us", "p10_us", "p90_us", "minimum_us", "bus_gb_s", "ranks", "backend", "calls"]


def measure(
    ranks: int, sizes_kib: Sequence[float] = SIZES_KIB, *, variants: Sequence[str] = ("torch",), env: dict[str, str] | None = None,
    budget_s: float = BUDGET_S,
) -> pd.DataFrame:  # fmt: skip
    """Latency per message size on `ranks` processes: gloo on CPUs, NCCL on GPUs; rows as `_row` makes them.

    variants: "torch" (torch.distributed), "torch-graph" (in a CUDA graph), "vllm" and "vllm-graph" (vLLM's communicator). Times
    are of the slowest rank. Raises BadInput for wrong sizes, MissingCapability where GPUs are too few, StageFailed when ranks fail.
    """
    if ranks == 1:
        return pd.DataFrame(columns=COLUMNS)  # one rank has no AllReduce: no rows
    if ranks < 1 or not sizes_kib or min(sizes_kib) <= 0:
        raise BadInput(f"an AllReduce needs ranks and positive sizes, not {ranks} ranks and {list(sizes_kib)} KiB.")
    known = ("torch", "torch-graph", "vllm", "vllm-graph")
    if unknown := [v for v in variants if v not in known]:
        raise BadInput(f"unknown microbenchmark variants {unknown}: use {', '.join(known)}.")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < ranks:
        raise MissingCapability(
            f"{ranks} ranks were asked for and this machine has {gpus} GPUs: ask for {gpus} at most."
        )
    if not gpus and any(v.endswith("-graph") for v in variants):
        raise MissingCapability("CUDA graphs need a GPU: leave the -graph variants out on this machine.")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", __name__,
                   "--sizes", ",".join(f"{s:g}" for s in sizes_kib), "--variants", ",".join(variants), "--out", str(out),
                   "--budget", str(budget_s)]  # fmt: skip
        # Ranks share the cores: one thread each, or OpenMP's spinning is what gets measured.
        merged = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": f"microbench-{os.getpid()}", **(env or {})}
        try:
            done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise StageFailed(
                f"the AllReduce microbenchmark did not end within {LIMIT_S:.0f} s: see settings() for P2P."
            ) from None
        if done.returncode or not out.is_file():
            lines = (
                [line for line in done.stderr.splitlines() if "Error" in line]
                or done.stderr.splitlines()[-1:]
                or ["no output"]
            )
            raise StageFailed(f"the AllReduce microbenchmark failed on {ranks} ranks: {lines[0].strip()[:300]}")
        return pd.DataFrame(json.loads(out.read_text()))


def tries(
    ranks: int, sizes_kib: Sequence[float] = (14, 56, 512), settings_: Sequence[dict[str, str]] | None = None,
    untouched: pd.DataFrame | None = None,
) -> pd.DataFrame:  # fmt: skip
    """The latency under each of the settings that published studies found to matter, beside the untouched one.

    Columns: setting, bytes, median_us, effect (time over the untouched time, below 1 is faster). `untouched`: a table of `measure` on
    this box that holds these sizes already; it is measured here otherwise.
    """
    import torch

    options = settings_ if settings_ is not None else GPU_TRIES if torch.cuda.is_available() else CPU_TRIES
    wanted = [int(s * 1024) for s in sizes_kib]
    known = (
        None if untouched is None else untouched[(untouched["variant"] == "torch") & untouched["bytes"].isin(wanted)]
    )
    reuse = known is not None and set(known["bytes"]) == set(wanted)
    tables = [known.assign(setting="untouched")] if reuse else []
    for option in options if reuse else ({}, *options):
        name = " ".join(f"{k}={v}" for k, v in option.items()) or "untouched"
        try:
            table = measure(ranks, sizes_kib, env=dict(option))
        except StageFailed as error:  # a setting that this fabric refuses is a result too
            table = pd.DataFrame({"bytes": wanted, "median_us": float("nan"), "note": str(error)[:120]})
        tables.append(table.assign(setting=name))
    result = pd.concat(tables, ignore_index=True)
    base = result[result["setting"] == "untouched"].set_index("bytes")["median_us"]
    result["effect"] = result["median_us"] / result["bytes"].map(base)
    return result[["setting", "bytes", "median_us", "effect"]]


# From local-inference-lab/rtx6kpro (optimization/nccl-tuning.md, the communicators page and the one-shot page): LL alone costs
# traffic, naming all three protocols helped, peer access across the root complex has to be allowed, channels and threads matter.
GPU_TRIES: tuple[dict[str, str], ...] = (
    {"NCCL_PROTO": "LL,LL128,Simple"},
    {"NCCL_PROTO": "LL"},
    {"NCCL_P2P_LEVEL": "SYS"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_ALGO": "Ring"},
    {"NCCL_ALGO": "Tree"},
    {"NCCL_MIN_NCHANNELS": "8"},
    {"NCCL_MAX_NCHANNELS": "4"},
)
CPU_TRIES: tuple[dict[str, str], ...] = ({"OMP_NUM_THREADS": "2"},)


def run_rank(sizes_kib: Sequence[float], variants: Sequence[str], out: Path, budget_s: float) -> None:
    """One rank of the measurement (torchrun's environment variables say which); rank 0 writes the rows to `out`."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rows = []
    reducers: dict[str, Callable[[Any], Any]] = {"torch": dist.all_reduce}
    if any(v.startswith("vllm") for v in variants):
        reducers["vllm"] = _vllm_reducer(local)
    dtype = torch.bfloat16 if gpu else torch.float32
    for variant in variants:
        for size in sizes_kib:
            tensor = torch.zeros(max(1, int(size * 1024) // dtype.itemsize), dtype=dtype, device=device)
            reduce_ = reducers[variant.split("-")[0]]
            call, calls_each = (
                (_graphed(reduce_, tensor), 20)
                if variant.endswith("-graph")
                else ((lambda t=tensor, r=reduce_: r(t)), 1)
            )
            times = _timed(call, budget_s, gpu, device)
            slowest = torch.tensor(times, dtype=torch.float64, device=device) / calls_each
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            rows.append(
                _row(
                    variant,
                    tensor.numel() * tensor.element_size(),
                    slowest.cpu(),
                    dist.get_world_size(),
                    dist.get_backend(),
                )
            )
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _timed(call: Callable[[], Any], budget_s: float, gpu: bool, device: Any) -> list[float]:
    """Microseconds of each timed call; all ranks make equally many, as many as fit the budget."""
    import torch
    import torch.distributed as dist

    def finish() -> None:
        if gpu:
            torch.cuda.synchronize(device)

    for _ in range(WARMUP):
        call()
    finish()
    begun = time.perf_counter()
    call()
    finish()
    once = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    calls = int(min(MOST_CALLS, max(FEWEST_CALLS, budget_s / max(float(once), 1e-6))))
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        finish()
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def _graphed(reduce_: Callable[[Any], Any], tensor: Any, calls: int = 20) -> Callable[[], None]:
    """A CUDA graph of `calls` AllReduces, so that launching costs as little as it does in an engine."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            reduce_(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            reduce_(tensor)
    return graph.replay


def _vllm_reducer(local: int) -> Callable[[Any], Any]:
    """vLLM's tensor-parallel AllReduce over all ranks, with whatever implementation its gates choose."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # the shared-memory AllReduce of the CPU build lives there

    world = int(os.environ["WORLD_SIZE"])
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(world, int(os.environ["RANK"]), "env://", local, backend)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    return parallel_state.get_tp_group().all_reduce


def _row(variant: str, size: int, times: Any, ranks: int, backend: str) -> dict[str, Any]:
    """median_us, p10_us, p90_us, minimum_us over the calls; bus_gb_s from the median; ranks, backend, calls."""
    import torch

    low, median, high = (float(q) for q in torch.quantile(times, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)))
    return {"variant": variant, "bytes": size, "median_us": median, "p10_us": low, "p90_us": high, "minimum_us": float(times.min()),
            "bus_gb_s": size / median * 2 * (ranks - 1) / ranks / 1000, "ranks": ranks, "backend": backend, "calls": len(times)}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="one rank of the AllReduce microbenchmark, under torchrun")
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--variants", default="torch")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--budget", type=float, default=BUDGET_S)
    given = parser.parse_args()
    run_rank([float(s) for s in given.sizes.split(",")], given.variants.split(","), given.out, given.budget)
