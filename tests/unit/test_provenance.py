"""Provenance says what ran; scrubbing leaves nothing of the machine."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_eagle import paths
from kimi_eagle.notebook import provenance


def test_torch_version_has_its_local_part_without_importing_torch() -> None:
    code = (
        "import sys; from kimi_eagle.notebook import provenance as p; print(p.version('torch'), 'torch' in sys.modules)"
    )
    version, imported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    import torch

    assert version == torch.__version__ and imported == "False"


def test_versions_find_vllm_under_either_name() -> None:
    assert provenance.versions()["vllm"]


def test_outside_a_clone_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "REPOSITORY", tmp_path)
    assert provenance.commit() == provenance.dirty() == "unknown"


def test_collect_is_plain_data_without_machine_names() -> None:
    text = json.dumps(provenance.collect())
    assert provenance.scrub(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{paths.REPOSITORY}/kimi_eagle/cli.py", "./kimi_eagle/cli.py"),
        (f"see {Path.home()}/models/x", "see ~/models/x"),
        ("/usr/lib/python3/x.py:7", ".../x.py:7"),
        (f"{sys.prefix}/bin/python", "<environment>/bin/python"),
        ("tcp://10.1.2.3:5432", "tcp://address:5432"),
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("3/4 of 12 tok/s </div> /v1/completions /dev/shm", "3/4 of 12 tok/s </div> /v1/completions /dev/shm"),
        ("cuda 13.0.3.0", "cuda 13.0.3.0"),
    ],
)
def test_scrub(text: str, expected: str) -> None:
    assert provenance.scrub(text) == expected


def test_scrub_removes_host_and_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpubox17.example.org")
    monkeypatch.setattr(provenance.getpass, "getuser", lambda: "miriam")
    provenance._identities.cache_clear()
    try:
        assert provenance.scrub("miriam@gpubox17 on gpubox17.example.org") == "user@host on host"
    finally:
        provenance._identities.cache_clear()


def test_parameters_keep_no_absolute_path_but_tell_folders_apart() -> None:
    one, two = (provenance.public_parameters({"target": f"/models/{p}/kimi"})["target"] for p in "ab")
    assert one != two and one.startswith("kimi#") and "/" not in one
    inside = provenance.public_parameters({"prompts": f"{paths.REPOSITORY}/data/prompts.jsonl", "seed": 3})
    assert inside == {"prompts": "data/prompts.jsonl", "seed": 3}
