"""Is a draft worth training on this box? Step time as a function of the tokens in a step, times acceptance, per concurrency.

`sizes` says what a step must read and compute, `curve` what an AllReduce costs, `step` makes a step-time model of both and fits
it to measured steps, `forecast` turns it into tokens per second, the best k, the crossover and the needed acceptance length,
`published` holds figures of others with their sources. Nothing here imports an engine.
"""

from kimi_eagle.speedup.curve import Curve
from kimi_eagle.speedup.forecast import (
    Acceptance,
    best,
    crossings,
    crossover,
    faster_allreduce,
    forecast,
    needed_length,
    what_if,
)
from kimi_eagle.speedup.sizes import KIMI_K2, Sizes, draft_sizes, target_sizes
from kimi_eagle.speedup.step import Draft, Observation, StepModel, calibrate, fit

__all__ = [
    "KIMI_K2", "Acceptance", "Curve", "Draft", "Observation", "Sizes", "StepModel", "best", "calibrate", "crossings", "crossover",
    "draft_sizes", "faster_allreduce", "fit", "forecast", "needed_length", "target_sizes", "what_if",
]  # fmt: skip
