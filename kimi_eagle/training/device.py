"""The device a run trains on, the memory it took, and what to say when there is too little."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kimi_eagle.errors import MissingCapability, StageFailed


def device_of(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`; MissingCapability where there is no CUDA device."""
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if name == "cuda":
        raise MissingCapability("training: device 'cuda' is asked for, but torch sees no CUDA device here; use 'cpu'.")
    return torch.device("cpu")


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held so far in MB: the device's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB


@contextmanager
def say_out_of_memory(device: torch.device) -> Iterator[None]:
    """Turn torch's out-of-memory error inside the block into StageFailed with what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = f"{peak_memory_mb(device):.0f} MB" if device.type == "cuda" else "all"
        raise StageFailed(
            f"training: the device's memory is full ({held} held): lower row_tokens, set recompute, or cut the draft vocabulary; "
            "where much of it is reserved but unused, start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        ) from error
