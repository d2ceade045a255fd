"""Speeds and speed-ups by Spec-Bench's protocol."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from statistics import fmean
from typing import TypeAlias

Told: TypeAlias = tuple[Hashable, str, int, float]
"""One answer: repetition, question, tokens, seconds (prompt included)."""
Speeds: TypeAlias = dict[Hashable, dict[str, float]]
"""Tokens/s per repetition and question."""
_NONE = 1e-9  # stands for no token, so that a speed can be divided by


def speeds(answers: Iterable[Told]) -> Speeds:
    """Tokens/s of every question over all its turns, per repetition."""
    sums: dict[Hashable, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for repetition, question, tokens, seconds in answers:
        both = sums[repetition][question]
        both[0] += tokens
        both[1] += seconds
    return {
        repetition: {question: max(tokens, _NONE) / seconds for question, (tokens, seconds) in of.items()}
        for repetition, of in sums.items()
    }


def mean_speed(own: Speeds) -> float:
    """Tokens/s: the mean over repetitions of the mean over questions."""
    return fmean(fmean(of.values()) for of in own.values())


def speed_ratios(own: Speeds, plain: Speeds) -> list[float]:
    """Ratio of mean speeds over the questions that both answered, one for every repetition that has such."""
    found = []
    for repetition, of in own.items():
        base = plain.get(repetition, {})
        both = [question for question in of if question in base]
        if both:
            found.append(fmean(of[question] for question in both) / fmean(base[question] for question in both))
    return found
