"""Patches in real engines on the tiny Kimi checkpoint: present in every worker, right with them, wrong or failing without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_eagle import compat, tiny_kimi

SCRIPT = Path(__file__).with_name("tiny_engine.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_kimi.make(tmp_path_factory.mktemp("target") / "tiny-kimi")


@pytest.fixture(scope="module")
def expected(tiny):
    """Log-probs of each prompt's tokens 1.. from Hugging Face's own DeepSeek-V3, float32."""
    import torch

    sys.path.insert(0, str(SCRIPT.parent))
    from tiny_engine import PROMPTS

    model = tiny_kimi.text_model(tiny)
    rows = []
    with torch.no_grad():
        for ids in PROMPTS:
            logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            rows.append([logits[t, ids[t + 1]].item() for t in range(len(ids) - 1)])
    return rows


def run(tiny, tensor_parallel=1, **environment):
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **environment,
    }
    command = [sys.executable, str(SCRIPT), str(tiny), str(tensor_parallel)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return (json.loads(answers[0].removeprefix("ANSWER ")) if answers else None), done.stdout + done.stderr


def worst(got, expected):
    return max(abs(a - b) for x, y in zip(got, expected, strict=True) for a, b in zip(x, y, strict=True))


def test_patches_reach_both_workers_and_make_the_states_right(tiny, expected):
    answer, log = run(tiny, tensor_parallel=2, KIMI_EAGLE_PATCHES="auto")
    assert answer, log[-3000:]
    rows = {row["id"]: row for row in compat.combine(answer["workers"])}
    assert rows["vllm-cpu-rotary"]["state"] == "applied"
    pids = rows["vllm-cpu-rotary"]["pids"]
    assert len(set(pids)) == 2 and os.getpid() not in pids
    assert worst(answer["logprobs"], expected) < 1e-3


def test_without_the_rotary_patch_the_same_engine_is_wrong(tiny, expected):
    answer, log = run(tiny, KIMI_EAGLE_PATCHES="auto,-vllm-cpu-rotary", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert answer, log[-3000:]
    rows = {row["id"]: row for row in compat.combine(answer["workers"])}
    assert rows["vllm-cpu-rotary"]["state"] == "off"
    assert worst(answer["logprobs"], expected) > 0.05


def test_without_the_kernel_scan_patch_the_engine_in_this_process_fails_as_recorded(tiny):
    answer, log = run(tiny, KIMI_EAGLE_PATCHES="auto,-vllm-kernel-scan", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert answer is None
    symptom = next(p.symptom for p in compat.patches() if p.id == "vllm-kernel-scan")
    assert symptom in log
