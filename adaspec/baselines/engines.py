"""The rules that ship in engines: Hugging Face's heuristic, SGLang's tiers by EMA and by throughput."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaspec.baselines.ladder import Ladder, Pull, WindowRule
from adaspec.costs import CostModel
from adaspec.outcome import RoundOutcome
from adaspec.plan import Context
from adaspec.stored import each, number, record, row, together


class HuggingFaceHeuristic(WindowRule):
    """The window grows by 2 when a whole draft was accepted and shrinks by 1, not below 1, when not.

    ``num_assistant_tokens_schedule="heuristic"`` of transformers' assisted generation; see ``WindowRule`` for the
    arguments. The window itself moves freely and is played as the nearest one below it that the space has.
    """

    def __init__(self, drafter: str | None = None, start: int = 5) -> None:
        super().__init__(drafter, start)
        self._now = float(start)

    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        return min(self._now, ladder.windows[-1])

    def _learn(self, pull: Pull) -> None:
        assert self._ladder is not None
        grown = self._now + 2.0 if pull.rejected == 0 else self._now - 1.0
        self._now = min(max(grown, 1.0), self._ladder.windows[-1] + 2.0)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        record(window=number(1.0))(state, "")
        self._now = float(state["window"])


class EmaTiers(WindowRule):
    """Tiers by a smoothed accepted length, with hysteresis: SGLang's adaptive speculative steps (its documentation).

    An exponential moving average of the accepted drafts per verification; after a warm-up, every few rounds, the tier
    follows round(average) + 1 and moves only when the average is beyond the middle of two tiers by a margin.

    Args:
        drafter: see ``WindowRule``.
        start: see ``WindowRule``.
        smoothing: weight of the newest round.
        warmup: rounds before the first move.
        interval: rounds between moves.
        down: added to the threshold for moving down (below 0: later).
        up: added to the threshold for moving up (above 0: later).
    """

    def __init__(
        self,
        drafter: str | None = None,
        start: int = 5,
        smoothing: float = 0.2,
        warmup: int = 10,
        interval: int = 5,
        down: float = -0.25,
        up: float = 0.0,
    ) -> None:
        super().__init__(drafter, start)
        if not 0.0 < smoothing <= 1.0 or interval < 1:
            raise ValueError(f"smoothing lies in (0, 1] and the interval is at least 1, got {smoothing} and {interval}")
        self._smoothing, self._warmup, self._interval, self._down, self._up = smoothing, warmup, interval, down, up
        self._now, self._average, self._rounds = start, float(start), 0

    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        return self._now

    def _learn(self, pull: Pull) -> None:
        length = pull.accepted / max(pull.verifications, 1)
        self._average = length if self._rounds == 0 else self._average + self._smoothing * (length - self._average)
        self._rounds += 1
        if self._rounds > self._warmup and self._rounds % self._interval == 0:
            self._move()

    def _move(self) -> None:
        """One tier up or down; the tier below is right while average + 1 stays under its own window."""
        assert self._ladder is not None
        windows = self._ladder.windows
        at = windows.index(self._ladder.fit(self._now))
        if at + 1 < len(windows) and self._average >= windows[at] - 0.5 + self._up:
            self._now = windows[at + 1]
        elif at > 0 and self._average < windows[at - 1] - 0.5 + self._down:
            self._now = windows[at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._now, "average": self._average, "rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        record(window=number(1, whole=True), average=number(0.0), rounds=number(0, whole=True))(state, "")
        self._now, self._average, self._rounds = int(state["window"]), float(state["average"]), int(state["rounds"])


_COUNTS = each(number(0, whole=True))
_RECENT = record(
    recent=each(
        together(
            row(_COUNTS, _COUNTS),
            lambda kept: len(kept[0]) == len(kept[1]) and sum(kept[0][:1]) > 0,
            "two counts per position, the first is asked for",
        )
    )
)


class ThroughputAware(WindowRule):
    """The window with the most (1 + sum_k p[k]) / cost: SGLang's throughput-aware rule (its pull request 28045).

    p[k], the share of verifications that accepted at least k drafts, is taken over the last rounds; the cost of a
    window is what the start-up profile says. It does not explore: beyond the longest window of the last rounds p goes
    on geometrically, which is kinder than leaving it at 0.

    Args:
        drafter: see ``WindowRule``.
        start: see ``WindowRule``; played until ``memory`` has begun to fill.
        memory: rounds in the window of p.
    """

    def __init__(self, drafter: str | None = None, start: int = 5, memory: int = 64) -> None:
        super().__init__(drafter, start)
        if memory < 1:
            raise ValueError(f"at least 1 round is kept, got {memory}")
        self._memory = memory
        self._recent: deque[tuple[list[int], list[int]]] = deque()  # (asked, accepted) per position
        self._asked: list[int] = []  # their sums
        self._accepted: list[int] = []
        self._cost: dict[int, dict[int, float]] = {}  # batch size -> window -> profiled seconds

    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        if not self._recent:
            return self._start
        chances, costs_of = self._chances(ladder.windows[-1]), self._profiled(ladder, costs, context)
        return max(ladder.windows, key=lambda window: (1.0 + sum(chances[:window])) / costs_of[window])

    def _chances(self, longest: int) -> list[float]:
        chances = [kept / asked for kept, asked in zip(self._accepted, self._asked) if asked]
        ratio = chances[-1] / chances[-2] if len(chances) > 1 and chances[-2] > 0.0 else chances[-1]
        while len(chances) < longest:
            chances.append(chances[-1] * ratio)
        return chances

    def _profiled(self, ladder: Ladder, costs: CostModel, context: Context) -> dict[int, float]:
        if context.batch_size not in self._cost:
            draft = costs.seconds(ladder.drafter, 1, context)
            self._cost[context.batch_size] = {
                window: costs.seconds(costs.space.target, window + 1, context) + window * draft
                for window in ladder.windows
            }
        return self._cost[context.batch_size]

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:
        if self._ladder is not None and self._ladder.window(arm):
            for outcome in rounds:
                if outcome.edges and sum(outcome.edges[0].offered):
                    edge = outcome.edges[0]
                    asked = edge.asked or (edge.verifications,) * len(edge.reached)
                    self._remember(list(asked), list(edge.accepted))

    def _remember(self, asked: list[int], accepted: list[int]) -> None:
        self._recent.append((asked, accepted))
        self._add(asked, accepted, 1)
        if len(self._recent) > self._memory:
            self._add(*self._recent.popleft(), -1)

    def _add(self, asked: list[int], accepted: list[int], sign: int) -> None:
        missing = [0] * (len(asked) - len(self._asked))
        self._asked += missing
        self._accepted += missing
        for position, (new_asked, new_accepted) in enumerate(zip(asked, accepted)):
            self._asked[position] += sign * new_asked
            self._accepted[position] += sign * new_accepted

    def _learn(self, pull: Pull) -> None:
        """Nothing: ``observe`` needs the positions apart."""

    def state_dict(self) -> dict[str, Any]:
        return {"recent": [[list(asked), list(accepted)] for asked, accepted in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _RECENT(state, "")
        self._recent.clear()
        self._asked, self._accepted = [], []
        for asked, accepted in state["recent"]:
            self._remember(list(asked), list(accepted))
