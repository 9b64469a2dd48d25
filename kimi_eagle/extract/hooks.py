"""Back end `hooks`: forward hooks on the decoder layers, put there by `worker_extension_cls`, on vLLM's public surface.

Which row belongs to which request is decided from what the layers themselves are given (token ids and positions) against
what the scheduler sent, never from the runner's own batch: its V2 has no `input_batch`, and V1 reorders it. A row that
fits no request, or two with different pasts, ends the run instead of being guessed.
"""

import os
from typing import Any

from kimi_eagle.errors import StageFailed
from kimi_eagle.extract.backends import Facts, Verdict
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


def run(engine: Any, requests: list[dict[str, Any]], layer_ids: list[int], folder: str) -> dict[Any, str]:
    """Prefill `requests`; request id -> file of its states in `folder`."""
    engine.rpc("kimi_eagle_install", list(layer_ids), folder)
    try:
        engine.generate(requests, max_tokens=1)
        written = next(found for found in engine.rpc("kimi_eagle_take") if found is not None)
    finally:
        engine.rpc("kimi_eagle_uninstall")
    paths = {}
    for request in requests:
        name = str(request["id"])
        # vLLM's internal id is the given one, with a random suffix in newer versions.
        found = [
            p
            for rid, p in written.items()
            if rid == name or (rid.rsplit("-", 1)[0] == name and len(rid) == len(name) + 9)
        ]
        if len(found) != 1:
            raise StageFailed(f"hooks: {len(found)} state files for request {name}; none or two rows fit it.")
        paths[request["id"]] = found[0]
    return paths


class HooksExtension:
    """Joined to vLLM's worker class; method names are prefixed, since a clash with a worker's own would stop vLLM."""

    def kimi_eagle_install(self, layer_ids: list[int], folder: str) -> int:
        """Hook the layers; states of finished prompts go to `folder`. Returns this process's id."""
        runner = self.model_runner
        base = inner_model(runner.get_model() if hasattr(runner, "get_model") else runner.model)
        self._ke = _Capture(base, layer_ids, folder, writes=getattr(self, "rank", 0) == 0)
        self._ke_execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._ke.begin(scheduler_output)
            return self._ke_execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model
        return os.getpid()

    def kimi_eagle_take(self) -> dict[str, str] | None:
        """Internal request id -> file, of the prompts finished since the last call; None on ranks that do not write."""
        return self._ke.take()

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
    """Collects rows per request over steps, and writes each request's file when its prompt is complete."""

    def __init__(self, base: Any, layer_ids: list[int], folder: str, writes: bool):
        self.layer_ids, self.folder, self.writes = layer_ids, folder, writes
        self.prompts: dict[str, list[int]] = {}
        self.rows: dict[str, dict[int, list]] = {}
        self.files: dict[str, str] = {}
        self.scheduled: dict[str, tuple[int, int]] = {}
        self.spans: list[tuple[str, int, int, int]] | None = None
        self.ids = None
        layers = base.layers
        count = len(layers)
        self.handles = [base.embed_tokens.register_forward_pre_hook(self._see_ids)]
        # Not on the base model: its compile decorator calls forward directly, so hooks there never fire.
        self.handles.append(
            layers[getattr(base, "start_layer", 0)].register_forward_pre_hook(self._see_positions, with_kwargs=True)
        )
        for k in layer_ids:
            if k < count:
                self.handles.append(layers[k].register_forward_pre_hook(self._entering(k), with_kwargs=True))
        # Always, also where the final state is not asked for: it is the last layer that ends a request's rows.
        self.handles.append(layers[count - 1].register_forward_hook(self._leaving(count)))

    def begin(self, scheduler_output: Any) -> None:
        """Note what the scheduler sent: request -> (first position, tokens) of this step."""
        starts = {}
        for new in scheduler_output.scheduled_new_reqs:
            self.prompts[new.req_id] = list(new.prompt_token_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.scheduled = {rid: (starts[rid], n) for rid, n in scheduler_output.num_scheduled_tokens.items()}
        self.spans = None

    def _see_ids(self, module: Any, args: tuple) -> None:
        self.ids = args[0].tolist()

    def _see_positions(self, module: Any, args: tuple, kwargs: dict) -> None:
        self.spans = None
        if not self.scheduled or self.ids is None:
            return
        tensors = [a for a in (*args, *kwargs.values()) if hasattr(a, "is_floating_point")]
        positions = next(a for a in tensors if not a.is_floating_point())
        positions = (positions if positions.dim() == 1 else positions[0]).tolist()
        self.spans = attribute(self.ids, positions, self.scheduled, self.prompts)

    def _entering(self, k: int) -> Any:
        def hook(module: Any, args: tuple, kwargs: dict) -> None:
            self._store(
                k, [a for a in (*args, *kwargs.values()) if hasattr(a, "is_floating_point") and a.is_floating_point()]
            )

        return hook

    def _leaving(self, k: int) -> Any:
        def hook(module: Any, args: tuple, output: Any) -> None:
            if k in self.layer_ids:
                self._store(k, list(output) if isinstance(output, tuple) else [output])
            self._finish()

        return hook

    def _store(self, k: int, streams: list) -> None:
        if not self.spans or not self.writes:
            return
        # hidden_states + residual is the residual stream; fused norms write in place, so the sum (a new tensor) is kept.
        state = streams[0] + streams[1] if len(streams) > 1 and streams[1] is not None else streams[0].clone()
        state = state.cpu()
        for rid, offset, start, count in self.spans:
            self.rows.setdefault(rid, {}).setdefault(k, []).append((start, state[offset : offset + count]))

    def _finish(self) -> None:
        import torch
        from safetensors.torch import save_file

        for rid, _, start, count in self.spans or []:
            prompt = self.prompts[rid]
            if start + count == len(prompt) and self.writes:
                parts = self.rows.pop(rid)
                states = [torch.cat([x for _, x in sorted(parts[k], key=lambda p: p[0])]) for k in self.layer_ids]
                path = os.path.join(self.folder, f"{rid}.safetensors")
                os.makedirs(self.folder, exist_ok=True)
                save_file(
                    {"hidden_states": torch.stack(states, 1), "token_ids": torch.tensor(prompt)}, path + ".partial"
                )
                os.replace(path + ".partial", path)
                self.files[rid] = path

    def take(self) -> dict[str, str] | None:
        """Files finished since the last call."""
        files, self.files = self.files, {}
        self.prompts.clear()
        return files if self.writes else None

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


def attribute(
    ids: list[int], positions: list[int], scheduled: dict[str, tuple[int, int]], prompts: dict[str, list[int]]
) -> list[tuple[str, int, int, int]]:
    """(request, row offset, first position, rows) for the prompt rows of one step.

    `ids` and `positions` are the step's flat rows (padding may follow), `scheduled` maps a request to (first position, rows).
    Raises StageFailed where rows fit no scheduled request, or two whose earlier tokens differ.
    """
    spans, offset, left = [], 0, dict(scheduled)
    total = sum(count for _, count in scheduled.values())
    while offset < total:
        fits = []
        for rid, (start, count) in left.items():
            prompt = prompts.get(rid, [])
            end = min(start + count, len(prompt))  # rows past the prompt are decoded tokens: known by position alone
            inside = max(0, end - start)
            if positions[offset : offset + count] == list(range(start, start + count)) and (
                ids[offset : offset + inside] == prompt[start:end]
            ):
                fits.append((rid, start, count, inside))
        if not fits:
            raise StageFailed(f"hooks: the rows from {offset} of a step fit no scheduled request.")
        if any(prompts.get(f[0], [])[: f[1]] != prompts.get(fits[0][0], [])[: fits[0][1]] for f in fits if f[3]):
            raise StageFailed(
                f"hooks: the rows from {offset} fit several requests with different pasts; raise max_batched_tokens."
            )
        rid, start, count, inside = fits[0]
        if inside:
            spans.append((rid, offset, start, inside))
        del left[rid]
        offset += count
    return spans
