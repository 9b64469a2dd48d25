"""One cell, in the release's own environment: `python -m kimi_eagle.matrix.cell WORK BACKEND OUT`.

WORK is a folder of matrix/reference.py. OUT becomes {verdict: right|refused|wrong, error, sentence, seconds}: `error` is the
worst relative L2 error of a token's state at any layer, against Hugging Face; `right` is under BAR for every row.
"""

import importlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path

BAR = 1e-4
# First vLLM with multi-head latent attention on a CPU. 0.28 has it, but v1/attention/backends/mla/prefill/flash_attn.py:18 imports a
# name there that fa_utils.py defines on accelerators only.
MLA_ON_CPU = (0, 29)


def run(work: Path, name: str, environment: dict[str, str]) -> dict:
    """The cell's row; what cannot be right is refused before anything is loaded, anything else that goes wrong is `wrong`."""
    from kimi_eagle import target as targets
    from kimi_eagle.extract import backends
    from kimi_eagle.extract.states import Staging

    task = json.loads((work / "prompts.json").read_text())
    target = targets.describe(work / "checkpoint")
    facts = backends.installed_facts(dtype="float32")
    note = ""
    if target.is_mla and facts.vllm < MLA_ON_CPU:
        environment["VLLM_MLA_DISABLE"] = "1"
        note = " (VLLM_MLA_DISABLE=1: no MLA on a CPU before 0.29)"
    module = importlib.import_module(f"kimi_eagle.extract.{name}")
    verdict = module.probe(target, facts)
    if not verdict.can:
        return {"verdict": "refused", "error": None, "sentence": verdict.reason}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        requests = [{"id": str(i), "prompt_token_ids": p} for i, p in enumerate(task["prompts"])]
        with _engine(target, module, task["layer_ids"], environment) as engine:
            states = module.run(engine, requests, task["layer_ids"], Staging(folder))
            error = _worst(states, task["prompts"], work / "reference.safetensors")
    seconds = round(time.perf_counter() - begun, 1)
    good = error < BAR
    sentence = f"{verdict.reason}{note}" if good else f"states differ from Hugging Face by {error:.2g}{note}"
    return {"verdict": "right" if good else "wrong", "error": error, "sentence": sentence, "seconds": seconds}


class _engine:
    """An engine for the back end: vLLM's in a process of its own, or the generator of speculators in this one."""

    def __init__(self, target, module, layer_ids, environment):
        import os

        os.environ.update(environment)
        if module.NAME == "speculators":
            self.host = module.GeneratorHost(str(target.path), max_model_len=512)
            self.engine = self
        else:
            from dataclasses import replace

            from kimi_eagle.extract import configure, engine
            from kimi_eagle.matrix.reference import CHUNK_TOKENS

            limits = {"max_model_len": 256, "max_batched_tokens": CHUNK_TOKENS, "max_sequences": 8}
            config = configure.engine_config(target, "extract", **limits, **module.engine_options(layer_ids))
            config = replace(config, env={**config.env, **environment})
            self.host = None
            self.engine = engine.start(config, idle_minutes=5)

    def __enter__(self):
        return self.engine

    def __exit__(self, *_):
        if self.host:
            self.host.close()
        else:
            self.engine.down()

    def call(self, method, **arguments):
        """An engine's call, answered by the generator here."""
        return getattr(self.host, method)(lambda done, total: None, **arguments)


def _worst(found, prompts: list[list[int]], reference: Path) -> float:
    """Worst relative L2 error over tokens and layers; infinity where rows, tokens or shapes are not those asked for."""
    import torch
    from safetensors.torch import load_file

    expected, worst = load_file(reference), 0.0
    for index, prompt in enumerate(prompts):
        token_ids, states = found.row(str(index))
        right, states = expected[str(index)], states.float()
        if token_ids.tolist() != prompt or states.shape != right.shape or not torch.isfinite(states).all():
            return float("inf")
        worst = max(worst, ((states - right).norm(dim=-1) / right.norm(dim=-1)).max().item())
    return worst


def _sentence(error: Exception) -> str:
    """One line of an error: the last line of an engine's log that names an exception, else its first line; no folders of here."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    named = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception)\b", line)]
    text = f"{type(error).__name__}: {lines[0]}" + (f" {named[-1]}" if named else "")
    return re.sub(r"(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)


def main() -> None:
    """Run the cell of the command line; its row is written whatever happens."""
    work, name, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    cpu = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    try:
        row = run(work, name, cpu)
    except Exception as error:
        import traceback

        traceback.print_exc()
        row = {"verdict": "wrong", "error": None, "sentence": _sentence(error)}
    out.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
