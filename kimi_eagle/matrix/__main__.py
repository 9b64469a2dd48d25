"""`python -m kimi_eagle.matrix [--reported] [--only VERSION] [--again] [--keep] [--without PATCH]`: fill docs/compat/matrix.json.

Resumable. Exit 1 where a cell is wrong, or a release has no right cell for a target. `--without` runs the cells of the hooks with
one patch off instead, and holds what they say against the patch's symptom; matrix.json keeps that under `without`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kimi_eagle import paths
from kimi_eagle.compat import registry
from kimi_eagle.durable import write_atomically
from kimi_eagle.errors import KimiEagleError
from kimi_eagle.matrix import page, reference, releases

BACKENDS = ("connector", "hooks", "speculators")
RESULT = paths.REPOSITORY / "docs" / "compat" / "matrix.json"
CELL_SECONDS = 900


def main() -> int:
    """Build what is missing, run what is not in the result yet, write page and table."""
    parser = argparse.ArgumentParser(prog="python -m kimi_eagle.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="VERSION", help="this release; may be repeated")
    parser.add_argument("--reported", action="store_true", help="the reported stack's release and its tests, alone")
    parser.add_argument("--again", action="store_true", help="run cells that have a row already")
    parser.add_argument("--without", default="", metavar="PATCH", help="show what breaks where this patch is off")
    parser.add_argument("--keep", action="store_true", help="leave the environments (5 to 8 GB each)")
    options = parser.parse_args()
    wanted = [releases.REPORTED] if options.reported else options.only or [r.version for r in releases.RELEASES]
    rows = [] if options.reported else _read()
    failed = False
    try:
        for version in wanted:
            if options.without:
                failed |= _without(releases.release(version), options.without)
            else:
                rows = _release(releases.release(version), rows, options)
        if options.reported:
            failed = bool(_reported_tests())
    except KimiEagleError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        for version in wanted if not options.keep else []:
            releases.remove(releases.release(version))
    if options.without:
        return int(failed)
    print(page.table(rows))
    faults = page.faults([r for r in rows if r["vllm"] in wanted])
    print("\n".join(faults) or f"{len(rows)} cells, none wrong")
    return int(failed or bool(faults))


def _release(known: releases.Release, rows: list[dict], options: argparse.Namespace) -> list[dict]:
    """Rows with this release's cells in them; the file is written after every cell, except for the reported stack alone."""
    have = set() if options.again else {(r["vllm"], r["target"], r["backend"]) for r in rows}
    cells = [(t, b) for t in reference.TARGETS for b in BACKENDS if (known.version, t, b) not in have]
    if not cells:
        return rows
    print(f"vLLM {known.version}: environment", flush=True)
    python = releases.build(known)
    for target, backend in cells:
        work = reference.prepare(target, paths.cache() / "matrix")
        row = {"vllm": known.version, "target": target, "backend": backend, **_cell(python, work, backend)}
        print(
            f"vLLM {known.version}, {target}, {backend}: {row['verdict']} {row['error'] or ''} {row['sentence']}",
            flush=True,
        )
        rows = [r for r in rows if (r["vllm"], r["target"], r["backend"]) != (known.version, target, backend)] + [row]
        if not options.reported:
            rows.sort(key=lambda r: ([int(p) for p in r["vllm"].split(".")], r["target"], r["backend"]))
            _write(rows, _read("without"))
            readme = paths.REPOSITORY / "README.md"
            readme.write_text(page.in_readme(readme.read_text(), rows))
    if not options.keep and not options.reported:
        releases.remove(known)
    return rows


def _without(known: releases.Release, patch: str) -> bool:
    """Run the hooks' cells with a patch off, note what happens; whether one of them differs from the patch's symptom."""
    symptom = next(p.symptom for p in registry.patches() if p.id == patch).split("Error: ")[-1].removesuffix(".")
    python, noted, odd = releases.build(known), _read("without"), False
    for target in reference.TARGETS:
        work = reference.prepare(target, paths.cache() / "matrix")
        row = _cell(python, work, "hooks", KIMI_EAGLE_PATCHES=f"auto,-{patch}")
        seen = symptom in row["sentence"] or (row["error"] or 0) > 1e-4
        row = {"vllm": known.version, "target": target, "patch": patch, "seen": seen, **row}
        print(
            f"vLLM {known.version}, {target}, without {patch}: {row['verdict']} {row['error'] or ''} {row['sentence']}",
            flush=True,
        )
        odd |= row["verdict"] != "right" and not seen
        same = (known.version, target, patch)
        noted = [r for r in noted if (r["vllm"], r["target"], r["patch"]) != same] + [row]
        _write(_read(), sorted(noted, key=lambda r: (r["patch"], r["vllm"], r["target"])))
    return odd


def _cell(python: Path, work: Path, backend: str, **environment: str) -> dict:
    """Run one cell in its environment, its log kept beside the work folder."""
    with tempfile.TemporaryDirectory() as scratch, open(work / f"{backend}.log", "w") as log:
        out = Path(scratch) / "row.json"
        command = [str(python), "-m", "kimi_eagle.matrix.cell", str(work), backend, str(out)]
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | environment
        try:
            subprocess.run(command, stdout=log, stderr=log, env=env, timeout=CELL_SECONDS)
        except subprocess.TimeoutExpired:
            return {"verdict": "wrong", "error": None, "sentence": f"no answer in {CELL_SECONDS} s"}
        if not out.exists():
            return {
                "verdict": "wrong",
                "error": None,
                "sentence": f"the cell's process ended without an answer ({backend}.log)",
            }
        return json.loads(out.read_text())


def _reported_tests() -> int:
    """The reported stack's own tests, in its environment; their exit code."""
    python = releases.python(releases.release(releases.REPORTED))
    tests = paths.REPOSITORY / "tests" / "reported"
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(tests),
        str(tests),
    ]
    return subprocess.run(command).returncode


def _read(part: str = "cells") -> list[dict]:
    return json.loads(RESULT.read_text()).get(part, []) if RESULT.exists() else []


def _write(rows: list[dict], without: list[dict]) -> None:
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(RESULT, json.dumps({"cells": rows, "without": without}, indent=1).encode() + b"\n")
    RESULT.with_name("matrix.md").write_text(page.page(rows, without))


if __name__ == "__main__":
    sys.exit(main())
