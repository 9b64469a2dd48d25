"""The store over many kills, flipped bytes, cuts, full disks and gigabytes (`make test-long`)."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_hidden_store import MANIFEST, assert_whole, fill, sample

from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.hidden_store import Store, StoreWriter, repair

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
KILLS, FLIPS, ROWS = 95, 1000, 8


def stored(folder: Path) -> dict[str, str]:
    """Sample id -> its shard, as the index says."""
    return {e.sample_id: e.shard for e in Store(folder).entries}


def resume(folder: Path) -> list[str]:
    """Extract again what is missing; the ids that were."""
    added = []
    with StoreWriter(folder, MANIFEST, 512) as writer:
        for i in range(ROWS):
            if f"s{i:03d}" not in writer.done:
                writer.add(*sample(i))
                added.append(f"s{i:03d}")
    return added


def row_at(path: Path, place: int, entries: list) -> set[str] | None:
    """The rows of a shard file that hold byte `place` (none: in `offsets`), or None where it is the header's."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    if place < begin:
        return None
    header = json.loads(data[8:begin])
    for name, tensor in header.items():
        low, high = tensor["data_offsets"] if name != "__metadata__" else (0, 0)
        if low <= place - begin < high and name != "offsets":
            token = (place - begin - low) * tensor["shape"][0] // (high - low)
            return {e.sample_id for e in entries if e.start <= token < e.end}
    return set()


def test_killed_at_95_random_moments_the_store_equals_an_uninterrupted_one(tmp_path):
    chance, kills, folder, number = random.Random(7), 0, tmp_path / "s0", 0
    while kills < KILLS:
        child = os.fork()
        if not child:
            fill(folder, range(300))
            os._exit(0)
        time.sleep(chance.uniform(0.005, 0.6))
        os.kill(child, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            kills += 1
        else:  # it was through before the moment: another store
            assert_whole(folder, range(300))
            number += 1
            folder = tmp_path / f"s{number}"
    fill(folder, range(300))
    assert_whole(folder, range(300))


def test_1000_flipped_bytes_are_found_and_only_their_rows_are_extracted_again(tmp_path):
    fill(tmp_path / "whole", range(ROWS))
    before, entries = stored(tmp_path / "whole"), Store(tmp_path / "whole").entries
    files = sorted(p.name for p in (tmp_path / "whole").iterdir() if p.name != ".lock")
    chance = random.Random(0)
    for number in range(FLIPS):
        folder = tmp_path / f"flip{number}"
        shutil.copytree(tmp_path / "whole", folder)
        path = folder / chance.choice(files)
        data = bytearray(path.read_bytes())
        place = chance.randrange(len(data))
        mine = [e for e in entries if e.shard == path.name]
        exact = row_at(path, place, mine) if mine else None
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        where = f"byte {place} of {path.name}"
        if path.name == "manifest.json":
            for use in (lambda f: Store(f).check(), repair, resume):
                with pytest.raises(BadInput, match=r"manifest|schema"):
                    use(folder)
        else:
            assert Store(folder).check(), where
            said = repair(folder)
            assert Store(folder).check() == [], where
            gone = set(before) - set(stored(folder))
            assert all(any(name in line for line in said) for name in gone) or path.name == "index.jsonl"
            if exact is not None:
                assert gone == exact, where
            elif mine:  # the header: at most the rows of its own shard
                assert gone <= {e.sample_id for e in mine}, where
            else:  # a line of the index, or two where the byte parted them
                assert 1 <= len({before[name] for name in gone}) <= 2, where
            assert set(resume(folder)) == gone, where
            assert_whole(folder, range(ROWS))
        shutil.rmtree(folder)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_every_cut_file_is_found_and_only_its_rows_are_extracted_again(tmp_path, share):
    fill(tmp_path / "whole", range(ROWS))
    before = stored(tmp_path / "whole")
    for name in sorted(p.name for p in (tmp_path / "whole").iterdir() if p.name != ".lock"):
        folder = tmp_path / f"{name}-{share}"
        shutil.copytree(tmp_path / "whole", folder)
        os.truncate(folder / name, int((folder / name).stat().st_size * share))
        if name == "manifest.json":
            with pytest.raises(BadInput, match="manifest"):
                Store(folder).check()
            continue
        assert Store(folder).check()
        kept = {shard for shard in before.values() if shard != name}
        if name == "index.jsonl":
            kept = set(stored(folder).values())
        assert set(resume(folder)) == {row for row, shard in before.items() if shard not in kept}
        assert_whole(folder, range(ROWS))


@pytest.mark.parametrize("seed", range(6))
def test_a_disk_that_fills_stops_in_a_sentence_and_the_store_goes_on_when_there_is_room(tmp_path, seed):
    size, disk = random.Random(seed).randrange(64, 1500), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        with pytest.raises(StageFailed, match=r"writing failed .*No space left"):
            fill(disk / "s", range(4000), 4096)
        whole = [int(name[1:]) for name in stored(disk / "s")]
        for i in whole:
            assert Store(disk / "s").row(f"s{i:03d}").hidden_states.equal(sample(i)[3])
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        goal = range(len(whole) + 50)
        fill(disk / "s", goal, 4096)
        assert_whole(disk / "s", goal)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # files that a failed test still maps do not hold it


GIGABYTES = """
import resource, sys, torch
from kimi_eagle.hidden_store import Store, StoreWriter
shape, total = (8, 4, 512), 10e9
states = torch.randn(shape)
rows = int(total / states.nbytes)
manifest = {"layer_ids": [1, 2, 3, 4], "layer_id_convention": "vllm", "hidden_size": 512, "target": {}}
held = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
begun = held()
with StoreWriter(sys.argv[1], manifest) as writer:
    for i in range(rows):
        states[0, 0, 0] = i
        writer.add(f"s{i}", torch.full((8,), i % 1000), torch.ones(8, dtype=torch.bool), states.clone())
written = held()
assert sum(int(row.hidden_states[0, 0, 0] == i) for i, row in enumerate(Store(sys.argv[1]))) == rows
print(rows, begun, written, held())
"""


def test_ten_gigabytes_of_tiny_rows_pass_through_less_than_half_a_gigabyte_of_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < 12e9:
        pytest.skip("needs 12 GB of free disk")
    try:
        done = subprocess.run([sys.executable, "-c", GIGABYTES, tmp_path / "s"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-500:]
        rows, begun, written, read = map(float, done.stdout.split())
        print(f"{rows:.0f} rows: {begun:.0f} MB at first, {written:.0f} after writing, {read:.0f} after reading")
        assert sum(p.stat().st_size for p in (tmp_path / "s").glob("shard-*")) > 9.9e9
        assert read - begun < 500
    finally:
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
