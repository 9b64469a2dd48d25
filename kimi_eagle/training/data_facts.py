"""What a head was trained on, measured on the store itself: how many samples, and whether the answers are the target's own."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from kimi_eagle.eagle3.loss import SLICE, TargetOutput

POSITIONS = 2048  # answer tokens looked at: a head's worth of evidence, and a few seconds of a small CPU
DEVIATIONS = 4.0  # of the mean, before the answers are called foreign
SLACK = 0.02  # nats; stored states differ from the answering engine's by rounding


class Rows(Protocol):
    """What is read of a store: its ids, and rows with token_ids [T], loss_mask [T], hidden_states [T, S, H]."""

    sample_ids: list[str]

    def row(self, sample_id: str) -> Any:
        """The row of one sample."""


@torch.inference_mode()
def data_facts(store: Rows, output: TargetOutput) -> dict[str, Any]:
    """{samples, surprise_nats, entropy_nats, own_answers} of a training store, from its first POSITIONS answer tokens.

    A token that the target drew itself (at temperature 1 or below) costs on average no more than the entropy of the
    distribution it was drawn from; text of another author costs more. The differences of an own text are uncorrelated, so
    the standard error of their mean is known.
    """
    whole = TargetOutput(output.norm, output.lm_head, output.eps, torch.arange(len(output.lm_head)))
    surprise, entropy = [], []
    for states, tokens in _slices(store):
        log_p = whole.draft_log_probs(states.to(output.lm_head.device))
        surprise.append(-log_p.gather(1, tokens.to(log_p.device)[:, None]).squeeze(1).cpu())
        entropy.append(-(log_p.exp() * log_p).sum(-1).cpu())
    if not surprise:
        return {"samples": len(store.sample_ids), "own_answers": False, "surprise_nats": 0.0, "entropy_nats": 0.0}
    paid, expected = torch.cat(surprise).double(), torch.cat(entropy).double()
    above = paid - expected
    error = float(above.std()) / len(above) ** 0.5 if len(above) > 1 else 0.0
    return {
        "samples": len(store.sample_ids),
        "own_answers": float(above.mean()) <= DEVIATIONS * error + SLACK,
        "surprise_nats": float(paid.mean()),
        "entropy_nats": float(expected.mean()),
    }


def _slices(store: Rows) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Final states [n, H] and the answer tokens [n] that follow them, sample by sample, up to POSITIONS in all."""
    left = POSITIONS
    for sample_id in store.sample_ids:
        row = store.row(sample_id)
        at = row.loss_mask[1:].nonzero().squeeze(1)[:left]
        left -= len(at)
        for part in at.split(SLICE):
            if len(part):
                yield row.hidden_states[part, -1], row.token_ids[part + 1].long()
        if not left:
            return
