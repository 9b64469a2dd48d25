"""Is a draft worth training on this box? Step time as a function of the tokens in a step, times acceptance, per concurrency.

`sizes` says what a step must read and compute, `curve` what an AllReduce costs, `step` makes a step-time model of both and fits
it to measured steps, `outlook` turns it into tokens per second, the best k, the crossover and the needed acceptance length,
`published` holds figures of others with their sources. Nothing here imports an engine.
"""

import importlib
from typing import Any

# Loaded when asked for: `kimi-eagle estimate` needs the sizes alone, and pandas takes a second.
_HOMES = {
    "curve": ("Curve",),
    "sizes": ("KIMI_K2", "Sizes", "draft_sizes", "target_sizes"),
    "step": ("Draft", "Observation", "StepModel", "calibrate", "fit"),
    "outlook": (
        "Acceptance",
        "best",
        "crossings",
        "crossover",
        "faster_allreduce",
        "forecast",
        "needed_length",
        "what_if",
    ),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"kimi_eagle.speedup.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
