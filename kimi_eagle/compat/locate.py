"""Where vLLM defines a model architecture, and what of the EAGLE-3 interface it has, from the files alone.

Works for an installed vLLM, a site-packages folder or a wheel, also where `import vllm` fails.
"""

import ast
import difflib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from kimi_eagle.compat.classes import Class, Classes
from kimi_eagle.compat.source import Source, open_source
from kimi_eagle.errors import BadInput

REGISTRY = "vllm/model_executor/models/registry.py"
INTERFACES = "vllm.model_executor.models.interfaces"
MODEL_FOLDERS = ("vllm/model_executor/models/", "vllm/models/")
PROTOCOL = "SupportsEagle3"


@dataclass(frozen=True)
class Member:
    """A member of the protocol and where a class has it: own, inherited, protocol (its default body) or missing."""

    name: str
    where: str
    holder: str = ""  # class, file and line that provide it


@dataclass(frozen=True)
class Part:
    """One class on the way in: the path of attributes to it from the outermost, and its protocol members."""

    path: str  # "" for the outermost, then "language_model", "language_model.model"
    cls: Class | None
    members: tuple[Member, ...] = ()
    note: str = ""
    collects: str = ""  # for the bare model: what its forward hands out as auxiliary states

    @property
    def implements(self) -> bool:
        """Whether a runtime `isinstance(model, SupportsEagle3)` would hold: every member is there."""
        return bool(self.members) and all(m.where != "missing" for m in self.members)


@dataclass(frozen=True)
class Located:
    """Answer of `locate`: registry entry, parts from the outer wrapper inwards, remarks about files."""

    architecture: str
    vllm: str
    registered: str  # "module:Class" as the registry names it, "" where it does not
    parts: tuple[Part, ...]
    remarks: tuple[str, ...] = ()
    protocol: tuple[str, ...] = field(default=())

    @property
    def is_wrapper(self) -> bool:
        """Whether the outermost class wraps a language model of its own (a multimodal model)."""
        return len(self.parts) > 1 and (self.parts[1].path == "language_model" or len(self.parts) > 2)

    @property
    def inner_path(self) -> str:
        """Attributes from the outermost class to the bare model that holds the layers, such as `language_model.model`."""
        return self.parts[-1].path


def locate(architecture: str, vllm: str | Path | None = None) -> Located:
    """Find an architecture (or class) name in vLLM's files; BadInput with near names where it is in none."""
    source = open_source(vllm, "vllm")
    classes = Classes(source)
    entries = registry_entries(source)
    module, name = entries.get(architecture, ("", ""))
    outer = classes.find(module, name) if module else None
    remarks = []
    if outer is None:
        found = classes.anywhere(architecture, MODEL_FOLDERS)
        if not found:
            raise BadInput(_unknown(architecture, source, entries))
        outer = found[0]
        remarks += [f"also defined in {c.file}:{c.line}" for c in found[1:]]
        remarks.append("not in the registry: found by the class's name.")
    else:
        remarks += [f"chosen by platform; also {c.file}:{c.line}" for c in classes.origins(module, name)[1:]]
    members = protocol_members(classes)
    parts = [Part("", outer, _members(classes, outer, members))]
    parts += _inner(classes, outer, entries, members)
    parts[-1] = replace(parts[-1], collects=collected_states(classes, parts[-1].cls))
    remarks += _file_remarks(source, architecture, parts)
    registered = f"{module}:{name}" if module else ""
    return Located(architecture, source.version, registered, tuple(parts), tuple(remarks), tuple(members))


def registry_entries(source: Source) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class) of every table in vLLM's model registry."""
    tree = source.tree(REGISTRY)
    if tree is None:
        raise BadInput(f"{source.root.name} has no {REGISTRY}: it is not vLLM, or its registry has moved.")
    entries = {}
    for node in tree.body:
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Dict):
            continue
        for key, entry in zip(value.keys, value.values, strict=True):
            texts = [e.value for e in getattr(entry, "elts", []) if isinstance(e, ast.Constant)]
            if isinstance(key, ast.Constant) and isinstance(entry, ast.Tuple) and len(texts) == 2:
                module = texts[0] if texts[0].startswith("vllm.") else f"vllm.model_executor.models.{texts[0]}"
                entries.setdefault(key.value, (module, texts[1]))
    return entries


def protocol_members(classes: Classes) -> dict[str, bool]:
    """Members that this version's SupportsEagle3 asks for -> whether a class that names it as a base gets a working one.

    Flags and methods with a body come by inheritance; a method of `...` only must be written. {} where there is no protocol.
    """
    protocol = classes.find(INTERFACES, PROTOCOL)
    if protocol is None:
        return {}
    members = {}
    for cls in classes.ancestors(protocol):
        for name in cls.members:
            method = cls.method(name)
            members.setdefault(name, method is None or not _is_empty(method))
    return members


def collected_states(classes: Classes, model: Class | None) -> str:
    """What the bare model's forward hands out as auxiliary states: `none`, `0..N-1` (id N silently dropped) or `0..N`."""
    if model is None:
        return "unknown"
    for holder in classes.ancestors(model):
        forward = holder.method("forward")
        if forward is None:
            continue
        text = ast.unparse(forward)
        if "self._maybe_add_hidden_state(" in text or "self.end_layer in self.aux_hidden_state_layers" in text:
            return "0..N"
        return "0..N-1" if "in self.aux_hidden_state_layers" in text else "none"
    return "none"


def _members(classes: Classes, cls: Class, asked: dict[str, bool]) -> tuple[Member, ...]:
    line_up = classes.ancestors(cls)
    out = []
    for name, has_body in asked.items():
        holder = next((c for c in line_up if name in c.members), None)
        if holder is None:
            out.append(Member(name, "missing"))
            continue
        at = f"{holder.name} in {holder.file}:{holder.members[name]}"
        if holder.module == INTERFACES:
            out.append(Member(name, "protocol" if has_body else "missing", at))
        else:
            out.append(Member(name, "own" if holder is cls else "inherited", at))
    return tuple(out)


def _inner(classes: Classes, outer: Class, entries: dict, asked: dict) -> list[Part]:
    """Parts inside `outer`: the language model of a wrapper, then the bare model that holds the layers."""
    parts, path, current = [], "", outer
    while current is not None and len(parts) < 4:
        step = _step(classes, current, entries)
        if step is None:
            break
        attribute, inner, note = step
        path = f"{path}.{attribute}" if path else attribute
        parts.append(Part(path, inner, _members(classes, inner, asked) if inner else (), note))
        current = inner
    return parts


def _step(classes: Classes, cls: Class, entries: dict) -> tuple[str, Class | None, str] | None:
    """(attribute, class it holds, note): the assignment in `__init__` (own or inherited) that makes the inner model."""
    for attribute in ("language_model", "model"):
        for holder in classes.ancestors(cls):
            call = _assigned_call(holder.method("__init__"), attribute)
            if call is None:
                continue
            if _called(call) == "init_vllm_registered_model":
                named = _architecture_argument(call)
                if named is None:
                    return attribute, None, "its class comes from the checkpoint's text_config (architectures)."
                return (
                    attribute,
                    classes.find(*entries.get(named, ("", ""))) or _loose(classes, named),
                    f"built as {named}.",
                )
            inner = classes.find(*_made_by(classes, cls, holder, call))
            return (attribute, inner, "") if inner else None
    return None


def _assigned_call(function: ast.FunctionDef | None, attribute: str) -> ast.Call | None:
    for node in ast.walk(function) if function else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target) == f"self.{attribute}":
                    return node.value
    return None


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _architecture_argument(call: ast.Call) -> str | None:
    for keyword in call.keywords:
        if keyword.arg == "architectures" and isinstance(keyword.value, ast.List):
            return next((e.value for e in keyword.value.elts if isinstance(e, ast.Constant)), None)
    return None


def _made_by(classes: Classes, cls: Class, holder: Class, call: ast.Call) -> tuple[str, str]:
    """(module, class name) that a call in `holder` makes for `cls`: `Name(...)`, `self.model_cls(...)`, `self._init_model(...)`."""
    if isinstance(call.func, ast.Name):
        return holder.module, call.func.id
    name = _called(call)
    for owner in classes.ancestors(cls):
        for item in owner.node.body:
            if (
                isinstance(item, ast.Assign)
                and ast.unparse(item.targets[0]) == name
                and isinstance(item.value, ast.Name)
            ):
                return owner.module, item.value.id
        for node in ast.walk(owner.method(name) or ast.Module([], [])):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                return owner.module, _called(node.value)
    return holder.module, ""


def _loose(classes: Classes, name: str) -> Class | None:
    """A class that is built by architecture but is not a key of the registry under that name."""
    found = classes.anywhere(name, MODEL_FOLDERS)
    return found[0] if found else None


def _is_empty(method: ast.FunctionDef) -> bool:
    body = [n for n in method.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return not body or all(isinstance(n, ast.Pass) for n in body)


def _file_remarks(source: Source, architecture: str, parts: list[Part]) -> list[str]:
    """The file one would look for by name, if there is none, and files that differ from the release."""
    remarks = []
    stem = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"For[A-Z]\w*$|Model$", "", architecture)).lower()
    holders = {p.cls.file for p in parts if p.cls}
    if stem and not any(stem in Path(f).with_suffix("").parts for f in holders):
        named = [f for f in source.files if Path(f).stem.startswith(stem) and f not in holders]
        models = [f for f in named if f.startswith(MODEL_FOLDERS)]
        remarks.append(
            f"there is no model file {stem}.py"
            + (
                f"; files with that name: {', '.join(named)} ({'models' if models else 'not models'})."
                if named
                else "."
            )
        )
    asked = {m.name for m in parts[0].members}
    for part in parts:
        stale = (
            [n for n in part.cls.members if n.startswith("get_eagle3") and n not in asked] if part.cls and asked else []
        )
        remarks += [
            f"{part.cls.name} also defines {n}, a name that this version's {PROTOCOL} no longer asks for" for n in stale
        ]
    for file in sorted(holders):
        state = source.state_of(file)
        if state in ("changed", "added"):
            remarks.append(f"{file} is {state} against the wheel's RECORD: this vLLM is modified, or not a release.")
    return remarks


def _unknown(architecture: str, source: Source, entries: dict) -> str:
    near = difflib.get_close_matches(architecture, entries, n=3)
    hint = f" Near: {', '.join(near)}." if near else ""
    return f"vllm {source.version} knows no architecture or class {architecture}: check the name in the checkpoint's config.json.{hint}"
