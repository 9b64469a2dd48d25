"""The training-time-test loss of one packed row."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from kimi_eagle.eagle3.loss import TargetOutput, sliced_loss
from kimi_eagle.eagle3.model import Head, start, training_origins
from kimi_eagle.training.rows import Packed

CACHE_BYTES = (
    1 << 30
)  # the target's distribution is kept over the steps of a row up to this size, else remade per slice


@dataclass
class RowCounts:
    """Raw sums per TTT step: trained positions, positions whose arg-max agrees with the target's, and the loss."""

    trained: list[int] = field(default_factory=list)
    matched: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)


def trained_positions(row: Packed, steps: int) -> list[Tensor]:
    """Per step the mask [T] of origins with a trained label; a chain ends where its text leaves the answer, for good."""
    masks = (training_origins(row.documents, row.loss_mask, step) for step in range(steps))
    return list(accumulate(masks, torch.logical_and))


def row_loss(
    head: Head,
    output: TargetOutput,
    row: Packed,
    steps: int,
    loss: str,
    scales: list[float],
    flex: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, RowCounts]:
    """Sum over steps of scales[j] * (summed loss of step j), and the raw counts.

    A row without a trained position gives a zero that has no gradient. `scales` holds the steps' weights divided by
    their trained positions in the whole batch, so that every trained position of a step counts alike.
    """
    masks, counts = trained_positions(row, steps), RowCounts()
    origins = masks[0].nonzero().squeeze(1)
    total = torch.zeros((), device=row.tokens.device)
    if not len(origins):
        nothing = torch.zeros((), device=row.tokens.device)
        return total, RowCounts([0] * steps, [nothing.long()] * steps, [nothing] * steps)
    log_p = _target_log_probs(output, row.states[:, -1], masks)
    if flex:  # compiled per shape: every position is an origin, and those without a label are left out of the loss
        origins = torch.arange(len(row.tokens), device=row.tokens.device)
    chain = start(head, row.states[:, :-1], row.tokens, row.documents, origins, flex, recompute)
    for step in range(steps):
        if step:
            fed = (origins + 1 + step).clamp(
                max=len(row.tokens) - 1
            )  # beyond the text: a chain that is trained no more
            chain.advance(row.tokens[fed])
        kept = masks[step][origins].nonzero().squeeze(1)
        at = origins[kept] + 1 + step
        value, matched = sliced_loss(loss, chain.hidden[kept], head.lm_head.weight, lambda part, at=at: log_p(at[part]))
        total = total + value * scales[step]
        counts.trained.append(len(kept))
        counts.matched.append(matched)
        counts.loss.append(value.detach())
    return total, counts


def _target_log_probs(output: TargetOutput, states: Tensor, masks: list[Tensor]):
    """A function from positions [n] to the target's log p [n, Vd] there, kept for the row where that is small enough."""
    needed = torch.zeros(len(states), dtype=torch.bool, device=states.device)
    for step, mask in enumerate(masks):
        needed[mask.nonzero().squeeze(1) + 1 + step] = True
    at = needed.nonzero().squeeze(1)
    if len(at) * len(output.draft_rows) * 4 > CACHE_BYTES:
        return lambda positions: output.draft_log_probs(states[positions])
    kept = output.draft_log_probs(states[at])
    place = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    place[at] = torch.arange(len(at), device=states.device)
    return lambda positions: kept[place[positions]]
