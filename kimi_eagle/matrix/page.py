"""The matrix as text: the table of the README, the page with every sentence, and what is at fault in it."""

from collections.abc import Sequence

BACKENDS = ("connector", "hooks", "speculators")


def table(rows: list[dict]) -> str:
    """Markdown: one line per release and target, one column per back end; `right` with its error."""
    lines = ["| vLLM | target | " + " | ".join(BACKENDS) + " |", "|" + "---|" * (2 + len(BACKENDS))]
    by_key = {(r["vllm"], r["target"], r["backend"]): r for r in rows}
    pairs = list(dict.fromkeys((r["vllm"], r["target"]) for r in rows))
    for version, target in pairs:
        cells = [_short(by_key.get((version, target, backend))) for backend in BACKENDS]
        lines.append(f"| {version} | {target} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


MARKS = ("<!-- matrix: made by make compat -->", "<!-- /matrix -->")


def in_readme(text: str, rows: list[dict]) -> str:
    """`text` with the table of `rows` between its two marks; ValueError where they are missing."""
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{table(rows)}\n\n{MARKS[1]}{after}"


def page(rows: list[dict], without: Sequence[dict] = ()) -> str:
    """The Markdown page: the table, under it the sentence of every cell, and what was seen with a patch off."""
    parts = [
        "# Which back end is right on which vLLM",
        "Made by `make compat`: each cell extracts 8 prompts (one longer than a step's budget) in that release's own CPU "
        "environment, and compares every state with Hugging Face's. The number is the worst relative L2 error of a token's "
        "state at any of the four layers; *right* is under 1e-4, *refused* was said before anything was loaded.",
        table(rows),
    ]
    for version in dict.fromkeys(r["vllm"] for r in rows):
        parts.append(f"## vLLM {version}")
        sentences = [
            f"- {r['target']}, {r['backend']}: **{r['verdict']}**. {r['sentence']}"
            for r in rows
            if r["vllm"] == version
        ]
        parts.append("\n".join(sentences))
    if without:
        parts.append("## With one patch off")
        parts.append("\n".join(_off(r) for r in without))
    return "\n\n".join(parts) + "\n"


def _off(row: dict) -> str:
    seen = "as before, so it is not needed there" if row["verdict"] == "right" else row["sentence"]
    return f"- {row['patch']}, vLLM {row['vllm']}, {row['target']}: {seen}"


def faults(rows: list[dict]) -> list[str]:
    """Sentences: wrong cells, and releases without a right cell for a target; empty where the matrix is sound."""
    found = [
        f"wrong: vLLM {r['vllm']}, {r['target']}, {r['backend']}: {r['sentence']}"
        for r in rows
        if r["verdict"] == "wrong"
    ]
    for version, target in dict.fromkeys((r["vllm"], r["target"]) for r in rows):
        if not any(r["verdict"] == "right" for r in rows if (r["vllm"], r["target"]) == (version, target)):
            found.append(f"no right cell: vLLM {version}, {target}")
    return found


def _short(row: dict | None) -> str:
    if row is None:
        return ""
    return f"right ({row['error']:.0e})" if row["verdict"] == "right" else row["verdict"]
