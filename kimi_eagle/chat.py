"""Prompts in, the target's own answers out: token ids and loss masks from token boundaries, never from text search.

A row's `token_ids` are the rendered prompt followed by the answer's ids as the engine produced them, so the mask is known
exactly: True where the token is the target's own. Conversations that have their answers already: kimi_eagle.turns.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import BadInput
from kimi_eagle.target import Target


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt: `split` (train or heldout) follows from a hash of its text, before anything is answered."""

    prompt_id: str
    split: str
    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Answer:
    """One answered prompt, or a conversation: token_ids [T]; the first `prompt_tokens` of them come before the first answer.

    spans: [begin, end) of every trained stretch of a conversation; without any, all that follows the prompt is the answer.
    """

    sample_id: str
    prompt_id: str
    split: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    spans: Sequence[Sequence[int]] = ()

    @property
    def loss_mask(self) -> list[bool]:
        """[T], True at the answer's tokens: token i itself is the label, predicted from the tokens before it."""
        mask = [False] * len(self.token_ids)
        for begin, end in self.spans or [(self.prompt_tokens, len(mask))]:
            mask[begin:end] = [True] * (end - begin)
        return mask

    @property
    def answer_ids(self) -> list[int]:
        """The answers' token ids."""
        return list(itertools.compress(self.token_ids, self.loss_mask))


def split_of(prompt: str, held_out_fraction: float) -> str:
    """`heldout` or `train`, by a hash of the prompt's text: the same prompt always lands on the same side."""
    place = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") / 2**64
    return "heldout" if place < held_out_fraction else "train"


def render(target: Target, rows: Iterable[dict[str, str]], held_out_fraction: float, max_tokens: int) -> list[Prompt]:
    """Prompts rendered by the target's own chat template; those longer than `max_tokens` are left out."""
    prompts = []
    for row in rows:
        ids = render_chat(target, [{"role": "user", "content": row["prompt"]}])
        if len(ids) <= max_tokens:
            prompts.append(Prompt(row["id"], split_of(row["prompt"], held_out_fraction), ids, row["prompt"]))
    if not prompts:
        raise BadInput(f"no prompt is at most {max_tokens} tokens long; raise max_model_len or give shorter prompts.")
    return prompts


def write_prompts(prompts: list[Prompt], file: Path) -> None:
    """The rendered prompts with their split, one JSON object a line."""
    write_atomically(file, "".join(json.dumps(asdict(p)) + "\n" for p in prompts).encode())


def load_prompts(file: Path, split: str | None = None) -> list[Prompt]:
    """Prompts written by `write_prompts`, all or those of one split."""
    prompts = [Prompt(**json.loads(line)) for line in file.read_text().splitlines()]
    return [p for p in prompts if split in (None, p.split)]


def render_chat(target: Target, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins."""
    rendered = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return [int(i) for i in rendered["input_ids"]]


def answer_prompts(
    target: Target,
    engine: Any,
    prompts: list[Prompt],
    file: Path,
    *,
    answer_tokens: int,
    temperature: float,
    samples: int,
    seed: int,
    group: int = 128,
) -> list[Answer]:
    """Answers of the target itself, `samples` per prompt, each with a seed of its own; kept in `file` and resumed from it.

    An existing file is used as far as it was made with the same settings by the same target; otherwise it is begun anew
    under the settings' digest, so an old one is never mixed in.
    """
    settings = {
        "target": target.identity(), "answer_tokens": answer_tokens, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    header = {"settings": settings}
    done = {a.sample_id: a for a in _resume(file, header)}
    wanted = {
        f"{p.prompt_id}.{k}.{digest(p.token_ids)}": (p, k) for p in prompts for k in range(samples)
    }  # the digest: an edited prompt under an old id is another sample
    missing = [name for name in wanted if name not in done]
    for begin in range(0, len(missing), group):
        names = missing[begin : begin + group]
        requests = [
            {"id": name, "prompt_token_ids": wanted[name][0].token_ids, "seed": seed_of(seed, name)} for name in names
        ]
        results = engine.generate(requests, max_tokens=answer_tokens, temperature=temperature)
        with open(file, "a") as out:
            for result in results:
                prompt = wanted[result["id"]][0]
                answer = Answer(
                    result["id"], prompt.prompt_id, prompt.split, prompt.token_ids + result["token_ids"],
                    len(prompt.token_ids), result["finish_reason"] or "length",
                )  # fmt: skip
                done[answer.sample_id] = answer
                out.write(json.dumps(asdict(answer)) + "\n")
    return [done[name] for name in wanted if done[name].answer_ids]


def read_answers(file: Path) -> list[Answer]:
    """All answers of a file written by `answer_prompts`."""
    if not file.is_file():
        raise BadInput(f"no answers file {file.name}; run notebook 02 first.")
    return [Answer(**json.loads(line)) for line in file.read_text().splitlines()[1:]]


def kinds(answers: Path, file: Path) -> dict[str, str]:
    """{sample_id: kind of text} of the rows in `answers` whose prompt has one in `file` (`conversations.write_kinds`)."""
    known = json.loads(file.read_text())
    return {a.sample_id: known[a.prompt_id] for a in read_answers(answers) if a.prompt_id in known}


def distinct_bigram_ratio(token_ids: list[int]) -> float:
    """Distinct bigrams over bigrams: near 1 for text, near 0 for a loop (a loop inflates the acceptance length)."""
    pairs = list(itertools.pairwise(token_ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def seed_of(seed: int, name: str) -> int:
    """A sample's own seed (31 bits), from the run's and its name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def digest(row: list) -> str:
    """Short digest of a row's tokens (and spans), part of its sample id."""
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:6]


def _resume(file: Path, header: dict[str, Any]) -> list[Answer]:
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    try:
        same = bool(lines) and json.loads(lines[0]) == header
    except ValueError:
        same = False
    if not same:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(header).encode() + b"\n")
        return []
    found, whole = [], [lines[0]]
    for line in lines[1:]:
        try:
            found.append(Answer(**json.loads(line)))
        except (ValueError, TypeError):  # the line a kill tore
            continue
        whole.append(line)
    write_atomically(file, b"\n".join(whole) + b"\n")
    return found
