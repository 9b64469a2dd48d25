"""What a run says while it works: a bar over the whole run, one inside the stage, the last log line, the time left."""

import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kimi_eagle import paths

QUIET_SECONDS = 60  # between two lines where the output is no terminal


class Clock:
    """Expected seconds per stage: as timed in earlier runs of the same parameter file, else as declared."""

    def __init__(self, key: str, declared_minutes: dict[str, float]):
        self.key = key
        self.file = paths.outputs() / ".timings.json"
        self.expected = {stage: 60.0 * minutes for stage, minutes in declared_minutes.items()}
        self.expected.update(self._read().get(key, {}))

    def note(self, stage: str, seconds: float) -> None:
        """Remember how long a finished stage took."""
        known = self._read()
        known.setdefault(self.key, {})[stage] = round(seconds, 1)
        self.file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            return json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


class Display:
    """Progress of a run over `stages`; bars on a terminal, elsewhere a line at each turn and once a minute between."""

    def __init__(self, stages: list[str], clock: Clock):
        self.stages, self.clock = stages, clock
        self.console = Console(file=sys.stderr, highlight=False)
        self.stage, self.begun, self.cells, self.cell, self.line, self.said = "", 0.0, 1, 0, "", 0.0
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self.bars = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)

    def __enter__(self) -> "Display":
        self.whole = self.bars.add_task("run", total=sum(self._seconds(s) for s in self.stages), note="")
        self.inner = self.bars.add_task("stage", total=1, note="")
        self.bars.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.bars.stop()

    def start(self, stage: str, cells: int) -> None:
        """A stage of `cells` cells begins."""
        self.stage, self.begun, self.cells, self.cell, self.line = stage, time.time(), max(cells, 1), 0, ""
        self.said = time.time()
        self.say(f"[{self.stages.index(stage) + 1}/{len(self.stages)}] {stage}: started, {self.left()}")

    def update(self, cell: int | None = None, line: str = "") -> None:
        """The stage is at `cell` (from 1), or printed `line`; called often."""
        self.cell, self.line = cell or self.cell, line or self.line
        note = f"cell {self.cell}/{self.cells}  {self.line[: max(self.console.width - 70, 20)]}"
        self.bars.update(
            self.inner, description=self.stage, total=self.cells, completed=max(self.cell - 1, 0), note=note
        )
        self.bars.update(self.whole, completed=self._done(), note=self.left())
        if not self.console.is_terminal and time.time() - self.said > QUIET_SECONDS:
            self.said = time.time()
            self.say(
                f"      {self.stage}: cell {self.cell}/{self.cells}, {words(time.time() - self.begun)}, {self.left()}: {self.line[:100]}"
            )

    def finish(self, outcome: str) -> None:
        """The stage ended; `outcome` in a word or two."""
        self.say(
            f"[{self.stages.index(self.stage) + 1}/{len(self.stages)}] {self.stage}: {outcome} in {words(time.time() - self.begun)}"
        )

    def say(self, text: str) -> None:
        """A line above the bars."""
        self.console.print(text, markup=False, soft_wrap=True)

    def left(self) -> str:
        """The estimate of the time left, in words; a stage slower than expected counts as nearly done."""
        rest = self.stages[self.stages.index(self.stage) + 1 :]
        here = max(self._seconds(self.stage) - (time.time() - self.begun), 0.0)
        return f"about {words(here + sum(self._seconds(s) for s in rest))} left"

    def _seconds(self, stage: str) -> float:
        return self.clock.expected.get(stage, 60.0)

    def _done(self) -> float:
        before = self.stages[: self.stages.index(self.stage)]
        here = min(time.time() - self.begun, self._seconds(self.stage))
        return sum(self._seconds(s) for s in before) + here


def words(seconds: float) -> str:
    """A duration as people say it: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def tail(file: Path, lines: int = 15) -> str:
    """The last lines of a log, without papermill's cell marks."""
    text = [
        t
        for t in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if not t.startswith(("Executing Cell", "Ending Cell"))
    ]
    return "\n".join(f"    {t[:300]}" for t in text[-lines:])
