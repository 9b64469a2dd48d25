"""The patches of this process: armed, applied, undone, checked.

A patch is applied in the running process only, can be undone, and twice is once. Before anything is changed, the source of
every function that a patch replaces (or leans on) is compared with the digests it was written for; an unknown one is refused
with the names of package, version and function. `activate` arms patches without importing the patched modules: a change is
made right after its module is imported, so this can run at the start of every process (compat/plugin.py).
"""

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kimi_eagle.compat import imports
from kimi_eagle.compat.patch import Change, Patch
from kimi_eagle.compat.source import Source, open_source
from kimi_eagle.errors import BadInput, MissingCapability

SELECTION = "KIMI_EAGLE_PATCHES"  # auto (default) | off | ids, comma-separated; "auto,-id" leaves one out
_MISSING = object()


@dataclass
class State:
    """What became of a patch in this process: `state` is applied, armed, not needed, refused, off or not installed."""

    state: str
    detail: str = ""


@dataclass
class Made:
    """A change that was made here: where, what was there before, and what is there now."""

    patch_id: str
    change: Change
    owner: object
    attribute: str
    old: object
    new: object

    def same_place(self, other: "Made") -> bool:
        """Whether both set the same attribute of the same object."""
        return self.owner is other.owner and self.attribute == other.attribute


_states: dict[str, State] = {}
_made: list[Made] = []  # in the order made; changes of one attribute by several patches lie on top of each other
_armed: dict[tuple[str, str, str], tuple[str, Callable]] = {}  # (patch, module, name) -> what waits for the import


def patches() -> list[Patch]:
    """Every patch this version of kimi_eagle knows."""
    from kimi_eagle.compat import speculators_patches, vllm_patches

    return [*vllm_patches.PATCHES, *speculators_patches.PATCHES]


def patch_of(patch_id: str) -> Patch:
    """The patch of that id; BadInput naming the known ones otherwise."""
    for patch in patches():
        if patch.id == patch_id:
            return patch
    raise BadInput(f"there is no patch {patch_id!r}: known are {', '.join(p.id for p in patches())}.")


def selected(selection: str | None = None) -> list[Patch]:
    """The patches that a selection names (default: the environment variable KIMI_EAGLE_PATCHES, default auto)."""
    words = [w.strip() for w in (selection or os.environ.get(SELECTION) or "auto").split(",") if w.strip()]
    if words == ["off"]:
        return []
    without = {patch_of(w[1:]).id for w in words if w.startswith("-")}
    named = {patch_of(w).id for w in words if not w.startswith("-") and w != "auto"}
    return [p for p in patches() if p.id not in without and ("auto" in words or p.id in named)]


def activate(selection: str | None = None) -> dict[str, State]:
    """Arm the selected patches in this process; never raises for a patch that does not fit, but says so in its state."""
    chosen = {p.id for p in selected(selection)}
    for patch in patches():
        if patch.id not in chosen:
            _states.setdefault(patch.id, State("off"))
        elif _states.get(patch.id, State("off")).state in ("off", "not installed"):
            _arm(patch)
    return dict(_states)


def apply(patch_id: str) -> State:
    """Make one patch's changes now, importing what it changes; a second call changes nothing.

    Raises MissingCapability where the code on disk is not one that the patch knows, or the package is missing.
    """
    patch = patch_of(patch_id)
    if _states.get(patch_id, State("off")).state in ("off", "not installed", "refused"):
        open_source(package=patch.package)
        _arm(patch)
    for change in patch.changes:
        if _states[patch_id].state == "armed":
            importlib.import_module(change.module)
    if _states[patch_id].state == "refused":
        raise MissingCapability(_states[patch_id].detail)
    return _states[patch_id]


def undo(patch_id: str) -> State:
    """Put back what a patch changed in this process (objects that were already made keep what they were made with).

    Changes that other patches laid over it are built again on what was there before.
    """
    for key in [k for k in _armed if k[0] == patch_id]:
        imports.forget(*_armed.pop(key))
    for made in [m for m in reversed(_made) if m.patch_id == patch_id]:
        above = [m for m in _made[_made.index(made) + 1 :] if m.same_place(made)]
        _made.remove(made)
        now = made.old
        for later in above:
            later.old, later.new = now, later.change.build(None if now is _MISSING else now)
            now = later.new
        if now is _MISSING:
            delattr(made.owner, made.attribute)
        else:
            setattr(made.owner, made.attribute, now)
    _states[patch_id] = State("off")
    return _states[patch_id]


def check(patch_ids: Iterable[str] | None = None) -> list[dict]:
    """Rows {id, state, detail, pid} of this process: armed modules are imported, changes looked up again, proofs run."""
    wanted = None if patch_ids is None else set(patch_ids)
    rows = []
    for patch in patches():
        if wanted is not None and patch.id not in wanted:
            continue
        now = _states.get(patch.id, State("off"))
        if now.state == "armed":
            now = _import_all(patch)
        if now.state == "applied":
            now = _look_again(patch)
        rows.append({"id": patch.id, "state": now.state, "detail": now.detail, "pid": os.getpid()})
    return rows


def _installed(package: str) -> Source | None:
    try:
        return open_source(package=package)
    except MissingCapability:
        return None


def _arm(patch: Patch) -> None:
    """Decide from the files on disk, and have the changes made as their modules are imported."""
    _states[patch.id] = _decide(patch)
    if _states[patch.id].state != "armed":
        return
    waiting = [(change, partial(_change, patch, change)) for change in patch.changes]
    for change, function in waiting:
        _armed[(patch.id, change.module, change.name)] = (change.module, function)
    for change, function in waiting:
        if _states[patch.id].state == "armed":
            imports.when_imported(change.module, function)


def _decide(patch: Patch) -> State:
    source = _installed(patch.package)
    if source is None:
        return State("not installed", f"{patch.package} is not installed here.")
    verdict = patch.verdict(source, None if patch.package == "vllm" else _installed("vllm"))
    if verdict.needed is False:
        return State("not needed", verdict.reason)
    sentence = patch.refusal(source) if verdict.needed else f"{patch.id}: {verdict.reason}"
    return State("refused", sentence) if sentence else State("armed", "waits for the import of what it changes.")


def _change(patch: Patch, change: Change, module) -> None:
    """Set the attribute in the imported module; the last change of a patch makes its state `applied`."""
    _armed.pop((patch.id, change.module, change.name), None)
    *outer, attribute = change.name.split(".")
    owner = module
    for part in outer:
        owner = getattr(owner, part)
    old = vars(owner).get(attribute, _MISSING)
    foreign = old is not _MISSING and not change.leans_on and _replaced_by_others(old, module)
    if (old is not _MISSING) == change.adds or foreign:
        what = "is there already" if change.adds else "is missing or was replaced by someone else"
        undo(patch.id)  # all of a patch or nothing
        _states[patch.id] = State("refused", f"{patch.id}: {change.module}.{change.name} {what}; it is left alone.")
        return
    new = change.build(None if change.adds else old)
    setattr(owner, attribute, new)
    _made.append(Made(patch.id, change, owner, attribute, old, new))
    if _states[patch.id].state == "armed" and not any(key[0] == patch.id for key in _armed):
        _states[patch.id] = State("applied", patch.cure)


def _replaced_by_others(old, module) -> bool:
    """Whether a function does not come from its module's file, nor from a change made here."""
    if any(m.new is old for m in _made):
        return False
    code = getattr(getattr(old, "__func__", old), "__code__", None)
    return code is not None and getattr(module, "__file__", None) not in (None, code.co_filename)


def _import_all(patch: Patch) -> State:
    try:
        for change in patch.changes:
            importlib.import_module(change.module)
    except Exception as error:
        return State("armed", f"what it changes cannot be imported here: {type(error).__name__}: {error}")
    return _states[patch.id]


def _look_again(patch: Patch) -> State:
    """The state after finding every change in place and running the proof."""
    for made in [m for m in _made if m.patch_id == patch.id]:
        top = [m for m in _made if m.same_place(made)][-1]
        if vars(made.owner).get(made.attribute) is not top.new:
            return State("lost", f"{patch.id}: {made.change.module}.{made.change.name} was replaced after the patch.")
    if patch.proof:
        try:
            patch.proof()
        except AssertionError as error:
            return State("failed", f"{patch.id}: {error}")
    return _states[patch.id]
