"""Acceptance: one definition, hand results for the simulation, and what walking changes."""

import pytest
import torch
from heads import ToyStore, toy_config, toy_head, toy_row

from kimi_eagle.acceptance import statistics as stats
from kimi_eagle.acceptance.simulate import draft_chains, greedy_tokens, simulate
from kimi_eagle.acceptance.statistics import RequestCounts
from kimi_eagle.eagle3.loss import TargetOutput
from kimi_eagle.errors import BadInput


def test_served_counts_give_one_plus_accepted_over_drafts():
    requests = [RequestCounts.of("a", [10, 10, 10], [6, 3, 1]), RequestCounts.of("b", [10, 10, 10], [4, 2, 1])]
    summary = stats.summarize(requests)
    assert summary["acceptance_length"] == pytest.approx(1 + (10 + 5 + 2) / 20)
    assert summary["unconditional"] == pytest.approx([0.5, 0.25, 0.1])
    assert summary["conditional"] == pytest.approx([0.5, 0.5, 0.4])
    assert summary["per_position"][1] == {"drafted": 20, "accepted": 5, "tested": 10}
    assert summary["drafts"] == 20 and summary["requests"] == 2
    assert stats.acceptance_length([{"drafted": 20, "accepted": 10}, {"drafted": 20, "accepted": 5}]) == pytest.approx(
        1.75
    )


def test_positions_that_recorded_text_could_not_test_are_left_out_of_the_conditional_rate():
    counts = [{"drafted": 10, "accepted": 8, "tested": 10}, {"drafted": 10, "accepted": 3, "tested": 4}]
    conditional, unconditional = stats.rates(counts)
    assert conditional == pytest.approx([0.8, 0.75]) and unconditional == pytest.approx([0.8, 0.6])


def test_everything_and_nothing_accepted():
    assert stats.acceptance_length([{"drafted": 5, "accepted": 5}] * 3) == 4.0
    assert stats.acceptance_length([{"drafted": 5, "accepted": 0}] * 3) == 1.0
    with pytest.raises(BadInput, match="no draft"):
        stats.summarize([RequestCounts.of("a", [0], [0])])
    with pytest.raises(BadInput, match="exceeds"):
        RequestCounts.of("a", [3, 3], [2, 3])


def test_interval_resamples_requests_and_covers_the_length():
    same = [RequestCounts.of(str(i), [10], [5]) for i in range(6)]
    assert stats.interval(same) == [1.5, 1.5]  # equal requests: resampling them changes nothing
    mixed = [RequestCounts.of(str(i), [10], [10 * (i % 2)]) for i in range(20)]
    low, high = stats.interval(mixed)
    assert low < 1.5 < high and high - low > 0.3  # 20 requests, not 200 tokens
    assert stats.interval(mixed) == [low, high]


def simulate_with(monkeypatch, drafts, choice, tokens, prompt, walk=False, reference="greedy"):
    """Run simulate() with the drafted tokens and the target's choices given."""
    row = toy_row(len(tokens), answer_from=prompt)
    row.token_ids = torch.tensor(tokens)
    monkeypatch.setattr("kimi_eagle.acceptance.simulate.draft_chains", lambda *_: torch.tensor(drafts))
    head, choices = toy_head(toy_config()), {"a": torch.tensor(choice)}
    (counted,) = simulate(ToyStore(row), head, None, len(drafts[0]), greedy=choices, walk=walk, reference=reference)
    return counted


def test_hand_result_on_eight_tokens(monkeypatch):
    """Tokens 10..17, prompt of 3; the text is greedy, so choice[p] is token p + 1. Chains start at t = 2..5.

    t=2 drafts 14 15 99: two accepted. t=3 drafts 99 ..: none. t=4 drafts 16 17 (18): two, the third is past the end.
    t=5 drafts 17: one, the rest is past the end.
    """
    tokens = list(range(10, 18))
    drafts = [[14, 15, 99], [99, 16, 17], [16, 17, 18], [17, 18, 19]]
    counted = simulate_with(monkeypatch, drafts, [*tokens[1:], -1], tokens, 3)
    assert (counted.drafted, counted.tested, counted.accepted) == ([4, 4, 4], [4, 2, 1], [3, 2, 0])


def test_the_walk_starts_where_a_server_would(monkeypatch):
    """Start at t=2: two accepted and a bonus token, so the next start is t=5, where one is accepted."""
    tokens = list(range(10, 18))
    drafts = [[14, 15, 99], [99, 16, 17], [16, 17, 18], [17, 18, 19]]
    counted = simulate_with(monkeypatch, drafts, [*tokens[1:], -1], tokens, 3, walk=True)
    assert (counted.drafted, counted.tested, counted.accepted) == ([2, 2, 2], [2, 1, 1], [2, 1, 0])


def test_sampled_text_ends_what_can_be_tested(monkeypatch):
    """The target would have said 50 where the sampled text says 14: accepting 50 leaves nothing to test after it."""
    tokens, choice = list(range(10, 18)), [*range(11, 18), -1]
    choice[3] = 50
    drafts = [[50, 15, 16], [15, 16, 17], [16, 17, 0], [17, 0, 0]]
    greedy = simulate_with(monkeypatch, drafts, choice, tokens, 3)
    assert (greedy.tested, greedy.accepted) == ([4, 2, 1], [4, 2, 1])
    recorded = simulate_with(monkeypatch, drafts, choice, tokens, 3, reference="recorded")
    assert (recorded.tested, recorded.accepted) == ([4, 2, 1], [3, 2, 1])


def test_a_choice_outside_the_draft_vocabulary_is_a_miss():
    head, row = toy_head(toy_config()), toy_row(10, answer_from=4)
    lm_head = torch.zeros(32, 16)
    lm_head[9] = row.hidden_states[:, -1].mean(0) * 0 + 1.0  # id 9 is not in the draft vocabulary
    states = row.hidden_states.clone()
    states[:, -1] = states[:, -1].abs()
    row.hidden_states = states
    output = TargetOutput(torch.ones(16), lm_head, 1e-5, head.target_ids)
    store = ToyStore(row)
    assert greedy_tokens(store, output)["a"].tolist() == [-1, -1, -1, 9, 9, 9, 9, 9, 9, -1]
    (counted,) = simulate(store, head, output, 2)
    assert counted.accepted == [0, 0] and counted.drafted == [5, 5]


def test_chains_feed_back_the_heads_own_tokens():
    head, row = toy_head(toy_config()), toy_row(9, answer_from=4)
    aux, tokens = row.hidden_states[:, :-1], row.token_ids.long()
    chains = draft_chains(head, aux, tokens, torch.tensor([3, 4]), 3)
    alone = draft_chains(head, aux[:6], tokens[:6], torch.tensor([4]), 3)
    assert chains[1].tolist() == alone[0].tolist()  # what follows the origin's next token is never looked at
    changed = tokens.clone()
    changed[6:] = 0
    assert draft_chains(head, aux, changed, torch.tensor([4]), 3).tolist() == alone.tolist()


def test_samples_without_an_origin_are_left_out():
    head = toy_head(toy_config())
    store = ToyStore(toy_row(6, answer_from=6, sample_id="none"), toy_row(6, answer_from=5, sample_id="one"))
    assert simulate(store, head, None, 2, reference="recorded") == []
