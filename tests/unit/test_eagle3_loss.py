"""Losses: values by hand, gradients by finite differences, slices, masks, and the target's own output."""

import math

import pytest
import torch
from heads import toy_config, toy_head, toy_row

from kimi_eagle.eagle3 import loss as losses
from kimi_eagle.eagle3.loss import LOSSES, TargetOutput, sliced_loss
from kimi_eagle.eagle3.model import Chain
from kimi_eagle.training.row_loss import row_loss
from kimi_eagle.training.rows import Packed


def distributions(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_losses_by_hand():
    p, q = distributions([0.5, 0.5, 0.0]), distributions([0.25, 0.25, 0.5])
    log_p, log_q = p.clamp_min(1e-30).log(), q.log()
    assert losses.kl(p, log_p, log_q).item() == pytest.approx(math.log(2))
    assert losses.ce(
        distributions([0.1, 0.9]), distributions([0.1, 0.9]).log(), distributions([0.5, 0.5]).log()
    ).item() == pytest.approx(math.log(2))
    assert losses.tv(p, log_p, log_q).item() == pytest.approx(0.5)
    assert losses.nla(p, log_p, log_q).item() == pytest.approx(math.log(2))
    weight = math.exp(-3 * 0.5)
    assert losses.lk(p, log_p, log_q).item() == pytest.approx(weight * math.log(2) + (1 - weight) * 0.5)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"lk"}))  # lk holds its weight constant, which differences do not
def test_gradients_match_finite_differences(name, monkeypatch):
    """T62. The hand-written backward pass of every loss."""
    monkeypatch.setattr(losses, "SLICE", 3)
    torch.manual_seed(1)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    log_p = torch.randn(5, 6, dtype=torch.float64).log_softmax(-1)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # differences need double precision throughout

    def total(h, w):
        return sliced_loss(name, h, w, lambda part: log_p[part])[0].double()

    assert torch.autograd.gradcheck(total, (hidden, weight), eps=1e-5, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_slices_do_not_change_the_loss_or_its_gradients(name, monkeypatch):
    torch.manual_seed(2)
    log_p = torch.randn(50, 20).log_softmax(-1)
    base, weight = torch.randn(50, 8), torch.randn(20, 8)
    found = []
    for size in (7, 1000):
        monkeypatch.setattr(losses, "SLICE", size)
        h, w = base.clone().requires_grad_(), weight.clone().requires_grad_()
        value, matched = sliced_loss(name, h, w, lambda part: log_p[part])
        value.backward()
        found.append((value.detach(), h.grad, w.grad, matched))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    reference_h, reference_w = base.clone().requires_grad_(), weight.clone().requires_grad_()
    LOSSES[name](log_p.exp(), log_p, (reference_h @ reference_w.T).log_softmax(-1)).sum().backward()
    torch.testing.assert_close(found[0][1], reference_h.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][2], reference_w.grad, rtol=1e-4, atol=1e-5)


def test_a_frozen_lm_head_gets_no_gradient_and_the_same_hidden_gradient():
    hidden, weight, log_p = (
        torch.randn(4, 8, requires_grad=True),
        torch.randn(20, 8),
        torch.randn(4, 20).log_softmax(-1),
    )
    sliced_loss("kl", hidden, weight, lambda part: log_p[part])[0].backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_target_output_is_norm_then_lm_head_restricted_and_renormalised():
    torch.manual_seed(3)
    norm, lm_head, states = torch.rand(8) + 0.5, torch.randn(30, 8), torch.randn(6, 8) * 3
    kept = torch.tensor([1, 4, 9, 29])
    output = TargetOutput(norm, lm_head, 1e-5, kept)
    logits = (states / (states.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm) @ lm_head.T
    expected = logits.softmax(-1)[:, kept]
    torch.testing.assert_close(output.draft_log_probs(states).exp(), expected / expected.sum(-1, keepdim=True))
    assert output.arg_max(states).tolist() == logits.argmax(-1).tolist()
    assert output.arg_max(states[:0]).tolist() == []


def packed(row):
    return Packed(
        row.token_ids.long(), torch.zeros(len(row.token_ids), dtype=torch.long), row.loss_mask, row.hidden_states
    )


def toy_output(head):
    torch.manual_seed(4)
    return TargetOutput(torch.ones(16), torch.randn(32, 16), 1e-5, head.target_ids)


def test_a_row_without_a_trained_position_gives_a_zero_and_no_nan():
    """T65. Nothing to divide by in this row."""
    head = toy_head(toy_config())
    value, counts = row_loss(head, toy_output(head), packed(toy_row(10, answer_from=10)), 3, "kl", [1.0] * 3)
    assert value.item() == 0 and counts.trained == [0, 0, 0] and not value.requires_grad


def test_row_loss_counts_and_equals_a_plain_sum(monkeypatch):
    head, row = toy_head(toy_config()), toy_row(12, answer_from=6)
    output = toy_output(head)
    value, counts = row_loss(head, output, packed(row), 2, "kl", [0.5, 0.25])
    assert counts.trained == [6, 5]  # labels 6..11, then 7..11 for chains that step 0 trains
    assert value.item() == pytest.approx(float(0.5 * counts.loss[0] + 0.25 * counts.loss[1]), rel=1e-5)
    monkeypatch.setattr("kimi_eagle.training.row_loss.CACHE_BYTES", 0)
    again, _ = row_loss(head, output, packed(row), 2, "kl", [0.5, 0.25])
    assert again.item() == pytest.approx(value.item(), rel=1e-5)


def test_what_is_fed_and_what_is_asked_for_at_every_step(monkeypatch):
    """T63. State, token and label of steps 0 to 2 on a row of eight tokens, seen where they are used: the text's own tokens
    are fed at every step, and the label is the target's distribution of the token after the one fed."""
    head, row = toy_head(toy_config()), toy_row(8, answer_from=3)
    row.token_ids = torch.arange(8)  # a token says its own place
    output = toy_output(head)
    fed, states, labels = [], [], []
    embed, finish, log_probs = head.embed, Chain._finish, output.draft_log_probs

    def asked(given):
        labels.append([int((row.hidden_states[:, -1] == s).all(-1).nonzero()) + 1 for s in given])
        return log_probs(given)

    def finished(chain, inputs, residual):
        states.append(residual)
        finish(chain, inputs, residual)
        states.append(chain.fed_back)

    monkeypatch.setattr(head, "embed", lambda tokens: fed.append(tokens.tolist()) or embed(tokens))
    monkeypatch.setattr(Chain, "_finish", finished)
    monkeypatch.setattr(output, "draft_log_probs", asked)
    monkeypatch.setattr("kimi_eagle.training.row_loss.CACHE_BYTES", 0)  # so that labels are asked for step by step
    row_loss(head, output, packed(row), 3, "kl", [1.0] * 3)
    assert fed == [
        [1, 2, 3, 4, 5, 6, 7, 7],
        [3, 4, 5, 6, 7],
        [4, 5, 6, 7, 7],
    ]  # origins 1 to 5, the last fed beyond the text
    assert labels == [[3, 4, 5, 6, 7], [4, 5, 6, 7], [5, 6, 7]]
    torch.testing.assert_close(states[0], head.combine(row.hidden_states[:, :-1])[1:6])  # step 0: the target's states
    assert states[2] is states[1] and states[4] is states[3]  # later steps: what the head itself gave


def test_labels_are_the_targets_distribution_one_state_further_on():
    """A head that already gives the target's distribution of token t + 2 has no loss: the alignment is state t + 1."""
    head, row = toy_head(toy_config()), toy_row(8, answer_from=3)
    output = toy_output(head)
    seen = []
    original = output.draft_log_probs
    output.draft_log_probs = lambda states: seen.append(states) or original(states)
    row_loss(head, output, packed(row), 1, "kl", [1.0])
    torch.testing.assert_close(torch.cat(seen), row.hidden_states[2:7, -1])  # predicts tokens 3..7
