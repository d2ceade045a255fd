"""How long a choice stands: a plan is held for some rounds, and a law of the policy serves several holds."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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


class Law:
    """Chances of the plans, in the order of the space; they sum to 1.

    It is asked behind a pass over a model's weights, which leaves nothing in the processor's caches: plain numbers
    answer several times as fast as arrays there.
    """

    __slots__ = ("_steps", "chances")

    def __init__(self, chances: list[float]) -> None:
        self.chances, self._steps = chances, list(accumulate(chances))

    @classmethod
    def only(cls, arm: int, plans: int) -> Law:
        """One plan of so many."""
        return cls([float(plan == arm) for plan in range(plans)])

    def draw(self, luck: float) -> int:
        """A plan; ``luck``: uniform in [0, 1)."""
        return bisect(self._steps, luck * self._steps[-1])

    def among(self, allowed: Sequence[bool]) -> Law | None:
        """What is left with some plans alone; None for nothing."""
        left = [chance if kept else 0.0 for chance, kept in zip(self.chances, allowed)]
        total = sum(left)
        return Law([chance / total for chance in left]) if total else None


class Ranking:
    """What is thought of the plans in one context (bucket of batch sizes, tag), and how long that stands.

    Args:
        rounds: handed out since the context was new or changed; a law serves more pulls the more there are.

    Attributes:
        law: the policy's, of which ``uses`` pulls are left.
        stands: whether a law that is used up may serve until there is time for the next one.
        rates: forecast of each plan per row; ``best``: the highest.
        seen: what the plans played under this law have brought.
    """

    def __init__(self, rounds: int = 0) -> None:
        self.rounds = rounds
        self.uses = 0
        self.stands = False
        self.law = Law([])
        self.rates: list[float] = []
        self.best = 0.0
        self.seen: dict[int, Seen] = {}
        self._due = 0  # rounds from which on the forecasts are old

    @property
    def old(self) -> bool:
        """Whether the forecasts are due again."""
        return self.rounds >= self._due or not self.rates

    def renew(self, law: Floats, patience: int) -> None:
        self.law, self.seen, self.stands = Law(law.tolist()), {}, True
        self.uses = min(patience, 1 + self.rounds // _PATIENT_ROUNDS)

    def forecast(self, rates: Floats) -> None:
        self.rates, self.best = rates.tolist(), float(rates.max())
        self._due = self.rounds + min(max(self.rounds, 1), _FORECAST_ROUNDS)

    def restart(self) -> None:
        """The context has changed."""
        self.rounds = self.uses = self._due = 0
        self.stands = False

    def collapsed(self, arm: int, trust: float) -> None:
        """The law goes on without a plan hardly tried, but is void when a familiar one failed."""
        if trust >= _FAMILIAR:
            self._void(self.rates.index(self.best))
        elif left := self.law.among([plan != arm for plan in range(len(self.rates))]):
            self.law = left
        else:
            self.uses, self.stands = 0, False

    def soared(self, arm: int) -> None:
        """The law is void: a plan does far better than any was expected to."""
        self._void(arm)

    def _void(self, instead: int) -> None:
        """A new law is due; until there is time for it, one plan plays."""
        self.uses, self.law = 0, Law.only(instead, len(self.rates))


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
                self.ranking.collapsed(self.arm, self.trust)
        elif self.ranking and not self.left and self._soared():
            self.ranking.soared(self.arm)

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
