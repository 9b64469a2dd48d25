"""speculators' generator in a real vLLM 0.16 with the patches, on the toy Kimi wrapper: states, order, chunks, workers."""

import importlib
import os

import pytest
import torch

from kimi_eagle import compat, tiny_kimi
from kimi_eagle import target as targets
from kimi_eagle.errors import BadInput
from kimi_eagle.extract import configure, engine, speculators
from kimi_eagle.extract.speculators import GENERATOR, GeneratorHost

LENGTHS = (90, 90, 90, 90, 1, 40)  # more than one step of 256 tokens takes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_kimi.make(tmp_path_factory.mktemp("target") / "tiny-kimi")


@pytest.fixture(scope="module")
def host(checkpoint):
    module = importlib.import_module(GENERATOR)
    before, module.MIN_MAX_BATCHED_TOKENS = module.MIN_MAX_BATCHED_TOKENS, 256
    host = GeneratorHost(str(checkpoint), max_model_len=256)
    yield host
    host.close()
    module.MIN_MAX_BATCHED_TOKENS = before


@pytest.fixture(scope="module")
def prompts():
    random = torch.Generator().manual_seed(1)
    return [torch.randint(10, 1700, (n,), generator=random).tolist() for n in LENGTHS]


def error(found, expected):
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def test_states_are_hugging_faces_in_our_ids_and_in_the_order_asked_for(host, checkpoint, prompts):
    model = tiny_kimi.text_model(checkpoint)
    kept = {}
    for k in (2, 4, 5):
        model.model.layers[k].register_forward_pre_hook(lambda _, args, k=k: kept.__setitem__(k, args[0]))
    model.model.layers[-1].register_forward_hook(
        lambda _, __, out: kept.__setitem__(8, out[0] if isinstance(out, tuple) else out)
    )
    ids = [8, 2, 5, 2, 4]  # neither sorted nor distinct: speculators itself keeps a set
    for prompt, states in zip(prompts, host.states(prompts, ids), strict=True):
        with torch.no_grad():
            model(torch.tensor([prompt]))
        expected = torch.stack([kept[k].reshape(len(prompt), -1) for k in ids], dim=1)
        assert error(states, expected) < 1e-4


def test_layer_0_and_too_long_prompts_are_refused(host):
    with pytest.raises(BadInput, match="no name in the speculators"):
        host.states([[1, 2]], [0, 2])
    with pytest.raises(BadInput, match="cuts at 255"):
        host.states([[5] * 300], [2, 8])


def test_a_batch_above_the_budget_needs_its_patch(host, prompts):
    ids = [2, 4, 5, 8]
    alone = [host.states([p], ids)[0] for p in prompts]

    def worst():
        found = host.states(prompts, ids)
        same = all(f.shape == a.shape for f, a in zip(found, alone, strict=True))
        return max(error(f, a) for f, a in zip(found, alone, strict=True)) if same else float("inf")

    assert worst() < 1e-4
    compat.undo("spec-whole-prompts")
    assert worst() > 0.1
    compat.apply("spec-whole-prompts")
    assert worst() < 1e-4


def test_the_patches_are_in_the_spawned_worker(host):
    (rows,) = host.rpc(lambda *_: None, "kimi_eagle_patches", [])
    found = {row["id"]: row for row in rows}
    for patch_id in (
        "spec-embedding",
        "spec-single-reply",
        "spec-wrapper-model",
        "vllm-kimi-eagle3",
        "vllm-cpu-rotary",
    ):
        assert found[patch_id]["state"] == "applied" and found[patch_id]["pid"] != os.getpid()


def test_an_engine_of_this_back_end_is_a_child_process_like_any_other(host, checkpoint, prompts, tmp_path):
    target, ids = targets.describe(checkpoint), [2, 5, 8]
    options = speculators.engine_options(ids)
    running = engine.start(configure.engine_config(target, "extract", max_model_len=256, **options), idle_minutes=5)
    try:
        assert running.call("describe")["speculators"] == "0.3.0"
        requests = [{"id": f"r{i}", "prompt_token_ids": p} for i, p in enumerate(prompts)]
        states = speculators.run(running, requests, ids, str(tmp_path))
        for index, (prompt, alone) in enumerate(zip(prompts, host.states(prompts, ids), strict=True)):
            token_ids, found = states.row(f"r{index}")
            assert token_ids.tolist() == prompt
            assert error(found, alone) < 1e-4
    finally:
        running.down()
