"""What a trace event is, from its name: which collective and by which implementation, or which kind of computation.

Kernel names differ by library and version, and a name that is not known would quietly be counted as computation. So the rules
stand in one table, in the order in which they are tried, and anything that still looks like a collective is kept apart as
`other collective` rather than dropped.

Sources of the names: NCCL's generated kernels (`ncclDevKernel_<collective>_<op>_<type>_<algorithm>_<protocol>`, symmetric ones
`ncclSymkDevKernel_*`), vLLM's csrc (`cross_device_reduce_1stage` / `_2stage`), torch's symmetric memory operators, FlashInfer's
`trtllm_allreduce_fusion`, AITER and quick reduce on ROCm, and for the CPU names seen in traces made here (`c10d::allreduce_`,
`gloo:all_reduce`, `_C::shm_allreduce`).
"""

import re
from functools import lru_cache
from typing import NamedTuple

ALLREDUCE = "allreduce"
COLLECTIVES = (ALLREDUCE, "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-receive", "other collective")
COMPUTE = ("attention", "MoE", "matmul", "memory", "other compute")
DISPATCH = (
    "collective dispatch"  # a caller's time around a collective while no transfer runs (gloo hands over to a thread)
)
KINDS = (*COLLECTIVES, *COMPUTE, DISPATCH)
GAP = "host gap"


class Label(NamedTuple):
    """kind: one of KINDS; implementation: empty for computation; fused: the event also does other work."""

    kind: str
    implementation: str = ""
    fused: bool = False


# The caller's side of a collective whose transfer is another event: never counted as a second collective.
_CALLER_SIDE = re.compile(r"^(c10d::|record_param_comms|nccl:|vllm::all_reduce|vllm::all_gather|vllm::reduce_scatter)")
_KIND_OF = {
    "allreduce": ALLREDUCE, "allgather": "all-gather", "reducescatter": "reduce-scatter", "alltoall": "all-to-all",
    "broadcast": "broadcast", "sendrecv": "send-receive", "send": "send-receive", "recv": "send-receive",
}  # fmt: skip
_RULES: list[tuple[re.Pattern[str], str, bool]] = [
    (re.compile(pattern, re.IGNORECASE), implementation, fused)
    for pattern, implementation, fused in [
        # Fused kernels first: their names hold the plain ones'. FlashInfer's pattern 0 is the AllReduce without a norm.
        (r"allreduce_fusion_kernel.*Pattern\)0\b", "FlashInfer", False),
        (
            r"trtllm_allreduce_fusion|allreduce_fusion_kernel|allreduceFusionKernel|rmsNormLamport",
            "FlashInfer fused",
            True,
        ),
        (r"pcie_?ipc.*all_?reduce|all_?reduce.*pcie_?ipc", "FlashInfer PCIe IPC", False),
        (r"(all_?reduce|reduce_scatter).*rms_?norm|rms_?norm.*all_?reduce", "fused with RMSNorm", True),
        (r"multimem_all_reduce", "multimem", False),
        (r"(one|two)_shot_all_reduce", "symmetric memory", False),
        (r"ncclSymk?DevKernel_AllReduce", "NCCL symmetric", False),
        (r"cross_device_reduce_1stage", "custom one-stage", False),
        (r"cross_device_reduce_2stage", "custom two-stage", False),
        (r"quickreduce|quick_all_?reduce|allreduce_prototype", "quick", False),
        (r"shm_allreduce", "shared memory", False),
        (r"gloo:all_reduce", "gloo", False),
        (r"mscclpp.*allreduce|lamport.*all_?reduce", "lamport", False),
    ]
]
_NCCL = re.compile(
    r"^(?:void )?(?:nccl(?:Symk?)?(?:Dev)?Kernel|rccl\w*)_(?P<what>[A-Za-z]+?)(?:_(?P<rest>\w+))?(?:[(<]|$)",
    re.IGNORECASE,
)
_ALGORITHM = re.compile(r"(RING|TREE|NVLS\w*?|COLLNET\w*?|PAT)_(LL128|LL|SIMPLE)", re.IGNORECASE)
_OTHER = re.compile(r"(?:gloo:|shm_|mori|deep_?ep|nvshmem|pplx)[\w:]*?(?P<what>all_?gather|reduce_?scatter|all_?to_?all\w*|dispatch|combine|"
                    r"broadcast|barrier|send|recv|gather|scatter|reduce)", re.IGNORECASE)  # fmt: skip
_LOOKS_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|^nccl|^rccl", re.IGNORECASE)
_COMPUTE_RULES = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in [
        ("MoE", r"moe|expert|topk_?gating|grouped_?topk|marlin_moe|fused_experts|silu_and_mul_per|permute_tokens"),
        ("attention", r"attention|attn|flash_?fwd|flash_?mla|\bmla\b|fmha|paged|reshape_and_cache|kv_cache|mqa_|decode_stage|"
                      r"merge_states|rotary|concat_and_cache"),
        ("matmul", r"gemm|gemv|matmul|\bmm\b|_mm\b|addmm|linear|nvjet|cutlass|cublas|xmma|wgmma|marlin|machete|bmm|splitk|_mm_|onednn"),
        ("memory", r"memcpy|memset|\bcopy_?|_copy|aten::(to|cat|index|embedding|clone|contiguous|slice|select|fill_|zero_|gather|"
                   r"index_select|stack|empty)|catarray|elementwise_kernel.*copy|vectorized_gather|indexSelect|fillFunctor"),
    ]
]  # fmt: skip


@lru_cache(maxsize=100_000)
def label(name: str, collective_name: str = "", backend: str = "") -> Label:
    """What the event `name` is. collective_name: the trace's own "Collective name", which settles RCCL's generic kernels."""
    if _CALLER_SIDE.search(name):
        return Label(DISPATCH)
    for pattern, implementation, fused in _RULES:
        if pattern.search(name):
            return Label(ALLREDUCE, implementation, fused)
    if match := _NCCL.search(name):
        return _nccl(match, name, collective_name, backend)
    if match := _OTHER.search(name):
        what = match["what"].lower().replace("_", "")
        kind = (
            "all-to-all"
            if what.startswith(("alltoall", "dispatch", "combine"))
            else _KIND_OF.get(what, "other collective")
        )
        return Label(kind, "gloo" if "gloo" in name else "shared memory" if "shm_" in name else "")
    if _LOOKS_COLLECTIVE.search(name):
        flat = re.sub(r"[^a-z]", "", name.lower())
        kind = next((k for word, k in _KIND_OF.items() if len(word) > 4 and word in flat), "other collective")
        return Label(kind, "unknown")
    return Label(next((kind for kind, pattern in _COMPUTE_RULES if pattern.search(name)), "other compute"))


def _nccl(match: re.Match[str], name: str, collective_name: str, backend: str) -> Label:
    what = match["what"].lower()
    if (
        what == "generic" and collective_name
    ):  # RCCL and old NCCL launch one kernel for all; the trace says which it was
        what = re.sub(r"[^a-z]", "", collective_name.lower())
    kind = next((k for word, k in _KIND_OF.items() if what.startswith(word)), "other collective")
    library = "RCCL" if what != match["what"].lower() or "rccl" in (name[:4].lower(), backend.lower()) else "NCCL"
    if how := _ALGORITHM.search(name):
        return Label(kind, f"{library} {how[1].lower()} {how[2].upper()}")
    return Label(kind, f"{library} symmetric" if "sym" in name[:8].lower() else library)
