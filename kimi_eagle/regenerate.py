"""Conversations in, the same ones with the target's own answers out, turn by turn, with the token ids as it produced them.

Each answer is asked for behind all that comes before it, rendered anew by the target's chat template as serving does. Where
that begins with the ids so far, answer included, the row goes on; where the template says it otherwise (earlier reasoning left
out, say) the row is closed and another begins for the later answers. So every answer is trained once, behind exactly the tokens
that the target saw, and no answer is tokenised from text. A turn that calls tools stays as given: the tool's turn after it
answers just that call. An answer that is cut at the limit ends its conversation.
"""

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from threading import Lock
from typing import Any

from kimi_eagle.chat import digest, distinct_bigram_ratio, seed_of
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import BadInput
from kimi_eagle.target import Target
from kimi_eagle.turns import PROBES, Refused, Renderer

FAILED_LIMIT = 0.02  # share of rows without answers above which the command fails; one may always fail
GROUP = 128  # conversations that an engine of ours answers together, each group written as a whole
TRIES = 4  # invented prompts asked for, as a multiple of those wanted
BEGINNING = b'{"id": '  # of every line written here, so that one that a kill tore is told from another's file


@dataclass(frozen=True)
class Source:
    """Who answers: `generate` as an engine's, its longest row (tokens; 0: unknown), conversations a call, calls at once."""

    generate: Callable[..., list[dict[str, Any]]]
    limit: int
    group: int
    workers: int


def regenerate(
    target: Target, rows: list[dict[str, Any]], out: Path, source: Source, settings: dict[str, Any]
) -> dict[str, str]:
    """Answer all `rows` (of conversations.read) into `out`, resumed from it; id -> reason of those that have failed.

    They are in OUT.failed.jsonl too, and the next call tries them again. BadInput where `out` holds other settings' lines.
    """
    done = kept(out, settings)
    renderer, failed = Renderer(target), {}
    talks = {}
    for row in rows:
        key = f"{row['id']}.{digest([row.get(k) for k in ('prompt', 'messages', 'tools')])}"
        if key not in done:
            talks[key] = _conversation(renderer, row, key, settings, source.limit)
    failures = out.with_suffix(".failed.jsonl")
    failures.unlink(missing_ok=True)
    for key, lines in _finished(talks, source, settings):
        if isinstance(lines, str):
            name = key.rpartition(".")[0]
            failed[name] = lines
            _append(failures, [{"id": name, "reason": lines}])
        else:
            _append(out, [line | {"source": key, "parts": len(lines), "settings": settings} for line in lines])
    return failed


def invent(
    target: Target, count: int, out: Path, source: Source, settings: dict[str, Any]
) -> tuple[int, dict[str, int]]:
    """`count` prompts that the target makes up itself, into `out` ({id, prompt} a line), resumed; how many there are, and
    how many were dropped for which reason. It goes on from what its template puts before a user's words until it ends the turn.
    """
    lines = [line for found in kept(out, settings).values() for line in found]
    texts, numbers, dropped = {line["prompt"] for line in lines}, {line["source"] for line in lines}, Counter()
    renderer = Renderer(target)
    one, other = (renderer.ids([{"role": "user", "content": probe}], None) for probe in PROBES)
    opening = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
    if not opening:
        raise BadInput(f"--invent: {target.name}'s chat template puts nothing before a user's words to go on from.")
    waiting = iter([name for i in range(TRIES * count) if (name := f"own{i}") not in numbers])
    while names := list(islice(waiting, count - len(texts))):
        talks = {name: _user_turn(target, opening, name, settings) for name in names}
        for name, found in _finished(talks, source, settings):
            if isinstance(found, str) or found[0]["prompt"] in texts:
                dropped[found if isinstance(found, str) else "came twice"] += 1
                continue
            texts.add(found[0]["prompt"])
            _append(out, [found[0] | {"source": name, "parts": 1, "settings": settings}])
    return len(texts), dropped


def kept(out: Path, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Lines of `out` by source, as far as they are whole; what a kill tore is taken out of the file.

    BadInput, before anything is changed, where a line is not of this command or of other settings, with what differs.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    if out.suffix != ".jsonl" or out.is_dir():
        raise BadInput(f"{out}: not a .jsonl file's name; give one for the answers.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = out.read_bytes().split(b"\n") if out.is_file() else []
        if lines and lines[-1][: len(BEGINNING)] == BEGINNING[: len(lines[-1])] and not _parsed(lines[-1]):
            lines.pop()
        for number, line in enumerate(lines, 1):
            row, place = _parsed(line), f"{out.name}, line {number}"
            if line.strip() and not row.keys() >= {"source", "parts", "settings"}:
                raise BadInput(f"{place}: not written by regenerate; name another file.")
            if row and row["settings"] != settings:
                raise BadInput(f"{place}: made with {_difference(row['settings'], settings)}.")
            if row:
                found.setdefault(row["source"], []).append(row)
        found = {name: rows for name, rows in found.items() if len(rows) == rows[0]["parts"]}
        if lines:
            whole = (json.dumps(row) + "\n" for rows in found.values() for row in rows)
            write_atomically(out, "".join(whole).encode())
    except OSError as error:
        raise BadInput(f"{out}: cannot be written ({error.strerror}).") from None
    return found


def _conversation(renderer: Renderer, row: dict[str, Any], key: str, settings: dict[str, Any], limit: int) -> Generator:
    """Asks for each answer of a row in turn and ends in its lines; Refused (the reason) where one is not to be had."""

    def line() -> dict[str, Any]:
        own = {"token_ids": ids, "spans": spans, "tokenizer": renderer.target.tokenizer_sha256} if whole else {}
        name = f"{row['id']}.{len(lines) + 1}" if lines else row["id"]
        return {"id": name, "messages": messages[:until], **tools, **own, "finish_reason": finish}

    given, tools = row.get("messages") or [{"role": "user", "content": row["prompt"]}], {}
    if row.get("tools"):
        tools = {"tools": row["tools"]}
    if given[-1]["role"] != "assistant":
        given = [*given, {"role": "assistant"}]
    messages, lines, ids, spans, until, whole, finish = [], [], [], [], 0, True, ""
    longest = settings["answer_tokens"]
    for turn in given:
        if turn["role"] != "assistant" or turn.get("tool_calls"):
            messages.append(turn)
            continue
        asked = renderer.ids(messages, row.get("tools"), prompt=True)
        if limit and len(asked) + longest > limit:
            raise Refused(f"{len(asked)} tokens before an answer of {longest} are over the {limit} allowed")
        result = yield {"prompt_token_ids": asked, "seed": seed_of(settings["seed"], f"{key}.{len(messages)}")}
        if asked[: len(ids)] != ids:
            lines.append(line())
            spans = []
        ids = asked + result["token_ids"]
        spans.append((len(asked), len(ids)))
        answer, complete = _answer(renderer, asked, result["token_ids"], settings["reasoning"] == "keep")
        messages.append(answer)
        until, whole, finish = len(messages), whole and complete, result["finish_reason"] or "length"
        if finish == "length":
            break
    if not spans:
        raise Refused("no turn of it is to be answered")
    if not whole:  # the ids hold the reasoning that is not wanted; a line without them holds every answer
        lines = []
    return [*lines, line()]


def _user_turn(target: Target, opening: list[int], name: str, settings: dict[str, Any]) -> Generator:
    """Asks for one user turn; Refused where it is not one."""
    result = yield {"prompt_token_ids": opening, "seed": seed_of(settings["seed"], name)}
    said = [i for i in result["token_ids"] if i not in target.stop_ids]
    if result["finish_reason"] != "stop":
        raise Refused(f"not ended within {settings['answer_tokens']} tokens")
    if set(said) & set(target.tokenizer.all_special_ids):
        raise Refused("special tokens within")
    if distinct_bigram_ratio(said) < settings["distinct"]:
        raise Refused(f"a loop (under {settings['distinct']:g} distinct bigrams)")
    if not (text := target.tokenizer.decode(said).strip()):
        raise Refused("empty")
    return [{"id": name, "prompt": text}]


def _answer(renderer: Renderer, asked: list[int], said: list[int], keep: bool) -> tuple[dict[str, Any], bool]:
    """An answer as a message, its reasoning in a field of its own or left out, and whether all that was said is in it."""
    tokenizer = renderer.tokenizer
    # Special tokens stay in the text (a think block's may be some), but for the one that ends the answer.
    text = tokenizer.decode(said[:-1] if said and said[-1] in renderer.stops else said)
    if not text.strip():
        raise Refused("an empty answer")
    head, closed, tail = text.partition("</think>")
    if keep and not tail.strip():  # none, or cut within or behind it: the text as it is
        return {"role": "assistant", "content": text}, True
    if not closed and "<think>" not in text and not tokenizer.decode(asked[-4:]).rstrip().endswith("<think>"):
        return {"role": "assistant", "content": text}, True
    if not tail.strip():
        raise Refused("nothing said but its reasoning")
    reasoning = head.replace("<think>", "").strip()
    answer = {"role": "assistant", "content": tail.lstrip("\n")}
    return (answer | {"reasoning_content": reasoning} if keep and reasoning else answer), keep


def _finished(
    talks: dict[str, Generator], source: Source, settings: dict[str, Any]
) -> Iterator[tuple[str, list[dict[str, Any]] | str]]:
    """(name, its lines or why there are none) of every talk, as they are through."""
    from tqdm import tqdm

    ask = partial(source.generate, max_tokens=settings["answer_tokens"], temperature=settings["temperature"])
    pool, lock, several = ThreadPoolExecutor(source.workers), Lock(), list(talks.items())
    try:
        groups = [dict(several[i : i + source.group]) for i in range(0, len(several), source.group)]
        with tqdm(total=len(talks), desc="answers", unit="row", mininterval=5, delay=5) as bar:
            for call in as_completed(pool.submit(_together, group, ask, lock) for group in groups):
                yield from call.result().items()
                bar.update(len(call.result()))
    finally:
        pool.shutdown(cancel_futures=True)


def _together(talks: dict[str, Generator], ask: Callable[..., list[dict]], lock: Lock) -> dict[str, list[dict] | str]:
    """Bring talks to their ends, turn by turn, with one call a turn. The lock is for what they share: the tokenizer."""
    found: dict[str, list[dict] | str] = {}
    results: dict[str, Any] = dict.fromkeys(talks)
    while results:
        requests = []
        for name, result in results.items():
            try:
                if result and "error" in result:
                    raise Refused(result["error"])
                with lock:
                    requests.append({"id": name, **talks[name].send(result)})
            except StopIteration as end:
                found[name] = end.value
            except Refused as reason:
                found[name] = str(reason)
        results = {result["id"]: result for result in ask(requests)} if requests else {}
    return found


def _append(file: Path, lines: list[dict[str, Any]]) -> None:
    with open(file, "a") as out:
        out.write("".join(json.dumps(line) + "\n" for line in lines))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _difference(there: dict[str, Any], wanted: dict[str, Any]) -> str:
    name = next(k for k in [*wanted, *there] if there.get(k) != wanted.get(k))
    values = "another" if name == "target" else f"{there.get(name)} instead of {wanted.get(name)}"
    return f"{name} {values}; name another file, or give the same"
