"""The AllReduce microbenchmark (real gloo ranks, no timing asserted), the gate, the topology, and what capture does with files."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pandas as pd
import pytest

from kimi_eagle.allreduce import capture, microbench, topology
from kimi_eagle.errors import BadInput, MissingCapability, StageFailed


def test_two_gloo_ranks_reduce_every_size():
    table = microbench.measure(2, (1, 56), budget_s=0.05)
    assert table["bytes"].tolist() == [1024, 57344] and set(table["backend"]) == {"gloo"}
    assert (
        (table["median_us"] > 0).all()
        and (table["p10_us"] <= table["median_us"]).all()
        and (table["calls"] >= microbench.FEWEST_CALLS).all()
    )
    expected = table["bytes"] / table["median_us"] * 2 * (2 - 1) / 2 / 1000
    assert table["bus_gb_s"].to_numpy() == pytest.approx(expected.to_numpy())


def test_wrong_requests_are_refused_before_ranks_start():
    for ranks, sizes, variants in (
        (0, (1,), ("torch",)),
        (2, (), ("torch",)),
        (2, (0,), ("torch",)),
        (2, (1,), ("mpi",)),
    ):
        with pytest.raises(BadInput):
            microbench.measure(ranks, sizes, variants=variants)
    assert microbench.measure(1, (1,)).empty and microbench.tries(1, (1,)).empty  # one rank: answered, with no rows
    with pytest.raises(MissingCapability, match="GPU"):
        microbench.measure(2, (1,), variants=("torch-graph",))


def test_a_rank_that_fails_is_reported():
    with pytest.raises(StageFailed, match="microbenchmark failed"):
        microbench.measure(2, (1,), env={"GLOO_SOCKET_IFNAME": "no-such-interface", "TORCH_GLOO_LAZY_INIT": "0"})


def test_tries_are_set_against_the_untouched_run(monkeypatch):
    seen = []

    def fake(ranks, sizes, env=None, **_):
        seen.append(env)
        if env == {"B": "2"}:
            raise StageFailed("refused")
        return pd.DataFrame(
            {"bytes": [int(s * 1024) for s in sizes], "median_us": [10.0 if not env else 5.0] * len(sizes)}
        )

    monkeypatch.setattr(microbench, "measure", fake)
    table = microbench.tries(2, (14,), ({"A": "1"}, {"B": "2"}))
    assert seen == [{}, {"A": "1"}, {"B": "2"}]
    assert table["effect"].tolist()[:2] == [1.0, 0.5] and pd.isna(table["effect"].iloc[2])
    seen.clear()
    known = pd.DataFrame({"variant": ["torch", "vllm"], "bytes": [14336, 14336], "median_us": [20.0, 1.0]})
    again = microbench.tries(2, (14,), ({"A": "1"},), untouched=known)
    assert seen == [{"A": "1"}] and again["effect"].tolist() == [1.0, 0.25], (
        "what was measured already is not measured again"
    )


def gpus(**changes):
    return {"count": 8, "name": "8 x card", "links": "NV18", "peer": "yes", "nvlink": True, **changes}


@pytest.mark.parametrize("ranks, found, is_open, word", [
    (8, gpus(), True, "NVLink"),
    (8, gpus(nvlink=False), False, "PCIe"),  # eight RTX PRO 6000: the user's box
    (2, gpus(count=2, nvlink=False), True, "two PCIe"),
    (3, gpus(), False, "world size 3"),
    (2, gpus(count=2, nvlink=False, peer="no"), False, "peer"),
    (4, gpus(count=2), False, "2 GPUs"),
    (2, gpus(count=0), False, "no GPU"),
])  # fmt: skip
def test_custom_allreduce_gate(ranks, found, is_open, word):
    """T83."""
    answer, reason = topology.custom_gate(ranks, found)
    assert answer is is_open and word in reason


def test_topology_and_settings(monkeypatch):
    """T83: topology, peer access, the gate and NCCL_PROTO stand in the report."""
    text = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\nGPU0\t X \tPIX\tSYS\t0-31\nGPU1\tPIX\t X \tSYS\t0-31\nGPU2\tSYS\tSYS\t X \t32-63\n\nLegend:\n"
    assert topology.links_of(text) == {"PIX", "SYS"}
    monkeypatch.setenv("NCCL_PROTO", "LL,LL128,Simple")
    table = topology.settings(2).set_index("setting")["value"]
    assert table["NCCL_PROTO"] == "LL,LL128,Simple"
    assert {"links", "peer access", "vLLM custom AllReduce"} <= set(table.index)


def raw_trace(folder, rank, stamp, size=10):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.{stamp}.pt.trace.json.gz"
    path.write_bytes(gzip.compress(b"x" * size, compresslevel=0))
    return path


def test_traces_are_collected_one_a_rank(tmp_path):
    """T80: a documented path per rank; the newest trace of a rank counts; the table files beside them do not."""
    raw = tmp_path / "traces" / "raw"
    for rank in (0, 1, 2):
        raw_trace(raw, rank, 1)
    newest = raw_trace(raw, 1, 2, size=999)
    size = newest.stat().st_size
    (raw / "rank0.profiler_out.txt").write_text("table")
    window = capture.collect(raw, tmp_path, "tokens4", 4, 24, [1.0], False, 1.0)
    assert [p.name for p in window.files] == ["rank0.json.gz", "rank1.json.gz", "rank2.json.gz"]
    assert window.files[1].stat().st_size == size
    assert json.loads((tmp_path / "traces" / "tokens4" / "window.json").read_text())["folder"] == "."


def test_large_and_missing_traces_are_refused(tmp_path):
    """T80: the size limit."""
    raw = tmp_path / "traces" / "raw"
    raw_trace(raw, 0, 1, size=2_000_000)
    with pytest.raises(StageFailed, match="profile_steps"):
        capture.collect(raw, tmp_path, "tokens1", 1, 24, [1.0], False, 1.0)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(StageFailed, match="no trace"):
        capture.collect(empty, tmp_path, "tokens1", 1, 24, [1.0], False, 1.0)


class FakeEngine:
    """Answers like extract.engine.Engine: 5 ms a step after 20 ms of prefill; the profiler writes a trace when stopped."""

    def __init__(self, folder):
        self.folder, self.calls, self.profiling = folder, [], False

    def generate(self, requests, max_tokens=1, **options):
        self.calls.append((len(requests), max_tokens, self.profiling))
        return [{"id": r["id"], "seconds": 0.020 + 0.005 * (max_tokens - 1)} for r in requests]

    def call(self, method):
        self.profiling = method == "start_profile"
        if not self.profiling:
            raw_trace(self.folder / "traces" / "raw", 0, 1)

    def rpc(self, method):
        assert method == "kimi_eagle_trace_only" and self.profiling, "the tables are left out of an open window"


def test_capture_measures_plain_steps_around_the_profiled_run(tmp_path):
    engine = FakeEngine(tmp_path)
    window = capture.capture(engine, tmp_path, 4, vocab_size=1000, steps=24)
    assert window.plain_step_us == pytest.approx([5000.0, 5000.0])  # prefill and start-up cancel
    assert [profiled for *_, profiled in engine.calls].count(True) == 1
    assert all(batch == 4 for batch, *_ in engine.calls)


def test_a_running_server_is_captured_or_refused(tmp_path):
    seen, offers = [], {"profile": True}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            seen.append((self.path, body))
            if self.path == "/stop_profile":
                raw_trace(tmp_path / "raw", 0, 1)
            self.send_response(200 if offers["profile"] or "profile" not in self.path else 404)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        given = dict(model="m", vocab_size=1000, steps=5)
        window = capture.capture_server(url, tmp_path / "raw", tmp_path, 2, **given)
        assert [p.name for p in window.files] == ["rank0.json.gz"]
        paths = [p for p, _ in seen]
        assert paths.index("/start_profile") < paths.index("/stop_profile")
        assert paths[paths.index("/start_profile") + 1 : paths.index("/stop_profile")] == ["/v1/completions"] * 2
        assert all(b["ignore_eos"] and len(b["prompt"]) == 64 for p, b in seen if p == "/v1/completions")
        offers["profile"] = False
        with pytest.raises(MissingCapability, match="profiler-config"):
            capture.capture_server(url, tmp_path / "raw", tmp_path, 2, **given)
    finally:
        server.shutdown()
        server.server_close()
