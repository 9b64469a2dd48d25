"""Acceptance of a head without an engine: first-k-correct chains over stored states.

From origin t of a recorded text the head drafts k tokens, its own tokens and states fed back, as served. Token i is held
against the target's choice at position t + 1 + i. The stored states give that choice along the recorded text alone, so
position i + 1 is tested only where token i was accepted *and* is what the text says; elsewhere the draft counts as drafted
but not tested (on a greedy text the two conditions are one).

`reference`: "greedy" holds tokens against the target's arg-max over its full vocabulary (a token outside the draft
vocabulary is a miss); "recorded" against the text itself, which for a sampled text estimates sampled serving at that
temperature, since a greedy draft token is then accepted with the target's probability of it.

`walk`: False starts a chain at every position of the answer; True only where a served engine would: the first answer token,
then after each accepted run and its bonus token. The walk visits the hard places more often (it starts where the last draft
failed), so its rates are lower; it is the one to hold against served figures.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from kimi_eagle.acceptance.statistics import RequestCounts
from kimi_eagle.eagle3.loss import TargetOutput
from kimi_eagle.eagle3.model import Head, start


class Rows(Protocol):
    """What is read of a store: its ids, and rows with token_ids [T], loss_mask [T], hidden_states [T, S, H]."""

    sample_ids: list[str]

    def row(self, sample_id: str) -> Any:
        """The row of one sample."""


@torch.inference_mode()
def greedy_tokens(store: Rows, output: TargetOutput, sample_ids: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Per sample the target's arg-max token at every position that predicts an answer token, -1 elsewhere: [T] int64."""
    found = {}
    for sample_id in sample_ids or store.sample_ids:
        row = store.row(sample_id)
        wanted = torch.cat((row.loss_mask[1:], row.loss_mask[:1] & False)).nonzero().squeeze(1)
        tokens = torch.full((len(row.token_ids),), -1, dtype=torch.int64)
        tokens[wanted] = output.arg_max(row.hidden_states[wanted, -1].to(output.lm_head.device)).cpu()
        found[sample_id] = tokens
    return found


@torch.inference_mode()
def simulate(
    store: Rows,
    head: Head,
    output: TargetOutput | None,
    k: int,
    *,
    reference: str = "greedy",
    walk: bool = False,
    greedy: dict[str, Tensor] | None = None,
    sample_ids: Iterable[str] | None = None,
) -> list[RequestCounts]:
    """Raw acceptance counts of `head` per sample of `store`, k draft tokens a chain; samples without an origin are left out.

    `greedy` (from `greedy_tokens`) saves recomputing the target's choices; without it `output` makes them.
    """
    ids = list(sample_ids or store.sample_ids)
    if reference == "greedy" and greedy is None:
        greedy = greedy_tokens(store, output, ids)
    counted = []
    for sample_id in ids:
        row = store.row(sample_id)
        tokens, mask = row.token_ids.long(), row.loss_mask.bool()
        choice = greedy[sample_id] if reference == "greedy" else torch.cat((tokens[1:], tokens[-1:]))
        origins = (mask[1:-1] & mask[2:]).nonzero().squeeze(1)  # t + 1 is emitted, t + 2 is an answer token
        if len(origins):
            drafts = draft_chains(head, row.hidden_states[:, :-1], tokens, origins, k)
            counted.append(_count(sample_id, drafts, tokens, mask, choice, origins, walk))
    return counted


def draft_chains(head: Head, aux: Tensor, tokens: Tensor, origins: Tensor, k: int) -> Tensor:
    """The k greedy draft tokens (target ids) from every origin [M, k], the head's own tokens fed back."""
    device, dtype = head.fc.weight.device, head.fc.weight.dtype
    chain = start(head, aux.to(device, dtype), tokens.to(device), origins=origins.to(device))
    drafted = [head.draft_tokens(chain.hidden)]
    for _ in range(k - 1):
        drafted.append(head.draft_tokens(chain.advance(drafted[-1]).hidden))
    return torch.stack(drafted, dim=1).cpu()


def _count(
    sample_id: str, drafts: Tensor, tokens: Tensor, mask: Tensor, choice: Tensor, origins: Tensor, walk: bool
) -> RequestCounts:
    M, k = drafts.shape
    tested, accepted = torch.zeros(M, k, dtype=torch.bool), torch.zeros(M, k, dtype=torch.bool)
    alive = torch.ones(M, dtype=torch.bool)
    for i in range(k):
        at = (origins + 2 + i).clamp(max=len(tokens) - 1)  # index of the token that draft token i proposes
        alive &= (origins + 2 + i < len(tokens)) & mask[at]
        hit = drafts[:, i] == choice[at - 1]
        tested[:, i], accepted[:, i] = alive, alive & hit
        alive = alive & hit & (drafts[:, i] == tokens[at])
    kept = _walked(origins.tolist(), accepted.sum(1).tolist()) if walk else torch.arange(M)
    drafted = [len(kept)] * k
    return RequestCounts.of(sample_id, drafted, accepted[kept].sum(0).tolist(), tested[kept].sum(0).tolist())


def _walked(origins: list[int], runs: list[int]) -> Tensor:
    """Indices of the origins at which a served chain starts: each jumps over the accepted run and the bonus token."""
    kept, following = [], origins[0]
    for index, origin in enumerate(origins):
        if origin >= following:
            kept.append(index)
            following = origin + runs[index] + 1
    return torch.tensor(kept, dtype=torch.int64)
