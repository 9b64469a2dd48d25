"""Text for `kimi-eagle locate` and tables of the same facts."""

import re
from pathlib import Path

from kimi_eagle.compat.classes import Classes
from kimi_eagle.compat.locate import MODEL_FOLDERS, PROTOCOL, Located, locate
from kimi_eagle.compat.source import open_source
from kimi_eagle.errors import BadInput

WHERE = {"own": "own", "inherited": "inherited", "protocol": "default of the protocol", "missing": "MISSING"}

COLLECTS = {
    "none": "none (its forward reads no layer ids)",
    "0..N-1": "ids 0 to N-1; id N, the last layer's output, is dropped without a word",
    "0..N": "ids 0 to N",
    "unknown": "unknown",
}


def locate_text(architecture: str | None = None, vllm: str | Path | None = None, family: str | None = None) -> str:
    """What `kimi-eagle locate` prints: one architecture, a family's files, or both."""
    if not architecture and not family:
        raise BadInput(
            "give an architecture such as KimiK25ForConditionalGeneration, or --family with a word such as deepseek."
        )
    blocks = []
    if architecture:
        blocks.append(located_text(locate(architecture, vllm)))
    if family:
        blocks.append(family_text(family, vllm))
    return "\n\n".join(blocks)


def located_text(found: Located) -> str:
    """A Located as lines of text."""
    lines = [f"{found.architecture} in vllm {found.vllm}"]
    lines.append(f"registry: {found.registered}" if found.registered else "registry: no entry")
    for part in found.parts:
        role = f"model.{part.path}" if part.path else "model (outer wrapper)" if found.is_wrapper else "model"
        if part.cls is None:
            lines.append(f"{role}: {part.note}")
            continue
        lines.append(f"{role}: {part.cls.name}  {part.cls.file}:{part.cls.line}  module {part.cls.module}")
        lines.append(f"  bases: {', '.join(part.cls.bases) or 'none'}" + (f"  ({part.note})" if part.note else ""))
        if part.path.endswith("model") and not part.path.endswith("language_model"):
            # The bare model holds the layers; the protocol is asked of the class around it.
            lines.append(f"  hands out auxiliary states: {COLLECTS[part.collects]}")
            continue
        if not found.protocol:
            lines.append(f"  {PROTOCOL}: this vLLM has no such protocol")
            continue
        lines.append(f"  {PROTOCOL}: {'implemented' if part.implements else 'NOT implemented'}")
        for member in part.members:
            at = f"  ({member.holder})" if member.where in ("own", "inherited") else ""
            lines.append(f"    {member.name}: {WHERE[member.where]}{at}")
    return "\n".join(lines + [f"remark: {r}" for r in found.remarks])


def family_rows(family: str, vllm: str | Path | None = None) -> list[dict]:
    """Rows {file, classes, state} of every model file whose name or classes hold `family`; state as Source.state_of.

    Files of the RECORD that are not on disk come with state `absent`.
    """
    source = open_source(vllm, "vllm")
    word = family.lower().replace("_", "").replace("-", "")
    pattern = re.compile(rf"^class \w*{re.escape(word)}\w*", re.IGNORECASE | re.MULTILINE)
    classes, rows = Classes(source), []
    for path in source.files:
        if path.startswith(MODEL_FOLDERS):
            named = word in path.lower().replace("_", "")
            if named or pattern.search(source.read(path) or ""):
                names = [f"{c.name}:{c.line}" for c in classes.all_in(path) if named or word in c.name.lower()]
                rows.append({"file": path, "classes": names, "state": source.state_of(path)})
    present = set(source.files)
    gone = [p for p in sorted(source.record) if p.startswith(MODEL_FOLDERS) and p.endswith(".py") and p not in present]
    return rows + [{"file": p, "classes": [], "state": "absent"} for p in gone if word in p.replace("_", "")]


def family_text(family: str, vllm: str | Path | None = None) -> str:
    """The family's files as lines, and a sentence where they are not those of the release."""
    source, rows = open_source(vllm, "vllm"), family_rows(family, vllm)
    if not rows:
        raise BadInput(f"vllm {source.version} has no model file of a family {family!r}.")
    lines = [f"model files of the family {family} in vllm {source.version}"]
    for row in rows:
        mark = "" if row["state"] == "released" else f"  [{row['state']}]"
        lines.append(f"{row['file']}{mark}")
        lines += [f"  {name}" for name in row["classes"]]
    if any(row["state"] in ("changed", "added", "absent") for row in rows):
        lines.append("Marked files differ from the wheel's RECORD: your vLLM is modified, or not a release.")
    if all(row["state"] == "unknown" for row in rows):
        lines.append("There is no RECORD to compare with: this is a source tree, or its dist-info is gone.")
    return "\n".join(lines)
