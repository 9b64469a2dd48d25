"""The object that a notebook's set-up cell makes: its checked parameters, its folder, and the result it hands over.

Notebooks hand over files, never kernel state. The last act of a stage is an atomic `result.json`; the first is to take away
an earlier one, so that a half-done stage is never mistaken for a finished one.
"""

import ast
import hashlib
import json
import math
import os
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kimi_eagle import paths
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import BadInput
from kimi_eagle.notebook import parameters, preflight, provenance

SCHEMA = "kimi_eagle.result/1"
DEFAULT_RUN = "lab"
FIGURE_WORDS = "figures hold numbers, true/false, lists and mappings of them"


class Stage:
    """A running stage. Every parameter is an attribute (`cfg.seed`); attributes cannot be set.

    name: the stage; run: the run's name; folder: this stage's folder, made on the way; provenance: what `result.json` will say.
    """

    def __init__(self, name: str, values: dict[str, Any]):
        run = parameters.check_run_name(values.get("run") or DEFAULT_RUN)
        folder = paths.outputs().absolute() / run / name
        folder.mkdir(parents=True, exist_ok=True)
        given = {**values, "run": run} if "run" in values else dict(values)
        self.__dict__.update(given)
        self.__dict__.update(name=name, run=run, folder=folder, values=given, started=time.time(), inputs={})
        self.__dict__["provenance"] = provenance.collect()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{name}: parameters are fixed once the stage has begun; change the parameters cell and run it again"
        )

    def artifact(self, stage: str, key: str) -> Path:
        """Path of what an earlier stage of this run made, from its result.json; BadInput where it is not there."""
        known = _finished(self.folder.parent, stage, self.name)["artifacts"]
        if key not in known:
            raise BadInput(
                f"{stage} has no artifact {key!r} (it has {', '.join(known) or 'none'}); run notebook {stage[:2]} again."
            )
        path = self.folder.parent / known[key]
        if not path.exists():
            raise BadInput(
                f"artifact {key!r} of {stage} is gone from the run's folder; run notebook {stage[:2]} again."
            )
        self.inputs[stage] = fingerprint(self.folder.parent, stage)
        return path

    def figures(self, stage: str) -> dict[str, Any]:
        """The figures (nested) in an earlier stage's result.json; BadInput where that stage has not finished."""
        found = _finished(self.folder.parent, stage, self.name)["figures"]
        self.inputs[stage] = fingerprint(self.folder.parent, stage)
        return found

    def finish(
        self,
        figures: dict[str, Any] | None = None,
        units: dict[str, Any] | None = None,
        artifacts: dict[str, str | Path] | None = None,
    ) -> None:
        """Write result.json, atomically, and print one line.

        figures: numbers, booleans and lists, nested; dotted names ("acceptance.served.length") open into the tree.
        units: the same tree of unit strings; a string at a branch stands for every leaf below it.
        artifacts: name -> path inside the run's folder, existing.
        """
        tree = _open(figures or {})
        for where, value in _leaves(tree):
            _check_figure(value, where)
        result = {
            "schema": SCHEMA,
            "stage": self.name,
            "status": "done",
            "provenance": {
                **self.provenance,
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(time.time() - self.started, 1),
                "inputs": dict(sorted(self.inputs.items())),
            },
            "parameters": provenance.public_parameters(self.values),
            "figures": tree,
            "units": _match_units(tree, _open(units or {})),
            "artifacts": {key: self._relative(key, path) for key, path in (artifacts or {}).items()},
        }
        write_json(self.folder / "result.json", provenance.scrub_tree(result))
        print(
            f"{self.name}: done, {len(list(_leaves(tree)))} figures and {len(result['artifacts'])} artifacts in run {self.run}."
        )

    def _relative(self, key: str, path: str | Path) -> str:
        place = Path(path)
        place = Path(os.path.normpath(place if place.is_absolute() else self.folder / place))
        if not place.exists():
            raise BadInput(
                f"{self.name}: the artifact {key!r} was not written; there is no {place.name} in the stage's folder."
            )
        if not place.is_relative_to(self.folder.parent):
            raise BadInput(
                f"{self.name}: the artifact {key!r} lies outside the run's folder; write it below cfg.folder."
            )
        return str(place.relative_to(self.folder.parent))


def begin(name: str, namespace: dict[str, Any]) -> Stage:
    """Check the parameters of the notebook `name`, seed the generators, print the provenance table, return the stage.

    namespace: the notebook's globals(). Raises BadInput, before any engine starts, for a missing, mistyped or unknown
    parameter (also one that plain `papermill -f` injected), a target that is not there, or an engine port in use.
    """
    known = parameters.declared(name)
    missing = [p for p in known if p not in namespace]
    if missing:
        raise BadInput(f"{name}: {missing[0]} has no value yet; run the parameters cell first.")
    injected = {k: namespace[k] for k in _injected_names(namespace) if k not in known and k in namespace}
    if injected:
        parameters.validate(injected, parameters.declared_everywhere(), name)
    values = parameters.validate({p: namespace[p] for p in known}, known, name)
    preflight.check(values)
    stage = Stage(name, values)
    (stage.folder / "result.json").unlink(missing_ok=True)
    _seed(values.get("seed", 0))
    _print_table([("stage", name), ("run", stage.run), *provenance.rows(stage.provenance)])
    return stage


def fingerprint(run_folder: Path, stage: str) -> str:
    """Digest of a stage's result.json (16 hex digits): equal as long as that stage was not run again."""
    return hashlib.sha256((run_folder / stage / "result.json").read_bytes()).hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically; NaN and infinity are refused, since JSON has none."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def _finished(run_folder: Path, stage: str, reader: str) -> dict[str, Any]:
    try:
        result = json.loads((run_folder / stage / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = {}
    if result.get("status") != "done":
        raise BadInput(
            f"{reader} needs {stage}, which has not finished in run {run_folder.name}; run notebook {stage[:2]} first."
        )
    return result


def _injected_names(namespace: dict[str, Any]) -> set[str]:
    """Names that papermill set: those assigned in executed cells beginning with its `# Parameters` line.

    Looking at all globals instead would refuse a scratch variable of someone working in JupyterLab.
    """
    cells = [c for c in namespace.get("In", []) if isinstance(c, str) and c.lstrip().startswith("# Parameters")]
    targets = [t for c in cells for node in ast.parse(c).body if isinstance(node, ast.Assign) for t in node.targets]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _seed(seed: int) -> None:
    """Seed random, numpy, and torch only where it is loaded already (its import takes seconds; train seeds it itself)."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _print_table(table: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in table)
    print("\n".join(f"{name:<{width}}  {provenance.scrub(value)}" for name, value in table))


def _open(tree: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`, at every depth."""
    opened: dict[str, Any] = {}
    for key, value in tree.items():
        *branch, leaf = str(key).split(".")
        place = opened
        for part in branch:
            place = place.setdefault(part, {})
        value = _open(value) if isinstance(value, dict) else _plain(value)
        both = isinstance(value, dict) and isinstance(place.get(leaf), dict)
        place[leaf] = {**place[leaf], **value} if both else value
    return opened


def _plain(value: Any) -> Any:
    """numpy's and torch's numbers and arrays as Python's, tuples as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def _check_figure(value: Any, where: str) -> None:
    """BadInput unless `value` is a finite number, a boolean, or a list (of lists, of mappings) of them."""
    if isinstance(value, list | tuple):
        for item in value:
            _check_figure(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_figure(item, f"{where}.{key}")
    elif not isinstance(value, bool | int | float):
        raise BadInput(f"figure {where} is a {type(value).__name__}; {FIGURE_WORDS}.")
    elif not math.isfinite(value):
        raise BadInput(
            f"figure {where} is {value}; a figure that could not be measured is left out and said on the page."
        )


def _match_units(figures: dict[str, Any], units: Any, prefix: str = "") -> dict[str, Any]:
    matched: dict[str, Any] = {}
    for key, value in figures.items():
        unit = units if isinstance(units, str) else units.get(key)
        if isinstance(value, dict):
            matched[key] = _match_units(value, unit if unit is not None else {}, f"{prefix}{key}.")
        elif unit is None and isinstance(value, bool):
            matched[key] = "true/false"
        elif unit is None:
            raise BadInput(f"figure {prefix}{key} has no unit; give one in `units` (a ratio's is 1).")
        else:
            matched[key] = unit
    return matched
