"""Back end `connector`: vLLM's own `extract_hidden_states` with its example connector, made fit for a CPU and for readers.

The stock connector copies on CUDA streams (it cannot run on a CPU) and lets a reader see half a file; `StatesConnector` changes
those two points only: plain copies where there is no accelerator, and a rename once the file is whole.
"""

from typing import Any

from kimi_eagle.extract.backends import Facts, Verdict
from kimi_eagle.extract.states import FileStates, Staging
from kimi_eagle.target import Target

NAME = "connector"


def probe(target: Target, facts: Facts) -> Verdict:
    """Whether vLLM's native route is right for this target here; the versions come from its sources, 0.16 to 0.33."""
    v = facts.vllm
    if v < (0, 17):
        return Verdict(False, f"vLLM {facts.vllm_text} has no extract_hidden_states (first in 0.17)")
    if v < (0, 18):
        return Verdict(
            False, f"vLLM {facts.vllm_text} never stores the final layer's state, and rejects DeepSeek and Kimi targets"
        )
    if facts.runner_v2 and v < (0, 29):
        return Verdict(
            False,
            f"model runner V2 of vLLM {facts.vllm_text} has no extract_hidden_states (first in 0.29): unset "
            "VLLM_USE_V2_MODEL_RUNNER, or set it to 0, which selects the runner that has it",
        )
    if target.is_mla and v < (0, 25):
        return Verdict(
            False, f"vLLM {facts.vllm_text} drops the final layer's state on DeepSeek-type targets (right from 0.25)"
        )
    if (0, 22) <= v < (0, 24):
        return Verdict(
            False, f"vLLM {facts.vllm_text} loses rows of prompts that are prefilled in chunks (0.22 and 0.23)"
        )
    if facts.device == "cpu" and v < (0, 24):
        return Verdict(
            False, f"vLLM {facts.vllm_text} sets no auxiliary layers on the CPU, or stores them by CUDA streams only"
        )
    if facts.device == "cpu" and v < (0, 25):
        return Verdict(
            False,
            f"vLLM {facts.vllm_text} cannot sample beside a draft on the CPU: rejection_sampler.py:708 passes "
            "USE_FP64_GUMBEL, which cpu_triton_utils.py:293 does not take (right from 0.25)",
        )
    return Verdict(True, f"vLLM {facts.vllm_text} stores all layers itself, the final one included")


def engine_options(layer_ids: list[int]) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM that make it store the states of `layer_ids` (vLLM's convention, final last)."""
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": draft,
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "kimi_eagle.extract.states_connector",
            "kv_role": "kv_producer",
            # Paths come with each request from this package only: the engine answers on a private socket.
            "kv_connector_extra_config": {"use_synchronization_lock": False, "allow_custom_save_path": True},
        },
    }


def run(engine: Any, requests: list[dict[str, Any]], layer_ids: list[int], staging: Staging) -> FileStates:
    """Prefill `requests`; their states by request id, in files in the folder of `staging`."""
    results = engine.generate(requests, max_tokens=1, states_folder=str(staging.folder))
    return FileStates({r["id"]: r["hidden_states_path"] for r in results if "hidden_states_path" in r})
