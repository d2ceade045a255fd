"""On-the-fly adaptation as a drop-in: Liu, Park and Shen, ACL 2025, long paper 482."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adaspec.baselines.ladder import Ladder, Pull, WindowRule, certain, pairs
from adaspec.costs import CostModel
from adaspec.outcome import RoundOutcome
from adaspec.plan import Context, PlanSpace
from adaspec.policy import Policy
from adaspec.stored import each, named, number, record, row, text, together
from adaspec.theory import Floats


def _best_window(windows: Sequence[int], alpha: float, draft: float, verify: float) -> int:
    """The window with the most (1 - alpha^(window + 1)) / (1 - alpha) / (window draft + verify), alpha below 1."""
    return max(windows, key=lambda window: (1.0 - alpha ** (window + 1)) / (1.0 - alpha) / (window * draft + verify))


_WINDOW = number(1, whole=True)
_COUNT, _SECONDS = number(0, whole=True), number(0.0)
_PULLS = each(
    together(row(_COUNT, _COUNT, _SECONDS, _SECONDS), lambda pull: pull[2] + pull[3] > 0.0, "passes take some seconds")
)


class _History:
    """The last ``memory`` pulls: accepted, rejected, seconds per pass of drafter and target."""

    def __init__(self, memory: int) -> None:
        if memory < 1:
            raise ValueError(f"at least 1 round is kept, got {memory}")
        self.pulls: deque[tuple[int, int, float, float]] = deque(maxlen=memory)

    def add(self, pull: Pull) -> None:
        if pull.draft_seconds is not None and pull.verify_seconds is not None:
            self.pulls.append((pull.accepted, pull.rejected, pull.draft_seconds, pull.verify_seconds))

    def window(self, windows: Sequence[int]) -> int | None:
        """The best window by acceptance and latency of the history; None while there is none."""
        if not self.pulls:
            return None
        accepted, rejected, draft, verify = (sum(column) for column in zip(*self.pulls))
        alpha = accepted / max(accepted + rejected, 1)
        return _best_window(windows, min(alpha, 0.999), draft, verify)


class MaximumLikelihoodWindow(WindowRule):
    """The best window under the acceptance that makes the last rounds likeliest, at the latencies they showed.

    With every draft ending at its first rejection the likelihood peaks at accepted / (accepted + rejected); one
    acceptance for all positions and one latency for every window of the target (the paper's model) leave the objective
    (1 - alpha^(window + 1)) / (1 - alpha) / (window c + 1) in closed form; it is maximised over the windows there are.

    Args:
        drafter: see ``WindowRule``.
        start: see ``WindowRule``.
        memory: h, the rounds that count.
    """

    def __init__(self, drafter: str | None = None, start: int = 5, memory: int = 32) -> None:
        super().__init__(drafter, start)
        self._history = _History(memory)

    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        return self._history.window(ladder.windows) or self._start

    def _learn(self, pull: Pull) -> None:
        self._history.add(pull)

    def state_dict(self) -> dict[str, Any]:
        return {"pulls": [list(pull) for pull in self._history.pulls]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        record(pulls=_PULLS)(state, "")
        self._history.pulls.clear()
        self._history.pulls.extend(tuple(pull) for pull in state["pulls"])


class StateMachine(WindowRule):
    """A finite-state window: one state up after a wholly accepted draft, one down after a rejection.

    The states are the windows that the space has.
    """

    def __init__(self, drafter: str | None = None, start: int = 5) -> None:
        super().__init__(drafter, start)
        self._now = start

    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        return self._now

    def _learn(self, pull: Pull) -> None:
        assert self._ladder is not None
        self._now = _step(self._ladder.windows, self._ladder.fit(self._now), pull)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        record(window=_WINDOW)(state, "")
        self._now = int(state["window"])


def _step(windows: Sequence[int], now: int, pull: Pull) -> int:
    at = windows.index(now) + (1 if pull.rejected == 0 else -1)
    return windows[min(max(at, 0), len(windows) - 1)]


class CachedStateMachine(WindowRule):
    """A finite-state window with a cache: one state per recent history, as a two-level branch predictor keeps it.

    The history is whether the last ``bits`` drafts were wholly accepted; the state that was last in force behind the
    same history is taken up again.

    Args:
        drafter: see ``WindowRule``.
        start: see ``WindowRule``.
        bits: drafts in the history.
    """

    def __init__(self, drafter: str | None = None, start: int = 5, bits: int = 3) -> None:
        super().__init__(drafter, start)
        self._bits, self._history = bits, ""
        self._states: dict[str, int] = {}

    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        return self._states.get(self._history, self._start)

    def _learn(self, pull: Pull) -> None:
        assert self._ladder is not None
        now = self._ladder.fit(self._states.get(self._history, self._start))
        self._states[self._history] = _step(self._ladder.windows, now, pull)
        self._history = (self._history + "01"[pull.rejected == 0])[-self._bits :]

    def state_dict(self) -> dict[str, Any]:
        return {"history": self._history, "states": dict(self._states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        record(history=text, states=named(_WINDOW))(state, "")
        self._history = str(state["history"])
        self._states = {str(key): int(window) for key, window in state["states"].items()}


class QLearning(WindowRule):
    """Tabular Q-learning: the state is the window played and the share of it accepted, the action is the next window.

    The reward is the tokens per second of the hold over the best that was seen.

    Args:
        drafter: see ``WindowRule``.
        start: see ``WindowRule``.
        epsilon: the share of random actions.
        learning_rate: step towards the new estimate.
        discount: weight of what comes after.
    """

    def __init__(
        self,
        drafter: str | None = None,
        start: int = 5,
        epsilon: float = 0.1,
        learning_rate: float = 0.2,
        discount: float = 0.5,
    ) -> None:
        super().__init__(drafter, start)
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon is a probability, got {epsilon}")
        self._epsilon, self._learning_rate, self._discount = epsilon, learning_rate, discount
        self._state, self._best = "", 0.0
        self._values: dict[str, dict[int, float]] = {}  # state -> window -> Q

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        ladder = self._on(costs.space)
        law = (1.0 - self._epsilon) * super().probabilities(costs, context, rng)
        for window in ladder.windows:
            law[ladder.arm(window)] += self._epsilon / len(ladder.windows)
        return law

    def _window(self, ladder: Ladder, costs: CostModel, context: Context, rng: np.random.Generator) -> float:
        known = self._values.get(self._state, {})
        return max(known, key=known.__getitem__) if known else self._start

    def _learn(self, pull: Pull) -> None:
        rate = pull.tokens / pull.seconds
        self._best = max(self._best, rate)
        after = f"{pull.window}:{4 * pull.accepted // max(pull.drafted, 1)}"
        goal = rate / self._best + self._discount * max(self._values.get(after, {0: 0.0}).values())
        values = self._values.setdefault(self._state, {})
        old = values.get(pull.window, goal)
        values[pull.window] = old + self._learning_rate * (goal - old)
        self._state = after

    def state_dict(self) -> dict[str, Any]:
        values = {state: {str(w): value for w, value in known.items()} for state, known in self._values.items()}
        return {"state": self._state, "best": self._best, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = together(named(number(), numbered=True), bool, "a state has a value")
        record(state=text, best=number(0.0), values=named(values))(state, "")
        self._state, self._best = str(state["state"]), float(state["best"])
        self._values = {key: {int(w): q for w, q in known.items()} for key, known in state["values"].items()}


class DrafterByPrompt(Policy):
    """The drafter by a linear model on features of the prompt, the window by maximum likelihood.

    Per drafter a ridge regression of tokens per second on the features; every drafter is tried for a few holds first.
    The features are what a context holds: a constant, the logarithm of the length, and one of a few columns that the
    tag is spread over.

    Args:
        start: window of a drafter's first holds.
        trials: holds of each drafter before the regression chooses.
        memory: rounds that count for the window.
        columns: tags are told apart by this many columns.
    """

    def __init__(self, start: int = 5, trials: int = 3, memory: int = 32, columns: int = 8) -> None:
        if trials < 1 or columns < 1:
            raise ValueError(f"at least 1 trial and 1 column are needed, got {trials} and {columns}")
        self._start, self._trials, self._memory, self._columns = start, trials, memory, columns
        self._space: PlanSpace | None = None
        self._ladders: dict[str, Ladder] = {}
        self._histories: dict[str, _History] = {}
        self._moments: dict[str, tuple[Floats, Floats]] = {}  # drafter -> X'X + ridge, X'y
        self._slopes: dict[str, Floats] = {}  # their solutions, as far as they were asked for
        self._features = np.zeros(2 + columns)

    def probabilities(self, costs: CostModel, context: Context, rng: np.random.Generator) -> Floats:
        if self._space is not costs.space:
            self._space = costs.space
            self._ladders = {drafter: Ladder(costs.space, drafter) for drafter in pairs(costs.space)}
        if not self._ladders:
            return certain(0, len(costs.space))
        self._features = self._of(context)
        drafter = max(self._ladders, key=self._value)
        history, ladder = self._histories.get(drafter), self._ladders[drafter]
        window = history.window(ladder.windows) if history else None
        return certain(ladder.arm(window or self._start), len(costs.space))

    def _of(self, context: Context) -> Floats:
        features = np.zeros(2 + self._columns)
        features[0], features[1] = 1.0, np.log1p(context.seq_len) / 8.0
        features[2 + sum(context.tag.encode()) % self._columns] = 1.0
        return features

    def _value(self, drafter: str) -> float:
        """Predicted tokens per second; endless for a drafter whose trials are not over."""
        if drafter not in self._moments or len(self._histories[drafter].pulls) < self._trials:
            return float("inf")
        if drafter not in self._slopes:
            moments, sums = self._moments[drafter]
            self._slopes[drafter] = np.asarray(np.linalg.solve(moments, sums), dtype=np.float64)
        return float(self._features @ self._slopes[drafter])

    def observe(self, arm: int, propensity: float, rounds: Sequence[RoundOutcome]) -> None:
        plan = self._space[arm] if self._space is not None and arm < len(self._space) else None
        if plan is None or plan.depth != 2 or not rounds:
            return
        pull, drafter = Pull.of(plan.windows[0], rounds), plan.models[1]
        history = self._histories.setdefault(drafter, _History(self._memory))
        size = len(self._features)
        moments, sums = self._moments.get(drafter, (np.eye(size) * 1e-3, np.zeros(size)))
        row = self._features
        self._moments[drafter] = (moments + np.outer(row, row), sums + row * pull.tokens / pull.seconds)
        self._slopes.pop(drafter, None)
        history.add(pull)

    def state_dict(self) -> dict[str, Any]:
        return {
            "pulls": {name: [list(pull) for pull in own.pulls] for name, own in self._histories.items()},
            "moments": {name: [xx.tolist(), xy.tolist()] for name, (xx, xy) in self._moments.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check(state)
        self._histories = {name: _History(self._memory) for name in state["pulls"]}
        for name, pulls in state["pulls"].items():
            self._histories[name].pulls.extend(tuple(pull) for pull in pulls)
        self._moments = {name: (np.array(xx), np.array(xy)) for name, (xx, xy) in state["moments"].items()}
        self._slopes = {}

    def _check(self, state: Mapping[str, Any]) -> None:
        """Refuses moments of other features than these, or such as no features have."""
        sums = row(*[number()] * len(self._features))
        moments = together(
            row(row(*[sums] * len(self._features)), sums),
            lambda kept: float(np.linalg.eigvalsh(np.array(kept[0])).min()) > 0.0,
            "moments are positive definite",
        )
        law = record(pulls=named(_PULLS), moments=named(moments))
        together(law, lambda kept: kept["moments"].keys() <= kept["pulls"].keys(), "moments come from pulls")(state, "")
