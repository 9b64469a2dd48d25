"""The draft vocabulary: who is kept, ties, padding, identity, coverage."""

from types import SimpleNamespace

import pytest
import torch

from kimi_eagle import vocab_map
from kimi_eagle.errors import BadInput
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
    made = build(counts(4, 3, 2, 1), 2, tokenizer_sha256="t")
    file = made.save(tmp_path / "maps")
    again = vocab_map.load(file, data_sha256="x", tokenizer_sha256="t", draft_vocab_size=2, vocab_size=4)
    assert torch.equal(again.d2t, made.d2t) and torch.equal(again.t2d, made.t2d)
    for key, value in {"data_sha256": "y", "tokenizer_sha256": "u", "draft_vocab_size": 3}.items():
        with pytest.raises(BadInput, match=key):
            vocab_map.load(file, **{key: value})
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(BadInput, match="unreadable"):
        vocab_map.load(file)


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
