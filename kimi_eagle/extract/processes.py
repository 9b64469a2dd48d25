"""Processes by name for ever: a pid with its start time, and signals to a whole process group."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def birth(pid: int) -> str:
    """A process's start time in clock ticks since boot (proc(5), field 22): with the pid it names one process for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def alive(pid: int, born: str) -> bool:
    """True where the process of that pid and start time still runs."""
    return bool(born) and birth(pid) == born


def signal_group(pid: int, number: int) -> None:
    """Signal the process group that `pid` leads (an engine host leads its session: its workers are in its group)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file's content, None where there is none or it is not whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
