"""Served counts and comparisons, on hand-made results."""

import pytest

from kimi_eagle.acceptance import serve, statistics
from kimi_eagle.acceptance.serve import Greedy
from kimi_eagle.chat import Answer, Prompt
from kimi_eagle.errors import BadInput


def test_counts_come_from_the_tokens_each_step_emitted():
    """Prefill emits 1; then 3 (2 accepted), 1 (0), 4 (3); the last step is cut by the text's end and not counted."""
    (counts,) = serve.request_counts([Greedy("a", [], [1, 3, 1, 4, 2], [])], 3)
    assert counts.drafted == [3, 3, 3] and counts.accepted == [2, 2, 1]
    # 3 verify steps emitted 3 + 1 + 4 = 8 tokens: 8 / 3 per target forward
    assert statistics.acceptance_length(statistics.per_position([counts])) == pytest.approx(8 / 3)


def test_engine_counters_are_differences():
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    before = {"vllm:spec_decode_num_drafts": 10, name: [4, 2]}
    after = {"vllm:spec_decode_num_drafts": 30, name: [14, 5]}
    assert serve.engine_counts(before, after, 2) == [{"drafted": 20, "accepted": 10}, {"drafted": 20, "accepted": 3}]
    assert serve.engine_counts({}, after, 2)[0] == {"drafted": 30, "accepted": 14}


def test_a_first_difference_is_a_tie_only_where_the_gap_is_tiny():
    plain = [Greedy(n, [1, 2, 3], [1] * 3, [1.0, g, 1.0]) for n, g in (("same", 1.0), ("tie", 5e-5), ("wrong", 0.2))]
    other = [Greedy("same", [1, 2, 3], [], []), Greedy("tie", [1, 9, 3], [], []), Greedy("wrong", [1, 9, 3], [], [])]
    found = serve.compare(plain, other)
    assert found["identical"] == 1
    assert [t["prompt"] for t in found["ties"]] == ["tie"]
    assert found["different"] == [{"prompt": "wrong", "token": 1, "gap_nats": 0.2}]


def test_a_shorter_text_is_a_difference():
    found = serve.compare([Greedy("a", [1, 2, 3], [], [1.0] * 3)], [Greedy("a", [1, 2], [], [])])
    assert found["different"][0]["token"] == 2


def test_a_trained_prompt_is_refused(tmp_path):
    import json
    from dataclasses import asdict

    trained = Answer("p1.0", "p1", "train", [4, 5, 6, 9], 3, "stop")
    file = tmp_path / "answers.jsonl"
    file.write_text("{}\n" + json.dumps(asdict(trained)) + "\n")
    serve.refuse_trained_prompts([Prompt("p2", "heldout", [4, 5, 7], "")], file)
    with pytest.raises(BadInput, match="training store"):
        serve.refuse_trained_prompts([Prompt("renamed", "heldout", [4, 5, 6], "")], file)
