"""Faults that others reported of templates, masks and tokenizers (T52 to T59), each under its number, on Kimi's toy tokenizer."""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

from kimi_eagle import chat, conversations, paths, turns
from kimi_eagle.target import describe

os.environ["HF_HUB_OFFLINE"] = "1"
FIRST = 1792  # the first special id of the toy vocabulary; Kimi-K2.5's is 163,584
END, USER, ASSISTANT, SYSTEM, MIDDLE, THINK, UNTHINK = (FIRST + i for i in (2, 3, 4, 10, 17, 22, 23))
HEAD = "<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.role }}<|im_middle|>"
SPLIT = (  # reasoning from its field or from tags in the content, as several families' templates find it
    "{%- set r = m.reasoning_content or '' -%}{%- set c = m.content -%}"
    "{%- if '</think>' in c -%}{%- set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}"
    "{%- set c = c.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
)
# The opener is part of the generation prompt, every turn keeps its reasoning, and one without any has its block closed at once.
OPENER = (
    "{%- for m in messages -%}" + SPLIT + HEAD + "{%- if m.role == 'assistant' -%}<think>{{ r }}</think>{%- endif -%}"
    "{{ c }}<|im_end|>{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>{%- endif -%}"
)
# The target opens its block itself; turns before the last user turn lose it; a newline follows each turn.
LATEST = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages if m.role == 'user' -%}{%- set ns.last = ns.last + 1 -%}"
    "{%- endfor -%}{%- set seen = namespace(n=-1) -%}{%- for m in messages -%}"
    + SPLIT
    + "{%- if m.role == 'user' -%}{%- set seen.n = seen.n + 1 -%}{%- endif -%}"
    + HEAD
    + "{%- if m.role == 'assistant' and seen.n == ns.last -%}<think>{{ '\n' + r + '\n</think>\n\n' }}{%- endif -%}{{ c }}<|im_end|>{{ '\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)


def kimi(folder: Path, template: str = ""):
    """The toy Kimi (tokenizer and configurations), with `template` in place of its own."""
    shutil.copytree(describe("tiny-kimi").path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return describe(folder)


def talk(*pairs: tuple, **more) -> dict:
    """A conversation of (question, answer) pairs; an answer is a text or a dict of a turn's fields."""
    messages = []
    for question, answer in pairs:
        answer = answer if isinstance(answer, dict) else {"content": answer}
        messages += [{"role": "user", "content": question}, {"role": "assistant", **answer}]
    return {"id": "t", "messages": messages, **more}


def ids(target, text: str) -> list[int]:
    return target.tokenizer.encode(text, add_special_tokens=False)


def trained(target, row: dict) -> tuple[list[list[int]], turns.Rendered]:
    """The tokens of each trained span, and the rendering."""
    found = turns.Renderer(target).render(row)
    return [found.token_ids[begin:end] for begin, end in found.spans], found


def one_pass(target, messages: list[dict]) -> list[int]:
    return list(target.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])


def test_a_kimi_chat_of_two_turns_has_the_mask_of_a_hand_count(tmp_path):
    """T52: no family's marker is searched for: "abc| |12" and "de|." and each one's <|im_end|>, counted by hand."""
    target = kimi(tmp_path / "kimi")
    row = talk(("Hi", "abc 12"), ("x", "de."), id="two")
    row["messages"].insert(0, {"role": "system", "content": "S"})
    made = turns.prepare(target, [row], 0.0, 100, 10)
    answer = made.answers[0]
    first, second = ([*ids(target, text), END] for text in ("abc 12", "de."))
    assert [answer.token_ids[b:e] for b, e in answer.spans] == [first, second]
    assert sum(answer.loss_mask) == len(first) + len(second) == (3 + 1) + (2 + 1)
    for begin, _ in answer.spans:
        assert answer.token_ids[begin - 1] == MIDDLE and not answer.loss_mask[begin - 1]
    assert answer.token_ids[0] == SYSTEM and answer.token_ids.count(USER) == answer.token_ids.count(ASSISTANT) == 2
    assert answer.token_ids == one_pass(target, row["messages"]) and made.unaligned == made.dropped == {}


def test_reasoning_in_its_field_in_tags_or_absent_is_found_behind_the_prompts_opener(tmp_path):
    """T54: the <think> opener is the template's, so it is never a label; what the target wrote after it is, all of it."""
    target = kimi(tmp_path / "kimi", OPENER)
    written = [*ids(target, "why"), UNTHINK, *ids(target, "so"), END]
    for answer in ({"content": "so", "reasoning_content": "why"}, {"content": "<think>why</think>so"}):
        spans, found = trained(target, talk(("q", answer)))
        assert spans == [written] and found.token_ids[found.spans[0][0] - 1] == THINK
    spans, found = trained(target, talk(("q", "so")))
    assert spans == [[*ids(target, "so"), END]] and found.token_ids[found.spans[0][0] - 2 :][:2] == [THINK, UNTHINK]


def test_reasoning_that_the_template_loses_or_doubles_is_refused_by_name(tmp_path):
    """T54: Kimi's toy template knows no reasoning field; a template that opens a block itself doubles one in the content."""
    assert trained(kimi(tmp_path / "a"), talk(("q", {"content": "so", "reasoning_content": "why"})))[1].left_out == [
        (2, turns.DROPPED)
    ]
    own = (describe("tiny-kimi").path / "chat_template.jinja").read_text()
    cutting = own.replace("{{ message['content'] }}", "{{ message['content'].split('</think>')[-1] }}")
    for gap in ("", "\n\n"):
        row = talk(("q", f"<think>why</think>{gap}so"))
        assert trained(kimi(tmp_path / f"c{len(gap)}", cutting), row)[1].left_out == [(2, turns.DROPPED)]
    blunt = OPENER.replace(SPLIT, "{%- set r = m.reasoning_content or '' -%}{%- set c = m.content -%}")
    row = talk(("q", {"content": "<think>why</think>so"}))
    assert trained(kimi(tmp_path / "b", blunt), row)[1].left_out == [(2, turns.DOUBLED)]


def test_an_empty_think_block_is_supervised_only_where_the_data_hold_it(tmp_path):
    """T55: the template inserts one before an answer without reasoning; the same tokens in the data are the target's own."""
    target = kimi(tmp_path / "kimi", LATEST)
    bare, found = trained(target, talk(("q", "so it is")))
    block = ids(target, "<think>\n\n</think>\n\n")
    assert bare == [[*ids(target, "so it is"), END]]
    begin = found.spans[0][0]
    assert found.token_ids[begin - len(block) : begin] == block and found.token_ids[begin - len(block) - 1] == MIDDLE
    held, same = trained(target, talk(("q", "<think>\n\n</think>\n\nso it is")))
    assert same.token_ids == found.token_ids and held == [[*block, *ids(target, "so it is"), END]]


def test_an_inserted_block_whose_end_cannot_be_told_is_refused(tmp_path):
    """T55: the answer's own spaces merge with those behind the block: no boundary, so no mask."""
    target = kimi(tmp_path / "kimi", LATEST.replace("</think>\n\n'", "</think>  '"))
    assert trained(target, talk(("q", "so")))[0] == [[*ids(target, " so"), END]]
    assert trained(target, talk(("q", "  so")))[1].left_out == [(2, turns.UNKNOWN)]


def test_three_turns_with_reasoning_are_one_rendering(tmp_path):
    """T56: nothing is rendered turn by turn and glued; where every turn keeps its reasoning every turn is trained on."""
    target = kimi(tmp_path / "kimi", OPENER)
    row = talk(*((f"q{i}", {"content": f"a{i}", "reasoning_content": f"r{i}"}) for i in range(3)))
    spans, found = trained(target, row)
    assert found.token_ids == one_pass(target, row["messages"])
    assert spans == [[*ids(target, f"r{i}"), UNTHINK, *ids(target, f"a{i}"), END] for i in range(3)]


def test_turns_that_later_ones_rewrite_are_left_out_and_counted(tmp_path):
    """T56: a template that drops earlier reasoning: the last turn is trained on, those it rewrote are named."""
    target = kimi(tmp_path / "kimi", LATEST)
    row = talk(*((f"q{i}", {"content": f"a{i}", "reasoning_content": f"r{i}"}) for i in range(3)))
    spans, found = trained(target, row)
    assert found.token_ids == one_pass(target, row["messages"]) and found.left_out == [
        (2, turns.REWRITTEN),
        (4, turns.REWRITTEN),
    ]
    assert spans == [[THINK, *ids(target, "\nr2\n"), UNTHINK, *ids(target, "\n\na2"), END]]
    later = {**row, "messages": [*row["messages"], {"role": "user", "content": "what the last answer never saw"}]}
    assert trained(target, later)[1] == found
    made = turns.prepare(target, [row], 0.0, 200, 10)
    assert made.unaligned == {turns.REWRITTEN: ["t, turn 2", "t, turn 4"]} and "turn 4" in made.text()


def test_a_slow_tokenizer_works_in_several_processes_without_offsets(tmp_path):
    """T58: Kimi's tokenizer has no fast form and no offsets; processes give the same rows in the same order."""
    target = kimi(tmp_path / "kimi")
    assert not target.tokenizer.is_fast
    library = (paths.REPOSITORY / "kimi_eagle").rglob("*.py")
    assert not [f.name for f in library if "offsets_mapping" in f.read_text() or "char_to_token" in f.read_text()]
    rows = [talk((f"say {i}", f"here is {i} " * (1 + i % 5)), id=f"t{i}") for i in range(40)]
    rows[7] = {"id": "none", "messages": rows[7]["messages"][:1]}
    alone, shared = (turns.prepare(target, rows, 0.2, 60, 10, processes=n) for n in (1, 2))
    assert shared == alone and shared.dropped == {"it has no answer": ["none"]} and len(alone.answers) == 39


STUB = """
from transformers import PreTrainedTokenizer
class Stub(PreTrainedTokenizer):
    def __init__(self, **kwargs):
        super().__init__(eos_token="e", **kwargs)
    @property
    def vocab_size(self):
        return 1
    def get_vocab(self):
        return {"e": 0, **self._added_tokens_encoder}
    def _tokenize(self, text, **_):
        return list(text)
    def _convert_token_to_id(self, token):
        return 0
    def _convert_id_to_token(self, index):
        return "e"
"""


def test_code_of_the_checkpoint_is_trusted_wherever_one_is_loaded(tmp_path):
    """T59: a tokenizer that exists only as code refuses without the flag; every loading of a user's checkpoint passes it."""
    from transformers import AutoTokenizer

    folder = tmp_path / "stub"
    folder.mkdir()
    (folder / "stub.py").write_text(STUB)
    size = dict.fromkeys(("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"), 1)
    (folder / "config.json").write_text(json.dumps({"model_type": "stub", **size}))
    wanted = {"tokenizer_class": "Stub", "auto_map": {"AutoTokenizer": ["stub.Stub", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(wanted))
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoTokenizer.from_pretrained(folder)
    assert type(describe(folder).tokenizer).__name__ == "Stub" and describe(folder).stop_ids == {0}
    own = ("made_targets.py", "reference.py")  # checkpoints that this project made itself, without code
    for file in (paths.REPOSITORY / "kimi_eagle").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            loads = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            if loads and call.func.attr == "from_pretrained" and ast.unparse(call.func.value).startswith("Auto"):
                given = {k.arg for k in call.keywords}
                assert file.name in own or "trust_remote_code" in given or None in given, f"{file.name}:{call.lineno}"


def test_the_target_stops_where_either_configuration_says(tmp_path):
    """Kimi's tokenizer ends at [EOS], its generation configuration at <|im_end|>: either closes a turn."""
    assert kimi(tmp_path / "kimi").stop_ids == {FIRST + 1, END}


def test_openings_of_held_out_conversations_are_prompts_to_serve(tmp_path):
    """Notebook 05 serves what comes before the first answer, with the generation prompt, once per text."""
    target = kimi(tmp_path / "kimi", OPENER)
    rows = [talk(("same", "one answer here")), talk(("same", "and another one"), id="u")]
    made = turns.prepare(target, rows, 0.9, 100, 10)
    (asked,) = made.prompts
    assert asked.token_ids == chat.render_chat(target, rows[0]["messages"][:1]) and asked.token_ids[-1] == THINK
    assert turns.prepare(target, rows, 0.9, 100, 100 - len(asked.token_ids) + 1).prompts == []  # no room to answer it
    assert {a.split for a in made.answers} == {asked.split} and conversations.opening(rows[0]) == asked.text
