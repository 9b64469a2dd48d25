"""Back end `speculators`: the reported path, speculators 0.3.0's own generator, with the patches that it needs here.

The generator holds its own vLLM executor, so an engine of this back end is a `GeneratorHost` and no vllm.LLM. Its layer ids
mean the state *after* a layer (vLLM's id minus one) and it keeps them as a set: what comes out is put back into the order,
and the repetitions, that were asked for.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

from kimi_eagle.errors import BadInput, MissingCapability
from kimi_eagle.extract.backends import Facts, Verdict
from kimi_eagle.extract.states import FileStates
from kimi_eagle.layer_ids import from_vllm
from kimi_eagle.target import Target

NAME = "speculators"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
CONVENTION = "speculators-0.3"
ENGINE_KEY = "kimi_eagle_engine"  # in engine_options: tells the engine's process to build a GeneratorHost


def probe(target: Target, facts: Facts) -> Verdict:
    """Whether speculators' in-process generator can be right here: version 0.3.0 and a vLLM that its patches know."""
    from kimi_eagle import compat

    if not facts.speculators:
        return Verdict(False, "speculators is not installed (the reported stack has 0.3.0: environments/vllm-0.16.yml)")
    if facts.speculators.split("+")[0] != "0.3.0":
        return Verdict(
            False, f"speculators {facts.speculators} is not 0.3.0: from 0.5 on it has no generator of its own"
        )
    if not (0, 16) <= facts.vllm < (0, 17):
        return Verdict(False, f"its private calls were made to fit vLLM 0.16 only, and this is vLLM {facts.vllm_text}")
    if facts.pipeline_parallel > 1 or facts.data_parallel > 1:
        return Verdict(False, "its worker captures on one pipeline and data-parallel rank only")
    if target.is_mla and facts.dtype in ("float16", "half"):
        return Verdict(
            False, "DeepSeek-type layers scale both streams in float16, so the states would be scaled: use bfloat16"
        )
    bad = [r for r in compat.compat_rows() if r["package"] == "speculators" and r["state"] in ("refused", "off")]
    if bad:
        return Verdict(False, f"patch {bad[0]['id']} is {bad[0]['state']}: {bad[0]['reason']}")
    return Verdict(True, f"speculators 0.3.0 on vLLM {facts.vllm_text} with its patches gives states after each layer")


def engine_options(layer_ids: list[int]) -> dict[str, Any]:
    """Marks the engine as one that holds a generator; the layer ids are given with each call."""
    return {ENGINE_KEY: NAME}


def run(engine: Any, requests: list[dict[str, Any]], layer_ids: list[int], folder: str) -> FileStates:
    """Prefill `requests` ({id, prompt_token_ids}); their states by request id, in files in `folder`."""
    paths = engine.call("extract", requests=requests, layer_ids=list(layer_ids), folder=folder)
    return FileStates({request["id"]: path for request, path in zip(requests, paths, strict=True)})


class GeneratorHost:
    """speculators' generator behind the calls of an engine; layer ids are vLLM's everywhere outside."""

    def __init__(self, target: str, max_model_len: int = 2048, tensor_parallel_size: int = 1, gpu_memory: float = 0.8):
        """Apply the patches here and load the target. Raises MissingCapability where a patch does not fit."""
        from kimi_eagle import compat

        compat.activate()
        module = importlib.import_module(GENERATOR)
        unfit = [
            r for r in compat.check() if r["id"].startswith("spec-") and r["state"] not in ("applied", "not needed")
        ]
        if unfit:
            raise MissingCapability(
                f"speculators cannot be used here: {unfit[0]['detail'] or unfit[0]['id'] + ' is off'}"
            )
        self.generator = module.VllmHiddenStatesGenerator(
            target,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory,
            tensor_parallel_size=tensor_parallel_size,
        )

    def states(self, prompts: list[list[int]], layer_ids: list[int]) -> list[Any]:
        """One tensor [tokens, len(layer_ids), hidden] per prompt, in the order (and repetitions) of `layer_ids`."""
        import torch

        longest = self.generator.vllm_config.model_config.max_model_len - 1
        too_long = [len(p) for p in prompts if len(p) > longest]
        if too_long:
            raise BadInput(f"a prompt of {too_long[0]} tokens: speculators cuts at {longest}; raise max_model_len.")
        wanted = from_vllm(layer_ids, CONVENTION)
        captured = sorted(set(wanted))
        if self.generator.layer_ids != captured:
            self.generator.layer_ids = captured
            self.generator._setup_capture()
        results = self.generator.generate(prompts)
        return [torch.stack([r["hidden_states"][captured.index(k)] for k in wanted], dim=1) for r in results]

    def extract(
        self, report: Callable[[int, int], None], requests: list[dict[str, Any]], layer_ids: list[int], folder: str
    ) -> list[str]:
        """Files (token_ids [T], hidden_states [T, S, H]) in `folder`, in the order of `requests`."""
        import torch
        from safetensors.torch import save_file

        os.makedirs(folder, exist_ok=True)
        paths = []
        found = self.states([list(r["prompt_token_ids"]) for r in requests], layer_ids)
        for done, (request, states) in enumerate(zip(requests, found, strict=True), 1):
            path = os.path.join(folder, f"{request['id']}.safetensors")
            save_file(
                {"hidden_states": states, "token_ids": torch.tensor(request["prompt_token_ids"])}, path + ".partial"
            )
            os.replace(path + ".partial", path)
            paths.append(path)
            report(done, len(requests))
        return paths

    def rpc(self, report: Callable[[int, int], None], name: str, args: list[Any]) -> list[Any]:
        """collective_rpc by method name in every worker."""
        return self.generator.executor.collective_rpc(name, args=tuple(args))

    def describe(self, report: Callable[[int, int], None]) -> dict[str, Any]:
        """What was loaded: versions, dtype, model class."""
        from importlib.metadata import version

        import torch
        import vllm

        config = self.generator.vllm_config.model_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "speculators": version("speculators"),
            "dtype": str(config.dtype).removeprefix("torch."),
            "architecture": config.architectures[0],
            "max_model_len": config.max_model_len,
        }

    def close(self) -> None:
        """End the workers."""
        self.generator.executor.shutdown()
