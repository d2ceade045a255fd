"""What a controller has learned: acceptance per edge and position, seconds per pass, a residual per plan.

Every round teaches all plans that share an edge or a model with the one that was played; the theorem
(``adaspec.theory``) turns the parts into a forecast for every plan, and the residual lets measurement overrule it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from adaspec.estimators import Acceptance, CostPriors, Passes, Rounds
from adaspec.forecaster import Forecaster
from adaspec.outcome import Decision, Pass, RoundOutcome
from adaspec.plan import Context, PlanSpace
from adaspec.theory import Edge, Floats


class CostModel:
    """Learns the parts of every plan's speed from rounds, and forecasts every plan of a space from the parts.

    Acceptance is a discounted Beta per (verifier, drafter) and position, shrunk to one rate per edge and extrapolated
    geometrically. Seconds are a regression per model on (1, query length, batch x query length, cached tokens), with
    a correction per query length actually seen; before any pass of a model they are a guess from its place in the
    chains. What a round spends outside its passes is learned per depth. A plan's own rounds (catch-up included, so a
    plan pays for what its switches cost, spread over its rounds) correct its forecast by a factor.

    Edges, models and query lengths that no plan of the space uses are passed over.

    Args:
        space: the plans.
        priors: what is believed beforehand.
        one_pass: drafters that propose a whole window in one pass (prompt lookup).
        acceptance: acceptance believed beforehand per (verifier, drafter), where something is known.
    """

    def __init__(
        self,
        space: PlanSpace,
        priors: CostPriors | None = None,
        one_pass: Collection[str] = (),
        acceptance: Mapping[Edge, float] | None = None,
    ) -> None:
        self.space = space
        self.priors = priors or CostPriors()
        self._forecaster = Forecaster(space, one_pass)
        edges, positions = self._forecaster.edges, self._forecaster.positions
        self._acceptance = Acceptance(edges, positions, self.priors, acceptance or {})
        self._passes = Passes(space, self._forecaster.query_lens, self.priors)
        self._depths = np.array([plan.depth for plan in space])
        self._rounds: dict[int, Rounds] = {}

    def profile(self, passes: Iterable[Pass]) -> None:
        """Takes start-up measurements as first observations; several of one kind count by their median."""
        self._passes.learn(passes, clip=False)

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        """Learns from one round.

        Raises:
            ValueError: a plan that the space does not hold, seconds that are not above 0, or negative tokens.
        """
        if decision.plan not in self.space:
            raise ValueError(f"the space does not hold plan {decision.plan}")
        if not (0.0 < outcome.seconds < math.inf and outcome.tokens >= 0):
            raise ValueError(f"a round takes time and loses no token: {outcome.tokens} in {outcome.seconds} s")
        priors, rounds = self.priors, self._at(decision.context.batch_size)
        self._acceptance.forget()
        self._passes.forget(decision.context.batch_size)
        rounds.forget(priors.idle_keep)
        for edge in (*outcome.edges, *outcome.scored):
            if self._acceptance.learn(edge):
                rounds.doubt(self._holds(edge.verifier, edge.drafter))
        clipped = self._passes.learn(outcome.passes)
        rounds.add(self.space.arm(decision.plan), outcome.tokens, outcome.seconds - clipped, priors.round_keep)
        if outcome.passes:
            inside = sum(one.seconds for one in outcome.passes)
            outside = min(max(outcome.seconds - inside - outcome.catch_up_seconds, 0.0), inside)
            rounds.add_overhead(decision.plan.depth, outside, priors.round_keep)

    def forecast(self, context: Context) -> tuple[Floats, Floats]:
        """Expected (tokens, seconds) of a round by the theorem alone, over all rows; [plans] each."""
        logs, _, _ = self._passes.table(context)
        return self._evaluate(self._acceptance.mean(), np.exp(logs), context)

    def rates(self, context: Context) -> Floats:
        """Expected tokens per second of every plan, measurement included; [plans]."""
        tokens, seconds = self.forecast(context)
        return tokens / seconds * np.exp(self._residual(tokens / seconds, context)[0])

    def sample_rates(
        self, rng: np.random.Generator, context: Context, draws: int = 1, sharpness: float = 1.0
    ) -> Floats:
        """Tokens per second under ``draws`` draws from the posterior; [draws, plans].

        One draw shares its acceptances and seconds among all plans, so they are compared within one possible world;
        only the residuals are drawn per plan. ``sharpness`` multiplies the counts behind the posterior (it divides
        its variances); 1 is the posterior itself.
        """
        logs, common, cell = self._passes.table(context)
        wide = 1.0 / math.sqrt(sharpness)
        logs = logs + wide * common * rng.standard_normal((draws, len(logs), 1))
        logs = logs + wide * cell * rng.standard_normal((draws, *cell.shape))
        hazards = self._acceptance.sample(rng, draws, sharpness)
        tokens, seconds = self._evaluate(hazards, np.exp(logs), context)
        residual, spread = self._residual(tokens / seconds, context)
        return tokens / seconds * np.exp(residual + wide * spread * rng.standard_normal(tokens.shape))

    def upper_rates(self, delta: float, context: Context) -> Floats:
        """Optimistic tokens per second: every part at its 1 - delta quantile; [plans].

        A rate rises with each acceptance and falls with each pass's seconds, so optimistic parts make an optimistic
        plan.

        Raises:
            ValueError: a delta outside (0, 0.5].
        """
        if not 0.0 < delta <= 0.5:
            raise ValueError(f"delta lies in (0, 0.5], got {delta}")
        quantile = -float(ndtri(delta))
        logs, common, cell = self._passes.table(context)
        fast = np.exp(logs - quantile * np.hypot(common, cell))
        tokens, seconds = self._evaluate(self._acceptance.upper(delta), fast, context)
        residual, spread = self._residual(tokens / seconds, context)
        return tokens / seconds * np.exp(residual + quantile * spread)

    def acceptance(self, verifier: str, drafter: str) -> Floats:
        """Believed acceptance per position of a window; [positions]; KeyError for a pair that no plan has."""
        hazards: Floats = self._acceptance.mean()[self._acceptance.rows[verifier, drafter]]
        return hazards

    def seconds(self, model: str, query_len: int, context: Context) -> float:
        """Believed seconds of one pass; KeyError for a model that no plan has."""
        logs, _, _ = self._passes.table(context)
        return math.exp(logs[self._passes.rows[model], query_len])

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, JSON-able, by name: it can be loaded into another space with the same models."""
        return {
            "acceptance": self._acceptance.state_dict(),
            "passes": self._passes.state_dict(),
            "rounds": {str(batch_size): own.state_dict(self.space) for batch_size, own in self._rounds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything learned; passes over names that the space does not hold."""
        self._acceptance.load_state_dict(state["acceptance"])
        self._passes.load_state_dict(state["passes"])
        self._rounds = {}
        for batch_size, own in state["rounds"].items():
            self._at(int(batch_size)).load_state_dict(own, self.space)

    def _holds(self, verifier: str, drafter: str) -> NDArray[np.bool_]:
        return np.array([any(edge[:2] == (verifier, drafter) for edge in plan.edges()) for plan in self.space])

    def _at(self, batch_size: int) -> Rounds:
        if batch_size not in self._rounds:
            self._rounds[batch_size] = Rounds(len(self.space), int(self._depths.max()))
        return self._rounds[batch_size]

    def _evaluate(self, hazards: Floats, seconds: Floats, context: Context) -> tuple[Floats, Floats]:
        tokens, spent = self._forecaster(hazards, seconds)
        overhead = self._at(context.batch_size).overheads()[self._depths]
        return tokens * context.batch_size, spent + overhead

    def _residual(self, rates: Floats, context: Context) -> tuple[Floats, Floats]:
        """Log factor on ``rates`` [..., plans] from the plans' own rounds, and its spread [plans].

        The factor is log(sum of tokens / sum of seconds / forecast), shrunk by rounds / (rounds + strength).
        """
        own, strength = self._at(context.batch_size), self.priors.residual_strength
        played = own.rounds > 1e-6
        tokens = np.maximum(own.tokens, 0.1 * own.rounds)[played]
        trust = own.rounds / (own.rounds + strength)
        factor = np.zeros_like(rates)
        factor[..., played] = trust[played] * np.log(tokens / own.seconds[played] / rates[..., played])
        spread = self.priors.residual_spread * np.sqrt(strength / (own.rounds + strength))
        spread[0] = 0.0  # plain decoding is one pass: its forecast is no theorem
        return factor, spread
