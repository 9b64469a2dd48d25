"""Figures of the profile and the forecast: each is shown once, closed, and draws the numbers it is given."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from traces import NCCL_RING, kernel, steps, write

from kimi_eagle.allreduce import reading
from kimi_eagle.allreduce.breakdown import breakdown
from kimi_eagle.plots import allreduce as plots
from kimi_eagle.plots import forecast as forecast_plots
from kimi_eagle.plots import style
from kimi_eagle.speedup import crossings, forecast, published


@pytest.fixture
def shown(monkeypatch):
    figures = []
    monkeypatch.setattr(style, "show", lambda fig, alt="": figures.append((fig, alt)))
    yield figures
    for fig, _ in figures:
        plt.close(fig)


@pytest.fixture
def result(tmp_path):
    for rank in range(2):
        events = steps(3)
        for i in range(3):
            events += [
                kernel(NCCL_RING, 1000 * i + 100 * n, 50, **{"In msg nelems": 7168, "dtype": "BFloat16"})
                for n in (1, 3, 5)
            ]
            events += [kernel("nvjet_gemm", 1000 * i + 100 * n + 60, 80) for n in (1, 3, 5)]
        write(tmp_path / f"rank{rank}.json", events, rank, 2)
    return breakdown(tmp_path)


def test_share_bars_hold_the_parts(shown, result):
    plots.shares({"tokens1": result})
    (fig, alt), axes = shown[0], shown[0][0].axes[0]
    assert len(shown) == 1 and alt
    widths = pd.Series([p.get_width() for p in axes.patches if p.get_y() < 0.5])
    assert widths.sum() == pytest.approx(100)
    assert widths.iloc[0] == pytest.approx(15)  # three AllReduces of 50 in a step of 1000
    assert "15 %" in {t.get_text() for t in axes.texts}
    assert fig.legends


def test_timeline_and_latency_draw_what_they_are_given(shown, result):
    layer = reading.layer_timeline(result, 0)
    plots.timeline(layer)
    assert len(shown[0][0].axes[0].collections) == layer.groupby(["part"]).ngroups * 2
    plots.latency(reading.latency_points({"tokens1": result}), published.allreduce_points())
    axes = shown[1][0].axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert any(14336 in line.get_xdata() for line in axes.lines)
    plots.readings(reading.readings(result), reading.published_shares())
    assert len(shown) == 3


def test_forecast_figures(shown):
    case = published.kimi_on_pcie()
    table = published.against_published(case)
    forecast_plots.against_published(table)
    forecast_plots.step_terms(case.model, (1, 16))
    outlook = forecast(case.model, case.draft, case.acceptance, (1, 16), (1, 3), draws=20)
    forecast_plots.speedup(outlook, crossings(case.model, case.draft, case.acceptance))
    rates = outlook.rename(columns={"tokens_per_s": "forecast"}).assign(measured=outlook["tokens_per_s"] * 1.05)
    forecast_plots.measured(rates)
    assert len(shown) == 4 and all(alt for _, alt in shown)
    lines = {line.get_label(): line.get_ydata() for line in shown[2][0].axes[0].lines}
    assert lines["k = 3"].tolist() == pytest.approx(outlook.loc[outlook["k"] == 3, "speedup"].tolist())
