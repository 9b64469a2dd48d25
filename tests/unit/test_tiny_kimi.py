"""The tiny Kimi checkpoint: Kimi's structure, names and tokenizer traps, the same for the same seed."""

import json
import os

import pytest

from kimi_eagle import tiny_kimi
from kimi_eagle.errors import BadInput

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_kimi.make(tmp_path_factory.mktemp("made") / "tiny-kimi")


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def test_structure_and_names(folder):
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"] and "vision_config" in config
    assert (text["kv_lora_rank"], text["qk_rope_head_dim"], text["scoring_func"], text["topk_method"]) == (
        512,
        64,
        "sigmoid",
        "noaux_tc",
    )
    ids = [2, text["num_hidden_layers"] // 2, text["num_hidden_layers"] - 3]
    assert len(set(ids)) == 3
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert all(n.startswith("language_model.") for n in names)
        layer = "language_model.model.layers.1.mlp."
        assert file.get_slice(layer + "experts.15.gate_proj.weight").get_shape() == [64, 256]
        assert {layer + "gate.e_score_correction_bias", layer + "shared_experts.up_proj.weight"} <= names
        assert "language_model.model.layers.0.mlp.gate_proj.weight" in names, "the first layer is dense"
        assert not any("layers.0.mlp.experts" in n for n in names)
        assert {"language_model.lm_head.weight", "language_model.model.norm.weight"} <= names


def test_same_seed_same_weights_and_another_seed_other_ones(folder, tmp_path):
    again = tiny_kimi.make(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((again / "kimi_eagle.json").read_text())["seed"] == 0
    other = tiny_kimi.make(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_made_once_and_never_over_something_else(folder, tmp_path):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_kimi.make(folder) == folder and (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(BadInput, match="seed 3"):
        tiny_kimi.make(folder, seed=3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(BadInput, match="is not the tiny Kimi checkpoint"):
        tiny_kimi.make(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_the_tokenizer_loads_only_with_remote_code(folder, tokenizer):
    from transformers import AutoTokenizer

    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer).__name__ == "TikTokenTokenizer" and not tokenizer.is_fast
    assert len(tokenizer) == tokenizer.vocab_size == 2048


def test_special_ids_stand_where_kimi_has_them(tokenizer):
    first = 1792
    offsets = {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|im_end|>": 2,
        "<|im_user|>": 3,
        "<|im_middle|>": 17,
        "<|media_pad|>": 21,
        "[PAD]": 255,
    }
    assert {t: tokenizer.convert_tokens_to_ids(t) for t in offsets} == {t: first + i for t, i in offsets.items()}
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (first + 1, first + 255)
    assert tokenizer.encode("a<|im_end|>b")[1] == first + 2


@pytest.mark.parametrize(
    "text", ["Hello, world! It's 1234.", "caf\u00e9 \u4f60\u597d \U0001f600", "\n\n  def f(x):\n\treturn x", "", "  "]
)
def test_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids, default=0) < 1792


def test_chat_template(tokenizer):
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )


def test_hugging_face_computes_the_text_model(folder):
    import torch

    model = tiny_kimi.text_model(folder)
    with torch.no_grad():
        out = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert len(out.hidden_states) == 9 and out.logits.shape == (1, 3, 2048)
    assert torch.isfinite(out.logits).all() and out.logits.std() > 0.5
