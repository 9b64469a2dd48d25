"""What an extraction costs, before anything is loaded: bytes per token, space, time. No vLLM, no torch."""

import shutil
from pathlib import Path
from typing import Any

from kimi_eagle.errors import BadInput

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SPARE = 1.05  # shard headers, index, and one shard written before the one it replaces is dropped


def bytes_per_token(states: int, hidden_size: int, dtype: str) -> int:
    """Bytes of one token's states: states x H x bytes per value, plus token id (int32) and mask (bool).

    Kimi-K2.5, three auxiliary states and the final one in bfloat16: 4 x 7168 x 2 = 57,344 (+ 5).
    """
    if dtype not in BYTES:
        raise BadInput(f"dtype {dtype!r}: use one of {', '.join(BYTES)}.")
    return states * hidden_size * BYTES[dtype] + 5


def cache_bytes_per_token(text_config: dict[str, Any], states: int, dtype: str) -> int:
    """Bytes of a token in the cache of an engine with the connector, on one rank: keys and values of all layers, and the states.

    Kimi-K2.5 in bfloat16: 61 layers x (512 + 64) x 2 = 70,272, and 57,344 of states.
    """
    if text_config.get("kv_lora_rank"):
        width = text_config["kv_lora_rank"] + text_config["qk_rope_head_dim"]
    else:
        heads = text_config["num_attention_heads"]
        size = text_config.get("head_dim") or text_config["hidden_size"] // heads
        width = 2 * size * (text_config.get("num_key_value_heads") or heads)
    return (text_config["num_hidden_layers"] * width + states * text_config["hidden_size"]) * BYTES[dtype]


def cache_excess(plan: Any, engine: Any) -> str:
    """A sentence where the cache of an engine with the connector takes over twice what it must per token; '' where it does not.

    Some releases pack the states into pages of another shape, up to 24 times their size: few requests then fit at once.
    """
    planned = engine.call("cache") if plan.backend == "connector" else {}
    if not planned:
        return ""
    needed = cache_bytes_per_token(plan.target.text_config, len(plan.layer_ids), plan.dtype)
    taken = planned["bytes"] / planned["tokens"]
    if taken <= 2 * needed:
        return ""
    return (
        f"warning: this vLLM's cache takes {taken:,.0f} bytes a token where states and keys are {needed:,}; few requests fit at "
        "once. Use extract_backend hooks where that is too slow."
    )


def check_space(folder: Path, tokens: int, states: int, hidden_size: int, dtype: str) -> int:
    """Bytes that `tokens` more tokens will take in `folder`; BadInput where its disk has less."""
    needed = int(tokens * bytes_per_token(states, hidden_size, dtype) * SPARE)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BadInput(
            f"extraction needs {needed / 1e9:.1f} GB for {tokens:,} tokens and {folder.name}'s disk has {free / 1e9:.1f} GB free; "
            "free some, choose another outputs folder, or lower max_prompts or answer_tokens."
        )
    return needed


def table(prepared: Any, answer_tokens: int, samples: int, states: int, hidden_size: int, dtype: str) -> Any:
    """What answering and storing `turns.Prepared` takes at most: rows, tokens, bytes per split, as a pandas table.

    Conversations that have their answers are counted as they are, without `answer_tokens` and `samples`. Raises BadInput
    where a split has no row: the next notebooks need both.
    """
    import pandas as pd

    if prepared.answers:
        answer_tokens, samples = 0, 1
    rows, given = [], prepared.answers or prepared.prompts
    for split in ("train", "heldout"):
        some = [p for p in given if p.split == split]
        if not some:
            raise BadInput(
                f"no row is on the {split} side of {len(given)}; give more rows or another held_out_fraction."
            )
        tokens = samples * sum(len(p.token_ids) + answer_tokens for p in some)
        size = tokens * bytes_per_token(states, hidden_size, dtype)
        rows.append(
            {
                "split": split,
                "rows": len(some) * samples,
                "tokens at most": tokens,
                "MB at most": round(size / 1e6, 1),
            }
        )
    return pd.DataFrame(rows).set_index("split")
