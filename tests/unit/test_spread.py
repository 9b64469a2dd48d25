"""Extraction in parts: by jobs of a batch scheduler and by Ray actors that die; every row once, in one store."""

import json
import os
import shutil
import signal
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from labs import H, N, make_target
from safetensors.torch import save_file
from typer.testing import CliRunner

from kimi_eagle.chat import Answer, read_answers
from kimi_eagle.cli import app
from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.extract import groups, loop, spread
from kimi_eagle.extract.states import FileStates
from kimi_eagle.hidden_store import Store
from kimi_eagle.target import describe

LAYERS, ROWS = [2, 4, 5, N], 40


def states_of(tokens: list[int]) -> torch.Tensor:
    """What the made-up engine says: states [T, S, H] that follow from the tokens."""
    return torch.randn(len(tokens), len(LAYERS), H, generator=torch.Generator().manual_seed(sum(tokens)))


def made_up_engine(folder: Path, dies_at: str = "") -> tuple[loop.Plan, SimpleNamespace]:
    """A plan, and in place of an engine a function; the process that is to run row `dies_at` first kills itself, once."""

    def run(plan, engine, group, staging, allowed):
        paths = {}
        for row in group:
            with open(folder / "asked", "a") as file:
                file.write(f"{os.getpid()} {row.sample_id}\n")
            if row.sample_id == dies_at and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            paths[row.sample_id] = str(staging.folder / f"{row.sample_id}.safetensors")
            found = {"token_ids": torch.tensor(row.token_ids), "hidden_states": states_of(row.token_ids)}
            save_file(found, paths[row.sample_id])
        return FileStates(paths)

    groups._run, groups.FIRST_GROUP_TOKENS = run, 20
    plan = loop.Plan(describe(folder / "target"), LAYERS, "hooks", "made up", "float32")
    return plan, SimpleNamespace(call=lambda method: {"made": "up"}, rpc=lambda method: [])


@pytest.fixture
def lab(tmp_path, monkeypatch):
    for name in ("_run", "FIRST_GROUP_TOKENS"):
        monkeypatch.setattr(groups, name, getattr(groups, name))  # put back after the test
    make_target(tmp_path / "target")
    rows = [
        Answer(
            f"r{i}", f"r{i}", "heldout" if i % 5 == 0 else "train", list(range(i % 7, i % 7 + 4 + i % 3)), 2, "length"
        )
        for i in range(ROWS)
    ]
    lines = [json.dumps(asdict(row)) + "\n" for row in rows]
    (tmp_path / "answers.jsonl").write_text("{}\n" + "".join(lines))
    return tmp_path


def assert_every_row_once(lab: Path, plan: loop.Plan) -> None:
    rows = read_answers(lab / "answers.jsonl")
    for split in ("train", "heldout"):
        store = Store(lab / "states" / plan.key / split)
        assert store.check() == []
        assert sorted(store.sample_ids) == sorted(row.sample_id for row in rows if row.split == split)
        for row in rows:
            if row.split == split:
                assert store.row(row.sample_id).hidden_states.equal(states_of(row.token_ids))
                assert store.row(row.sample_id).loss_mask.tolist() == row.loss_mask


def test_the_parts_of_three_jobs_are_one_store_that_the_notebook_goes_on_with(lab):
    plan, engine = made_up_engine(lab)
    held = [spread.extract_part(plan, engine, lab / "answers.jsonl", lab / "states", part, 3) for part in (2, 0, 1, 1)]
    assert sum(held) - held[-1] == ROWS and min(held) > 0
    assert_every_row_once(lab, plan)
    asked = (lab / "asked").read_text().split()[1::2]
    assert sorted(asked) == sorted(f"r{i}" for i in range(ROWS))  # the repeated job extracted nothing again
    rows = read_answers(lab / "answers.jsonl")
    folder = lab / "states" / plan.key / "train"
    train = [row for row in rows if row.split == "train"]
    assert loop.extract(plan, engine, train, folder).sample_ids == Store(folder).sample_ids
    with pytest.raises(StageFailed, match="are in no part"):
        loop.extract(plan, engine, rows, folder)
    shutil.rmtree(folder / "part-0001-of-0003")
    with pytest.raises(BadInput, match="part-0001-of-0003 is not there"):
        loop.extract(plan, engine, train, folder)


@pytest.mark.parametrize("text", ["3/3", "1", "a/b", "-1/3", "1/0"])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(BadInput, match="give i/n"):
        spread.shard_of(text)
    assert spread.shard_of("2/3") == (2, 3)


def test_the_command_extracts_its_part_of_a_run(lab, monkeypatch):
    monkeypatch.setenv("KIMI_EAGLE_OUTPUTS", str(lab / "outputs"))
    stage = lab / "outputs" / "x" / "02_extract_hidden_states"
    stage.mkdir(parents=True)
    shutil.copy(lab / "answers.jsonl", stage)
    file = lab / "x.yaml"
    file.write_text(f"target: {lab / 'target'}\n")
    monkeypatch.setattr(spread, "opened", lambda values: made_up_engine(lab))
    for part in range(2):
        done = CliRunner().invoke(app, ["extract", str(file), "--shard", f"{part}/2"])
        assert done.exit_code == 0 and "rows are stored" in done.output, done.output
    shutil.move(stage / "states", lab / "states")
    assert_every_row_once(lab, made_up_engine(lab)[0])
    (stage / "answers.jsonl").unlink()
    monkeypatch.setattr(spread, "opened", lambda values: pytest.fail("an engine was opened"))
    for arguments in ([], ["--shard", "0/2", "--ray", "1"], ["--shard", "0/2"]):
        done = CliRunner().invoke(app, ["extract", str(file), *arguments])
        assert isinstance(done.exception, BadInput)


@pytest.mark.timeout(900)
def test_ray_actors_extract_every_row_once_although_one_is_killed(lab, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed here")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name in ("raylet_start_wait_time_s", "agent_register_timeout_ms"):  # a busy machine starts Ray slowly
        monkeypatch.setenv(f"RAY_{name}", "600000")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        held = spread.with_ray(partial(made_up_engine, lab, "r17"), lab / "answers.jsonl", lab / "states", 2)
    finally:
        ray.shutdown()
    assert held == ROWS and (lab / "died").exists()
    assert_every_row_once(lab, made_up_engine(lab)[0])
    asked = [line.split() for line in (lab / "asked").read_text().splitlines()]
    assert len({pid for pid, _ in asked}) == 3  # two actors, and the one that took the killed one's place
