"""A patch for vLLM's mixture of experts on a CPU, 0.20 to 0.24."""

from kimi_eagle.compat.patch import Change, Patch, Verdict
from kimi_eagle.compat.source import Source

MODULE = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"


def _probe(source: Source, _) -> Verdict:
    path = source.module_path(MODULE)
    if path is None:
        return Verdict(False, f"vllm {source.version} has no experts of its own for a CPU.")
    if "SILU: lambda x: SiluAndMul(compile_native=False).forward_native(x)" in source.read(path):
        return Verdict(
            True, "the experts' SiLU is a custom op that is made in the forward pass, where no config is set."
        )
    return Verdict(False, "the experts' SiLU needs no config.")


def _plain_silu(table: dict) -> dict:
    """The table of activations with SiLU as a function: silu of the first half of the last axis times the second."""
    import torch

    def silu_and_mul(x):
        half = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :half]) * x[..., half:]

    return {name: silu_and_mul if name.name == "SILU" else function for name, function in table.items()}


def proof() -> None:
    """The patched SiLU against its definition, where no config is set."""
    import torch
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    x = torch.linspace(-3, 3, 16).reshape(2, 8)
    silu = next(f for name, f in cpu_fused_moe._CPU_MOE_ACT_FN.items() if name.name == "SILU")
    right = x[:, :4] * torch.sigmoid(x[:, :4]) * x[:, 4:]
    assert torch.allclose(silu(x), right, atol=1e-6), "the experts' SiLU is not silu(gate) * up."


PATCH = Patch(
    id="vllm-cpu-moe-silu",
    package="vllm",
    versions=">=0.20,<0.25",
    symptom="AssertionError: Current vLLM config is not set.",
    cure="the SiLU of experts on a CPU is a plain function and no custom op made in the forward pass.",
    probe=_probe,
    changes=(
        Change(
            MODULE,
            "_CPU_MOE_ACT_FN",
            _plain_silu,
            known={"123d7009dd3270d1": "0.17.1 - 0.26.0"},
            leans_on="cpu_fused_moe_torch",
        ),
    ),
    proof=proof,
)
