"""Training over many kills (`make test-long`)."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from labs import lines, make_lab, settings
from safetensors.torch import load_file

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
KILLS, EPOCHS = 20, 40
TIMED = ("seconds", "tokens_per_second", "peak_memory_mb")


def begin(config, file: Path) -> subprocess.Popen:
    """A training process of its own, with one thread as the run it is held against."""
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "kimi_eagle.train", str(file)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def steps_taken(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b'"gradient_norm"') if file.is_file() else 0


def final_state(folder: Path) -> dict:
    return torch.load(sorted((folder / "state").glob("state-*.pt"))[-1], weights_only=True)


def test_killed_at_20_random_moments_the_curve_and_the_weights_are_those_of_an_undisturbed_run(tmp_path):
    """T67 at length: every line of metrics.jsonl, the last weights, the optimizer's moments and the selected head, bit by bit."""
    lab, chance = make_lab(tmp_path), random.Random(3)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert begin(settings(lab, whole, epochs=EPOCHS, evaluations=8), tmp_path / "w.json").wait() == 0
    total = steps_taken(whole)
    for moment in sorted(chance.sample(range(1, total - 2), KILLS)):
        often = chance.choice((0.001, 0.05, 0.3))  # states of every step, and states that are steps behind
        config = settings(lab, killed, epochs=EPOCHS, evaluations=8, checkpoint_seconds=often)
        process = begin(config, tmp_path / "k.json")
        while steps_taken(killed) < moment and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert begin(config, tmp_path / "k.json").wait() == 0
    curves = [[{k: v for k, v in e.items() if k not in TIMED} for e in lines(run)] for run in (whole, killed)]
    assert curves[0] == curves[1] and len(curves[0]) > total
    one, two = final_state(whole), final_state(killed)
    assert one["step"] == two["step"] == total
    for name, tensor in one["head"].items():
        assert torch.equal(tensor, two["head"][name]), name
    for number, moments in one["optimizer"]["state"].items():
        assert all(torch.equal(v, two["optimizer"]["state"][number][k]) for k, v in moments.items()), number
    for name, tensor in load_file(whole / "head" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(killed / "head" / "model.safetensors")[name]), name
