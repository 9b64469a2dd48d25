"""The canary: states of a few prompts, kept beside a proven store, that another vLLM, kernel or machine is held against later.

A wrong kernel or rotated weights raise no error: the head just accepts less. The canary says so before anything is served.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kimi_eagle.chat import Answer
from kimi_eagle.errors import BadInput
from kimi_eagle.extract import loop
from kimi_eagle.extract.engine import Engine
from kimi_eagle.hidden_store import Store
from kimi_eagle.target import Target

FILE = "canary.safetensors"
# Of Kimi-K2.5: at most 37 MB. The first tokens of a row, whose states do not depend on what follows.
ROWS, TOKENS = 10, 64
SHARE = 0.9  # of a prompt's tokens: one whose experts changed places between two right kernels is not held against them


class Canary(NamedTuple):
    """What the file holds: the store's manifest, the relative L2 error that is allowed, and (token_ids [T], states [T, S, H])."""

    manifest: dict[str, Any]
    tolerance: float
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]]


def write(store: Store, tolerance: float) -> Path:
    """Keep ROWS rows, spread over the store, as its canary."""
    tensors = {}
    for name in store.sample_ids[:: max(1, len(store) // ROWS)][:ROWS]:
        row = store.row(name)
        tensors[f"{name}/token_ids"] = row.token_ids[:TOKENS]
        tensors[f"{name}/hidden_states"] = row.hidden_states[:TOKENS]
    partial = store.folder / f"{FILE}.tmp"
    save_file(tensors, partial, {"manifest": json.dumps(store.manifest), "tolerance": str(tolerance)})
    return partial.rename(store.folder / FILE)


def read(folder: Path) -> Canary:
    """The canary of a store; BadInput where it has none."""
    if not (folder / FILE).is_file():
        raise BadInput(f"store {folder.name}: no {FILE} in it; notebook 02 writes it once its verification is right.")
    try:
        with safe_open(folder / FILE, "pt") as file:
            names = dict.fromkeys(key.rpartition("/")[0] for key in file.keys())  # noqa: SIM118 - not a dict
            rows = {n: (file.get_tensor(f"{n}/token_ids"), file.get_tensor(f"{n}/hidden_states")) for n in names}
            note = file.metadata()
        return Canary(json.loads(note["manifest"]), float(note["tolerance"]), rows)
    except Exception as error:  # safetensors has its own error types
        raise BadInput(
            f"store {folder.name}: its {FILE} is damaged ({type(error).__name__}); run notebook 02 again."
        ) from None


def compare(kept: Canary, plan: loop.Plan, engine: Engine, folder: Path) -> tuple[float, list[str]]:
    """(worst relative L2 error, a sentence per prompt over the tolerance) of `engine`'s states against the kept ones.

    `plan` must be for the canary's layers; `folder` is an empty one for the states. Also a sentence where the target itself differs.
    """
    faults = target_faults(kept.manifest, plan.target)
    rows = [Answer(n, n, "heldout", ids.tolist(), 0, "length") for n, (ids, _) in kept.rows.items()]
    found = loop.extract(plan, engine, rows, folder, say=lambda _: None)
    worst = 0.0
    for name, (_, states) in kept.rows.items():
        if name not in found.position:
            faults.append(f"canary {name}: no states came out.")
            continue
        a, b = states.float(), found.row(name).hidden_states.float()
        errors = ((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-20)).quantile(SHARE, dim=0)
        place, error = int(errors.argmax()), errors.max().item()
        worst = max(worst, error)
        if not error <= kept.tolerance:
            ratio = (b[:, place].norm(dim=-1).mean() / a[:, place].norm(dim=-1).mean()).item()
            turned = (
                "; equal sizes in other directions: rotated weights?" if error > 0.5 and abs(ratio - 1) < 0.05 else ""
            )
            faults.append(
                f"canary {name}: its states differ by {error:.2g} at layer id {plan.layer_ids[place]} ({kept.tolerance:.0e} is "
                f"allowed), their mean norm is {ratio:.3f} times the stored one{turned}."
            )
    return worst, faults


def target_faults(manifest: dict[str, Any], target: Target) -> list[str]:
    """A sentence per part of the target's identity in which a store's target differs from the one at hand."""
    kept = manifest["target"]
    return [
        f"the states are of a target with {part} {kept.get(part)}, {target.name} has {value}"
        + (": a head trained on them meets other states when it is served." if part == "quantization" else ".")
        for part, value in target.identity().items()
        if kept.get(part) != value
    ]
