"""Widgets as an extra view: the static twin is always there, since a saved notebook keeps no widget alive."""

import os
from collections.abc import Callable, Sequence
from typing import Any


def explore(draw: Callable[..., None], shown: dict[str, Any], **choices: Sequence[Any]) -> None:
    """Draw `draw(**shown)` for good, and in a live kernel a chooser beside it that draws any combination of `choices`.

    shown: the arguments of the static figure, one of `choices` each. In a batch run (KIMI_EAGLE_BATCH, set by the runner)
    only the static figure is made: widget output would be lost, and its state would keep GitHub from rendering the file.
    """
    draw(**shown)
    if os.environ.get("KIMI_EAGLE_BATCH"):
        return
    import ipywidgets

    pickers = {name: ipywidgets.Dropdown(options=list(options), value=shown[name]) for name, options in choices.items()}
    fixed = {name: ipywidgets.fixed(value) for name, value in shown.items() if name not in choices}
    ipywidgets.interact(draw, **pickers, **fixed)
