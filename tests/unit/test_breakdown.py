"""Breakdown of decode windows on traces whose answer is known by hand. Numbers in comments are microseconds."""

import gzip
import random
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from traces import NCCL_RING, kernel, operator, step, steps, write

from kimi_eagle.allreduce import intervals, names, reading
from kimi_eagle.allreduce.breakdown import breakdown, find
from kimi_eagle.allreduce.read import read
from kimi_eagle.errors import BadInput

GEMM = "nvjet_tst_64x8_64x16_1x2_h_bz_TNT"


def share(result, part: str, rank: int = 0) -> float:
    table = result.parts[result.parts["rank"] == rank].set_index("part")
    return float(table.loc[part, "share"])


@pytest.mark.parametrize("clock", [0.0, 7777.25])
def test_transfer_and_waiting_are_told_apart(tmp_path, clock):
    """Transfer 10, rank 1 100 late: rank 0's events last 110, of which 100 are waiting, whatever the ranks' clocks say."""
    for rank, late in ((0, 0.0), (1, 100.0)):
        shift = clock * rank
        events = steps(6, start=shift)
        for i in range(6):
            begin = shift + 1000 * i + 300 + late
            events.append(kernel(NCCL_RING, begin, 10 + 100 - late))
        write(tmp_path / f"rank{rank}.json.gz", events, rank, 2)
    (tmp_path / "window.json").write_text("{}")  # what capture writes beside the traces is no trace
    result = breakdown(tmp_path)
    ranks = result.ranks.set_index("rank")
    assert ranks.loc[0, "waiting_us"] == pytest.approx(100, rel=0.01)
    assert ranks.loc[0, "transfer_us"] == pytest.approx(10, rel=0.01)
    assert ranks.loc[1, "waiting_us"] == pytest.approx(0, abs=0.1)
    assert ranks.loc[1, "transfer_us"] == pytest.approx(10, rel=0.01)
    assert ranks.loc[0, "share"] == pytest.approx(110 / 1000, rel=0.01)


# T81: one kernel of each implementation, its expected label, its duration.
IMPLEMENTATIONS = [
    (NCCL_RING, "NCCL ring LL", False, 10),
    ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL tree LL", False, 11),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)", "NCCL ring SIMPLE", False, 12),
    ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs4K)", "NCCL symmetric", False, 13),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)", "custom one-stage", False, 14),
    ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)", "custom two-stage", False, 15),
    ("void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>(...)", "quick", False, 16),
    ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16>(...)", "symmetric memory", False, 17),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)", "multimem", False, 18),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::trtllm_allreduce_fusion::"
     "AllReduceFusionPattern)1, __nv_bfloat16, 8>(...)", "FlashInfer fused", True, 19),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::trtllm_allreduce_fusion::"
     "AllReduceFusionPattern)0, __nv_bfloat16, 8>(...)", "FlashInfer", False, 21),
]  # fmt: skip


def test_every_implementation_by_hand_count(tmp_path):
    """T81. Kernels one after another in one step of 2000; the share is the sum of their durations by hand, all-gather apart."""
    events, at = steps(2, 2000.0), 100.0
    for name, _, _, length in IMPLEMENTATIONS:
        events.append(kernel(name, at, length))
        at += length + 5
    events.append(
        kernel("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096>)", at, 22, **{"Collective name": "allreduce"})
    )
    events.append(kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", at + 30, 40))
    events.append(kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", at + 80, 50))
    events.append(kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", at + 140, 60))
    # In the second step: a GEMM of another stream over half of an AllReduce, and two AllReduces at once on two streams.
    events += [kernel(NCCL_RING, 2100, 100, 13), kernel(GEMM, 2150, 100, 7)]
    events += [kernel(NCCL_RING, 2400, 100, 13), kernel(IMPLEMENTATIONS[4][0], 2450, 100, 14)]
    result = breakdown([write(tmp_path / "rank0.json", events, 0, 8)])
    by_hand = 10 + 11 + 12 + 13 + 14 + 15 + 16 + 17 + 18 + 19 + 21 + 22  # first step
    by_hand += 100 + 150  # second step: the first whole, the overlapping two once (2400 to 2550)
    assert result.ranks["share"][0] == pytest.approx(by_hand / 4000, rel=1e-6)
    assert share(result, names.ALLREDUCE) == pytest.approx(by_hand / 4000, rel=1e-6)
    assert share(result, "other collectives") == pytest.approx((40 + 50 + 60) / 4000, rel=1e-6)
    assert share(result, "matmul") == pytest.approx(50 / 4000, rel=1e-6)  # what of the GEMM no AllReduce covers
    assert result.ranks["hidden_us"][0] == pytest.approx(50 / 2, rel=1e-6)
    table = result.implementations.set_index(["collective", "implementation", "fused"])["us"]
    for name, implementation, fused, length in IMPLEMENTATIONS:
        extra = {"NCCL ring LL": 200, "custom one-stage": 100}.get(implementation, 0)
        assert table[names.ALLREDUCE, implementation, fused] == pytest.approx((length + extra) / 2), name
    assert table[names.ALLREDUCE, "RCCL", False] == pytest.approx(22 / 2)
    assert table["all-gather", "NCCL ring LL", False] == pytest.approx(40 / 2)
    assert table["reduce-scatter", "NCCL ring LL", False] == pytest.approx(50 / 2)
    assert table["send-receive", "NCCL", False] == pytest.approx(60 / 2)


@pytest.mark.parametrize("name, kind", [
    ("_C::shm_allreduce", names.ALLREDUCE), ("gloo:all_reduce", names.ALLREDUCE), ("c10d::allreduce_", names.DISPATCH),
    ("gloo:all_gather", "all-gather"), ("_C::shm_all_gather", "all-gather"), ("c10d::_allgather_base_", names.DISPATCH),
    ("ncclDevKernel_Broadcast_RING_LL(x)", "broadcast"), ("ncclDevKernel_Generic_1(x)", "other collective"),
    ("my_library::new_all_reduce_v9", names.ALLREDUCE), ("deep_ep::dispatch<8>", "all-to-all"),
    ("void marlin_moe_wna16::Marlin<1>(x)", "MoE"), ("_C::cpu_attention_with_kv_cache", "attention"),
    ("_C::onednn_mm", "matmul"), ("aten::addmm", "matmul"), ("aten::copy_", "memory"), ("Memcpy HtoD (Pinned -> Device)", "memory"),
    ("aten::rsqrt", "other compute"), ("aten::sum", "other compute"),
])  # fmt: skip
def test_names(name, kind):
    assert names.label(name).kind == kind


def test_gloo_and_its_caller_count_once(tmp_path):
    """T81. As in traces made here: c10d::allreduce_ on the calling thread, gloo:all_reduce on gloo's, overlapping in time."""
    events = steps(3)
    for i in range(3):
        events.append(
            operator(
                "c10d::allreduce_",
                1000 * i + 100,
                300,
                1,
                **{"Input Dims": [[[4, 576]], []], "Input type": ["TensorList", ""]},
            )
        )
        events.append(
            operator(
                "gloo:all_reduce",
                1000 * i + 150,
                400,
                2,
                "user_annotation",
                **{"Input Dims": [[4, 576]], "Input type": ["float"]},
            )
        )
        events.append(operator("aten::mm", 1000 * i + 600, 200, 1))
    result = breakdown([write(tmp_path / "rank0.json", events, 0, 3, "gloo")])
    assert result.ranks["share"][0] == pytest.approx(0.4)
    assert share(result, names.DISPATCH) == pytest.approx(0.05)  # 100 to 150
    assert share(result, "matmul") == pytest.approx(0.2)
    assert result.window["calls_per_step"] == 1
    assert result.window["message_bytes"] == 4 * 576 * 4
    ways = reading.readings(result).set_index("reading")["share"]
    assert ways["sum of all AllReduce events"] == pytest.approx(0.7)
    assert ways["union of wall"] == pytest.approx(0.4)
    assert ways["union of busy time"] == pytest.approx(0.4 / 0.65)


def test_the_caller_counts_where_no_transfer_was_recorded(tmp_path):
    events = [*steps(2), operator("c10d::allreduce_", 100, 200, 1), operator("c10d::allreduce_", 1100, 200, 1)]
    result = breakdown([write(tmp_path / "rank0.json", events, 0, 2, "gloo")])
    assert result.ranks["share"][0] == pytest.approx(0.2)
    assert result.implementations["implementation"].tolist() == ["c10d"]


def test_one_rank_and_no_communication_are_answered(tmp_path):
    result = breakdown([write(tmp_path / "rank0.json", [*steps(3), operator("aten::mm", 100, 500)], 0, 1, "gloo")])
    assert result.ranks["share"][0] == 0
    assert np.isnan(result.ranks["waiting_us"][0])
    assert any("no AllReduce" in note for note in result.window["notes"])
    assert reading.layer_timeline(result, 0).empty and reading.latency_points({"a": result}).empty
    assert reading.readings(result)["share"].iloc[0] == 0


def test_a_trace_without_annotations_is_one_step(tmp_path):
    result = breakdown([write(tmp_path / "rank3.json", [kernel(NCCL_RING, 100, 50), kernel(GEMM, 150, 150)], 3, 4)])
    assert result.window["kind"] == "unknown" and result.window["steps"] == 1
    assert result.ranks["share"][0] == pytest.approx(50 / 200)


def test_only_pure_decode_steps_of_the_most_frequent_size_count(tmp_path):
    events = [step(0, 900, requests=0, prefill=64), step(1000, 900, requests=1, prefill=64)]
    events += [step(2000 + 500 * i, 400, requests=2) for i in range(4)] + [
        step(4000, 400, requests=1),
        step(5000, 1, requests=0),
    ]
    events += [kernel(NCCL_RING, 100, 800), kernel(NCCL_RING, 4100, 800)]  # in the prefill and in the odd last step
    events += [kernel(NCCL_RING, 2000 + 500 * i + 10, 50) for i in range(4)]
    result = breakdown([write(tmp_path / "rank0.json", events, 0, 2)])
    assert (result.window["steps"], result.window["requests"], result.window["kind"]) == (4, 2, "decode")
    assert result.ranks["share"][0] == pytest.approx(50 / 500)
    assert result.ranks["wall_us"][0] == pytest.approx(500)  # to the next step's start, not the annotation's own 400


def test_the_detailed_annotation_is_read_too(tmp_path):
    name = "execute_8_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq8sk140sqsq32sqsk560)"
    events = [operator(name, 1000 * i, 900, category="user_annotation") for i in range(3)]
    result = breakdown([write(tmp_path / "rank0.json", [*events, kernel(GEMM, 10, 5)], 0, 1)])
    assert (result.window["requests"], result.window["tokens"], result.window["steps"]) == (2, 8, 2)


def test_parts_sum_to_wall_time_whatever_overlaps(tmp_path):
    source = random.Random(5)
    kinds = [
        NCCL_RING,
        GEMM,
        "void fused_moe_kernel(x)",
        "flash_fwd_splitkv_kernel",
        "Memcpy DtoD",
        "void rms_norm_kernel(x)",
    ]
    events = steps(5)
    events += [
        kernel(source.choice(kinds), source.uniform(-200, 5200), source.uniform(1, 400), source.choice([7, 8, 9]))
        for _ in range(300)
    ]
    result = breakdown([write(tmp_path / "rank0.json.gz", events, 0, 2)])
    assert result.parts["us"].sum() == pytest.approx(result.ranks["wall_us"][0], rel=1e-9)
    assert (result.parts["us"] >= -1e-9).all()
    assert share(result, names.ALLREDUCE) == pytest.approx(result.ranks["share"][0], rel=1e-9)


def test_intervals_against_a_fine_grid():
    source = np.random.default_rng(3)
    starts = source.integers(0, 900, 60).astype(float)
    ends = starts + source.integers(1, 60, 60)
    windows = pd.DataFrame({"start": [0.0, 300.0, 610.0], "end": [300.0, 600.0, 1000.0]})
    grid = np.arange(1000) + 0.5
    covered = ((starts[:, None] <= grid) & (grid < ends[:, None])).any(axis=0)
    expected = [covered[(grid > a) & (grid < b)].sum() for a, b in windows.itertuples(index=False)]
    assert intervals.within(starts, ends, windows) == pytest.approx(expected)


def test_message_sizes_and_bus_bandwidth(tmp_path):
    """NCCL's own metadata gives bytes; bus bandwidth = bytes / transfer x 2 (n - 1) / n: 7168 x 2 B in 10 us over 4 ranks."""
    for rank in range(4):
        args = {"In msg nelems": 7168, "dtype": "BFloat16", "Collective name": "allreduce"}
        write(
            tmp_path / f"rank{rank}.json",
            [*steps(2), kernel(NCCL_RING, 100, 10, **args), kernel(NCCL_RING, 1100, 10, **args)],
            rank,
            4,
        )
    result = breakdown(tmp_path)
    assert result.window["message_bytes"] == 14336
    assert result.calls["bus_gb_s"].to_numpy() == pytest.approx(14336 / 10 * 2 * 3 / 4 / 1000)
    without = breakdown(
        [write(tmp_path / "other" / "rank0.json", [*steps(2), kernel(NCCL_RING, 100, 10)], 0, 4)], bytes_per_token=14336
    )
    assert without.calls["bytes"].tolist() == [14336]


def test_slow_profiling_is_rescaled_and_marked(tmp_path):
    trace = write(
        tmp_path / "rank0.json", [*steps(4), *[kernel(NCCL_RING, 1000 * i + 100, 200) for i in range(4)]], 0, 2
    )
    marked = breakdown([trace], plain_step_us=[500.0])
    assert marked.window["rescaled"] and marked.window["profiled_over_plain"] == pytest.approx(2)
    assert marked.ranks["rescaled_share"][0] == pytest.approx(0.4)
    fine = breakdown([trace], plain_step_us=[950.0, 970.0])
    assert not fine.window["rescaled"] and fine.ranks["rescaled_share"][0] == pytest.approx(0.2)


def test_ranks_with_unequal_calls_are_not_compared_in_that_step(tmp_path):
    for rank in range(2):
        events = [*steps(3), *[kernel(NCCL_RING, 1000 * i + 100, 20) for i in range(3)]]
        write(tmp_path / f"rank{rank}.json", [*events, *([kernel(NCCL_RING, 1500, 20)] if rank else [])], rank, 2)
    result = breakdown(tmp_path)
    assert any("unequal" in note for note in result.window["notes"])
    assert result.calls.groupby("step")["waiting_us"].apply(lambda w: w.isna().all()).tolist() == [False, True, False]


def test_layer_timeline_runs_from_one_layer_to_the_next(tmp_path):
    """Five AllReduces: one after the embedding, two a layer. Layer 1 runs from the end of the third to the end of the fifth."""
    events = steps(2, 2000.0)
    for i in range(2):
        events += [kernel(NCCL_RING, 2000 * i + 100 * n, 10) for n in range(1, 6)]
        events += [kernel(GEMM, 2000 * i + 100 * n + 20, 30) for n in range(1, 6)]
    result = breakdown([write(tmp_path / "rank0.json", events, 0, 2)])
    layer = reading.layer_timeline(result, 1)
    assert reading.layer_count(result) == 2
    assert layer["end_us"].max() == pytest.approx(200)
    lengths = (layer["end_us"] - layer["start_us"]).groupby(layer["part"]).sum()
    assert lengths[names.ALLREDUCE] == pytest.approx(20) and lengths["matmul"] == pytest.approx(60)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_truncated_trace_is_named(tmp_path, suffix):
    """T80."""
    whole = write(
        tmp_path / f"rank0{suffix}", [*steps(200), *[kernel(NCCL_RING, 10 * i, 5) for i in range(2000)]], 0, 2
    )
    data = whole.read_bytes()
    cut = tmp_path / f"rank7{suffix}"
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInput, match=r"rank7.*cut off"):
        read(cut)


def test_files_that_are_no_trace_are_named(tmp_path):
    (tmp_path / "rank0.json").write_text('{"hello": 1}')
    with pytest.raises(BadInput, match=r"rank0\.json"):
        read(tmp_path / "rank0.json")
    (tmp_path / "rank1.json.gz").write_bytes(b"not gzip at all")
    with pytest.raises(BadInput, match=r"rank1\.json\.gz"):
        read(tmp_path / "rank1.json.gz")
    with pytest.raises(BadInput, match="no such file"):
        read(tmp_path / "rank2.json")
    with pytest.raises(BadInput, match="capture one first"):
        find(tmp_path / "nothing")
    with pytest.raises(BadInput, match="no timed events"):
        read(write(tmp_path / "rank4.json", [], 4, 8))


def test_gzip_and_plain_give_the_same(tmp_path):
    """T80: a window of five steps, as .json and as .json.gz."""
    events = [*steps(5), *[kernel(NCCL_RING, 1000 * i + 100.125, 10.25) for i in range(5)]]
    plain = breakdown([write(tmp_path / "a" / "rank0.json", events, 0, 2)])
    zipped = breakdown([write(tmp_path / "b" / "rank0.json.gz", events, 0, 2)])
    pd.testing.assert_frame_equal(plain.ranks, zipped.ranks)
    assert plain.calls["us"].to_numpy() == pytest.approx(10.25, rel=1e-9)  # no rounding to whole microseconds
    with gzip.open(tmp_path / "b" / "rank0.json.gz") as file:
        assert file.read(1) == b"{"
