"""Run a function right after a module is imported, or at once where it already is: patches wait without importing anything."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; wraps the loader of a module that somebody waits for."""

    def find_spec(self, name, path=None, target=None):
        """Spec from the other finders, its loader told to run the waiting functions after the module's own code."""
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        run = loader.exec_module

        def exec_module(module):
            run(module)
            for function in _waiting.pop(name, []):
                function(module)

        loader.exec_module = exec_module
        return spec


_finder = _Finder()


def when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` now if module `name` is imported, else right after its import in this process."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        function(module)
        return
    _waiting.setdefault(name, []).append(function)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(name: str, function: Callable[[ModuleType], None]) -> None:
    """Take back a `when_imported` that has not run."""
    left = [f for f in _waiting.get(name, []) if f is not function]
    if left:
        _waiting[name] = left
    else:
        _waiting.pop(name, None)
