"""BanditSpec: plans as arms, tokens per round as reward (Hou et al., arXiv 2505.15141, ICML 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaspec.baselines.ladder import certain
from adaspec.costs import CostModel
from adaspec.outcome import RoundOutcome
from adaspec.plan import Context
from adaspec.policy import Policy
from adaspec.stored import each, number, record, together
from adaspec.theory import Floats


def _tokens(rounds: Sequence[RoundOutcome]) -> list[float]:
    """Tokens per row of every round."""
    return [outcome.tokens / max(outcome.rows, 1) for outcome in rounds]


_SUMS = together(
    record(count=each(number(0.0)), sum=each(number(0.0))),
    lambda kept: len(kept["count"]) == len(kept["sum"]),
    "every plan has a count and a sum",
)


class UCBSpec(Policy):
    """Every plan once, then the one with the highest mean tokens per round plus confidence radius (UCBSpec).

    The radius of plan i after n_i of t rounds is
    (L / 2) sqrt((1 + n_i) / n_i^2 (1 + 2 ln(K t^2 sqrt(1 + n_i) / delta))), with L the largest reward and K plans; n_i
    is the plan's *own* count, as in the paper (its released code divides by the count of all). Time plays no part: a
    long window is always at least as good as a short one.

    Args:
        delta: the probability with which a radius may fail.

    Raises:
        ValueError: a delta outside (0, 1).
    """

    def __init__(self, delta: float = 0.1) -> None:
        if not 0.0 < delta < 1.0:
            raise ValueError(f"delta lies in (0, 1), got {delta}")
        self._delta = delta
        self._count, self._sum = np.zeros((2, 0))

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        plans = len(costs.space)
        if len(self._count) != plans:
            self._count, self._sum = np.zeros((2, plans))
        untried = np.flatnonzero(self._count == 0)
        if untried.size:
            return certain(int(untried[0]), plans)
        largest = 1 + max((plan.windows[0] for plan in costs.space if plan.windows), default=0)
        inside = plans * self._count.sum() ** 2 * np.sqrt(1.0 + self._count) / self._delta
        radius = largest / 2.0 * np.sqrt((1.0 + self._count) / self._count**2 * (1.0 + 2.0 * np.log(inside)))
        return certain(int((self._sum / self._count + radius).argmax()), plans)

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:
        if arm < len(self._count):
            self._count[arm] += len(rounds)
            self._sum[arm] += sum(_tokens(rounds))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count.tolist(), "sum": self._sum.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _SUMS(state, "")
        self._count, self._sum = np.array(state["count"], dtype=float), np.array(state["sum"], dtype=float)


class EXP3Spec(Policy):
    """Exponential weights on importance-weighted losses, for rewards that an adversary may pick (EXP3Spec).

    The loss of a hold is 1 - (mean tokens per round) / L, L the longest a round can be; the rate after t pulls is
    sqrt(ln K / (K t)), which needs no horizon.
    """

    def __init__(self) -> None:
        self._losses = np.zeros(0)
        self._pulls, self._largest = 0, 1

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        plans = len(costs.space)
        if len(self._losses) != plans:
            self._losses, self._pulls = np.zeros(plans), 0
        self._largest = 1 + max((plan.windows[0] for plan in costs.space if plan.windows), default=0)
        rate = math.sqrt(math.log(max(plans, 2)) / (plans * (self._pulls + 1)))
        weights = np.exp(-rate * (self._losses - self._losses.min()))
        law: Floats = weights / weights.sum()
        return law

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:
        if arm < len(self._losses) and rounds:
            reward = sum(_tokens(rounds)) / len(rounds) / self._largest
            self._losses[arm] += (1.0 - min(reward, 1.0)) / propensity
            self._pulls += 1

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._losses.tolist(), "pulls": self._pulls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        record(losses=each(number(0.0)), pulls=number(0, whole=True))(state, "")
        self._losses, self._pulls = np.array(state["losses"], dtype=float), int(state["pulls"])
