"""The draft vocabulary: who is kept, ties, padding, identity, coverage."""

import json
from types import SimpleNamespace

import pytest
import torch

from kimi_eagle import chat, conversations, paths, tiny_kimi, vocab_map
from kimi_eagle.errors import BadInput
from kimi_eagle.speedup import vocabulary
from kimi_eagle.target import describe
from kimi_eagle.vocab_map import TokenCounts, build, consistency, count_tokens


def row(sample_id, tokens, mask):
    return SimpleNamespace(
        sample_id=sample_id, token_ids=torch.tensor(tokens), loss_mask=torch.tensor(mask, dtype=torch.bool)
    )


def counts(*values):
    return TokenCounts(torch.tensor(values), "x")


def test_only_trained_positions_are_counted_in_any_order():
    rows = [row("a", [1, 2, 3, 3], [0, 0, 1, 1]), row("b", [3, 5], [1, 0])]
    counted = count_tokens(rows, 8)
    assert counted.counts.tolist() == [0, 0, 0, 3, 0, 0, 0, 0]
    assert count_tokens(rows[::-1], 8).data_sha256 == counted.data_sha256
    assert count_tokens([row("a", [1, 2, 3, 3], [0, 1, 1, 1]), rows[1]], 8).data_sha256 != counted.data_sha256


def test_frequency_with_ties_by_id_and_special_tokens_first():
    made = build(counts(0, 5, 2, 2, 9, 2, 0, 0), 4, special_ids=[7])
    assert made.target_ids.tolist() == [1, 2, 4, 7]
    assert made.d2t.tolist() == [1, 1, 2, 4] and made.d2t.dtype == torch.int64
    assert made.t2d.nonzero().squeeze(1).tolist() == [1, 2, 4, 7]
    assert consistency(made.d2t, made.t2d) == []


def test_fewer_distinct_tokens_than_asked_for_are_padded_by_id():
    """T45. Five distinct tokens, a draft vocabulary of eight, ten target tokens: always the same three are filled in."""
    made = build(counts(0, 0, 0, 1, 0, 1, 1, 1, 1, 0), 8)
    assert made.target_ids.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert build(counts(0, 0, 0, 1, 0, 1, 1, 1, 1, 0), 8).d2t.tolist() == made.d2t.tolist()


def test_padding_rows_beyond_the_tokenizer_are_never_kept():
    counted = counts(3, 2, 1, 0, 0, 0, 0, 0)
    assert build(counted, 5, tokenizer_size=5).target_ids.max() == 4
    with pytest.raises(BadInput, match="to 5"):
        build(counted, 6, tokenizer_size=5)


def test_the_whole_vocabulary_needs_no_offsets_and_too_small_a_one_is_refused():
    whole = build(counts(1, 0, 0, 2), 4, tokenizer_size=3)
    assert whole.d2t.tolist() == [0, 0, 0, 0] and whole.t2d.all()
    with pytest.raises(BadInput, match="special"):
        build(counts(1, 1, 1, 1), 1, special_ids=[0, 1])


def test_a_map_of_other_data_tokenizer_or_size_is_refused(tmp_path):
    """T46. A map says for which tokenizer, data and size it was made, and is loaded for no other."""
    made = build(counts(4, 3, 2, 1), 2, tokenizer_sha256="t")
    file = made.save(tmp_path / "maps")
    again = vocab_map.load(file, data_sha256="x", tokenizer_sha256="t", draft_vocab_size=2, vocab_size=4)
    assert torch.equal(again.d2t, made.d2t) and torch.equal(again.t2d, made.t2d)
    for key, value in {"data_sha256": "y", "tokenizer_sha256": "u", "draft_vocab_size": 3}.items():
        with pytest.raises(BadInput, match=key):
            vocab_map.load(file, **{key: value})
    saved = json.loads(file.with_suffix(".json").read_text())
    assert saved["tokenizer_sha256"] == "t" and saved["data_sha256"] == "x" and saved["draft_vocab_size"] == 2
    changed = build(TokenCounts(torch.tensor([1, 2, 3, 4]), "y"), 2, tokenizer_sha256="t")
    assert changed.save(tmp_path / "maps") == file  # the data changed and the map was made again, in its place
    assert vocab_map.load(file, data_sha256="y").target_ids.tolist() == [2, 3]
    with pytest.raises(BadInput, match="data_sha256"):
        vocab_map.load(file, data_sha256="x")
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(BadInput, match="unreadable"):
        vocab_map.load(file)


def test_every_draft_id_comes_back_from_the_target_vocabulary(tmp_path):
    """T49. For all i t2d[i + d2t[i]] holds, ids are distinct and ascend, and nothing else is marked; also after a save."""
    generator = torch.Generator().manual_seed(0)
    counted = TokenCounts(torch.randint(0, 50, (300,), generator=generator), "x")
    made = build(counted, 90, special_ids=[0, 7, 299])
    for found in (made, vocab_map.load(made.save(tmp_path))):
        ids = [i + int(offset) for i, offset in enumerate(found.d2t)]
        assert ids == sorted(set(ids)) and len(ids) == 90 and {0, 7, 299} <= set(ids)
        assert all(bool(found.t2d[i]) for i in ids) and int(found.t2d.sum()) == 90
        rarest_kept = min(int(counted.counts[i]) for i in ids if i not in (0, 7, 299))
        assert max(int(n) for i, n in enumerate(counted.counts) if i not in ids) <= rarest_kept


def test_special_tokens_are_drafted_though_no_mask_saw_them(tmp_path):
    """T50. Kimi's end of turn, end of text, thinking and tool tokens are in the map at a count of zero."""
    target = describe(tiny_kimi.make(tmp_path / "tiny-kimi"))
    names = ("[EOS]", "<|im_end|>", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_end|>")
    ids = [target.tokenizer.convert_tokens_to_ids(name) for name in names]
    seen = torch.zeros(target.vocab_size, dtype=torch.int64)
    seen[:600] = torch.arange(600, 0, -1)
    held = torch.zeros_like(seen)
    held[[5, 6, ids[1], 1000]] = torch.tensor([4, 3, 2, 1])
    made = vocab_map.for_target(TokenCounts(seen, "x"), target, 512)
    assert len(set(ids)) == len(names) and not seen[ids].any()
    assert made.t2d[ids].all() and made.t2d[:256].all() and not made.t2d[1000]
    table = vocab_map.coverage_by_size(TokenCounts(seen, "x"), TokenCounts(held, "y"), target, [512])
    assert table[0]["held_out"] == pytest.approx(0.9) and table[0]["trained"] < 1.0


@pytest.mark.parametrize("name", ["tiny-kimi", "smollm2"])
def test_every_marker_of_a_tokenizer_is_drafted_at_a_count_of_zero(name, tmp_path):
    """T50. End of text, end and begin of turn, think and tool markers: all that the tokenizer adds, and all that ends an answer."""
    if name == "smollm2" and not (paths.cache() / "targets" / name / "config.json").is_file():
        pytest.skip("the target is not made here; the demo makes it")
    target = describe(tiny_kimi.make(tmp_path / name) if name == "tiny-kimi" else name)
    markers = {
        "tiny-kimi": "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <think> </think> <|tool_call_begin|>",
        "smollm2": "<|endoftext|> <|im_start|> <|im_end|> <repo_name>",
    }
    named = target.tokenizer.convert_tokens_to_ids(markers[name].split())
    wanted = sorted({*named, *target.tokenizer.get_added_vocab().values(), *target.stop_ids})
    seen = torch.arange(target.vocab_size, 0, -1)
    seen[wanted] = 0
    made = vocab_map.for_target(TokenCounts(seen, "x"), target, len(wanted) + 10)
    assert None not in named and len(set(named)) == len(named)
    assert made.t2d[wanted].all() and made.identity["special_tokens"] == len(wanted)


def test_what_ends_an_answer_is_kept_though_the_tokenizer_calls_it_plain():
    """T50. The end of turn that only the generation config names."""

    class Tokenizer:
        """Eight tokens, of which it knows one to be special."""

        all_special_ids = (0,)
        get_added_vocab = dict

        def __len__(self):
            return 8

    target = SimpleNamespace(tokenizer=Tokenizer(), stop_ids={6}, tokenizer_sha256="t")
    assert vocab_map.for_target(counts(0, 9, 8, 7, 0, 0, 0, 0), target, 3).target_ids.tolist() == [0, 1, 6]


def test_coverage_by_kind_of_text_from_the_prompts_file_to_the_answers(tmp_path):
    """T50. The kind of a row follows its prompt, whatever samples it has; what no row says is one line 'all'."""
    given = [
        {"id": "a.1", "prompt": "p", "kind": "code"},
        {"id": "b", "prompt": "q", "category": "prose", "source": "s"},
    ]
    lines = [*given, {"prompt": "r", "source": " "}, {"prompt": "s", "source": 3}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = conversations.read(tmp_path / "p.jsonl")
    conversations.write_kinds(read, tmp_path / "kinds.json")
    said = [chat.Answer(f"{p}.{i}.0f", p, "heldout", [1], 0, "stop") for p in ("a.1", "b", "p3") for i in (0, 1)]
    header = json.dumps({"settings": {}})
    (tmp_path / "answers.jsonl").write_text("\n".join([header, *(json.dumps(vars(a)) for a in said)]))
    kinds = chat.kinds(tmp_path / "answers.jsonl", tmp_path / "kinds.json")
    assert kinds == {"a.1.0.0f": "code", "a.1.1.0f": "code", "b.0.0f": "prose", "b.1.0f": "prose"}
    made = build(counts(9, 8, 7, 0, 0), 3)
    tokens = {"a.1.0.0f": [3, 1], "a.1.1.0f": [3, 3, 1, 1], "b.0.0f": [3, 0, 1, 2, 2, 2], "p3.0.0f": [4, 0]}
    rows = [row(name, ids, [i > 0 for i in range(len(ids))]) for name, ids in tokens.items()]
    found = vocab_map.coverage_by_kind(made, rows, kinds)
    assert [(r["kind"], r["rows"], r["tokens"], r["missed"]) for r in found] == [
        ("all", 4, 10, 1), ("code", 2, 4, 1), ("prose", 1, 5, 0), ("(none said)", 1, 1, 0)
    ]  # fmt: skip
    assert [r["coverage"] for r in found] == [0.9, 0.75, 1.0, 1.0]
    assert [r["kind"] for r in vocab_map.coverage_by_kind(made, rows, {})] == ["all"]
    few = vocab_map.coverage_by_kind(made, rows, kinds, most=1)
    assert [(r["kind"], r["tokens"], r["missed"]) for r in few[1:]] == [("(other kinds)", 5, 1), ("prose", 5, 0)]


def test_what_a_size_costs_and_loses_by_hand():
    """Coverage 0.5 and rates 0.8, 0.4 / 0.8: 1 + 0.4 + 0.4 x 0.25; cut off at 0.5: 1 + 0.5 + 0.5 x 0.5; whole: 1 + 0.8 + 0.4."""
    config = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 20}
    table = [{"draft_vocab_size": 10, "held_out": 0.5}, {"draft_vocab_size": 20, "held_out": 1.0}]
    found = vocabulary.trade(table, config, attention="llama", weight_bytes=2, per_position=(0.8, 0.4))
    assert found["length"].tolist() == pytest.approx([1.5, 2.2])
    assert found["length_at_most"].tolist() == pytest.approx([1.75, 2.2])
    assert found["relative"].tolist() == pytest.approx([1.5 / 2.2, 1])
    assert found["relative_at_most"].tolist() == pytest.approx([1.75 / 2.2, 1])
    assert found["lm_head_bytes"].tolist() == [10 * 4 * 2, 20 * 4 * 2]
    # fc 3 x 4 x 4, attention 8 x 12 + 4 x 4, MLP 3 x 4 x 8, and the rows of the lm_head
    assert found["pass_bytes"].tolist() == [2 * (48 + 112 + 96 + 40), 2 * (48 + 112 + 96 + 80)]
    assert {*found.columns, found.index.name} == set(vocabulary.UNITS)


def test_no_head_is_accepted_more_often_than_its_vocabulary_covers():
    """A perfect head on a simulated text: its acceptance length is that of independent positions, up to the counts' noise."""
    c, k = 0.8, 3
    inside = torch.rand(200_000, k, generator=torch.Generator().manual_seed(0)) < c
    simulated = 1 + float(inside.long().cumprod(1).sum(1).double().mean())
    config = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 20}
    table = [{"draft_vocab_size": 10, "held_out": c}]
    found = vocabulary.trade(table, config, attention="llama", weight_bytes=2, per_position=(1.0,) * k).loc[10]
    assert found["length"] == found["length_at_most"] == pytest.approx(simulated, abs=0.01)


def test_coverage_per_size_on_trained_and_held_out_tokens():
    trained, held_out = counts(6, 3, 1, 0), counts(2, 2, 2, 2)
    table = vocab_map.coverage_table(trained, held_out, [1, 2, 4, 9])
    assert table == [
        {"draft_vocab_size": 1, "trained": 0.6, "held_out": 0.25},
        {"draft_vocab_size": 2, "trained": pytest.approx(0.9), "held_out": 0.5},
        {"draft_vocab_size": 4, "trained": 1.0, "held_out": 1.0},
    ]


@pytest.mark.parametrize(
    ("d2t", "t2d", "word"),
    [
        ([0, 0, 9], None, "outside"),
        ([0, -1], None, "ascending"),
        ([1, 4, 9], None, "outside"),  # ids written where offsets belong
        ([0, 1], [True, True, False, False], "does not mark"),
    ],
)
def test_faults_of_a_map_are_named(d2t, t2d, word):
    mask = torch.tensor(t2d) if t2d else None
    assert word in consistency(torch.tensor(d2t), mask, vocab_size=4)[0]
    assert "int64" in consistency(torch.tensor(d2t).int(), mask, vocab_size=4)[0]


def test_empty_masks_and_foreign_ids_are_refused():
    with pytest.raises(BadInput, match="every loss mask is empty"):
        count_tokens([row("a", [1], [0])], 4)
    with pytest.raises(BadInput, match="beyond"):
        count_tokens([row("a", [7], [1])], 4)
