"""Packed rows: whole texts side by side up to a fixed number of tokens, in an order that the seed and the epoch decide."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kimi_eagle import vocab_map
from kimi_eagle.errors import BadInput
from kimi_eagle.hidden_store import Store

if TYPE_CHECKING:
    from kimi_eagle.target import Target

OPEN_ROWS = 16  # rows that still take a text while packing; more pack tighter but keep a batch's texts less random


class Piece(NamedTuple):
    """Tokens begin..end of one sample."""

    sample_id: str
    begin: int
    end: int


class Packed(NamedTuple):
    """One row: tokens [T], documents [T] (which text), loss_mask [T], states [T, S, Ht]."""

    tokens: Tensor
    documents: Tensor
    loss_mask: Tensor
    states: Tensor


def tokens(pieces: list[Piece]) -> int:
    """Tokens of a planned row."""
    return sum(piece.end - piece.begin for piece in pieces)


def plan(store: Store, row_tokens: int, seed: int, epoch: int) -> list[list[Piece]]:
    """Rows of an epoch: samples shuffled, then first-fit into the open rows; a sample longer than a row is cut into pieces.

    The plan depends on the seed, the epoch and the store alone, so that a resumed run continues the same order.
    """
    order = list(store.entries)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    pieces = [
        Piece(e.sample_id, begin, min(begin + row_tokens, e.end - e.start))
        for e in order
        for begin in range(0, e.end - e.start, row_tokens)
    ]
    full: list[list[Piece]] = []
    opened: list[tuple[int, list[Piece]]] = []
    for piece in pieces:
        size = piece.end - piece.begin
        fitting = next((i for i, (used, _) in enumerate(opened) if used + size <= row_tokens), None)
        if fitting is None:
            opened.append((size, [piece]))
        else:
            used, row = opened[fitting]
            opened[fitting] = (used + size, [*row, piece])
        if len(opened) > OPEN_ROWS:
            fullest = max(range(len(opened)), key=lambda i: opened[i][0])
            full.append(opened.pop(fullest)[1])
    return full + [row for _, row in opened]


def load(store: Store, pieces: list[Piece], device: torch.device, dtype: torch.dtype, padded_to: int = 0) -> Packed:
    """Read a planned row from the store onto `device`, states in `dtype`, filled up to `padded_to` tokens (0: as it is).

    The filling is a document of its own (-1) without a trained token, so nothing sees it and it counts nowhere.
    """
    parts = []
    for number, piece in enumerate(pieces):
        row, cut = store.row(piece.sample_id), slice(piece.begin, piece.end)
        number_of = torch.full((piece.end - piece.begin,), number)
        parts.append((row.token_ids[cut].long(), number_of, row.loss_mask[cut].bool(), row.hidden_states[cut]))
    missing = padded_to - sum(len(part[0]) for part in parts)
    if missing > 0:
        nothing = torch.zeros(missing, dtype=torch.int64)
        states = parts[0][3].new_zeros(missing, *parts[0][3].shape[1:])
        parts.append((nothing, nothing - 1, nothing.bool(), states))
    ids, documents, mask, states = (torch.cat(column) for column in zip(*parts, strict=True))
    return Packed(ids.to(device), documents.to(device), mask.to(device), states.to(device, dtype))


def check_stores(train: Store, held_out: Store, target: "Target") -> tuple[int, ...]:
    """The auxiliary layer ids that both stores hold; BadInput where they differ, share samples or are of another target."""
    expected = target.identity()
    for store in (train, held_out):
        made_for, name = store.manifest.get("target") or {}, store.folder.name
        changed = sorted(k for k in expected.keys() & made_for.keys() if expected[k] != made_for[k])
        if changed:
            raise BadInput(f"store {name}: made for a target with other {', '.join(changed)}; extract again.")
        if store.manifest.get("layer_id_convention") != "vllm":
            raise BadInput(f"store {name}: its layer ids are not in vLLM's convention; extract again.")
        if store.layer_ids[-1] != target.num_layers:
            raise BadInput(
                f"store {name}: its last state is of layer {store.layer_ids[-1]}, not the final one; extract again."
            )
        if not len(store):
            raise BadInput(f"store {name}: holds no sample; look at its rejected.jsonl.")
    if train.layer_ids != held_out.layer_ids:
        raise BadInput(
            f"training states are of layers {train.layer_ids}, held-out ones of {held_out.layer_ids}; extract both alike."
        )
    shared = set(train.sample_ids) & set(held_out.sample_ids)
    if shared:
        raise BadInput(
            f"{len(shared)} samples are in both stores (e.g. {min(shared)}): held-out acceptance would flatter the head."
        )
    return tuple(train.layer_ids[:-1])


def load_map(file: Path | None, store: Store, target: "Target") -> vocab_map.VocabMap | None:
    """The vocabulary map in `file`, None without one; BadInput where it was made for another tokenizer or other rows."""
    if file is None:
        return None
    return vocab_map.load(
        Path(file),
        vocab_size=target.vocab_size,
        tokenizer_sha256=target.tokenizer_sha256,
        data_sha256=vocab_map.count_tokens(store, target.vocab_size).data_sha256,
    )
