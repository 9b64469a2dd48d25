"""Rows and masks: token boundaries, splits by hash, resume of answers."""

import pytest

from kimi_eagle import chat


class Tokenizer:
    """A template of three pieces: one token per character."""

    def apply_chat_template(self, messages, **_):
        return {"input_ids": [1, *(ord(c) for m in messages for c in m["content"]), 2]}


class Target:
    """Only what chat asks of a target."""

    tokenizer = Tokenizer()

    def identity(self):
        return {"config_sha256": "x"}


class Engine:
    """Answers with its request's length; counts what it was asked."""

    def __init__(self, fail_after=10**9):
        self.asked, self.fail_after = [], fail_after

    def generate(self, requests, **options):
        self.asked += [r["id"] for r in requests]
        if len(self.asked) > self.fail_after:
            raise RuntimeError("killed")
        return [{"id": r["id"], "token_ids": [7, r["seed"] % 50, 2], "finish_reason": "stop"} for r in requests]


def ask(folder, engine, count=5, **changes):
    rows = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(count)]
    prompts = chat.render(Target(), rows, 0.3, 100)
    settings = {"answer_tokens": 4, "temperature": 0.5, "samples": 2, "seed": 0, "group": 2} | changes
    return chat.answer_prompts(Target(), engine, prompts, folder / "answers.jsonl", **settings)


def test_exactly_the_answers_tokens_are_trained(tmp_path):
    """T53: three prompt tokens and three answer tokens: the labels are the answer's tokens, all of them, nothing else."""
    answer = chat.Answer("a", "p", "train", [5, 6, 7, 8, 9, 2], 3, "stop")
    assert answer.loss_mask == [False] * 3 + [True] * 3
    assert answer.answer_ids == [8, 9, 2]
    for row in ask(tmp_path, Engine()):
        assert row.token_ids[row.prompt_tokens :] == row.answer_ids and sum(row.loss_mask) == 3


def test_a_prompt_stays_on_its_side_of_the_split_whatever_else_is_there():
    alone = chat.split_of("say 3", 0.3)
    assert {chat.split_of("say 3", 0.3) for _ in range(3)} == {alone}
    share = sum(chat.split_of(f"prompt {i}", 0.3) == "heldout" for i in range(2000)) / 2000
    assert abs(share - 0.3) < 0.04
    assert all(chat.split_of(f"prompt {i}", 0.0) == "train" for i in range(50))


def test_answers_are_resumed_and_each_sample_has_its_own_seed(tmp_path):
    with pytest.raises(RuntimeError):
        ask(tmp_path, Engine(fail_after=4))
    file = tmp_path / "answers.jsonl"
    file.write_bytes(file.read_bytes()[:-7])  # the last line is torn, as a kill leaves it
    engine = Engine()
    rows = ask(tmp_path, engine)
    assert len(rows) == 10 and len({r.sample_id for r in rows}) == 10
    assert len(engine.asked) == 7  # four were done, the torn one of them is asked again
    assert [r.token_ids for r in ask(tmp_path, Engine(fail_after=0))] == [r.token_ids for r in rows]
    assert len({r.token_ids[-2] for r in rows}) > 3


def test_other_settings_begin_a_new_file(tmp_path):
    ask(tmp_path, Engine())
    engine = Engine()
    ask(tmp_path, engine, temperature=0.9)
    assert len(engine.asked) == 10


def test_a_loop_has_few_distinct_bigrams():
    assert chat.distinct_bigram_ratio([1, 2] * 20) < 0.1
    assert chat.distinct_bigram_ratio(list(range(40))) == 1.0
