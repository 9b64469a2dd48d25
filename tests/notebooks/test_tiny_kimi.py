"""All six notebooks with the toy Kimi in real vLLM engines: the shrunken run that stands for the big one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from kimi_eagle import paths
from kimi_eagle.notebook import parameters, plan, publish, report

MINUTES = 25  # beside the engine tests, on two cores


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run; its own outputs and engines, so that nothing of the user's is touched."""
    place = tmp_path_factory.mktemp("tiny")
    env = {
        **os.environ,
        "KIMI_EAGLE_OUTPUTS": str(place / "outputs"),
        "KIMI_EAGLE_ENGINES": str(place / "e"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "kimi_eagle.cli", "run", "params/tiny_kimi.yaml"]
    done = subprocess.run(command, cwd=paths.REPOSITORY, env=env, capture_output=True, text=True, timeout=60 * MINUTES)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "report: " in done.stdout and not list((place / "e").glob("*/state.json"))
    return place / "outputs" / "tiny_kimi"


@pytest.mark.timeout(60 * MINUTES + 60)
def test_every_stage_is_done(run_folder: Path) -> None:
    merged = json.loads((run_folder / "result.json").read_text())
    assert merged["status"] == "done" and set(merged["stages"]) == set(parameters.stages())


def test_results_hold_figures_with_units_and_artifacts_that_exist(run_folder: Path) -> None:
    for stage in parameters.stages():
        result = plan.read_result(run_folder, stage)
        assert result["figures"] and not plan.is_stale(run_folder, result)
        assert shape(result["figures"]) == shape(result["units"])
        assert all((run_folder / place).exists() for place in result["artifacts"].values())


def test_notebooks_that_draw_show_pictures_and_none_shows_an_error(run_folder: Path) -> None:
    for stage in parameters.stages():
        cells = nbformat.read(run_folder / stage / f"{stage}.ipynb", as_version=4).cells
        assert all(publish.has_picture(c) for c in publish.figure_cells(cells))
        assert not [o for c in cells for o in c.get("outputs", []) if o.output_type == "error"]


def test_nothing_of_the_machine_is_in_notebooks_pages_results_or_logs(run_folder: Path) -> None:
    names = [str(Path.home()) + "/", str(paths.REPOSITORY), str(run_folder.parent.parent)]
    for file in run_folder.rglob("*"):
        if file.suffix in (".ipynb", ".html", ".json", ".log") and "artifacts" not in file.parts:
            text = file.read_text(errors="replace")
            assert not [n for n in names if n in text], file.relative_to(run_folder)


def shape(tree: object) -> object:
    """The names of nested mappings, without their leaves."""
    return {k: shape(v) for k, v in tree.items()} if isinstance(tree, dict) else None


def test_the_index_finds_all_its_headlines(run_folder: Path) -> None:
    figures = dict(report.leaves(json.loads((run_folder / "result.json").read_text())["figures"]))
    assert not set(report.HEADLINES) - set(figures)
