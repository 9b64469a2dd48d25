"""Classes of a package by reading its files: where a name is defined, what it inherits, which members it has.

Names are followed through `from x import y` as Python would, without running anything; what lies outside the package (torch,
typing) is left as a bare name.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from kimi_eagle.compat.source import Source


@dataclass(frozen=True)
class Class:
    """A class definition: module, file (relative to the site folder), line (1-based), bases as written."""

    name: str
    module: str
    file: str
    line: int
    bases: tuple[str, ...]
    node: ast.ClassDef = field(repr=False, compare=False)

    @property
    def members(self) -> dict[str, int]:
        """Names set in the class body -> line: functions, assignments, annotated assignments with a value."""
        found = {}
        for item in self.node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(item.name, item.lineno)
            elif isinstance(item, ast.Assign):
                found.update({t.id: item.lineno for t in item.targets if isinstance(t, ast.Name)})
            elif isinstance(item, ast.AnnAssign) and item.value is not None and isinstance(item.target, ast.Name):
                found.setdefault(item.target.id, item.lineno)
        return found

    def method(self, name: str) -> ast.FunctionDef | None:
        """The method of that name in the class's own body, None without one."""
        return next((n for n in self.node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


class Classes:
    """Looks classes up in one Source."""

    def __init__(self, source: Source):
        self.source = source
        self._known: dict[tuple[str, str], Class | None] = {}

    def find(self, module: str, name: str) -> Class | None:
        """Definition of `name` as `module` sees it, through its imports; None outside the package or where it is no class."""
        key = (module, name)
        if key not in self._known:
            self._known[key] = None  # ends import cycles
            self._known[key] = self._find(module, name)
        return self._known[key]

    def ancestors(self, cls: Class) -> list[Class]:
        """The class itself, then every base that the package defines, nearest first, each once."""
        seen: list[Class] = [cls]
        for current in seen:
            for base in current.bases:
                found = self.find(current.module, base.split("[")[0])
                if found is not None and found not in seen:
                    seen.append(found)
        return seen

    def anywhere(self, name: str, under: tuple[str, ...]) -> list[Class]:
        """Every class of that name in files below the folders `under`."""
        found = []
        for path in self.source.files:
            if path.startswith(under) and f"class {name}" in (self.source.read(path) or ""):
                cls = self._in_file(path, name)
                if cls:
                    found.append(cls)
        return found

    def all_in(self, path: str) -> list[Class]:
        """Every top-level class of one file, in order."""
        tree = self.source.tree(path)
        return [self._class(path, n) for n in getattr(tree, "body", []) if isinstance(n, ast.ClassDef)]

    def origins(self, module: str, name: str) -> list[Class]:
        """Every definition that `module` may mean by `name`: more than one where it picks by platform."""
        own = self.find(module, name)
        path = self.source.module_path(module)
        others = [self.find(m, n) for m, n in self._imports(path, module, name)] if path else []
        return list(dict.fromkeys(c for c in [own, *others] if c is not None))

    def _find(self, module: str, name: str) -> Class | None:
        path = self.source.module_path(module)
        if path is None:
            return None
        own = self._in_file(path, name)
        if own:
            return own
        for origin, original in self._imports(path, module, name):
            found = self.find(origin, original)
            if found:
                return found
        return None

    def _in_file(self, path: str, name: str) -> Class | None:
        tree = self.source.tree(path)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._class(path, node)
        return None

    def _class(self, path: str, node: ast.ClassDef) -> Class:
        bases = tuple(ast.unparse(b) for b in node.bases)
        return Class(node.name, _module_of(path), path, node.lineno, bases, node)

    def _imports(self, path: str, module: str, name: str) -> Iterator[tuple[str, str]]:
        """(module, original name) of each `from ... import ... [as] name` in the file, branches of `if` included."""
        package = module if path.endswith("/__init__.py") else module.rpartition(".")[0]
        for node in ast.walk(self.source.tree(path) or ast.Module([], [])):
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = package.split(".")
                    parents = parts[: len(parts) - (node.level - 1)] if node.level else []
                    yield ".".join([*parents, *([node.module] if node.module else [])]), alias.name


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
