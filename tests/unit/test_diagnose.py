"""Findings from texts and facts as real machines give them; nothing here starts an engine."""

import pytest

from kimi_eagle.diagnose import machine, probes, rows, serving
from kimi_eagle.diagnose.rows import BAD, NOTE, OK
from kimi_eagle.errors import StageFailed

# The shape of `nvidia-smi topo -m`: bold header, one row per GPU, columns of network cards after the GPUs.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \t{0}\t{1}\tSYS\t0-31\t0\n"
    "GPU1\t{0}\t X \t{1}\tSYS\t0-31\t0\n"
    "GPU2\t{1}\t{1}\t X \tPIX\t32-63\t1\n"
    "NIC0\tSYS\tSYS\tPIX\t X \n\nLegend:\n\n  X    = Self\n"
)


def test_links_are_read_pair_by_pair() -> None:
    assert machine.gpu_links(TOPOLOGY.format("NV18", "SYS")) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    assert machine.gpu_links("") == {}


def test_nvlink_is_good_and_pcie_is_told() -> None:
    peers = {"peers": [[True] * 3] * 3}
    good = machine.topology(peers, TOPOLOGY.format("NV18", "NV18"))
    assert [r.state for r in good] == [OK, OK] and "3 pairs NV18" in good[0].found
    slow = machine.topology({"peers": [[True, False], [False, True]]}, TOPOLOGY.format("PHB", "SYS"))
    assert [r.state for r in slow] == [NOTE, BAD] and "AllReduce" in slow[0].to_do


def test_a_driver_that_torch_cannot_use_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": "H200", "memory_gib": 140.0, "driver": "550.1", "compute_capability": "9.0"}
    monkeypatch.setattr(machine.provenance, "gpus", lambda: [card])
    found = machine.cuda({"cuda_build": "13.0", "devices": [], "peers": []})
    assert [(r.what, r.state) for r in found] == [("driver", OK), ("CUDA", BAD)]
    seen = machine.cuda({"cuda_build": "13.0", "devices": [{"name": "H200", "capability": "12.0"}], "peers": []})
    assert seen[-1].found == "H200: sm_120"


def test_a_machine_without_gpus_is_a_note_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.provenance, "gpus", lambda: [])
    assert [r.state for r in machine.cuda({"cuda_build": "", "devices": [], "peers": []})] == [NOTE]


def test_torch_of_another_release_than_vllm_was_built_for_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"python": "3.12", "vllm": "0.26.0", "torch": "2.13.0+cu130", "transformers": "5.17.0"}
    monkeypatch.setattr(machine.provenance, "versions", lambda: found)
    assert [r.to_do for r in machine.versions() if r.state == BAD] == ["vLLM 0.26.0 was built for torch 2.11.0"]


def test_too_little_room_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MIN_FREE_GIB", {"disk": 1e9, "memory": 1e9})
    assert [(r.state, bool(r.to_do)) for r in machine.room()] == [(BAD, True), (BAD, True)]


def test_a_probe_that_dies_is_an_answer() -> None:
    assert "KeyError" in probes.ask("nothing")["error"]


def test_a_probe_that_is_killed_names_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.setattr(probes.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, -4, "", ""))
    assert probes.ask("vllm") == {"error": "ended by SIGILL"}
    assert machine.platform({"error": "ended by SIGILL"})[0].state == BAD


@pytest.mark.parametrize(
    ("said", "answer", "state", "word"),
    [
        (" Paris. It is the largest city", "Paris", OK, "Paris"),
        (" a city in the south of Europe", "Paris", BAD, "readable, but without"),
        (" the the the the the the", "Paris", BAD, "garbage"),
        ("\ufffd\ufffd!!", "Paris", BAD, "garbage"),
        ("xq zzj", "", NOTE, "random weights"),
    ],
)
def test_the_known_answer_tells_sense_from_garbage(said: str, answer: str, state: str, word: str) -> None:
    row = serving.judge(said, answer, 8)
    assert row.state == state and word in row.found


def test_garbage_stops_the_run() -> None:
    with pytest.raises(StageFailed, match="does not speak sense"):
        serving.require_sense([serving.judge("!!!!", "Paris", 4)])
    serving.require_sense([serving.judge(" Paris", "Paris", 4)])


def test_no_token_at_all_is_not_ok() -> None:
    assert serving.judge("", "", 0).state == BAD


def test_rows_are_counted_and_shown() -> None:
    some = [rows.Row("a", OK, "fine"), rows.Row("b", BAD, "broken", "mend it"), rows.Row("c", NOTE, "so")]
    assert rows.counts(some) == {"ok": 1, "not_ok": 1, "notes": 1}
    assert "-> mend it" in rows.text(some) and list(rows.frame(rows.bad(some)).index) == ["b"]
    assert rows.frame([]).empty and rows.text([]) == ""
