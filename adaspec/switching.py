"""What taking up a plan costs when its models have been idle: they must first be fed what they have not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, PlanSpace
from adaspec.theory import Floats

_FED = 64.0  # tokens fed after which what was measured counts as much as the prior
_STAYS = 4.0  # feedings that the prior on how long a fed model plays counts for
_KEEP = 0.995  # weight that older feedings keep per round


class Switching:
    """Charges plans for what their models lack.

    Two things are learned: the seconds of feeding one token relative to a pass over one (of all models together), and
    per model how many rounds it plays until another text begins, over which a feeding is to be earned back. A text
    began where a model is fed that played in the round before; a model that was left idle tells nothing of that.

    Args:
        space: the plans.
        relative: what feeding a token costs beforehand, as a share of the model's pass over one token.
        rounds: how many rounds a fed model plays, beforehand.
    """

    def __init__(self, space: PlanSpace, relative: float, rounds: float) -> None:
        self._rows = {name: row for row, name in enumerate(space.models)}
        used = [[name in plan.models for name in space.models] for plan in space]
        self.uses = np.array(used, dtype=np.float64)  # [plans, models], 1 where a plan has a model
        self._arm = space.arm
        self._relative, self._prior_rounds = relative, rounds
        self._fed = np.zeros(3)  # seconds, tokens x T(1), tokens
        self._rounds, self._feedings = np.zeros((2, len(self._rows)))  # of each model, discounted
        self._latest = np.zeros(len(self._rows))  # models of the latest round, as ``uses``

    def learn(self, rounds: Sequence[tuple[Decision, RoundOutcome]], seconds: Floats) -> None:
        """Takes rounds whose contexts tell what models lack; ``seconds`` [models]: believed, of a pass over 1 token."""
        keep = _KEEP ** len(rounds)
        self._rounds *= keep
        self._feedings *= keep
        for decision, outcome in rounds:
            uses = self.uses[self._arm(decision.plan)]
            self._rounds += uses
            if decision.context.lacking:
                fed = self._tokens(decision.context) * uses
                self._feedings += (fed > 0.0) * self._latest
                if outcome.catch_up_seconds > 0.0 and fed.any():
                    self._fed += outcome.catch_up_seconds, float(fed @ seconds), float(fed.sum())
            self._latest = uses

    def charge(self, context: Context, seconds: Floats) -> Floats:
        """Seconds per round [..., plans] that what their models lack adds; ``seconds`` [..., models] as above."""
        stays = (self._rounds + _STAYS * self._prior_rounds) / (self._feedings + _STAYS)
        return self.feeding(context, seconds / stays)

    def feeding(self, context: Context, seconds: Floats) -> Floats:
        """Seconds [..., plans] of feeding at once what their models lack; ``seconds`` [..., models] as above."""
        if not context.lacking:
            return np.zeros((*seconds.shape[:-1], len(self.uses)))
        fed: Floats = (seconds * (self._tokens(context) * self._pace)) @ self.uses.T
        return fed

    @property
    def _pace(self) -> float:
        spent, passes, tokens = self._fed
        trust = tokens / (tokens + _FED)
        return float(self._relative + trust * (spent / passes - self._relative)) if passes else self._relative

    def _tokens(self, context: Context) -> Floats:
        """Tokens that each model of the space lacks; [models]."""
        lacking = np.zeros(len(self._rows))
        for name, count in context.lacking:
            if name in self._rows:
                lacking[self._rows[name]] = count
        return lacking

    def state_dict(self) -> dict[str, Any]:
        stays = zip(self._rows, self._rounds.tolist(), self._feedings.tolist())
        return {"fed": self._fed.tolist(), "models": {name: sums for name, *sums in stays}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._fed = np.array(state["fed"])
        for name, row in self._rows.items():
            self._rounds[row], self._feedings[row] = state["models"].get(name, (0.0, 0.0))
