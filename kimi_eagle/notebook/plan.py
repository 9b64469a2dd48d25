"""Which stages a run has to execute, decided and checked before the first of them starts."""

import ast
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle import paths
from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.notebook import parameters, preflight, provenance
from kimi_eagle.notebook.stage import fingerprint

# These change how a run is carried out, not what it computes: a resumed run may have others.
OPERATIONAL = {
    "run",
    "engine_port",
    "engine_stay",
    "idle_minutes",
    "gpu_memory",
    "stage_timeout_minutes",
    "expected_minutes",
}
MIN_FREE_GIB = 1.0  # logs, notebooks and HTML; what a stage stores is its own budget's question


@dataclass(frozen=True)
class Plan:
    """A checked run: `stages` are executed, in order; `kept` are done already and valid; `values` is the parameter file."""

    run: str
    file: Path
    values: dict[str, Any]
    stages: list[str]
    kept: list[str]

    @property
    def folder(self) -> Path:
        """outputs/<run>, absolute."""
        return paths.outputs().absolute() / self.run


def make(file: str | Path, start: str = "", only: str = "", name: str = "") -> Plan:
    """The plan for a parameter file. BadInput or MissingCapability, in one sentence, for whatever would fail later.

    start, only: a stage's number or name (`--from`, `--only`); name: the run's name, default the file's stem. Without `start`
    and `only`, finished stages of equal parameters are kept, and one with other parameters is refused.
    """
    file = Path(file)
    known = parameters.declared_everywhere()
    values = parameters.validate(parameters.load(file), known, file.name)
    run = parameters.check_run_name(name or values.get("run") or file.stem)
    defaults = {key: parameter.default for key, parameter in known.items()}
    preflight.check({**defaults, **values})
    _check_disk()
    order = parameters.stages()
    if not order:
        raise BadInput("there are no notebooks: restore notebooks/ from the repository.")
    if start and only:
        raise BadInput("--from and --only exclude each other; give one of them.")
    first = order.index(find_stage(start, order)) if start else 0
    wanted = [find_stage(only, order)] if only else order[first:]
    draft = Plan(run, file, values, wanted, [])
    stages: list[str] = []
    kept: list[str] = []
    for stage in order:
        result = read_result(draft.folder, stage)
        if stage in wanted and (start or only or not result):
            stages.append(stage)
        elif (result and stage < wanted[-1]) or stage in wanted:
            _check_same(result, parameters.for_stage(stage, values), draft)
            (kept if stage not in wanted or _is_current(draft.folder, stage, result, stages) else stages).append(stage)
    for stage in stages:
        _check_inputs(stage, stages[: stages.index(stage)], draft.folder)
    return Plan(run, file, values, stages, kept)


def find_stage(text: str, order: list[str]) -> str:
    """The stage that `text` names by number (4, 04) or by name."""
    number = text.zfill(2) if text.isdigit() else text
    found = [s for s in order if s == text or s.split("_")[0] == number]
    if len(found) != 1:
        raise BadInput(
            f"stage {text!r}: no such notebook; use a number from {order[0][:2]} to {order[-1][:2]} or a name such as {order[-1]}."
        )
    return found[0]


def read_result(folder: Path, stage: str) -> dict[str, Any]:
    """A stage's result.json if the stage is done, else {}."""
    try:
        result = json.loads((folder / stage / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if result.get("status") == "done" else {}


def inputs_of(stage: str) -> set[str]:
    """Stages whose results a notebook asks for, read from its code: cfg.artifact("02_...", ...) and cfg.figures("01_...")."""
    found = set()
    for cell in json.loads((parameters.notebooks_folder() / f"{stage}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            asks = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("artifact", "figures")
            )
            if (
                asks
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and node.args[0].value in parameters.stages()
            ):
                found.add(node.args[0].value)
    return found


def is_stale(folder: Path, result: dict[str, Any]) -> bool:
    """True where a stage was made from an input that has been run again since, or is gone."""
    for stage, digest in result.get("provenance", {}).get("inputs", {}).items():
        if not (folder / stage / "result.json").is_file() or fingerprint(folder, stage) != digest:
            return True
    return False


def same_parameters(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Names whose value differs between a result's parameters and those asked for now, operational ones aside."""
    new = provenance.scrub_tree(provenance.public_parameters(new))
    return sorted(k for k in {*old, *new} - OPERATIONAL if old.get(k) != new.get(k))


def _is_current(folder: Path, stage: str, result: dict[str, Any], rerun: list[str]) -> bool:
    published = (folder / stage / f"{stage}.ipynb").is_file()
    return published and not is_stale(folder, result) and not inputs_of(stage) & set(rerun)


def _check_same(result: dict[str, Any], new: dict[str, Any], plan: Plan) -> None:
    changed = same_parameters(result["parameters"], new)
    if changed:
        stage, key = result["stage"], changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise BadInput(
            f"run {plan.run} has {stage} with {key} {result['parameters'].get(key)!r}, and {plan.file.name} now says "
            f"{provenance.scrub_tree(provenance.public_parameters(new)).get(key)!r}{more}; "
            f"give the new run a --name, or redo this one with --from {stage[:2]}."
        )


def _check_inputs(stage: str, before: list[str], folder: Path) -> None:
    for needed in sorted(inputs_of(stage) - set(before)):
        result = read_result(folder, needed)
        if not result or is_stale(folder, result):
            state = "was made from inputs that have been run again since" if result else "has not finished"
            raise BadInput(
                f"{stage} needs {needed}, which {state} in run {folder.name}; start with --from {needed[:2]}."
            )


def _check_disk() -> None:
    place = paths.outputs().absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    if free < MIN_FREE_GIB:
        raise MissingCapability(
            f"disk: {free:.1f} GiB free where outputs/ is, and a run needs {MIN_FREE_GIB:.0f}; free some or set KIMI_EAGLE_OUTPUTS."
        )
