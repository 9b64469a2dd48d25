"""Questions that import native code, each asked in a child process: `python -m kimi_eagle.diagnose.probes NAME [ARGUMENT]`.

`import vllm._C` ends in SIGILL on a processor without the instructions it was built for, and importing vLLM in a notebook's
kernel spoils that kernel for anything else. A child that dies is an answer too.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

MARK = "kimi-eagle-probe "


def ask(
    name: str, argument: dict[str, Any] | None = None, timeout: float = 900, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """The answer of probe `name`, or {"error": why there is none} where the child died, failed or took over `timeout` seconds."""
    command = [sys.executable, "-m", "kimi_eagle.diagnose.probes", name, json.dumps(argument or {})]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    if done.returncode < 0:
        return {"error": f"ended by {signal.Signals(-done.returncode).name}"}
    last = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {"error": last[-1][:300] if last else f"ended with code {done.returncode}"}


def torch_facts() -> dict[str, Any]:
    """{cuda_build, devices: [{name, capability}], peers: [[bool]]}: what torch sees, and which GPU reaches which directly."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    devices = [
        {"name": torch.cuda.get_device_name(i), "capability": "{}.{}".format(*torch.cuda.get_device_capability(i))}
        for i in range(count)
    ]
    return {"cuda_build": torch.version.cuda or "", "devices": devices, "peers": peers}


def vllm_facts() -> dict[str, Any]:
    """{version, platform, device, kernels}: the platform that vLLM detects, and which of its kernel libraries load here."""
    import vllm
    from vllm.platforms import current_platform

    # Importing the platform's kernels is what an engine does first; the class has had this method since 0.15.
    getattr(current_platform, "import_kernels", lambda: None)()
    # Asked of the process's memory map: the CPU build loads its library under a name that Python's import does not record.
    with open("/proc/self/maps") as maps:
        kernels = sorted(
            {line.rsplit("/", 1)[-1].split(".")[0] for line in maps if "/vllm/_" in line and ".so" in line}
        )
    return {
        "version": vllm.__version__,
        "platform": type(current_platform).__name__,
        "device": current_platform.device_type,
        "kernels": kernels,
    }


def backends(target: str, llm: dict[str, Any]) -> dict[str, Any]:
    """{attention: [...], experts: [...], linear: [...]}: what vLLM's own constructors choose for this target on this machine.

    target: checkpoint folder; llm: keyword arguments of an engine. The model is built by vLLM itself on the meta device, with
    one layer of each kind, so that no weight is read and no memory taken; every selector runs as it would in the engine.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=target, load_format="dummy", **llm).create_engine_config()
    words = config.model_config.hf_text_config
    words.num_hidden_layers = min(words.num_hidden_layers, (getattr(words, "first_k_dense_replace", 0) or 0) + 1)
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            model = initialize_model(config)
    found: dict[str, set[str]] = {"attention": set(), "experts": set(), "linear": set()}
    for module in model.modules():
        if hasattr(module, "attn_backend"):
            found["attention"].add(module.attn_backend.get_name())
        method = getattr(module, "quant_method", None)
        if method is not None and "Embedding" not in type(method).__name__:
            kind = "experts" if "MoE" in type(method).__name__ else "linear"
            found[kind].add(_describe(method, getattr(module, "scheme", None)))
    return {"architecture": type(model).__name__, **{kind: sorted(names) for kind, names in found.items()}}


def _describe(method: Any, scheme: Any) -> str:
    """The class of a layer's method, with the kernel that it chose where it holds one."""
    parts = [type(method).__name__] + ([type(scheme).__name__] if scheme is not None else [])
    for holder in (method, scheme):
        for name, value in vars(holder).items() if holder is not None else ():
            if value is not None and name in (
                "experts_cls",
                "kernel",
                "fp8_linear",
                "unquantized_backend",
                "wna16_backend",
            ):
                parts.append(getattr(value, "__name__", None) or getattr(value, "name", None) or type(value).__name__)
    return " / ".join(dict.fromkeys(parts))


PROBES = {"torch": torch_facts, "vllm": vllm_facts, "backends": backends}


if __name__ == "__main__":
    print(MARK + json.dumps(PROBES[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
