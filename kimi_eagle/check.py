"""`kimi-eagle check PATH`: see what PATH is, and hold it against what its readers expect."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kimi_eagle.errors import BadInput


def check(
    path: Path, target: str = "", reader: str = "vllm", parameters: dict[str, Any] | None = None
) -> tuple[str, list[str]]:
    """(what `path` is, its faults as sentences). A store has manifest.json, a run result.json, a head config.json.

    target: name of the target to hold a store or a head against, "" for none; reader: "vllm", "sglang" or "speculators", of a
    head; parameters: of a run, whose engine is to give a store's canary prompts the same states again.
    """
    if (path / "manifest.json").is_file() or any(path.glob("part-*/manifest.json")):
        return _check_store(path, target, parameters)
    if parameters:
        raise BadInput(f"{path.name}: is no hidden-state store, and only those have a canary; leave out --canary.")
    if (path / "result.json").is_file():
        return "run", _run_faults(path)
    if (path / "config.json").is_file():
        from kimi_eagle.eagle3.contract import check_head
        from kimi_eagle.target import describe

        return "head", check_head(path, describe(target) if target else None, reader)
    if not path.is_dir():
        raise BadInput(
            f"{path}: {'a file' if path.exists() else 'no such folder'}; name the folder of a store, a head or a run."
        )
    raise BadInput(
        f"{path.name}: neither a hidden-state store, nor a head, nor a run (no manifest.json, config.json or result.json in it)."
    )


def _check_store(path: Path, target: str, parameters: dict[str, Any] | None) -> tuple[str, list[str]]:
    from kimi_eagle.extract import canary, loop, session
    from kimi_eagle.hidden_store import Store
    from kimi_eagle.target import describe

    store = Store(path)
    faults = store.check()
    if target:
        faults += canary.target_faults(store.manifest, describe(target))
    if not parameters:
        return "hidden-state store", faults
    kept, cfg = canary.read(path), SimpleNamespace(**parameters)
    plan = loop.plan(
        describe(cfg.target), store.layer_ids[:-1], backend=cfg.extract_backend, dtype=cfg.dtype,
        tensor_parallel=cfg.tensor_parallel,
    )  # fmt: skip
    engine = session.open_engine(cfg, plan.target, "extract", **plan.engine_options)
    with tempfile.TemporaryDirectory() as folder:
        worst, differ = canary.compare(kept, plan, engine, Path(folder))
    return f"hidden-state store, {len(kept.rows)} canary prompts within {worst:.1e}", [*faults, *differ]


def sound(kind: str, path: Path, target: str = "", reader: str = "vllm") -> str:
    """What to say of a `path` without faults; of a head also the line that serves it."""
    if kind != "head":
        return f"{kind}: sound"
    from kimi_eagle.acceptance.launch import launch_line
    from kimi_eagle.target import describe

    served = describe(target).path if target else "TARGET"
    return f"head: sound for {reader}; to serve it:\n{launch_line(reader, served, path)}"


def _run_faults(folder: Path) -> list[str]:
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if not {"stages", "artifacts"} <= set(result) and not {"stage", "status", "artifacts"} <= set(result):
            raise ValueError("keys are missing")
    except (ValueError, TypeError) as error:
        return [f"result.json is not one of a run or a stage ({error})."]
    if "stage" in result:
        results = {result["stage"]: result}
        states = {result["stage"]: result["status"]}
        root = folder.parent
    else:
        states, root = result["stages"], folder
        results = {stage: {"artifacts": result["artifacts"].get(stage, {})} for stage in states}
    faults = [f"{stage} is {state}." for stage, state in states.items() if state != "done"]
    for stage, entry in results.items():
        gone = [name for name, place in entry["artifacts"].items() if not (root / place).exists()]
        faults += [f"{stage}: its artifact {name} is gone." for name in gone]
    return faults
