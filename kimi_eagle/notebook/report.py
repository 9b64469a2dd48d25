"""What a run leaves for people: HTML of each notebook, an index page with the figures that matter, one merged result, a zip.

Pages are self-contained: no script, style or font comes from elsewhere, so that a report reads the same without a network.
"""

import html as escape
import json
import re
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat

from kimi_eagle.errors import BadInput
from kimi_eagle.notebook import parameters, plan, provenance, publish
from kimi_eagle.notebook.stage import SCHEMA, write_json

# The figures that the index shows first, by their place in the merged figures; those that a run lacks are left out.
HEADLINES = {
    "00_diagnose_environment.known_answer_right": "the target speaks sense here",
    "01_profile_allreduce.windows.tokens1.allreduce_share": "AllReduce share of a decode step, one request",
    "02_extract_hidden_states.states.train.tokens": "tokens whose hidden states were stored",
    "02_extract_hidden_states.verification.log_prob_difference": "stored states against the engine's log-probs",
    "03_map_vocabulary.coverage.held_out": "coverage of the draft vocabulary, held-out answers",
    "05_analyze_acceptance.acceptance.served.length": "acceptance length, served by vLLM",
    "05_analyze_acceptance.acceptance.served.interval": "its 95 % interval",
    "05_analyze_acceptance.acceptance.simulated.length": "acceptance length, simulated from stored states",
    "05_analyze_acceptance.greedy_identical": "served greedy text equal to the plain engine's",
    "05_analyze_acceptance.tokens_per_second.plain": "tokens per second without the head, one request",
    "05_analyze_acceptance.tokens_per_second.speculative": "tokens per second with the head, one request",
}
ZIPPED = (".html", ".ipynb", ".json", ".log")
ZIP_FILE_LIMIT = 5 * 2**20  # bytes; larger files are data, not report
CSS = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
table{border-collapse:collapse;margin:.6rem 0}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}
td.n{font-variant-numeric:tabular-nums;text-align:right}img{max-width:100%}figure{margin:1rem 0}figcaption{color:#555}
.failed{color:#b00020}.quiet{color:#666}code{background:#f3f3f3;padding:0 .2rem}summary{cursor:pointer}"""


def write(run_folder: Path, parameter_file: str) -> Path:
    """Write the run's merged result.json and index.html; returns the path of the index."""
    merged = merge(run_folder, parameter_file)
    write_json(run_folder / "result.json", merged)
    index = run_folder / "index.html"
    index.write_text(_index(run_folder, merged), encoding="utf-8")
    return index


def rewrite(run_folder: Path) -> Path:
    """`write` for an existing run, whose merged result names its parameter file."""
    try:
        known = json.loads((run_folder / "result.json").read_text(encoding="utf-8"))["parameter_file"]
    except (OSError, ValueError, KeyError):
        raise BadInput(
            f"run {run_folder.name}: no merged result.json in its folder; `kimi-eagle run` makes one."
        ) from None
    return write(run_folder, known)


def merge(run_folder: Path, parameter_file: str) -> dict[str, Any]:
    """All stages' results in one: figures, units, artifacts and parameters by stage, each stage's status.

    A stage whose inputs were run again since is `stale`; one that left a failed notebook is `failed`; else `missing`.
    """
    merged: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run_folder.name,
        "parameter_file": parameter_file,
        "status": "done",
    }
    parts: dict[str, dict] = {k: {} for k in ("stages", "provenance", "parameters", "figures", "units", "artifacts")}
    for stage in parameters.stages():
        result = plan.read_result(run_folder, stage)
        failed = (run_folder / stage / f"{stage}.failed.ipynb").is_file()
        done = "stale" if result and plan.is_stale(run_folder, result) else "done"
        parts["stages"][stage] = done if result else "failed" if failed else "missing"
        for key in parts.keys() - {"stages"} if result else ():
            parts[key][stage] = result[key]
    if set(parts["stages"].values()) != {"done"}:
        merged["status"] = "failed" if "failed" in parts["stages"].values() else "partial"
    return {**merged, **parts}


def html(notebook: Path) -> Path:
    """Render an executed notebook beside itself, without anything from the network; returns the path of the page."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="lab", embed_images=True, anchor_link_text="")
    body, _ = exporter.from_filename(str(notebook))
    page = notebook.with_suffix(".html")
    page.write_text(offline(body), encoding="utf-8")
    return page


def offline(page: str) -> str:
    """An HTML page without the scripts that nbconvert loads from elsewhere (require.js, MathJax, Mermaid)."""
    page = re.sub(r"<script\b[^>]*\bsrc=[^>]*>\s*</script>", "", page)
    page = re.sub(r"<script\b(?:(?!</script>).)*?https?://(?:(?!</script>).)*?</script>", "", page, flags=re.DOTALL)
    return re.sub(r"""<link\b[^>]*\bhref=["']https?:[^>]*>""", "", page)


def bundle(run_folder: Path) -> Path:
    """A zip of the run's pages, notebooks, results and logs (not its data) beside the run's folder; returns its path."""
    if not (run_folder / "result.json").is_file():
        raise BadInput(f"run {run_folder.name}: no result.json in its folder; `kimi-eagle run` makes one.")
    target = run_folder.with_suffix(".zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(run_folder.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(run_folder).parts)
            if path.is_file() and path.suffix in ZIPPED and path.stat().st_size < ZIP_FILE_LIMIT and not hidden:
                file.write(path, path.relative_to(run_folder.parent))
    return target


def leaves(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every leaf of nested mappings."""
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, value in tree.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else key)]


def text_of(value: Any) -> str:
    """A figure as people read it: four significant digits, yes/no, short lists in full."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        items = [
            ", ".join(f"{k} {text_of(v)}" for k, v in i.items()) if isinstance(i, dict) else text_of(i) for i in value
        ]
        return "; ".join(items) if len(items) <= 12 else f"{'; '.join(items[:12])}; ... ({len(items)})"
    return str(value)


def _index(run_folder: Path, merged: dict[str, Any]) -> str:
    figures, units = dict(leaves(merged["figures"])), dict(leaves(merged["units"]))
    head = [(label, figures[name], units.get(name, "")) for name, label in HEADLINES.items() if name in figures]
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{_e(merged['run'])}</title><style>{CSS}</style>",
        f"<h1>Run {_e(merged['run'])}: {_e(merged['status'])}</h1>",
        f"<p class='quiet'>Every figure below was measured in this run, from <code>{_e(merged['parameter_file'])}</code>.</p>",
        _figure_table(head),
        *(_stage(run_folder, stage, status, merged) for stage, status in merged["stages"].items()),
        "<h2>Provenance</h2>",
        _provenance(merged["provenance"]),
        "<p><a href='result.json'>result.json</a> holds all figures, units and artifacts.</p></html>",
    ]
    return "\n".join(parts)


def _stage(run_folder: Path, stage: str, status: str, merged: dict[str, Any]) -> str:
    page, failed, log = (run_folder / stage / f"{stage}{end}" for end in (".html", ".failed.ipynb", ".ipynb"))
    links = [
        f"<a href='{stage}/{p.name}'>{word}</a>"
        for p, word in ((page, "page"), (log, "notebook"), (failed, "failed notebook"))
        if p.is_file()
    ]
    if (run_folder / "logs" / f"{stage}.log").is_file():
        links.append(f"<a href='logs/{stage}.log'>log</a>")
    mark = "" if status == "done" else f" <span class='failed'>({status})</span>"
    units = dict(leaves(merged["units"].get(stage, {})))
    rows = [(name, value, units.get(name, "")) for name, value in leaves(merged["figures"].get(stage, {})) if name]
    table = f"<details><summary>{len(rows)} figures</summary>{_figure_table(rows)}</details>" if rows else ""
    return f"<h2>{_e(stage)}{mark}</h2><p>{' · '.join(links)}</p>{''.join(_pictures(log))}{table}"


def _pictures(notebook: Path) -> list[str]:
    """The pictures of the cells that draw, under the last heading before each."""
    if not notebook.is_file():
        return []
    cells = nbformat.read(notebook, as_version=4).cells
    drawing = {id(c) for c in publish.figure_cells(cells)}
    found, heading = [], ""
    for cell in cells:
        if cell.cell_type == "markdown":
            heading = next((ln.lstrip("# ") for ln in cell.source.splitlines() if ln.startswith("#")), heading)
        for output in cell.outputs if id(cell) in drawing else []:
            data = output.get("data", {}).get("image/png")
            if data:
                source = f"data:image/png;base64,{''.join(data.split())}"
                found.append(
                    f"<figure><img alt='{_e(heading)}' src='{source}'><figcaption>{_e(heading)}</figcaption></figure>"
                )
    return found


def _figure_table(rows: list[tuple[str, Any, Any]]) -> str:
    lines = [
        f"<tr><td>{_e(name)}</td><td class='n'>{_e(text_of(value))}</td><td class='quiet'>{_e(unit if isinstance(unit, str) else '')}</td></tr>"
        for name, value, unit in rows
    ]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def _provenance(by_stage: dict[str, dict[str, Any]]) -> str:
    """One table where all stages agree, else one per distinct state (a resumed run may mix commits)."""
    groups: dict[str, list[str]] = {}
    for stage, entry in by_stage.items():
        rows = "".join(f"<tr><td>{_e(what)}</td><td>{_e(value)}</td></tr>" for what, value in provenance.rows(entry))
        groups.setdefault(rows, []).append(stage)
    times = "".join(
        f"<tr><td>{_e(stage)}</td><td class='n'>{entry['seconds']:.0f} s</td><td>{_e(_day(entry['finished']))}</td></tr>"
        for stage, entry in by_stage.items()
    )
    tables = "".join(f"<p>{_e(', '.join(stages))}</p><table>{rows}</table>" for rows, stages in groups.items())
    return f"{tables}<table>{times}</table>"


def _day(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M UTC")


def _e(text: Any) -> str:
    return escape.escape(str(text), quote=True)
