"""The pictures of a tournament: time regret, and share of the best fixed plan's speed, over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from adaspec.theory import Floats

CURVES = {"regret": "seconds lost against the best fixed plan", "share": "share of the best fixed plan's speed, so far"}
WIDTH = 4  # panels side by side


def draw(results: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Writes ``regret.png`` and ``share.png``: a panel per scenario, a line per policy, the mean over seeds."""
    scenarios = sorted({unit["scenario"] for unit in results})
    policies = list(dict.fromkeys(name for unit in results for name in unit["policies"]))
    for curve, label in CURVES.items():
        height = -(-len(scenarios) // WIDTH)
        figure = Figure(figsize=(4.5 * min(WIDTH, len(scenarios)), 3.2 * height + 1.0), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(height, min(WIDTH, len(scenarios)), squeeze=False).ravel()
        for panel, scenario in zip(panels, scenarios):
            units = [unit for unit in results if unit["scenario"] == scenario]
            _panel(panel, scenario, units, policies, curve)
        for panel in panels[len(scenarios) :]:
            panel.axis("off")
        figure.supylabel(label)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        figure.savefig(out / f"{curve}.png", dpi=90)


def _panel(panel: Axes, scenario: str, units: Sequence[Mapping[str, Any]], policies: Sequence[str], curve: str) -> None:
    for index, policy in enumerate(policies):
        curves = [unit["policies"][policy]["curve"] for unit in units if policy in unit["policies"]]
        if curves:
            style = "-" if index < 10 else "--"
            width = 2.5 if index == 0 else 1.0
            panel.plot(*_mean(curves, curve), style, color=f"C{index % 10}", lw=width, label=policy)
    panel.set_title(scenario, fontsize=10)
    panel.set_xlabel("rounds", fontsize=8)
    if curve == "share":
        panel.axhline(1.0, color="grey", lw=0.5)
        panel.set_ylim(0.3, 1.25)
    else:
        panel.set_yscale("symlog", linthresh=1.0)


def _mean(curves: Sequence[Mapping[str, Any]], name: str) -> tuple[Floats, Floats]:
    """Mean over seeds at common rounds, as far as all of them go."""
    rounds = np.array(min((curve["rounds"] for curve in curves), key=lambda own: own[-1]), dtype=float)
    values = [np.interp(rounds, curve["rounds"], curve[name]) for curve in curves]
    return rounds, np.asarray(np.mean(values, axis=0))
