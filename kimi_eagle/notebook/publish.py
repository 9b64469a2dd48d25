"""Is an executed notebook what it claims to be, and the copy of it that may be kept.

papermill marks every cell "completed" after a dead kernel or a timeout, and exits 0 without pictures under a forced Agg backend;
so a notebook counts only where exit code, outputs, result file and pictures agree.
"""

import ast
import functools
import json
from pathlib import Path
from typing import Any

import nbformat

from kimi_eagle import plots
from kimi_eagle.notebook import provenance

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


def problems(notebook: Path, result: Path, started: float, parameters: dict[str, Any]) -> list[str]:
    """What is wrong with an executed notebook, in words, [] for nothing.

    result: the stage's result.json, which must be newer than `started` (seconds since the epoch) and carry `parameters`.
    """
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except (OSError, ValueError) as error:
        return [f"the executed notebook cannot be read ({type(error).__name__})"]
    found = []
    code = [c for c in cells if c.cell_type == "code" and c.source.strip()]
    errors = [o for c in code for o in c.outputs if o.output_type == "error"]
    found += [f"a cell raised {e.ename}: {e.evalue.splitlines()[0] if e.evalue else ''}" for e in errors[:1]]
    skipped = [c for c in code if c.execution_count is None]
    if skipped and not errors:
        found.append(f"{len(skipped)} code cells never ran")
    blank = [c for c in figure_cells(cells) if not has_picture(c)]
    if blank and not errors and not skipped:
        found.append(f"{len(blank)} cells that draw show no picture (first: {blank[0].source.splitlines()[-1]})")
    return found + _result_problems(result, started, parameters)


def figure_cells(cells: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The cells that promise a picture: those tagged `figure`, and those that call a drawing function of kimi_eagle.plots."""
    modules: dict[str, str] = {}  # the name in the notebook -> the module of kimi_eagle.plots
    found = []
    for cell in (c for c in cells if c.cell_type == "code"):
        nodes = list(ast.walk(ast.parse(cell.source)))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "kimi_eagle.plots":
                modules.update({alias.asname or alias.name: alias.name for alias in node.names})
        calls = [n.func for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        drawn = any(isinstance(f.value, ast.Name) and f.attr in _drawing(modules.get(f.value.id, "")) for f in calls)
        if drawn or "figure" in cell.metadata.get("tags", []):
            found.append(cell)
    return found


@functools.cache
def _drawing(module: str) -> frozenset[str]:
    """Names of the functions in a module of kimi_eagle.plots that end in `style.show`: tables and widgets beside them do not."""
    file = Path(plots.__file__).with_name(f"{module}.py")
    functions = (
        [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)] if file.is_file() else []
    )
    return frozenset(f.name for f in functions if "style.show(" in ast.unparse(f) and not f.name.startswith("explore"))


def has_picture(cell: nbformat.NotebookNode) -> bool:
    """True where the cell's saved output holds a PNG."""
    return any("image/png" in o.get("data", {}) for o in cell.get("outputs", []))


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without machine paths, host and user names, widget state, and the overwritten states of progress bars.

    Works in place and returns the notebook. Metadata that names widgets without their state stops GitHub from rendering.
    """
    notebook.metadata.pop("widgets", None)
    notebook.metadata = nbformat.from_dict(provenance.scrub_tree(notebook.metadata))
    for cell in notebook.cells:
        cell.source = provenance.scrub(cell.source)
        if cell.cell_type == "code":
            cell.outputs = [_clean_output(o) for o in _merge_streams(cell.outputs) if not _only_widget(o)]
    return notebook


def _result_problems(result: Path, started: float, parameters: dict[str, Any]) -> list[str]:
    try:
        content = json.loads(result.read_text(encoding="utf-8"))
        age = result.stat().st_mtime
    except (OSError, ValueError):
        return ["it wrote no result.json"]
    if age < started - 2:  # file systems keep time in steps of up to 2 s
        return ["its result.json is from an earlier run"]
    if content.get("stage") != result.parent.name or content.get("status") != "done":
        return ["its result.json does not say that this stage is done"]
    wanted = provenance.public_parameters(parameters)
    wrong = [k for k, v in wanted.items() if content.get("parameters", {}).get(k) != provenance.scrub_tree(v)]
    return [f"its result.json has other parameters than were asked for ({', '.join(wrong)})"] if wrong else []


def _merge_streams(outputs: list) -> list:
    merged: list = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _clean_output(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if output.output_type == "stream":
        # What a terminal would show: a carriage return goes back to the line's start.
        lines = output.text.replace("\r\n", "\n").split("\n")
        output.text = provenance.scrub("\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines))
    elif output.output_type == "error":
        output.evalue = provenance.scrub(output.evalue)
        output.traceback = [provenance.scrub(line) for line in output.traceback]
    else:
        output.data.pop(WIDGET_MIME, None)
        for mime, value in output.data.items():
            if mime.startswith("text/") or mime.endswith("json"):
                output.data[mime] = provenance.scrub_tree(value)
    return output


def _only_widget(output: nbformat.NotebookNode) -> bool:
    return WIDGET_MIME in output.get("data", {}) and not any(m.startswith("image/") for m in output.data)
