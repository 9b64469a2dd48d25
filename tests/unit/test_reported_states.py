"""What others reported of hidden-state extraction, as far as it shows without an engine: rows that fail, speed, disk, networks."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import labs
import pytest
import torch
from safetensors.torch import save_file

from kimi_eagle import check, paths
from kimi_eagle import target as targets
from kimi_eagle.chat import Answer
from kimi_eagle.durable import signed
from kimi_eagle.errors import BadInput, CallFailed, MissingCapability, StageFailed
from kimi_eagle.extract import backends, budget, canary, configure, connector, groups, loop
from kimi_eagle.hidden_store import Store, StoreWriter
from kimi_eagle.target import Target, describe

TEXT = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
TOY = Target("toy", Path("nowhere"), "LlamaForCausalLM", TEXT, TEXT)
PLAN = loop.Plan(TOY, [1, 2, 3, 4], "connector", "", "float32")
GPU = backends.Facts((0, 26, 0))


class FakeEngine:
    """An engine with the connector back end: each request's states are its token ids; `poison` changes them or raises."""

    def __init__(self, poison=lambda name, states: None, dead=False):
        self.poison, self.dead, self.calls, self.cache, self.folder = poison, dead, [], {}, Path("no-engine")

    def call(self, method, **_):
        return {"describe": {"vllm": "fake"}, "cache": self.cache}[method]

    def rpc(self, *_):
        if self.dead:
            raise CallFailed("EngineDeadError")

    def generate(self, requests, max_tokens, states_folder):
        self.calls.append([r["id"] for r in requests])
        results = []
        for request in requests:
            ids = torch.tensor(request["prompt_token_ids"])
            states = ids.float()[:, None, None].expand(-1, 4, 8).clone()
            self.poison(request["id"], states)
            path = f"{states_folder}/{request['id']}.safetensors"
            save_file({"hidden_states": states, "token_ids": ids}, path)
            results.append({"id": request["id"], "hidden_states_path": path})
        return results


def rows(count, length=5):
    return [Answer(f"s{i:04d}", "p", "train", [i % 30, *range(length - 1)], 2, "stop") for i in range(count)]


def rejected(folder):
    lines = (folder / "rejected.jsonl").read_text().splitlines()
    return {entry["sample_id"]: entry["reason"] for entry in map(json.loads, lines)}


def test_a_nan_and_an_inf_row_are_named_and_skipped(tmp_path, monkeypatch):
    """T15: three samples, of which the third is right."""
    values = {"s0000": float("nan"), "s0001": float("inf")}

    def poison(name, states):
        states[2, 1, 3] += values.get(name, 0.0)

    monkeypatch.setattr(loop, "REJECT_LIMIT", 0.9)
    store = loop.extract(PLAN, FakeEngine(poison), rows(3), tmp_path)
    assert store.sample_ids == ["s0002"] and store.check() == []
    assert store.row("s0002").hidden_states[:, 0, 0].tolist() == [2, 0, 1, 2, 3]
    assert {name: "not finite" in reason for name, reason in rejected(tmp_path).items()} == dict.fromkeys(values, True)


def test_too_many_rows_without_states_end_the_run_though_they_came_last(tmp_path):
    """T15: above the limit nothing is handed on; the row that is right stays stored."""

    def poison(name, states):
        states *= float("nan") if name != "s0002" else 1.0

    with pytest.raises(StageFailed, match=r"2 rows have no usable states [(]s0000: states that are not finite"):
        loop.extract(PLAN, FakeEngine(poison), rows(3), tmp_path)
    assert Store(tmp_path).sample_ids == ["s0002"]


def failing(*names):
    def poison(name, states):
        if name in names:
            raise CallFailed(f"engine failed in generate: ValueError: no room for {name}")

    return poison


def test_a_sample_that_always_raises_is_reported_and_the_run_finishes(tmp_path):
    """T18: sample 3, which takes the whole call with it; the others are asked for again one by one."""
    engine = FakeEngine(failing("s0003"))
    store = loop.extract(PLAN, engine, rows(60), tmp_path)
    assert len(store) == 59 and "s0003" not in store.sample_ids and store.check() == []
    assert "no room for s0003" in rejected(tmp_path)["s0003"]
    assert sorted(len(call) for call in engine.calls) == [*[1] * 20, 20, 40], "only the group it was in is asked again"


def test_samples_that_raise_stop_the_run_above_the_limit_only(tmp_path, monkeypatch):
    """T18: the set limit is a share of the rows; what was stored before it is kept and not extracted again."""
    monkeypatch.setattr(loop, "REJECT_LIMIT", 0.05)
    bad = [f"s{i:04d}" for i in (3, 5, 30, 31)]
    assert len(loop.extract(PLAN, FakeEngine(failing(*bad[:3])), rows(60), tmp_path / "three")) == 57
    with pytest.raises(StageFailed, match=r"4 rows have no usable states [(]s0003: .*no room for s0003"):
        loop.extract(PLAN, FakeEngine(failing(*bad)), rows(60), tmp_path / "four")
    assert set(rejected(tmp_path / "four")) == set(bad)
    engine = FakeEngine()
    assert len(loop.extract(PLAN, engine, rows(60), tmp_path / "four")) == 60
    assert 4 <= sum(map(len, engine.calls)) < 60
    engine = FakeEngine(failing(*(f"s{i:04d}" for i in range(60))))
    with pytest.raises(StageFailed, match="4 rows have no usable states"):
        loop.extract(PLAN, engine, rows(60), tmp_path / "all")
    singles = sum(len(call) == 1 for call in engine.calls)  # of the first group, and of the second if it had begun
    assert 4 <= singles <= 8, "over the limit no more rows are asked for"


def test_an_engine_whose_workers_are_gone_ends_the_run_at_once(tmp_path):
    """T18: it answers a call with an error too, but no row is at fault."""
    engine = FakeEngine(failing("s0003"), dead=True)
    engine.folder = tmp_path / "engine"
    engine.folder.mkdir()
    (engine.folder / "log.txt").write_text("CUDA error: an illegal memory access\n")
    with pytest.raises(StageFailed, match=r"(?s)no room for s0003.*no more.*illegal memory access"):
        loop.extract(PLAN, engine, rows(60), tmp_path / "s")
    assert len(engine.calls) <= 2 and not (tmp_path / "s" / "rejected.jsonl").exists()


def test_what_is_read_and_written_per_sample_stays_flat(tmp_path, monkeypatch):
    """T17: 1,000 samples in 50 groups and 100 shards; bytes by the kernel's count, the last 200 rows against the first."""
    monkeypatch.setattr(groups, "FIRST_GROUP_TOKENS", 100)
    monkeypatch.setattr(groups.Groups, "took", lambda *_: None)
    monkeypatch.setattr(loop, "StoreWriter", partial(StoreWriter, shard_bytes=50 * 4 * 8 * 4))
    counts = []

    class Counting(FakeEngine):
        def generate(self, *args, **options):
            lines = Path("/proc/self/io").read_text().splitlines()
            counts.append([int(line.split()[1]) for line in lines[:4]])  # bytes read, bytes written, reads, writes
            return super().generate(*args, **options)

    store = loop.extract(PLAN, Counting(), rows(1000), tmp_path)
    assert len(store) == 1000 and len(store.shards) == 100 and len(counts) == 50
    for kind in range(4):
        first, last = counts[12][kind] - counts[2][kind], counts[49][kind] - counts[39][kind]
        assert first > 0 and last < 1.3 * first, (kind, first, last)


def test_speed_and_time_left_are_told_after_twenty_samples_and_kept(tmp_path, monkeypatch):
    """T20, T21: bytes and tokens a second; of 20 rows in 2 seconds, 60 more take 6."""
    clock = iter([100.0, 102.0, 108.0, 108.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    said = []
    store = loop.extract(PLAN, FakeEngine(), rows(80), tmp_path, say=said.append)
    assert said == [
        "states: 20 of 80 rows, 50 tokens/s, 0.01 MB/s, about 0.1 minutes left",
        "states: 80 of 80 rows, 50 tokens/s, 0.01 MB/s",
    ]
    found = {"reconstruction": {"mean_abs_nats": 0.0}, "order": {"max_relative_l2": 0.0}, "right": True}
    tree, units = loop.figures([], {"train": store}, found)
    assert tree["states"]["train"]["tokens_per_second"] == 50
    assert tree["states"]["train"]["mb_per_second"] == 50 * (4 * 8 * 4 + 5) / 1e6
    assert set(tree["states"]["train"]) == set(units["states"]["train"])


@pytest.mark.parametrize("form", ["dict", "object"])
def test_the_text_model_of_a_wrapper_is_found(form, tmp_path):
    """T08: text_config a dict, or an object; the top level has no num_hidden_layers."""
    from transformers import PretrainedConfig

    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": dict(TEXT)}
    if form == "object":
        config["text_config"] = PretrainedConfig(**TEXT)
    found = targets.text_config(config)
    assert isinstance(found, dict) and all(found[key] == value for key, value in TEXT.items())
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": found}))
    assert describe(tmp_path).num_layers == 4 and describe(tmp_path).is_wrapper


def test_no_prompt_is_longer_than_a_step_where_vllm_cannot_cut_it(monkeypatch):
    """T03: on a CPU vLLM cuts no prompt of an MLA target; one longer than a step's tokens would wait for ever."""
    monkeypatch.setattr(configure, "on_cpu", lambda: True)
    steps = {"max_model_len": 256, "max_batched_tokens": 64}
    assert configure.engine_config(describe("tiny-kimi"), "extract", **steps).llm["max_num_batched_tokens"] == 256
    assert configure.engine_config(TOY, "extract", **steps).llm["max_num_batched_tokens"] == 64


def test_a_cache_that_is_inflated_is_told_and_one_as_foreseen_is_not(tmp_path):
    """T09: tokens x states x width x bytes, and the keys; 24 times of it was reported."""
    needed = budget.cache_bytes_per_token(TEXT, 4, "float32")
    assert needed == (4 * 2 * 4 + 4 * 8) * 4
    engine, said = FakeEngine(), []
    for times in (1, 24):
        engine.cache = {"bytes": times * needed * 1000, "tokens": 1000}
        loop.extract(PLAN, engine, rows(1), tmp_path / str(times), say=said.append)
    assert len(said) == 3 and said[1].startswith("warning: this vLLM's cache takes 6,144 bytes a token")


def test_a_model_runner_without_the_feature_is_refused_with_the_setting_that_selects_the_other(monkeypatch):
    """T11: before 0.29 the second runner has no extract_hidden_states; the installed release keeps the rule."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    here = backends.installed_facts(dtype="float32")
    assert here.runner_v2
    with pytest.raises(MissingCapability, match="unset VLLM_USE_V2_MODEL_RUNNER, or set it to 0"):
        backends.choose("connector", TOY, replace(GPU, runner_v2=True))
    assert backends.choose("auto", TOY, replace(GPU, runner_v2=True))[0].NAME == "hooks"
    package = importlib.util.find_spec("vllm").submodule_search_locations[0]
    has = Path(package, "v1", "worker", "gpu", "spec_decode", "extract_hidden_states.py").is_file()
    assert has == connector.probe(TOY, replace(GPU, vllm=here.vllm, runner_v2=True)).can
    for value in ("", "0"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
        assert not backends.installed_facts(dtype="float32").runner_v2


NO_NETWORK = """
import socket
def refuse(*_): raise AssertionError("NETWORK " + str(_))
socket.getaddrinfo = socket.create_connection = refuse
class Offline(socket.socket):
    def connect(self, address):
        if self.family != socket.AF_UNIX: refuse(address)
        return super().connect(address)
    connect_ex = connect
socket.socket = Offline
"""


@pytest.mark.parametrize("made", ["tiny-kimi", "kimi"])
def test_the_documented_commands_work_without_a_network(made, tmp_path):
    """T24: nothing that is asked for by a path, a made target or a parameter file calls an address, and a Hub name says so."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    (tmp_path / "p.yaml").write_text("target: tiny-kimi\n")

    def call(*words, code=0, module=("-m", "kimi_eagle.cli")):
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{paths.REPOSITORY}", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, *module, *words], capture_output=True, text=True, env=env)
        assert done.returncode == code and "NETWORK" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.stdout + done.stderr

    if made == "kimi":
        assert "fetch it where there is a network" in call("target", "moonshotai/Kimi-K2.5", code=3)
        return
    assert "KimiK25" in call("target", made)
    assert "bytes per token" in call("estimate", str(tmp_path / "p.yaml"))
    labs.make_store(tmp_path / "store", describe(made), "t", 3, 0)
    call("check", str(tmp_path / "store"), "--target", made)
    code = "from kimi_eagle import chat, target; t = target.describe('tiny-kimi'); chat.render_chat(t, [{'role': 'user', 'content': 'x'}]); t.load_tensor('lm_head')"
    call(code, module=("-c",))


def test_check_names_a_store_of_another_target_and_a_row_that_is_not_the_indexed_one(tmp_path):
    """T22: `kimi-eagle check STORE --target` with a target of other weights' format; and a row whose ids are not the ones indexed."""
    labs.make_target(tmp_path / "target")
    labs.make_store(tmp_path / "store", describe(tmp_path / "target"), "t", 3, 0)
    assert check.check(tmp_path / "store", str(tmp_path / "target")) == ("hidden-state store", [])
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    _, faults = check.check(tmp_path / "store", str(tmp_path / "target"))
    (fault,) = [f for f in faults if "quantization" in f]
    assert "quantization none, target has fp8" in fault and "when it is served" in fault
    index = tmp_path / "store" / "index.jsonl"
    entry = json.loads(index.read_text())
    entry["rows"][1]["end"] -= 1
    index.write_text(json.dumps(signed(entry)) + "\n")
    assert check.check(tmp_path / "store")[1][1:] == ["shard-00000.safetensors: row t1 does not fit its checksum"]


def test_a_store_without_a_canary_says_where_one_comes_from(tmp_path):
    """T23."""
    labs.make_target(tmp_path / "target")
    labs.make_store(tmp_path / "store", describe(tmp_path / "target"), "t", 3, 0)
    with pytest.raises(BadInput, match="notebook 02 writes it"):
        check.check(tmp_path / "store", parameters={"target": "tiny-kimi"})


def test_a_canary_that_is_damaged_or_asked_of_a_head_is_one_sentence(tmp_path):
    (tmp_path / "canary.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(BadInput, match=r"canary\.safetensors is damaged"):
        canary.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="only those have a canary"):
        check.check(tmp_path, parameters={"target": "smollm2"})
