"""Toy notebooks for the tests of the runner: two stages without vLLM, the second reading what the first wrote."""

from pathlib import Path

import nbformat

SETUP = 'from kimi_eagle.notebook import begin\n\ncfg = begin("{stage}", globals())'
COMMON = ["target = 'smollm2'  # checkpoint", "run = ''  # name of the run's folder", "seed = 0  # of every generator"]
KERNEL = {"name": "python3", "display_name": "python3", "language": "python"}

MAKE = [
    "numbers = cfg.folder / 'numbers.txt'\nnumbers.write_text(str(cfg.count))",
    "cfg.finish(figures={'made': cfg.count}, units={'made': 'numbers'}, artifacts={'numbers': numbers})",
]
DRAW = [
    "text = cfg.artifact('00_make', 'numbers').read_text()\nprint('read', text, cfg.folder)",
    "#figure\nfrom kimi_eagle.plots import style\n\nfig, ax = style.new()\nax.plot([1, 2, int(text)])\nstyle.show(fig)",
    "cfg.finish(figures={'read.value': int(text), 'read.fine': True}, units={'read': {'value': 'numbers'}})",
]


def write(folder: Path, stage: str, parameters: list[str], code: list[str], **metadata: object) -> Path:
    """A notebook of Markdown and code by turns; a code cell that begins with `#figure` gets that tag."""
    cells = [nbformat.v4.new_markdown_cell(f"# {stage}")]
    cells.append(nbformat.v4.new_code_cell("\n".join(COMMON + parameters), metadata={"tags": ["parameters"]}))
    for source in [SETUP.format(stage=stage), *code]:
        tags = ["figure"] if source.startswith("#figure\n") else []
        cells.append(nbformat.v4.new_markdown_cell("## What the next cell shows"))
        cells.append(nbformat.v4.new_code_cell(source.removeprefix("#figure\n"), metadata={"tags": tags}))
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL, **metadata})
    path = folder / f"{stage}.ipynb"
    nbformat.write(notebook, path)
    return path


def pair(folder: Path, make: list[str] = MAKE, draw: list[str] = DRAW) -> None:
    """The two toy stages 00_make and 01_draw in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write(
        folder,
        "00_make",
        ["count = 3  # how many (numbers)", "rate = 0.5  # a share (1)", "sizes = [1, 2]  # sizes (KiB)"],
        make,
    )
    write(folder, "01_draw", ["width = 7.0  # of the line (points)"], draw)
