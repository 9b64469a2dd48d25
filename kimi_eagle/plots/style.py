"""One look for every figure, and the one way to show it."""

import io

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe-Ito: told apart with every common colour blindness, and in grey print. Two colours carry the story, grey the rest.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MAIN, OTHER, QUIET = COLORS[0], COLORS[1], "#9A9A9A"
DPI = 110

STYLE = {
    "figure.dpi": DPI,
    "figure.figsize": (7.0, 3.6),
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "kimi_eagle",
}


def new(rows: int = 1, columns: int = 1, **options) -> tuple[Figure, Axes]:
    """A figure and its axes (an array of axes where there are several) in the project's style; options go to plt.subplots."""
    with plt.rc_context(STYLE):
        return plt.subplots(rows, columns, layout="constrained", **options)


def show(fig: Figure, alt: str = "") -> None:
    """Show `fig` once, as a PNG, and close it. alt: what the figure says, for those who do not see it.

    In a kernel the PNG is made here rather than by the backend: a forced MPLBACKEND=Agg would otherwise leave notebooks
    without pictures and without an error, and a figure left open would be shown a second time.
    """
    if _in_kernel():
        from IPython.display import Image, display

        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        display(Image(data=buffer.getvalue(), format="png", alt=alt or None))
    else:
        plt.show()
    plt.close(fig)


def _in_kernel() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
