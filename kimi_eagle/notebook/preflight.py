"""Checks that cost milliseconds and save minutes: made by the runner and by `begin`, before any engine starts."""

import contextlib
import difflib
import errno
import json
import socket
from pathlib import Path
from typing import Any

from kimi_eagle import paths
from kimi_eagle.errors import BadInput
from kimi_eagle.extract import engine
from kimi_eagle.target import MADE


def check(values: dict[str, Any]) -> None:
    """BadInput for a target that is not there, an engine port in use, or a missing prompts file; absent keys are skipped."""
    if "target" in values:
        check_target(values["target"])
    if values.get("engine_port"):
        check_ports(values["engine_port"])
    if values.get("prompts") and not paths.resolve(values["prompts"]).is_file():
        raise BadInput(
            f"prompts {values['prompts']!r}: no such file; give a .jsonl file, relative to the repository or absolute."
        )


def check_target(name: str) -> None:
    """BadInput unless `name` is a made target, a folder with a config.json, or shaped like a Hub name (owner/name)."""
    if name in MADE:
        return
    folder = paths.resolve(name)
    if folder.is_dir():
        try:
            json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
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
