"""What a run would do, and when an executed notebook counts: decided here without starting a kernel."""

import json
import time
from pathlib import Path

import nbformat
import pytest
import toy_notebooks

from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.notebook import parameters, plan, preflight, progress, publish, stage

PNG = "iVBORw0KGgo="


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NOTEBOOKS", "OUTPUTS", "ENGINES", "CACHE"):
        monkeypatch.setenv(f"KIMI_EAGLE_{name}", str(tmp_path / name.lower()))
    toy_notebooks.pair(tmp_path / "notebooks")
    (tmp_path / "p.yaml").write_text("count: 5\n")
    return tmp_path


def finish(place: Path, name: str, run: str = "p", publish_too: bool = True, **values: object) -> None:
    """Do what a finished stage leaves: its result.json and its published notebook."""
    given = {**{n: p.default for n, p in parameters.declared(name).items()}, **values, "run": run}
    running = stage.Stage(name, given)
    if name == "01_draw":
        running.artifact("00_make", "numbers")
    (running.folder / "numbers.txt").write_text("5")
    artifacts = {"numbers": running.folder / "numbers.txt"} if name == "00_make" else {}
    running.finish(figures={"n": 5}, units={"n": "numbers"}, artifacts=artifacts)
    if publish_too:
        (running.folder / f"{name}.ipynb").write_text("{}")


def test_a_new_run_takes_its_name_from_the_file_and_runs_everything(place: Path) -> None:
    made = plan.make(place / "p.yaml")
    assert (made.run, made.stages, made.kept) == ("p", ["00_make", "01_draw"], [])
    assert plan.make(place / "p.yaml", name="other").folder == place / "outputs" / "other"


def test_finished_stages_of_equal_parameters_are_kept(place: Path) -> None:
    finish(place, "00_make", count=5)
    made = plan.make(place / "p.yaml")
    assert (made.stages, made.kept) == (["01_draw"], ["00_make"])


def test_other_parameters_are_refused_unless_that_stage_is_redone(place: Path) -> None:
    finish(place, "00_make", count=4)
    with pytest.raises(BadInput, match=r"count 4, and p\.yaml now says 5; give the new run a --name, or .*--from 00"):
        plan.make(place / "p.yaml")
    assert plan.make(place / "p.yaml", start="00").stages == ["00_make", "01_draw"]


def test_from_refuses_kept_stages_of_other_parameters(place: Path) -> None:
    finish(place, "00_make", count=4)
    with pytest.raises(BadInput, match="count 4"):
        plan.make(place / "p.yaml", start="01")


def test_how_a_run_is_carried_out_may_change(place: Path) -> None:
    toy_notebooks.write(
        place / "notebooks", "00_make", ["count = 3  # n", "engine_port = 0  # port"], toy_notebooks.MAKE
    )
    finish(place, "00_make", count=5)
    (place / "p.yaml").write_text("count: 5\nengine_port: 39000\n")
    assert plan.make(place / "p.yaml").kept == ["00_make"]


def test_a_stage_made_from_an_older_input_runs_again(place: Path) -> None:
    finish(place, "00_make", count=5)
    finish(place, "01_draw")
    assert plan.make(place / "p.yaml").stages == []
    time.sleep(1.1)  # the result's time stamp has seconds
    finish(place, "00_make", count=5)
    assert plan.make(place / "p.yaml").stages == ["01_draw"]


def test_a_result_without_its_published_notebook_does_not_count(place: Path) -> None:
    finish(place, "00_make", count=5, publish_too=False)
    assert plan.make(place / "p.yaml").stages == ["00_make", "01_draw"]


def test_only_and_from_need_their_inputs(place: Path) -> None:
    for options in ({"only": "1"}, {"start": "01_draw"}):
        with pytest.raises(
            BadInput, match=r"01_draw needs 00_make, which has not finished in run p; start with --from 00\."
        ):
            plan.make(place / "p.yaml", **options)
    finish(place, "00_make", count=5)
    assert plan.make(place / "p.yaml", only="1").stages == ["01_draw"]


@pytest.mark.parametrize("options", [{"start": "7"}, {"only": "make"}, {"start": "0", "only": "1"}])
def test_stages_that_are_not_there_are_refused(place: Path, options: dict) -> None:
    with pytest.raises(BadInput):
        plan.make(place / "p.yaml", **options)


def test_a_full_disk_is_said_before_the_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_FREE_GIB", 1e9)
    with pytest.raises(MissingCapability, match="GiB free where outputs/ is"):
        plan.make(place / "p.yaml")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2", "did you mean smollm2"),
        ("./nowhere", "no such checkpoint folder"),
        ("a/b/c", "no such checkpoint folder"),
    ],
)
def test_a_target_that_is_not_there_is_refused(place: Path, name: str, words: str) -> None:
    (place / "p.yaml").write_text(f"count: 5\ntarget: {name}\n")
    with pytest.raises(BadInput, match=words):
        plan.make(place / "p.yaml")


def test_a_folder_without_a_config_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no readable config\.json"):
        preflight.check_target(str(tmp_path))


def test_a_port_in_use_is_refused(place: Path) -> None:
    import socket

    from kimi_eagle.extract import engine

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port} .* is in use; choose another"):
            preflight.check_ports(port - engine.ROLES.index("extract"))


def notebook(tmp_path: Path, **change: object) -> tuple[Path, Path]:
    """An executed notebook with one figure cell and its result.json, after `change` of the figure cell."""
    folder = tmp_path / "00_make"
    folder.mkdir()
    picture = nbformat.v4.new_output("display_data", {"image/png": PNG})
    cell = nbformat.v4.new_code_cell("draw()", metadata={"tags": ["figure"]}, outputs=[picture], execution_count=1)
    cell.update(change)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "n.ipynb")
    stage.write_json(folder / "result.json", {"stage": "00_make", "status": "done", "parameters": {"count": 5}})
    return folder / "n.ipynb", folder / "result.json"


def test_a_sound_notebook_has_no_problems(tmp_path: Path) -> None:
    assert publish.problems(*notebook(tmp_path), time.time(), {"count": 5}) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outputs": []}, "show no picture"),
        ({"execution_count": None}, "never ran"),
        ({"outputs": [nbformat.v4.new_output("error", ename="E", evalue="x\ny", traceback=[])]}, "a cell raised E: x"),
    ],
)
def test_a_notebook_that_only_looks_completed_is_found_out(tmp_path: Path, change: dict, words: str) -> None:
    found = publish.problems(*notebook(tmp_path, **change), time.time(), {"count": 5})
    assert len(found) == 1 and words in found[0]


def test_cells_that_call_a_drawing_function_promise_a_picture_untagged() -> None:
    sources = [
        "from kimi_eagle.plots import style, training as plots",
        "plots.curves(x)",
        "plots.course(x)",
        "print(style.MAIN)",
        "plots = 3",
    ]
    found = publish.figure_cells([nbformat.v4.new_code_cell(s) for s in sources])
    assert [c.source for c in found] == ["plots.curves(x)"]


def test_a_missing_old_or_foreign_result_is_found_out(tmp_path: Path) -> None:
    book, result = notebook(tmp_path)
    assert "other parameters" in publish.problems(book, result, time.time(), {"count": 6})[0]
    assert "earlier run" in publish.problems(book, result, time.time() + 60, {"count": 5})[0]
    result.unlink()
    assert publish.problems(book, result, time.time(), {}) == ["it wrote no result.json"]


def test_cleaning_keeps_pictures_and_drops_machine_and_widgets() -> None:
    home = str(Path.home())
    outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="10%\r50%\r"),
        nbformat.v4.new_output("stream", name="stderr", text="100%\nat " + home + "/x\n"),
        nbformat.v4.new_output("display_data", {"image/png": PNG, "text/plain": "Figure"}),
        nbformat.v4.new_output(
            "display_data", {publish.WIDGET_MIME: {"model_id": "1"}, "text/plain": "IntSlider(value=5)"}
        ),
    ]
    cell = nbformat.v4.new_code_cell(f"target = '{home}/model'", outputs=outputs)
    book = nbformat.v4.new_notebook(
        cells=[cell], metadata={"widgets": {}, "papermill": {"output_path": home + "/o.ipynb"}}
    )
    cleaned = publish.clean(book)
    assert home not in json.dumps(cleaned) and "widget" not in json.dumps(cleaned).lower()
    assert [o.output_type for o in cleaned.cells[0].outputs] == ["stream", "display_data"]
    assert cleaned.cells[0].outputs[0].text == "100%\nat ~/x\n"
    assert cleaned.cells[0].outputs[1].data["image/png"] == PNG


def test_inputs_are_read_from_the_code(place: Path) -> None:
    assert plan.inputs_of("01_draw") == {"00_make"} and plan.inputs_of("00_make") == set()


@pytest.mark.parametrize(("seconds", "text"), [(3.6, "4 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations_in_words(seconds: float, text: str) -> None:
    assert progress.words(seconds) == text


def test_the_clock_prefers_what_was_timed(place: Path) -> None:
    (place / "outputs").mkdir()
    progress.Clock("p", {"00_make": 2.0}).note("00_make", 30)
    assert progress.Clock("p", {"00_make": 2.0}).expected["00_make"] == 30
    assert progress.Clock("q", {"00_make": 2.0}).expected["00_make"] == 120
