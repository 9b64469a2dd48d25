"""Worker extension that keeps vLLM's CPU workers on gloo, so that a machine with AVX-512 can show what one without has.

With AVX-512, vLLM's CPU back end reduces through shared memory (`_C::shm_allreduce`) when all ranks name the same segment;
without it, through gloo. The module is imported in every worker before its process groups are made.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from kimi_eagle.allreduce.profile_worker import TraceOnly


def _use_gloo() -> None:
    asked = "_all_group_ranks_share_shm_group_name"
    if hasattr(CpuCommunicator, asked):
        setattr(CpuCommunicator, asked, lambda self: False)


class GlooAllReduce(TraceOnly):
    """Mixed into vLLM's worker by name; what it changes happens when its module is imported."""


_use_gloo()
