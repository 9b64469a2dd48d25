"""The house stands as drawn: imports run down only, and light commands stay light."""

import subprocess
import sys

import pytest

from kimi_eagle import paths

HEAVY = {"torch", "vllm", "transformers", "pandas", "matplotlib", "papermill"}


def test_import_contracts_are_kept() -> None:
    done = subprocess.run(
        ["lint-imports", "--no-cache"], cwd=paths.REPOSITORY, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-500:]


def test_a_room_that_the_contract_does_not_name_is_noticed() -> None:
    text = (paths.REPOSITORY / "pyproject.toml").read_text()
    assert "exhaustive = true" in text


@pytest.mark.parametrize(
    "module",
    ["kimi_eagle.cli", "kimi_eagle.notebook", "kimi_eagle.extract.engine", "kimi_eagle.compat", "kimi_eagle.check"],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(m for m in {sorted(HEAVY)!r} if m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == []


def environment() -> dict[str, str]:
    """This process's environment with its interpreter's scripts first on PATH."""
    import os
    from pathlib import Path

    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
