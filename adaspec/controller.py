"""The controller: hands out a plan before each round, learns from what the round brought."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaspec.costs import CostModel
from adaspec.explanation import EdgePart, Explanation, PassPart
from adaspec.merging import added
from adaspec.outcome import Decision, Pass, RoundOutcome
from adaspec.plan import Context, Override, Plan, PlanSpace
from adaspec.policy import Policy, ThompsonSampling
from adaspec.theory import Floats

_FORMAT, _VERSION = "adaspec.controller", 2
_TRUSTED_ROUNDS = 32.0  # after this many rounds of a plan a few bad ones are half taken for chance
_PATIENT_ROUNDS = 16  # rounds of a context that earn its laws another use
_SOARED = 1.3  # share of the forecast from which a hold calls for a new law
_FORECAST_ROUNDS = 64  # rounds of a context after which the forecasts that holds are judged by are old
_OPEN_TICKETS = 4096  # older unanswered tickets are given up: their requests were aborted
_CONTEXTS = 256  # contexts whose plan is held; that of the one unused for longest is given up

_Key = tuple[int, str, Override | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``Controller.table``. ``share``: of all rounds; ``measured``: tokens/s, None until played."""

    plan: Plan
    rounds: int
    share: float
    forecast: float
    measured: float | None


@dataclass(slots=True)
class _Ranking:
    """What is thought of the plans in one context (bucket of batch sizes, tag), and how long that holds."""

    rounds: int = 0  # handed out so far
    uses: int = 0  # pulls for which ``law`` is still good
    law: Floats = field(default_factory=lambda: np.zeros(0))
    due: int = 0  # rounds after which ``rates`` are old
    rates: Floats = field(default_factory=lambda: np.zeros(0))  # forecast per row

    def drop(self, arm: int, familiar: bool) -> None:
        """After a collapse: the law goes on without an untried plan, but is void when a familiar one failed."""
        left = self.law.copy()
        left[arm] = 0.0
        total = float(left.sum())
        if familiar or not total:
            self.uses = 0
        else:
            self.law = left / total


@dataclass(slots=True)
class _Hold:
    """One pull of the policy: a plan that is kept for some rounds, and what they have brought so far."""

    arm: int
    propensity: float
    left: int  # rounds still to hand out
    rate: float = 0.0  # tokens per second forecast
    floor: float = 0.0  # those below which it ends early ...
    chance: float = 0.0  # ... less this share of them after the first round, shrinking with their root
    ranking: _Ranking | None = None  # what it was pulled from; None: a request asked for it
    open: int = 0  # tickets handed out and not back yet
    rounds: list[RoundOutcome] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0  # catch-up aside

    def add(self, outcome: RoundOutcome) -> None:
        self.open -= 1
        self.rounds.append(outcome)
        self.tokens += outcome.tokens
        self.seconds += max(outcome.seconds - outcome.catch_up_seconds, 0.0)

    def collapsed(self) -> bool:
        """Whether the rate, catch-up aside, is below the floor."""
        return self.tokens < self.floor * (1.0 - self.chance / math.sqrt(len(self.rounds))) * self.seconds

    def soared(self) -> bool:
        """Whether the rate, catch-up aside, is far above the forecast."""
        return self.tokens > _SOARED * self.rate * self.seconds


class Controller:
    """Chooses a plan before every round of decoding and learns from the rounds' outcomes.

    A chosen plan is held for a few rounds of its context (bucket of batch sizes and tag), since a switch costs catch-up
    and a ranking costs time; a hold is one pull of the policy. It ends early when its measured rate collapses against
    the forecast. Once a context has seen some rounds, a law of the policy serves several pulls. Outcomes may come back
    late, in any order, or never. A request may override the policy. All methods may be called from several threads.

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
        collapse: a hold ends early below this share of the forecast rate (of a plan that was played often: below less
            of it in the first rounds, which may be chance); 0 never ends one early.
        patience: pulls that a law of the policy serves at most, unless one of them collapses.
        seed: of the policy's draws.

    Raises:
        ValueError: hold or patience below 1, collapse outside [0, 1), or costs over another space.
    """

    def __init__(
        self,
        space: PlanSpace,
        policy: Policy | None = None,
        costs: CostModel | None = None,
        hold: int = 4,
        collapse: float = 0.7,
        patience: int = 4,
        seed: int = 0,
    ) -> None:
        if hold < 1:
            raise ValueError(f"a plan is held for at least 1 round, got {hold}")
        if patience < 1:
            raise ValueError(f"patience is at least 1, got {patience}")
        if not 0.0 <= collapse < 1.0:
            raise ValueError(f"collapse lies in [0, 1), got {collapse}")
        if costs is not None and tuple(costs.space) != tuple(space):
            raise ValueError(f"the costs are over another space: {costs.space!r}, not {space!r}")
        self.space = space
        self._policy = policy or ThompsonSampling()
        self._costs = costs or CostModel(space)
        self._hold, self._collapse, self._patience = hold, collapse, patience
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._holds: dict[_Key, _Hold] = {}
        self._rankings: dict[tuple[int, str], _Ranking] = {}
        self._open: dict[int, tuple[Decision, _Hold]] = {}
        self._next_id = 0
        self._pulls = 0
        self._context = Context()
        self._rounds = np.zeros(len(space), dtype=np.int64)
        self._tokens, self._seconds = np.zeros((2, len(space)))

    @property
    def costs(self) -> CostModel:
        """What is believed; read it between rounds, it is not locked."""
        return self._costs

    @property
    def pulls(self) -> int:
        """Plans pulled so far; each is held for some rounds."""
        return self._pulls

    def profile(self, passes: Iterable[Pass]) -> None:
        """Takes start-up measurements, so that the first choice already knows what a pass costs."""
        with self._lock:
            self._costs.profile(passes)

    def choose(self, context: Context, override: Override | None = None) -> Decision:
        """The plan of the next round, as a ticket to hand back to ``observe``.

        ``override``: what the request demands; the policy chooses among the plans that it leaves, and hears nothing of
        a pinned one.

        Raises:
            ValueError: a pinned plan that the space does not hold.
        """
        with self._lock:
            self._context = context
            key = (context.bucket, context.tag, override)
            hold = self._holds.get(key)
            if hold is None or hold.left == 0:
                hold = self._pull(context, override)
                self._pulls += 1
                self._keep(key, hold)
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
            changes = self._costs.changes
            self._costs.observe(decision, outcome)
            del self._open[decision.id]
            hold.add(outcome)
            self._rounds[hold.arm] += 1
            self._tokens[hold.arm] += outcome.tokens
            self._seconds[hold.arm] += outcome.seconds
            if hold.left and hold.collapsed():
                hold.left = 0
                if hold.ranking:
                    hold.ranking.drop(hold.arm, hold.chance >= 0.5)
            if hold.ranking and (self._costs.changes > changes or (not hold.left and hold.soared())):
                hold.ranking.uses = 0
            self._settle(hold)

    def table(self, context: Context | None = None) -> list[Row]:
        """One row per plan, best forecast first; the context defaults to that of the latest choice."""
        with self._lock:
            forecast = self._costs.rates(context or self._context)
            total = max(int(self._rounds.sum()), 1)
            return [self._row(int(arm), float(forecast[arm]), total) for arm in np.argsort(-forecast, kind="stable")]

    def explain(self, decision: Decision) -> Explanation:
        """What is believed now about the plan of a decision, part by part, and about the best other plan.

        Raises:
            ValueError: a plan that the space does not hold.
        """
        with self._lock:
            return self._explain(decision)

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
            self._holds, self._open, self._rankings = {}, {}, {}
            sums = [state["totals"].get(str(plan), (0, 0.0, 0.0)) for plan in self.space]
            self._rounds = np.array([row[0] for row in sums], dtype=np.int64)
            self._tokens, self._seconds = np.array([row[1:] for row in sums], dtype=np.float64).T

    @staticmethod
    def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state from those of several replicas of one target: their evidence adds up, each as recent as the other.

        Counts and totals are those of one stream of all rounds; so is what is discounted, but for the order. Of the
        policy's own state and of the random numbers the first replica's are kept.

        Raises:
            ValueError: no state, or one that ``load_state_dict`` refuses next to the first.
        """
        if not states:
            raise ValueError("there is no state to merge")
        for state in states:
            _check(state, states[0].get("target"))
        totals = added([state["totals"] for state in states])
        return {**states[0], "totals": totals, "costs": CostModel.merge([state["costs"] for state in states])}

    def _pull(self, context: Context, override: Override | None) -> _Hold:
        if override is not None and override.plan is not None:
            if override.plan not in self.space:
                raise ValueError(f"the space does not hold the pinned plan {override.plan}")
            return _Hold(self.space.arm(override.plan), 1.0, self._hold)
        ranking = self._ranking(context)
        ranking.uses -= 1
        ranking.rounds += self._hold
        law = ranking.law if override is None else self._restricted(ranking, override)
        steps = np.cumsum(law)
        arm = int(np.searchsorted(steps, self._rng.random() * steps[-1], side="right"))
        trust = float(self._rounds[arm] / (self._rounds[arm] + _TRUSTED_ROUNDS))
        rate = float(ranking.rates[arm]) * context.batch_size
        return _Hold(arm, float(law[arm]), self._hold, rate, self._collapse * rate, trust, ranking)

    def _ranking(self, context: Context) -> _Ranking:
        """The law and the forecasts of a context, renewed when they are used up."""
        key = (context.bucket, context.tag)
        known = self._rankings.pop(key, None) or _Ranking()
        self._rankings[key] = known
        if len(self._rankings) > _CONTEXTS:
            self._rankings.pop(next(iter(self._rankings)))
        if not known.uses:
            known.law = self._policy.probabilities(self._costs, context, self._rng)
            known.uses = min(self._patience, 1 + known.rounds // _PATIENT_ROUNDS)
        if known.rounds >= known.due:
            known.rates = self._costs.rates(context) / context.batch_size
            known.due = known.rounds + min(max(known.rounds, 1), _FORECAST_ROUNDS)
        return known

    def _restricted(self, ranking: _Ranking, override: Override) -> Floats:
        """The law over the plans that a request allows; the best of them by forecast where the law has none."""
        allowed = np.array([override.allows(plan) for plan in self.space])
        left: Floats = np.where(allowed, ranking.law, 0.0)
        if not left.any():
            left[np.where(allowed, ranking.rates, -1.0).argmax()] = 1.0
        left /= left.sum()
        return left

    def _keep(self, key: _Key, hold: _Hold) -> None:
        self._holds.pop(key, None)
        self._holds[key] = hold
        if len(self._holds) > _CONTEXTS:
            oldest = self._holds.pop(next(iter(self._holds)))
            oldest.left = 0
            self._settle(oldest)

    def _explain(self, decision: Decision) -> Explanation:
        plan, context, costs = decision.plan, decision.context, self._costs
        if plan not in self.space:
            raise ValueError(f"the space does not hold plan {plan}")
        rates, arm = costs.rates(context), self.space.arm(plan)
        found, overhead, factor = costs.parts(plan, context)
        edges = tuple(
            EdgePart(
                verifier,
                drafter,
                tuple(costs.acceptance(verifier, drafter, context.tag)[:window].tolist()),
                tuple(costs.drafted(verifier, drafter, context.tag)[:window].tolist()),
            )
            for verifier, drafter, window in plan.edges()
        )
        passes = tuple(
            PassPart(
                name,
                found.passes_of(name),
                sum(n * costs.seconds(name, q, context) for (model, q), n in found.passes.items() if model == name),
            )
            for name in plan.models
        )
        others = np.delete(np.arange(len(rates)), arm)
        other = int(others[rates[others].argmax()]) if others.size else None
        rate, recent = costs.measured(plan, context)
        return Explanation(
            decision,
            float(rates[arm]),
            found.tokens * context.batch_size,
            edges,
            passes,
            overhead,
            factor,
            (rate, recent) if recent else None,
            None if other is None else (self.space[other], float(rates[other])),
        )

    def _give_up(self, ticket: int) -> None:
        _, hold = self._open.pop(ticket)
        hold.open -= 1
        self._settle(hold)

    def _settle(self, hold: _Hold) -> None:
        """Reports a hold to the policy once all its rounds are handed out and back."""
        if hold.ranking and hold.rounds and not (hold.left or hold.open):
            self._policy.observe(hold.arm, hold.propensity, hold.rounds)

    def _row(self, arm: int, forecast: float, total: int) -> Row:
        rounds = int(self._rounds[arm])
        measured = float(self._tokens[arm] / self._seconds[arm]) if rounds else None
        return Row(self.space[arm], rounds, rounds / total, forecast, measured)


def _check(state: Mapping[str, Any], target: object) -> None:
    version = state.get("version")
    if state.get("format") != _FORMAT:
        raise ValueError(f"a controller's state has format {_FORMAT!r}, got {state.get('format')!r}")
    if version != _VERSION:
        newer = isinstance(version, int) and version > _VERSION
        hint = "; a newer adaspec wrote it" if newer else ""
        raise ValueError(f"this adaspec reads version {_VERSION} of a controller's state, got {version!r}{hint}")
    if state.get("target") != target:
        raise ValueError(f"the state is of target {state.get('target')!r}, not of {target!r}")
