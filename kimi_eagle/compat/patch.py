"""A patch as data: what breaks where, the probe that reads the code, the changes, and the sources they were written for."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kimi_eagle.compat.source import Source


@dataclass(frozen=True)
class Verdict:
    """What a probe read: `needed` True, False, or None where the code is of an unknown shape; `reason` one sentence."""

    needed: bool | None
    reason: str

    @property
    def word(self) -> str:
        """`needed`, `not needed` or `unknown`."""
        return {True: "needed", False: "not needed", None: "unknown"}[self.needed]


@dataclass(frozen=True)
class Change:
    """One attribute to set: `name` (`function` or `Class.attribute`) of `module`, to `build(original)`.

    `known` maps the digests of the function's source that the change was written for to the versions that have it. The
    function compared is `name` itself, or `leans_on` where the change rests on another one of the module: the caller of a
    name that the module imports, or of one that the change adds. With `adds` the attribute must be absent, and an empty
    `known` compares nothing.
    """

    module: str
    name: str
    build: Callable
    known: dict[str, str] = field(default_factory=dict)
    adds: bool = False
    leans_on: str | None = None


@dataclass(frozen=True)
class Patch:
    """A break and its cure. `versions` is a version specifier; `symptom` the exact text a user sees (or "silent: ...").

    `probe(own, vllm)` reads the files of the patched package and of vLLM (the same for a patch of vLLM; None without one).
    `proof`, if any, runs in a patched process and raises AssertionError where the cure did not take.
    """

    id: str
    package: str
    versions: str
    symptom: str
    cure: str
    probe: Callable[[Source, Source | None], Verdict]
    changes: tuple[Change, ...]
    proof: Callable[[], None] | None = None

    def covers(self, version: str) -> bool:
        """Whether `version` (its local part ignored) is in the patch's range; an unreadable version is not."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            return SpecifierSet(self.versions).contains(Version(version).public, prereleases=True)
        except InvalidVersion:
            return False

    def verdict(self, source: Source, vllm: Source | None = None) -> Verdict:
        """The probe's answer for these files, after the version range; `vllm` only where `source` is another package."""
        if not self.covers(source.version):
            return Verdict(False, f"{self.package} {source.version} is outside {self.versions}.")
        return self.probe(source, source if self.package == "vllm" else vllm)

    def refusal(self, source: Source) -> str | None:
        """Why the changes cannot be made to these files, in one sentence; None where they can."""
        for change in self.changes:
            if not change.known:
                continue
            name = change.leans_on or change.name
            found = source.find(change.module, name)
            if found is None:
                return f"{self.id}: {self.package} {source.version} has no {change.module}.{name}; the patch does not fit it."
            if found.digest not in change.known:
                return (
                    f"{self.id}: {change.module}.{name} of {self.package} {source.version} is not one this patch was "
                    f"written for (digest {found.digest}); it is left alone."
                )
        return None
