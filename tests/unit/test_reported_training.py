"""Faults that others reported of data and training (T61 to T71), each under its number, on the toy lab."""

import json
import math
import resource

import psutil
import pytest
import torch
from heads import ToyStore, toy_row
from labs import lines, make_lab, settings
from safetensors.torch import load_file

from kimi_eagle.eagle3.loss import LOSSES, TargetOutput
from kimi_eagle.errors import StageFailed
from kimi_eagle.notebook.stage import _match_units
from kimi_eagle.train import train
from kimi_eagle.training import loop, rows, run_state
from kimi_eagle.training.data_facts import POSITIONS, data_facts
from kimi_eagle.training.device import peak_memory_mb
from kimi_eagle.training.loop import Trainer
from kimi_eagle.training.row_loss import row_loss

torch.set_num_threads(1)  # toy sizes: threads only wait for each other


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("lab"))


def loss_of(trainer: Trainer, row) -> tuple[float, list[int]]:
    scales = [1.0] * trainer.config.ttt_steps
    value, counts = row_loss(trainer.head, trainer.output, row, len(scales), "kl", scales)
    return float(value.detach()), counts.trained


def drawn_store(temperature: float, samples: int = 12, length: int = 60) -> tuple[ToyStore, TargetOutput]:
    """Rows whose answers are drawn from the target's own distributions at `temperature` (0: foreign, uniform tokens)."""
    generator = torch.Generator().manual_seed(3)
    output = TargetOutput(torch.ones(16), torch.randn(32, 16, generator=generator), 1e-5, torch.arange(32))
    stored = [toy_row(length, 4, seed=i, sample_id=f"s{i}") for i in range(samples)]
    for row in stored:
        log_p = output.draft_log_probs(row.hidden_states[:-1, -1])
        odds = (log_p / temperature).softmax(-1) if temperature else torch.ones_like(log_p)
        row.token_ids[1:] = torch.multinomial(odds, 1, generator=generator).squeeze(1).int()
    return ToyStore(*stored), output


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.01])
def test_answers_of_the_target_itself_are_known_as_such(temperature):
    """T61. Drawn from the target at any temperature up to 1, an answer costs no more than the target's own entropy."""
    found = data_facts(*drawn_store(temperature))
    assert found["samples"] == 12 and found["own_answers"] is True
    assert found["surprise_nats"] < found["entropy_nats"] + 0.2 and found["entropy_nats"] > 0.5


def test_answers_of_another_author_are_known_as_such():
    """T61. Other text is dearer; a figure by hand on one token, and no answer at all is not taken for an own one."""
    store, output = drawn_store(0)
    found = data_facts(store, output)
    assert found["own_answers"] is False and found["surprise_nats"] > found["entropy_nats"] + 0.5
    one = ToyStore(toy_row(5, answer_from=4))
    log_p = output.draft_log_probs(one.row("a").hidden_states[3:4, -1])[0]
    by_hand = data_facts(one, output)
    assert by_hand["surprise_nats"] == pytest.approx(-float(log_p[int(one.row("a").token_ids[4])]), rel=1e-5)
    assert by_hand["entropy_nats"] == pytest.approx(-float((log_p.exp() * log_p).sum()), rel=1e-5)
    assert data_facts(ToyStore(toy_row(5, answer_from=5)), output)["own_answers"] is False
    assert POSITIONS > 12 * 56  # the stores above are looked at in full


def test_the_report_says_how_many_samples_and_whose_answers(lab, tmp_path):
    """T61. In the figures that a stage hands to the report, and in the log; kept over a restart."""
    result = train(settings(lab, tmp_path / "run", epochs=1))
    figures, units = result.figures()
    assert figures["data"]["samples"] == 40 and figures["data"]["own_answers"] is True
    assert _match_units(figures, units)["data"]["own_answers"] == "true/false"
    assert lines(tmp_path / "run")[0]["data"] == figures["data"]
    assert train(settings(lab, tmp_path / "run", epochs=1)).figures()[0]["data"] == figures["data"]


def test_an_evaluation_in_between_changes_nothing(lab, tmp_path):
    """T62. Train, evaluate, train: the same loss, the same next step, and the head is back in training mode."""
    plain, between = (Trainer(settings(lab, tmp_path / name)) for name in ("a", "b"))
    row = rows.load(between.store, between.batches[0][1][0], torch.device("cpu"), torch.float32)
    before = loss_of(between, row)
    between.evaluate(between.head)
    assert not between.head.training and loss_of(between, row) == before
    steps = [[t._step(*t.batches[i]) for i in range(2)] for t in (plain, between)]
    between.evaluate(between.head)
    after = [t._step(*t.batches[2])["loss"] for t in (plain, between)]
    assert [s["loss"] for s in steps[0]] == [s["loss"] for s in steps[1]] and after[0] == after[1]
    assert between.head.training
    for one, other in zip(plain.head.parameters(), between.head.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_one_fully_masked_row_in_a_batch_changes_nothing(loss, lab, tmp_path, monkeypatch):
    """T65. Beside rows that are trained it adds nothing; a batch of nothing else moves no weight and gives no NaN."""
    masked = {"t0"}
    load = rows.load

    def with_masks(store, pieces, *arguments):
        row = load(store, pieces, *arguments)
        return row._replace(loss_mask=row.loss_mask & (pieces[0].sample_id not in masked))

    monkeypatch.setattr(rows, "load", with_masks)
    length = len(Trainer(settings(lab, tmp_path / "x")).store.row("t0").token_ids)
    empty, good = [rows.Piece("t0", 0, length)], [rows.Piece("t1", 0, 6), rows.Piece("t2", 0, 6)]
    alone, beside = (Trainer(settings(lab, tmp_path / n, loss=loss)) for n in ("a", "b"))
    one, two = alone._step(0, [good]), beside._step(0, [empty, good])
    assert two["loss"] == one["loss"] > 0 and two["steps"] == one["steps"] and math.isfinite(two["gradient_norm"])
    weights = [p.detach().clone() for p in beside.head.parameters()]
    nothing = beside._step(0, [empty, empty])
    assert nothing["loss"] == 0 and nothing["gradient_norm"] == 0 and nothing["steps"][0]["trained"] == 0
    assert all(torch.equal(p, w) for p, w in zip(beside.head.parameters(), weights, strict=True))


def test_a_cut_state_is_passed_over_for_the_one_before_it(tmp_path):
    """T67. Half a file is no state, at whatever place it was cut; with none left the run begins anew."""
    for step in (1, 2):
        run_state.save(tmp_path, {"step": step, "digest": "d", "head": {"w": torch.full((50,), float(step))}})
    newest = tmp_path / "state-00000002.pt"
    whole = newest.read_bytes()
    assert run_state.newest(tmp_path, "d")["step"] == 2
    for kept in (0, 10, len(whole) // 2, len(whole) - 1):
        newest.write_bytes(whole[:kept])
        found = run_state.newest(tmp_path, "d")
        assert found["step"] == 1 and found["head"]["w"].tolist() == [1.0] * 50
    (tmp_path / "state-00000001.pt").write_bytes(b"")
    assert run_state.newest(tmp_path, "d") is None


def test_every_step_logs_its_peak_memory(lab, tmp_path):
    """T68. In MB of the process on a CPU; recomputation, the way to less, leads to the same head."""
    result = train(settings(lab, tmp_path / "run", epochs=1))
    logged = [e["peak_memory_mb"] for e in lines(tmp_path / "run") if "loss" in e]
    assert len(logged) == result.steps and logged == sorted(logged)
    held, peak = psutil.Process().memory_info().rss, peak_memory_mb(torch.device("cpu")) * 1e6
    assert 1e8 < held <= peak and logged[-1] * 1e6 <= peak
    assert peak == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, rel=0.005)  # Linux: KiB
    less = train(settings(lab, tmp_path / "less", epochs=1, recompute=True))
    kept, again = (load_file(r.head / "model.safetensors") for r in (result, less))
    for name, tensor in kept.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_the_longest_row_goes_first(lab, tmp_path, monkeypatch):
    """T69. Before any step, and trained in full, so that too little memory ends the run at once; it leaves no trace."""
    trainer, seen = Trainer(settings(lab, tmp_path / "a")), []
    longest = max(sum(p.end - p.begin for p in pieces) for _, planned in trainer.batches for pieces in planned)
    original = loop.row_loss

    def noted(head, output, row, *arguments):
        seen.append((len(row.tokens), bool(row.loss_mask.all()), trainer.step))
        return original(head, output, row, *arguments)

    monkeypatch.setattr(trainer.parallel, "_loss", noted)
    before = [p.detach().clone() for p in trainer.head.parameters()]
    trainer._rehearse()
    assert seen == [(longest, True, 0)] and max(size for size, *_ in seen) == longest
    assert all(p.grad is None and torch.equal(p, w) for p, w in zip(trainer.head.parameters(), before, strict=True))
    trainer.run()
    assert seen[1] == (longest, True, 0) and not all(full for _, full, _ in seen[2:])
    assert max(size for size, *_ in seen) == longest


def test_too_little_memory_is_said_before_the_first_step(lab, tmp_path, monkeypatch):
    """T69. One sentence with what to change, the allocator's setting among it."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(loop, "row_loss", full)
    with pytest.raises(StageFailed, match=r"row_tokens.*PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        train(settings(lab, tmp_path / "run"))
    assert not [e for e in lines(tmp_path / "run") if "loss" in e]


def test_the_head_is_chosen_by_simulated_acceptance_and_not_by_loss(lab, tmp_path, monkeypatch):
    """T70. Acceptance falls after the second evaluation while the loss goes on falling: the second head is kept."""
    lengths, weights = iter([1.5, 2.5, 2.0, 1.9]), []

    def evaluate(trainer, head):
        weights.append(trainer.head.fc.weight.detach().clone())
        return {"acceptance_length": next(lengths), "interval": [1.0, 3.0], "per_position": []}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    result = train(settings(lab, tmp_path / "run", epochs=4))
    losses = [e["loss"] for e in lines(tmp_path / "run") if "loss" in e]
    assert len(weights) == 4 and min(losses) == min(losses[result.best_step :]) < min(losses[: result.best_step])
    assert result.acceptance_length == 2.5 and result.best_step == result.steps // 2
    kept = load_file(result.head / "model.safetensors")["fc.weight"]
    assert torch.equal(kept, weights[1]) and not torch.equal(kept, weights[3])
    note = json.loads((result.head / "config.json").read_text())["kimi_eagle"]
    assert (note["step"], note["simulated_acceptance_length"]) == (result.best_step, 2.5)


@pytest.mark.parametrize("train_lm_head", [True, False])
def test_the_log_says_which_tensors_are_trained(train_lm_head, lab, tmp_path):
    """T71. The first line: every tensor's name, shape and whether it is trained; after the run exactly those have moved."""
    config = settings(lab, tmp_path / "run", epochs=1, train_lm_head=train_lm_head)
    start = {n: p.detach().clone() for n, p in Trainer(config).head.named_parameters()}
    result = train(config)
    first = lines(tmp_path / "run")[0]
    assert first["step"] == 0
    table = {entry["name"]: entry for entry in first["parameters"]}
    assert table.pop("embed_tokens.weight") == {"name": "embed_tokens.weight", "shape": [20, 32], "trained": False}
    assert {n: tuple(e["shape"]) for n, e in table.items()} == {n: tuple(p.shape) for n, p in start.items()}
    assert table["lm_head.weight"]["trained"] is train_lm_head
    kept = load_file(result.head / "model.safetensors")
    assert {n for n, e in table.items() if e["trained"]} == {n for n in start if not torch.equal(kept[n], start[n])}
    trained = sum(math.prod(e["shape"]) for e in table.values() if e["trained"])
    assert trained == result.trainable_parameters < result.parameters + train_lm_head
