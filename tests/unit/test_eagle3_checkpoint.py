"""Export, load, and the contract: every wrong head that the field has produced is named."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from heads import V, toy_config, toy_head
from safetensors.torch import load_file, save_file

from kimi_eagle.eagle3 import checkpoint
from kimi_eagle.eagle3.checkpoint import check_head
from kimi_eagle.eagle3.config import rope_of
from kimi_eagle.eagle3.format import config_from_json, config_json
from kimi_eagle.eagle3.model import start
from kimi_eagle.errors import BadInput

TEXT = {"max_position_embeddings": 128, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None}


def toy_target(head, **text):
    embedding = head.embedding
    return SimpleNamespace(
        num_layers=6,
        hidden_size=16,
        vocab_size=V,
        text_config=TEXT | text,
        load_tensor=lambda part: embedding,
    )


@pytest.fixture(params=["llama", "mla"])
def exported(request, tmp_path):
    head = toy_head(toy_config(request.param))
    return checkpoint.export(head, tmp_path / "head", toy_target(head)), head


def edit(folder, **changes):
    """Rewrite config.json with changes; a value of ... removes the key."""
    file = folder / "config.json"
    written = json.loads(file.read_text())
    written |= changes
    file.write_text(json.dumps({k: v for k, v in written.items() if v is not ...}))


def retensor(folder, change):
    """Rewrite model.safetensors with its dictionary changed in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def test_what_is_exported_is_sound_and_computes_the_same_after_loading(exported):
    folder, head = exported
    target = toy_target(head)
    assert check_head(folder, target) == []
    again = checkpoint.load(folder, target)
    assert again.config == head.config
    tokens, aux = torch.randint(0, V, (6,)), torch.randn(6, 3, 16)
    one, two = start(head, aux, tokens), start(again, aux, tokens)
    assert torch.equal(head.draft_tokens(one.hidden), again.draft_tokens(two.hidden))
    torch.testing.assert_close(one.hidden, two.hidden)


def test_names_keys_and_dtypes_are_what_vllm_reads(exported):
    folder, head = exported
    written, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    mla = head.config.attention == "mla"
    assert written["architectures"] == ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"]
    assert written["model_type"] == ("deepseek_v2" if mla else "llama")
    assert (
        written["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        == [1, 2, 3]
        == written["eagle_aux_hidden_state_layer_ids"]
    )
    assert written["layer_id_convention"] == "vllm" and written["tie_word_embeddings"] is False
    assert "pad_token_id" not in written and written["eos_token_id"] == 2
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool and tensors["t2d"].sum() == 20
    expected = {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"} if mla else {"q_proj", "k_proj", "v_proj"}
    assert expected <= {n.split(".")[3] for n in tensors if n.startswith("layers.0.self_attn.")}
    assert tensors["fc.weight"].shape == (16, 48) and tensors["lm_head.weight"].shape == (20, 16)
    assert not any(n.startswith("model.") or "embed_tokens" in n for n in tensors)


def test_sglang_gets_its_own_names_and_ids(tmp_path):
    head = toy_head(toy_config())
    folder = checkpoint.export(head, tmp_path / "head", toy_target(head), reader="sglang")
    written = json.loads((folder / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # outputs of layers, the same tensors
    assert "midlayer.mlp.up_proj.weight" in load_file(folder / "model.safetensors")
    assert check_head(folder, reader="sglang") == []
    assert any("layer_id_convention" in f for f in check_head(folder, reader="vllm"))
    assert checkpoint.load(folder, toy_target(head)).config.layer_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"eagle_aux_hidden_state_layer_ids": ...}, "missing at the top level"),
        ({"eagle_config": {"use_aux_hidden_state": True}}, "missing inside eagle_config"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "differ"),
        ({"layer_id_convention": "sglang"}, "layer_id_convention"),
        ({"layer_id_convention": ...}, "layer_id_convention"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states"),
        ({"max_position_embeddings": 64}, "below the target's"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"use_cache": None}, "use_cache is null"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
        ({"model_type": "deepseek_v3"}, "model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"vocab_size": 64}, "not the target's"),
        ({"target_hidden_size": 32}, "target_hidden_size"),
        ({"draft_vocab_size": 21}, "lm_head.weight has shape"),
        ({"draft_vocab_size": V}, "lm_head.weight has shape"),
        ({"intermediate_size": ...}, "intermediate_size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_config_is_named(exported, changes, word):
    folder, head = exported
    edit(folder, **changes)
    faults = check_head(folder, toy_target(head))
    assert any(word in fault for fault in faults), faults
    with pytest.raises(BadInput):
        checkpoint.load(folder, toy_target(head))


def test_layer_ids_beyond_the_target_and_a_lost_yarn_are_named(exported):
    folder, head = exported
    short = toy_target(head)
    short.num_layers = 2
    assert any("do not all exist" in f for f in check_head(folder, short))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert any("rope_scaling was lost" in f for f in check_head(folder, toy_target(head, rope_scaling=yarn)))


def rename(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


def put(name, make):
    def change(tensors):
        tensors[name] = make(tensors.get(name))

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (put("d2t", lambda d: d.int()), "int64"),
        (put("d2t", lambda d: d + torch.arange(20)), "d2t"),  # ids instead of offsets
        (put("d2t", lambda d: d[:-1]), "19 entries"),
        (put("d2t", lambda d: d * 0), "t2d does not mark"),
        (put("t2d", lambda t: t.int()), "t2d must be bool"),
        (put("t2d", lambda t: ~t), "t2d does not mark"),
        (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        (rename("fc.weight", "model.fc.weight"), "model.fc.weight is not a name"),
        (rename("layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"), "not a name that vllm loads"),
        (put("fc.weight", lambda w: w[:, :32]), "fc.weight has shape"),
        (put("norm.weight", lambda w: w.to(torch.int8)), "not a floating type"),
        (put("lm_head.weight", lambda w: w * float("nan")), "not finite"),
        (put("embed_tokens.weight", lambda _: torch.zeros(4, 16)), "embed_tokens"),
    ],
)
def test_wrong_tensors_are_named(exported, change, word):
    folder, _ = exported
    retensor(folder, change)
    faults = check_head(folder)
    assert any(word in fault for fault in faults), faults


def test_cut_and_missing_files_are_named(exported):
    """T67. A head of which a file is half there is not taken for one."""
    folder, _ = exported
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "cannot be read" in check_head(folder)[0]
    file.unlink()
    assert "cannot be read" in check_head(folder)[0]
    (folder / "config.json").write_text("{")
    assert "not JSON" in check_head(folder)[0]
    (folder / "config.json").unlink()
    assert "no config.json" in check_head(folder)[0]


def test_an_export_replaces_the_whole_folder_and_leaves_nothing_beside_it(tmp_path):
    head = toy_head(toy_config())
    folder = checkpoint.export(head, tmp_path / "head", toy_target(head))
    (folder / "stale.bin").write_text("old")
    checkpoint.export(head, folder, toy_target(head))
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["head"]
    with torch.no_grad():
        head.fc.weight[0, 0] = float("inf")
    with pytest.raises(BadInput, match="not written"):
        checkpoint.export(head, folder, toy_target(head))
    assert check_head(folder) == [] and os.listdir(tmp_path) == ["head"]  # the sound one stays


def test_a_head_over_the_whole_vocabulary_has_no_map(tmp_path):
    head = toy_head(toy_config(draft_vocab_size=V))
    folder = checkpoint.export(head, tmp_path / "head", toy_target(head))
    assert "d2t" not in load_file(folder / "model.safetensors") and check_head(folder, toy_target(head)) == []
    retensor(folder, put("d2t", lambda _: torch.zeros(V, dtype=torch.int64)))
    assert "leave it out" in check_head(folder)[0]


@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_config_json_round_trip_keeps_yarn_and_is_read_alike_by_transformers(attention, tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
    }
    config = toy_config(attention, rope_parameters=rope, fc_norm=True, norm_output=True)
    written = config_json(config)
    assert config_from_json(written) == config
    (tmp_path / "config.json").write_text(json.dumps(written))
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {k: rope_of(read)[k] for k in rope} == rope
    assert read["hidden_size"] == 16 and read["fc_norm"] is True


@pytest.mark.parametrize("attention", ["llama", "mla"])
@pytest.mark.parametrize("reader", ["vllm", "sglang"])
def test_no_entry_of_an_exported_config_is_null(attention, reader, tmp_path):
    """T41. Whatever the target or the head leaves open is left out, at every depth."""
    head = toy_head(toy_config(attention, q_lora_rank=None))
    target = toy_target(head, bos_token_id=None, eos_token_id=None)
    folder = checkpoint.export(head, tmp_path / "head", target, reader=reader)
    assert "null" not in (folder / "config.json").read_text()
    assert (
        not {"bos_token_id", "eos_token_id", "pad_token_id", "q_lora_rank"}
        & json.loads((folder / "config.json").read_text()).keys()
    )


MLP_AND_NORMS = "mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm hidden_norm post_attention_layernorm"
LLAMA_ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
MLA_ATTENTION = (
    "self_attn.q_a_proj self_attn.q_a_layernorm self_attn.q_b_proj self_attn.kv_a_proj_with_mqa "
    "self_attn.kv_a_layernorm self_attn.kv_b_proj self_attn.o_proj"
)


@pytest.mark.parametrize(
    ("reader", "attention", "layer", "names"),
    [
        ("vllm", "llama", "layers.0.", LLAMA_ATTENTION),
        ("vllm", "mla", "layers.0.", MLA_ATTENTION),
        ("sglang", "llama", "midlayer.", LLAMA_ATTENTION),
    ],
)
def test_the_tensors_of_a_head_are_exactly_those_its_server_reads(reader, attention, layer, names, tmp_path):
    """T42. The whole set by hand: nothing else (an embedding, a fused qkv, a `model.` in front) and nothing less."""
    head = toy_head(toy_config(attention))
    folder = checkpoint.export(head, tmp_path / "head", toy_target(head), reader=reader)
    expected = {f"{layer}{name}.weight" for name in f"{names} {MLP_AND_NORMS}".split()}
    expected |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(load_file(folder / "model.safetensors")) == expected
    retensor(folder, put(f"{layer}self_attn.qkv_proj.weight", lambda _: torch.zeros(4, 4)))
    assert any(f"qkv_proj.weight is not a name that {reader}" in fault for fault in check_head(folder, reader=reader))
    retensor(folder, put("embed_tokens.weight", lambda _: head.embedding[:-1]))
    assert any("embed_tokens" in fault for fault in check_head(folder, reader=reader))
