"""Rules that every notebook, parameter file and library file keeps."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from statistics import median

import nbformat
import pytest

from kimi_eagle import paths
from kimi_eagle.notebook import parameters

# Files of the toy checkpoint are a checkpoint's: their functions are those that transformers calls.
LIBRARY = sorted(p for p in (paths.REPOSITORY / "kimi_eagle").rglob("*.py") if p.parent.name != "tiny_kimi_files")
NOTEBOOKS = sorted((paths.REPOSITORY / "notebooks").glob("*.ipynb"))
PARAMETER_FILES = sorted((paths.REPOSITORY / "params").glob("*.yaml"))
SECTIONS = ("reads", "writes", "takes")
MAX_CELL_LINES, MEDIAN_CELL_LINES, MAX_FILE_LINES = 20, 6, 300
# Words that promise something for later; written apart so that this file does not hold them.
UNFINISHED = re.compile(
    "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error", r"\bplace" + r"holder\b"])
)
# Folders of one person's or one machine's, and package hosts other than PyPI's own.
MACHINE_PATHS = re.compile(
    r"(?<![\w.])/(?:home|Users)/\w+|/roo[t]/|/wor[k]/(?:main|shared)|/tm[p]/w/|https?://(?:10|172|192)\.\d+\."
)
UNTRIED = "# UNTRIED"  # how kimi_k2.5_8gpu.yaml marks a value that nobody has run yet


@cache
def cells(path: Path, kind: str = "code") -> list[nbformat.NotebookNode]:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


def names(path: Path) -> str:
    return path.name


def test_there_are_six_notebooks_in_order() -> None:
    expected = (
        "diagnose_environment profile_allreduce extract_hidden_states map_vocabulary train_eagle3 analyze_acceptance"
    )
    assert parameters.stages() == [f"{i:02}_{name}" for i, name in enumerate(expected.split())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert not [c for c in cells(path) if c.outputs or c.execution_count]
    assert "widgets" not in book.metadata and "papermill" not in book.metadata
    assert (book.metadata.kernelspec.name, book.metadata.kernelspec.language) == ("python3", "python")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_parameters_cells_hold_literals_each_with_its_meaning(path: Path) -> None:
    for parameter in parameters.declared(path).values():
        assert parameter.meaning, f"{parameter.name} has no comment"
        assert not parameters.looks_secret(parameter.name)
        assert not hasattr(__import__("kimi_eagle.notebook.stage", fromlist=["Stage"]).Stage, parameter.name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_the_first_cells_say_what_the_notebook_is_and_begin_it(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    title = book.cells[0]
    assert title.cell_type == "markdown" and title.source.startswith(f"# {path.stem[:2]} ")
    assert not [word for word in SECTIONS if word not in title.source.lower()]
    assert "parameters" in cells(path)[0].metadata.tags
    assert f'begin("{path.stem}", globals())' in cells(path)[1].source
    assert "cfg.finish(" in cells(path)[-1].source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_code_cells_are_short_and_only_call_the_library(path: Path) -> None:
    lines = [len(c.source.splitlines()) for c in cells(path) if "parameters" not in c.metadata.get("tags", [])]
    assert max(lines) <= MAX_CELL_LINES and median(lines) <= MEDIAN_CELL_LINES
    for cell in cells(path):
        assert not re.search(r"^\s*[!%]", cell.source, re.MULTILINE), "shell or magic"
        banned = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.Try, ast.While)
        assert not [n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, banned)], cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_prose_stands_between_code_cells(path: Path) -> None:
    kinds = "".join(c.cell_type[0] for c in nbformat.read(path, as_version=4).cells)
    assert "cccc" not in kinds and kinds.count("m") >= 0.6 * kinds.count("c")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_pages_need_no_mathjax(path: Path) -> None:
    for cell in cells(path, "markdown"):
        assert not re.search(r"\$\$|\\\(|\\frac|\\sum", cell.source), (
            "formulas are not rendered without a network: write them as code"
        )


def test_every_plot_function_is_drawn_by_a_notebook_or_another_plot() -> None:
    sources = [c.source for p in NOTEBOOKS for c in cells(p)]
    sources += [p.read_text() for p in [*LIBRARY, *(paths.REPOSITORY / "benchmarks").glob("*.py")]]
    for file in (paths.REPOSITORY / "kimi_eagle" / "plots").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                uses = sum(len(re.findall(rf"\b{node.name}\(", text)) for text in sources)
                assert uses > 1, f"{file.name}: {node.name} is never called"


@pytest.mark.parametrize("path", PARAMETER_FILES, ids=names)
def test_parameter_files_hold_declared_keys_of_the_right_types(path: Path) -> None:
    values = parameters.load(path)
    parameters.validate(values, parameters.declared_everywhere(), path.name)


@pytest.mark.parametrize("path", PARAMETER_FILES, ids=names)
def test_parameter_files_say_what_they_are_for(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_the_four_runs_are_there() -> None:
    assert {p.stem for p in PARAMETER_FILES} >= {"tiny_kimi", "smollm2_cpu", "smollm2_gpu", "kimi_k2.5_8gpu"}


def test_the_big_run_is_written_out_in_full_and_marks_what_nobody_ran() -> None:
    path = paths.REPOSITORY / "params" / "kimi_k2.5_8gpu.yaml"
    assert set(parameters.load(path)) == set(parameters.declared_everywhere()) - {"run"}
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    marked = [line for line in lines if UNTRIED in line]
    assert len(marked) > len(lines) / 2


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(paths.REPOSITORY)))
def test_library_files_are_short_finished_and_documented(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert not UNFINISHED.search(text)
    tree = ast.parse(text)
    public = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
    public = [n for n in public if n.name not in ("forward", "backward")]  # torch's own names
    nested = {
        id(inner) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) for inner in ast.walk(n) if inner is not n
    }
    bare = [n.name for n in public if id(n) not in nested and not ast.get_docstring(n)]
    assert not bare and (ast.get_docstring(tree) or not tree.body)


def test_no_file_names_a_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=paths.REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        path = paths.REPOSITORY / name
        if path.is_file() and path.suffix != ".png" and path != Path(__file__):
            found = MACHINE_PATHS.search(path.read_text(errors="replace"))
            assert not found, f"{name}: {found and found.group(0)}"
