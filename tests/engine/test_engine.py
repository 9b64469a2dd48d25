"""Engines that stay up, in real vLLM: attached to, listed, ended, and never orphaned."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kimi_eagle import paths
from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.extract import engine
from kimi_eagle.extract.configure import engine_config
from kimi_eagle.extract.processes import alive
from kimi_eagle.target import describe

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def own_engines(tmp_path_factory, monkeypatch):
    """A folder of engines that is this test's alone (short: a socket lies in it)."""
    folder = tmp_path_factory.mktemp("e")
    monkeypatch.setenv("KIMI_EAGLE_ENGINES", str(folder))
    yield folder
    engine.down_all()


def config(**changes):
    return engine_config(describe("tiny-kimi"), "plain", max_model_len=256, max_batched_tokens=256, **changes)


def test_a_second_asker_attaches_and_down_leaves_nothing(own_engines):
    said = []
    first = engine.start(config(), say=said.append)
    again = engine.start(config(), say=said.append)
    assert first.key == again.key and "attached" in said[-1]
    answers = [e.generate([{"id": "a", "prompt_token_ids": [5, 6, 7, 8]}], max_tokens=6) for e in (first, again)]
    assert answers[0][0]["token_ids"] == answers[1][0]["token_ids"] and len(answers[0][0]["token_ids"]) == 6
    (entry,) = engine.running()
    assert entry.status == "ready" and entry.role == "plain"
    born = json.loads((own_engines / first.key / "state.json").read_text())["born"]
    first.down()
    assert not alive(entry.pid, born) and engine.running() == []
    with pytest.raises((StageFailed, OSError)):
        again.metrics()


def test_where_memory_holds_one_engine_a_load_ends_the_other_and_its_handle_brings_it_back(own_engines):
    request = [{"id": "a", "prompt_token_ids": [5, 6, 7, 8]}]
    first = engine.start(config(), alone=True, say=lambda _: None)
    text = first.generate(request, max_tokens=4)[0]["token_ids"]
    second = engine.start(config(max_sequences=8), alone=True, say=lambda _: None)
    assert [e.key for e in engine.running()] == [second.key]
    assert first.generate(request, max_tokens=4)[0]["token_ids"] == text
    assert [e.key for e in engine.running()] == [first.key]


def test_a_killed_kernel_leaves_no_orphan_for_more_than_30_seconds(own_engines):
    code = (
        "import sys, time; from kimi_eagle.extract import engine; sys.path.insert(0, sys.argv[1]); import test_engine as t;"
        "engine.start(t.config(), say=lambda _: None); print('up', flush=True); time.sleep(600)"
    )
    env = {**os.environ, "KIMI_EAGLE_ENGINES": str(own_engines)}
    env.pop("KIMI_EAGLE_OWNER", None)
    kernel = subprocess.Popen([sys.executable, "-c", code, os.path.dirname(__file__)], env=env, stdout=subprocess.PIPE)
    assert kernel.stdout.readline() == b"up\n"
    state = json.loads(next(own_engines.glob("*/state.json")).read_text())
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.wait()
    deadline = time.time() + 30
    while time.time() < deadline and alive(state["pid"], state["born"]):
        time.sleep(0.5)
    assert not alive(state["pid"], state["born"])


def test_an_engine_that_cannot_load_says_why_and_leaves_nothing(own_engines):
    with pytest.raises(StageFailed, match="last lines of its log"):
        engine.start(config(load_format="no_such_format"), say=lambda _: None)
    assert engine.running() == []


def test_a_port_in_use_is_said_before_anything_is_loaded(own_engines):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port} .* is in use"):
            engine.start(config(port=port), say=lambda _: None)
    assert not list(own_engines.iterdir())


def test_other_users_cannot_enter_the_engines_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KIMI_EAGLE_ENGINES", str(tmp_path / "mine"))
    assert paths.engines().stat().st_mode & 0o077 == 0
