"""Which pictures a report has: title, what to see, how to read it, the drawing and the table behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from matplotlib.figure import Figure

from adaspec.bench.report import figures, measures
from adaspec.bench.report.groups import Group
from adaspec.bench.report.measures import PassTime, Position, Speedup, Track
from adaspec.bench.report.regret import best_fixed, regrets

NONE = "-"  # a cell with nothing in it


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text, row by row; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture. ``alt``: what is to be seen, in words; ``how``: how it is read and where it is from.

    ``draw`` takes a width in inches; None where there is nothing to draw, and ``how`` says why.
    """

    key: str
    title: str
    alt: str
    how: str
    draw: Callable[[float], Figure] | None
    table: Table


def compared(groups: Sequence[Group]) -> list[Speedup]:
    """The methods of all groups; where there are several groups, with theirs in the method's name."""
    found = [(one, group.name) for group in groups for one in measures.speedups(group)]
    return [replace(one, method=f"{one.method} · {name}" if name else one.method) for one, name in found]


def speedup(found: Sequence[Speedup]) -> Picture:
    """All methods in one picture, since that is what they are compared by."""
    overall = [one for one in found if one.kind == measures.ALL]
    alt = "; ".join(f"{one.method} {one.ratio:.2f} times{_spread(one)}" for one in overall)
    how = (
        "Ratio of mean tokens per second, prefill included, on the same prompts (the protocol of Spec-Bench). Bars "
        "span the least and the greatest ratio of one repetition; with a single repetition there are none."
    )
    if not found:
        how = "No prompt was answered both by plain decoding and by another method, so there is no speed-up to show."
    columns = ("method", "task", "speed-up", "spread", "repetitions", "answers", "tokens/s", "accepted length", "text")
    rows = tuple(
        (
            one.method,
            one.kind,
            f"{one.ratio:.3f}",
            NONE if one.low is None else f"{one.low:.3f} to {one.high:.3f}",
            str(one.repetitions),
            str(one.answers),
            f"{one.tokens_per_second:.1f}",
            NONE if one.mean_accepted_length is None else f"{one.mean_accepted_length:.2f}",
            {None: NONE, 0: "equal"}.get(one.differing, f"{one.differing} differ"),
        )
        for one in found
    )
    draw = (lambda width: figures.speedup(found, width)) if found else None
    return Picture("speedup", "Speed-up per task", alt, how, draw, Table(columns, rows))


def _spread(one: Speedup) -> str:
    return "" if one.low is None else f" ({one.low:.2f} to {one.high:.2f})"


def timeline(group: Group) -> Picture:
    """The plans of every round, by ``measures.tracks``."""
    found = measures.tracks(group)
    how = "A bar where a plan was played, coloured by the depth of the chain; thin lines are where an answer begins."
    if len(found) > figures.PANELS:
        how += f" The first {figures.PANELS} of {len(found)} are drawn, the table has all."
    most = ((track, *Counter(track.plans).most_common(1)[0]) for track in found)
    alt = "; ".join(
        f"{track.method} played {plan} in {count / len(track.plans):.0%} of its rounds" for track, plan, count in most
    )
    columns = ("method", "run", "first round", "rounds", "task", "plans, with their share of the answer's rounds")
    rows = tuple(row for track in found for row in _answers(track))
    draw = (lambda width: figures.timeline(found, width)) if found else None
    if not found:
        how = "No round was recorded, so there is no plan to show."
    return Picture("timeline", "Which plan was played when", alt, how, draw, Table(columns, rows))


def _answers(track: Track) -> Iterator[tuple[str, ...]]:
    """One row per answer."""
    ends = [*(start for start, _ in track.begins[1:]), len(track.plans)]
    for (start, kind), end in zip(track.begins, ends):
        shares = Counter(map(str, track.plans[start:end])).most_common()
        played = ", ".join(f"{plan} {count / (end - start):.0%}" for plan, count in shares)
        yield track.method, track.run, str(start), str(end - start), kind, played


def forecasts(group: Group) -> Picture:
    """What was forecast and what was measured, by ``measures.plan_uses``."""
    found = measures.plan_uses(group)
    how = (
        "Tokens per second of decoding: what was forecast when a plan was chosen (mean over its rounds) and what its "
        "rounds then did (tokens over seconds, bars: 95 % interval with holds as units). The share of rounds stands "
        "behind the plan's name."
    )
    if not found:
        how = "No method of this run chose among plans, so there is no forecast to hold against a measurement."
    alt = "; ".join(
        f"{use.plan}: forecast {_number(use.forecast)}, measured {use.measured:.1f} tokens per second"
        for use in found[:3]
    )
    columns = ("plan", "method", "rounds", "share", "forecast", "measured", "± 95 %", "measured / forecast")
    rows = tuple(
        (
            str(use.plan),
            use.method,
            str(use.rounds),
            f"{use.share:.1%}",
            _number(use.forecast),
            f"{use.measured:.1f}",
            f"{use.margin:.1f}" if use.margin else NONE,
            NONE if use.forecast is None else f"{use.measured / use.forecast:.2f}",
        )
        for use in found
    )
    draw = (lambda width: figures.forecasts(found, width)) if found else None
    return Picture("forecast", "Forecast against measured", alt, how, draw, Table(columns, rows))


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def acceptance(group: Group) -> Picture:
    """Acceptance at every position, by ``measures.acceptance``."""
    found = measures.acceptance(group)
    how = (
        "How often the token at each position of the window was accepted, given that all before it were; over all "
        "methods. Where a drafter is silent nothing can be accepted: the dotted line leaves silence out. Bars: 95 % "
        "interval (Wilson)."
    )
    if not found:
        how = "No plan with a drafter was played, so nothing was accepted or rejected."
    first = [one for one in found if one.position == 1]
    alt = "; ".join(f"{one.edge[1]} for {one.edge[0]}: {one.rate:.0%} at position 1" for one in first)
    columns = ("edge", "position", "reached", "drafted", "accepted", "of reached", "95 % interval", "of drafted")
    rows = tuple(_position(one) for one in found)
    draw = (lambda width: figures.acceptance(found, width)) if found else None
    return Picture("acceptance", "Acceptance per edge and position", alt, how, draw, Table(columns, rows))


def _position(one: Position) -> tuple[str, ...]:
    return (
        f"{one.edge[0]} ← {one.edge[1]}",
        str(one.position),
        str(one.reached),
        str(one.offered),
        str(one.accepted),
        f"{one.rate:.3f}",
        f"{one.low:.3f} to {one.high:.3f}",
        NONE if one.spoken is None else f"{one.spoken:.3f}",
    )


def passes(group: Group) -> Picture:
    """Passes and their fit, by ``measures.pass_times``; ValueError for a state that is none of a controller."""
    believed = measures.cost_model(group)
    found = measures.pass_times(group, believed[0]) if believed else []
    how = (
        f"Median and quartiles of the recorded passes; the line is {believed[1] if believed else ''}. The fit is "
        "robust and discounts what is old, so it follows the late passes rather than all of them."
    )
    if not found:
        how = "The rounds of this run tell nothing of their passes."
    alt = "; ".join(f"{one.model}: {1e3 * one.median:.1f} ms for {one.query_len} tokens" for one in _ends(found))
    columns = ("model", "tokens", "rows", "passes", "quartile", "median, ms", "quartile", "fit, ms", "fit / median")
    rows = tuple(
        (
            one.model,
            str(one.query_len),
            str(one.batch_size),
            str(one.passes),
            f"{1e3 * one.lower:.3f}",
            f"{1e3 * one.median:.3f}",
            f"{1e3 * one.upper:.3f}",
            f"{1e3 * one.fit:.3f}",
            f"{one.fit / one.median:.2f}",
        )
        for one in found
    )
    draw = (lambda width: figures.passes(found, width)) if found else None
    return Picture("passes", "Seconds per pass", alt, how, draw, Table(columns, rows))


def _ends(found: Sequence[PassTime]) -> list[PassTime]:
    """The shortest and the longest pass of every model."""
    by_model = [[one for one in found if one.model == model] for model in measures.models_of(found)]
    return list(dict.fromkeys(chain.from_iterable((own[0], own[-1]) for own in by_model)))


def regret(group: Group) -> Picture:
    """Seconds lost, by ``regret.regrets``, and which plan they are held against."""
    found, told = [], []
    for run in group.runs:
        best = best_fixed(run)
        if best is not None:
            found += regrets(run, best[0])
            told.append(f"{best[1]} (method {best[0]}, the fastest of {', '.join(best[2])})")
    how = (
        f"Seconds of decoding lost against the best fixed plan of the same run, {'; '.join(dict.fromkeys(told))}. "
        "Its time is measured: it answered the same prompts in the same run, and is read at the same token of the same "
        "answer. Below zero a method is faster. A plan that was not run might have been better still."
    )
    if not found:
        how = "Regret needs a fixed plan that was played beside the others in the same run; there is none."
    alt = "; ".join(f"{one.method} lost {one.seconds[-1]:.2f} s in {one.tokens[-1]:.0f} tokens" for one in found)
    columns = ("method", "run", "tokens", "seconds lost", "ms per token")
    rows = tuple(
        (
            one.method,
            one.run,
            f"{one.tokens[at]:.0f}",
            f"{one.seconds[at]:.3f}",
            f"{1e3 * one.seconds[at] / max(one.tokens[at], 1.0):.3f}",
        )
        for one in found
        for at in np.unique(np.linspace(0, len(one.tokens) - 1, 6).astype(int))[1:]
    )
    draw = (lambda width: figures.regret(found, width)) if found else None
    return Picture("regret", "Regret over time", alt, how, draw, Table(columns, rows))
