"""After a call that failed: its rows one by one, so that the one at fault is known and the others are not lost."""

from collections.abc import Callable
from typing import Any

from kimi_eagle.errors import CallFailed, StageFailed
from kimi_eagle.extract.engine import Engine, log_tail


class Singly:
    """States as `states.py` has them, but in memory, of requests asked for one by one; no more are asked for once over `allowed` have failed.

    run: requests -> their states. Raises StageFailed where the engine's workers answer nothing any more.
    """

    def __init__(
        self, run: Callable[[list[dict[str, Any]]], Any], engine: Engine, requests: list[dict], allowed: float
    ):
        self.found: dict[Any, Any] = {}
        self.failed: dict[Any, CallFailed] = {}
        for request in requests:
            try:
                states = run([request])
                self.found[request["id"]] = states.row(request["id"])
                states.remove()
                del states  # the place that they lay in is wanted for the next
            except CallFailed as error:
                must_answer(engine, error)
                self.failed[request["id"]] = error.with_traceback(None)
                if len(self.failed) > allowed:
                    return

    def row(self, request: Any) -> tuple[Any, Any]:
        """token_ids [T] and hidden_states [T, S, H]; the engine's CallFailed for one that it cannot take."""
        if request in self.failed:
            raise self.failed[request]
        return self.found[request]

    lazy = row

    def remove(self) -> None:
        """Nothing is left to delete."""


def must_answer(engine: Engine, error: CallFailed) -> None:
    """StageFailed, with the end of the log, where not a row is at fault but workers that are gone."""
    try:
        engine.rpc("kimi_eagle_patches")
    except StageFailed:
        raise StageFailed(f"{error}; its workers answer no more. Its last lines:\n{log_tail(engine.folder)}") from None
