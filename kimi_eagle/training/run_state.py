"""The state of a run on disk: written whole or not at all, two generations, so that a kill or a cut file costs one interval."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from kimi_eagle.durable import sync
from kimi_eagle.errors import BadInput

KEPT = 2


def save(folder: Path, state: dict[str, Any]) -> Path:
    """Write `state` (with its "step") as state-NNNNNNNN.pt, then drop all but the newest KEPT."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"state-{state['step']:08d}.pt"
    partial = file.with_suffix(".tmp")
    torch.save(state, partial)
    sync(partial)
    os.replace(partial, file)
    sync(folder)
    for old in sorted(folder.glob("state-*.pt"))[:-KEPT]:
        old.unlink()
    return file


def newest(folder: Path, digest: str) -> dict[str, Any] | None:
    """The newest state that can be read whole, or None; BadInput where it was written under other settings or data."""
    for file in sorted(folder.glob("state-*.pt"), reverse=True):
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # a cut or damaged file: torch raises several types; the generation before it is whole
            continue
        if state["digest"] != digest:
            raise BadInput(
                f"training folder {folder.parent.name}: begun with other settings or data; remove it or use another run."
            )
        return state
    return None


class Metrics:
    """metrics.jsonl: one JSON object a line, raw counts; lines beyond the resumed step are dropped, so none is there twice."""

    def __init__(self, file: Path, step: int) -> None:
        """Open `file` after the line of `step` (0: a new file)."""
        kept = []
        if step and file.is_file():
            for line in file.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    break
                if entry["step"] <= step:
                    kept.append(line + "\n")
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".tmp")
        partial.write_text("".join(kept))
        os.replace(partial, file)
        self._file = open(file, "a", buffering=1)

    def add(self, **entry: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps(entry) + "\n")

    def sync(self) -> None:
        """Make what was added durable, before the state that counts on it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
