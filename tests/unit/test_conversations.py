"""Conversations in: three shapes out of three kinds of files, faults named by line, and rows of several spans down to training."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from test_reported_conversations import END, kimi, talk

from kimi_eagle import chat, conversations, estimate, tables, turns, vocab_map
from kimi_eagle.acceptance import simulate
from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.extract import budget
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.notebook import preflight
from kimi_eagle.target import describe
from kimi_eagle.training import row_loss, rows

ASK, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def put(folder: Path, *lines: object, name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return folder / name


def test_the_three_shapes_become_one(tmp_path):
    said = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    full = [{"role": "system", "content": [{"type": "text", "text": "s"}]}, ASK, {**REPLY, "reasoning": "r"}]
    tool = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "f:0"}]},
        {"role": "tool", "content": "1"},
    ]
    file = put(
        tmp_path, {"id": 7, "prompt": "q", "messages": full}, {"conversations": said}, {"id": 7, "messages": tool}
    )
    first, second, third = conversations.read(file)
    assert (
        [m["role"] for m in first["messages"]]
        == [m["role"] for m in second["messages"]]
        == ["system", "user", "assistant"]
    )
    assert (first["id"], second["id"], third["id"]) == ("7", "p2", "7.3") and first["messages"][0]["content"] == "s"
    assert first["messages"][2] == {**REPLY, "reasoning_content": "r"} and third["messages"][1]["content"] == ""
    assert (
        conversations.answered([first]) and conversations.opening(first) == "q" and conversations.characters(first) > 3
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1: not a JSON object"),
        (["[1]"], "line 1: not a JSON object"),
        ([{"prompt": " "}], "line 1: its prompt is empty"),
        (["", {"text": "x"}], "line 2: no `prompt`"),
        ([""], "holds no prompts"),
        ([{"prompt": "x"}, {"messages": [ASK, REPLY]}], "line 2: a conversation among prompts"),
        ([{"messages": [ASK, REPLY]}, {"prompt": "x"}], "line 2: a prompt among conversations"),
        ([{"messages": "x"}], "line 1: its conversation"),
        ([{"messages": [ASK, {"role": "bot", "content": "x"}]}], "line 1, turn 2: role 'bot'"),
        ([{"messages": [ASK, {"role": "assistant", "content": ""}]}], "turn 2: its content is empty"),
        ([{"messages": [{"role": "user"}]}], "turn 1: its content is not text"),
        ([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], "turn 1: a part"),
        ([{"messages": ["x"]}], "turn 1: not an object"),
        ([{"messages": [ASK, {**REPLY, "reasoning": 3}]}], "turn 2: its reasoning"),
        ([{"conversations": [{"from": "nobody", "value": "x"}]}], "turn 1: from 'nobody'"),
        ([{"messages": [ASK, REPLY], "tools": "{"}], "line 1: its tools"),
    ],
)
def test_every_fault_names_its_line(tmp_path, lines, words):
    with pytest.raises(BadInput, match=words) as error:
        conversations.read(put(tmp_path, *lines))
    assert "rows.jsonl" in str(error.value)


def test_equal_rows_count_once_and_a_line_separator_inside_a_text_ends_nothing(tmp_path):
    file = put(tmp_path, *({"prompt": p} for p in ("a", "b", "a")), '{"prompt": "c\u2028d"}')
    assert [r["prompt"] for r in conversations.read(file)] == ["a", "b", "c\u2028d"]
    assert len(conversations.read(file, 2)) == 2


def test_parquet_gives_the_same_rows_and_names_the_row(tmp_path):
    given = [
        {"id": "x", "messages": [ASK, {**REPLY, "reasoning_content": "r", "name": "n"}]},
        {"id": "y", "messages": [ASK, REPLY]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), tmp_path / "rows.parquet")
    assert conversations.read(tmp_path / "rows.parquet") == conversations.read(put(tmp_path, *given))
    wrong = pyarrow.Table.from_pylist([{"prompt": "x"}, {"prompt": ""}])
    pyarrow.parquet.write_table(wrong, tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match=r"rows\.parquet, row 2"):
        conversations.read(tmp_path / "rows.parquet")
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(BadInput, match="as Parquet"):
        preflight.check({"prompts": str(tmp_path / "rows.parquet")})


def test_what_is_not_there_is_said_before_anything_loads(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name in ("nowhere.jsonl", "data/nowhere.parquet", "/nowhere/at/all"):
        with pytest.raises(BadInput, match="no such file"):
            preflight.check({"prompts": name})
    with pytest.raises(MissingCapability, match="nobody/nothing"):
        preflight.check({"prompts": "nobody/nothing"})


def test_a_data_set_in_the_hubs_cache_needs_no_network(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    given = put(tmp_path, {"messages": [ASK, REPLY]}, {"messages": [ASK, {**REPLY, "content": "b"}]})
    datasets.load_dataset("json", data_files=str(given))
    (built,) = (tmp_path / "cache" / "json").glob("*/*/*/dataset_info.json")
    kept = tmp_path / "cache" / "someone___talks" / "default" / "0.0.0" / built.parent.name
    kept.parent.mkdir(parents=True)
    built.parent.rename(kept)
    (kept / "json-train.arrow").rename(kept / "talks-train.arrow")
    assert conversations.read("someone/talks") == conversations.read(given)
    with pytest.raises(BadInput, match=r"no split test; .* train"):
        conversations.read("someone/talks:test")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return kimi(tmp_path_factory.mktemp("made") / "kimi")


def test_a_cut_inside_an_answer_keeps_its_last_token_as_a_label_and_no_more(target):
    """loss_mask[i] is of token i itself: the cut drops the labels that are not there, and leaves those that are."""
    row = talk(("q", "one two three four five"), ("q", "six"))
    whole = turns.prepare(target, [row], 0.0, 1000, 10).answers[0]
    begin, end = whole.spans[0]
    limit = end - 2
    made = turns.prepare(target, [row], 0.0, limit + 1, 1)
    answer = made.answers[0]
    assert (answer.token_ids, answer.loss_mask) == (whole.token_ids[:limit], whole.loss_mask[:limit])
    assert (
        answer.loss_mask[-1] and answer.finish_reason == "length" and made.cut == ["t"] and END not in answer.answer_ids
    )
    elsewhere = turns.prepare(target, [row], 0.0, end + 4, 1).answers[0]
    assert elsewhere.spans == [(begin, end)] and elsewhere.finish_reason == "stop"


def test_what_cannot_be_trained_on_is_dropped_by_reason_and_name(target):
    given = [talk(("q", "long enough to stay"), id="good"), talk(("q", "x"), id="short")]
    given += [talk(("far " * 60, "long enough"), id="late"), {"id": "silent", "messages": [ASK]}]
    made = turns.prepare(target, given, 0.0, 60, 10)
    assert [a.prompt_id for a in made.answers] == ["good"]
    assert sorted(i for ids in made.dropped.values() for i in ids) == ["late", "short", "silent"]
    assert len(made.dropped) == 3 and all(f"1 ({i})" in made.text() for i in ("short", "late", "silent"))
    assert "nothing is generated" in made.text()
    with pytest.raises(BadInput, match=r"none of 3 conversations .* \(short\)"):
        turns.prepare(target, given[1:], 0.0, 60, 10)


def test_a_template_that_takes_no_such_turn_drops_the_row(target, tmp_path):
    strict = "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system turns') }}{%- endif -%}"
    own = (target.path / "chat_template.jinja").read_text()
    refusing = kimi(tmp_path / "kimi", strict + own)
    row = {"id": "s", "messages": [{"role": "system", "content": "x"}, ASK, REPLY]}
    made = turns.prepare(refusing, [row, talk(("q", "long enough to stay"), id="good")], 0.0, 60, 10)
    assert [r for r in made.dropped if "no system turns" in r] and len(made.answers) == 1


def test_a_turn_without_its_end_or_behind_another_beginning_is_refused(tmp_path):
    own = (describe("tiny-kimi").path / "chat_template.jinja").read_text()
    endless = kimi(tmp_path / "a", own.replace("<|im_end|>", "\n"))
    other = kimi(
        tmp_path / "b", own.replace("<|im_assistant|>assistant<|im_middle|>", "<|im_assistant|>bot<|im_middle|>")
    )
    for folder, reason in ((endless, turns.ENDING), (other, turns.BEGINNING)):
        assert turns.Renderer(folder).render(talk(("q", "a"))).left_out == [(2, reason)]


def test_given_answers_are_written_as_generated_ones_are_and_read_back(target, tmp_path):
    prepared = turns.prepare(target, [talk(("q", "one two"), ("r", "three four"))], 0.0, 100, 10)
    file = tmp_path / "answers.jsonl"
    made = turns.answers(prepared, target, None, file, answer_tokens=3)
    (back,) = chat.read_answers(file)
    assert (back.loss_mask, back.answer_ids) == (made[0].loss_mask, made[0].answer_ids) and len(back.spans) == 2


def test_an_answers_file_of_before_spans_is_read():
    old = {"sample_id": "a", "prompt_id": "p", "split": "train", "token_ids": [5, 6, 7], "prompt_tokens": 2}
    assert chat.Answer(**old, finish_reason="stop").loss_mask == [False, False, True]


def test_two_spans_reach_the_store_the_vocabulary_and_the_training(tmp_path):
    """Store, counts and labels are those of both spans; a chain never leaves one span for the next."""
    answer = chat.Answer("a", "p", "train", [1, 2, 3, 4, 5, 6, 7, 8, 9], 2, "stop", [(2, 4), (6, 9)])
    manifest = {"layer_ids": [1, 2], "hidden_size": 4}
    with StoreWriter(tmp_path / "s", manifest) as writer:
        writer.add("a", torch.tensor(answer.token_ids), torch.tensor(answer.loss_mask), torch.zeros(9, 2, 4))
    store = Store(tmp_path / "s")
    assert store.row("a").loss_mask.tolist() == answer.loss_mask
    counted = vocab_map.count_tokens(store, 10).counts
    assert counted.nonzero().squeeze(1).tolist() == answer.answer_ids == [3, 4, 7, 8, 9]
    packed = rows.load(store, [rows.Piece("a", 0, 9)], torch.device("cpu"), torch.float32)
    labels = [
        [int(t) + 2 + step for t in mask.nonzero()] for step, mask in enumerate(row_loss.trained_positions(packed, 6))
    ]
    # Step 4 from the first label (2) would be label 6, in the next span, over a user's turn that no draft has to guess.
    assert labels == [[2, 3, 6, 7, 8], [3, 7, 8], [8], [], [], []]
    assert simulate.greedy_tokens(store, Chooser())["a"].tolist() == [-1, 0, 0, -1, -1, 0, 0, 0, -1]


class Chooser:
    """A target's output that always chooses token 0."""

    lm_head = torch.zeros(1)

    def arg_max(self, states):
        return torch.zeros(len(states), dtype=torch.int64)


def test_the_view_is_escaped_and_reads_as_plain_text(target):
    row = talk(("<b>q</b>", "a <script>x</script> & b"))
    view = tables.mask_view(target, turns.prepare(target, [row], 0.0, 100, 10).answers[0])
    page = view._repr_html_()
    assert "<script" not in page and "<b>" not in page and "&lt;" in page and "&amp;" in page and "#cfe3f5" in page
    assert repr(view).endswith("[[a <script>x</script> & b<|im_end|>]]") and "<b>q</b><|im_end|>" in repr(view)


def test_an_estimate_counts_conversations_without_answers_to_come(tmp_path):
    from test_estimate import values

    given = values("tiny_kimi.yaml") | {"max_prompts": 0}
    found = {}
    for name, row in (("p", {"prompt": "x" * 350}), ("c", {"messages": [ASK, {**REPLY, "content": "x" * 349}]})):
        found[name] = estimate.estimate(given | {"prompts": str(put(tmp_path, row, name=f"{name}.jsonl"))})
    assert found["p"]["tokens"] == 40 + 100 + given["answer_tokens"] and found["c"]["tokens"] == 2 * 40 + 100
    assert "1 conversations with answers" in estimate.text(found["c"]) and "1 prompts" in estimate.text(found["p"])


def test_reading_rows_needs_no_torch():
    import subprocess

    code = "import sys; from kimi_eagle import conversations; conversations.read('data/prompts.jsonl'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_budget_counts_given_rows_as_they_are_and_wants_both_splits(target):
    given = [talk((f"question {i}", "a long answer"), id=f"t{i}") for i in range(12)]
    prepared = turns.prepare(target, given, 0.5, 100, 10)
    table = budget.table(prepared, 50, 3, 4, 8, "float32")
    assert table["rows"].sum() == 12 and table["tokens at most"].sum() == sum(
        len(a.token_ids) for a in prepared.answers
    )
    with pytest.raises(BadInput, match="heldout side of 12"):
        budget.table(turns.prepare(target, given, 0.0, 100, 10), 50, 3, 4, 8, "float32")


def test_prompts_are_answered_as_before(target):
    prepared = turns.prepare(target, [{"id": "p", "prompt": "say it"}], 0.0, 100, 10)
    assert not prepared.answers and [asdict(p)["prompt_id"] for p in prepared.prompts] == ["p"]
    assert "answered by the target" in prepared.text()
