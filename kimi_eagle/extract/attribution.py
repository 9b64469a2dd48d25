"""Which row of a step belongs to which request, from what the layers themselves were given."""

from typing import Any

from kimi_eagle.errors import StageFailed


def attribute(
    ids: Any, positions: Any, scheduled: dict[str, tuple[int, int]], prompts: dict[str, Any]
) -> list[tuple[str, int, int, int]]:
    """(request, row offset, first position, rows) for the prompt rows of one step.

    `ids` and `positions` are the step's flat rows (padding may follow), `scheduled` maps a request to (first position, rows).
    A prompt's beginning may be any rows with its tokens and positions: causal states depend on nothing else. Rows that continue
    a prompt must be the only ones with their tokens and positions, unless all requests that could own them have the same past.
    Raises StageFailed where that does not hold, or where a request has no rows.
    """
    import numpy as np

    ids, positions = np.asarray(ids), np.asarray(positions)
    spans, offset, taken = [], 0, set()
    for rid, (start, count) in scheduled.items():
        prompt = np.asarray(prompts.get(rid, ()), dtype=ids.dtype)
        end = min(start + count, len(prompt))  # rows past the prompt are decoded tokens: known by position alone
        expected, offset = offset, offset + count
        if end <= start:
            continue
        if not start and _fits(ids, positions, expected, prompt[:end], 0):
            found = [expected]
        else:
            found = [
                int(r) for r in np.flatnonzero(positions == start) if _fits(ids, positions, r, prompt[start:end], start)
            ]
        if not found:
            raise StageFailed(f"hooks: the rows of a step fit no scheduled request {rid} from position {start}.")
        if start and len(found) > 1 and not _one_past(rid, start, end, scheduled, prompts):
            raise StageFailed(
                f"hooks: rows from position {start} fit several requests with different pasts; raise max_batched_tokens."
            )
        row = next((r for r in found if r not in taken), found[0])
        taken.add(row)
        spans.append((rid, row, start, end - start))
    return spans


def _fits(ids: Any, positions: Any, row: int, tokens: Any, start: int) -> bool:
    """Whether `tokens` at positions from `start` are the rows from `row`."""
    end = row + len(tokens)
    if end > len(ids) or positions[row] != start or positions[end - 1] != start + len(tokens) - 1:
        return False
    return bool((ids[row:end] == tokens).all() and (positions[row + 1 : end] > positions[row : end - 1]).all())


def _one_past(rid: str, start: int, end: int, scheduled: dict[str, tuple[int, int]], prompts: dict[str, Any]) -> bool:
    """Whether all requests of a step with this one's tokens from `start` to `end` have its tokens before them, too."""
    own = list(prompts[rid][:end])
    rivals = (r for r, (s, n) in scheduled.items() if s <= start and s + n >= end and r != rid)
    same = (r for r in rivals if list(prompts.get(r, ())[start:end]) in (own[start:], []))
    return all(list(prompts.get(r, ())[:end]) == own for r in same)
