"""What taking up a plan costs when its models have been idle: they must first be fed what they have not seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, PlanSpace
from adaspec.theory import Floats

_PRIOR_WEIGHT = 64.0  # tokens fed after which what was measured counts as much as the prior


class Switching:
    """Learns the seconds of feeding one token relative to a pass over one, and charges plans for what they lack.

    Args:
        space: the plans.
        relative: what feeding a token costs beforehand, as a share of the model's pass over one token.
        rounds: over how many rounds a plan must earn back what taking it up costs.
    """

    def __init__(self, space: PlanSpace, relative: float, rounds: float) -> None:
        self._rows = {name: row for row, name in enumerate(space.models)}
        self._uses = np.array([[name in plan.models for name in space.models] for plan in space])  # [plans, models]
        self._relative, self._rounds = relative, rounds
        self.sums: NDArray[np.float64] = np.zeros(3)  # seconds fed; tokens x T(1); tokens

    def learn(self, rounds: Iterable[tuple[Decision, RoundOutcome]], seconds: Floats) -> None:
        """Takes the catch-up of rounds whose models were idle; ``seconds`` [models]: believed, of a pass over 1 token."""
        for decision, outcome in rounds:
            fed = self._tokens(decision.context) * np.isin(list(self._rows), decision.plan.models)
            if fed.any() and outcome.catch_up_seconds > 0.0:
                self.sums += outcome.catch_up_seconds, float(fed @ seconds), float(fed.sum())

    def charge(self, context: Context, seconds: Floats) -> Floats:
        """Seconds per round [plans] that what the plans' models lack adds; ``seconds`` [..., models] as above."""
        lacking = self._tokens(context)
        if not lacking.any():
            return np.zeros(len(self._uses))
        charged: Floats = (seconds * lacking) @ self._uses.T * (self._pace / self._rounds)
        return charged

    @property
    def _pace(self) -> float:
        spent, fed, tokens = self.sums
        trust = tokens / (tokens + _PRIOR_WEIGHT)
        return float(self._relative + trust * (spent / fed - self._relative)) if fed else self._relative

    def _tokens(self, context: Context) -> Floats:
        """Tokens that each model of the space lacks; [models]."""
        lacking = np.zeros(len(self._rows))
        for name, count in context.lacking:
            if name in self._rows:
                lacking[self._rows[name]] = count
        return lacking

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = np.array(state["sums"])
