"""How long a choice stands: a plan is held for some rounds, and a law of the policy serves several holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from adaspec.outcome import RoundOutcome
from adaspec.plan import Context, Plan
from adaspec.theory import Floats

TRUSTED_ROUNDS = 32.0  # after this many rounds of a plan a few bad ones are half taken for chance
_PATIENT_ROUNDS = 32  # rounds of a context that earn its laws another use
_FORECAST_ROUNDS = 64  # rounds of a context after which the forecasts that holds are judged by are old
_CHANCE = 1.25  # share of a trusted plan's floor that chance may take in one round, shrinking with the rounds' root
_SOARED = 0.8  # excess over the best forecast, shrinking likewise, from which the law is void
_MUCH = 24  # tokens to be fed from which a model counts as idle
_FAMILIAR = 0.5  # trust in a plan from which its collapse makes the law void


def idle(context: Context) -> frozenset[str]:
    """The models that have so much to catch up with that it decides between plans."""
    return frozenset([name for name, count in context.lacking if count >= _MUCH])


@dataclass(slots=True)
class Seen:
    """What a plan has brought since the policy last looked; seconds without catch-up."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, outcome: RoundOutcome) -> None:
        self.rounds += 1
        self.tokens += outcome.tokens
        self.seconds += max(outcome.seconds - outcome.catch_up_seconds, 0.0)


@dataclass(slots=True)
class Ranking:
    """What is thought of the plans in one context (bucket of batch sizes, tag), and how long that stands.

    Attributes:
        rounds: handed out since the context was new or changed; a law serves more pulls the more there are.
        uses: pulls for which ``law`` [plans] still serves.
        rates: forecasts per row [plans]; ``due``: the rounds after which they are old.
        seen: what the plans played under this law have brought.
        stands: whether a law that is used up is still better than none, as only its best plan has surprised.
    """

    rounds: int = 0
    uses: int = 0
    law: Floats = field(default_factory=lambda: np.zeros(0))
    due: int = 0
    rates: Floats = field(default_factory=lambda: np.zeros(0))
    seen: dict[int, Seen] = field(default_factory=dict)
    stands: bool = False

    @property
    def old(self) -> bool:
        """Whether the forecasts are due again."""
        return self.rounds >= self.due or not self.rates.size

    def renew(self, law: Floats, patience: int) -> None:
        self.law, self.seen, self.stands = law, {}, False
        self.uses = min(patience, 1 + self.rounds // _PATIENT_ROUNDS)

    def forecast(self, rates: Floats) -> None:
        self.rates = rates
        self.due = self.rounds + min(max(self.rounds, 1), _FORECAST_ROUNDS)

    def restart(self) -> None:
        """The context has changed."""
        self.rounds = self.uses = self.due = 0
        self.stands = False

    def drop(self, arm: int, trust: float) -> None:
        """After a collapse: the law goes on without a plan hardly tried, but is void when a familiar one failed."""
        left = self.law.copy()
        left[arm] = 0.0
        total = float(left.sum())
        if trust >= _FAMILIAR or not total:
            self.void(arm, familiar=trust >= _FAMILIAR)
        else:
            self.law = left / total

    def void(self, arm: int, *, familiar: bool) -> None:
        """A plan has surprised: its law serves no more, but stands in for the next one where the plan was the best."""
        self.uses = 0
        self.stands = bool(familiar and self.law[arm] > 0.5 and arm == self.rates.argmax())


@dataclass(slots=True)
class Hold:
    """One pull of the policy: a plan that is kept for some rounds, and what they have brought so far.

    Attributes:
        left: rounds still to hand out; ``open``: those handed out and not back yet; ``rounds``: those back.
        best: tokens per second forecast for any plan.
        floor: tokens per second below which it ends early, unless chance explains it.
        trust: 0 for a plan never played to 1 for one played much.
        ranking: what it was pulled from; None: a request asked for it.
    """

    arm: int
    propensity: float
    left: int
    best: float = 0.0
    floor: float = 0.0
    trust: float = 0.0
    ranking: Ranking | None = None
    open: int = 0
    rounds: list[RoundOutcome] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)

    def add(self, outcome: RoundOutcome) -> None:
        """Takes a round, and ends early or voids the law when it is far from what was expected."""
        self.open -= 1
        self.rounds.append(outcome)
        self.seen.add(outcome)
        if self.left and self._collapsed():
            self.left = 0
            if self.ranking:
                self.ranking.drop(self.arm, self.trust)
        elif self.ranking and not self.left and self._soared():
            self.ranking.void(self.arm, familiar=True)

    def interrupted(self, plan: Plan, context: Context) -> bool:
        """Whether the plan's models lack tokens again after its first round: another text has begun."""
        return bool(context.lacking) and self.started and not idle(context).isdisjoint(plan.models)

    @property
    def started(self) -> bool:
        return bool(self.open or self.rounds)

    def _collapsed(self) -> bool:
        chance = min(_CHANCE * self.trust / math.sqrt(self.seen.rounds), 1.0)
        return self.seen.tokens < self.floor * (1.0 - chance) * self.seen.seconds

    def _soared(self) -> bool:
        excess = 1.0 + _SOARED / math.sqrt(self.seen.rounds)
        return self.seen.tokens > excess * self.best * self.seen.seconds
