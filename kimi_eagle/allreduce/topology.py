"""What decides AllReduce on this box: links between GPUs, peer access, NCCL's settings, vLLM's custom-AllReduce gate."""

import os
import shutil
import subprocess
from typing import Any

import pandas as pd

# World sizes that vLLM's custom AllReduce supports (custom_all_reduce.py, read in 0.16 to 0.33).
CUSTOM_WORLD_SIZES = (2, 4, 6, 8)


def settings(ranks: int) -> pd.DataFrame:
    """A row per fact about AllReduce here: name, value, why it matters."""
    gpus = _gpus()
    is_open, reason = custom_gate(ranks, gpus)
    rows = [
        (
            "devices",
            gpus["name"] or f"CPU, {os.cpu_count()} cores",
            "PCIe cards pay microseconds where NVLink does not",
        ),
        ("ranks", ranks, "each AllReduce joins all of them"),
        ("links", gpus["links"], "NV: NVLink; PIX, PXB, PHB, NODE, SYS: PCIe, the later the longer"),
        (
            "peer access",
            gpus["peer"],
            "without it each message goes through host memory (242 us instead of 17 were published)",
        ),
        (
            "vLLM custom AllReduce",
            f"{'open' if is_open else 'closed'}: {reason}",
            "closed means NCCL also for small messages",
        ),
        ("CPU AllReduce", _cpu_path(), "what vLLM's CPU back end uses between ranks"),
    ]
    rows += [(name, os.environ.get(name, "unset"), why) for name, why in NCCL_SETTINGS.items()]
    return pd.DataFrame(rows, columns=["setting", "value", "why it matters"])


NCCL_SETTINGS = {
    "NCCL_PROTO": "LL alone costs extra traffic; LL,LL128,Simple was best for Kimi on eight PCIe cards",
    "NCCL_ALGO": "ring, tree or NVLS",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be for peer access (SYS: anywhere)",
    "NCCL_P2P_DISABLE": "1 sends everything through host memory",
    "NCCL_NVLS_ENABLE": "NVLink multicast",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "FlashInfer's AllReduce is tried first (default on from vLLM 0.29)",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "torch's symmetric-memory AllReduce",
}


def custom_gate(ranks: int, gpus: dict[str, Any] | None = None) -> tuple[bool, str]:
    """(open, reason): whether vLLM's custom AllReduce would run over `ranks` GPUs of this box; `gpus` as `_gpus` finds them."""
    gpus = gpus or _gpus()
    if not gpus["count"]:
        return False, "no GPU here"
    if ranks < 2:
        return False, "one rank has nothing to reduce"
    if gpus["count"] < ranks:
        return False, f"{gpus['count']} GPUs for {ranks} ranks"
    if ranks not in CUSTOM_WORLD_SIZES:
        return False, f"world size {ranks} is not one of {CUSTOM_WORLD_SIZES}"
    if ranks > 2 and not gpus["nvlink"]:
        return False, "more than two GPUs that only PCIe links"
    if gpus["peer"] == "no":
        return False, "no peer access between the GPUs"
    return True, "NVLink" if gpus["nvlink"] else "two PCIe GPUs"


def _gpus() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {"count": count, "name": "", "links": "none", "peer": "none", "nvlink": False}
    if not count:
        return found
    found["name"] = f"{count} x {torch.cuda.get_device_name(0)}"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    found["peer"] = (
        "one GPU" if not pairs else "yes" if all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs) else "no"
    )
    if shutil.which("nvidia-smi") and pairs:
        text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30).stdout
        links = links_of(text)
        found["links"], found["nvlink"] = (
            ", ".join(sorted(links)) or "unknown",
            bool(links) and all(k.startswith("NV") for k in links),
        )
    return found


def links_of(text: str) -> set[str]:
    """The kinds of links between GPUs in the output of `nvidia-smi topo -m`."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    return {cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"}


def _cpu_path() -> str:
    import torch

    try:
        wide = bool(torch.cpu._is_avx512_supported())
    except AttributeError:
        wide = False
    return "shared memory (AVX-512 build)" if wide else "gloo (no AVX-512)"
