"""Figures of the forecast: speed-up against concurrency with its crossover, the terms of a step, forecast against measurement."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kimi_eagle.plots import style
from kimi_eagle.speedup.step import Draft, StepModel


def speedup(
    table: pd.DataFrame, turns: Sequence[tuple[float, bool]] = (), measured: pd.DataFrame | None = None, title: str = "What a draft gives"
) -> None:  # fmt: skip
    """Speed-up against concurrency, a line a k with its 80 % band, vertical lines where the best k begins or stops to pay (`turns`, as
    `speedup.crossings` gives them); measured points (concurrency, k, speedup) as markers."""
    fig, axes = style.new(figsize=(7.2, 4.0))
    for place, (k, rows) in enumerate(table.groupby("k")):
        color = style.COLORS[place % len(style.COLORS)]
        axes.plot(rows["concurrency"], rows["speedup"], color=color, label=f"k = {k}")
        axes.fill_between(rows["concurrency"], rows["low"], rows["high"], color=color, alpha=0.10, linewidth=0)
        if measured is not None:
            points = measured[measured["k"] == k]
            axes.plot(points["concurrency"], points["speedup"], "o", color=color, markersize=5)
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    for at, pays in [t for t in turns if t[0] <= table["concurrency"].max()]:
        axes.axvline(at, color=style.QUIET, linewidth=1)
        word = f"pays from {at:.0f}" if pays else f"pays no more from {at:.0f}"
        axes.annotate(word, (at, 1), xytext=(4, -12), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    ticks = sorted(table["concurrency"].unique())
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set(xlabel="concurrent requests", ylabel="tokens per second, with over without the draft", title=title)
    axes.legend(fontsize=8, ncols=2)
    style.show(fig, alt=f"{title}: speed-up against concurrency for {table['k'].nunique()} draft lengths")


def step_terms(model: StepModel, tokens: Sequence[int], title: str = "What a step's time is made of") -> None:
    """Stacked bars of the step's terms against the tokens in it."""
    fig, axes = style.new(figsize=(7.2, 3.6))
    table = pd.DataFrame([model.terms(t) for t in tokens]) / 1000
    bottom = np.zeros(len(tokens))
    colors = {"allreduce": style.COLORS[1], "experts": style.COLORS[3], "dense weights": style.COLORS[0], "compute": style.COLORS[5],
              "fixed": style.QUIET, "per sequence": "#CFCFCF", "context": style.COLORS[2]}  # fmt: skip
    for name in [n for n in table if table[n].max() > 0]:
        axes.bar(range(len(tokens)), table[name], bottom=bottom, color=colors[name], label=name)
        bottom += table[name].to_numpy()
    axes.set_xticks(range(len(tokens)), [str(t) for t in tokens])
    axes.set(xlabel="tokens in the step (requests x (k + 1))", ylabel="step [ms]", title=title)
    axes.legend(fontsize=8)
    style.show(fig, alt=f"{title}: stacked terms for {len(tokens)} step sizes")


def against_published(table: pd.DataFrame) -> None:
    """Published rates with and without the draft, the forecast's lines, and the power law through the two fitted points."""
    fig, axes = style.new(1, 2, figsize=(7.4, 3.6))
    fitted = table[table["fitted"]]
    for what, color, name in (("off", style.COLORS[0], "no draft"), ("on", style.COLORS[1], "draft, k = 3")):
        axes[0].plot(table["concurrency"], table[f"{what}_forecast"], color=color, label=f"forecast, {name}")
        axes[0].plot(table["concurrency"], table[what], "o", color=color, markerfacecolor="none")
        axes[0].plot(fitted["concurrency"], fitted[what], "o", color=color)
    law = table["on"] * (1 + table["power_law_error"])
    axes[0].plot(table["concurrency"], law, ":", color=style.QUIET, label="power law through 1 and 64")
    axes[0].set(
        xscale="log",
        yscale="log",
        xlabel="concurrent requests",
        ylabel="tokens per second",
        title="Rates (filled: fitted)",
    )
    axes[0].legend(fontsize=7)
    axes[1].plot(table["concurrency"], table["ratio_forecast"], color=style.COLORS[2], label="forecast")
    axes[1].plot(
        table["concurrency"], table["ratio"], "o", color=style.COLORS[2], markerfacecolor="none", label="published"
    )
    axes[1].axhline(1, color="black", linewidth=1, linestyle="--")
    axes[1].set(xscale="log", xlabel="concurrent requests", ylabel="with over without the draft", title="Speed-up")
    axes[1].legend(fontsize=7)
    for each in axes:
        each.set_xticks(table["concurrency"], [str(c) for c in table["concurrency"]], fontsize=8)
        each.minorticks_off()
    style.show(fig, alt="published rates of Kimi-K2.6 on eight RTX PRO 6000 and the forecast")


def measured(table: pd.DataFrame, title: str = "Forecast against measurement") -> None:
    """Forecast against measured tokens per second, a panel for rates and one for errors; table: concurrency, k, measured, forecast."""
    fig, axes = style.new(1, 2, figsize=(7.4, 3.6))
    for place, (k, rows) in enumerate(table.groupby("k")):
        color = style.COLORS[place % len(style.COLORS)]
        axes[0].plot(rows["measured"], rows["forecast"], "o", color=color, label=f"k = {k}")
        axes[1].plot(
            rows["concurrency"], 100 * (rows["forecast"] / rows["measured"] - 1), "o-", color=color, linewidth=0.8
        )
    ends = [table[["measured", "forecast"]].min().min(), table[["measured", "forecast"]].max().max()]
    axes[0].plot(ends, ends, color=style.QUIET, linewidth=1)
    axes[0].set(xscale="log", yscale="log", xlabel="measured [tokens/s]", ylabel="forecast [tokens/s]", title=title)
    for axis in (axes[0].xaxis, axes[0].yaxis):  # decades alone: the numbers between them run into each other
        axis.set_minor_formatter("")
    axes[0].legend(fontsize=8)
    axes[1].axhspan(-10, 10, color=style.QUIET, alpha=0.2, linewidth=0)
    axes[1].set_xscale("log", base=2)
    axes[1].set(xlabel="concurrent requests", ylabel="forecast error [%]", title="Errors (band: 10 %)")
    style.show(fig, alt=f"{title}: {len(table)} cells")


def explore(model: StepModel, draft: Draft, k: int = 3, acceptance: float = 0.65) -> None:
    """Sliders over k, conditional acceptance, AllReduce latency and concurrency; prints the forecast of `speedup.what_if`."""
    from IPython.display import display
    from ipywidgets import FloatSlider, IntSlider, SelectionSlider, interactive_output

    from kimi_eagle.speedup import what_if

    sliders = {
        "k": IntSlider(value=k, min=1, max=8, description="k"),
        "acceptance": FloatSlider(value=acceptance, min=0.1, max=0.95, step=0.05, description="acceptance"),
        "allreduce": FloatSlider(value=1.0, min=0.1, max=4.0, step=0.1, description="AllReduce x"),
        "concurrency": SelectionSlider(options=[1, 2, 4, 8, 16, 32, 64, 128], value=1, description="requests"),
    }

    def answer(**values: float) -> None:
        found = what_if(model, draft, **values)
        print(f"{found['speedup']:.2f}x: {found['tokens_per_s']:.0f} against {found['plain_tokens_per_s']:.0f} tokens/s, "
              f"acceptance length {found['length']:.2f}, AllReduce {100 * found['allreduce_share']:.0f} % of a plain step")  # fmt: skip

    display(*sliders.values(), interactive_output(answer, sliders))
