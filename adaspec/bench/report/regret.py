"""Seconds lost against the best fixed plan of the same run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adaspec.bench.report.measures import fixed_methods, in_order
from adaspec.bench.report.records import Round, Run, Turn
from adaspec.plan import Plan
from adaspec.theory import Floats

POINTS = 400  # of a curve, at most


@dataclass(frozen=True, slots=True)
class Regret:
    """Seconds lost against the best fixed plan so far, over tokens decoded; [points] each."""

    method: str
    run: str
    tokens: Floats
    seconds: Floats


def best_fixed(run: Run) -> tuple[str, Plan, list[str]] | None:
    """The fixed method with the most tokens per second of decoding, its plan, and all that were compared.

    Compared on the turns that all of them have finished.
    """
    fixed = fixed_methods(run.rounds)
    turns = {method: _courses(run, method) for method in fixed}
    common = set.intersection(*(set(own) for own in turns.values())) if turns else set()
    rates = {}
    for method, own in turns.items():
        ends = [own[turn] for turn in common]
        seconds = sum(float(end[1][-1]) for end in ends)
        if seconds:
            rates[method] = sum(float(end[0][-1]) for end in ends) / seconds
    if not rates:
        return None
    best = max(rates, key=rates.__getitem__)
    return best, fixed[best], sorted({str(plan) for plan in fixed.values()})


def regrets(run: Run, best: str) -> list[Regret]:
    """Every method but ``best`` against it, token for token of the same answers.

    Where the best plan would have been after as many tokens of the same answer is read off its own rounds there,
    linearly within a round; behind the end of its answer at its mean rate there.
    """
    there = _courses(run, best)
    found = []
    for method in dict.fromkeys(one.method for one in run.rounds if one.method != best):
        tokens, lost = [np.zeros(1)], [np.zeros(1)]
        for turn, (own_tokens, own_seconds) in _courses(run, method).items():
            if turn in there:
                lost.append(lost[-1][-1] + own_seconds[1:] - _seconds_to(there[turn], own_tokens[1:]))
                tokens.append(tokens[-1][-1] + own_tokens[1:])
        if len(tokens) > 1:
            found.append(_thinned(method, run.name, np.concatenate(tokens), np.concatenate(lost)))
    return found


def _courses(run: Run, method: str) -> Mapping[Turn, tuple[Floats, Floats]]:
    """(tokens, seconds) so far after every round of every answer, 0 at first."""
    answers: dict[Turn, list[Round]] = defaultdict(list)
    for one in in_order(run, method):
        answers[one.turn].append(one)
    return {
        turn: (
            np.cumsum([0.0, *(one.outcome.tokens for one in own)]),
            np.cumsum([0.0, *(one.outcome.seconds for one in own)]),
        )
        for turn, own in answers.items()
    }


def _seconds_to(course: tuple[Floats, Floats], tokens: Floats) -> Floats:
    """When a course has decoded so many tokens."""
    end, last = max(float(course[0][-1]), 1.0), float(course[1][-1])
    reached: Floats = np.where(tokens <= end, np.interp(tokens, *course), last * tokens / end)
    return reached


def _thinned(method: str, run: str, tokens: Floats, seconds: Floats) -> Regret:
    keep = np.unique(np.linspace(0, len(tokens) - 1, POINTS).astype(int))
    return Regret(method, run, tokens[keep], seconds[keep])
