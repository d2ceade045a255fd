"""What a stored state must look like: checked as a whole before any of it is taken.

A ``Check`` takes a value and its place in the state and raises a ValueError that names the place. Values come from
JSON, so a number is an int or a float and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any, str], None]
LARGEST = 1e150  # of a number: its square is still one
_ROUNDING = 1e-6  # sums that fade and are taken apart again may miss their bounds by so much


def number(least: float = -math.inf, *, whole: bool = False) -> Check:
    """A finite number of at least ``least``."""

    def check(value: Any, place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(f"{place} is {'a whole' if whole else 'a'} number, got {value!r:.60}")
        if not abs(value) <= LARGEST or value < least - (0.0 if whole else _ROUNDING):
            bound = f" of at least {least:g}" if least > -math.inf else ""
            raise ValueError(f"{place} is a finite number{bound}, got {value!r:.60}")

    return check


def row(*items: Check) -> Check:
    """A list of just these items."""

    def check(value: Any, place: str) -> None:
        for at, (item, one) in enumerate(zip(items, _list(value, place, len(items)))):
            item(one, f"{place}[{at}]")

    return check


def each(item: Check) -> Check:
    """A list of items, however many."""

    def check(value: Any, place: str) -> None:
        row(*[item] * len(_list(value, place)))(value, place)

    return check


def table(rows: int, item: Check) -> Check:
    """So many lists of items, all of one length."""

    def check(value: Any, place: str) -> None:
        lists = [_list(one, f"{place}[{at}]") for at, one in enumerate(_list(value, place, rows))]
        for at, one in enumerate(lists):
            if len(one) != len(lists[0]):
                raise ValueError(f"{place} has rows of {len(lists[0])} and of {len(one)} items")
            each(item)(one, f"{place}[{at}]")

    return check


def named(item: Check, *, numbered: bool = False) -> Check:
    """An object of items by any name; ``numbered``: the names are whole numbers from 0 on."""

    def check(value: Any, place: str) -> None:
        for name, one in _object(value, place).items():
            if numbered and not (str(name).isascii() and str(name).isdigit()):
                raise ValueError(f"{place} is numbered, got {name!r:.60}")
            item(one, f"{place}.{name}")

    return check


def record(**items: Check) -> Check:
    """An object that has these items; others are passed over."""

    def check(value: Any, place: str) -> None:
        found = _object(value, place)
        for name, item in items.items():
            if name not in found:
                raise ValueError(f"{place or 'a state'} lacks {name!r}")
            item(found[name], f"{place}.{name}" if place else name)

    return check


def together(item: Check, law: Callable[[Any], bool], what: str) -> Check:
    """An item for which a law holds, told as ``what``."""

    def check(value: Any, place: str) -> None:
        item(value, place)
        if not law(value):
            raise ValueError(f"{place}: {what}, got {value!r:.60}")

    return check


def finite(value: Any, place: str) -> None:
    """Anything that JSON can hold: of any shape, without NaN and infinity."""
    if isinstance(value, float):
        number()(value, place)
    elif isinstance(value, Mapping):
        named(finite)(value, place)
    elif isinstance(value, list | tuple):
        each(finite)(value, place)


def text(value: Any, place: str) -> None:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{place} is text, got {value!r:.60}")


def _list(value: Any, place: str, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or length not in (None, len(value)):
        raise ValueError(f"{place} is a list{'' if length is None else f' of {length}'}, got {value!r:.60}")
    return value


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place or 'a state'} is an object, got {value!r:.60}")
    return value


def _bounded(counts: Any) -> bool:
    """Of reached, accepted, asked and drafted tokens, the second and fourth are parts of the first and third."""
    reached, accepted, asked, drafted = counts
    pairs = [*zip(accepted, reached), *zip(drafted, asked)]
    return all(part <= whole + _ROUNDING * (1.0 + whole) for part, whole in pairs)


_REAL, _SUM = number(), number(0.0)
_PARTS = "accepted <= reached and drafted <= asked"
_COUNTS = named(together(table(4, _SUM), _bounded, _PARTS))
_EVER = named(together(table(4, number(0, whole=True)), _bounded, _PARTS))
_ACCEPTANCE = record(
    sums=_EVER,
    all=_COUNTS,
    rest=_SUM,
    tags=named(record(counts=_COUNTS, surprise=named(row(_REAL, _SUM, _SUM)))),
)
_MODEL = together(
    record(
        count=_SUM,
        played=_SUM,
        fresh=_SUM,
        scale=_REAL,
        moments=row(*[row(*[_SUM] * 4)] * 4),
        sums=row(*[_SUM] * 4),
        spread=row(_SUM, _SUM),
        fitted=row(*[_SUM] * 4),
    ),
    lambda kept: kept["spread"][1] > 0.0 and (kept["count"] > 0.0 or kept["fresh"] <= 0.0),
    "its spread has a weight, and passes that are fresh are counted",
)
_CELLS = named(named(named(row(_SUM, _REAL, _SUM, _SUM), numbered=True)), numbered=True)
_ROUNDS = record(
    contexts=named(named(named(row(_SUM, _SUM, _SUM))), numbered=True),
    overhead=named(table(2, _SUM), numbered=True),
)
_SWITCHING = record(fed=row(_SUM, _SUM, _SUM), models=named(row(_SUM, _SUM)))
COSTS = record(
    acceptance=_ACCEPTANCE, passes=record(models=named(_MODEL), cells=_CELLS), rounds=_ROUNDS, switching=_SWITCHING
)
"""The state of a ``CostModel``."""
_TOTALS = together(
    row(number(0, whole=True), _SUM, _SUM), lambda sums: sums[2] > 0.0 or not sums[0], "rounds take time"
)
CONTROLLER = record(totals=named(_TOTALS), policy=record(name=text, state=finite), costs=COSTS, rng=record())
"""The state of a ``Controller``, but for its header."""
