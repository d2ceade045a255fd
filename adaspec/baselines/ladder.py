"""What rules for one window share: the plans of one drafter by window, and what a hold showed of its top pair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaspec.costs import CostModel
from adaspec.outcome import EdgeOutcome, RoundOutcome
from adaspec.plan import Context, PlanSpace
from adaspec.policy import Policy
from adaspec.theory import Floats


def certain(arm: int, plans: int) -> Floats:
    """The law that always plays ``arm``; [plans]."""
    law = np.zeros(plans)
    law[arm] = 1.0
    return law


def pairs(space: PlanSpace) -> dict[str, dict[int, int]]:
    """Per drafter right beneath the target its arms by window, both in order; early stops are left out."""
    found: dict[str, dict[int, int]] = {}
    for arm, plan in enumerate(space):
        if plan.depth == 2 and not plan.stop:
            found.setdefault(plan.models[1], {})[plan.windows[0]] = arm
    return {drafter: dict(sorted(arms.items())) for drafter, arms in found.items()}


class Ladder:
    """The windows of one drafter right beneath the target, ascending, and their arms.

    Raises:
        ValueError: a drafter that no plan of two models has.
    """

    def __init__(self, space: PlanSpace, drafter: str | None = None) -> None:
        known = pairs(space)
        if drafter is not None and drafter not in known:
            raise ValueError(f"no plan of two models has drafter {drafter!r}; known are {', '.join(known) or 'none'}")
        self.space = space
        self.drafter = drafter or next(iter(known), "")
        self._arms = known.get(self.drafter, {0: 0})
        self.windows = tuple(self._arms)
        self._window = {arm: window for window, arm in self._arms.items()}

    def fit(self, window: float) -> int:
        """The longest window of the ladder that is not above ``window``, or the shortest."""
        return max((known for known in self.windows if known <= window), default=self.windows[0])

    def arm(self, window: float) -> int:
        return self._arms[self.fit(window)]

    def window(self, arm: int) -> int | None:
        """The window that an arm plays, None for a plan that is not on the ladder."""
        return self._window.get(arm)


@dataclass(frozen=True, slots=True)
class Pull:
    """The top pair over the rounds of a hold, summed over rounds and rows.

    ``drafted``: tokens offered; ``accepted``: of those; ``full``: verifications with a draft, all of it accepted;
    ``rejected``: verifications that ended at a wrong token. ``draft_seconds``: one pass of the drafter;
    ``verify_seconds``: one pass of the target; None where the engine does not tell.
    """

    window: int
    verifications: int
    drafted: int
    accepted: int
    rejected: int
    full: int
    tokens: int
    seconds: float
    draft_seconds: float | None
    verify_seconds: float | None

    @classmethod
    def of(cls, window: int, rounds: Sequence[RoundOutcome]) -> Pull:
        edges = [outcome.edges[0] for outcome in rounds if outcome.edges]
        accepted = sum(sum(edge.accepted) for edge in edges)
        rejected = sum(sum(edge.offered) - sum(edge.accepted) for edge in edges)
        return cls(
            window,
            sum(edge.verifications for edge in edges),
            sum(sum(edge.drafted or edge.offered) for edge in edges),
            accepted,
            rejected,
            sum(edge.offered[0] for edge in edges if edge.offered) - rejected,
            sum(outcome.tokens for outcome in rounds),
            sum(outcome.seconds for outcome in rounds),
            _pass_seconds(rounds, edges, drafting=True),
            _pass_seconds(rounds, edges, drafting=False),
        )


def _pass_seconds(rounds: Sequence[RoundOutcome], edges: Sequence[EdgeOutcome], *, drafting: bool) -> float | None:
    if not edges:
        return None
    model = edges[0].drafter if drafting else edges[0].verifier
    spent = [one.seconds for outcome in rounds for one in outcome.passes if one.model == model]
    if not spent:
        told = [edge.draft_seconds if drafting else edge.verify_seconds for edge in edges]
        steps = sum(max(sum(edge.asked) // max(edge.verifications, 1), 1) for edge in edges) if drafting else len(edges)
        known = [seconds for seconds in told if seconds is not None]
        return sum(known) / steps if known else None
    return sum(spent) / len(spent)


class WindowRule(Policy):
    """A rule that moves one window along the plans of one drafter, and never plays anything else.

    Args:
        drafter: whose window; the first of the space's pairs by default.
        start: the window to begin with; the nearest one below it that the space has.
    """

    def __init__(self, drafter: str | None = None, start: int = 5) -> None:
        if start < 1:
            raise ValueError(f"a window is at least 1 token, got {start}")
        self._drafter, self._start = drafter, start
        self._ladder: Ladder | None = None

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        ladder = self._on(costs.space)
        return certain(ladder.arm(self._window(ladder, costs, context, rng)), len(costs.space))

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:
        window = None if self._ladder is None else self._ladder.window(arm)
        if window:
            pull = Pull.of(window, rounds)
            if pull.drafted:  # a drafter that was silent has said nothing about its window
                self._learn(pull)

    def _on(self, space: PlanSpace) -> Ladder:
        if self._ladder is None or self._ladder.space is not space:
            self._ladder = Ladder(space, self._drafter)
        return self._ladder

    @abstractmethod
    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        """The window to play next."""

    @abstractmethod
    def _learn(self, pull: Pull) -> None:
        """Takes in a hold in which something was drafted."""
