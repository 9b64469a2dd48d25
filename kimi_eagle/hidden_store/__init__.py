"""The hidden-state store: bounded shards, an index that alone says what exists, checksums over every byte.

    manifest.json            what the rows are: target identity, layer ids and their convention, axes, width, dtype, engine
    shard-NNNNN.safetensors  token_ids [T] int32, loss_mask [T] bool, hidden_states [T, S, H], offsets [n + 1] int64
    index.jsonl              one line a shard, appended after the shard is synced and renamed: rows, ranges, checksums
    rejected.jsonl           rows that were not stored, with the reason

A kill at any moment leaves whole shards and at most one temporary file and one torn index line; both are dropped when the
store is opened for writing again, and `done` says which samples need not be extracted again. So are shards that were lost or cut
since; `repair` finds changed bytes too. A folder of `part-i-of-n` folders, each such a store, is read as one.
"""

from kimi_eagle.hidden_store.files import Row
from kimi_eagle.hidden_store.reader import Store
from kimi_eagle.hidden_store.writer import StoreWriter, repair

__all__ = ["Row", "Store", "StoreWriter", "repair"]
