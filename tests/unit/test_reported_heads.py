"""Faults that others reported of heads and their configs (T32 to T49), each under its number: what a server would be given."""

import importlib.util
import json
import shlex
from pathlib import Path

import pytest
import torch
from heads import A, H, V, toy_config, toy_head
from labs import N, make_target
from safetensors.torch import load_file, save_file
from test_eagle3_checkpoint import edit, put, retensor, toy_target

from kimi_eagle import check, layer_ids
from kimi_eagle.acceptance.launch import launch_line
from kimi_eagle.acceptance.serve import speculative_config
from kimi_eagle.eagle3 import checkpoint
from kimi_eagle.eagle3.checkpoint import check_head
from kimi_eagle.eagle3.config import for_target
from kimi_eagle.eagle3.contract import IDS
from kimi_eagle.eagle3.format import config_from_json, read_config
from kimi_eagle.eagle3.loss import TargetOutput
from kimi_eagle.eagle3.model import Head, start
from kimi_eagle.errors import BadInput
from kimi_eagle.target import describe
from kimi_eagle.training.initial import initial_head

YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096}


def kimi_like(head):
    target = toy_target(head)
    target.num_layers = 61
    return target


def outputs(*layers: int) -> str:
    return ", ".join(f"output of layer {k}" for k in layers)


@pytest.mark.parametrize("reader", ["vllm", "sglang"])
def test_the_two_ways_to_write_kimis_layers_are_told_apart(reader, tmp_path):
    """T32. [1, 29, 57] and [2, 30, 58] without a convention: refused, and what each list means to each server is said."""
    head = toy_head(toy_config(layer_ids=(2, 30, 58)))
    folder = checkpoint.export(head, tmp_path / "head", kimi_like(head))
    for ids, for_vllm, for_sglang in (([1, 29, 57], (0, 28, 56), (1, 29, 57)), ([2, 30, 58], (1, 29, 57), (2, 30, 58))):
        edit(folder, layer_id_convention=..., **{IDS: ids, "eagle_config": {IDS: ids}})
        (said,) = [f for f in check_head(folder, kimi_like(head), reader) if "layer_id_convention" in f]
        assert f"{ids} for vllm: {outputs(*for_vllm)};" in said and f"{ids} for sglang: {outputs(*for_sglang)})" in said
    edit(folder, layer_id_convention=reader, **{IDS: [1, 29, 57], "eagle_config": {IDS: [2, 30, 58]}})
    (said,) = [f for f in check_head(folder, None, reader) if "differ" in f]
    assert (
        f"[1, 29, 57] for sglang: {outputs(1, 29, 57)}" in said
        and f"[2, 30, 58] for vllm: {outputs(1, 29, 57)}" in said
    )
    edit(folder, layer_id_convention="sglang", **{IDS: [1, 29, 57], "eagle_config": {IDS: [1, 29, 57]}})
    assert config_from_json(read_config(folder)).layer_ids == (2, 30, 58)
    assert layer_ids.meaning([0, 61], "vllm") == "embeddings, output of layer 60"


def test_a_head_without_its_layer_ids_is_not_exported(tmp_path, monkeypatch):
    """T34. Ids that are not the server's default and are left out: no export, and no folder behind."""
    head = toy_head(toy_config(layer_ids=(1, 2, 3)))
    assert layer_ids.default_auxiliary(8) != [1, 2, 3]
    whole = checkpoint.config_json

    def without(*arguments):
        written = whole(*arguments)
        del written[IDS], written["eagle_config"][IDS]
        return written

    monkeypatch.setattr(checkpoint, "config_json", without)
    with pytest.raises(BadInput, match=f"{IDS} is missing"):
        checkpoint.export(head, tmp_path / "head", toy_target(head))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reader", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("flags", "tensor"),
    [
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"fc_norm": True, "norm_output": True}, "fc_norm.2.weight"),
        ({"norm_before_residual": True}, "fc.weight"),
    ],
    ids=["norm_before_fc", "fc_norm", "norm_before_residual"],
)
def test_an_exported_head_gives_the_same_logits(flags, tensor, reader, tmp_path):
    """T35. Export, reload, two steps on one batch: equal logits; the third state and every norm count, and a lost one is named."""
    head = toy_head(toy_config(**flags)).eval()
    folder = checkpoint.export(head, tmp_path / "head", toy_target(head), reader=reader)
    again = checkpoint.load(folder, toy_target(head))
    tokens, aux = torch.arange(9), torch.randn(9, A, H)

    def logits(model, aux):
        chain = start(model, aux, tokens)
        first = model.lm_head(chain.hidden)
        return torch.cat((first, model.lm_head(chain.advance(tokens[:8]).hidden)))

    with torch.no_grad():
        assert torch.equal(logits(again, aux), logits(head, aux))
        blind = aux.clone()
        blind[:, 2] = 0
        assert not torch.allclose(logits(again, blind), logits(head, aux), atol=1e-2)
        plain = Head(toy_config(), head.embedding, head.target_ids - torch.arange(20))
        plain.load_state_dict(head.state_dict(), strict=False)
        assert not torch.allclose(logits(plain, aux), logits(head, aux), atol=1e-2)  # so the flag is not idle
    retensor(folder, lambda tensors: tensors.pop(tensor))
    assert f"model.safetensors: {tensor} is missing." in check_head(folder, reader=reader)


@pytest.mark.parametrize("key", ["norm_before_fc", "fc_norm"])
def test_a_norm_whose_key_was_lost_is_named(key, tmp_path):
    """T35. The tensor is there and the key is not: the server would leave the norm out."""
    head = toy_head(toy_config(**{key: True}))
    folder = checkpoint.export(head, tmp_path / "head", toy_target(head))
    edit(folder, **{key: ..., "eagle_config": {IDS: [1, 2, 3]}})
    assert any("_norm" in f and "is not a name that vllm loads" in f for f in check_head(folder))


def test_hugging_faces_last_entry_is_normed_and_ours_is_not():
    """T36. hidden_states[k] is vLLM's id k below N; entry N is taken after the norm, so no id stands for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    entering = {}
    for k, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, given, k=k: entering.__setitem__(k, given[0]))
    model.model.norm.register_forward_pre_hook(lambda _, given: entering.__setitem__(4, given[0]))
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
        found = model(torch.tensor([[3, 1, 4, 1, 5]]), output_hidden_states=True).hidden_states
        for k in range(4):
            assert torch.equal(found[k], entering[layer_ids.to_vllm([k], "huggingface", num_layers=4)[0]])
        assert torch.equal(found[4], model.model.norm(entering[4])) and not torch.allclose(
            found[4], entering[4], atol=0.1
        )
    for convert in (layer_ids.to_vllm, layer_ids.from_vllm):
        with pytest.raises(BadInput, match="after the final norm"):
            convert([1, 4], "huggingface", num_layers=4)
        with pytest.raises(BadInput, match="num_layers"):
            convert([1], "huggingface")


def test_a_head_with_fewer_positions_than_its_target_is_not_exported(tmp_path):
    """T37. Beyond them a server reads out of bounds, or stops drafting."""
    head = toy_head(toy_config(max_position_embeddings=127))
    with pytest.raises(BadInput, match="max_position_embeddings 127 is below the target's 128"):
        checkpoint.export(head, tmp_path / "head", toy_target(head))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_yarn_survives_export_to_far_positions(attention, tmp_path):
    """T38. cos and sin at position 100,000 after export and load: what they were, and for a Llama head what transformers has."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = YARN | (
        {"mscale": 1.0, "mscale_all_dim": 1.0} if attention == "mla" else {"beta_fast": 32.0, "beta_slow": 1.0}
    )
    head = toy_head(toy_config(attention, rope_parameters=rope, max_position_embeddings=262144))
    target = toy_target(head, max_position_embeddings=262144, rope_scaling=rope)
    folder = checkpoint.export(head, tmp_path / "head", target)
    far = torch.tensor([100_000])
    ours = checkpoint.load(folder, target).layers[0].self_attn.rotary.tables(far)
    before = head.layers[0].self_attn.rotary.tables(far)
    assert torch.equal(ours[0], before[0]) and torch.equal(ours[1], before[1])
    if attention == "llama":
        reference = LlamaRotaryEmbedding(LlamaConfig(head_dim=8, rope_parameters=rope, max_position_embeddings=262144))(
            torch.zeros(1), far[None]
        )
        for mine, theirs in zip(ours, reference, strict=True):  # float32 knows an angle of 100,000 to 0.008
            torch.testing.assert_close(mine[0], theirs[0, 0, :4], rtol=0, atol=0.02)
    swapped = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for lost in (..., swapped | {"original_max_position_embeddings": 4096}):
        edit(folder, rope_scaling=lost)
        assert any("rope_scaling was lost or replaced" in f for f in check_head(folder, target))


def quantized_target(folder: Path) -> None:
    """The toy target as an INT4 checkpoint has it: a quantization entry, and packed tensors in the place of the MLP's."""
    make_target(folder)
    written = json.loads((folder / "config.json").read_text())
    entry = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": entry}))
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".mlp." in n]:
        packed = torch.zeros(tensors.pop(name).shape[0], 4, dtype=torch.int32)
        tensors |= {name.replace(".weight", ".weight_packed"): packed}
    save_file(tensors, folder / "model.safetensors")


def test_a_bf16_head_of_an_int4_target_stays_unquantized(tmp_path):
    """T39. Neither the head's config nor the engine's asks for the target's quantization, and every MLP weight is plain."""
    quantized_target(tmp_path / "target")
    target = describe(tmp_path / "target")
    assert target.quantization == "compressed-tensors"
    head = initial_head(for_target(target), target, None, "target", 0)
    folder = checkpoint.export(head, tmp_path / "head", target, dtype="bfloat16")
    assert "quant" not in (folder / "config.json").read_text()
    tensors = load_file(folder / "model.safetensors")
    assert tensors["layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16 and check_head(folder, target) == []
    draft = speculative_config(target, folder, 3).llm["speculative_config"]
    assert not [key for key in draft if "quant" in key]
    edit(folder, quantization_config=target.config["quantization_config"])
    with pytest.raises(BadInput, match="quantization_config"):
        speculative_config(target, folder, 3)


@pytest.mark.parametrize("reader", ["vllm", "sglang"])
def test_a_sound_head_is_told_with_the_line_that_serves_it(reader, tmp_path):
    """T40. One line per server, and what the draft would take from its target is said for the draft itself."""
    make_target(tmp_path / "target")
    target = describe(tmp_path / "target")
    head = initial_head(for_target(target), target, None, "random", 0)
    folder = checkpoint.export(head, tmp_path / "my head", target, reader=reader)
    kind, faults = check.check(folder, str(target.path), reader)
    assert faults == []
    line = check.sound(kind, folder, str(target.path), reader).splitlines()[1]
    assert line == launch_line(reader, target.path, folder)
    words = shlex.split(launch_line(reader, target.path, folder, 4, attention_backend="TRITON_MLA"))
    given = dict(zip(words, [*words[1:], ""], strict=True))
    if reader == "vllm":
        draft = json.loads(given["--speculative-config"])
        assert words[:3] == ["vllm", "serve", str(target.path)]
        assert draft == {
            "method": "eagle3", "model": str(folder), "num_speculative_tokens": 4, "attention_backend": "TRITON_MLA",
        }  # fmt: skip
        return
    assert given["--speculative-draft-model-path"] == str(folder) and given["--speculative-algorithm"] == "EAGLE3"
    assert (given["--speculative-num-steps"], given["--speculative-num-draft-tokens"]) == ("4", "5")
    assert given["--speculative-draft-model-quantization"] == "unquant"
    assert given["--speculative-draft-attention-backend"] == "TRITON_MLA"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_knows_every_word_of_its_line():
    """T40. A parse without an engine, from its source: the flags of `vllm serve`, and the fields of its speculative configuration."""
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    flags, fields = (root / "engine/arg_utils.py").read_text(), (root / "config/speculative.py").read_text()
    words = shlex.split(launch_line("vllm", "target", "head"))
    assert all(f'"{word}"' in flags for word in words if word.startswith("--"))
    assert all(f"    {key}: " in fields for key in json.loads(words[-1]))
    assert '"eagle3"' in fields


def test_a_tied_target_lends_its_embedding_as_lm_head(tmp_path):
    """T43. No lm_head tensor in the checkpoint: the embedding is it, in the head's start and in the labels; never random."""
    make_target(tmp_path / "target")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    file = tmp_path / "target" / "config.json"
    with pytest.raises(BadInput, match="does not tie"):
        describe(file.parent).load_tensor("lm_head")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    target = describe(file.parent)
    assert target.num_layers == N and torch.equal(target.load_tensor("lm_head"), target.load_tensor("embed_tokens"))
    d2t = torch.tensor([1, 1, 3])
    head = initial_head(for_target(target, draft_vocab_size=3), target, d2t, "random", 0)
    assert torch.equal(head.lm_head.weight, tensors["model.embed_tokens.weight"][[1, 2, 5]])
    output = TargetOutput.of(target, head.target_ids)
    assert torch.equal(output.lm_head, tensors["model.embed_tokens.weight"])
    folder = checkpoint.export(head, tmp_path / "head", target)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_cut_vocabulary_without_its_map_is_neither_built_nor_exported(tmp_path, monkeypatch):
    """T48. Without d2t a server takes draft ids for target ids, silently."""
    with pytest.raises(BadInput, match="needs its d2t"):
        Head(toy_config(), torch.zeros(V, H))
    head = toy_head(toy_config())
    monkeypatch.setattr(checkpoint, "map_tensors", lambda _: {})
    with pytest.raises(BadInput, match="d2t is missing"):
        checkpoint.export(head, tmp_path / "head", toy_target(head))
    assert list(tmp_path.iterdir()) == []


def test_an_exported_map_gives_back_the_targets_ids(tmp_path):
    """T49. From the file alone: the ids of the head, in both directions, and a map of ids instead of offsets is named."""
    head = toy_head(toy_config())
    folder = checkpoint.export(head, tmp_path / "head", toy_target(head))
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(20) + tensors["d2t"]
    assert ids.tolist() == head.target_ids.tolist() == tensors["t2d"].nonzero().squeeze(1).tolist()
    assert 9 not in ids.tolist() and ids.max() == 21
    retensor(folder, put("d2t", lambda _: ids))
    assert any("d2t" in f for f in check_head(folder))
