"""The pictures, each a matplotlib figure of a given width; what they show comes from ``measures``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from adaspec.bench.report.legend import Legend
from adaspec.bench.report.measures import PassTime, PlanUse, Position, Speedup, Track, models_of
from adaspec.bench.report.regret import Regret
from adaspec.bench.report.theme import FAINT, INK, NARROW, PAPER, color, figure, label, marker

PANELS = 6  # at most in one picture; the table has all
PLANS = 14  # at most by name in one panel
_TICKS = 9  # at most on an axis of whole numbers


def speedup(found: Sequence[Speedup], width: float) -> Figure:
    """Rows are tasks, marks are methods, bars their range over repetitions."""
    methods = list(dict.fromkeys(one.method for one in found))
    kinds = list(dict.fromkeys(one.kind for one in found))
    each, legend = 0.21, Legend.of(methods, width)
    drawn = figure(width, 0.7 + legend.height + len(kinds) * (each * len(methods) + 0.18))
    panel = drawn.subplots()
    for number, method in enumerate(methods):
        own = [one for one in found if one.method == method]
        shift = (number - (len(methods) - 1) / 2.0) / (len(methods) + 1.0)
        at = [kinds.index(one.kind) + shift for one in own]
        ratios = np.array([one.ratio for one in own])
        low, high = (np.array([getattr(one, end) or one.ratio for one in own]) for end in ("low", "high"))
        bars = np.maximum(np.array((ratios - low, high - ratios)), 0.0)
        panel.errorbar(ratios, at, xerr=bars, fmt=marker(number), color=color(number), capsize=2, lw=1.4, label=method)
    panel.axvline(1.0, color=INK, lw=1.0, ls="--")
    for row in range(1, len(kinds)):
        panel.axhline(row - 0.5, color=FAINT, lw=0.5, alpha=0.5)
    panel.set_yticks(range(len(kinds)), [label(kind, 16) for kind in kinds])
    panel.set_ylim(len(kinds) - 0.5, -0.5)
    panel.grid(False, axis="y")
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel("times the speed of plain decoding (dashed)")
    legend.draw(drawn, panel)
    return drawn


def timeline(found: Sequence[Track], width: float) -> Figure:
    """Rows are plans, bars where they were played; lines between answers."""
    shown = found[:PANELS]
    rows = [_plan_rows(track) for track in shown]
    heights = [0.24 * len(own) + 0.55 for own in rows]
    drawn = figure(width, sum(heights) + 0.6)
    panels = drawn.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    several = len({track.run for track in found}) > 1
    for panel, track, plans in zip(panels, shown, rows):
        _track(panel, track, plans)
        panel.set_title(label(f"{track.method}, {track.run}" if several else track.method, 44))
    panels[-1].set_xlabel("round")
    depths = sorted({plan.depth for track in shown for plan in track.plans})
    bars = [Line2D([], [], color=color(depth), lw=7, solid_capstyle="butt") for depth in depths]
    names = ["target alone" if depth == 1 else f"chain of {depth}" for depth in depths]
    drawn.legend(bars, names, loc="outside lower left", ncols=3)
    return drawn


def _plan_rows(track: Track) -> list[str]:
    """The plans by name, plain decoding first, then by depth; the rare ones together."""
    counts = Counter(track.plans)
    named = {plan for plan, _ in counts.most_common(PLANS)}
    rows = [str(plan) for plan in sorted(named, key=lambda plan: (plan.depth, str(plan)))]
    return rows if len(named) == len(counts) else [*rows, f"{len(counts) - len(named)} others"]


def _track(panel: Axes, track: Track, rows: Sequence[str]) -> None:
    place = {name: row for row, name in enumerate(rows)}
    at = np.array([place.get(str(plan), len(rows) - 1) for plan in track.plans])
    begins = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    ends = np.append(begins[1:], len(at))
    depths = {place.get(str(plan), len(rows) - 1): plan.depth for plan in track.plans}
    for row in range(len(rows)):
        own = at[begins] == row
        x = np.column_stack((begins[own], ends[own], np.full(own.sum(), np.nan))).ravel()
        panel.plot(x, np.full(len(x), row), color=color(depths[row]), lw=7, solid_capstyle="butt")
    starts = [start for start, _ in track.begins[1:]]
    x, y = np.repeat(starts, 3).astype(float), np.tile((0.0, 1.0, np.nan), len(starts))
    panel.plot(x, y, color=FAINT, lw=0.5, alpha=0.6, transform=panel.get_xaxis_transform())
    panel.set_yticks(range(len(rows)), [label(name, 26) for name in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xlim(0, len(at))
    panel.grid(False, axis="x")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def forecasts(found: Sequence[PlanUse], width: float) -> Figure:
    """Per plan the forecast (hollow) and what was measured (full, with its 95 % interval)."""
    methods = list(dict.fromkeys(use.method for use in found))[:PANELS]
    uses = [[use for use in found if use.method == method][:PLANS] for method in methods]
    heights = [0.25 * len(own) + 0.5 for own in uses]
    drawn = figure(width, sum(heights) + 0.75)
    panels = drawn.subplots(len(methods), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, method, own in zip(panels, methods, uses):
        for row, use in enumerate(own):
            if use.forecast is not None:
                panel.plot([use.forecast, use.measured], [row, row], color=FAINT, lw=1.0)
        told = [(use.forecast, row) for row, use in enumerate(own) if use.forecast is not None]
        measured = [use.measured for use in own]
        margins = [use.margin for use in own]
        panel.errorbar(
            measured, range(len(own)), xerr=margins, fmt="o", color=color(0), capsize=2, lw=1.4, label="measured"
        )
        if told:
            panel.plot(*zip(*told), "D", color=color(1), mfc=PAPER, mew=1.5, ms=6, label="forecast")
        panel.set_yticks(range(len(own)), [label(f"{use.plan}  {use.share:.0%}", 32) for use in own])
        panel.set_ylim(len(own) - 0.4, -0.6)
        panel.set_title(label(method, 44))
        panel.grid(False, axis="y")
    panels[-1].set_xlabel("tokens per second of decoding")
    Legend.of(("measured", "forecast"), width).draw(drawn, panels[0])
    return drawn


def acceptance(found: Sequence[Position], width: float) -> Figure:
    """Per edge the acceptance at each position, with its 95 % interval."""
    edges = list(dict.fromkeys(one.edge for one in found))[:PANELS]
    legend = Legend.of(("accepted of drafted", "accepted of reached"), width)
    drawn, panels = _grid(len(edges), width, 1.75, legend.height)
    for panel, edge in zip(panels, edges):
        own = [one for one in found if one.edge == edge]
        at = [one.position for one in own]
        rates = np.array([one.rate for one in own])
        bars = np.array((rates - [one.low for one in own], [one.high for one in own] - rates))
        spoken = [np.nan if one.spoken is None else one.spoken for one in own]
        panel.plot(at, spoken, ls=":", lw=1.6, marker="x", color=color(1), label="accepted of drafted")
        panel.errorbar(
            at, rates, yerr=np.maximum(bars, 0.0), fmt="-o", color=color(0), capsize=2, lw=1.4,
            label="accepted of reached",
        )  # fmt: skip
        panel.set_title(label(f"{edge[1]} for {edge[0]}"))
        panel.set_ylim(-0.03, 1.03)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        _whole_numbers(panel, at)
        panel.set_xlabel("position in the window")
    legend.draw(drawn, panels[0])
    return drawn


def passes(found: Sequence[PassTime], width: float) -> Figure:
    """Per model milliseconds over the length of a pass: quartiles as measured, and the fit."""
    models = models_of(found)[:PANELS]
    sizes = sorted({one.batch_size for one in found})
    names = [name for rows in sizes for name in _measured_and_fit(rows)]
    legend = Legend.of(names, width)
    drawn, panels = _grid(len(models), width, 1.75, legend.height)
    for panel, model in zip(panels, models):
        own = [one for one in found if one.model == model]
        for number, rows in enumerate(sizes):
            batch = [one for one in own if one.batch_size == rows]
            at = [one.query_len for one in batch]
            middle = 1e3 * np.array([one.median for one in batch])
            bars = np.array((middle - [1e3 * one.lower for one in batch], [1e3 * one.upper for one in batch] - middle))
            name, fit = _measured_and_fit(rows)
            panel.errorbar(at, middle, yerr=bars, fmt=marker(number), color=color(number), capsize=2, label=name)
            panel.plot(at, [1e3 * one.fit for one in batch], "-_", color=color(number), lw=1.4, ms=11, label=fit)
        panel.set_title(label(model))
        panel.set_ylim(0.0, 1.15e3 * max(max(one.upper, one.fit) for one in own))
        _whole_numbers(panel, sorted({one.query_len for one in own}))
        panel.set_xlabel("tokens in the pass")
        panel.set_ylabel("ms per pass")
    legend.draw(drawn, panels[0])
    return drawn


def _measured_and_fit(rows: int) -> tuple[str, str]:
    return ("measured", "fit") if rows == 1 else (f"measured, {rows} rows", f"fit, {rows} rows")


def regret(found: Sequence[Regret], width: float) -> Figure:
    """Seconds lost over tokens, a line per run and method."""
    methods = list(dict.fromkeys(one.method for one in found))
    legend = Legend.of(methods, width)
    drawn = figure(width, 2.8 + legend.height)
    panel = drawn.subplots()
    for number, method in enumerate(methods):
        for repeat, one in enumerate(own for own in found if own.method == method):
            panel.plot(
                one.tokens, one.seconds, color=color(number), lw=1.6, marker=marker(number), ms=4.5,
                markevery=max(len(one.tokens) // 8, 1), label=method if repeat == 0 else None,
            )  # fmt: skip
    panel.axhline(0.0, color=INK, lw=1.0, ls="--")
    panel.set_xlabel("tokens decoded")
    panel.set_ylabel("seconds lost")
    panel.margins(x=0.01)
    legend.draw(drawn, panel)
    return drawn


def _grid(count: int, width: float, height: float, beneath: float) -> tuple[Figure, list[Axes]]:
    """So many small panels, as many side by side as the width holds."""
    across = min(count, 1 if width <= NARROW else 3)
    down = -(-count // across)
    drawn = figure(width, (height + 0.45) * down + beneath)
    panels = drawn.subplots(down, across, squeeze=False).ravel().tolist()
    for panel in panels[count:]:
        panel.axis("off")
    return drawn, panels[:count]


def _whole_numbers(panel: Axes, values: Sequence[int]) -> None:
    """Ticks at some of ``values``, ascending; around a single one the axis would be divided into parts of it."""
    panel.set_xlim(values[0] - 0.5, values[-1] + 0.5)
    panel.set_xticks(values[:: -(-len(values) // _TICKS)])
