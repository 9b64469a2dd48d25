"""`kimi-eagle run`: a parameter file through the notebooks, one child process each, in order; the truth at the end.

Serial on purpose: two engines would fight for cores, memory and ports. An executed notebook is published under its own name only
when everything agrees that it worked (see publish.py); otherwise it stays as `NN_name.failed.ipynb`.
"""

import contextlib
import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from kimi_eagle import paths
from kimi_eagle.errors import BadInput, KimiEagleError, MissingCapability, StageFailed
from kimi_eagle.extract import engine
from kimi_eagle.notebook import parameters, plan, progress, provenance, publish, report
from kimi_eagle.notebook.plan import Plan

# The classes whose sentence, raised in a notebook, is worth more than the notebook's own "a cell failed".
KNOWN_ERRORS = {cls.__name__: cls for cls in (BadInput, MissingCapability, StageFailed)}
GRACE_SECONDS = 10  # between asking a notebook's process to end and killing it


def run(job: Plan) -> Path:
    """Execute the plan's stages and write the report; returns the path of the run's index.html.

    Raises the notebook's own BadInput or MissingCapability, or StageFailed. What was done before stays, and the report says so.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    minutes = _declared_minutes(job)
    clock = progress.Clock(job.file.stem, minutes)
    with _only_one(job), _engines_end(), progress.Display(job.stages, clock) as display:
        _first_words(job, display)
        try:
            for stage in job.stages:
                clock.note(stage, _run_stage(stage, job, display))
                report.write(job.folder, job.file.name)  # a long run can be read while it goes on
        finally:
            index = report.write(job.folder, job.file.name)
    return index


def run_many(files: list[Path], start: str = "", only: str = "") -> int:
    """Run several parameter files, one failure not stopping the rest; prints a table and returns the exit code (0 or 1)."""
    rows, failed = [], 0
    for file in files:
        begun = time.time()
        try:
            outcome = f"done: {shown(run(plan.make(file, start, only)))}"
        except KimiEagleError as error:
            failed += 1
            print(error, file=sys.stderr)
            outcome = f"FAILED: {str(error).splitlines()[0]}"
        rows.append((file.name, progress.words(time.time() - begun), outcome))
    width = max(len(r[0]) for r in rows)
    print("\n".join(f"{name:<{width}}  {took:>12}  {outcome}" for name, took, outcome in rows))
    return 1 if failed else 0


def shown(path: Path) -> str:
    """A path as it is printed: relative to the working directory where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _first_words(job: Plan, display: progress.Display) -> None:
    display.say(
        f"run {job.run}: {len(job.stages)} notebooks to run, {len(job.kept)} kept from before; logs in {shown(job.folder / 'logs')}/"
    )
    for stage in job.kept:
        display.say(f"      {stage}: kept, its parameters and inputs are the same (redo with --from {stage[:2]})")


def _run_stage(stage: str, job: Plan, display: progress.Display) -> float:
    """Execute one notebook; returns its seconds, or raises with the failed notebook and the log kept."""
    folder, log = job.folder / stage, job.folder / "logs" / f"{stage}.log"
    for place in (folder, log.parent):
        place.mkdir(parents=True, exist_ok=True)
    for old in (folder / "result.json", *folder.glob(f"{stage}*.ipynb"), *folder.glob(f"{stage}*.html")):
        old.unlink(missing_ok=True)
    source = parameters.notebooks_folder() / f"{stage}.ipynb"
    values = parameters.for_stage(stage, job.values)
    if "run" in values:
        values["run"] = job.run
    display.start(
        stage, len(nbformat.read(source, as_version=4).cells) + 1
    )  # papermill adds one cell, the injected one
    running, started = folder / f".{stage}.running.ipynb", time.time()
    spec = {"notebook": str(source), "output": str(running), "parameters": values, "cwd": str(source.parent)}
    code, error = _execute(spec, log, display, _timeout(job))
    found = publish.problems(running, folder / "result.json", started, values)
    if code or found or error:
        (folder / "result.json").unlink(missing_ok=True)
        display.finish("FAILED")
        raise _failure(stage, job, log, code, error, found, _keep(running, folder / f"{stage}.failed.ipynb"))
    report.html(_keep(running, folder / f"{stage}.ipynb"))
    display.finish("done")
    return time.time() - started


def _execute(spec: dict[str, Any], log: Path, display: progress.Display, timeout: float) -> tuple[int, dict[str, str]]:
    """Run the child, copying its lines to the log; returns (exit code, the notebook's error {name, text} or {})."""
    spec_file = Path(spec["output"]).with_suffix(".json")
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    command = [sys.executable, "-u", "-m", "kimi_eagle.notebook.execute", str(spec_file)]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
    )
    lines: queue.Queue[bytes] = queue.Queue()
    reader = threading.Thread(target=lambda: [lines.put(line) for line in child.stdout], daemon=True)
    reader.start()
    error: dict[str, str] = {}
    deadline = time.monotonic() + timeout
    try:
        with log.open("w", encoding="utf-8") as file:
            while child.poll() is None:
                if time.monotonic() > deadline:
                    limit = f"stage_timeout_minutes ({timeout / 60:g})"
                    return 1, {"name": "Timeout", "text": f"it was still running after {limit}"}
                with contextlib.suppress(queue.Empty):
                    error = _take(lines.get(timeout=0.5), file, display) or error
                display.update()
            reader.join(GRACE_SECONDS)  # a process that outlives the child may hold the pipe open
            while not lines.empty():
                error = _take(lines.get(), file, display) or error
        return child.returncode, error
    finally:
        _end(child)
        spec_file.unlink(missing_ok=True)


def _take(raw: bytes, log: Any, display: progress.Display) -> dict[str, str]:
    """One line of the child: to the log, to the display; returns the error that it carries, mostly none."""
    text = provenance.scrub(raw.decode("utf-8", "replace").rstrip("\r\n").rsplit("\r", 1)[-1].rstrip())
    log.write(f"{text}\n")
    log.flush()
    mark, _, rest = text.partition(" ")
    if mark == "kimi-eagle-error":
        return json.loads(rest)
    if text.startswith(("Executing Cell ", "Ending Cell ")):
        display.update(cell=int(text.split()[2].rstrip("-") or 0))
    elif text.strip():
        display.update(line=text.strip())
    return {}


def _end(child: subprocess.Popen) -> None:
    """End the child and whatever it started. The kernel runs in a session of its own, so the group alone is not enough."""
    import psutil  # ipykernel brings it

    if child.poll() is not None:
        return
    family = psutil.Process(child.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.kill()
    child.wait()
    psutil.wait_procs(family, GRACE_SECONDS)


def _environment() -> dict[str, str]:
    """The child's environment: no forced plot backend (it hides pictures), this environment's kernel, repeatable hashing."""
    kept = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "JPY_PARENT_PID")}
    # PYTHONHASHSEED and CUBLAS_WORKSPACE_CONFIG work only from a process's start, so no cell can set them.
    fixed = {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {
        **kept,
        **fixed,
        "KIMI_EAGLE_OUTPUTS": str(paths.outputs().absolute()),
        "KIMI_EAGLE_BATCH": "1",
        "KIMI_EAGLE_OWNER": str(os.getpid()),
    }


def _keep(running: Path, final: Path) -> Path:
    """Clean the executed notebook and move it to its final name; returns that, also where the notebook never began."""
    if running.is_file():
        nbformat.write(publish.clean(nbformat.read(running, as_version=4)), running)
        running.replace(final)
    return final


def _failure(
    stage: str, job: Plan, log: Path, code: int, error: dict[str, str], found: list[str], kept: Path
) -> KimiEagleError:
    reason = error.get("text") or (found[0] if found else f"its process ended with code {code}")
    if error and error["name"] not in KNOWN_ERRORS and error["name"] != "Timeout":
        reason = f"{error['name']}: {reason}"
    if code == 138 or code < 0:
        reason = f"the kernel died (often out of memory); {reason}"
    lines = [
        f"{stage} failed: {reason.strip()}",
        f"  the last lines of {shown(log)}:",
        progress.tail(log),
        f"  notebook: {shown(kept)}",
        f"  go on with: kimi-eagle run {shown(job.file.absolute())} --from {stage[:2]}{_name_option(job)}",
    ]
    return KNOWN_ERRORS.get(error.get("name", ""), StageFailed)("\n".join(lines))


def _name_option(job: Plan) -> str:
    return "" if job.run == job.file.stem else f" --name {job.run}"


def _timeout(job: Plan) -> float:
    """Seconds that one notebook may take; 0 minutes, or no such parameter, means no limit."""
    known = parameters.declared_everywhere().get("stage_timeout_minutes")
    minutes = job.values.get("stage_timeout_minutes", known.default if known else 0)
    return 60.0 * minutes if minutes else float("inf")


def _declared_minutes(job: Plan) -> dict[str, float]:
    known = parameters.declared_everywhere().get("expected_minutes")
    minutes = job.values.get("expected_minutes", known.default if known else [])
    return dict(zip(parameters.stages(), minutes, strict=False))


@contextlib.contextmanager
def _only_one(job: Plan) -> Iterator[None]:
    """Hold the run's lock; BadInput where another process works on the same run."""
    with (job.folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(
                f"run {job.run} is being worked on by another process; wait for it, or give this one a --name."
            ) from None
        yield


@contextlib.contextmanager
def _engines_end() -> Iterator[None]:
    """At the end of a run, however it ends, end the engines that it asked for and that no other living process wants."""
    try:
        yield
    finally:
        for entry in engine.running():
            folder = paths.engines() / entry.key
            mine = folder / "owners" / str(os.getpid())
            if mine.is_file() and not entry.stay:
                mine.unlink(missing_ok=True)
                if not engine.owners_alive(folder):
                    engine.end(folder)
