"""The parameters that notebooks declare, read from the notebooks themselves, and the strict reading of a parameter file.

papermill passes an unknown key with one line in a log and takes the text "1e-4" for a number's place; its own reader of the
`parameters` cell misses annotated names. So the cell is read with `ast`, and every key and type is held against it.
"""

import ast
import difflib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kimi_eagle import paths
from kimi_eagle.errors import BadInput

Value = bool | int | float | str | list
SCALARS = (bool, int, float, str)
SECRET_WORDS = {
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "token",
    "apikey",
    "auth",
    "key",
}
# Shapes of well-known access tokens; the value is never repeated in the message.
SECRET_VALUES = re.compile(r"^(hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|AKIA)[A-Za-z0-9_-]{12,}$")
RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


@dataclass(frozen=True)
class Parameter:
    """One declared parameter: its default, what its comment says (meaning and unit), and the notebooks that declare it."""

    name: str
    default: Value
    meaning: str
    notebooks: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The type in words, as messages and tables say it."""
        return _kind(self.default)


def notebooks_folder() -> Path:
    """Folder of the notebooks: KIMI_EAGLE_NOTEBOOKS, or `notebooks/` of the repository (never the working directory)."""
    return Path(os.environ.get("KIMI_EAGLE_NOTEBOOKS") or paths.REPOSITORY / "notebooks")


def stages() -> list[str]:
    """Names of the notebooks in running order, e.g. `02_extract_hidden_states`."""
    return sorted(p.stem for p in notebooks_folder().glob("[0-9][0-9]_*.ipynb"))


def declared(notebook: str | Path) -> dict[str, Parameter]:
    """The parameters of one notebook (a stage name or a path), in the order of its one `parameters` cell.

    Raises BadInput where the notebook is missing or its cell holds anything but one literal per line.
    """
    path = Path(notebook) if str(notebook).endswith(".ipynb") else notebooks_folder() / f"{notebook}.ipynb"
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except FileNotFoundError:
        raise BadInput(
            f"notebook {path.stem}: not found; the notebooks are {', '.join(stages()) or 'missing'}."
        ) from None
    except (ValueError, KeyError):
        raise BadInput(f"notebook {path.stem}: not a notebook file; restore it from the repository.") from None
    tagged = ["".join(c["source"]) for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise BadInput(f"notebook {path.stem}: {len(tagged)} cells are tagged `parameters`; exactly one must be.")
    return _read_cell(tagged[0], path.stem)


def declared_everywhere(names: list[str] | None = None) -> dict[str, Parameter]:
    """Every parameter of every notebook (or of `names`), one entry a name, listing all notebooks that declare it.

    Raises BadInput where two notebooks declare one name with different defaults: a run would then depend on the reader.
    """
    merged: dict[str, Parameter] = {}
    for stage in stages() if names is None else names:
        for name, new in declared(stage).items():
            old = merged.get(name, new)
            if old is not new and (old.default != new.default or type(old.default) is not type(new.default)):
                raise BadInput(
                    f"parameter {name}: default {old.default!r} in {old.notebooks[0]} and {new.default!r} in {stage}; make them equal."
                )
            known = () if old is new else old.notebooks
            merged[name] = Parameter(name, old.default, old.meaning or new.meaning, (*known, stage))
    return merged


def load(path: str | Path) -> dict[str, Any]:
    """The mapping in a parameter file, as YAML reads it; duplicate keys, emptiness and other shapes are BadInput."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(path.parent.glob("*.yaml")) or sorted((paths.REPOSITORY / "params").glob("*.yaml"))
        raise BadInput(
            f"{path.name}: no such parameter file; {path.parent.name or '.'}/ has {', '.join(p.name for p in near) or 'none'}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path.name}: cannot be read as a text file ({type(error).__name__}).") from None
    try:
        values = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise BadInput(
            f"{path.name}: {line}{getattr(error, 'problem', None) or 'not YAML'}; write one `name: value` a line."
        ) from None
    if not isinstance(values, dict) or not values:
        raise BadInput(f"{path.name}: holds {_kind(values)} where `name: value` lines are expected.")
    return values


def validate(values: dict[str, Any], known: dict[str, Parameter], where: str) -> dict[str, Value]:
    """`values` with integers widened to float where the default is one; BadInput for the first key or value that is wrong.

    where: what the messages name as the origin, e.g. the parameter file's name.
    """
    return {name: _check(name, value, known, where) for name, value in values.items()}


def for_stage(stage: str, values: dict[str, Value]) -> dict[str, Value]:
    """All parameters of one notebook: the given values of those it declares, its defaults for the rest."""
    return {name: values.get(name, parameter.default) for name, parameter in declared(stage).items()}


def check_run_name(name: str) -> str:
    """`name` if it can be a folder under outputs/, else BadInput."""
    if not RUN_NAME.match(name):
        raise BadInput(f"run name {name!r}: use letters, digits, '.', '_' and '-', beginning with a letter or digit.")
    return name


def looks_secret(name: str) -> bool:
    """True for names such as api_key or hf_token; `answer_tokens` and the like are counts and pass."""
    return bool(SECRET_WORDS & set(re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())))


def _check(name: Any, value: Any, known: dict[str, Parameter], where: str) -> Value:
    if not isinstance(name, str):
        raise BadInput(f"{where}: the key {name!r} is not a text; keys are parameter names (see `kimi-eagle params`).")
    if looks_secret(name) or (isinstance(value, str) and SECRET_VALUES.match(value)):
        raise BadInput(
            f"{where}: {name} looks like a secret; results keep every parameter, so pass secrets by the environment."
        )
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "`kimi-eagle params` lists those there are."
        raise BadInput(f"{where}: no notebook declares a parameter named {name}; {hint}")
    return _fit(value, known[name].default, f"{where}: {name}")


def _fit(value: Any, default: Value, label: str) -> Value:
    if value is None:
        raise BadInput(f"{label} has no value; give {_kind(default)} such as {default!r}, or leave the line out.")
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, list) and isinstance(value, list):
        # An empty default says nothing of its items; what can be said is that they are scalars of one type.
        example = default[0] if default else next((v for v in value if v is not None), None)
        if (example is None and value) or isinstance(example, dict | list):
            raise BadInput(f"{label} must be a flat list; give items such as [1, 2].")
        return [_fit(item, example, f"{label}[{i}]") for i, item in enumerate(value)]
    if type(value) is not type(default):
        raise BadInput(
            f"{label} is {_kind(value)} {value!r} but must be {_kind(default)} such as {default!r}{_hint(value, default)}."
        )
    if isinstance(value, float) and value - value != 0:
        raise BadInput(f"{label} is {value}; give a finite number.")
    return value


def _hint(value: Any, default: Value) -> str:
    if isinstance(value, str) and isinstance(default, int | float) and not isinstance(default, bool):
        try:
            number = float(value)
        except ValueError:
            return ""
        mantissa, _, exponent = value.lower().partition("e")
        if isinstance(default, float) and exponent and "." not in mantissa:
            sign = "" if exponent[0] in "+-" else "+"
            return f" (YAML takes a number with an exponent only with a dot: write {mantissa}.0e{sign}{exponent})"
        return f" (write {number:g} without quotes)"
    if isinstance(default, str):
        return f' (put quotes around it: "{value}")'
    return ""


def _kind(value: Any) -> str:
    words = {
        bool: "true/false",
        int: "an integer",
        float: "a number",
        str: "the text",
        list: "a list",
        dict: "a mapping",
    }
    return "nothing" if value is None else words.get(type(value), f"a {type(value).__name__}")


def _read_cell(source: str, stage: str) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    lines = source.splitlines()
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise BadInput(f"notebook {stage}: line {error.lineno} of its parameters cell is not Python.") from None
    for node in body:
        name = node.targets[0].id if _is_plain_assignment(node) else None
        try:
            default = ast.literal_eval(node.value) if name else None
        except ValueError:
            name = default = None
        if name is None or name in found or not isinstance(default, (*SCALARS, list)):
            raise BadInput(
                f"notebook {stage}: line {node.lineno} of its parameters cell must be one new `name = literal` (text, number, true/false, list)."
            )
        comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
        found[name] = Parameter(name, default, comment.removeprefix("#").strip(), (stage,))
    return found


def _is_plain_assignment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key written twice is an error; the last would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping of `node`, or a YAMLError naming the second place of a repeated key."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is not a plain word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
