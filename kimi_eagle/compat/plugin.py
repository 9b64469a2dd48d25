"""vLLM's `vllm.general_plugins` entry point: vLLM calls `register` in the front end, the engine core and every worker.

That is what carries the patches into spawned processes, where a change made in the parent is not seen. Nothing of vLLM is
imported here and nothing raised: a patch that does not fit is left out and says so when asked (`compat.check`).
`KIMI_EAGLE_PATCHES=off` leaves vLLM exactly as it is.
"""

import logging
import os

ANSWER = "kimi_eagle_patches"  # the method that `collective_rpc` finds on every worker


def register() -> None:
    """Arm the selected patches in this process, and let every worker answer `collective_rpc("kimi_eagle_patches")`."""
    if os.environ.get("KIMI_EAGLE_PATCHES", "auto").strip() == "off":
        return
    try:
        from kimi_eagle.compat import imports, registry

        for patch_id, state in registry.activate().items():
            if state.state == "refused":
                logging.getLogger("kimi_eagle").warning("patch refused: %s (%s)", state.detail, patch_id)
        imports.when_imported("vllm.v1.worker.worker_base", _let_workers_answer)
    except Exception:
        logging.getLogger("kimi_eagle").exception("the patches of kimi_eagle are not active in this process")


def _let_workers_answer(module) -> None:
    """Give vLLM's WorkerBase the method `kimi_eagle_patches` -> rows of registry.check, from inside the worker."""

    def kimi_eagle_patches(self) -> list[dict]:
        from kimi_eagle.compat import registry

        return registry.check()

    if not hasattr(module.WorkerBase, ANSWER):
        setattr(module.WorkerBase, ANSWER, kimi_eagle_patches)
