"""Small traces of the torch profiler, written event by event: times in microseconds, one file a rank."""

import gzip
import json
from pathlib import Path

NCCL_RING = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start: float, length: float, stream: int = 7, **args) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length, "args": {"stream": stream, **args}}  # fmt: skip


def operator(name: str, start: float, length: float, thread: int = 1, category: str = "cpu_op", **args) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": thread, "ts": start, "dur": length, "args": args}


def step(start: float, length: float, requests: int = 1, prefill: int = 0, tokens: int | None = None) -> dict:
    tokens = requests if tokens is None else tokens
    name = f"execute_context_{1 if prefill else 0}({prefill})_generation_{requests}({tokens})"
    return operator(name, start, length, category="user_annotation")


def steps(count: int, length: float = 1000.0, start: float = 0.0) -> list[dict]:
    """`count` decode steps of equal length and an empty one that ends the last."""
    return [step(start + i * length, length * 0.8) for i in range(count)] + [
        step(start + count * length, 1.0, requests=0)
    ]


def write(path: Path, events: list[dict], rank: int = 0, world_size: int = 1, backend: str = "nccl") -> Path:
    record = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": backend, "rank": rank, "world_size": world_size},
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}, *events],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")
    with opened as file:
        json.dump(record, file)
    return path
