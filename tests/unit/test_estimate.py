"""The estimate is arithmetic on parameters and configuration: held against the figures that are known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_eagle import estimate, paths
from kimi_eagle.errors import BadInput
from kimi_eagle.notebook import parameters


def values(name: str) -> dict:
    known = parameters.declared_everywhere()
    given = parameters.validate(parameters.load(paths.REPOSITORY / "params" / name), known, name)
    return {key: given.get(key, parameter.default) for key, parameter in known.items()}


def test_kimis_states_take_what_arithmetic_says() -> None:
    found = estimate.estimate(values("kimi_k2.5_8gpu.yaml"))
    assert abs(found["bytes_per_token"] / (4 * 7168 * 2) - 1) < 0.01
    assert found["states_gb"] == pytest.approx(found["tokens"] * found["bytes_per_token"] / 1e9)


def test_the_head_has_the_size_of_its_matrices(tmp_path: Path) -> None:
    """SmolLM2, Llama head: fc 3HxH, attention on 2H, MLP 3xHxI, lm_head over 8192 rows (norms are not counted)."""
    h, wide = 576, 1536
    attention = 2 * h * 64 * (9 + 2 * 3) + 9 * 64 * h
    expected = 3 * h * h + attention + 3 * h * wide + 8192 * h
    assert estimate.estimate(values("smollm2_cpu.yaml"))["head_parameters"] == expected


def test_the_known_configuration_of_smollm2_is_the_made_ones() -> None:
    folder = paths.cache() / "targets" / "smollm2"
    if not (folder / "config.json").is_file():
        pytest.skip("the target is not made here; the demo makes it")
    made = json.loads((folder / "config.json").read_text())
    assert {key: made[key] for key in estimate.SMOLLM2} == estimate.SMOLLM2


def test_more_than_the_disk_holds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "free_bytes", lambda: 1000)
    found = estimate.estimate(values("smollm2_cpu.yaml"))
    assert not found["fits"] and "DOES NOT FIT" in estimate.text(found)


@pytest.mark.parametrize("name", ["nobody/nothing", "./nowhere"])
def test_a_target_that_nothing_here_describes_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="no configuration"):
        estimate.configuration(name)


def test_a_wrapper_is_unwrapped(tmp_path: Path) -> None:
    text = {"hidden_size": 7, "num_hidden_layers": 2, "vocab_size": 9, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert estimate.configuration(str(tmp_path)) == text
    for broken in ("{}", "[]", "no"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(BadInput, match=r"config\.json"):
            estimate.configuration(str(tmp_path))


def test_it_answers_without_torch_and_vllm() -> None:
    code = (
        "import sys\nsys.argv = ['kimi-eagle', 'estimate', 'params/kimi_k2.5_8gpu.yaml']\n"
        "from kimi_eagle import cli\ntry:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and "bytes per token" in done.stdout, done.stderr
