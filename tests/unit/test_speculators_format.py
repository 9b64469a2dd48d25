"""Heads in speculators' format: names and keys, what is refused, and the same logits in speculators' own model."""

import json
from pathlib import Path

import pytest
import torch
from heads import H, V, toy_config, toy_head
from safetensors.torch import load_file, save_file
from test_eagle3_checkpoint import edit, put, retensor, toy_target
from typer.testing import CliRunner

from kimi_eagle.cli import app
from kimi_eagle.eagle3 import checkpoint
from kimi_eagle.eagle3.checkpoint import check_head
from kimi_eagle.eagle3.contract import IDS
from kimi_eagle.eagle3.model import start
from kimi_eagle.errors import BadInput
from kimi_eagle.target import describe

YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def named_target(head, name="some/target", **text):
    target = toy_target(head, **text)
    target.name, target.architecture, target.path = name, "LlamaForCausalLM", Path("targets") / name
    return target


def target_on_disk(folder: Path, head):
    """A checkpoint folder with what speculators' loader opens: the config and the three outer tensors."""
    folder.mkdir()
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "vocab_size": V}
    text |= {"num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 128}
    rope = {"rope_scaling": head.config.rope_parameters} if head.config.rope_parameters["rope_type"] == "yarn" else {}
    (folder / "config.json").write_text(json.dumps(text | rope))
    outer = {"model.embed_tokens.weight": head.embedding, "lm_head.weight": torch.randn(V, H)}
    save_file(outer | {"model.norm.weight": torch.ones(H)}, folder / "model.safetensors")
    return describe(folder)


@pytest.fixture
def exported(tmp_path):
    head = toy_head(toy_config(layer_ids=(1, 2, 4), norm_before_residual=True))
    return checkpoint.export(head, tmp_path / "head", named_target(head), reader="speculators"), head


def test_names_and_keys_are_what_speculators_and_vllm_read(exported):
    folder, head = exported
    written, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert written["speculators_model_type"] == "eagle3" and written[IDS] == [1, 2, 4]
    assert written["draft_vocab_size"] == 20 and written["norm_before_residual"] is True
    assert written["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["LlamaForCausalLM"],
    }
    (method,) = written["speculators_config"]["proposal_methods"]
    assert method == {"proposal_type": "greedy", "speculative_tokens": 3}
    layer = written["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["vocab_size"] == V and layer["head_dim"] == 8
    assert layer["num_hidden_layers"] == 1 and layer["num_aux_hidden_states"] == 3 and IDS not in layer
    projections = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    assert set(tensors) == {f"layers.0.{n}.weight" for n in projections + norms} | {
        "fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
    }  # fmt: skip
    assert torch.equal(tensors["embed_tokens.weight"], head.embedding)
    assert check_head(folder, named_target(head), "speculators") == []


def test_vllm_reads_the_head_from_it(exported):
    folder, _ = exported
    base = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    written = json.loads((folder / "config.json").read_text())
    read = base.SpeculatorsConfig.extract_transformers_pre_trained_config(written)
    base.SpeculatorsConfig.validate_speculators_config(written)
    assert read["architectures"] == ["Eagle3LlamaForCausalLM"] and read["num_aux_hidden_states"] == 3
    assert read["norm_before_residual"] is True and read[IDS] == [1, 2, 4] and read["draft_vocab_size"] == 20


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}], ids=str)
def test_a_head_read_back_is_the_same(tmp_path, flags):
    head = toy_head(toy_config(rope_parameters=YARN, **flags))
    folder = checkpoint.export(head, tmp_path / "head", named_target(head, rope_scaling=YARN), reader="speculators")
    again = checkpoint.load(folder, named_target(head, rope_scaling=YARN))
    assert again.config == head.config
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in head.state_dict().items())


def test_what_the_format_cannot_say_is_refused(tmp_path):
    head = toy_head(toy_config("mla"))
    with pytest.raises(BadInput, match="latent attention"):
        checkpoint.export(head, tmp_path / "head", named_target(head), reader="speculators")
    with pytest.raises(BadInput, match="vllm, sglang, speculators"):
        checkpoint.export(toy_head(toy_config()), tmp_path / "head", reader="trt")
    assert list(tmp_path.iterdir()) == []


def test_one_format_is_not_taken_for_the_other(exported, tmp_path):
    folder, head = exported
    (said,) = check_head(folder, reader="vllm")
    assert "speculators' format (which vLLM reads too)" in said
    plain = checkpoint.export(head, tmp_path / "plain", named_target(head))
    assert "plain format" in check_head(plain, reader="speculators")[0]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"norm_before_residual": ...}, "norm_before_residual is missing"),
        ({"transformer_layer_config": ...}, "transformer_layer_config is missing"),
        ({"speculators_config": {}}, "speculators_config lacks"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {}}}, "or verifier"),
        ({"speculators_model_type": "dflash"}, "only eagle3"),
        ({IDS: ...}, f"{IDS} is missing"),
        ({IDS: [1, 2, 9]}, "do not all exist"),
        ({"draft_vocab_size": 21}, "lm_head.weight has shape"),
    ],
    ids=str,
)
def test_a_wrong_config_is_named(exported, changes, word):
    folder, head = exported
    edit(folder, **changes)
    faults = check_head(folder, named_target(head), "speculators")
    assert any(word in fault for fault in faults), faults


def test_tensors_that_speculators_needs_and_vllm_does_not_are_named(tmp_path):
    head = toy_head(toy_config())
    folder = checkpoint.export(head, tmp_path / "head", named_target(head, "folder"), reader="speculators")
    written = json.loads((folder / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "targets/folder"
    retensor(folder, lambda t: t.pop("t2d"))
    assert any("t2d is missing" in f for f in check_head(folder, reader="speculators"))
    retensor(folder, put("embed_tokens.weight", lambda _: torch.zeros(4, H)))
    assert any("embed_tokens" in f for f in check_head(folder, reader="speculators"))
    with pytest.raises(BadInput, match="give the target"):
        checkpoint.export(head, tmp_path / "other", reader="speculators")


def test_the_command_writes_a_head_for_another_reader_and_back(exported, tmp_path, monkeypatch):
    folder, head = exported
    monkeypatch.setattr("kimi_eagle.target.describe", lambda name: named_target(head, "folder"))
    monkeypatch.setattr("kimi_eagle.check.sound", lambda *a: "sound")
    for source, out, reader in ((folder, "plain", "sglang"), (tmp_path / "plain", "again", "speculators")):
        done = CliRunner().invoke(app, ["export", str(source), str(tmp_path / out), "--target", "t", "--for", reader])
        assert done.exit_code == 0 and check_head(tmp_path / out, reader=reader) == [], done.output
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    done = CliRunner().invoke(app, ["check", str(tmp_path / "again"), "--for", "speculators"])
    assert done.exit_code == 0, done.output


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"rope_parameters": YARN},
        {"layer_ids": (1, 2, 3, 4)},
    ],
    ids=str,
)
def test_speculators_own_model_computes_the_same_logits_at_every_step(tmp_path: Path, flags, monkeypatch):
    """Four steps of the training-time test over two texts in one row; float32, worst relative error of a step's logits below 1e-5."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    eagle3 = pytest.importorskip("speculators.models.eagle3", reason="speculators is not installed here")
    head = toy_head(toy_config(**flags)).eval()
    target = target_on_disk(tmp_path / "target", head)
    folder = checkpoint.export(head, tmp_path / "head", target, reader="speculators")
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = eagle3.Eagle3DraftModel.from_pretrained(folder, config=config).eval()
    assert torch.equal(model.d2t, torch.as_tensor(head.target_ids - torch.arange(20)))
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    torch.manual_seed(1)
    tokens, aux, T, steps = torch.randint(0, V, (14,)), torch.randn(14, len(head.config.layer_ids), H), 14, 4
    documents = torch.tensor([0] * 8 + [1] * 6)
    with torch.no_grad():
        # speculators' rows hold state t beside token t + 1
        model(aux.flatten(1)[None, :-1], tokens[None, 1:], documents[None, :-1], ttt_steps=steps)
        origins = torch.arange(T - 1)
        chain = start(head, aux, tokens, documents, origins)
        for step in range(steps):
            if step:
                chain.advance(tokens[(origins + 1 + step).clamp(max=T - 1)])
            kept = origins[origins < T - 1 - step]
            ours, theirs = head.lm_head(chain.hidden)[kept], found[step][kept]
            worst = float(((ours - theirs).norm(dim=-1) / ours.norm(dim=-1)).max())
            print(f"{flags} step {step}: {worst:.1e}")
            assert worst < 1e-5
