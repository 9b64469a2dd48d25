"""A real window: SmolLM2 on three ranks over gloo, and what its traces must add up to. Slow (an engine with three workers)."""

import json
import subprocess
import sys

import pytest

from kimi_eagle import target as targets
from kimi_eagle.allreduce import capture, names, reading
from kimi_eagle.errors import BadInput, MissingCapability


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    target = targets.describe("smollm2")
    found = capture.capture_all(
        target,
        folder,
        tensor_parallel=3,
        batches=[1],
        verify_tokens=3,
        steps=20,
        communicator="gloo",
        max_model_len=256,
    )
    return found, reading.break_down_all(found, capture.bytes_per_token(target, "float32"))


def test_a_window_holds_pure_decode_steps_of_every_rank(windows):
    found, results = windows
    assert [w.label for w in found] == ["tokens1", "tokens4"]
    assert "verify 3 of batch 1" in found[1].stands_for
    for window, tokens in zip(found, (1, 4), strict=True):
        result = results[window.label]
        assert [p.name for p in window.files] == ["rank0.json.gz", "rank1.json.gz", "rank2.json.gz"]
        assert (result.window["kind"], result.window["tokens"], result.window["world_size"]) == ("decode", tokens, 3)
        assert result.window["steps"] >= 20
        assert result.window["calls_per_step"] == 61  # two a layer and one after the embedding
        assert set(result.implementations.set_index("collective").loc[[names.ALLREDUCE], "implementation"]) == {"gloo"}
        assert result.calls["bytes"].unique().tolist() == [tokens * 576 * 4]


def test_parts_sum_to_the_measured_wall_time(windows):
    """Within 2 % of the time between the first step's start and the last one's end, which no part was computed from."""
    for result in windows[1].values():
        for rank, steps in zip(result.ranks["rank"], result.steps, strict=True):
            elapsed = steps["end"].iloc[-1] - steps["start"].iloc[0]
            parts = result.parts.loc[result.parts["rank"] == rank, "us"].sum() * len(steps)
            assert parts == pytest.approx(elapsed, rel=0.02)
        assert ((result.ranks["share"] > 0) & (result.ranks["share"] < 1)).all()
        waited = result.ranks["waiting_us"] + result.ranks["transfer_us"]
        assert waited.to_numpy() == pytest.approx(result.ranks["allreduce_us"].to_numpy(), rel=0.02)


def test_the_profiler_is_cheap_or_its_shares_are_marked(windows):
    for result in windows[1].values():
        assert result.window["profiled_over_plain"] < 1.10 or (result.window["rescaled"] and result.window["notes"])


def test_a_layer_of_a_real_trace(windows):
    result = windows[1]["tokens1"]
    assert reading.layer_count(result) == 30
    layer = reading.layer_timeline(result, 1)
    assert set(layer["rank"]) == {0, 1, 2} and names.ALLREDUCE in set(layer["part"])


def test_what_this_build_cannot_do_is_said_before_it_loads(tmp_path):
    target = targets.describe("smollm2")
    with pytest.raises(MissingCapability, match="CUDA graphs"):
        capture.start_engine(target, tmp_path, tensor_parallel=3, graphs=True)
    with pytest.raises(BadInput, match="auto or gloo"):
        capture.start_engine(target, tmp_path, tensor_parallel=3, communicator="mpi")
    with pytest.raises(BadInput, match="divide"):
        capture.start_engine(target, tmp_path, tensor_parallel=2)


READ_LARGE = """
import json, resource, sys, time
from kimi_eagle.allreduce.breakdown import breakdown
begun = time.perf_counter()
result = breakdown([sys.argv[1]])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"share": float(result.ranks["share"][0]), "steps": result.window["steps"], "peak_kb": peak,
                  "seconds": time.perf_counter() - begun}))
"""


def test_a_trace_of_500_mb_is_read_in_bounded_memory(tmp_path):
    """T80. Steps of 6,000 us with 100 kernels, two of them AllReduces of 30 us: a share of 1 %. Peak memory below 2 GB."""
    path, at, count = tmp_path / "rank0.json", 0, 0
    tail = '"args":{"External id":7,"device":0,"context":1,"stream":7,"correlation":9,"registers per thread":168,"blocks per SM":1.0,"warps per SM":12.0,"grid":[132,1,1],"block":[384,1,1],"est. achieved occupancy %":19}}'
    with path.open("w") as file:
        file.write('{"schemaVersion":1,"distributedInfo":{"backend":"nccl","rank":0,"world_size":2},"traceEvents":[')
        while file.tell() < 500_000_000 or not count:
            lines = []
            for _ in range(200):
                lines.append(
                    f'{{"ph":"X","cat":"user_annotation","name":"execute_context_0(0)_generation_4(4)","pid":9,"tid":1,"ts":{at},"dur":5900}}'
                )
                lines += [
                    f'{{"ph":"X","cat":"kernel","name":"nvjet_tst_64x8_{k}","pid":0,"tid":7,"ts":{at + 60 * k}.5,"dur":40.25,{tail}'
                    for k in range(98)
                ]
                lines += [f'{{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)","pid":0,"tid":7,"ts":{at + 5900 + 40 * k},"dur":30,{tail}' for k in range(2)]  # fmt: skip
                at, count = at + 6000, count + 1
            file.write(("," if count > 200 else "") + ",\n".join(lines))
        file.write("]}")
    assert path.stat().st_size > 500_000_000
    done = subprocess.run([sys.executable, "-c", READ_LARGE, str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"500 MB read in {found['seconds']:.0f} s, peak {found['peak_kb'] / 1e6:.2f} GB")
    assert found["steps"] == count - 1 and found["share"] == pytest.approx(0.01, rel=1e-6)
    assert found["peak_kb"] < 2_000_000
