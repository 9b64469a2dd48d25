"""Back end `hooks`: forward hooks on the decoder layers, put there by `worker_extension_cls`, on vLLM's public surface.

Which row belongs to which request is decided from what the layers themselves are given (token ids and positions) against
what the scheduler sent, never from the runner's own batch: its V2 has no `input_batch`, and V1 reorders it. A row that
fits no request, or two with different pasts, ends the run instead of being guessed.
"""

import os
from typing import Any

from kimi_eagle.errors import StageFailed
from kimi_eagle.extract.backends import Facts, Verdict
from kimi_eagle.extract.recorder import Recorder
from kimi_eagle.extract.states import StepStates
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


def run(engine: Any, requests: list[dict[str, Any]], layer_ids: list[int], folder: str) -> StepStates:
    """Prefill `requests`; their states by request id, in a file in `folder`. A request without them is not in there."""
    engine.rpc("kimi_eagle_install", list(layer_ids), folder)
    try:
        engine.generate(requests, max_tokens=1)
        written = next(found for found in engine.rpc("kimi_eagle_take") if found is not None)
    finally:
        engine.rpc("kimi_eagle_uninstall")
    names = {str(request["id"]): request["id"] for request in requests}
    pieces, token_ids = written.pop("pieces"), written.pop("token_ids")
    given = {}
    for rid in pieces:
        # vLLM's internal id is the given one, with a random suffix in newer versions.
        name = rid if rid in names else rid.rsplit("-", 1)[0]
        if name in names and len(rid) in (len(name), len(name) + 9):
            given[names[name]] = rid
    by_name = ({name: found[rid] for name, rid in given.items()} for found in (pieces, token_ids))
    return StepStates(**written, **dict(zip(("pieces", "token_ids"), by_name, strict=True)))


class HooksExtension:
    """Joined to vLLM's worker class; method names are prefixed, since a clash with a worker's own would stop vLLM."""

    def kimi_eagle_install(self, layer_ids: list[int], folder: str) -> int:
        """Hook the layers; states of finished prompts go to `folder`. Returns this process's id."""
        runner = self.model_runner
        base = inner_model(runner.get_model() if hasattr(runner, "get_model") else runner.model)
        if getattr(self, "rank", 0):
            return os.getpid()  # every rank has all states, one writes them
        self._ke = _Capture(base, layer_ids, folder)
        self._ke_execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._ke.begin(scheduler_output)
            return self._ke_execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model
        return os.getpid()

    def kimi_eagle_take(self) -> dict[str, Any] | None:
        """What the steps since `kimi_eagle_install` gave, as `states.StepStates` takes it; None on ranks that do not write."""
        return self._ke.take() if getattr(self, "_ke", None) else None

    def kimi_eagle_uninstall(self) -> None:
        """Leave the engine as it was."""
        if getattr(self, "_ke", None):
            self._ke.remove()
            self.model_runner.execute_model = self._ke_execute
            self._ke = None


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

    def __init__(self, base: Any, layer_ids: list[int], folder: str):
        self.prompts: dict[str, Any] = {}
        self.scheduled: dict[str, tuple[int, int]] = {}
        self.token_ids: dict[str, list] = {}
        self.recorder = Recorder(folder, len(layer_ids), self._place)
        self.ids = None
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
        import numpy as np

        starts = {}
        for new in scheduler_output.scheduled_new_reqs:
            self.prompts[new.req_id] = np.asarray(new.prompt_token_ids)
            starts[new.req_id] = new.num_computed_tokens
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

    def _place(self, ids: Any, positions: Any, scheduled: dict[str, tuple[int, int]]) -> list:
        spans = attribute(ids, positions, scheduled, self.prompts)
        for rid, row, start, count in spans:
            self.token_ids.setdefault(rid, []).append((start, ids[row : row + count].astype("int32")))
        return spans

    def take(self) -> dict[str, Any]:
        """What `states.StepStates` needs, of the prompts whose every token was seen."""
        import numpy as np

        recorder, pieces = self.recorder, {}
        for first, rows, spans in recorder.finish():
            for rid, row, start, count in spans:
                pieces.setdefault(rid, []).append((first, rows, row, start, count))
        whole = {r: p for r, p in pieces.items() if sum(x[4] for x in p) == len(self.prompts[r])}
        ids = {r: np.concatenate([x for _, x in sorted(self.token_ids[r], key=lambda p: p[0])]) for r in whole}
        return {
            "path": recorder.path, "dtype": recorder.dtype, "slots": recorder.slots, "width": recorder.width,
            "pieces": whole, "token_ids": ids,
        }  # fmt: skip

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()
        self.recorder.abandon()


def attribute(
    ids: Any, positions: Any, scheduled: dict[str, tuple[int, int]], prompts: dict[str, Any]
) -> list[tuple[str, int, int, int]]:
    """(request, row offset, first position, rows) for the prompt rows of one step.

    `ids` and `positions` are the step's flat rows (padding may follow), `scheduled` maps a request to (first position, rows).
    A prompt's beginning may be any rows with its tokens and positions: causal states depend on nothing else. Rows that continue
    a prompt must be the only ones with their tokens and positions, unless all requests that could own them have the same past.
    Raises StageFailed where that does not hold, or where a request has no rows.
    """
    import numpy as np

    ids, positions = np.asarray(ids), np.asarray(positions)
    spans, offset, taken = [], 0, set()
    for rid, (start, count) in scheduled.items():
        prompt = np.asarray(prompts.get(rid, ()), dtype=ids.dtype)
        end = min(start + count, len(prompt))  # rows past the prompt are decoded tokens: known by position alone
        expected, offset = offset, offset + count
        if end <= start:
            continue
        if not start and _fits(ids, positions, expected, prompt[:end], 0):
            found = [expected]
        else:
            found = [
                int(r) for r in np.flatnonzero(positions == start) if _fits(ids, positions, r, prompt[start:end], start)
            ]
        if not found:
            raise StageFailed(f"hooks: the rows of a step fit no scheduled request {rid} from position {start}.")
        if start and len(found) > 1 and not _one_past(rid, start, end, scheduled, prompts):
            raise StageFailed(
                f"hooks: rows from position {start} fit several requests with different pasts; raise max_batched_tokens."
            )
        row = next((r for r in found if r not in taken), found[0])
        taken.add(row)
        spans.append((rid, row, start, end - start))
    return spans


def _fits(ids: Any, positions: Any, row: int, tokens: Any, start: int) -> bool:
    """Whether `tokens` at positions from `start` are the rows from `row`."""
    end = row + len(tokens)
    if end > len(ids) or positions[row] != start or positions[end - 1] != start + len(tokens) - 1:
        return False
    return bool((ids[row:end] == tokens).all() and (positions[row + 1 : end] > positions[row : end - 1]).all())


def _one_past(rid: str, start: int, end: int, scheduled: dict[str, tuple[int, int]], prompts: dict[str, Any]) -> bool:
    """Whether all requests of a step with this one's tokens from `start` to `end` have its tokens before them, too."""
    own = list(prompts[rid][:end])
    rivals = (r for r, (s, n) in scheduled.items() if s <= start and s + n >= end and r != rid)
    same = (r for r in rivals if list(prompts.get(r, ())[start:end]) in (own[start:], []))
    return all(list(prompts.get(r, ())[:end]) == own for r in same)
