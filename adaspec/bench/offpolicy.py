"""Off-policy questions: what another way of choosing would have done, from the propensities of a recorded run.

Every hold is weighted by how much more, or less, likely the other law would have drawn its plan (Horvitz and Thompson,
1952), and the value is a ratio of weighted sums (self-normalised: Swaminathan and Joachims, 2015). It is honest where
the recorded policy gave every plan in question a chance. What a law would have led to later, a warm cache or a
drafter that need not catch up, is not in it: a plan that is played throughout pays less for switching than one that was
drawn now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from adaspec.bench.report.measures import SURE, holds
from adaspec.bench.report.records import Round
from adaspec.plan import Plan

Law: TypeAlias = Callable[[Round], Mapping[Plan, float]]
"""Probability of every plan it may choose, given the first round of a hold (its context, tag and kind)."""


@dataclass(frozen=True, slots=True)
class Value:
    """Tokens per second of decoding under another law, with its 95 % interval (holds as units).

    ``holds``: with a weight above 0; ``effective``: as many equally weighted ones would tell as much (Kish, 1965).
    """

    rate: float
    low: float
    high: float
    holds: int
    effective: float


def value(rounds: Iterable[Round], law: Law) -> Value:
    """What ``law`` would have done in place of the policy that played ``rounds``, one method's in order.

    Raises:
        ValueError: no hold that the law could have drawn.
    """
    rows = [
        (
            law(hold[0]).get(plan, 0.0) / hold[0].decision.propensity,
            sum(one.outcome.tokens for one in hold),
            sum(one.outcome.seconds for one in hold),
        )
        for plan, hold in holds(list(rounds))
    ]
    weights, tokens, seconds = np.array([row for row in rows if row[0] > 0.0]).reshape(-1, 3).T
    if not len(weights):
        raise ValueError("no plan that the law would choose was ever played, so the run cannot tell")
    spent = float(weights @ seconds)
    rate = float(weights @ tokens) / spent
    error = SURE * float(np.sqrt(((weights * (tokens - rate * seconds)) ** 2).sum())) / spent
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    return Value(rate, max(rate - error, 0.0), rate + error, len(weights), effective)


def always(plan: Plan) -> Law:
    """One plan throughout."""
    return lambda first: {plan: 1.0}
