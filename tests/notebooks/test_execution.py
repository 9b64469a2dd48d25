"""Toy notebooks in real kernels: what the runner publishes, and what it refuses to believe."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
import toy_notebooks

from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.notebook import plan, report, runner


def arrange(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NOTEBOOKS", "OUTPUTS", "ENGINES"):
        monkeypatch.setenv(f"KIMI_EAGLE_{name}", str(folder / name.lower()))
    (folder / "p.yaml").write_text("count: 5\n")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return arrange(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished toy run, under a forced Agg backend, which hides pictures from an unguarded notebook."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = arrange(tmp_path_factory.mktemp("done"), monkeypatch)
        toy_notebooks.pair(folder / "notebooks")
        monkeypatch.setenv("MPLBACKEND", "Agg")
        index = runner.run(plan.make(folder / "p.yaml"))
        assert plan.make(folder / "p.yaml").stages == []
    return index.parent


def only(place: Path, *code: str, parameters: tuple[str, ...] = ()) -> plan.Plan:
    """The plan of a run with one notebook, whose cells after the set-up are `code`."""
    (place / "notebooks").mkdir(exist_ok=True)
    toy_notebooks.write(place / "notebooks", "00_make", ["count = 3  # how many", *parameters], list(code))
    return plan.make(place / "p.yaml")


def failure(job: plan.Plan, kind: type[Exception] = StageFailed) -> str:
    """The message of a run that must fail, after the signs of a failed stage were seen in its folder."""
    with pytest.raises(kind) as caught:
        runner.run(job)
    stage = job.folder / "00_make"
    assert not (stage / "00_make.ipynb").exists() and not (stage / "result.json").exists()
    assert json.loads((job.folder / "result.json").read_text())["stages"]["00_make"] == "failed"
    assert "logs/00_make.log" in str(caught.value) and "--from 00" in str(caught.value)
    return str(caught.value)


def test_a_run_leaves_notebooks_pages_logs_and_one_result(done: Path) -> None:
    for stage in ("00_make", "01_draw"):
        assert {f"{stage}.ipynb", f"{stage}.html", "result.json"} <= {p.name for p in (done / stage).iterdir()}
        assert (done / "logs" / f"{stage}.log").stat().st_size
    merged = json.loads((done / "result.json").read_text())
    assert merged["status"] == "done" and merged["figures"]["01_draw"] == {"read": {"value": 5, "fine": True}}
    assert not list(done.rglob(".*.running.*"))


def test_nothing_of_the_machine_is_left_in_the_outputs(done: Path) -> None:
    for file in done.rglob("*"):
        if file.is_file():
            text = file.read_text(errors="replace")
            assert str(done.parent.parent) not in text and str(Path.home()) + "/" not in text, file.name


def test_pages_need_no_network(done: Path) -> None:
    fetched = re.compile(
        r"""<(script|link|img|iframe)\b[^>]*(src|href)=["']?https?:|url\(["']?https?:|import [^;]*["']https?:"""
    )
    for page in done.rglob("*.html"):
        assert not fetched.search(page.read_text()), page.name


def test_the_index_shows_pictures_figures_and_provenance(done: Path) -> None:
    text = (done / "index.html").read_text()
    assert "data:image/png;base64," in text and "01_draw/01_draw.html" in text
    assert "read.value" in text and "commit" in text


def test_the_zip_holds_the_report_without_data(done: Path) -> None:
    import zipfile

    names = zipfile.ZipFile(report.bundle(done)).namelist()
    assert "p/index.html" in names and "p/01_draw/01_draw.html" in names
    assert not [n for n in names if n.endswith(".txt")]


def test_a_cell_that_raises_fails_the_run_and_keeps_the_notebook(place: Path) -> None:
    job = only(place, "print('before')", "1 / 0", "cfg.finish()")
    message = failure(job)
    assert "ZeroDivisionError: division by zero" in message and "before" in message
    book = nbformat.read(job.folder / "00_make" / "00_make.failed.ipynb", as_version=4)
    assert any(o.output_type == "error" for c in book.cells if c.cell_type == "code" for o in c.outputs)


def test_a_sentence_of_the_library_keeps_its_class_and_exit_code(place: Path) -> None:
    message = failure(only(place, "cfg.artifact('01_draw', 'x')"), BadInput)
    assert message.startswith("00_make failed: 00_make needs 01_draw, which has not finished")


def test_a_killed_kernel_is_a_failure_though_papermill_says_completed(place: Path) -> None:
    job = only(place, "import os\n\nos.kill(os.getpid(), 9)", "cfg.finish()")
    assert "the kernel died" in failure(job)


def test_a_figure_cell_without_a_picture_is_a_failure(place: Path) -> None:
    message = failure(only(place, "#figure\nprint('no picture')", "cfg.finish()"))
    assert "1 cells that draw show no picture" in message


def test_a_notebook_that_never_finishes_its_stage_is_a_failure(place: Path) -> None:
    assert "it wrote no result.json" in failure(only(place, "print('forgot')"))


def test_a_notebook_that_hangs_is_ended_with_all_its_processes(place: Path) -> None:
    sleeper = "import subprocess\n\nchild = subprocess.Popen(['sleep', '600'])\nprint('pid', child.pid, flush=True)\nchild.wait()"
    job = only(place, sleeper, parameters=("stage_timeout_minutes = 0.25  # minutes",))
    message = failure(job)
    assert "still running after stage_timeout_minutes (0.25)" in message
    pid = int((job.folder / "logs" / "00_make.log").read_text().split("pid ")[1].split()[0])
    assert gone(pid)


def test_ending_the_command_ends_the_kernel(place: Path) -> None:
    only(place, "import os, time\n\nprint('kernel-pid', os.getpid(), flush=True)\ntime.sleep(600)")
    command = [sys.executable, "-m", "kimi_eagle.cli", "run", str(place / "p.yaml")]
    log = place / "outputs" / "p" / "logs" / "00_make.log"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: log.exists() and "kernel-pid " in log.read_text())
        kernel = int(log.read_text().split("kernel-pid ")[1].split()[0])
        assert not gone(kernel)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    assert wait_until(lambda: gone(kernel), 15)


def gone(pid: int) -> bool:
    """Whether the process has ended (one that nobody has waited for yet counts as ended)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_two_processes_do_not_work_on_one_run(place: Path) -> None:
    job = only(place, "cfg.finish()")
    job.folder.mkdir(parents=True)
    with runner._only_one(job), pytest.raises(BadInput, match="worked on by another process"):
        runner.run(job)


def test_a_sweep_goes_on_after_a_failure(place: Path, capsys: pytest.CaptureFixture) -> None:
    only(place, "1 / (cfg.count - 5)", "cfg.finish()")
    (place / "q.yaml").write_text("count: 6\n")
    (place / "r.yaml").write_text("cuont: 6\n")
    assert runner.run_many([place / f"{name}.yaml" for name in "pqr"]) == 1
    table = capsys.readouterr().out.splitlines()[-3:]
    assert [("FAILED" in row, "done: " in row) for row in table] == [(True, False), (False, True), (True, False)]


@pytest.mark.parametrize(("key", "value"), [("cuont", "7"), ("count", "seven")])
def test_plain_papermill_with_a_bad_key_or_type_exits_non_zero(place: Path, key: str, value: str) -> None:
    only(place, "print('reached')")
    (place / "bad.yaml").write_text(f"{key}: {value}\n")
    out = place / "out.ipynb"
    source = place / "notebooks" / "00_make.ipynb"
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(source),
        str(out),
        "-f",
        str(place / "bad.yaml"),
        "--no-progress-bar",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TERM": "dumb"})
    assert done.returncode != 0 and key in done.stderr and "reached" not in out.read_text().split("outputs", 1)[0]
    assert "BadInput" in out.read_text()
