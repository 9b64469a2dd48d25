"""The forecast: sizes by hand, planted parameters recovered, rates by arithmetic, and the published rows."""

from dataclasses import replace

import numpy as np
import pytest

from kimi_eagle.errors import BadInput
from kimi_eagle.speedup import (
    KIMI_K2,
    Acceptance,
    Curve,
    Draft,
    Observation,
    StepModel,
    best,
    calibrate,
    crossings,
    crossover,
    draft_sizes,
    faster_allreduce,
    fit,
    forecast,
    kimi_width,
    needed_length,
    own,
    published,
    target_sizes,
    what_if,
)  # fmt: skip
from kimi_eagle.speedup.sizes import Sizes
from kimi_eagle.speedup.step import touched_experts

DENSE = Sizes(dense_bytes=1e9, flops=1e9, kv_bytes=1000, layers=10, allreduces=21, message_bytes=1000)


def model(**changes) -> StepModel:
    base = StepModel(
        DENSE,
        memory_gb_s=1000,
        compute_tflops=10,
        curve=Curve.of([(1000, 10), (100_000, 20)]),
        fixed_us=500,
        memory_efficiency=1.0,
    )
    return replace(base, **changes)


def test_curve_is_flat_then_straight_then_bandwidth():
    curve = Curve.of([(3000, 30), (1000, 10)], tail_gb_s=1.0)
    assert [curve(s) for s in (10, 1000, 2000, 3000)] == [10, 10, 20, 30]
    assert curve(5000) == pytest.approx(30 + 2)  # 2000 bytes at 1 GB/s are 2 us
    assert Curve.of([(1000, 10), (3000, 30)])(5000) == pytest.approx(50)
    assert curve.scaled(0.5)(1000) == 5
    assert Curve.of([(1000, 7)])(1e6) == 7
    with pytest.raises(BadInput):
        Curve.of([(1000, 1), (1000, 2)])


def test_kimi_sizes_by_hand():
    """Per layer: q 7168 x 1536 + 1536 x 64 x 192, kv 7168 x 576 + 512 x 64 x 256, o 64 x 128 x 7168; experts of 3 x 7168 x 2048."""
    whole = 7168 * 1536 + 7168 * 576
    split = 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168
    expert = 3 * 7168 * 2048
    dense = (61 * split + 60 * expert + 3 * 7168 * 18432 + 7168 * 163840) / 8 + 61 * whole + 60 * 7168 * 384
    sizes = target_sizes(KIMI_K2, 8, expert_bits=4.5)
    assert sizes.dense_bytes == pytest.approx(2 * dense)
    assert sizes.expert_bytes == pytest.approx(expert * 4.5 / 8 / 8)
    assert (sizes.moe_layers, sizes.allreduces, sizes.message_bytes) == (60, 123, 14336)
    assert sizes.kv_bytes == 61 * 576 * 2
    one = target_sizes(KIMI_K2, 1)
    assert one.allreduces == 0
    assert one.flops / 2 == pytest.approx(32e9, rel=0.05)  # the model card's 32 B active parameters


def test_draft_sizes_of_the_reference():
    """0.667 B parameters for the MLA head without its vocabulary, 1.84 B with all of it; a 32k head holds 0.23 B."""
    assert draft_sizes(KIMI_K2).dense_bytes / 2 == pytest.approx(1.84e9, rel=0.01)
    assert draft_sizes(KIMI_K2, draft_vocab=32768).dense_bytes / 2 == pytest.approx(0.667e9 + 0.235e9, rel=0.01)


def test_touched_experts():
    assert touched_experts(384, 8, 1, 0.0) == pytest.approx(8)
    assert touched_experts(384, 8, 1, 1.3) == pytest.approx(8)
    assert touched_experts(384, 8, 16, 0.0) == pytest.approx(384 * (1 - (1 - 8 / 384) ** 16))
    assert touched_experts(384, 8, 64, 1.0) < touched_experts(384, 8, 64, 0.0) < 384
    chosen = np.random.default_rng(0)
    drawn = np.mean(
        [len(np.unique(np.concatenate([chosen.choice(32, 4, replace=False) for _ in range(5)]))) for _ in range(2000)]
    )
    assert touched_experts(32, 4, 5, 0.0) == pytest.approx(drawn, rel=0.01)


def test_step_terms_by_hand():
    terms = model(per_sequence_us=2).terms(tokens=100, sequences=50, context=10)
    assert terms["fixed"] == 500 and terms["per sequence"] == 100
    assert terms["dense weights"] == pytest.approx(1e9 / 1e6)  # 1 GB at 1000 GB/s: 1000 us
    assert terms["context"] == pytest.approx(50 * 10 * 1000 / 1e6)
    assert terms["compute"] == pytest.approx(100 * 1e9 / 1e7)
    assert terms["allreduce"] == pytest.approx(21 * 20)
    assert model(curve=None).terms(1)["allreduce"] == 0


def test_fit_recovers_planted_parameters():
    planted = model(
        sizes=target_sizes(KIMI_K2, 8, expert_bits=4.5), fixed_us=4321.0, routing_skew=0.7, memory_gb_s=1792
    )
    seen = [Observation(planted.step_us(c), c) for c in (1, 8, 64)]
    found, report = fit(replace(planted, fixed_us=0.0, routing_skew=0.0), seen, ("fixed_us", "routing_skew"))
    assert found.fixed_us == pytest.approx(4321, rel=1e-3) and found.routing_skew == pytest.approx(0.7, abs=1e-3)
    assert report["rms"] < 1e-5
    with pytest.raises(BadInput, match="no more than steps"):
        fit(planted, seen[:1], ("fixed_us", "routing_skew"))
    with pytest.raises(BadInput):
        fit(planted, seen, ("colour",))


def test_calibration_reproduces_the_measured_steps():
    seen = [Observation(3000.0, 1), Observation(2500.0, 8), Observation(9000.0, 64)]
    calibrated = calibrate(model(), seen)
    assert [calibrated.step_us(o.tokens) for o in seen] == pytest.approx([o.us for o in seen])


def test_acceptance_length_counts_the_bonus_token():
    acceptance = Acceptance((0.6, 0.3))
    assert acceptance.length(0) == 1 and acceptance.length(2) == pytest.approx(1.9)
    assert acceptance.length(3) == pytest.approx(1.9 + 0.15)  # the last conditional rate, 0.5, goes on
    for bad in ((), (0.5, 0.6), (1.2,)):
        with pytest.raises(BadInput):
            Acceptance(bad)


def test_rates_by_hand():
    """No AllReduce, nothing but a fixed cost: a step takes 1000 us, a pass 100 us; k = 2, length 2: 2 / (1000 + 200) against 1 / 1000."""
    empty = Sizes(0, 0, 0, 1, 0, 0)
    flat = StepModel(empty, 1, 1, fixed_us=1000.0)
    table = forecast(flat, Draft(empty, 100.0), Acceptance((0.6, 0.4)), (1, 4), (2,), draws=0)
    assert table["tokens_per_s"].tolist() == pytest.approx([2 / 1200e-6, 8 / 1200e-6])
    assert table["speedup"].tolist() == pytest.approx([2 / 1.2] * 2)
    assert crossover(flat, Draft(empty, 100.0), Acceptance((0.6, 0.4)), (2,)) is None  # it pays at every concurrency
    assert crossover(flat, Draft(empty, 5000.0), Acceptance((0.6, 0.4)), (2,)) == 0.0  # and here at none
    assert best(forecast(flat, Draft(empty, 5000.0), Acceptance((0.6, 0.4)), (1,), (1, 2)))["k"].tolist() == [0]


def test_the_crossover_is_where_gain_and_loss_meet():
    bound, draft, acceptance = model(compute_tflops=1.0), Draft(DENSE, 50.0), Acceptance((0.7, 0.5, 0.3))
    turn = crossover(
        bound, replace(draft, sizes=replace(DENSE, dense_bytes=1e7, flops=1e7, allreduces=3)), acceptance, (3,)
    )
    assert turn and 1 < turn < 1024
    small = replace(draft, sizes=replace(DENSE, dense_bytes=1e7, flops=1e7, allreduces=3))
    assert needed_length(bound, small, 3, turn, 1.0) == pytest.approx(acceptance.length(3), rel=1e-3)
    before, after = (forecast(bound, small, acceptance, (turn * f,), (3,), draws=0)["speedup"][0] for f in (0.8, 1.25))
    assert before > 1 > after


def test_a_draft_may_begin_to_pay_and_stop_again():
    """Four verified tokens touch three times the experts of one, so a MoE draft loses alone and pays in company, until computing binds."""
    moe = Sizes(1e9, 5e9, 0, 10, 0, 0, moe_layers=10, experts=64, experts_per_token=4, expert_bytes=5e7)
    box, draft = StepModel(moe, 4000, 100), Draft(replace(DENSE, dense_bytes=5e7, flops=1e7, allreduces=0), 100.0)
    turns = crossings(box, draft, Acceptance((0.6, 0.35, 0.2)), (3,))
    assert [pays for _, pays in turns] == [True, False]
    inside = (turns[0][0] + turns[1][0]) / 2
    speed = forecast(box, draft, Acceptance((0.6, 0.35, 0.2)), (1, inside, 1024), (3,), draws=0)["speedup"]
    assert speed[0] < 1 < speed[1] and speed[2] < 1


def test_needed_length_is_the_forecast_backwards():
    case = published.kimi_on_pcie()
    for c in (1, 16):
        gain = forecast(case.model, case.draft, case.acceptance, (c,), (3,), draws=0)["speedup"][0]
        assert needed_length(case.model, case.draft, 3, c, gain) == pytest.approx(case.acceptance.length(3))


def test_intervals_widen_with_their_inputs():
    case = published.kimi_on_pcie()

    def width(drafted: int, error: float) -> float:
        acceptance = Acceptance((0.645, 0.393, 0.24), drafted=drafted)
        row = forecast(case.model, case.draft, acceptance, (8,), (3,), step_error=error, draft_error=0.0).iloc[0]
        assert row["low"] - 1e-9 <= row["speedup"] <= row["high"] + 1e-9
        return row["high"] - row["low"]

    assert width(10_000, 0.0) < width(100, 0.0) < width(100, 0.2)
    assert width(0, 0.0) == pytest.approx(0, abs=1e-9)


def test_a_faster_allreduce_with_and_without_a_draft():
    case = published.kimi_on_pcie()
    table = faster_allreduce(case.model, case.draft, case.acceptance, (1, 64), 3, 0.5)
    bound = 1 / (1 - table["share"] / 2)
    assert table["plain_gain"].to_numpy() == pytest.approx(bound.to_numpy())
    assert (table["drafted_gain"] > 1).all()
    same = what_if(case.model, case.draft, k=3, acceptance=0.6, allreduce=1.0, concurrency=1)
    fast = what_if(case.model, case.draft, k=3, acceptance=0.6, allreduce=0.5, concurrency=1)
    assert fast["tokens_per_s"] > same["tokens_per_s"] and fast["allreduce_share"] < same["allreduce_share"]
    with pytest.raises(BadInput):
        faster_allreduce(replace(case.model, curve=None), case.draft, case.acceptance, (1,), 3, 0.5)


def test_the_published_rows_are_forecast_from_two_of_them():
    """Fitted on 1 and 64 with two free parameters: 4 and 16 within 15 %, the ratio within 10 %, closer than the power law."""
    case = published.kimi_on_pcie()
    assert set(case.report["free"]) == {"fixed_us", "routing_skew"} and len(case.report["errors"]) == 4
    table = published.against_published(case).set_index("concurrency")
    assert table.index[table["fitted"]].tolist() == [1, 64]
    assert table.loc[[4, 16], "power_law_error"].tolist() == pytest.approx([-0.135, -0.072], abs=5e-4)
    for c in (4, 16):
        row = table.loc[c]
        assert abs(row["off_error"]) < 0.15 and abs(row["on_error"]) < 0.15
        assert abs(row["ratio_error"]) < 0.10
        assert abs(row["on_error"]) < abs(row["power_law_error"])


def test_the_assumed_constants_do_not_carry_the_published_result():
    table = published.sensitivity((0.6, 0.7, 0.8, 0.9))
    assert (table[["off_4", "on_4", "off_16", "on_16"]].abs() < 0.15).all().all()


def test_a_small_target_is_foretold_to_lose():
    """SmolLM2 on an H200: 0.93x at k = 3 on one stream, and less with more requests."""
    table = published.smollm2_on_h200()
    assert (table["measured"] < 1).all() and (table["forecast"] < 1).all()
    row = table[(table["concurrency"] == 1) & (table["k"] == 3)].iloc[0]
    assert not row["fitted"] and row["forecast"] == pytest.approx(row["measured"], rel=0.1)


def test_the_own_box_is_fitted_from_notebook_01():
    config = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
              "intermediate_size": 1536, "vocab_size": 49152}  # fmt: skip
    windows = {
        f"tokens{t}": {
            "tokens": t,
            "plain_step_us": 200_000 + 3000 * t,
            "call_us": 900.0 + t,
            "message_bytes": 2304.0 * t,
        }
        for t in (1, 4, 16)
    }
    model_, draft, table = own.from_profile(
        config, windows, 3, element_bytes=4, memory_gb_s=20, compute_tflops=0.1, draft_vocab=8192
    )
    assert table["error"].abs().max() < 0.05
    assert 0 < draft.draft_us(model_, 1, 1) < model_.step_us(1)
    with pytest.raises(BadInput, match="two step sizes"):
        own.from_profile(
            config, {"tokens1": windows["tokens1"]}, 3, element_bytes=4, memory_gb_s=20, compute_tflops=0.1
        )


def test_the_kept_h200_run_is_forecast_from_its_plain_steps_alone():
    """Issue bar: median error under 10 %, worst under 20 %, k = 1..5, 1 to 64 requests; cells with a draft are never fitted."""
    measured = kimi_width.records()
    case = kimi_width.hold_against(measured)
    assert case.report["cells"] == 35 and set(case.table["k"]) == {1, 2, 3, 4, 5}
    assert case.report["median_error"] < 0.10 and case.report["worst_error"] < 0.20
    changed = [r | {"rows": [x | {"emitted": 2 * x["emitted"]} for x in r["rows"]]} if r["k"] else r for r in measured]
    again = kimi_width.hold_against(changed)
    assert again.model == case.model, "the fit saw a step with a draft"
    assert again.table["measured"].to_list() == pytest.approx((2 * case.table["measured"]).to_list())


def test_a_pass_takes_the_longer_of_host_and_gpu():
    sizes = Sizes(dense_bytes=1e6, flops=0.0, kv_bytes=0.0, layers=1, allreduces=0, message_bytes=0.0)
    model_ = StepModel(sizes, memory_gb_s=1.0, compute_tflops=1.0, memory_efficiency=1.0)  # a pass reads for 1000 us
    assert Draft(sizes, 600.0).draft_us(model_, 3, 1) == pytest.approx(3000)
    assert Draft(sizes, 1500.0).draft_us(model_, 3, 1) == pytest.approx(4500)
