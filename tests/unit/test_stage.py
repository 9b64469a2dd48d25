"""The stage object: fixed parameters, artifacts from finished stages only, results that hold bare figures with units."""

import json
from pathlib import Path

import pytest
import toy_notebooks

from kimi_eagle.errors import BadInput
from kimi_eagle.notebook import begin
from kimi_eagle.notebook.stage import Stage

VALUES = {"target": "smollm2", "run": "", "seed": 1, "count": 3, "rate": 0.5, "sizes": [1]}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NOTEBOOKS", "OUTPUTS", "ENGINES"):
        monkeypatch.setenv(f"KIMI_EAGLE_{name}", str(tmp_path / name.lower()))
    toy_notebooks.pair(tmp_path / "notebooks")
    return tmp_path


def result(place: Path, stage: str = "00_make") -> dict:
    return json.loads((place / "outputs" / "lab" / stage / "result.json").read_text())


def test_begin_gives_parameters_that_cannot_be_changed(place: Path) -> None:
    cfg = begin("00_make", {**VALUES, "rate": 1})
    assert (cfg.count, cfg.rate, cfg.run, cfg.folder) == (3, 1.0, "lab", place / "outputs" / "lab" / "00_make")
    with pytest.raises(AttributeError, match="fixed"):
        cfg.count = 4


def test_begin_prints_where_results_come_from(capsys: pytest.CaptureFixture) -> None:
    begin("00_make", VALUES)
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= {"stage", "commit", "versions", "GPU"}


def test_begin_takes_an_earlier_result_away(place: Path) -> None:
    begin("00_make", VALUES).finish()
    begin("00_make", VALUES)
    with pytest.raises(
        BadInput, match=r"01_draw needs 00_make, which has not finished in run lab; run notebook 00 first"
    ):
        Stage("01_draw", {}).artifact("00_make", "numbers")


def test_begin_does_not_depend_on_the_working_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert begin("00_make", VALUES).folder.parent == place / "outputs" / "lab"


def test_begin_refuses_what_papermill_injected_by_mistake() -> None:
    cells = ["", "# Parameters\ncuont = 7\n"]
    with pytest.raises(BadInput, match="cuont; did you mean count"):
        begin("00_make", {**VALUES, "cuont": 7, "In": cells})


def test_begin_lets_the_keys_of_other_notebooks_and_scratch_variables_pass() -> None:
    cells = ["", "# Parameters\nwidth = 3.0\n", "scratch = 5"]
    assert begin("00_make", {**VALUES, "width": 3.0, "scratch": 5, "In": cells}).count == 3


def test_begin_checks_the_types_of_other_notebooks_keys_too() -> None:
    with pytest.raises(BadInput, match="width is the text 'wide'"):
        begin("00_make", {**VALUES, "width": "wide", "In": ["# Parameters\nwidth = 'wide'\n"]})


def test_begin_before_the_parameters_cell_says_so() -> None:
    with pytest.raises(BadInput, match="seed has no value yet; run the parameters cell first"):
        begin("00_make", {"target": "smollm2", "run": ""})


def test_begin_seeds() -> None:
    import random

    import numpy as np

    begin("00_make", VALUES)
    first = random.random(), np.random.rand()
    begin("00_make", VALUES)
    assert first == (random.random(), np.random.rand())


def test_finish_writes_the_whole_format(place: Path) -> None:
    cfg = begin("00_make", VALUES)
    (cfg.folder / "a.txt").write_text("x")
    cfg.finish(
        figures={"a.b": 1, "a": {"c": [1, 2.5]}, "ok": True, "rows": [{"drafted": 3, "accepted": 2}]},
        units={"a": "tokens", "rows": "tokens"},
        artifacts={"text": "a.txt"},
    )
    found = result(place)
    assert list(found) == ["schema", "stage", "status", "provenance", "parameters", "figures", "units", "artifacts"]
    assert found["figures"]["a"] == {"b": 1, "c": [1, 2.5]}
    assert found["units"] == {"a": {"b": "tokens", "c": "tokens"}, "ok": "true/false", "rows": "tokens"}
    assert found["artifacts"] == {"text": "00_make/a.txt"}
    assert found["parameters"]["run"] == "lab"
    assert str(place) not in json.dumps(found)


def test_numbers_of_numpy_become_plain_ones(place: Path) -> None:
    import numpy as np

    figures = {"a": np.float32(0.5), "b": np.arange(2), "c": [{"n": np.int64(3)}], "d": np.bool_(True)}
    begin("00_make", VALUES).finish(figures=figures, units={"a": "1", "b": "1", "c": "1"})
    assert result(place)["figures"] == {"a": 0.5, "b": [0, 1], "c": [{"n": 3}], "d": True}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "text", None, [1, float("nan")], [{"a": "x"}]])
def test_figures_that_are_no_finite_numbers_are_refused(place: Path, bad: object) -> None:
    cfg = begin("00_make", VALUES)
    with pytest.raises(BadInput, match="figure x"):
        cfg.finish(figures={"x": bad}, units={"x": "1"})
    assert not (cfg.folder / "result.json").exists()


def test_a_figure_without_a_unit_is_refused() -> None:
    with pytest.raises(BadInput, match=r"figure a\.b has no unit"):
        begin("00_make", VALUES).finish(figures={"a": {"b": 2}}, units={"a": {}})


def test_artifacts_must_exist_inside_the_run(place: Path) -> None:
    cfg = begin("00_make", VALUES)
    (place / "outside.txt").write_text("x")
    with pytest.raises(BadInput, match="outside the run's folder"):
        cfg.finish(artifacts={"a": place / "outside.txt"})
    with pytest.raises(BadInput, match="was not written"):
        cfg.finish(artifacts={"a": cfg.folder / "never.txt"})


def test_artifacts_and_figures_reach_the_next_stage_and_are_noted(place: Path) -> None:
    first = begin("00_make", VALUES)
    (first.folder / "n.txt").write_text("3")
    first.finish(figures={"made": 3}, units={"made": "numbers"}, artifacts={"numbers": first.folder / "n.txt"})
    second = begin("01_draw", {"target": "smollm2", "run": "", "seed": 0, "width": 2.0})
    assert second.artifact("00_make", "numbers").read_text() == "3" and second.figures("00_make") == {"made": 3}
    with pytest.raises(BadInput, match=r"no artifact 'other' \(it has numbers\); run notebook 00 again"):
        second.artifact("00_make", "other")
    (first.folder / "n.txt").unlink()
    with pytest.raises(BadInput, match="is gone"):
        second.artifact("00_make", "numbers")
    second.finish()
    assert list(result(place, "01_draw")["provenance"]["inputs"]) == ["00_make"]
