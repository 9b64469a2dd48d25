"""The machine: versions, driver and CUDA, GPUs and how they reach each other, disk, memory, vLLM's platform."""

import re
import shutil
from pathlib import Path
from typing import Any

from kimi_eagle import paths
from kimi_eagle.diagnose.rows import BAD, NOTE, OK, Row
from kimi_eagle.notebook import provenance

# vLLM release -> torch release that it was built for (its wheels' own requirements). Another torch has another C++ ABI.
BUILT_FOR = {"0.16.0": ("2.9.1", "2.10.0"), "0.26.0": ("2.11.0",), "0.32.0": ("2.13.0",)}
MIN_FREE_GIB = {
    "disk": 10.0,
    "memory": 6.0,
}  # the demo's own needs: 6 GB of packages and 1 GB of states; one engine and one kernel


def versions() -> list[Row]:
    """Python, torch, vLLM, transformers and speculators, with what does not fit together."""
    found = provenance.versions()
    rows = [Row("Python", OK, found["python"])]
    for package, need in (("torch", True), ("vllm", True), ("transformers", True), ("speculators", False)):
        version = found.get(package, "")
        if version:
            rows.append(Row(package, OK, version))
        elif need:
            rows.append(
                Row(package, BAD, "not installed", "make the environment again: make setup, or environment.yml")
            )
        else:
            rows.append(Row(package, NOTE, "not installed", "only the speculators back end and its comparison need it"))
    wanted = BUILT_FOR.get(found.get("vllm", "").split("+")[0])
    if wanted and found.get("torch", "").split("+")[0] not in wanted:
        rows.append(
            Row(
                "torch for vLLM",
                BAD,
                found.get("torch", "none"),
                f"vLLM {found['vllm']} was built for torch {' or '.join(wanted)}",
            )
        )
    return rows


def cuda(facts: dict[str, Any]) -> list[Row]:
    """Driver, CUDA build and compute capability; `facts` is the answer of the torch probe."""
    gpus = provenance.gpus()
    if "error" in facts:
        return [
            Row(
                "torch",
                BAD,
                f"does not load: {facts['error']}",
                "install the torch build of the lock for this processor",
            )
        ]
    build = facts["cuda_build"] or "CPU build"
    if not gpus and not facts["devices"]:
        return [
            Row(
                "GPU",
                NOTE,
                f"none (torch's CUDA: {build})",
                "the CPU path is for learning and tests; figures of a box need the box",
            )
        ]
    rows = [Row("driver", OK if gpus else NOTE, gpus[0]["driver"] if gpus else "nvidia-smi does not answer")]
    if not facts["devices"]:
        rows.append(
            Row(
                "CUDA",
                BAD,
                f"torch's {build} sees no GPU",
                "update the driver, or take a torch built for an older CUDA",
            )
        )
    rows += [
        Row("compute capability", OK, f"{d['name']}: sm_{d['capability'].replace('.', '')}") for d in facts["devices"]
    ]
    return list(dict.fromkeys(rows))


def topology(facts: dict[str, Any], matrix: str | None = None) -> list[Row]:
    """How the GPUs reach each other: `matrix` is the text of `nvidia-smi topo -m` (asked for when None).

    AllReduce over PCIe without peer access goes through host memory, which decides the profile of notebook 01.
    """
    text = provenance.command("nvidia-smi", "topo", "-m") if matrix is None else matrix
    links = gpu_links(text)
    if not links:
        return [Row("GPU links", NOTE, "fewer than two GPUs")]
    kinds = sorted(set(links.values()))
    words = ", ".join(f"{sum(v == k for v in links.values())} pairs {k}" for k in kinds)
    nvlink = all(kind.startswith("NV") for kind in kinds)
    rows = [
        Row(
            "GPU links",
            OK if nvlink else NOTE,
            words,
            "" if nvlink else "PCIe: expect AllReduce to take a large share of a decode step",
        )
    ]
    peers = facts.get("peers") or []
    if peers and not all(map(all, peers)):
        rows.append(Row("peer to peer", BAD, "some GPUs cannot reach each other directly", "enable it in BIOS and driver (ACS, IOMMU), or expect copies through host memory"))  # fmt: skip
    elif peers:
        rows.append(Row("peer to peer", OK, "every GPU reaches every other directly"))
    return rows


def gpu_links(matrix: str) -> dict[tuple[int, int], str]:
    """(a, b) -> link kind (NV18, PIX, PXB, PHB, NODE, SYS) for each pair of GPUs in the text of `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s+(X|NV\d+|[A-Z]{3,4})\s", line)]
    return {(a, b): row[1 + b] for a, row in enumerate(rows) for b in range(a + 1, len(rows))}


def room() -> list[Row]:
    """Free disk where runs are written, and free memory."""
    place = paths.outputs().absolute()
    while not place.exists():
        place = place.parent
    disk = shutil.disk_usage(place).free / 2**30
    available = re.search(r"^MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    memory = int(available.group(1)) / 2**20 if available else 0.0
    return [
        Row(
            what,
            OK if free >= MIN_FREE_GIB[what] else BAD,
            f"{free:.1f} GiB free",
            "" if free >= MIN_FREE_GIB[what] else advice,
        )
        for what, free, advice in (
            ("disk", disk, "free some, or set KIMI_EAGLE_OUTPUTS to a larger disk"),
            ("memory", memory, "end other programs: an engine of the small model takes about 3 GiB"),
        )
    ]


def platform(facts: dict[str, Any]) -> list[Row]:
    """vLLM's platform; `facts` is the answer of the vllm probe."""
    if "error" in facts:
        return [
            Row(
                "vLLM platform",
                BAD,
                f"vLLM does not load: {facts['error']}",
                "see the rows above; SIGILL means a build for another processor",
            )
        ]
    rows = [
        Row(
            "vLLM platform",
            OK,
            f"{facts['platform']} ({facts['device']}), kernels {', '.join(facts['kernels']) or 'none'}",
        )
    ]
    if facts["device"] == "cpu" and provenance.gpus():
        rows.append(
            Row(
                "vLLM build",
                BAD,
                "a CPU build on a machine with GPUs",
                "take environment.yml, which has the CUDA build",
            )
        )
    return rows
