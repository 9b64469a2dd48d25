"""A rehearsal on the toy Kimi in real vLLM: every step of a run without its weights; what would break in it breaks here."""

import json

import pytest

from kimi_eagle import rehearse as module
from kimi_eagle import target as targets
from kimi_eagle.errors import BadInput, KimiEagleError
from kimi_eagle.notebook import parameters

STEPS = ["patches", "target", "tokenizer", "back end", "engine for states", "extraction", "vocabulary map", "training", "serving"]  # fmt: skip


@pytest.fixture(autouse=True)
def own_engines(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KIMI_EAGLE_ENGINES", str(tmp_path_factory.mktemp("e")))


def values(file="tiny_kimi.yaml", **changes):
    known = parameters.declared_everywhere()
    given = parameters.load(parameters.notebooks_folder().parent / "params" / file)
    return {name: given.get(name, p.default) for name, p in known.items()} | changes


def test_the_toy_kimi_goes_through_every_step(tmp_path):
    said = []
    seconds = module.rehearse(values(), tmp_path / "rehearsal", said.append)
    assert list(seconds) == STEPS and len(said) == len(STEPS)
    assert all(line.startswith("OK") for line in said)
    assert "drafts of 3" in said[-1] and "connector" in said[3]
    head = json.loads(next((tmp_path / "rehearsal").glob("train/head/config.json")).read_text())
    assert head["model_type"] == "deepseek_v2", "the toy Kimi's head has latent attention"


def test_a_step_that_breaks_is_named_before_any_engine_starts(tmp_path, monkeypatch):
    """The first break of the reported chain: a tokenizer that cannot be loaded."""
    short = module.short_copy(targets.describe("tiny-kimi"), tmp_path / "cut", "float32", layers=5)
    assert short.num_layers == 5 and short.is_wrapper
    (tmp_path / "cut" / "tiktoken.model").unlink()
    monkeypatch.setattr("kimi_eagle.extract.engine.start", lambda *a, **k: pytest.fail("an engine was started"))
    with pytest.raises(KimiEagleError, match="rehearsal, tokenizer: "):
        module.rehearse(values(target=str(tmp_path / "cut")), tmp_path / "again", lambda _: None)
    with pytest.raises(BadInput, match="did you mean tiny-kimi"):
        module.rehearse(values(target="tinny-kimi"), tmp_path / "typo", lambda _: None)
