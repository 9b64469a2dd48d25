"""What to know and what to change about the installed vLLM and speculators: locate classes, probe and apply patches.

Nothing here imports vLLM or torch before a patch is applied.
"""

from pathlib import Path

from kimi_eagle.compat import registry
from kimi_eagle.compat.locate import locate
from kimi_eagle.compat.patch import Patch
from kimi_eagle.compat.registry import SELECTION, activate, apply, check, patches, undo
from kimi_eagle.compat.report import family_rows, family_text, locate_text
from kimi_eagle.compat.source import Source, open_source
from kimi_eagle.errors import MissingCapability

__all__ = [
    "SELECTION",
    "Source",
    "activate",
    "apply",
    "check",
    "combine",
    "compat_rows",
    "family_rows",
    "family_text",
    "locate",
    "locate_text",
    "open_source",
    "patches",
    "release",
    "rows_text",
    "undo",
]


def compat_rows(vllm: str | Path | None = None, speculators: str | Path | None = None) -> list[dict]:
    """One row {id, package, versions, symptom, verdict, state, reason} per patch, for the installed packages or given files.

    `vllm` and `speculators` are wheels or folders. `verdict` is needed, not needed, unknown or not installed; `state` is what
    `activate` would make of it here: would apply, not needed, refused, off (by KIMI_EAGLE_PATCHES), not installed.
    """
    given = {"vllm": vllm, "speculators": speculators}
    chosen = {p.id for p in registry.selected()}
    sources: dict[str, Source | None] = {}
    for package, where in given.items():
        try:
            sources[package] = open_source(where, package)
        except MissingCapability:
            sources[package] = None
    return [_row(patch, sources[patch.package], sources["vllm"], patch.id in chosen) for patch in patches()]


def rows_text(rows: list[dict]) -> str:
    """The rows of `compat_rows` as three lines each: state and patch, what breaks without it, why it is needed or not."""
    blank = " " * 15
    return "\n".join(
        f"{r['state']:<14} {r['id']:<34} {r['package']} {r['versions']}\n{blank}{r['symptom']}\n{blank}{r['reason']}"
        for r in rows
    )


def release(vllm: str | Path | None = None) -> str:
    """The version of vLLM at `vllm` (None: the installed one), from its files; empty where there is none."""
    try:
        return open_source(vllm, "vllm").version
    except MissingCapability:
        return ""


def combine(answers: list[list[dict]]) -> list[dict]:
    """Rows {id, state, pids, detail} over the workers' answers to `kimi_eagle_patches`; `mixed` where they disagree."""
    rows = []
    for same in zip(*answers, strict=True):
        states = {row["state"] for row in same}
        details = sorted({row["detail"] for row in same if row["detail"]})
        rows.append(
            {
                "id": same[0]["id"],
                "state": states.pop() if len(states) == 1 else "mixed",
                "pids": [row["pid"] for row in same],
                "detail": " ".join(details),
            }
        )
    return rows


def _row(patch: Patch, source: Source | None, vllm: Source | None, chosen: bool) -> dict:
    row = {"id": patch.id, "package": patch.package, "versions": patch.versions, "symptom": patch.symptom}
    if source is None:
        return {
            **row,
            "verdict": "not installed",
            "state": "not installed",
            "reason": f"{patch.package} is not installed here.",
        }
    verdict = patch.verdict(source, vllm)
    row |= {"verdict": verdict.word, "reason": verdict.reason}
    refusal = patch.refusal(source) if verdict.needed else None
    if verdict.needed is False:
        return {**row, "state": "not needed"}
    if verdict.needed is None or refusal:
        return {**row, "state": "refused", "reason": refusal or verdict.reason}
    return {**row, "state": "would apply" if chosen else "off"}
