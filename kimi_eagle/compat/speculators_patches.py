"""Patches that let speculators 0.3.0 (made for vLLM 0.11) extract hidden states on newer vLLM, in the order of the breaks.

Most set one name that the generator's module imports, to something that fits what the generator passes to what vLLM takes;
the generator's own functions are compared by digest before. `make compat-reported` runs each with and without.
"""

from kimi_eagle.compat import speculators_adapters as adapters
from kimi_eagle.compat import speculators_probes as probes
from kimi_eagle.compat.patch import Change, Patch
from kimi_eagle.compat.speculators_probes import CLASS, GENERATOR, WORKER

VERSIONS = "==0.3.0"
INIT = {"fee599d83e5d68c7": "0.3.0"}
CREATE = {"7d9382ec9846a04e": "0.3.0"}
GENERATE = {"987993538e62b0d1": "0.3.0"}
FORWARD = {"d144710777c4a959": "0.3.0"}
STATES = {"c0cefe8e7105f532": "0.3.0"}


def _patch(name, symptom, cure, probe, *changes) -> Patch:
    return Patch(f"spec-{name}", "speculators", VERSIONS, symptom, cure, probe, changes)


def _global(name, build, known, function) -> Change:
    """A change of a name that the generator's module imports, resting on the function that uses it."""
    return Change(GENERATOR, name, build, known, leans_on=f"{CLASS}.{function}")


PATCHES = [
    _patch(
        "tokenizer",
        "ValueError: ... Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
        "the generator's tokenizer trusts the checkpoint's code, as its configuration and model already do.",
        probes.missing_keyword(
            "__init__",
            "AutoTokenizer.from_pretrained",
            "trust_remote_code",
            "the tokenizer is loaded without remote code.",
        ),
        _global("AutoTokenizer", adapters.trusting, INIT, "__init__"),
    ),
    _patch(
        "encoder-decoder",
        "ValidationError: 1 validation error for SchedulerConfig is_encoder_decoder Field required",
        "SchedulerConfig is given is_encoder_decoder=False.",
        probes.scheduler_config,
        _global("SchedulerConfig", adapters.decoder_only, CREATE, "_create_vllm_config"),
    ),
    _patch(
        "text-only",
        "ValueError: Failed to apply MoonshotKimiVAutoProcessor on data=... (dummy images, on a text-only checkpoint)",
        "ModelConfig is given a limit of no images for a multimodal wrapper.",
        probes.missing_keyword(
            "_create_vllm_config",
            "ModelConfig",
            "limit_mm_per_prompt",
            "vision towers are built and profiled for text.",
        ),
        _global("ModelConfig", adapters.text_only, CREATE, "_create_vllm_config"),
    ),
    _patch(
        "dtype",
        'silent: with the fixed dtype="auto" a float32 checkpoint runs in 16 bits; states are 0.1 - 5 % off',
        "a float32 checkpoint stays in float32.",
        probes.missing_keyword(
            "_create_vllm_config", "ModelConfig", "hf_overrides", 'ModelConfig is given dtype="auto".'
        ),
        _global("ModelConfig", adapters.own_dtype, CREATE, "_create_vllm_config"),
    ),
    _patch(
        "memory",
        "RuntimeError: Found no NVIDIA driver on your system.",
        "without CUDA, free memory is the machine's.",
        probes.missing_keyword("__init__", "torch.cuda.mem_get_info", "device", "free memory is asked of CUDA alone."),
        _global("torch", adapters.memory_without_cuda, INIT, "__init__"),
    ),
    _patch(
        "kv-cache-specs",
        "TypeError: get_kv_cache_config_from_groups() got an unexpected keyword argument 'kv_cache_specs'",
        "the argument is dropped.",
        probes.argument_gone(
            "__init__",
            "get_kv_cache_config_from_groups",
            "kv_cache_specs",
            "vllm.v1.core.kv_cache_utils",
            "get_kv_cache_config_from_groups",
        ),
        _global("get_kv_cache_config_from_groups", adapters.without_specs, INIT, "__init__"),
    ),
    _patch(
        "block-size",
        "TypeError: Scheduler.__init__() missing 1 required positional argument: 'block_size'",
        "the scheduler is given the cache's block size.",
        probes.argument_required(
            "__init__", "Scheduler", "block_size", "vllm.v1.core.sched.scheduler", "Scheduler.__init__"
        ),
        _global("Scheduler", adapters.with_block_size, INIT, "__init__"),
    ),
    _patch(
        "embedding",
        "AttributeError: 'LlamaModel' object has no attribute 'get_input_embeddings'",
        "the worker's forward takes embed_input_ids.",
        probes.embedding_name,
        Change(WORKER, "_patched_forward", adapters.embedding, FORWARD),
    ),
    _patch(
        "prefix-caching",
        "AssertionError (empty, vllm/v1/core/block_pool.py, cache_full_blocks)",
        "prefix caching is off: the generator's requests carry no block hashes.",
        probes.missing_keyword(
            "_create_vllm_config",
            "CacheConfig",
            "enable_prefix_caching",
            "prefix caching is on by default and has no hasher.",
        ),
        _global("CacheConfig", adapters.no_prefix_caching, CREATE, "_create_vllm_config"),
    ),
    _patch(
        "single-reply",
        "RuntimeError: Boolean value of Tensor with more than one value is ambiguous",
        "the worker answers with a list, which the generator indexes.",
        probes.single_reply,
        Change(WORKER, "HiddenStatesWorkerExtension._get_captured_states", adapters.as_list, STATES),
    ),
    _patch(
        "sample-tokens",
        "RuntimeError: State error: sample_tokens() must be called after execute_model() returns None.",
        "execute_model is followed by sample_tokens.",
        probes.two_phases,
        _global("MultiprocExecutor", adapters.two_phases, GENERATE, "generate"),
    ),
    _patch(
        "whole-prompts",
        "silent: a batch above max_num_batched_tokens is cut and later samples are sliced from wrong offsets",
        "prompts are given in groups that one step takes whole, and row counts are compared.",
        probes.one_chunk,
        Change(GENERATOR, f"{CLASS}.generate", adapters.whole_prompts, GENERATE),
    ),
    _patch(
        "wrapper-model",
        "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'model'",
        "the Kimi wrapper shows its bare model as `model`.",
        probes.wrapper_model,
        Change(
            "vllm.model_executor.models.kimi_k25",
            "KimiK25ForConditionalGeneration.model",
            adapters.model_property,
            {},
            adds=True,
        ),
    ),
]
