"""The verbs, their exit codes, and one sentence where something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_vllm
import pytest
import toy_notebooks

from kimi_eagle import paths

VERBS = {
    "doctor",
    "locate",
    "compat",
    "rehearse",
    "target",
    "estimate",
    "params",
    "run",
    "engine",
    "check",
    "report",
    "regenerate",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NOTEBOOKS", "OUTPUTS", "ENGINES", "CACHE"):
        monkeypatch.setenv(f"KIMI_EAGLE_{name}", str(tmp_path / name.lower()))
    toy_notebooks.pair(tmp_path / "notebooks")
    return tmp_path


def call(*words: str, code: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Run the command as a user does; its exit code must be `code`."""
    command = [sys.executable, "-m", "kimi_eagle.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200", **env})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def sentence(*words: str, code: int) -> str:
    """What a failing command says: one line on standard error, no traceback, nothing on standard output."""
    done = call(*words, code=code)
    assert done.stderr.startswith("kimi-eagle: ") and len(done.stderr.splitlines()) == 1 and not done.stdout
    return done.stderr


def test_help_lists_every_verb() -> None:
    text = call("--help").stdout
    assert not [verb for verb in VERBS if f" {verb} " not in text]


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_explains_itself(verb: str) -> None:
    assert "Usage:" in call(verb, "--help").stdout


def test_light_verbs_load_neither_torch_nor_vllm() -> None:
    for words in (["params"], ["engine", "list"], ["--help"]):
        code = (
            "import sys, runpy\n"
            f"sys.argv = ['kimi-eagle', *{words!r}]\n"
            "try:\n    runpy.run_module('kimi_eagle.cli', run_name='__main__')\n"
            "except SystemExit:\n    pass\n"
            "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules), 'heavy import'"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr[-500:])


def test_params_lists_defaults_and_meanings_from_the_notebooks() -> None:
    lines = call("params").stdout.splitlines()
    assert any(line.split()[:2] == ["rate", "0.5"] and "a share (1)" in line for line in lines)
    assert {p["name"] for p in json.loads(call("params", "01", "--json").stdout)} == {"target", "run", "seed", "width"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuont: 3\n", "did you mean count"),
        ("rate: 1e-4\n", "write 1.0e-4"),
        ("target: nowhere\n", "no such checkpoint"),
    ],
)
def test_a_bad_parameter_file_is_one_sentence_and_code_two(place: Path, text: str, words: str) -> None:
    (place / "p.yaml").write_text(text)
    assert words in sentence("run", str(place / "p.yaml"), code=2)
    assert not (place / "outputs").exists()


def test_a_missing_parameter_file_is_code_two(place: Path) -> None:
    assert "no such parameter file" in sentence("run", str(place / "q.yaml"), code=2)


def test_a_missing_input_is_one_sentence_before_anything_starts(place: Path) -> None:
    (place / "p.yaml").write_text("count: 3\n")
    assert "start with --from 00" in sentence("run", str(place / "p.yaml"), "--from", "01", code=2)


@pytest.mark.parametrize(
    "words",
    [["target", "./nowhere"], ["report", "nowhere"], ["check", "nowhere"], ["engine", "down", "abc"], ["params", "9"]],
)
def test_things_that_are_not_there_are_code_two(words: list[str]) -> None:
    sentence(*words, code=2)


def test_debug_shows_the_traceback(place: Path) -> None:
    assert "Traceback" in call("--debug", "report", "nowhere", code=1).stderr


def test_no_engine_is_running_in_an_empty_place() -> None:
    assert "no engine is running" in call("engine", "list").stdout
    assert json.loads(call("engine", "list", "--json").stdout) == []


def test_compat_and_estimate_speak_json() -> None:
    assert {"id", "package", "versions", "symptom", "verdict", "state"} <= set(
        json.loads(call("compat", "--json").stdout)[0]
    )


def test_compat_ends_with_code_three_where_no_back_end_can_work(tmp_path: Path) -> None:
    found = call("compat", "--vllm", str(fake_vllm.write_site(tmp_path / "old", "0.12.0")), code=3)
    assert "Kimi-K2.5: back end none: vLLM 0.12.0 is older than 0.16" in found.stdout


def test_check_tells_a_broken_run_from_a_sound_one(place: Path) -> None:
    folder = place / "outputs" / "r"
    folder.mkdir(parents=True)
    entry = {"stages": {"00_make": "done"}, "artifacts": {"00_make": {"numbers": "00_make/n.txt"}}}
    (folder / "result.json").write_text(json.dumps(entry))
    assert "its artifact numbers is gone" in call("check", str(folder), code=1).stdout
    (folder / "00_make").mkdir()
    (folder / "00_make" / "n.txt").write_text("3")
    assert call("check", str(folder)).stdout == "run: sound\n"


def test_the_makefile_helps_and_refuses_without_parameters() -> None:
    def make(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["make", "-s", *words], cwd=paths.REPOSITORY, capture_output=True, text=True)

    text = make("help").stdout
    assert not [
        t for t in ("demo", "test", "lab", "run", "sweep", "compat", "lock", "clean") if f"make {t} " not in text
    ]
    assert make("-o", ".venv/.ready", "run").returncode != 0
    for python in ("PYTHON=",):
        refused = subprocess.run(
            ["make", "-s", "setup", python, "READY=/nonexistent/ready"],
            cwd=paths.REPOSITORY,
            capture_output=True,
            text=True,
        )
        assert refused.returncode != 0 and "no Python from 3.11" in refused.stdout
