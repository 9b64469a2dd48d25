"""What notebook 05 says of differences: judged in float32, counted in 16 bits."""

import pytest

from kimi_eagle.acceptance import analysis
from kimi_eagle.errors import StageFailed

SAME = {"prompts": 3, "identical": 2, "ties": [{"prompt": "a", "token": 1, "gap_nats": 1e-5}], "different": []}
CHANGED = {**SAME, "ties": [], "different": [{"prompt": "b", "token": 4, "gap_nats": 0.3}]}


def test_a_changed_text_ends_a_float32_run_and_is_counted_in_16_bits():
    assert analysis.require_identical(SAME, "float32") == "2 of 3 texts identical, 1 ties."
    with pytest.raises(StageFailed, match="b at token 4"):
        analysis.require_identical(CHANGED, "float32")
    assert "1 others" in analysis.require_identical(CHANGED, "bfloat16")


def test_the_difference_of_two_ways_is_relative_to_what_was_served():
    served, simulated = {"acceptance_length": 2.0}, {"acceptance_length": 2.2}
    assert analysis.difference(served, simulated) == pytest.approx(0.1)
    assert "differ by +10.0%" in analysis.explain(served, simulated)
    assert "agree" in analysis.explain(served, {"acceptance_length": 2.05})
