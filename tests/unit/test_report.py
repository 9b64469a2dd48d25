"""The report: one merged result that tells done from stale and failed, and pages that need no network."""

import json
from pathlib import Path

import pytest
import toy_notebooks

from kimi_eagle.errors import BadInput
from kimi_eagle.notebook import parameters, provenance, report, stage


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NOTEBOOKS", "OUTPUTS", "ENGINES"):
        monkeypatch.setenv(f"KIMI_EAGLE_{name}", str(tmp_path / name.lower()))
    toy_notebooks.pair(tmp_path / "notebooks")
    first = begun("00_make")
    (first.folder / "n.txt").write_text("3")
    first.finish({"made": 3}, {"made": "numbers"}, {"numbers": "n.txt"})
    second = begun("01_draw")
    second.artifact("00_make", "numbers")
    second.finish({"a.b": [1, 2.34567], "right": True}, {"a.b": "tokens"})
    return first.folder.parent


def begun(name: str) -> stage.Stage:
    return stage.Stage(name, {**{k: p.default for k, p in parameters.declared(name).items()}, "run": "r"})


def test_merged_results_hold_every_stage(run_folder: Path) -> None:
    merged = report.merge(run_folder, "p.yaml")
    assert merged["status"] == "done" and merged["stages"] == {"00_make": "done", "01_draw": "done"}
    assert merged["figures"]["01_draw"]["a"]["b"] == [1, 2.34567] and merged["units"]["00_make"] == {"made": "numbers"}
    assert merged["artifacts"]["00_make"] == {"numbers": "00_make/n.txt"}


def test_a_stage_whose_input_changed_is_stale(run_folder: Path) -> None:
    file = run_folder / "00_make" / "result.json"
    result = json.loads(file.read_text())
    result["figures"]["made"] = 4
    stage.write_json(file, result)
    merged = report.merge(run_folder, "p.yaml")
    assert merged["stages"]["01_draw"] == "stale" and merged["status"] == "partial"


def test_failed_and_missing_stages_are_told_apart(run_folder: Path) -> None:
    (run_folder / "01_draw" / "result.json").unlink()
    assert report.merge(run_folder, "p.yaml")["status"] == "partial"
    (run_folder / "01_draw" / "01_draw.failed.ipynb").write_text("{}")
    merged = report.merge(run_folder, "p.yaml")
    assert merged["stages"]["01_draw"] == "failed" and merged["status"] == "failed"


def test_the_index_is_written_and_can_be_written_again(run_folder: Path) -> None:
    index = report.write(run_folder, "p.yaml")
    text = index.read_text()
    assert "a.b" in text and "1; 2.346" in text and "<b>" not in text
    index.unlink()
    assert report.rewrite(run_folder) == index and index.read_text() == text


def test_a_folder_without_a_result_cannot_be_reported(tmp_path: Path) -> None:
    for function in (report.rewrite, report.bundle):
        with pytest.raises(BadInput, match=r"result\.json"):
            function(tmp_path)


def test_headlines_name_notebooks_that_there_are() -> None:
    assert {name.split(".")[0] for name in report.HEADLINES} <= set(real_stages())


def real_stages() -> list[str]:
    from kimi_eagle import paths

    return [p.stem for p in (paths.REPOSITORY / "notebooks").glob("*.ipynb")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "yes"),
        (0.123456, "0.1235"),
        (12, "12"),
        ([1, 2], "1; 2"),
        ([{"drafted": 4, "accepted": 3}], "drafted 4, accepted 3"),
    ],
)
def test_figures_as_people_read_them(value: object, text: str) -> None:
    assert report.text_of(value) == text


def test_long_lists_are_cut_with_their_length() -> None:
    assert report.text_of(list(range(40))).endswith("; 11; ... (40)")


def test_offline_removes_scripts_and_styles_from_elsewhere_only() -> None:
    page = (
        '<script src="https://cdn.example/require.min.js"></script>\n<script type="module">import x from "https://cdn.example/m.js"</script>'
        '<link rel="stylesheet" href="https://cdn.example/a.css"><script>var kept = 1</script><a href="https://example.org">kept</a>'
    )
    assert report.offline(page).strip() == '<script>var kept = 1</script><a href="https://example.org">kept</a>'


def test_the_provenance_table_has_commit_versions_and_hardware() -> None:
    rows = dict(provenance.rows(provenance.collect()))
    assert set(rows) == {"commit", "versions", "processor", "GPU"} and "torch" in rows["versions"]
