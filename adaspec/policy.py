"""The policies: how a plan is picked from what a cost model believes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaspec.costs import CostModel
from adaspec.outcome import RoundOutcome
from adaspec.plan import Context, Plan
from adaspec.theory import Floats


class Policy(ABC):
    """Turns beliefs into a law over plans; the controller draws from that law and reports the drawn probability.

    The propensity on a ticket is thus exactly the probability of the draw that was made, given the law. A policy that
    is random itself (Thompson sampling) returns a law that depends on ``rng``; see there.
    """

    @abstractmethod
    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        """The law of the next pull; [plans], not negative, summing to 1."""

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:  # noqa: B027
        """Learns from one pull, the rounds of one hold. The cost model has learned them already."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, JSON-able; nothing for a policy that keeps everything in the cost model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes back what ``state_dict`` gave."""


class ThompsonSampling(Policy):
    """Plays each plan as often as it is the best one under a draw from the posterior (Thompson 1933).

    Every draw is one possible world: acceptances and seconds are shared by all plans, residuals are per plan. Of
    ``draws`` worlds the law is the share in which each plan wins, so a draw from it is exactly one Thompson draw, and
    its propensity is the honest one of that draw: conditional on the worlds, and a Monte Carlo estimate (standard
    error at most 0.5 / sqrt(draws)) of the posterior probability that the plan is best.

    Args:
        draws: worlds per decision.
        sharpness: factor on the counts behind the posterior. Above 1 explores less, which pays when generations are
            short (Chapelle and Li, 2011, "An empirical evaluation of Thompson sampling"); 1 is the posterior itself.

    Raises:
        ValueError: draws below 1, or a sharpness that is not above 0.
    """

    def __init__(self, draws: int = 8, sharpness: float = 1.5) -> None:
        if draws < 1:
            raise ValueError(f"Thompson sampling needs at least 1 draw, got {draws}")
        if not sharpness > 0.0:
            raise ValueError(f"sharpness is above 0, got {sharpness}")
        self._draws, self._sharpness = draws, sharpness

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        best = costs.sample_rates(rng, context, self._draws, self._sharpness).argmax(axis=-1)
        law: Floats = np.bincount(best, minlength=len(costs.space)) / self._draws
        return law


class Fixed(Policy):
    """Always plays one plan: the baseline that a controller has to beat.

    Raises:
        ValueError: at the first choice, when the space does not hold the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        if self._plan not in costs.space:
            raise ValueError(f"the space does not hold plan {self._plan}")
        law = np.zeros(len(costs.space))
        law[costs.space.arm(self._plan)] = 1.0
        return law


class EpsilonGreedy(Policy):
    """Plays the plan with the best forecast, and any plan of the space with a small probability.

    Args:
        epsilon: the share of pulls drawn uniformly from all plans.

    Raises:
        ValueError: epsilon outside [0, 1].
    """

    def __init__(self, epsilon: float = 0.05) -> None:
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon is a probability, got {epsilon}")
        self._epsilon = epsilon

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        law = np.full(len(costs.space), self._epsilon / len(costs.space))
        law[costs.rates(context).argmax()] += 1.0 - self._epsilon
        return law
