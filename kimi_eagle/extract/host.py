"""The process that holds a vLLM engine: `python -m kimi_eagle.extract.host FOLDER`, started by `engine.start`.

It serves one call at a time over a private socket, notes when it was last used, and ends itself when idle too long or when
nobody who asked for it is left.
"""

import json
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from kimi_eagle.extract import engine, speculators

GRACE_S = 12.0  # how long an engine outlives its last owner: a restarted kernel may attach again
WATCH_S = 2.0
# A stranger without the key, bytes that are no message, or a client that went away: none of them ends an engine.
REFUSED = (OSError, EOFError, AssertionError, ValueError, AuthenticationError)
# After the last request is answered, a connector still has states to write; it does so in further engine steps.
SETTLING_STEPS = 50


class Host:
    """The calls that an engine answers; `llm` is a vllm.LLM."""

    def __init__(self, llm: Any):
        self.llm, self.core = llm, llm.llm_engine

    def generate(
        self,
        report: Callable[[int, int], None],
        requests: list[dict[str, Any]],
        max_tokens: int = 1,
        temperature: float = 0.0,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        ignore_eos: bool = False,
        states_folder: str = "",
        concurrency: int = 0,
    ) -> list[dict[str, Any]]:
        """Answer all requests, at most `concurrency` at once (0: as the engine likes); results in the order of `requests`.

        A request is {id, prompt_token_ids, seed?}. A result is {id, token_ids, finish_reason, steps (tokens emitted per engine
        step that emitted any: with a draft, accepted + 1), gaps (top-1 minus top-2 log-prob per token, where logprobs >= 2),
        prompt_logprobs (nats; None for the first token), hidden_states_path, seconds}. `states_folder` is where an engine with
        the connector back end writes the states.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        results: dict[str, dict[str, Any]] = {}

        def send(request: dict[str, Any]) -> None:
            name = str(request["id"])
            results[name] = {"id": request["id"], "token_ids": [], "steps": [], "gaps": [], "finish_reason": None}
            params = SamplingParams(
                max_tokens=max_tokens, temperature=temperature, logprobs=logprobs, ignore_eos=ignore_eos,
                prompt_logprobs=0 if prompt_logprobs else None, seed=request.get("seed"), detokenize=False,
                output_kind=RequestOutputKind.DELTA, extra_args=_states_path(states_folder, name),
            )  # fmt: skip
            self.core.add_request(name, {"prompt_token_ids": list(request["prompt_token_ids"])}, params)

        waiting = list(reversed(requests))
        for _ in range(concurrency or len(requests)):
            if waiting:
                send(waiting.pop())
        finished, begun, told = 0, time.perf_counter(), 0.0
        while self.core.has_unfinished_requests():
            for output in self.core.step():
                if output.request_id not in results:  # what an earlier call left behind
                    continue
                result = results[output.request_id]
                self._take(result, output)
                if output.finished:
                    finished += 1
                    result["seconds"] = time.perf_counter() - begun
                    if waiting:
                        send(waiting.pop())
            if time.perf_counter() - told > 1:
                told = time.perf_counter()
                report(finished, len(requests))
        report(finished, len(requests))
        if states_folder:
            self._settle([r["hidden_states_path"] for r in results.values() if r.get("hidden_states_path")])
        return [results[str(r["id"])] for r in requests]

    def _take(self, result: dict[str, Any], output: Any) -> None:
        if output.prompt_logprobs is not None and "prompt_logprobs" not in result:
            ids = output.prompt_token_ids
            result["prompt_logprobs"] = [
                None if entry is None else entry[token].logprob
                for token, entry in zip(ids, output.prompt_logprobs, strict=True)
            ]
        for completion in output.outputs:
            if completion.token_ids:
                result["token_ids"] += list(completion.token_ids)
                result["steps"].append(len(completion.token_ids))
            for entry in completion.logprobs or []:
                best = sorted((p.logprob for p in entry.values()), reverse=True)
                result["gaps"].append(best[0] - best[1] if len(best) > 1 else float("inf"))
            result["finish_reason"] = completion.finish_reason or result["finish_reason"]
        transfer = getattr(output, "kv_transfer_params", None)
        if transfer and transfer.get("hidden_states_path"):
            result["hidden_states_path"] = transfer["hidden_states_path"]

    def _settle(self, files: list[str]) -> None:
        """Step the engine until every state file is there (an in-process engine writes the last ones only when stepped)."""
        for _ in range(SETTLING_STEPS):
            if all(os.path.exists(f) for f in files):
                return
            self.core.step()
            time.sleep(0.01)

    def metrics(self, report: Callable[[int, int], None]) -> dict[str, Any]:
        """Counters and vectors of vLLM's metrics, by name."""
        found = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "values", getattr(metric, "value", None))
            if value is not None:
                found[metric.name] = list(value) if isinstance(value, (list, tuple)) else value
        return found

    def rpc(self, report: Callable[[int, int], None], name: str, args: list[Any]) -> list[Any]:
        """collective_rpc by method name: the worker extension's method in every worker."""
        return self.llm.collective_rpc(name, args=tuple(args))

    def extract(
        self, report: Callable[[int, int], None], requests: list[dict[str, Any]], layer_ids: list[int], path: str
    ) -> None:
        """Prefill `requests` with hooks on the layers, their states into the file `path` (extract/hooks.py: `worker_extension_cls`)."""
        tokens = sum(len(r["prompt_token_ids"]) for r in requests)
        self.rpc(report, "kimi_eagle_install", [list(layer_ids), path, tokens])
        try:
            self.generate(report, requests, max_tokens=1)
        finally:
            self.rpc(report, "kimi_eagle_uninstall", [])

    def start_profile(self, report: Callable[[int, int], None]) -> None:
        """Open the torch profiler's window in every worker."""
        self.llm.start_profile()

    def stop_profile(self, report: Callable[[int, int], None]) -> None:
        """Close the window; the traces are written when this returns."""
        self.llm.stop_profile()

    def cache(self, report: Callable[[int, int], None]) -> dict[str, int]:
        """The engine's own plan of its cache on a rank: {bytes, tokens that fit}; empty where this vLLM keeps it elsewhere."""
        core = getattr(getattr(self.core, "engine_core", None), "engine_core", None)
        planned = getattr(getattr(core, "scheduler", None), "kv_cache_config", None)
        tokens = getattr(self.core.vllm_config.cache_config, "kv_cache_size_tokens", None)
        if not planned or not tokens:
            return {}
        sizes = [tensor.size for tensor in planned.kv_cache_tensors]
        # Newer releases place every layer in one allocation, whose whole size each entry repeats.
        whole = max(sizes) if hasattr(planned.kv_cache_tensors[0], "offset") else sum(sizes)
        return {"bytes": whole, "tokens": tokens}

    def describe(self, report: Callable[[int, int], None]) -> dict[str, Any]:
        """What was loaded: versions, platform, model class, runner, attention back end where vLLM names one."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        config = self.core.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "platform": type(current_platform).__name__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "architecture": config.model_config.architectures[0],
            "max_model_len": config.model_config.max_model_len,
            "model_runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
        }


def _states_path(folder: str, request: str) -> dict[str, Any] | None:
    """Where the connector is to write a request's states."""
    if not folder:
        return None
    return {"kv_transfer_params": {"hidden_states_path": os.path.join(folder, f"{request}.safetensors")}}


def serve(folder: Path) -> None:
    """Load the engine of `folder/config.json`, then answer calls until told to stop."""
    settings = json.loads((folder / "config.json").read_text())
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    state = {"used": time.time(), "busy": False}
    threading.Thread(target=_watch, args=(folder, settings, state), daemon=True).start()
    host = _load(settings)
    authkey = secrets.token_bytes(32)
    key_file = folder / "authkey"
    key_file.touch(mode=0o600)
    key_file.write_bytes(authkey)
    address = (
        ("127.0.0.1", engine.port_of(settings["role"], settings["port"])) if settings["port"] else str(folder / "s")
    )
    with Listener(address, authkey=authkey) as listener:
        (folder / "address.json").write_text(json.dumps(address))
        state["used"] = time.time()
        engine.write_state(folder, status="ready", used=state["used"])
        while True:
            try:
                connection = listener.accept()
            except REFUSED as error:
                print(f"connection refused: {error}", flush=True)
                continue
            state["busy"] = True
            with connection:
                _answer(host, connection)
            state.update(busy=False, used=time.time())
            engine.write_state(folder, used=state["used"])


def _load(settings: dict[str, Any]) -> Any:
    options = dict(settings["llm"])
    if options.pop(speculators.ENGINE_KEY, None) == speculators.NAME:
        return speculators.GeneratorHost(
            settings["target"],
            max_model_len=options["max_model_len"],
            tensor_parallel_size=options["tensor_parallel_size"],
            gpu_memory=options.get("gpu_memory_utilization", 0.8),
        )
    from vllm import LLM

    return Host(LLM(model=settings["target"], **options))


def _answer(host: Host, connection: Connection) -> None:
    try:
        method, arguments = connection.recv()
        try:
            result = getattr(host, method)(
                lambda done, total: connection.send(("progress", (done, total))), **arguments
            )
        except (BrokenPipeError, ConnectionError):
            raise
        except Exception as error:
            traceback.print_exc()
            _abort_leftovers(host)  # requests that were sent before the one that failed
            connection.send(("error", f"{type(error).__name__}: {str(error)[:2000]}"))
        else:
            connection.send(("result", result))
    except (EOFError, BrokenPipeError, ConnectionError):  # the caller went away: nobody to answer
        _abort_leftovers(host)


def _abort_leftovers(host: Host) -> None:
    """Requests of a caller that went away must not slow down the next one."""
    core = getattr(host, "core", None)  # the generator of speculators finishes what it began
    requests = core.output_processor if core else None
    # Newer releases keep requests by ids of their own, and abort by those that were given.
    unfinished = list(getattr(requests, "external_req_ids", getattr(requests, "request_states", {})))
    if unfinished:
        host.core.abort_request(unfinished)


def _watch(folder: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """End the process when idle, when ownerless, or when its folder was taken away (`engine down` after a crash)."""
    lonely = 0.0
    while True:
        time.sleep(WATCH_S)
        idle = 0.0 if state["busy"] else time.time() - state["used"]
        ready = (folder / "address.json").exists()
        lonely = 0.0 if settings["stay"] or engine.owners_alive(folder) else lonely + WATCH_S
        if not folder.exists() or lonely > GRACE_S or (ready and idle > 60 * settings["idle_minutes"]):
            _leave()


def _leave() -> None:
    """End at once, with every worker; they are asked first, so that they take their shared memory with them."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        child.terminate()
    psutil.wait_procs(children, timeout=3)
    os.killpg(0, signal.SIGKILL)  # this process leads its session: whatever of it is left goes too


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
