"""Training on a toy target's stored states: learning, exact resume after a kill, packing, processes, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from heads import toy_config, toy_head
from labs import H, N, V, lines, make_lab, make_store, settings
from safetensors.torch import load_file, save_file

from kimi_eagle.eagle3.checkpoint import check_head, convert, load
from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.target import describe
from kimi_eagle.train import train
from kimi_eagle.training import rows, run_state
from kimi_eagle.training.initial import WIDENED, copy_layer, initial_head
from kimi_eagle.training.loop import Trainer
from kimi_eagle.training.optimizer import learning_rate_factor
from kimi_eagle.training.row_loss import row_loss

torch.set_num_threads(1)  # toy sizes: threads only wait for each other


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("lab"))


def test_training_learns_and_leaves_a_sound_head(lab, tmp_path):
    result = train(settings(lab, tmp_path / "run", epochs=16))
    assert check_head(result.head, describe(lab / "target")) == []
    assert result.acceptance_length > 2.0  # the cycle is predictable: nearly every draft token can be right
    entries = lines(tmp_path / "run")
    steps = [e for e in entries if "loss" in e]
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert [e["step"] for e in steps] == list(range(1, result.steps + 1))
    assert all(s["matched"] <= s["trained"] for e in steps for s in e["steps"])
    evaluations = [e["evaluation"]["acceptance_length"] for e in entries if "evaluation" in e]
    assert result.acceptance_length == max(evaluations) and len(evaluations) == 16
    assert result.trained_tokens == sum(e["steps"][0]["trained"] for e in steps)
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    assert not list((tmp_path / "run").glob(".head*"))


def test_every_trained_label_is_an_answer_token_counted_once_an_epoch(lab, tmp_path):
    trainer = Trainer(settings(lab, tmp_path / "run", epochs=1))
    trained = sum(trainer._step(*batch)["steps"][0]["trained"] for batch in trainer.batches)
    assert trained == sum(int(row.loss_mask.sum()) for row in trainer.store)


def test_a_finished_run_is_returned_without_training_again(lab, tmp_path):
    config = settings(lab, tmp_path / "run", epochs=1)
    first = train(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    second = train(config)
    assert second.resumed and second.acceptance_length == first.acceptance_length
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_killed_run_resumes_to_the_very_same_weights(lab, tmp_path):
    """T67. SIGKILL in the middle; what a second start ends with equals an undisturbed run, to the last bit, as do the metrics."""
    whole = train(settings(lab, tmp_path / "whole", epochs=12))
    config = settings(lab, tmp_path / "killed", epochs=12, checkpoint_seconds=0.001)
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    process = subprocess.Popen([sys.executable, "-m", "kimi_eagle.train", str(file)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while len(list((tmp_path / "killed" / "state").glob("state-*.pt"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    states = sorted((tmp_path / "killed" / "state").glob("state-*.pt"))
    assert states
    states[-1].write_bytes(states[-1].read_bytes()[:-64])  # the newest is cut: the generation before it is used
    again = train(config)
    assert again.steps == whole.steps and again.resumed
    for name, tensor in load_file(whole.head / "model.safetensors").items():
        assert torch.equal(tensor, load_file(again.head / "model.safetensors")[name]), name
    timed = ("seconds", "tokens_per_second", "peak_memory_mb")
    plain = [
        [{k: v for k, v in e.items() if k not in timed} for e in lines(tmp_path / run)] for run in ("whole", "killed")
    ]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_take_the_same_steps_as_one_with_twice_the_rows(lab, tmp_path, parallel):
    """The loss curve to 1e-5, the weights, and what the run returns; the gradients' norm, since Adam hides their scale."""
    one = train(settings(lab, tmp_path / "one", epochs=1, batch_rows=2))
    two = train(settings(lab, tmp_path / "two", epochs=1, batch_rows=1, nproc=2, parallel=parallel))
    assert two.steps == one.steps and two.trained_tokens == one.trained_tokens and two.parameters == one.parameters
    for name in ("loss", "gradient_norm"):
        curves = [[e[name] for e in lines(tmp_path / run) if name in e] for run in ("one", "two")]
        assert curves[1] == pytest.approx(curves[0], rel=1e-5) and len(curves[0]) == one.steps
    for name, tensor in load_file(one.head / "model.safetensors").items():
        torch.testing.assert_close(load_file(two.head / "model.safetensors")[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_killed_run_of_shards_resumes_to_the_very_same_weights(lab, tmp_path):
    """T67 with FSDP2: what two processes ended with after a SIGKILL equals an undisturbed run of theirs, to the last bit."""
    whole = train(settings(lab, tmp_path / "whole", epochs=3, batch_rows=1, nproc=2, parallel="fsdp2"))
    config = settings(
        lab, tmp_path / "killed", epochs=3, batch_rows=1, nproc=2, parallel="fsdp2", checkpoint_seconds=0.001
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    command = [sys.executable, "-m", "kimi_eagle.train", str(tmp_path / "config.json")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while len(list((tmp_path / "killed" / "state").glob("state-*.pt"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = train(config)
    assert again.resumed and again.steps == whole.steps
    for name, tensor in load_file(whole.head / "model.safetensors").items():
        assert torch.equal(tensor, load_file(again.head / "model.safetensors")[name]), name
    curves = [[e["loss"] for e in lines(tmp_path / run) if "loss" in e] for run in ("whole", "killed")]
    assert curves[0] == curves[1]


def test_low_precision_products_keep_float32_master_weights(lab, tmp_path):
    plain = Trainer(settings(lab, tmp_path / "a"))
    low = Trainer(settings(lab, tmp_path / "b", precision="bfloat16"))
    figures = [t._step(*t.batches[0]) for t in (plain, low)]
    assert (
        figures[1]["loss"] == pytest.approx(figures[0]["loss"], rel=0.02) and figures[1]["loss"] != figures[0]["loss"]
    )
    assert {p.dtype for p in low.head.parameters()} == {torch.float32}


def test_flex_attention_is_refused_where_it_cannot_train(lab, tmp_path):
    with pytest.raises(MissingCapability, match="flex"):
        Trainer(settings(lab, tmp_path / "a", attention="flex"))


def test_a_padded_row_has_the_same_loss(lab, tmp_path):
    trainer = Trainer(settings(lab, tmp_path / "a"))
    pieces = trainer.batches[0][1][0]
    device, found = torch.device("cpu"), []
    for size in (0, 100):
        row = rows.load(trainer.store, pieces, device, torch.float32, size)
        assert len(row.tokens) == (size or sum(p.end - p.begin for p in pieces))
        value, counts = row_loss(trainer.head, trainer.output, row, 3, "kl", [1.0] * 3)
        found.append((float(value.detach()), counts.trained))
    assert found[1][1] == found[0][1] and found[1][0] == pytest.approx(found[0][0], rel=1e-5)


def test_other_settings_or_data_in_the_same_folder_are_refused(lab, tmp_path):
    train(settings(lab, tmp_path / "run", epochs=1))
    with pytest.raises(BadInput, match="other settings"):
        train(settings(lab, tmp_path / "run", epochs=1, learning_rate=0.03))


def test_stores_and_maps_that_do_not_fit_are_refused(lab, tmp_path):
    with pytest.raises(BadInput, match="in both stores"):
        train(settings(lab, tmp_path / "a", held_out_store=lab / "train"))
    other = describe(lab / "target")
    make_store(tmp_path / "more", other, "m", 5, 3)
    with pytest.raises(BadInput, match="data_sha256"):
        train(settings(lab, tmp_path / "b", train_store=tmp_path / "more"))
    manifest = {
        "layer_ids": [2, 4, 5, N],
        "layer_id_convention": "vllm",
        "hidden_size": H,
        "target": {"config_sha256": "0"},
    }
    with StoreWriter(tmp_path / "foreign", manifest) as writer:
        writer.add("f0", torch.arange(5), torch.ones(5, dtype=torch.bool), torch.randn(5, 4, H))
    with pytest.raises(BadInput, match="config_sha256"):
        train(settings(lab, tmp_path / "c", train_store=tmp_path / "foreign"))
    with pytest.raises(BadInput, match="loss"):
        settings(lab, tmp_path / "d", loss="mse")
    with pytest.raises(BadInput, match="ttt_steps"):
        settings(lab, tmp_path / "d", ttt_steps=0)


def test_packing_keeps_every_token_once_and_rows_within_their_size(lab):
    store = Store(lab / "train")
    planned = rows.plan(store, 16, seed=3, epoch=0)
    seen = Counter((p.sample_id, i) for row in planned for p in row for i in range(p.begin, p.end))
    assert set(seen.values()) == {1} and len(seen) == store.tokens
    assert max(sum(p.end - p.begin for p in row) for row in planned) <= 16
    assert planned == rows.plan(store, 16, seed=3, epoch=0) != rows.plan(store, 16, seed=3, epoch=1)
    row = rows.load(store, planned[0], torch.device("cpu"), torch.float32)
    assert row.documents.tolist() == [n for n, p in enumerate(planned[0]) for _ in range(p.begin, p.end)]
    assert row.states.shape == (len(row.tokens), 4, H)


def test_initial_weights_come_from_the_target(lab):
    trainer = Trainer(settings(lab, lab / "unused"))
    target, head = describe(lab / "target"), trainer.head
    assert torch.equal(head.lm_head.weight, target.load_tensor("lm_head")[head.target_ids])
    assert torch.equal(head.norm.weight, target.load_tensor("norm"))
    source = load_file(lab / "target" / "model.safetensors")
    prefix = f"model.layers.{N - 1}."
    assert torch.equal(head.layers[0].mlp.up_proj.weight, source[prefix + "mlp.up_proj.weight"])
    assert torch.equal(head.layers[0].self_attn.q_proj.weight[:, H:], source[prefix + "self_attn.q_proj.weight"])
    plain = initial_head(head.config, target, None if trainer.map is None else trainer.map.d2t, "random", 0)
    assert not torch.equal(plain.layers[0].mlp.up_proj.weight, source[prefix + "mlp.up_proj.weight"])


@pytest.mark.parametrize("reader", ["vllm", "speculators"])
def test_a_run_starts_from_another_head_over_another_vocabulary(lab, tmp_path, reader):
    first = train(settings(lab, tmp_path / "first", epochs=1))
    target = describe(lab / "target")
    folder = convert(first.head, tmp_path / "published", target, reader)
    trainer = Trainer(settings(lab, tmp_path / "a", initial_head=folder, vocab_map=None))
    published = load(folder, target)
    assert torch.equal(trainer.head.fc.weight, published.fc.weight)
    assert torch.equal(trainer.head.lm_head.weight[published.target_ids], published.lm_head.weight)
    (missing,) = set(range(V)) - set(published.target_ids.tolist())
    assert torch.equal(trainer.head.lm_head.weight[missing], target.load_tensor("lm_head")[missing])
    with pytest.raises(BadInput, match="initial head: it has fc_norm False where True is trained"):
        Trainer(settings(lab, tmp_path / "b", initial_head=folder, fc_norm=True))


def test_of_an_mla_layer_with_experts_only_the_attention_is_taken(tmp_path):
    """Attention of the latent kind fits an MLA head; experts do not fit its dense MLP, which stays as it was."""
    config = toy_config("mla")
    head, donor = toy_head(config), toy_head(config, seed=5).layers[0].state_dict()
    prefix = "language_model.model.layers.3."
    names = [n for n in donor if n.startswith("self_attn.")]
    half = {n: donor[n][:, 16:] if n.split(".")[1] in WIDENED else donor[n] for n in names}
    tensors = {prefix + n: t.contiguous() for n, t in half.items()}
    tensors |= {
        prefix + "input_layernorm.weight": torch.full((16,), 3.0),
        "language_model.model.norm.weight": torch.ones(16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    target = SimpleNamespace(
        path=tmp_path,
        weight_map=dict.fromkeys(tensors, "model.safetensors"),
        tensor_name=lambda part: f"language_model.model.{part}.weight",
    )
    before = head.layers[0].mlp.up_proj.weight.clone()
    assert copy_layer(head, target, 3) == ["self_attn"]
    assert torch.equal(
        head.layers[0].self_attn.kv_a_proj_with_mqa.weight[:, 16:], half["self_attn.kv_a_proj_with_mqa.weight"]
    )
    assert torch.equal(head.layers[0].self_attn.kv_b_proj.weight, half["self_attn.kv_b_proj.weight"])
    assert head.layers[0].hidden_norm.weight.tolist() == [3.0] * 16
    assert torch.equal(head.layers[0].mlp.up_proj.weight, before)


def test_learning_rate_warms_up_and_ends_at_its_fraction():
    factors = [learning_rate_factor(step, 100, 0.1, 0.05) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True) and factors[-1] == pytest.approx(0.05, abs=0.001)


def test_states_are_kept_in_two_generations_and_metrics_beyond_them_are_dropped(tmp_path):
    for step in (1, 2, 3):
        run_state.save(tmp_path, {"step": step, "digest": "d"})
    assert sorted(os.listdir(tmp_path)) == ["state-00000002.pt", "state-00000003.pt"]
    assert run_state.newest(tmp_path, "d")["step"] == 3
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics = run_state.Metrics(file, 2)
    metrics.add(step=3, loss=1.0)
    metrics.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "loss": 1.0},
    ]


def test_the_command_ends_with_one_sentence_and_the_right_code(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"target": "x"}')
    done = subprocess.run([sys.executable, "-m", "kimi_eagle.train", str(file)], capture_output=True, text=True)
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: training: train_store")
        and "Traceback" not in done.stderr
    )
