"""What speculators 0.3.0 asks of vLLM, read from both packages' files: one probe per break.

speculators' generator builds vLLM's configuration, scheduler, requests and executor by hand, so each probe compares one call
in the generator with the signature on the other side.
"""

import ast

from kimi_eagle.compat.patch import Verdict
from kimi_eagle.compat.source import Source

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
WORKER = "speculators.data_generation.custom_worker"
CLASS = "VllmHiddenStatesGenerator"


def _call(source: Source, function: str, called: str) -> ast.Call | None:
    """The first call of `called` (text before the parenthesis) in a function of the generator."""
    found = source.find(GENERATOR, f"{CLASS}.{function}")
    for node in ast.walk(found.node) if found else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) == called:
            return node
    return None


def _passes(call: ast.Call, argument: str) -> bool:
    return any(k.arg == argument for k in call.keywords)


def arguments(source: Source, module: str, name: str) -> tuple[list[str], set[str]] | None:
    """(argument names, those without a default) of a function; None where it is not defined in the module."""
    found = source.find(module, name)
    if found is None or not isinstance(found.node, ast.FunctionDef):
        return None
    spec = found.node.args
    names = [a.arg for a in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]]
    positional = [a.arg for a in [*spec.posonlyargs, *spec.args]]
    without = set(positional[: len(positional) - len(spec.defaults)])
    without |= {a.arg for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is None}
    return names, without


def no_call(what: str) -> Verdict:
    """The generator no longer makes the call."""
    return Verdict(False, f"this speculators does not call {what}.")


def no_vllm(vllm: Source | None, symbol: str) -> Verdict:
    """vLLM is not there to compare with, or has moved the symbol."""
    where = "vllm is not installed here" if vllm is None else f"vllm {vllm.version} has no {symbol} where 0.16 has it"
    return Verdict(None, f"{where}.")


def missing_keyword(function: str, called: str, keyword: str, why: str):
    """Probe: the generator calls `called` without `keyword`; needed whatever vLLM's version (the default is the fault)."""

    def probe(own: Source, vllm: Source | None) -> Verdict:
        call = _call(own, function, called)
        if call is None:
            return no_call(called)
        if _passes(call, keyword):
            return Verdict(False, f"{called} is given {keyword}.")
        return Verdict(True, why)

    return probe


def scheduler_config(own: Source, vllm: Source | None) -> Verdict:
    """SchedulerConfig's `is_encoder_decoder` has no default and is not passed."""
    call = _call(own, "_create_vllm_config", "SchedulerConfig")
    if call is None or _passes(call, "is_encoder_decoder"):
        return no_call("SchedulerConfig without is_encoder_decoder")
    found = vllm.find("vllm.config.scheduler", "SchedulerConfig") if vllm else None
    if found is None:
        return no_vllm(vllm, "vllm.config.scheduler.SchedulerConfig")
    for item in found.node.body:
        if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == "is_encoder_decoder":
            if item.value is None:
                return Verdict(True, f"SchedulerConfig.is_encoder_decoder has no default in vllm {vllm.version}.")
            return Verdict(False, "SchedulerConfig.is_encoder_decoder has a default.")
    return Verdict(False, "SchedulerConfig has no is_encoder_decoder.")


def argument_gone(function: str, called: str, keyword: str, module: str, name: str):
    """Probe: the generator passes a keyword that vLLM's function no longer takes."""

    def probe(own: Source, vllm: Source | None) -> Verdict:
        call = _call(own, function, called)
        if call is None or not _passes(call, keyword):
            return no_call(f"{called} with {keyword}")
        signature = arguments(vllm, module, name) if vllm else None
        if signature is None:
            return no_vllm(vllm, f"{module}.{name}")
        if keyword in signature[0]:
            return Verdict(False, f"{name} takes {keyword}.")
        return Verdict(True, f"{name} of vllm {vllm.version} takes no {keyword}.")

    return probe


def argument_required(function: str, called: str, keyword: str, module: str, name: str):
    """Probe: vLLM's function requires an argument that the generator does not pass."""

    def probe(own: Source, vllm: Source | None) -> Verdict:
        call = _call(own, function, called)
        if call is None or _passes(call, keyword):
            return no_call(f"{called} without {keyword}")
        signature = arguments(vllm, module, name) if vllm else None
        if signature is None:
            return no_vllm(vllm, f"{module}.{name}")
        if keyword in signature[1]:
            return Verdict(True, f"{name} of vllm {vllm.version} requires {keyword}.")
        return Verdict(False, f"{name} does not require {keyword}.")

    return probe


def embedding_name(own: Source, vllm: Source | None) -> Verdict:
    """The worker's forward calls `get_input_embeddings`; vLLM's models call it `embed_input_ids`."""
    forward = own.find(WORKER, "_patched_forward")
    if forward is None or "self.get_input_embeddings(" not in forward.text:
        return no_call("get_input_embeddings")
    model = vllm.find("vllm.model_executor.models.llama", "LlamaModel") if vllm else None
    if model is None:
        return no_vllm(vllm, "vllm.model_executor.models.llama.LlamaModel")
    if "def get_input_embeddings" in model.text:
        return Verdict(False, "LlamaModel has get_input_embeddings.")
    return Verdict(True, "LlamaModel has embed_input_ids and no get_input_embeddings.")


def fixed_dtype(own: Source, _) -> Verdict:
    """The generator gives ModelConfig the dtype "auto", which vLLM turns into 16 bits for a float32 checkpoint."""
    call = _call(own, "_create_vllm_config", "ModelConfig")
    given = next((k.value for k in call.keywords if k.arg == "dtype"), None) if call else None
    if isinstance(given, ast.Constant) and given.value == "auto":
        return Verdict(True, 'ModelConfig is given dtype="auto".')
    return no_call('ModelConfig with dtype="auto"')


def single_reply(own: Source, vllm: Source | None) -> Verdict:
    """The generator indexes the reply of one rank as if it were a list of replies."""
    generate = own.find(GENERATOR, f"{CLASS}.generate")
    if generate is None or "captured_states_list[0]" not in generate.text:
        return no_call("collective_rpc and index its reply")
    module = "vllm.v1.executor.multiproc_executor"
    found = vllm.find(module, "MultiprocExecutor.collective_rpc") if vllm else None
    if found is None:
        return no_vllm(vllm, f"{module}.MultiprocExecutor.collective_rpc")
    if "responses[0] if output_rank is not None" in found.text:
        return Verdict(True, "collective_rpc with unique_reply_rank returns the one reply, not a list.")
    return Verdict(None, "collective_rpc has changed; whether it returns a list is not known.")


def two_phases(own: Source, vllm: Source | None) -> Verdict:
    """vLLM wants `sample_tokens` after `execute_model`; the generator does not call it."""
    generate = own.find(GENERATOR, f"{CLASS}.generate")
    if generate is None or "sample_tokens" in generate.text:
        return no_call("execute_model without sample_tokens")
    runner = vllm.find("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model") if vllm else None
    if runner is None:
        return no_vllm(vllm, "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model")
    if "sample_tokens() must be called" in runner.text:
        return Verdict(True, "execute_model refuses to run again before sample_tokens.")
    return Verdict(False, "execute_model needs no second phase.")


def one_chunk(own: Source, _) -> Verdict:
    """Every scheduled request is aborted after its first chunk, and rows are sliced by cumulative prompt length."""
    generate = own.find(GENERATOR, f"{CLASS}.generate")
    if generate is None:
        return no_call("generate")
    if "FINISHED_ABORTED" in generate.text and "offset += seq_len" in generate.text:
        return Verdict(True, "requests are aborted after their first chunk, and rows sliced by prompt length.")
    return Verdict(False, "generate attributes rows by request.")


def wrapper_model(own: Source, vllm: Source | None) -> Verdict:
    """The worker looks for `model.model`, which vLLM's Kimi wrapper does not have."""
    setup = own.find(WORKER, "HiddenStatesWorkerExtension._setup_hidden_states_capture")
    if setup is None or "base_model = model.model" not in setup.text:
        return no_call("model.model")
    found = vllm.find("vllm.model_executor.models.kimi_k25", "KimiK25ForConditionalGeneration") if vllm else None
    if found is None:
        return Verdict(False, "this vLLM has no Kimi-K2.5 wrapper.")
    if "self.model =" in found.text or "def model(" in found.text:
        return Verdict(False, "the wrapper has a model attribute.")
    return Verdict(True, "the wrapper keeps its layers under language_model.model.")
