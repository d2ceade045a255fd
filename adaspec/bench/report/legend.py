"""The legend beneath a figure, whose height is known before the figure is made: no name is cut, no panel squeezed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adaspec.bench.report.theme import NARROW, label

_LONGEST = 160  # characters of a name
_LINE, _GAP = 0.16, 0.07  # inches
_MARK = 0.6  # inches beside a name
_CHARACTERS = 11.0  # in an inch, of a wide font: the page has its own


@dataclass(frozen=True, slots=True)
class Legend:
    """Names, and how they are drawn: each on as many lines as it needs, in ``columns`` filled one after the other."""

    names: tuple[str, ...]
    drawn: tuple[str, ...]
    columns: int

    @classmethod
    def of(cls, names: Sequence[str], width: float) -> Legend:
        """For a figure of ``width`` inches: up to three columns when the names are short enough for that."""
        told = [label(name, _LONGEST) for name in names]
        for columns in (2, 1) if width <= NARROW else (3, 2, 1):
            held = int((width / columns - _MARK) * _CHARACTERS)
            if columns == 1 or all(len(name) <= held for name in told):
                break
        drawn = tuple("\n".join(textwrap.wrap(name, held, break_on_hyphens=False)) or " " for name in told)
        return cls(tuple(names), drawn, columns)

    @property
    def height(self) -> float:
        """Inches."""
        rows = -(-len(self.drawn) // self.columns)
        columns = [self.drawn[start : start + rows] for start in range(0, len(self.drawn), rows or 1)]
        lines = [sum(_LINE * (name.count("\n") + 1) + _GAP for name in column) for column in columns]
        return max(lines, default=0.0) + 2 * _GAP

    def draw(self, drawn: Figure, panel: Axes) -> None:
        """Beneath everything, with the marks of ``panel``, which are labelled by the names."""
        told = dict(zip(self.names, self.drawn))
        marks, names = panel.get_legend_handles_labels()
        drawn.legend(
            marks, [told[name] for name in names], loc="outside lower left", ncols=self.columns, handletextpad=0.4
        )
