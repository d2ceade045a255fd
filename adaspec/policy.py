"""The policies: how a plan is picked from what a cost model believes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaspec.costs import CostModel
from adaspec.outcome import RoundOutcome
from adaspec.plan import Context, Plan
from adaspec.stored import each, number, record, together
from adaspec.theory import Floats

_SETTLED = 8  # pulls for which a plan stands that no trial of another one is worth giving up


class Policy(ABC):
    """Turns beliefs into a law over plans; the controller draws from that law and reports the drawn probability.

    The propensity on a ticket is thus exactly the probability of the draw that was made, given the law. A policy that
    is random itself (Thompson sampling) returns a law that depends on ``rng``; see there.

    Attributes:
        patience: pulls that the latest law serves at most, once a context has seen some rounds: 1 for a rule that
            answers to every pull, several where a law rests on beliefs that one pull hardly moves.
    """

    patience = 1

    @abstractmethod
    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        """The law of the next pull; [plans], not negative, summing to 1."""

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:  # noqa: B027
        """Learns from one pull, the rounds of one hold. The cost model has learned them already."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, JSON-able; nothing for a policy that keeps everything in the cost model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes back what ``state_dict`` gave.

        Raises:
            ValueError: anything else (a policy with a state checks it with ``adaspec.stored``); nothing is taken then.
        """


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

    patience = 8

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


class KnowledgeGradient(Policy):
    """Plays the best forecast, unless a trial of another plan is worth more than it costs.

    A trial costs the time lost while it lasts and the feeding of idle models; it is worth what it may teach, over the
    rounds for which that will be of use (``Prospects.values``; Frazier, Powell and Dayanik, 2008). What a plan shares
    with the best one is no reason to try it, what a hundred rounds have shown is none either, and a plan far behind is
    tried only while little is known of it.

    Args:
        horizon: rounds for which what is learned counts; about the memory of the cost model.
        blunder: chance that the profile of a model is wrong by a factor of three, until a round has shown it.

    Raises:
        ValueError: a horizon that is not above 0, or a blunder outside [0, 1].
    """

    def __init__(self, horizon: float = 200.0, blunder: float = 0.05) -> None:
        if not horizon > 0.0:
            raise ValueError(f"the horizon is above 0, got {horizon}")
        if not 0.0 <= blunder <= 1.0:
            raise ValueError(f"blunder is a probability, got {blunder}")
        self._horizon, self._blunder = horizon, blunder

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        prospects = costs.prospects(context)
        values = prospects.values(self._horizon, self._blunder)
        trial = values.max() > 0.0
        self.patience = 1 if trial else _SETTLED
        law = np.zeros(len(values))
        law[(values if trial else prospects.rates).argmax()] = 1.0
        return law


class Fixed(Policy):
    """Always plays one plan (plain decoding by default): the baseline that a controller has to beat.

    Raises:
        ValueError: at the first choice, when the space does not hold the plan.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        plan = self._plan or costs.space.plain
        if plan not in costs.space:
            raise ValueError(f"the space does not hold plan {plan}")
        law = np.zeros(len(costs.space))
        law[costs.space.arm(plan)] = 1.0
        return law


class EpsilonGreedy(Policy):
    """Plays the plan with the best forecast, and any plan of the space with a small probability.

    Args:
        epsilon: the share of pulls drawn uniformly from all plans.

    Raises:
        ValueError: epsilon outside [0, 1].
    """

    patience = 8

    def __init__(self, epsilon: float = 0.05) -> None:
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon is a probability, got {epsilon}")
        self._epsilon = epsilon

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        law = np.full(len(costs.space), self._epsilon / len(costs.space))
        law[costs.rates(context).argmax()] += 1.0 - self._epsilon
        return law


class Optimistic(Policy):
    """Plays the plan with the best optimistic forecast: every part at its upper quantile (UCB on the theorem).

    Optimism in the parts is shared by all plans that have them, so a doubt about one pair is settled by playing any of
    its plans, not each (Lai and Robbins, 1985; for structured arms: Abbasi-Yadkori et al., 2011).

    Args:
        delta: the probability that a part is better than its optimistic value.

    Raises:
        ValueError: a delta outside (0, 0.5].
    """

    def __init__(self, delta: float = 0.1) -> None:
        if not 0.0 < delta <= 0.5:
            raise ValueError(f"delta lies in (0, 0.5], got {delta}")
        self._delta = delta

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        law = np.zeros(len(costs.space))
        law[costs.upper_rates(self._delta, context).argmax()] = 1.0
        return law


_SUM = number(0.0)
_EXP3 = record(
    weights=together(each(_SUM), lambda weights: not weights or abs(sum(weights) - 1.0) < 1e-6, "weights sum to 1"),
    tokens=_SUM,
    seconds=_SUM,
    largest=_SUM,
)


class Exp3(Policy):
    """Exponential weights around the forecast, with a share that keeps every plan alive, on a reward that knows time.

    The law is the forecast tokens per second to a high power, times weights that begin alike and learn what the
    forecast misses, as an adversary may have it (EXP3.S: Auer et al., 2002). The reward of a hold is tokens - rate x
    seconds, with ``rate`` the tokens per second of all holds so far (discounted): positive exactly for what beats the
    present mix, and maximal, at the best rate, for the best ratio of sums (Dinkelbach, 1967). It is scaled by the
    largest seen and weighted by importance.

    Args:
        rate: step of the weights.
        explore: share of holds drawn uniformly from all plans.
        share: weight that moves to all plans alike per hold.
        power: exponent on the forecast; 0 leaves it out.

    Raises:
        ValueError: explore or share outside [0, 1], a rate that is not above 0, or a negative power.
    """

    patience = 4

    def __init__(self, rate: float = 0.05, explore: float = 0.02, share: float = 0.01, power: float = 32.0) -> None:
        if not (0.0 <= explore <= 1.0 and 0.0 <= share <= 1.0):
            raise ValueError(f"explore and share are probabilities, got {explore} and {share}")
        if not rate > 0.0 or power < 0.0:
            raise ValueError(f"the rate is above 0 and the power not below it, got {rate} and {power}")
        self._rate, self._explore, self._share, self._power = rate, explore, share, power
        self._weights = np.zeros(0)  # [plans], summing to 1
        self._tokens = self._seconds = self._largest = 0.0

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        rates, plans = costs.rates(context), len(costs.space)
        if len(self._weights) != plans:
            self._weights = np.full(plans, 1.0 / plans)
        believed = self._weights * (rates / rates.max()) ** self._power
        law: Floats = (1.0 - self._explore) * believed / believed.sum() + self._explore / plans
        law /= law.sum()
        return law

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:
        tokens, seconds = sum(one.tokens for one in rounds), sum(one.seconds for one in rounds)
        if arm >= len(self._weights) or not seconds:
            return
        if self._seconds:
            gain = tokens - self._tokens / self._seconds * seconds
            self._largest = max(0.99 * self._largest, abs(gain))
            self._reward(arm, gain / self._largest / propensity if self._largest else 0.0)
        self._tokens, self._seconds = 0.98 * self._tokens + tokens, 0.98 * self._seconds + seconds

    def _reward(self, arm: int, gain: float) -> None:
        self._weights[arm] *= np.exp(min(max(self._rate * gain, -1.0), 1.0))
        self._weights = self._weights / self._weights.sum()
        self._weights = (1.0 - self._share) * self._weights + self._share / len(self._weights)

    def state_dict(self) -> dict[str, Any]:
        sums = {"tokens": self._tokens, "seconds": self._seconds, "largest": self._largest}
        return {"weights": self._weights.tolist(), **sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _EXP3(state, "")
        self._weights = np.array(state["weights"], dtype=float)
        self._tokens, self._seconds, self._largest = state["tokens"], state["seconds"], state["largest"]
