"""The target's own answers, from a small real HTTP server: ids kept, failures, resume after a kill, and servers that are refused."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_reported_conversations import LATEST, OPENER, kimi

from kimi_eagle import cli, conversations, regenerate, turns
from kimi_eagle.chat import render_chat, seed_of
from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.server import Server


class Handler(BaseHTTPRequestHandler):
    """The needed part of vLLM's OpenAI protocol; what it says is the server's `say(request) -> (ids, finish) or a status`."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "toy", "object": "model", "max_model_len": self.server.limit}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        own = self.server
        given = asked.get("return_token_ids") and own.gives_ids
        if "messages" in asked:
            ids = {"prompt_token_ids": render_chat(own.target, asked["messages"])} if given else {}
            choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
            return self.reply({"choices": [choice | ({"token_ids": [5]} if given else {})], **ids})
        with own.lock:
            own.asked.append(asked)
        said = own.say(asked)
        if isinstance(said, int):
            return self.reply({"error": {"message": "no\nroom"}}, said)
        choice = {"index": 0, "text": "never this text", "finish_reason": said[1]}
        self.reply({"choices": [choice | ({"token_ids": said[0]} if given else {})]})

    def reply(self, body: dict, status: int = 200):
        data = json.dumps({"id": "1", "created": 0, "model": "toy", **body}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return kimi(tmp_path_factory.mktemp("made") / "kimi")


@pytest.fixture
def server(target):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.target, server.limit, server.gives_ids, server.asked = target, 400, True, []
        server.lock = threading.Lock()
        server.say = lambda asked: (said(server.target, f"number {asked['seed'] % 97} it is"), "stop")
        server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def said(target, text: str) -> list[int]:
    """An answer one token a byte or so: never as its text is tokenised, where that has longer tokens."""
    return [i for c in text for i in target.tokenizer.encode(c, add_special_tokens=False)] + [1794]


def settings(target, **changes) -> dict:
    made = {"answer_tokens": 20, "temperature": 0.7, "seed": 1, "reasoning": "keep"}
    return {"target": target.identity(), **made, **changes}


def go(server, rows, out: Path, workers: int = 4, **changes) -> dict[str, str]:
    found = Server(server.url, server.target)
    source = regenerate.Source(found.generate, found.limit, 1, workers)
    return regenerate.regenerate(server.target, rows, out, source, settings(server.target, **changes))


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def prompts(count: int) -> list[dict]:
    return [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(count)]


def call(*words: object, code: int) -> str:
    """The command in this process (a new one takes seconds to import what it needs); what it says, on both streams."""
    said_ = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said_), redirect_stderr(said_):
        patch.setattr(sys, "argv", ["kimi-eagle", "regenerate", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert (end.value.code or 0) == code, said_.getvalue()
    return said_.getvalue()


def test_the_ids_of_the_server_reach_the_extraction_as_they_are(server, target, tmp_path):
    out = tmp_path / "out.jsonl"
    assert go(server, prompts(3), out) == {}
    sent = {tuple(asked["prompt"]): asked for asked in server.asked}
    for row in lines(out):
        (begin, end), asked = row["spans"][0], sent[tuple(row["token_ids"][: row["spans"][0][0]])]
        assert list(asked["prompt"]) == render_chat(target, row["messages"][:1]) and end == len(row["token_ids"])
        assert row["token_ids"][begin:] == said(target, row["messages"][1]["content"])
        assert asked["seed"] == seed_of(1, f"{row['source']}.1") and asked["temperature"] == 0.7
        # Without these a server samples by the checkpoint's generation_config, and our engine does not.
        assert (asked["top_p"], asked["top_k"], asked["repetition_penalty"]) == (1.0, 0, 1.0)
    assert len({asked["seed"] for asked in server.asked}) == 3
    made = turns.prepare(target, conversations.read(out), 0.0, 400, 20)
    assert {tuple(a.token_ids) for a in made.answers} == {tuple(r["token_ids"]) for r in lines(out)}
    for answer in made.answers:
        assert answer.answer_ids[-1] == 1794 and answer.prompt_tokens == answer.spans[0][0]
        text = target.tokenizer.decode(answer.answer_ids[:-1])
        assert answer.answer_ids[:-1] != target.tokenizer.encode(text)  # it was not tokenised again


def test_turns_are_answered_in_order_and_only_assistants_are_new(server, target, tmp_path):
    def turn(role, content, **more):
        return {"role": role, "content": content, **more}

    calling = turn("assistant", "", tool_calls=[{"id": "f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}])  # fmt: skip
    given = [turn("system", "s"), turn("user", "a"), turn("assistant", "old"), turn("user", "b"), calling, turn("tool", "7", tool_call_id="f:0")]  # fmt: skip
    out = tmp_path / "out.jsonl"
    server.say = lambda asked: ([*target.tokenizer.encode(f"word {len(server.asked)}"), 1794], "stop")
    assert go(server, [{"id": "t", "messages": given}], out) == {}
    (row,) = lines(out)
    assert [m["content"] for m in row["messages"]] == ["s", "a", "word 1", "b", "", "7", "word 2"]
    assert [m for m in row["messages"] if m["role"] != "assistant" or "tool_calls" in m] == [given[i] for i in (0, 1, 3, 4, 5)]  # fmt: skip
    second = server.asked[1]["prompt"]
    assert second == render_chat(target, row["messages"][:6])
    assert [row["token_ids"][b:e][-1] for b, e in row["spans"]] == [1794, 1794] and row["spans"][1][0] == len(second)


def test_a_template_that_drops_reasoning_gives_each_answer_a_row_behind_what_the_target_saw(server, tmp_path):
    target = server.target = kimi(tmp_path / "latest", LATEST)
    server.say = lambda asked: (target.tokenizer.encode("<think>\nwhy\n</think>\n\nso it is<|im_end|>"), "stop")
    rows = [{"id": "t", "messages": [{"role": r, "content": r} for r in ("user", "assistant", "user")]}]
    out = tmp_path / "out.jsonl"
    assert go(server, rows, out) == {}
    first, second = lines(out)
    assert (first["id"], second["id"]) == ("t", "t.2") and len(first["spans"]) == len(second["spans"]) == 1
    assert first["messages"][1] == {"role": "assistant", "content": "so it is", "reasoning_content": "why"}
    answers = turns.prepare(target, conversations.read(out), 0.0, 400, 20).answers
    assert [a.answer_ids for a in answers] == [server.say({})[0]] * 2
    assert answers[1].token_ids[: second["spans"][0][0]] == server.asked[1]["prompt"]
    dropped = tmp_path / "dropped.jsonl"
    assert go(server, rows, dropped, reasoning="drop") == {}
    (row,) = lines(dropped)
    assert "token_ids" not in row and [m.get("reasoning_content") for m in row["messages"]] == [None] * 4
    assert [m["content"] for m in row["messages"]] == ["user", "so it is", "user", "so it is"]


def test_an_answer_cut_within_a_think_block_that_the_prompt_opened(server, tmp_path):
    target = server.target = kimi(tmp_path / "opener", OPENER)
    server.say = lambda asked: (target.tokenizer.encode("still at it"), "length")
    out = tmp_path / "out.jsonl"
    rows = [{"id": "t", "messages": [{"role": r, "content": r} for r in ("user", "assistant", "user")]}]
    assert go(server, rows, out) == {}
    (row,) = lines(out)
    assert row["finish_reason"] == "length" and [m["content"] for m in row["messages"]] == ["user", "still at it"]
    (answer,) = turns.prepare(target, conversations.read(out), 0.0, 400, 20).answers
    assert answer.finish_reason == "length" and answer.answer_ids == target.tokenizer.encode("still at it")
    reason = go(server, rows, tmp_path / "other.jsonl", reasoning="drop")
    assert reason == {"t": "nothing said but its reasoning"}


def test_failures_are_written_with_their_reason_and_tried_again(server, target, tmp_path):
    out, good = tmp_path / "out.jsonl", server.say
    wrong = {"say 0": 400, "say 1": ([1794], "stop"), "say 2": (None, "stop")}
    at = {tuple(render_chat(target, [{"role": "user", "content": text}])): answer for text, answer in wrong.items()}
    server.say = lambda asked: at.get(tuple(asked["prompt"])) or good(asked)
    rows = [*prompts(6), {"id": "long", "prompt": "words " * 400}]
    failed = go(server, rows, out)
    assert failed.keys() == {"p0", "p1", "p2", "long"} and failed["p0"] == "Error code: 400 - no room"
    assert (failed["p1"], failed["p2"]) == ("an empty answer", "the server gave no token ids")
    assert "over the 400 allowed" in failed["long"]
    assert {r["id"]: r["reason"] for r in lines(tmp_path / "out.failed.jsonl")} == failed and len(lines(out)) == 3
    server.say, server.asked = good, []
    assert go(server, rows, out).keys() == {"long"}
    assert len(server.asked) == 3 and len(lines(out)) == 6 and len(lines(tmp_path / "out.failed.jsonl")) == 1
    server.limit = 4000
    assert go(server, rows, out) == {} and not (tmp_path / "out.failed.jsonl").exists()


def test_the_command_fails_above_two_in_a_hundred_and_goes_on_after_a_kill(server, target, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts(40)))
    words = [data, out, "--target", target.path, "--server", server.url, "--max-tokens", 20, "--concurrency", 2]
    good, released = server.say, threading.Event()
    server.say = lambda asked: good(asked) if len(server.asked) < 9 else (released.wait(60), good(asked))[1]
    killed = subprocess.Popen([sys.executable, "-m", "kimi_eagle.cli", "regenerate", *map(str, words)])
    while len(server.asked) < 10:
        time.sleep(0.05)
        assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    released.set()
    before = out.read_bytes()
    whole = before.splitlines()
    assert 5 <= len(whole) <= 9
    out.write_bytes(before[:-30])  # as a kill within a write leaves it
    bad = {seed_of(0, f"{name}.1") for name in keys(prompts(40)[-2:])}
    server.asked, server.say = [], lambda asked: 400 if asked["seed"] in bad else good(asked)
    text = call(*words, code=1)
    assert "38 of 40 rows" in text and "out.failed.jsonl says why" in text
    assert len(server.asked) == 40 - len(whole) + 1 and out.read_bytes().startswith(b"\n".join(whole[:-1]) + b"\n")
    bad.pop()
    assert "failed, p3" in call(*words, code=0)  # one may fail
    assert len(lines(out)) == 39


def keys(rows: list[dict]) -> list[str]:
    return [f"{r['id']}.{regenerate.digest([r['prompt'], None, None])}" for r in rows]


def test_other_settings_and_other_files_are_refused_and_left_alone(server, target, tmp_path):
    out = tmp_path / "out.jsonl"
    go(server, prompts(2), out)
    before = out.read_bytes()
    with pytest.raises(BadInput, match=r"temperature 0\.7 instead of 0\.2"):
        go(server, prompts(2), out, temperature=0.2)
    with pytest.raises(BadInput, match="target another"):
        regenerate.kept(out, settings(target) | {"target": {}})
    assert out.read_bytes() == before
    for text in ('{"id": 1, "prompt": "x"}', '{"prompt": "x"}\n', "notes\n", "notes", "[1]\n"):
        out.write_text(text)
        with pytest.raises(BadInput, match="line 1: not written by regenerate"):
            regenerate.kept(out, settings(target))
        assert out.read_text() == text
    for wrong in (tmp_path, tmp_path / "x.txt"):
        with pytest.raises(BadInput, match="jsonl"):
            regenerate.kept(wrong, settings(target))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        regenerate.kept(tmp_path / "file" / "x.jsonl", settings(target))


def test_a_server_is_refused_before_the_work(server, target, tmp_path):
    server.gives_ids = False
    with pytest.raises(MissingCapability, match="gives no token ids"):
        Server(server.url, target)
    server.gives_ids, server.target = True, kimi(tmp_path / "other", LATEST)
    with pytest.raises(BadInput, match="renders a chat to other tokens"):
        Server(server.url, target)
    server.target = target
    with pytest.raises(BadInput, match="not an OpenAI-compatible address"):
        Handler.do_GET, kept = (lambda self: self.reply({"data": []})), Handler.do_GET
        try:
            Server(server.url, target)
        finally:
            Handler.do_GET = kept
    assert server.asked == []


def test_what_is_wrong_with_the_command_is_one_sentence(server, target, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text('{"prompt": "x"}\n')
    who = ["--target", target.path]
    for words, code, sentence in (
        ([data, out], 2, "give --target"),
        ([out, *who], 2, "give DATA and OUT"),
        ([data, out, "--invent", 3, *who], 2, "give DATA and OUT"),
        ([tmp_path / "none.jsonl", out, *who], 2, "no such file"),
        ([data, data, *who], 2, "line 1: not written by regenerate"),
        ([data, out, *who, "--server", "http://127.0.0.1:9/v1"], 3, "does not answer"),
    ):
        text = call(*words, code=code)
        assert sentence in text and text.startswith("kimi-eagle: ") and len(text.splitlines()) == 1
    assert data.read_text() == '{"prompt": "x"}\n'


def test_a_server_that_goes_away_ends_the_command_and_what_there_is_stays(server, target, tmp_path):
    out, good = tmp_path / "out.jsonl", server.say

    def say(asked):
        if len(server.asked) > 3:
            server.shutdown()
            server.socket.close()
            raise ConnectionAbortedError
        return good(asked)

    server.say, server.handle_error = say, lambda *_: None
    with pytest.raises(MissingCapability, match="answers no more"):
        go(server, prompts(9), out, workers=1)
    assert len(lines(out)) == 3 and not (tmp_path / "out.failed.jsonl").exists()


def test_rows_with_damaged_or_foreign_ids_are_named(server, target, tmp_path):
    out = tmp_path / "out.jsonl"
    go(server, prompts(1), out)
    (row,) = lines(out)
    for change in ({"spans": [[0, 10**6]]}, {"spans": [[5, 3]]}, {"spans": [[1]]}, {"token_ids": ["a"]}, {"spans": []}):
        out.write_text(json.dumps(row | change))
        with pytest.raises(BadInput, match="line 1: its token_ids or spans"):
            conversations.read(out)
    out.write_text(json.dumps(row | {"tokenizer": "another"}))
    with pytest.raises(BadInput, match="another tokenizer's"):
        turns.prepare(target, conversations.read(out), 0.0, 400, 20)


def test_the_target_makes_up_prompts_from_its_own_opener(server, target, tmp_path):
    out, encode = tmp_path / "own.jsonl", target.tokenizer.encode
    turns_ = [
        "one two three",
        "one two three",
        "na na na na na na na na na",
        "cut",
        "<|im_user|>user",
        " ",
        "last of all",
    ]
    server.say = lambda asked: (
        [*encode(turns_[min(len(server.asked), 7) - 1] + ("" if len(server.asked) < 8 else f" {len(server.asked)}")), 1794],
        "length" if len(server.asked) == 4 else "stop",
    )  # fmt: skip
    found = Server(server.url, target)
    source = regenerate.Source(found.generate, found.limit, 1, 1)
    made = settings(target, distinct=0.6)
    held, dropped = regenerate.invent(target, 4, out, source, made)
    assert held == 4 and [r["prompt"] for r in lines(out)][:2] == ["one two three", "last of all"]
    assert sorted(dropped.items()) == [
        ("a loop (under 0.6 distinct bigrams)", 1), ("came twice", 1), ("empty", 1), ("not ended within 20 tokens", 1),
        ("special tokens within", 1),
    ]  # fmt: skip
    whole, opener = (render_chat(target, [{"role": "user", "content": "Zebra"}]), server.asked[0]["prompt"])
    assert whole[: len(opener)] == opener and target.tokenizer.decode(whole[len(opener) :]).startswith("Zebra")
    assert len({asked["seed"] for asked in server.asked}) == len(server.asked)
    server.asked.clear()
    assert regenerate.invent(target, 4, out, source, made)[0] == 4 and server.asked == []
    assert [r["prompt"] for r in conversations.read(out)] == [r["prompt"] for r in lines(out)]
