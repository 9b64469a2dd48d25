"""The draft vocabulary: which target tokens the head may draft, as d2t offsets and a t2d mask.

Draft id i stands for target id i + d2t[i] (vLLM's convention: int64 *offsets*). Kept ids ascend. Only tokens that the head is
trained to predict are counted; special tokens are kept whatever their count (a mask that ends before the end-of-turn token
would otherwise lose it); rows beyond the tokenizer (padding of the embedding) are never kept.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kimi_eagle.errors import BadInput

if TYPE_CHECKING:
    from kimi_eagle.target import Target

NAME = "vocab_map"


@dataclass(frozen=True)
class TokenCounts:
    """How often each target token is a trained label, and the digest of the rows that were counted."""

    counts: Tensor  # [V] int64
    data_sha256: str


@dataclass(frozen=True)
class VocabMap:
    """A draft vocabulary. `d2t` [Vd] int64 offsets, `t2d` [V] bool; `identity` says for what it was made."""

    d2t: Tensor
    t2d: Tensor
    identity: dict[str, Any]

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id [Vd], ascending."""
        return torch.arange(len(self.d2t)) + self.d2t

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens that the draft vocabulary holds."""
        return int(counts[self.t2d].sum()) / max(1, int(counts.sum()))

    def save(self, folder: Path) -> Path:
        """Write vocab_map.safetensors and vocab_map.json into `folder`, each renamed into place; the first's path."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{NAME}.safetensors"
        save_file({"d2t": self.d2t, "t2d": self.t2d}, folder / f".{file.name}")
        (folder / f".{NAME}.json").write_text(json.dumps(self.identity, indent=1))
        os.replace(folder / f".{NAME}.json", folder / f"{NAME}.json")
        os.replace(folder / f".{file.name}", file)
        return file

    def require(self, **expected: Any) -> "VocabMap":
        """Itself, after checking that its identity has these values; BadInput names the first that differs."""
        for key, value in expected.items():
            if self.identity.get(key) != value:
                raise BadInput(
                    f"vocabulary map: made for {key} {self.identity.get(key)}, but here it is {value}; run 03_map_vocabulary again."
                )
        return self


def load(file: Path, **expected: Any) -> VocabMap:
    """The map in `file` (vocab_map.safetensors, its JSON beside it), checked against `expected` identity values."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
        identity = json.loads(file.with_suffix(".json").read_text())
        loaded = VocabMap(tensors["d2t"], tensors["t2d"], identity)
    except Exception as error:
        raise BadInput(
            f"vocabulary map {file.name}: unreadable ({type(error).__name__}); run 03_map_vocabulary again."
        ) from None
    problems = consistency(loaded.d2t, loaded.t2d)
    if problems:
        raise BadInput(f"vocabulary map {file.name}: {problems[0]}; run 03_map_vocabulary again.")
    return loaded.require(**expected)


def count_tokens(rows: Iterable[Any], vocab_size: int) -> TokenCounts:
    """Counts over the trained tokens (loss_mask True) of rows with sample_id, token_ids [T] and loss_mask [T].

    The digest does not depend on the rows' order. BadInput where nothing is trained or an id is beyond the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    digests = []
    for row in rows:
        tokens, mask = torch.as_tensor(row.token_ids).long(), torch.as_tensor(row.loss_mask).bool()
        if tokens.numel() and int(tokens.max()) >= vocab_size:
            raise BadInput(
                f"sample {row.sample_id}: token id {int(tokens.max())} is beyond the target's vocabulary of {vocab_size}."
            )
        counts += torch.bincount(tokens[mask], minlength=vocab_size)
        content = row.sample_id.encode() + tokens.int().numpy().tobytes() + mask.numpy().tobytes()
        digests.append(hashlib.sha256(content).digest())
    if not counts.sum():
        raise BadInput(
            "no answer token to count: every loss mask is empty; look at the masks in 02_extract_hidden_states."
        )
    return TokenCounts(counts, hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16])


def build(
    counted: TokenCounts,
    draft_vocab_size: int,
    *,
    special_ids: Sequence[int] = (),
    tokenizer_size: int | None = None,
    tokenizer_sha256: str = "",
) -> VocabMap:
    """The `draft_vocab_size` most frequent tokens: special ids first, then by count, ties by id (so padding is by id too).

    `tokenizer_size`: ids from there on are padding rows. A size equal to the vocabulary keeps every row (offsets zero; no map
    is needed). BadInput where the size does not fit.
    """
    V = len(counted.counts)
    usable = min(tokenizer_size or V, V)
    special = sorted({int(i) for i in special_ids if 0 <= int(i) < usable})
    if draft_vocab_size != V and not len(special) <= draft_vocab_size <= usable:
        raise BadInput(
            f"draft_vocab_size {draft_vocab_size}: give {max(len(special), 1)} (the special tokens) to {usable} "
            f"(the tokenizer), or {V} for the whole vocabulary."
        )
    if draft_vocab_size == V:
        kept = torch.arange(V)
    else:
        rank = counted.counts.clone()
        rank[special] = torch.iinfo(torch.int64).max
        kept = rank[:usable].sort(descending=True, stable=True).indices[:draft_vocab_size].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    identity = {
        "tokenizer_sha256": tokenizer_sha256,
        "data_sha256": counted.data_sha256,
        "draft_vocab_size": draft_vocab_size,
        "vocab_size": V,
        "distinct_tokens": int((counted.counts > 0).sum()),
        "special_tokens": len(special),
    }
    return VocabMap(kept - torch.arange(draft_vocab_size), t2d, identity)


def for_target(counted: TokenCounts, target: "Target", draft_vocab_size: int) -> VocabMap:
    """`build` with what the target's tokenizer says: its size, special and added tokens, and its digest."""
    return build(counted, draft_vocab_size, **_facts(target))


def coverage_by_size(
    trained: TokenCounts, held_out: TokenCounts, target: "Target", sizes: Sequence[int]
) -> list[dict[str, float]]:
    """`coverage_table` for a target: sizes between its special tokens and its tokenizer, or its whole vocabulary."""
    return coverage_table(trained, held_out, sizes, **_facts(target))


def _facts(target: "Target") -> dict[str, Any]:
    tokenizer = target.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *target.stop_ids}
    return {
        "special_ids": sorted(special),
        "tokenizer_size": len(tokenizer),
        "tokenizer_sha256": target.tokenizer_sha256,
    }


def coverage_table(
    trained: TokenCounts, held_out: TokenCounts, sizes: Sequence[int], **options: Any
) -> list[dict[str, float]]:
    """Coverage of trained and held-out answer tokens per draft vocabulary size; sizes that do not fit are left out."""
    table = []
    for size in sorted(set(sizes)):
        try:
            made = build(trained, size, **options)
        except BadInput:
            continue
        table.append(
            {
                "draft_vocab_size": size,
                "trained": made.coverage(trained.counts),
                "held_out": made.coverage(held_out.counts),
            }
        )
    return table


def coverage_by_kind(
    made: VocabMap, rows: Iterable[Any], kinds: dict[str, str], most: int = 24
) -> list[dict[str, Any]]:
    """Coverage of the trained tokens of `rows` by kind of text: [{kind, rows, tokens, missed, coverage}], all rows first,
    then the kinds, the worst covered first.

    kinds: {sample_id: kind}, as `chat.kinds` reads it. Only the `most` kinds with most tokens have a line each.
    """
    found: dict[str, list[int]] = {}
    for row in rows:
        tokens = torch.as_tensor(row.token_ids).long()[torch.as_tensor(row.loss_mask).bool()]
        seen = (1, len(tokens), int((~made.t2d[tokens]).sum()))
        kind = kinds.get(row.sample_id, "(none said)")
        found[kind] = [a + b for a, b in zip(found.get(kind, (0, 0, 0)), seen, strict=True)]
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    lines = [("all", [sum(n) for n in zip(*found.values(), strict=True)])]
    if kinds:
        rest = [("(other kinds)", [sum(n) for n in zip(*(n for _, n in ordered[most:]), strict=True)])]
        lines += sorted(
            ordered[:most] + (rest if ordered[most:] else []), key=lambda item: -item[1][2] / max(1, item[1][1])
        )
    return [
        {"kind": kind, "rows": n, "tokens": tokens, "missed": missed, "coverage": 1 - missed / tokens}
        for kind, (n, tokens, missed) in lines
        if tokens
    ]


def consistency(d2t: Tensor, t2d: Tensor | None, vocab_size: int | None = None) -> list[str]:
    """Faults of a map: dtypes, ids out of range, repeated or not ascending, and disagreement of d2t and t2d."""
    if d2t.dtype != torch.int64 or d2t.dim() != 1:
        return [f"d2t must be int64 of one axis, not {d2t.dtype} of {d2t.dim()}"]
    ids = torch.arange(len(d2t)) + d2t
    limit = vocab_size or (len(t2d) if t2d is not None else None)
    if len(ids) and (int(ids.min()) < 0 or (limit is not None and int(ids.max()) >= limit)):
        return [f"d2t maps to target ids {int(ids.min())}..{int(ids.max())}, outside the vocabulary of {limit}"]
    if bool((ids[1:] <= ids[:-1]).any()):
        return ["d2t does not give ascending, distinct target ids (are these ids instead of offsets?)"]
    if t2d is not None:
        if t2d.dtype != torch.bool or (vocab_size is not None and len(t2d) != vocab_size):
            return [f"t2d must be bool of length {vocab_size}, not {t2d.dtype} of {len(t2d)}"]
        if int(t2d.sum()) != len(ids) or not bool(t2d[ids].all()):
            return ["t2d does not mark the ids that d2t maps to"]
    return []
