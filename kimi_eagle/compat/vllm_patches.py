"""Patches for vLLM itself."""

import builtins
import os
from types import MappingProxyType

from kimi_eagle.compat import cpu_moe, wrapper
from kimi_eagle.compat.classes import Classes
from kimi_eagle.compat.patch import Change, Patch, Verdict
from kimi_eagle.compat.source import Source

ROTARY = "vllm.model_executor.layers.rotary_embedding.base"
DISPATCHER = "vllm.triton_utils.dispatcher"
CPU_WORKER = "vllm.v1.worker.cpu_worker"
OMP = "vllm.utils.ompmultiprocessing"
KIMI = ("vllm.model_executor.models.kimi_k25", "KimiK25ForConditionalGeneration")
KIMI_VL = ("vllm.model_executor.models.kimi_vl", "KimiVLForConditionalGeneration")
DEEPSEEK = ("vllm.model_executor.models.deepseek_v2", "DeepseekV2ForCausalLM")


def _rotary_probe(source: Source, _) -> Verdict:
    found = source.find(ROTARY, "RotaryEmbedding.forward_cpu")
    if found is None:
        if source.module_path(ROTARY) is None:
            return Verdict(None, f"{ROTARY} does not exist in vllm {source.version}.")
        return Verdict(False, "RotaryEmbedding has no CPU path of its own; the native one is right.")
    if "ops.rotary_embedding(" not in found.text:
        return Verdict(False, "forward_cpu does not call the compiled kernel.")
    return Verdict(True, "forward_cpu hands query and key to the compiled kernel as they come.")


def _flat_rotary(original):
    """`forward_cpu` that gives the kernel the one layout it computes right, [tokens, heads * head size] without gaps."""

    def forward_cpu(self, positions, query, key=None):
        tokens = positions.numel()
        flat_query = query.reshape(tokens, -1).contiguous()
        flat_key = None if key is None else key.reshape(tokens, -1).contiguous()
        turned = original(self, positions.flatten(), flat_query, flat_key)
        # The kernel works in place and callers may rely on it; what stands there instead (forward_native, say) may return new
        # tensors. Either way the result is brought back to where the caller's lie.
        for given, result in zip((query, key), turned, strict=True):
            if given is not None and given.data_ptr() != result.data_ptr():
                given.copy_(result.view(given.shape))
        return query, key

    return forward_cpu


def rotary_error(heads: int = 4, tokens: int = 7, head_size: int = 64) -> float:
    """Largest difference between a fresh RotaryEmbedding's forward_cpu and its forward_native on slices as MLA passes them.

    query [tokens, heads, head_size] and key [tokens, 1, head_size] are views into wider tensors; float32, unit normal.
    """
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    random = torch.Generator().manual_seed(0)
    wide_query = torch.randn(tokens, heads, 2 * head_size, generator=random)
    wide_key = torch.randn(tokens, 1, 3 * head_size, generator=random)
    query, key = wide_query[..., head_size:], wide_key[..., 2 * head_size :]
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(head_size, head_size, 64, 10000.0, False, torch.float32)
    positions = torch.arange(tokens)
    right = rope.forward_native(positions, query.clone(), key.clone())
    given = rope.forward_cpu(positions, query, key)
    return max((a - b).abs().max().item() for a, b in zip(given, right, strict=True))


def _rotary_proof() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        error = rotary_error()
        assert error < 1e-5, f"the CPU rotary kernel is still off by {error:.3g} on MLA's layout."


def _scan_probe(source: Source, _) -> Verdict:
    found = source.find(DISPATCHER, "_rebind_kernels")
    if found is None:
        return Verdict(False, "this vLLM does not scan modules for kernels to replace.")
    if "vars(value).get(" in found.text:
        return Verdict(True, "_rebind_kernels takes whatever an object calls __dict__ for a dictionary.")
    return Verdict(None, "_rebind_kernels has changed; it may or may not survive llvmlite's objects.")


def _dictionaries_only(_):
    """A `vars` for the dispatcher module that answers {} where `__dict__` is not a dictionary."""

    def vars(value):
        found = builtins.vars(value)
        return found if isinstance(found, dict | MappingProxyType) else {}

    return vars


def _preload_probe(source: Source, _) -> Verdict:
    found = source.find(CPU_WORKER, "CPUWorker.init_device")
    if found is None:
        return Verdict(False, "this vLLM has no CPU worker.")
    if "LD_PRELOAD" in found.text and "raise RuntimeError" in found.text:
        return Verdict(True, "the CPU worker ends where two libraries are not named in LD_PRELOAD.")
    return Verdict(False, "the CPU worker does not insist on preloaded libraries.")


def _without_preload(original):
    """`init_device` that finds the names it looks for in LD_PRELOAD while it runs (the loader itself read that at start)."""

    def init_device(self):
        before = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = f"{before or ''} libtcmalloc libiomp"
        try:
            return original(self)
        finally:
            os.environ.pop("LD_PRELOAD")
            if before is not None:
                os.environ["LD_PRELOAD"] = before

    return init_device


def _nobind_probe(source: Source, _) -> Verdict:
    found = source.find(OMP, "OMPProcessManager._parse_omp_threads_bind_env")
    if found is None:
        return Verdict(False, "this vLLM has no OMPProcessManager.")
    if "range(self.local_world_size)" in found.text and "self.cpu_lists[i]" in found.text:
        return Verdict(True, "the message about thread binding reads a list per rank, and nobind has none.")
    return Verdict(False, "the message about thread binding reads only the lists that there are.")


def _without_binding(original):
    """The parser, whose last act is a message: with `nobind` everything is set by the time that fails."""

    def _parse_omp_threads_bind_env(self):
        try:
            original(self)
        except IndexError:
            if not self.skip_setup:
                raise

    return _parse_omp_threads_bind_env


def _lacks_eagle3(module: str, name: str):
    """Probe: the class neither has nor inherits `set_aux_hidden_state_layers`."""

    def probe(source: Source, _) -> Verdict:
        classes = Classes(source)
        cls = classes.find(module, name)
        if cls is None:
            return Verdict(False, f"vllm {source.version} has no {name}.")
        if any("set_aux_hidden_state_layers" in c.members for c in classes.ancestors(cls)):
            return Verdict(False, f"{name} answers SupportsEagle3 itself.")
        return Verdict(True, f"{name} ({cls.file}:{cls.line}) has no member of SupportsEagle3.")

    return probe


def _adding(where: tuple[str, str], names: tuple[str, ...], **own) -> tuple[Change, ...]:
    module, cls = where
    return tuple(
        Change(module, f"{cls}.{n}", (lambda _, v=own[n]: v) if n in own else wrapper.answering(n), adds=True)
        for n in names
    )


# SupportsEagle3 as 0.12 to 0.17 ask for it, and as 0.18 does; DeepseekV2ForCausalLM has the has_own flags from SupportsEagle.
OLD = ("supports_eagle3", "set_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")
NEW = ("supports_eagle3", "set_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers")
FLAGS = ("has_own_lm_head", "has_own_embed_tokens")

PATCHES = [
    Patch(
        id="vllm-cpu-rotary",
        package="vllm",
        versions=">=0.16,<0.34",
        symptom="silent: on a CPU, states of MLA models with plain RoPE are 15-39 % off from position 1 on",
        cure="RotaryEmbedding.forward_cpu gives the kernel flat, contiguous tensors and copies the result back.",
        probe=_rotary_probe,
        changes=(
            Change(ROTARY, "RotaryEmbedding.forward_cpu", _flat_rotary, known={"9e6cd415c0ea8045": "0.16.0 - 0.33.0"}),
        ),
        proof=_rotary_proof,
    ),
    Patch(
        id="vllm-kernel-scan",
        package="vllm",
        versions=">=0.16,<0.34",
        symptom="AttributeError: '_lib_fn_wrapper' object has no attribute 'get'",
        cure="the dispatcher's scan of modules passes over objects whose __dict__ is not a dictionary.",
        probe=_scan_probe,
        changes=(
            Change(
                DISPATCHER,
                "vars",
                _dictionaries_only,
                known={"cf0abca713ebb42d": "0.32.0 - 0.33.0"},
                adds=True,
                leans_on="_rebind_kernels",
            ),
        ),
    ),
    Patch(
        id="vllm-cpu-preload",
        package="vllm",
        versions=">=0.18,<0.19",
        symptom="RuntimeError: libtcmalloc is not found in LD_PRELOAD.",
        cure="the CPU worker starts without the allocator and the OpenMP library that only make it faster.",
        probe=_preload_probe,
        changes=(
            Change(
                CPU_WORKER, "CPUWorker.init_device", _without_preload, known={"602c1882456eefc6": "0.18.0 - 0.18.1"}
            ),
        ),
    ),
    Patch(
        id="vllm-cpu-nobind",
        package="vllm",
        versions=">=0.20,<0.21",
        symptom="IndexError: list index out of range",
        cure="VLLM_CPU_OMP_THREADS_BIND=nobind no longer ends in the message about the binding.",
        probe=_nobind_probe,
        changes=(
            Change(
                OMP,
                "OMPProcessManager._parse_omp_threads_bind_env",
                _without_binding,
                {"3dd3da3a12f1a938": "0.20.0 - 0.20.2"},
            ),
        ),
    ),
    cpu_moe.PATCH,
    Patch(
        id="vllm-deepseek-eagle3",
        package="vllm",
        versions=">=0.16,<0.18",
        symptom="ValueError: Model DeepseekV3ForCausalLM does not support hidden state extraction",
        cure="DeepseekV2ForCausalLM answers SupportsEagle3, and refuses the auxiliary ids that its forward would drop.",
        probe=_lacks_eagle3(*DEEPSEEK),
        changes=_adding(DEEPSEEK, OLD, set_aux_hidden_state_layers=wrapper.no_auxiliary_states),
    ),
    Patch(
        id="vllm-kimi-eagle3",
        package="vllm",
        versions=">=0.16,<0.18",
        symptom="ValueError: Model KimiK25ForConditionalGeneration does not support hidden state extraction",
        cure="the wrapper answers SupportsEagle3 by asking its language model.",
        probe=_lacks_eagle3(*KIMI),
        changes=_adding(KIMI, OLD + FLAGS),
    ),
    Patch(
        id="vllm-kimi-vl-eagle3",
        package="vllm",
        versions=">=0.18,<0.34",
        symptom="RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
        cure="the Kimi-VL wrapper answers SupportsEagle3 by asking its language model.",
        probe=_lacks_eagle3(*KIMI_VL),
        changes=_adding(KIMI_VL, NEW + FLAGS),
    ),
]
