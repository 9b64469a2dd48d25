"""Engines as a notebook asks for them: from its checked parameters to a running engine, in one call."""

import time
from typing import Any

from kimi_eagle.extract import engine
from kimi_eagle.extract.configure import engine_config
from kimi_eagle.target import Target

PATIENCE_S = 5.0


def options(cfg: Any) -> dict[str, Any]:
    """Keyword arguments of `engine_config` that a notebook's parameters decide (those it does not declare keep their defaults)."""
    names = {
        "dtype": "dtype",
        "tensor_parallel": "tensor_parallel",
        "max_model_len": "max_model_len",
        "max_batched_tokens": "max_batched_tokens",
        "max_sequences": "max_sequences",
        "engine_port": "port",
        "gpu_memory": "gpu_memory",
    }
    values = vars(cfg)
    return {option: values[name] for name, option in names.items() if name in values}


def open_engine(cfg: Any, target: Target, role: str, **llm: Any) -> engine.Engine:
    """Attach to or start the engine of `role` for `target`; `llm` adds keyword arguments of vllm.LLM."""
    return start(cfg, engine_config(target, role, **options(cfg), **llm))


def start(cfg: Any, config: engine.EngineConfig) -> engine.Engine:
    """Attach to or start the engine of a configuration, with the notebook's idle limit and a line of progress."""
    values = vars(cfg)
    return engine.start(
        config,
        idle_minutes=values.get("idle_minutes", 10),
        stay=values.get("engine_stay", False),
        alone=not values.get("engines_together", True),
        progress=Progress(config.role),
    )


def patches(running: engine.Engine) -> list[dict[str, Any]]:
    """What every worker of an engine says of the compat patches in its own process: [{id, state, detail, pid}].

    Those that are not for this environment (package not installed, fault not there) are left out.
    """
    rows = [row for worker in running.rpc("kimi_eagle_patches") for row in worker]
    return [row for row in rows if row["state"] not in ("not installed", "not needed")]


class Progress:
    """A plain progress bar that leaves few lines in a saved notebook: none for a call that is over within PATIENCE_S."""

    def __init__(self, label: str):
        self.label, self.bar, self.begun = label, None, None

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total` requests."""
        from tqdm import tqdm

        self.begun = self.begun or time.monotonic()
        if self.bar is None and done < total and time.monotonic() - self.begun > PATIENCE_S:
            self.bar = tqdm(total=total, desc=f"{self.label} engine", unit="request", mininterval=5)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
        if done >= total:
            if self.bar is not None:
                self.bar.close()
            self.bar, self.begun = None, None
