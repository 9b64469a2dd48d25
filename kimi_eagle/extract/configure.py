"""Engine configurations: what vLLM is asked for, per target, role and machine, in one place."""

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kimi_eagle.errors import BadInput
from kimi_eagle.extract.engine import EngineConfig
from kimi_eagle.target import Target

# Two cores without bf16 instructions: float32, no thread pinning (several engines share the cores), a small cache.
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
COMMON_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def on_cpu() -> bool:
    """True where the installed vLLM is a CPU build."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in found
    return True


def cpu_mla_arguments() -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for a target with latent attention on a CPU.

    Blocks of 16 are the only ones that vLLM's reference back end takes. Where the processor has AMX, newer releases (0.32) choose
    their AMX back end unasked, which refuses float32 weights after loading: the reference one is named then.
    """
    found = importlib.util.find_spec("vllm")
    places = list(found.submodule_search_locations or []) if found else []
    registry = Path(places[0], "v1", "attention", "backends", "registry.py") if places else None
    chosen = bool(registry and registry.is_file() and "AMX_MLA" in registry.read_text())
    return {"block_size": 16} | ({"attention_backend": "CPU_MLA"} if chosen else {})


def engine_config(
    target: Target,
    role: str,
    *,
    dtype: str = "float32",
    tensor_parallel: int = 1,
    max_model_len: int = 2048,
    max_batched_tokens: int = 2048,
    max_sequences: int = 64,
    port: int = 0,
    gpu_memory: float = 0.85,
    **llm: Any,
) -> EngineConfig:
    """The configuration of an engine for `target`; `llm` adds or replaces keyword arguments of vllm.LLM.

    Raises BadInput where the target's heads do not divide by the tensor-parallel size.
    """
    if (
        tensor_parallel < 1
        or target.num_attention_heads % tensor_parallel
        or (
            not target.is_mla
            and max(target.num_key_value_heads, tensor_parallel) % min(target.num_key_value_heads, tensor_parallel)
        )
    ):
        raise BadInput(
            f"tensor parallel size {tensor_parallel}: the {target.num_attention_heads} heads "
            f"({target.num_key_value_heads} key-value heads) of {target.name} do not divide by it; choose a divisor."
        )
    limit = target.text_config.get("max_position_embeddings") or max_model_len
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": min(max_model_len, limit),
        "max_num_batched_tokens": max_batched_tokens,
        "max_num_seqs": max_sequences,
        "trust_remote_code": True,
        "disable_log_stats": False,
        # A cached prefix has no hidden states and no prompt log-probs: the rows would be missing.
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if target.is_wrapper:
        arguments["limit_mm_per_prompt"] = {"vision_chunk": 0}  # text only: the vision tower is not loaded
    env = dict(COMMON_ENV)
    if on_cpu():
        arguments["enforce_eager"] = True
        env |= CPU_ENV | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // tensor_parallel))}
        if role == "plain":
            # A seeded request whose prompt is cut in two asks the CPU's generator for an offset, which it does not have.
            arguments |= {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_batched_tokens, max_model_len),
            }
        if target.is_mla:
            # vLLM takes chunked prefill from MLA on a CPU after it has set the tokens of a step with a connector: a prompt
            # longer than those would wait for ever, in an engine that spins.
            longest = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
            arguments |= cpu_mla_arguments() | {"max_num_batched_tokens": longest}
    else:
        arguments["gpu_memory_utilization"] = gpu_memory
    if Path(target.path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return EngineConfig(role, str(target.path), {**arguments, **llm}, env, port)
