"""The controller: hands out a plan before each round, learns from what the round brought."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaspec.costs import CostModel
from adaspec.outcome import Decision, Pass, RoundOutcome
from adaspec.plan import Context, Plan, PlanSpace
from adaspec.policy import Policy, ThompsonSampling

_FORMAT, _VERSION = "adaspec.controller", 1
_TRUSTED_ROUNDS = 32  # a plan played this often is doubted half as easily: a few bad rounds are chance
_OPEN_TICKETS = 4096  # older unanswered tickets are given up: their requests were aborted


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``Controller.table``. ``share``: of all rounds; ``measured``: tokens/s, None until played."""

    plan: Plan
    rounds: int
    share: float
    forecast: float
    measured: float | None


@dataclass(slots=True)
class _Hold:
    """One pull of the policy: a plan that is kept for some rounds, and what they have brought so far."""

    arm: int
    propensity: float
    floor: float  # tokens per second below which it ends early
    left: int  # rounds still to hand out
    open: int = 0  # tickets handed out and not back yet
    rounds: list[RoundOutcome] = field(default_factory=list)

    def add(self, outcome: RoundOutcome) -> None:
        self.open -= 1
        self.rounds.append(outcome)

    def collapsed(self) -> bool:
        """Whether the rate, catch-up aside, is below the floor."""
        seconds = sum(max(outcome.seconds - outcome.catch_up_seconds, 0.0) for outcome in self.rounds)
        return sum(outcome.tokens for outcome in self.rounds) < self.floor * seconds


class Controller:
    """Chooses a plan before every round of decoding and learns from the rounds' outcomes.

    A chosen plan is held for a few rounds of its context (batch size and tag), since a switch costs catch-up and a
    ranking costs time; a hold is one pull of the policy. It ends early when its measured rate collapses against the
    forecast. Outcomes may come back late, in any order, or never. All methods may be called from several threads.

    Example:
        >>> space = PlanSpace.grid("target", ["draft"], [2, 4])
        >>> controller = Controller(space)
        >>> decision = controller.choose(Context())
        >>> controller.observe(decision, RoundOutcome(tokens=1, seconds=0.03))

    Args:
        space: the plans; plain decoding is always among them.
        policy: how to pick; Thompson sampling by default.
        costs: what is already believed, over the same space; nothing by default.
        hold: rounds per pull.
        collapse: a hold of a new plan ends early below this share of the forecast rate (of a plan that was played
            often: below less of it); 0 never ends one early.
        seed: of the policy's draws.

    Raises:
        ValueError: hold below 1, collapse outside [0, 1), or costs over another space.
    """

    def __init__(
        self,
        space: PlanSpace,
        policy: Policy | None = None,
        costs: CostModel | None = None,
        hold: int = 4,
        collapse: float = 0.7,
        seed: int = 0,
    ) -> None:
        if hold < 1:
            raise ValueError(f"a plan is held for at least 1 round, got {hold}")
        if not 0.0 <= collapse < 1.0:
            raise ValueError(f"collapse lies in [0, 1), got {collapse}")
        if costs is not None and tuple(costs.space) != tuple(space):
            raise ValueError(f"the costs are over another space: {costs.space!r}, not {space!r}")
        self.space = space
        self._policy = policy or ThompsonSampling()
        self._costs = costs or CostModel(space)
        self._hold, self._collapse = hold, collapse
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._holds: dict[tuple[int, str], _Hold] = {}
        self._open: dict[int, tuple[Decision, _Hold]] = {}
        self._next_id = 0
        self._context = Context()
        self._rounds = np.zeros(len(space), dtype=np.int64)
        self._tokens, self._seconds = np.zeros((2, len(space)))

    @property
    def costs(self) -> CostModel:
        """What is believed; read it between rounds, it is not locked."""
        return self._costs

    def profile(self, passes: Iterable[Pass]) -> None:
        """Takes start-up measurements, so that the first choice already knows what a pass costs."""
        with self._lock:
            self._costs.profile(passes)

    def choose(self, context: Context) -> Decision:
        """The plan of the next round, as a ticket to hand back to ``observe``."""
        with self._lock:
            self._context = context
            key = (context.batch_size, context.tag)
            hold = self._holds.get(key)
            if hold is None or hold.left == 0:
                hold = self._holds[key] = self._pull(context)
            hold.left -= 1
            hold.open += 1
            decision = Decision(self.space[hold.arm], context, hold.propensity, self._next_id)
            self._next_id += 1
            self._open[decision.id] = (decision, hold)
            if len(self._open) > _OPEN_TICKETS:
                self._give_up(next(iter(self._open)))
            return decision

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        """Learns from a round.

        Raises:
            ValueError: a ticket that this controller did not hand out or already got back, or an outcome that the
                cost model refuses.
        """
        with self._lock:
            known, hold = self._open.get(decision.id, (None, None))
            if hold is None or known != decision:
                raise ValueError(f"decision {decision.id} ({decision.plan}) is not open: unknown, or observed before")
            self._costs.observe(decision, outcome)
            del self._open[decision.id]
            hold.add(outcome)
            self._rounds[hold.arm] += 1
            self._tokens[hold.arm] += outcome.tokens
            self._seconds[hold.arm] += outcome.seconds
            if hold.left and hold.collapsed():
                hold.left = 0
            self._settle(hold)

    def table(self, context: Context | None = None) -> list[Row]:
        """One row per plan, best forecast first; the context defaults to that of the latest choice."""
        with self._lock:
            forecast = self._costs.rates(context or self._context)
            total = max(int(self._rounds.sum()), 1)
            return [self._row(int(arm), float(forecast[arm]), total) for arm in np.argsort(-forecast, kind="stable")]

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as a versioned JSON-able dict; open tickets and holds are not kept."""
        with self._lock:
            columns = (self._rounds.tolist(), self._tokens.tolist(), self._seconds.tolist())
            totals = {str(plan): list(sums) for plan, *sums in zip(self.space, *columns) if sums[0]}
            return {
                "format": _FORMAT,
                "version": _VERSION,
                "target": self.space.target,
                "totals": totals,
                "policy": {"name": type(self._policy).__name__, "state": self._policy.state_dict()},
                "costs": self._costs.state_dict(),
                "rng": self._rng.bit_generator.state,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off; plans that only one of the two spaces holds are passed over.

        A policy's own state is taken by a policy of the same class only. Tickets still open are void.

        Raises:
            ValueError: a state of something else, of a newer version, or of another target.
        """
        _check(state, self.space.target)
        with self._lock:
            self._costs.load_state_dict(state["costs"])
            if state["policy"]["name"] == type(self._policy).__name__:
                self._policy.load_state_dict(state["policy"]["state"])
            self._rng.bit_generator.state = state["rng"]
            self._holds, self._open = {}, {}
            sums = [state["totals"].get(str(plan), (0, 0.0, 0.0)) for plan in self.space]
            self._rounds = np.array([row[0] for row in sums], dtype=np.int64)
            self._tokens, self._seconds = np.array([row[1:] for row in sums], dtype=np.float64).T

    def _pull(self, context: Context) -> _Hold:
        law = self._policy.probabilities(self._costs, context, self._rng)
        arm = int(self._rng.choice(len(law), p=law))
        doubt = self._collapse / (1.0 + self._rounds[arm] / _TRUSTED_ROUNDS)
        return _Hold(arm, float(law[arm]), float(doubt * self._costs.rates(context)[arm]), self._hold)

    def _give_up(self, ticket: int) -> None:
        _, hold = self._open.pop(ticket)
        hold.open -= 1
        self._settle(hold)

    def _settle(self, hold: _Hold) -> None:
        """Reports a hold to the policy once all its rounds are handed out and back."""
        if hold.rounds and not (hold.left or hold.open):
            self._policy.observe(hold.arm, hold.propensity, hold.rounds)

    def _row(self, arm: int, forecast: float, total: int) -> Row:
        rounds = int(self._rounds[arm])
        measured = float(self._tokens[arm] / self._seconds[arm]) if rounds else None
        return Row(self.space[arm], rounds, rounds / total, forecast, measured)


def _check(state: Mapping[str, Any], target: str) -> None:
    if state.get("format") != _FORMAT:
        raise ValueError(f"a controller's state has format {_FORMAT!r}, got {state.get('format')!r}")
    if state.get("version") != _VERSION:
        raise ValueError(f"this adaspec reads version {_VERSION} of a controller's state, got {state.get('version')!r}")
    if state.get("target") != target:
        raise ValueError(f"the state is of target {state.get('target')!r}, the space is of {target!r}")
