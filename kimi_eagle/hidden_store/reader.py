"""A store opened for reading."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kimi_eagle.errors import BadInput
from kimi_eagle.hidden_store.files import NAMES, Entry, Row, read_index, read_manifest, shard_fault, whole_rows
from kimi_eagle.hidden_store.parts import parts, read_parts


class Store:
    """A store opened for reading, in one folder or in parts. Rows are read one slice at a time, never a whole shard."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest, self.shards, _ = self._read()
        self.entries = [Entry(shard=s["shard"], **row) for s in self.shards for row in s["rows"]]
        self.position = {e.sample_id: i for i, e in enumerate(self.entries)}
        self._open: tuple[str, Any] | None = None

    @property
    def sample_ids(self) -> list[str]:
        """Sample ids in the order they were stored."""
        return [e.sample_id for e in self.entries]

    @property
    def layer_ids(self) -> list[int]:
        """The S layer ids of axis 1 in vLLM's convention, the final state's last."""
        return list(self.manifest["layer_ids"])

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(e.end - e.start for e in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def row(self, sample: str | int) -> Row:
        """The row of a sample id, or of a position in the store."""
        if isinstance(sample, str) and sample not in self.position:
            raise BadInput(f"store {self.folder.name}: no sample {sample!r}.")
        entry = self.entries[self.position[sample] if isinstance(sample, str) else sample]
        file = self._file(entry.shard)
        return Row(entry.sample_id, *(file.get_slice(name)[entry.start : entry.end] for name in NAMES))

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(len(self)))

    def check(self) -> list[str]:
        """Every fault found: changed or cut files, row checksums, values that are not finite. Empty: the store is whole."""
        faults = self._read()[2]
        for shard in self.shards:
            name = shard["shard"]
            if fault := shard_fault(self.folder, shard):
                whole = {row.sample_id for row in whole_rows(self.folder, shard)}
                lost = [e["sample_id"] for e in shard["rows"] if e["sample_id"] not in whole]
                faults += [f"{name}: {fault}", *(f"{name}: row {row} does not fit its checksum" for row in lost)]
            else:
                faults += [
                    f"{name}: row {e['sample_id']} holds values that are not finite"
                    for e in shard["rows"]
                    if not torch.isfinite(self.row(e["sample_id"]).hidden_states).all()
                ]
        return faults

    def _read(self) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
        """Manifest, shards and faults of the index, of one store or of all parts."""
        pieces = [] if (self.folder / "manifest.json").is_file() else parts(self.folder)
        if pieces:
            return read_parts(self.folder, pieces)
        return read_manifest(self.folder), *read_index(self.folder)

    def _file(self, shard: str) -> Any:
        if self._open is None or self._open[0] != shard:
            self._open = (shard, safe_open(self.folder / shard, "pt"))
        return self._open[1]
