"""Back end `hooks`: forward hooks on the decoder layers, put there by `worker_extension_cls`, on vLLM's public surface.

Which row belongs to which request is decided from what the layers themselves are given (token ids and positions) against
what the scheduler sent, never from the runner's own batch: its V2 has no `input_batch`, and V1 reorders it. A row that
fits no request, or two with different pasts, ends the run instead of being guessed.
"""

import os
from typing import Any

from kimi_eagle.errors import StageFailed
from kimi_eagle.extract.backends import Facts, Verdict
from kimi_eagle.extract.recorder import Memory, Recorder
from kimi_eagle.extract.states import Staging, StepStates
from kimi_eagle.target import Target

NAME = "hooks"


def probe(target: Target, facts: Facts) -> Verdict:
    """Whether layer hooks see whole, unscaled states here."""
    if facts.vllm < (0, 16):
        return Verdict(False, f"vLLM {facts.vllm_text} is older than 0.16, the first version this was tried on")
    if facts.data_parallel > 1 or facts.pipeline_parallel > 1:
        return Verdict(
            False, "a hook sees only its own rank's rows under data or pipeline parallelism: run with both at 1"
        )
    if target.is_mla and facts.dtype in ("float16", "half"):
        return Verdict(
            False, "DeepSeek-type layers scale both streams in float16, so the states would be scaled: use bfloat16"
        )
    return Verdict(True, f"forward hooks see every layer of vLLM {facts.vllm_text} in eager mode")


def engine_options(layer_ids: list[int]) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for this back end; the layer ids are given later, so any of them share one engine."""
    return {"worker_extension_cls": "kimi_eagle.extract.hooks.HooksExtension", "enforce_eager": True}


def run(engine: Any, requests: list[dict[str, Any]], layer_ids: list[int], staging: Staging) -> StepStates:
    """Prefill `requests`; their states by request id, in a file of `staging` where the last ones may still arrive."""
    lease = staging.take()
    engine.call("extract", requests=requests, layer_ids=list(layer_ids), path=str(lease.path))
    return StepStates(staging, lease, requests)


def release(engine: Any) -> None:
    """Let the engine let go of the staging files that it keeps mapped."""
    engine.rpc("kimi_eagle_forget")


class HooksExtension:
    """Joined to vLLM's worker class; method names are prefixed, since a clash with a worker's own would stop vLLM."""

    def kimi_eagle_install(self, layer_ids: list[int], path: str, tokens: int) -> int:
        """Hook the layers; states of the coming `tokens` prompt tokens go to the file `path`. Returns this process's id."""
        runner = self.model_runner
        base = inner_model(runner.get_model() if hasattr(runner, "get_model") else runner.model)
        if getattr(self, "rank", 0):
            return os.getpid()  # every rank has all states, one writes them
        self._ke_memory = getattr(self, "_ke_memory", None) or Memory()
        self._ke = _Capture(base, layer_ids, Recorder(path, len(layer_ids), tokens, self._ke_memory))
        self._ke_execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._ke.begin(scheduler_output)
            return self._ke_execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model
        return os.getpid()

    def kimi_eagle_uninstall(self) -> None:
        """Leave the engine as it was; the index of the file follows when the last states have arrived."""
        if getattr(self, "_ke", None):
            self._ke.remove()
            self.model_runner.execute_model = self._ke_execute
            self._ke = None

    def kimi_eagle_forget(self) -> None:
        """Let go of the mapped files."""
        if getattr(self, "_ke_memory", None):
            self._ke_memory.forget()


def inner_model(model: Any) -> Any:
    """The module that owns `layers` and `embed_tokens`, inside any wrapper (`get_language_model()`, `.language_model`, `.model`)."""
    for _ in range(5):
        if hasattr(model, "layers") and hasattr(model, "embed_tokens"):
            return model
        if hasattr(model, "get_language_model") and model.get_language_model() is not model:
            model = model.get_language_model()
        else:
            model = getattr(model, "language_model", None) or getattr(model, "model", None)
    raise StageFailed("hooks: no module with `layers` and `embed_tokens` inside the model.")


class _Capture:
    """Hooks that hand each step's rows to a recorder; only the rank that writes has any."""

    def __init__(self, base: Any, layer_ids: list[int], recorder: Recorder):
        self.recorder, self.ids = recorder, None
        self.scheduled: dict[str, tuple[int, int]] = {}
        layers = base.layers
        count = len(layers)
        self.handles = [base.embed_tokens.register_forward_pre_hook(self._see_ids)]
        # Not on the base model: its compile decorator calls forward directly, so hooks there never fire.
        self.handles.append(
            layers[getattr(base, "start_layer", 0)].register_forward_pre_hook(self._see_positions, with_kwargs=True)
        )
        for slot, k in enumerate(layer_ids):
            if k < count:
                self.handles.append(layers[k].register_forward_pre_hook(self._entering(slot), with_kwargs=True))
        # Always, also where the final state is not asked for: the last layer ends a step.
        last = [slot for slot, k in enumerate(layer_ids) if k == count]
        self.handles.append(layers[count - 1].register_forward_hook(self._leaving(last)))

    def begin(self, scheduler_output: Any) -> None:
        """Note what the scheduler sent: request -> (first position, tokens) of this step."""
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.scheduled = {rid: (starts[rid], n) for rid, n in scheduler_output.num_scheduled_tokens.items()}
        self.ids = None

    def _see_ids(self, module: Any, args: tuple) -> None:
        self.ids = args[0]

    def _see_positions(self, module: Any, args: tuple, kwargs: dict) -> None:
        if not self.scheduled or self.ids is None:
            return
        tensors = [a for a in (*args, *kwargs.values()) if hasattr(a, "is_floating_point")]
        positions = next(a for a in tensors if not a.is_floating_point())
        self.recorder.begin(sum(count for _, count in self.scheduled.values()), self.scheduled)
        self.recorder.tell(self.ids, positions if positions.dim() == 1 else positions[0])

    def _entering(self, slot: int) -> Any:
        def hook(module: Any, args: tuple, kwargs: dict) -> None:
            if self.recorder.active:
                given = (a for a in (*args, *kwargs.values()) if hasattr(a, "is_floating_point"))
                self.recorder.keep(slot, [a for a in given if a.is_floating_point()])

        return hook

    def _leaving(self, slots: list[int]) -> Any:
        def hook(module: Any, args: tuple, output: Any) -> None:
            if self.recorder.active:
                for slot in slots:
                    self.recorder.keep(slot, list(output) if isinstance(output, tuple) else [output])
                self.recorder.end()
                self.scheduled = {}

        return hook

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()
        self.recorder.close()
