"""The store: resume after a kill at any moment, every changed byte found, rows of two targets never mixed."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from kimi_eagle.check import check
from kimi_eagle.errors import BadInput, StageFailed
from kimi_eagle.hidden_store import Store, StoreWriter, repair
from kimi_eagle.hidden_store.parts import part_name, part_of

MANIFEST = {
    "layer_ids": [2, 4],
    "layer_id_convention": "vllm",
    "hidden_size": 8,
    "dtype": "float32",
    "target": {"name": "toy"},
}


def sample(i: int) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    length = 3 + i % 5
    ids = torch.randint(0, 100, (length,), generator=generator, dtype=torch.int32)
    return f"s{i:03d}", ids, torch.arange(length) >= 2, torch.randn(length, 2, 8, generator=generator)


def fill(folder, numbers, shard_bytes=512):
    with StoreWriter(folder, MANIFEST, shard_bytes) as writer:
        for i in numbers:
            if f"s{i:03d}" not in writer.done:
                writer.add(*sample(i))


def assert_whole(folder, numbers):
    store = Store(folder)
    assert store.check() == []
    assert sorted(store.sample_ids) == sorted(f"s{i:03d}" for i in numbers)
    for i in numbers:
        name, ids, mask, states = sample(i)
        row = store.row(name)
        assert (
            torch.equal(row.token_ids, ids)
            and torch.equal(row.loss_mask, mask)
            and torch.equal(row.hidden_states, states)
        )
    assert not list(folder.glob("*.tmp"))


def test_rows_come_back_bit_by_bit_over_many_shards(tmp_path):
    fill(tmp_path / "s", range(20))
    assert len(list((tmp_path / "s").glob("shard-*"))) > 3
    assert_whole(tmp_path / "s", range(20))


def test_resume_adds_only_what_is_missing(tmp_path):
    fill(tmp_path / "s", range(7))
    before = {p.name: p.read_bytes() for p in (tmp_path / "s").glob("shard-*")}
    fill(tmp_path / "s", range(20))
    assert all((tmp_path / "s" / name).read_bytes() == data for name, data in before.items())
    assert_whole(tmp_path / "s", range(20))


def test_a_shard_outside_the_index_and_a_torn_line_do_not_exist(tmp_path):
    folder = tmp_path / "s"
    fill(folder, range(6))
    index = folder / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-9])  # the last line is torn: its shard is no longer indexed
    (folder / "shard-00099.safetensors.tmp").write_bytes(b"half")
    assert any("torn" in fault for fault in Store(folder).check())
    fill(folder, range(6))
    assert_whole(folder, range(6))


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_then_resumed_equals_an_uninterrupted_run(tmp_path, seed):
    folder = tmp_path / "s"
    code = f"import sys; sys.path.insert(0, {str(__file__.rsplit('/', 1)[0])!r}); import test_hidden_store as t, pathlib; print('go', flush=True); t.fill(pathlib.Path({str(folder)!r}), range(300))"
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.01, 0.25))
        process.send_signal(signal.SIGKILL)
        process.wait()
    fill(folder, range(300))
    assert_whole(folder, range(300))


def test_every_flipped_byte_is_found(tmp_path):
    folder = tmp_path / "s"
    fill(folder, range(8))
    files = [p for p in folder.iterdir() if p.name != ".lock"]
    chance = random.Random(0)
    for _ in range(150):
        path = chance.choice(files)
        whole = path.read_bytes()
        place = chance.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :])
        try:
            assert Store(folder).check(), f"byte {place} of {path.name}"
        except BadInput as error:
            assert "manifest" in str(error)
        path.write_bytes(whole)
    assert Store(folder).check() == []


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_a_cut_shard_is_found_and_its_rows_named(tmp_path, share):
    folder = tmp_path / "s"
    fill(folder, range(8))
    victim = sorted(folder.glob("shard-*"))[1]
    victim.write_bytes(victim.read_bytes()[: int(victim.stat().st_size * share)])
    assert any(victim.name in fault for fault in Store(folder).check())


def test_rows_that_are_not_finite_are_named_and_skipped(tmp_path):
    """T15."""
    with StoreWriter(tmp_path / "s", MANIFEST) as writer:
        for i, value in enumerate([0.0, float("nan"), float("inf")]):
            name, ids, mask, states = sample(i)
            states[1, 1, 3] += value
            writer.add(name, ids, mask, states)
    assert set(writer.rejected) == {"s001", "s002"} and writer.done == {"s000"}
    assert Store(tmp_path / "s").sample_ids == ["s000"]
    assert len((tmp_path / "s" / "rejected.jsonl").read_text().splitlines()) == 2


def test_another_manifest_is_refused(tmp_path):
    fill(tmp_path / "s", range(2))
    with pytest.raises(BadInput, match="layer_ids"):
        StoreWriter(tmp_path / "s", {**MANIFEST, "layer_ids": [1, 4]})


def test_two_writers_are_refused(tmp_path):
    with StoreWriter(tmp_path / "s", MANIFEST), pytest.raises(BadInput, match="another process"):
        StoreWriter(tmp_path / "s", MANIFEST)


def test_rows_with_a_wrong_shape_are_rejected(tmp_path):
    with StoreWriter(tmp_path / "s", MANIFEST) as writer:
        name, ids, mask, states = sample(0)
        assert not writer.add(name, ids, mask, states[:-1])
    assert json.loads((tmp_path / "s" / "rejected.jsonl").read_text())["sample_id"] == "s000"


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "index.jsonl"])
def test_repair_drops_exactly_the_damaged_rows_and_resume_extracts_them_again(tmp_path, name):
    folder = tmp_path / "s"
    fill(folder, range(8))
    rows = [e.sample_id for e in Store(folder).entries if e.shard == "shard-00001.safetensors"]
    path = folder / name
    data = bytearray(path.read_bytes())
    row = Store(folder).row(rows[-1])
    place = data.index(row.hidden_states.numpy().tobytes()) if name != "index.jsonl" else data.index(rows[0].encode())
    data[place] ^= 4
    path.write_bytes(data)
    assert Store(folder).check()
    said = repair(folder)
    lost = rows if name == "index.jsonl" else rows[-1:]
    assert Store(folder).check() == [] and len(said) >= 1
    assert sorted(set(rows) - set(Store(folder).sample_ids)) == lost
    fill(folder, range(8))
    assert_whole(folder, range(8))


def test_a_shard_that_was_cut_is_extracted_again_without_being_asked(tmp_path):
    folder = tmp_path / "s"
    fill(folder, range(8))
    victim = sorted(folder.glob("shard-*"))[1]
    os.truncate(victim, victim.stat().st_size // 2)
    with StoreWriter(folder, MANIFEST) as writer:
        assert writer.dropped and not set(writer.dropped) & writer.done
    fill(folder, range(8))
    assert_whole(folder, range(8))


def test_a_disk_that_takes_no_more_is_one_sentence_and_what_was_stored_stays(tmp_path):
    folder = tmp_path / "s"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill(folder, range(8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StageFailed, match=r"store s: writing failed .*File too large.* resume"):
            fill(folder, range(100), 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_whole(folder, range(8))
    fill(folder, range(100), 8192)
    assert_whole(folder, range(100))


def fill_parts(folder, numbers, count, manifest=MANIFEST):
    for part in range(count):
        with StoreWriter(folder / part_name(part, count), manifest, 512) as writer:
            for i in numbers:
                if part_of(f"s{i:03d}", count) == part:
                    writer.add(*sample(i))


def test_parts_are_read_as_one_store_with_every_row_once(tmp_path):
    fill_parts(tmp_path / "s", range(30), 3)
    assert all(len(Store(p)) for p in sorted((tmp_path / "s").iterdir()))
    assert_whole(tmp_path / "s", range(30))
    assert check(tmp_path / "s") == ("hidden-state store", [])
    victim = next((tmp_path / "s").glob("part-0002*/shard-00001*"))
    os.truncate(victim, 100)
    assert any("part-0002-of-0003/shard-00001" in fault for fault in Store(tmp_path / "s").check())
    assert repair(tmp_path / "s") and Store(tmp_path / "s").check() == []


def test_parts_that_do_not_make_one_store_are_refused(tmp_path):
    fill_parts(tmp_path / "a", range(30), 3)
    shutil.copytree(tmp_path / "a" / part_name(1, 3), tmp_path / "b" / part_name(0, 2))
    shutil.copytree(tmp_path / "a" / part_name(1, 3), tmp_path / "b" / part_name(1, 2))
    with pytest.raises(BadInput, match=r"sample s0\d\d is in part-0000-of-0002 and in part-0001-of-0002"):
        Store(tmp_path / "b")
    shutil.copytree(tmp_path / "b" / part_name(0, 2), tmp_path / "a" / part_name(0, 2))
    with pytest.raises(BadInput, match="parts of 2 and of 3"):
        Store(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / part_name(0, 2))
    shutil.rmtree(tmp_path / "a" / part_name(2, 3))
    with pytest.raises(BadInput, match=r"part-0002-of-0003 is not there"):
        Store(tmp_path / "a")
    with StoreWriter(tmp_path / "a" / part_name(2, 3), {**MANIFEST, "layer_ids": [1, 4]}):
        pass
    with pytest.raises(BadInput, match=r"part-0002-of-0003 was made with other layer_ids"):
        Store(tmp_path / "a")
