"""The drawings of a report: legends that hold every name, axes of whole numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from adaspec.bench.report import figures, theme
from adaspec.bench.report.measures import ALL, PassTime, Position, Speedup
from adaspec.bench.report.regret import Regret

WIDTHS = [theme.NARROW, theme.WIDE]
MANY = [f"a policy of a long name · models=qwen_coder, policy=the-same-for-all, temperature={n}" for n in range(24)]


def laid_out(drawn):
    """The figure with everything in its place; a layout that squeezes a panel to nothing warns, which is an error."""
    canvas = FigureCanvasAgg(drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        canvas.draw()
    return canvas.get_renderer()


def speedup(methods, width):
    return figures.speedup([Speedup(name, ALL, 1.5, 1.4, 1.6, 2, 4, 10.0, 2.0, 0) for name in methods], width)


def regret(methods, width):
    line = np.arange(5.0)
    return figures.regret([Regret(name, "run", line, line) for name in methods], width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("draw", [speedup, regret])
def test_every_method_is_in_the_legend_by_its_whole_name_and_inside_the_figure(draw, width) -> None:
    with theme.style():
        drawn = draw(MANY, width)
        renderer = laid_out(drawn)
        (legend,) = drawn.legends
        told = [" ".join(text.get_text().split()) for text in legend.get_texts()]
        assert sorted(told) == sorted(MANY)
        box, whole = legend.get_window_extent(renderer), drawn.bbox
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
        panel = drawn.axes[0].get_window_extent(renderer)
        assert panel.height > 1.5 * drawn.dpi  # the legend takes none of it
        assert box.y1 <= panel.y0


@pytest.mark.parametrize("width", WIDTHS)
def test_few_short_names_stand_side_by_side(width) -> None:
    with theme.style():
        renderer = laid_out(drawn := regret(["ours", "theirs"], width))
        first, second = (text.get_window_extent(renderer) for text in drawn.legends[0].get_texts())
    assert first.y0 == pytest.approx(second.y0, abs=2.0)


@pytest.mark.parametrize("count", [1, 2, 5, 9, 10, 40])
def test_positions_are_whole_numbers(count) -> None:
    found = [Position(("t", "d"), at, 9, 9, 5, 0.5, 0.4, 0.6, 0.5) for at in range(1, count + 1)]
    times = [PassTime("t", at, 1, 9, 0.1, 0.2, 0.3, 0.2) for at in range(1, count + 1)]
    with theme.style():
        for drawn in (figures.acceptance(found, theme.WIDE), figures.passes(times, theme.WIDE)):
            laid_out(drawn)
            ticks = [float(text.get_text()) for text in drawn.axes[0].get_xticklabels()]
            assert ticks[0] == 1.0
            assert min(count, 4) <= len(ticks) <= 9
            assert all(tick in range(1, count + 1) for tick in ticks)


def test_the_legend_of_passes_names_every_batch_size() -> None:
    """Though the first model, which was passed most often, was not passed in all of them."""
    times = [PassTime(model, 1, size, passes, 0.1, 0.2, 0.3, 0.2) for model, size, passes in (("d", 1, 9), ("t", 8, 1))]
    with theme.style():
        drawn = figures.passes(times, theme.NARROW)
        laid_out(drawn)
    told = {text.get_text() for text in drawn.legends[0].get_texts()}
    assert told == {"measured", "fit", "measured, 8 rows", "fit, 8 rows"}
