"""Prompts and conversations in: JSONL, Parquet or a Hub data set, three shapes of rows brought into one form each.

A row is a prompt to be answered (`prompt`) or a conversation whose answers exist: `messages` with role and content, or
ShareGPT's `conversations` with from and value. Where a row has several of these keys the conversation counts. Nothing here
needs torch or a tokenizer; what is wrong is said with the file and the line (JSONL) or row (Parquet, Hub).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_eagle import paths
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import BadInput, MissingCapability

FILES = (".jsonl", ".json", ".parquet")
ROLES = ("system", "developer", "user", "assistant", "tool")
KINDS = ("kind", "category", "source")  # fields that may say what kind of text a row is: the first that does
SHAREGPT = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"} | {r: r for r in ROLES}


def read(name: str | Path, limit: int = 0) -> list[dict[str, Any]]:
    """Rows of `name`, a file (relative to the repository or absolute) or a Hub data set owner/name[:split] (split: train).

    All rows are {id, prompt, kind?}, or all are {id, messages: [{role, content, reasoning_content?, tool_calls?}], tools?, kind?}
    (with token_ids, spans and tokenizer where `kimi-eagle regenerate` made the answers); equal ones count once, an id that comes
    again gets its row's number behind it, `limit` (0: all) keeps the first ones. Raises BadInput, naming line or row, for
    what is none of these and where one kind follows the other; MissingCapability where the Hub is out of reach.
    """
    rows: list[dict[str, Any]] = []
    seen, ids = set(), set()
    for number, place, raw in _raw(str(name)):
        row = _row(raw, place)
        if rows and row.keys() & {"prompt", "messages"} != rows[0].keys() & {"prompt", "messages"}:
            kinds = ("a prompt", "conversations") if "prompt" in row else ("a conversation", "prompts")
            raise BadInput(f"{place}: {kinds[0]} among {kinds[1]}; give each kind a file of its own.")
        content = json.dumps(row, sort_keys=True)
        if content in seen:
            continue
        seen.add(content)
        given = str(raw["id"] if raw.get("id") is not None else f"p{number}")
        kind = next((raw[field] for field in KINDS if isinstance(raw.get(field), str) and raw[field].strip()), None)
        rows.append({"id": f"{given}.{number}" if given in ids else given, **row, **({"kind": kind} if kind else {})})
        ids.add(rows[-1]["id"])
        if limit and len(rows) == limit:
            break
    if not rows:
        raise BadInput(f"{Path(name).name}: holds no prompts and no conversations.")
    return rows


def answered(rows: list[dict[str, Any]]) -> bool:
    """True for conversations whose answers exist, False for prompts (a file holds one kind)."""
    return "messages" in rows[0]


def write_kinds(rows: list[dict[str, Any]], file: Path) -> None:
    """The kind of text of every row that says one, {id: kind}, as JSON in `file`."""
    write_atomically(file, json.dumps({row["id"]: row["kind"] for row in rows if "kind" in row}).encode())


def opening(row: dict[str, Any]) -> str:
    """What decides a row's split: its prompt, or what a conversation says before the first answer (system turns apart)."""
    if "prompt" in row:
        return row["prompt"]
    first = next((i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"), len(row["messages"]))
    before = row["messages"][:first]
    said = [m["content"] for m in before if m["role"] not in ("system", "developer")] or [m["content"] for m in before]
    return "\n".join(said)


def characters(row: dict[str, Any]) -> int:
    """Characters of a row's text: the prompt, or every turn with its reasoning and tool calls."""
    if "prompt" in row:
        return len(row["prompt"])
    extra = ("reasoning_content", "tool_calls")
    return sum(len(m["content"]) + sum(len(json.dumps(m[k])) for k in extra if k in m) for m in row["messages"])


def _raw(name: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number from 1, where it is, the row as it is given) of every row."""
    path = paths.resolve(name)
    if not path.is_file() and path.suffix not in FILES and name.count("/") == 1 and name[0] not in "./~":
        yield from _numbered(_from_hub(name), name)
    elif not path.is_file():
        raise BadInput(
            f"prompts {name!r}: no such file; give a .jsonl or .parquet file, relative to the repository or absolute, "
            "or a Hub data set (owner/name)."
        )
    elif path.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            batches = [batch.to_pylist() for batch in parquet.ParquetFile(path).iter_batches()]
        except (ArrowException, OSError) as error:
            raise BadInput(f"prompts {path.name}: cannot be read as Parquet ({type(error).__name__}).") from None
        yield from _numbered((row for batch in batches for row in batch), path.name)
    else:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    try:
        # Not splitlines(): JSON may hold U+2028 and its like inside a text.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"prompts {path.name}: cannot be read as UTF-8 text ({type(error).__name__}).") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path.name}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise BadInput(f"{place}: not a JSON object with a `prompt`, `messages` or `conversations`.")
        yield number, place, row


def _numbered(rows: Any, name: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for number, row in enumerate(rows, 1):
        yield number, f"{name}, row {number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Columns give every turn the keys of all turns: those that were not there are None."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _from_hub(name: str) -> Any:
    import datasets

    where, _, split = name.partition(":")
    try:
        found = datasets.load_dataset(where)
    except (
        ValueError
    ) as error:  # it is there, but a configuration of it must be named, or its files do not fit together
        raise BadInput(f"prompts {name!r}: {str(error).splitlines()[0]}") from None
    except Exception as error:  # each way to be out of reach has a class of its own
        raise MissingCapability(
            f"prompts {name!r}: no such file, and no data set in the Hub's local cache or to be fetched from here "
            f"({type(error).__name__}); give a .jsonl or .parquet file, or fetch it where there is a network."
        ) from None
    if (split or "train") not in found:
        raise BadInput(f"prompts {name!r}: no split {split or 'train'}; give {where}: and one of {', '.join(found)}.")
    return found[split or "train"]


def _row(raw: dict[str, Any], place: str) -> dict[str, Any]:
    if raw.get("messages") is not None:
        turns = raw["messages"]
    elif raw.get("conversations") is not None:
        turns = raw["conversations"]
        if isinstance(turns, list):
            turns = [_from_sharegpt(turn, f"{place}, turn {i}") for i, turn in enumerate(turns, 1)]
    elif isinstance(raw.get("prompt"), str) and raw["prompt"].strip():
        return {"prompt": raw["prompt"]}
    elif "prompt" in raw:
        raise BadInput(f"{place}: its prompt is empty.")
    else:
        raise BadInput(f"{place}: no `prompt`, `messages` or `conversations` in it.")
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{place}: its conversation is not a list of turns.")
    row = {"messages": [_turn(turn, f"{place}, turn {i}") for i, turn in enumerate(turns, 1)]}
    tools = raw.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError:
            raise BadInput(f"{place}: its tools are not JSON.") from None
    if tools:
        row["tools"] = tools
    if raw.get("token_ids") and raw.get("tokenizer"):  # a row of `kimi-eagle regenerate`
        ids, spans = raw["token_ids"], raw.get("spans")
        try:
            ends = [0, *(end for begin, end in spans for end in (begin, end)), len(ids)]
            whole = bool(spans) and ends == sorted(ends) and all(type(i) is int and i >= 0 for i in [*ids, *ends])
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise BadInput(f"{place}: its token_ids or spans are damaged; take them out, or regenerate the row.")
        row |= {"token_ids": ids, "spans": spans, "tokenizer": raw["tokenizer"]}
    return row


def _from_sharegpt(turn: Any, place: str) -> Any:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise BadInput(f"{place}: not an object with `from` and `value`.")
    if turn["from"] not in SHAREGPT:
        raise BadInput(f"{place}: from {turn['from']!r}; use one of {', '.join(SHAREGPT)}.")
    return {"role": SHAREGPT[turn["from"]], "content": turn.get("value")}


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """One turn with its text in `content` and its reasoning, where it has one of its own, in `reasoning_content`."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise BadInput(f"{place}: not an object with `role` and `content`.")
    if turn["role"] not in ROLES:
        raise BadInput(f"{place}: role {turn['role']!r}; use one of {', '.join(ROLES)}.")
    content = turn.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadInput(f"{place}: a part of its content is not text; images and the like are not extracted.")
        content = "".join(parts)
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str) or not (content.strip() or turn.get("tool_calls") or turn["role"] != "assistant"):
        raise BadInput(f"{place}: its content is {'empty' if isinstance(content, str) else 'not text'}.")
    reasoning = turn.get("reasoning_content", turn.get("reasoning"))
    if not isinstance(reasoning, str | None):
        raise BadInput(f"{place}: its reasoning is not text.")
    kept = {k: v for k, v in turn.items() if k not in ("content", "reasoning", "reasoning_content")}
    return {**kept, "content": content, **({"reasoning_content": reasoning} if reasoning else {})}
