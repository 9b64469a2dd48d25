"""What the size of a draft vocabulary costs and loses: bytes that every draft pass reads, against acceptance length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kimi_eagle.speedup.published import CONSTANTS
from kimi_eagle.speedup.sizes import draft_sizes

# Unconditional acceptance of a published head with the whole vocabulary.
PUBLISHED = tuple(CONSTANTS[f"acceptance_{i}"][0] for i in (1, 2, 3))
UNITS = {
    "draft_vocab_size": "tokens", "coverage": "share of held-out answer tokens", "lm_head_bytes": "bytes", "pass_bytes": "bytes",
    "length": "tokens per target forward", "length_at_most": "tokens per target forward",
    "relative": "of the whole vocabulary's length", "relative_at_most": "of the whole vocabulary's length",
}  # fmt: skip


def trade(
    table: Sequence[Mapping[str, float]],
    text_config: Mapping[str, Any],
    *,
    attention: str,
    weight_bytes: float,
    per_position: Sequence[float] = PUBLISHED,
) -> pd.DataFrame:
    """Cost and loss per draft vocabulary size of `table` (draft_vocab_size and held_out coverage: `vocab_map.coverage_by_size`).

    per_position: unconditional acceptance u_1, u_2, ... of a head with the whole vocabulary; its conditional rates are
    r_i = u_i / u_(i-1). The target's token lies in a draft vocabulary of coverage c in a share c of all positions and cannot be
    accepted in the others, so the conditional rate of any head is at most c:

        length         = 1 + sum over i of the product over j <= i of c r_j
        length_at_most = 1 + sum over i of the product over j <= i of min(c, r_j)

    `length` assumes that the head would have been right on the tokens left out as often as on the others. They are rare ones, on which
    it is right less often, so the truth lies above; `length_at_most` assumes that it would have been wrong on all of them. Both
    assume that c is the same at every position of a draft, and that a head does not get better by having fewer tokens.

    Indexed by size: coverage, lm_head_bytes (size x hidden x weight_bytes), pass_bytes (weights that one draft pass over one
    token reads on one GPU, lm_head included), length, length_at_most, and both relative to the whole vocabulary's.
    """
    u = np.asarray(per_position, dtype=float)
    before = np.r_[1.0, u[:-1]]
    rates = np.divide(u, before, out=np.zeros_like(u), where=before > 0)
    rows = []
    for entry in table:
        size, c = int(entry["draft_vocab_size"]), entry["held_out"]
        head = draft_sizes(dict(text_config), attention=attention, draft_vocab=size, weight_bytes=weight_bytes)
        rows.append({
            "draft_vocab_size": size, "coverage": c, "lm_head_bytes": size * text_config["hidden_size"] * weight_bytes,
            "pass_bytes": head.dense_bytes, "length": _length(c * rates), "length_at_most": _length(np.minimum(c, rates)),
        })  # fmt: skip
    frame = pd.DataFrame(rows).set_index("draft_vocab_size")
    whole = _length(rates)
    return frame.assign(relative=frame["length"] / whole, relative_at_most=frame["length_at_most"] / whole)


def _length(conditional: np.ndarray) -> float:
    return 1.0 + float(np.cumprod(conditional).sum())
