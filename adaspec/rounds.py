"""What whole rounds brought: per plan and context, and what they spent outside their passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaspec.plan import PlanSpace
from adaspec.priors import CostPriors
from adaspec.theory import Floats

_CONTEXTS = 256  # contexts kept apart; the one unused for longest is given up
_POOLED = 4.0  # weight, in rounds, of all depths' overhead in that of one depth
_NEVER = 1e-12  # tokens or seconds that count as none


class Rounds:
    """Discounted tokens per row, seconds and rounds of every plan, per context (bucket of batch sizes, tag).

    Seconds outside the passes are kept per bucket and depth. Older rounds fade twice, as the acceptance does.
    """

    def __init__(self, space: PlanSpace, priors: CostPriors) -> None:
        self._space, self._priors = space, priors
        self._depths = np.array([plan.depth for plan in space])
        self._own: dict[tuple[int, str], _Sums] = {}
        self._overhead: dict[int, list[list[float]]] = {}  # per bucket: seconds and rounds by depth
        self._clock = 0

    def forget(self, rounds: int) -> None:
        """Lets rounds pass."""
        self._clock += rounds

    def add(self, context: tuple[int, str], arm: int, tokens: float, seconds: float, rounds: int) -> None:
        """Adds some rounds of one plan: tokens per row and seconds, summed."""
        sums = self._at(context).table
        sums[:, arm] = sums[:, arm] * self._priors.round_keep**rounds + (tokens, seconds, rounds)

    def add_overhead(self, bucket: int, depth: int, seconds: float, rounds: int) -> None:
        keep = self._priors.round_keep**rounds
        for sums, new in zip(self._outside(bucket), (seconds, rounds)):
            sums[depth] = sums[depth] * keep + new

    def doubt(self, arms: NDArray[np.bool_], tag: str) -> None:
        """Forgets what some plans ([plans]) brought under a tag."""
        for (_, other), own in self._own.items():
            if other == tag:
                own.table[:, arms] = 0.0

    def measured(self, context: tuple[int, str], arm: int) -> tuple[float, float, float]:
        """Tokens per row, seconds and rounds of one plan; zeros when it was not played."""
        own = self._own.get(context)
        tokens, seconds, rounds = own.table[:, arm].tolist() if own else (0.0, 0.0, 0.0)
        return tokens, seconds, rounds

    def residual(self, rates: Floats, context: tuple[int, str]) -> tuple[Floats, Floats]:
        """Log factor on ``rates`` (tokens per second and row; [..., plans]) from the plans' rounds, its spread [plans].

        The factor is log(sum of tokens / sum of seconds / forecast), shrunk by rounds / (rounds + strength).
        """
        tokens, seconds, rounds = self._at(context).table
        strength = self._priors.residual_strength
        trust = rounds / (rounds + strength)
        spread = self._priors.residual_spread * np.sqrt(1.0 - trust)
        spread[0] = 0.0  # plain decoding is one pass: its forecast is no theorem
        speed = np.log(np.maximum(tokens, 0.1 * rounds) + _NEVER) - np.log(seconds + _NEVER)
        factor: Floats = trust * (speed - np.log(rates))
        return factor, spread

    def halving(self, context: tuple[int, str]) -> Floats:
        """Further rounds of each plan after which half of what its residual leaves open is gone; [plans]."""
        rounds: Floats = self._at(context).table[2] + self._priors.residual_strength
        return rounds

    def overheads(self, bucket: int) -> Floats:
        """Seconds of a round outside its passes; [plans]. A depth not played takes the mean of the rest."""
        spent, rounds = self._outside(bucket)
        pooled = sum(spent) / max(sum(rounds), 1.0)
        by_depth = [(one + _POOLED * pooled) / (count + _POOLED) for one, count in zip(spent, rounds)]
        seconds: Floats = np.array(by_depth).take(self._depths)
        return seconds

    def _at(self, context: tuple[int, str]) -> _Sums:
        own = self._own.pop(context, None) or _Sums(len(self._space), self._clock)
        self._own[context] = own
        if own.clock < self._clock:
            own.table *= self._priors.idle_keep ** (self._clock - own.clock)
            own.clock = self._clock
        if len(self._own) > _CONTEXTS:
            self._own.pop(next(iter(self._own)))
        return own

    def _outside(self, bucket: int) -> list[list[float]]:
        if bucket not in self._overhead:
            self._overhead[bucket] = [[0.0] * (int(self._depths.max()) + 1) for _ in range(2)]
        return self._overhead[bucket]

    def state_dict(self) -> dict[str, Any]:
        """Sums by bucket, tag and plan; all numbers add up over replicas."""
        contexts: dict[str, dict[str, Any]] = {}
        for bucket, tag in list(self._own):
            table = self._at((bucket, tag)).table
            plans = {str(plan): sums for plan, sums in zip(self._space, table.T.tolist()) if sums[2] > 0.0}
            contexts.setdefault(str(bucket), {})[tag] = plans
        return {
            "contexts": contexts,
            "overhead": {str(bucket): [list(one) for one in sums] for bucket, sums in self._overhead.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._own, self._overhead, self._clock = {}, {}, 0
        for bucket, tags in state["contexts"].items():
            for tag, plans in tags.items():
                self._at((int(bucket), tag)).read(plans, self._space)
        for bucket, (seconds, rounds) in state["overhead"].items():
            for sums, kept in zip(self._outside(int(bucket)), (seconds, rounds)):
                size = min(len(kept), len(sums))
                sums[:size] = kept[:size]


class _Sums:
    """Discounted tokens per row, seconds and rounds; [3, plans]."""

    __slots__ = ("clock", "table")

    def __init__(self, plans: int, clock: int) -> None:
        self.table = np.zeros((3, plans))
        self.clock = clock

    def read(self, sums: Mapping[str, Any], plans: Iterable[object]) -> None:
        for arm, plan in enumerate(plans):
            self.table[:, arm] = sums.get(str(plan), (0.0, 0.0, 0.0))
