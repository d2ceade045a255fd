"""HedgeSpec: full-information hedging over drafters (Liu et al., arXiv 2510.20064, ICLR 2026)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq

from adaspec.baselines.ladder import certain, pairs
from adaspec.costs import CostModel
from adaspec.outcome import EdgeOutcome, RoundOutcome
from adaspec.plan import Context, PlanSpace
from adaspec.policy import Policy
from adaspec.stored import named, number, record
from adaspec.theory import Floats


class HedgeSpec(Policy):
    """NormalHedge over drafters on the accepted length that each would have had (Chaudhuri, Freund and Hsu, 2009).

    A drafter's loss in a hold is 1 minus its acceptance there, taken from every pair that was played or scored
    beneath the target: with all drafters scored nothing need be explored. A drafter of which a hold tells nothing
    keeps its regret. The window is fixed, and time plays no part.

    Args:
        window: of every drafter; the nearest one below it that the space has.
    """

    def __init__(self, window: int = 5) -> None:
        if window < 1:
            raise ValueError(f"a window is at least 1 token, got {window}")
        self._window = window
        self._space: PlanSpace | None = None
        self._arms: dict[str, int] = {}
        self._regret: dict[str, float] = {}

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        if self._space is not costs.space:
            self._space = costs.space
            self._arms = {
                drafter: arms[max((w for w in arms if w <= self._window), default=min(arms))]
                for drafter, arms in pairs(costs.space).items()
            }
        if not self._arms:
            return certain(0, len(costs.space))
        law = np.zeros(len(costs.space))
        law[list(self._arms.values())] = _normal_hedge(np.array([self._regret.get(name, 0.0) for name in self._arms]))
        return law

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:
        played = next((name for name, own in self._arms.items() if own == arm), None)
        losses = {name: loss for name in self._arms if (loss := _loss(name, rounds)) is not None}
        if played in losses:
            for name, loss in losses.items():
                self._regret[name] = self._regret.get(name, 0.0) + losses[played] - loss

    def state_dict(self) -> dict[str, Any]:
        return {"regret": dict(self._regret)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        record(regret=named(number()))(state, "")
        self._regret = {str(name): float(regret) for name, regret in state["regret"].items()}


def _loss(drafter: str, rounds: Sequence[RoundOutcome]) -> float | None:
    """1 - the share of the tokens reached at which the drafter was right; a silent one is wrong."""
    edges: list[EdgeOutcome] = [
        edge
        for outcome in rounds
        for edge in (*outcome.edges[:1], *outcome.scored)
        if edge.drafter == drafter and edge.verifications
    ]
    reached = sum(sum(edge.reached) for edge in edges)
    return 1.0 - sum(sum(edge.accepted) for edge in edges) / reached if reached else None


def _normal_hedge(regret: Floats) -> Floats:
    """Weights [R]+ / c exp([R]+^2 / 2c), the mean of exp([R]+^2 / 2c) being e; all alike where no regret is above 0."""
    above = np.maximum(regret, 0.0)
    if above.max() <= 0.0:
        return np.full(len(regret), 1.0 / len(regret))
    squares = (above**2 / 2.0).tolist()
    # c lies between: there the largest term alone makes the mean e, here no term is above e
    low, high = max(squares) / math.log(len(squares) * math.e), max(squares)
    goal = math.e * len(squares)
    scale = brentq(lambda c: sum([math.exp(square / c) for square in squares]) - goal, 0.99 * low, 1.01 * high)
    weights = above * np.exp(above**2 / (2.0 * scale))
    law: Floats = weights / weights.sum()
    return law
