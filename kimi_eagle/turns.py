"""Conversations whose answers exist -> rows with a loss mask, from token boundaries and never from a search in text.

A conversation is rendered once, by the target's own chat template. Turn k is trained on where this is shown, token by token:
the messages before it with the generation prompt are how its own rendering begins, and its rendering up to its end is how
the whole one begins. Its span then lies between the generation prompt (a `<think>` opener in there is not the target's own)
and the first token that ends an answer in an engine, that token included; what the template adds after it is not trained on.
A turn for which it cannot be shown is left out of the mask and counted, never guessed:

- the template renders it otherwise once later turns follow (it drops earlier reasoning), or tokens merge over a boundary;
- no token that ends an answer closes it;
- its reasoning is not in the rendering: the target did not answer so.

An empty think block that the template puts before an answer given without reasoning is not trained on: the data do not say
that the target emitted it. One that the data hold is. What the template inserts is seen in two renderings of other contents.

A row that holds the ids of the target's own answers (`kimi-eagle regenerate`) is not rendered: those ids and spans are used.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kimi_eagle.chat import Answer, Prompt, answer_prompts, digest, render, split_of
from kimi_eagle.conversations import answered, opening
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import BadInput
from kimi_eagle.target import Target, describe

MIN_TRAINED_TOKENS = 4  # an emitted token and a chain of three drafts
ROWS_PER_PROCESS = 2000  # below this a process is not worth its start: about half a minute of rendering each
PROBES = ("A", "B")  # two contents without a common beginning: what their renderings share the template inserts

BEGINNING = "the generation prompt is not how it begins"
ENDING = "no token that ends an answer closes it"
REWRITTEN = "the template renders it otherwise once later turns follow"
DROPPED = "the template leaves its reasoning out"
DOUBLED = "a think block of its own follows one that the template inserts"
FOREIGN = "its token ids are another tokenizer's"
UNKNOWN = "what the template inserts before it is not clear"


class Refused(Exception):
    """Why a turn or a whole conversation has no provable mask."""


@dataclass(frozen=True)
class Rendered:
    """A conversation's one-pass token_ids [T], trained spans [(begin, end)], tokens of the opening, reasons of turns left out."""

    token_ids: list[int]
    spans: list[tuple[int, int]]
    opening: list[int]
    left_out: list[tuple[int, str]] = field(default_factory=list)


class Renderer:
    """Renders conversations by a target's chat template and finds the tokens of its answers."""

    def __init__(self, target: Target):
        self.target, self.tokenizer, self.stops = target, target.tokenizer, target.stop_ids
        self.thinks = "</think>" in str(self.tokenizer.chat_template)

    def render(self, row: dict[str, Any]) -> Rendered:
        """The rendering of {messages, tools?}, or the ids that the row holds; Refused where there is no answer or the template does not take it."""
        messages, tools = row["messages"], row.get("tools")
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not places:
            raise Refused("it has no answer")
        if "token_ids" in row:
            if row["tokenizer"] != self.target.tokenizer_sha256:
                raise Refused(FOREIGN)
            return Rendered(row["token_ids"], row["spans"], self.ids(messages[: places[0]], tools, prompt=True))
        messages = messages[: places[-1] + 1]  # turns after the last answer hold no label, and may change it
        whole = self.ids(messages, tools)
        begin = self.ids(messages[: places[0]], tools, prompt=True)
        spans, left_out = [], []
        for k in places:
            try:
                asked = begin if k == places[0] else self.ids(messages[:k], tools, prompt=True)
                said = whole if k == places[-1] else self.ids(messages[: k + 1], tools)
                spans.append(self._span(messages[: k + 1], tools, asked, said, whole))
            except Refused as reason:
                left_out.append((k + 1, str(reason)))
        return Rendered(whole, spans, begin, left_out)

    def ids(self, messages: list[dict], tools: Any, prompt: bool = False) -> list[int]:
        """Token ids of a conversation, up to where the next answer begins (`prompt`); Refused where the template does not take it."""
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is the checkpoint's own program: it may raise anything
            raise Refused(f"the chat template does not take it ({type(error).__name__}: {str(error)[:80]})") from None
        return [int(i) for i in rendered["input_ids"]]

    def _span(
        self, messages: list[dict], tools: Any, asked: list[int], said: list[int], whole: list[int]
    ) -> tuple[int, int]:
        """(begin, end) in `whole` of the last of `messages`, from their rendering `said` and that of the question, `asked`."""
        *before, turn = messages
        begin = len(asked)
        if said[:begin] != asked:
            raise Refused(BEGINNING)
        end = next((i + 1 for i in range(begin, len(said)) if said[i] in self.stops), 0)
        if not end:
            raise Refused(ENDING)
        if said[:end] != whole[:end]:
            raise Refused(REWRITTEN)
        reasoning, bare = _parts(turn)
        absorbed = reasoning is not None and any(self.ids([*before, b], tools) == said for b in bare)
        if reasoning and absorbed:
            raise Refused(DROPPED)
        inserted = self._inserted(before, bare[0], tools, begin) if self.thinks else []
        there = said[begin : begin + len(inserted)] == inserted
        if reasoning is not None:
            if inserted and there and not absorbed:
                raise Refused(DOUBLED)
            return begin, end
        if not there:
            raise Refused(UNKNOWN)
        return begin + len(inserted), end

    def _inserted(self, before: list[dict], bare: dict, tools: Any, begin: int) -> list[int]:
        """The ids of the empty think block (or its end, after an opener in the prompt) that the template puts before an answer."""
        one, other = (self.ids([*before, {**bare, "content": probe}], tools)[begin:] for probe in PROBES)
        shared = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
        text = "".join(self.tokenizer.decode(one[:shared]).split())
        return one[:shared] if text in ("<think></think>", "</think>") else []


@dataclass(frozen=True)
class Prepared:
    """Rows ready for the engines: prompts, and answers where they exist already (else the target is to give them).

    dropped: reason -> ids of conversations left out; unaligned: reason -> "id, turn k" left out of the mask of a row that
    was kept or dropped; cut: ids of rows cut at the length limit.
    """

    prompts: list[Prompt]
    answers: list[Answer] = field(default_factory=list)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    unaligned: dict[str, list[str]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    def text(self) -> str:
        """What was made of the file, and what was left out by reason and name."""
        if not self.answers:
            return f"{len(self.prompts)} prompts, to be answered by the target."
        trained = sum(len(a.answer_ids) for a in self.answers)
        lines = [
            f"{len(self.answers)} conversations with answers, used as they are: nothing is generated; {trained:,} trained tokens."
        ]
        lines += [f"dropped, {reason}: {_names(ids)}" for reason, ids in self.dropped.items()]
        lines += [
            f"turns not trained on (unaligned), {reason}: {_names(ids)}" for reason, ids in self.unaligned.items()
        ]
        return "\n".join([*lines, *([f"cut at the length limit: {_names(self.cut)}"] if self.cut else [])])


def prepare(
    target: Target,
    rows: list[dict[str, Any]],
    held_out_fraction: float,
    max_model_len: int,
    answer_tokens: int,
    processes: int = 0,
) -> Prepared:
    """Prompts rendered, or conversations rendered and masked; `processes` share the conversations (0: by their number).

    The length limit cuts ids and mask alike, one token short of `max_model_len` (an engine wants room for one). loss_mask[i]
    says that token i is a label, predicted from the tokens before it, so the last token that is kept stays one; the label
    that would have followed does not exist in the row, and nothing stands for it. A row left with fewer than
    MIN_TRAINED_TOKENS trained tokens is dropped. Raises BadInput where nothing is left.
    """
    if not answered(rows):
        return Prepared(render(target, rows, held_out_fraction, max_model_len - answer_tokens))
    limit = min(max_model_len, target.text_config.get("max_position_embeddings") or max_model_len) - 1
    made = Prepared([])
    asked: set[str] = set()
    for row, found in zip(rows, _render_all(target, rows, processes), strict=True):
        if isinstance(found, str):
            made.dropped.setdefault(found, []).append(row["id"])
            continue
        for turn, reason in found.left_out:
            made.unaligned.setdefault(reason, []).append(f"{row['id']}, turn {turn}")
        spans = [(begin, min(end, limit)) for begin, end in found.spans if begin < limit]
        trained = sum(end - begin for begin, end in spans)
        if trained < MIN_TRAINED_TOKENS:
            reason = f"fewer than {MIN_TRAINED_TOKENS} trained tokens" + (
                f" in the first {limit}" if len(found.token_ids) > limit else ""
            )
            made.dropped.setdefault(reason, []).append(row["id"])
            continue
        text = opening(row)
        split, ids = split_of(text, held_out_fraction), found.token_ids[:limit]
        name = f"{row['id']}.{digest([ids, spans])}"  # cut or masked otherwise it is another sample
        cut = len(found.token_ids) > limit
        if cut:
            made.cut.append(row["id"])
        made.answers.append(
            Answer(
                name, row["id"], split, ids, len(found.opening),
                "stop" if ids[spans[-1][1] - 1] in target.stop_ids else "length", spans,
            )
        )  # fmt: skip
        if text not in asked and len(found.opening) <= max_model_len - answer_tokens:
            asked.add(text)
            made.prompts.append(Prompt(row["id"], split, found.opening, text))
    if not made.answers:
        reasons = "; ".join(f"{reason}: {_names(ids)}" for reason, ids in {**made.dropped, **made.unaligned}.items())
        raise BadInput(f"none of {len(rows)} conversations can be trained on ({reasons}).")
    return made


def answers(prepared: Prepared, target: Target, engine: Any, file: Path, **settings: Any) -> list[Answer]:
    """The rows to extract, written to `file`: those that exist already, or the target's own (`chat.answer_prompts`)."""
    if not prepared.answers:
        return answer_prompts(target, engine, prepared.prompts, file, **settings)
    header = {"settings": {"target": target.identity(), "answers": "given"}}
    lines = [json.dumps(line) for line in (header, *map(asdict, prepared.answers))]
    write_atomically(file, ("\n".join(lines) + "\n").encode())
    return prepared.answers


def _render_all(target: Target, rows: Sequence[dict[str, Any]], processes: int) -> list[Rendered | str]:
    """Per row its Rendered, or why it is dropped. A slow tokenizer (Kimi's) is spread over processes, so order is kept."""
    processes = processes or max(1, min(len(os.sched_getaffinity(0)), len(rows) // ROWS_PER_PROCESS))
    if processes == 1:
        _begin(target)
        return [_one(row) for row in rows]
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, (str(target.path),)) as pool:
        return list(pool.map(_one, rows, chunksize=16))


_RENDERER: list[Renderer] = []  # of this process


def _begin(target: Target | str) -> None:
    _RENDERER[:] = [Renderer(describe(target) if isinstance(target, str) else target)]


def _one(row: dict[str, Any]) -> Rendered | str:
    try:
        return _RENDERER[0].render(row)
    except Refused as reason:
        return str(reason)


def _parts(turn: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
    """A turn's reasoning (None: it holds no block; "": an empty block of its own) and the turn without it, as templates make it."""
    if turn.get("reasoning_content"):
        return turn["reasoning_content"], [{k: v for k, v in turn.items() if k != "reasoning_content"}]
    head, closed, tail = turn["content"].partition("</think>")
    if not closed:
        return None, [turn]
    return head.replace("<think>", "").strip(), [{**turn, "content": text} for text in (tail.lstrip(), tail)]


def _names(ids: list[str]) -> str:
    return f"{len(ids)} ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})"
