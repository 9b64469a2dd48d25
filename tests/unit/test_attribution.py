"""Rows of a step to requests, from token ids and positions alone."""

import pytest

from kimi_eagle.errors import StageFailed
from kimi_eagle.extract.attribution import attribute

A, B = [5, 6, 7, 8], [9, 9, 3]


def test_rows_go_to_their_requests_in_whatever_order_the_runner_put_them():
    ids, positions = B + A + [0, 0], [0, 1, 2, 0, 1, 2, 3, 0, 0]
    spans = attribute(ids, positions, {"a": (0, 4), "b": (0, 3)}, {"a": A, "b": B})
    assert sorted(spans) == [("a", 3, 0, 4), ("b", 0, 0, 3)]


def test_a_chunk_continues_where_the_last_one_ended():
    spans = attribute([7, 8, 9, 9, 3], [2, 3, 0, 1, 2], {"b": (0, 3), "a": (2, 2)}, {"a": A, "b": B})
    assert sorted(spans) == [("a", 0, 2, 2), ("b", 2, 0, 3)]


def test_equal_prompts_are_interchangeable():
    spans = attribute(A + A, [0, 1, 2, 3] * 2, {"a": (0, 4), "b": (0, 4)}, {"a": A, "b": A})
    assert {s[0] for s in spans} == {"a", "b"} and {s[1] for s in spans} == {0, 4}


def test_decoded_rows_are_passed_over():
    spans = attribute([77, 5, 6, 7, 8], [3, 0, 1, 2, 3], {"b": (3, 1), "a": (0, 4)}, {"a": A, "b": B})
    assert spans == [("a", 1, 0, 4)]


def test_rows_that_fit_nobody_end_the_run():
    with pytest.raises(StageFailed, match="fit no scheduled request"):
        attribute([5, 6, 7, 1], [0, 1, 2, 3], {"a": (0, 4)}, {"a": A})


def test_equal_chunks_with_different_pasts_are_not_guessed():
    prompts = {"a": [1, 1, 4, 4], "b": [2, 2, 4, 4]}
    with pytest.raises(StageFailed, match="different pasts"):
        attribute([4, 4, 4, 4], [2, 3, 2, 3], {"a": (2, 2), "b": (2, 2)}, prompts)
