"""Checks that cost milliseconds and save minutes: made by the runner and by `begin`, before any engine starts."""

import contextlib
import difflib
import errno
import json
import socket
from pathlib import Path
from typing import Any

from kimi_eagle import conversations, paths
from kimi_eagle.errors import BadInput
from kimi_eagle.extract import engine
from kimi_eagle.target import MADE

# Held against the modules that read them by tests/unit/test_parameters.py; here, since importing those takes seconds.
CHOICES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "extract_backend": ("auto", "connector", "hooks", "speculators"),
    "head_attention": ("llama", "mla"),
    "loss": ("kl", "ce", "tv", "nla", "lk"),
    "initial_weights": ("target", "random"),
    "parallel": ("ddp", "fsdp2"),
    "train_device": ("auto", "cpu", "cuda"),
    "head_dtype": ("auto", "float32", "bfloat16"),
    "profile_communicator": ("auto", "gloo"),
}
MANY = 1e18
_COUNTS = "tensor_parallel profile_tensor_parallel max_model_len max_batched_tokens max_sequences answer_tokens samples_per_prompt verify_rows "
_COUNTS += "profile_steps profile_context draft_vocab_size epochs batch_rows evaluation_samples train_processes serve_tokens serve_batch "
_COUNTS += "speed_tokens speed_rounds speed_repeats"
RANGES = {name: (1, MANY) for name in _COUNTS.split()} | {
    "max_prompts": (0, MANY), "serve_prompts": (0, MANY), "num_speculative_tokens": (0, 64), "held_out_fraction": (0.0, 0.9),
    "temperature": (0.0, 10.0), "gpu_memory": (0.01, 1.0), "ttt_steps": (1, 16), "row_tokens": (16, MANY), "step_decay": (1e-6, 1.0),
    "warmup_fraction": (0.0, 0.999), "learning_rate": (1e-12, 10.0), "idle_minutes": (0, MANY),
}  # fmt: skip
STAGES = ("00", "01", "02", "03", "04", "05")


def check(values: dict[str, Any]) -> None:
    """BadInput for a target that is not there, an engine port in use, or a missing prompts file; absent keys are skipped."""
    if "target" in values:
        check_target(values["target"])
    if values.get("engine_port"):
        check_ports(values["engine_port"])
    if values.get("prompts"):
        conversations.read(values["prompts"])
    check_values(values)


def check_values(values: dict[str, Any]) -> None:
    """BadInput for a word that is none of its choices, or a number outside of its range; absent keys are skipped."""
    for name, choices in CHOICES.items():
        if name in values and values[name] not in choices:
            near = difflib.get_close_matches(str(values[name]), choices, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise BadInput(f"{name} {values[name]!r}: use one of {', '.join(choices)}{hint}.")
    for name, (low, high) in RANGES.items():
        if name in values and not low <= values[name] <= high:
            limit = f"from {low:g} to {high:g}" if high < MANY else f"{low:g} or more"
            raise BadInput(f"{name} {values[name]!r}: give {limit}.")
    if "expected_minutes" in values and len(values["expected_minutes"]) != len(STAGES):
        raise BadInput(
            f"expected_minutes: give {len(STAGES)} numbers, one a notebook, not {len(values['expected_minutes'])}."
        )


def check_target(name: str) -> None:
    """BadInput unless `name` is a made target, a folder with a config.json, or shaped like a Hub name (owner/name)."""
    if name in MADE:
        return
    folder = paths.resolve(name)
    if folder.is_dir():
        try:
            readable = isinstance(json.loads((folder / "config.json").read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            readable = False
        if not readable:
            raise BadInput(
                f"target {Path(name).name!r}: its folder has no readable config.json; give a checkpoint folder."
            ) from None
        return
    parts = name.split("/")
    if len(parts) == 2 and all(parts) and not name.startswith((".", "~")):
        return
    near = difflib.get_close_matches(name, MADE, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give a checkpoint folder, a Hub name, or one of {', '.join(MADE)}."
    raise BadInput(f"target {name!r}: no such checkpoint folder; {hint}")


def check_ports(base: int) -> None:
    """BadInput where a port from `base` on (one per engine role) is taken by anything but an engine of this project."""
    if not 0 < base <= 65535 - len(engine.ROLES):
        raise BadInput(f"engine_port {base}: give a port from 1 to {65535 - len(engine.ROLES)}, or 0 to use none.")
    own = {engine.port_of(c["role"], c["port"]) for c in _engine_configs() if c.get("port")}
    for role in engine.ROLES:
        port = engine.port_of(role, base)
        if port not in own and (reason := _port_trouble(port)):
            raise BadInput(
                f"engine_port {base}: port {port} (the {role} engine's) {reason}; choose another, or 0 to use none."
            )


def _port_trouble(port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
    return ""


def _engine_configs() -> list[dict[str, Any]]:
    found = []
    for file in paths.engines().glob("*/config.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return found
