"""The controller: hands out a plan before each round, learns from what the round brought."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaspec import stored
from adaspec.costs import CostModel
from adaspec.explanation import EdgePart, Explanation, PassPart
from adaspec.holding import TRUSTED_ROUNDS, Hold, Law, Ranking, Seen, idle
from adaspec.merging import added
from adaspec.outcome import Decision, Pass, RoundOutcome
from adaspec.plan import Context, Override, Plan, PlanSpace
from adaspec.policy import KnowledgeGradient, Policy

_FORMAT, _VERSION = "adaspec.controller", 2
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
        policy: how to pick; the knowledge gradient by default.
        costs: what is already believed, over the same space; nothing by default.
        hold: rounds per pull.
        collapse: a hold ends early below this share of the forecast rate (of a plan that was played often: below less
            of it in the first rounds, which may be chance); 0 never ends one early.
        seed: of the policy's draws.
        patience: pulls that a law of the policy serves at most, once a context has seen some rounds; the policy's own
            by default.
        identity: what the target is, as states tell it (a model's name and precision); by default its name in plans.
            A state of another identity is refused.
        effort: share of the rounds' seconds that rankings may take: as long as the latest one has not been earned, a
            law serves on that is used up, and behind a surprise the best plan known; only a change is answered at
            once. By default any, so that nothing hangs on a clock.

    Raises:
        ValueError: hold or patience below 1, collapse outside [0, 1), an effort not above 0, or costs over another
            space.
    """

    def __init__(
        self,
        space: PlanSpace,
        policy: Policy | None = None,
        costs: CostModel | None = None,
        hold: int = 4,
        collapse: float = 0.8,
        seed: int = 0,
        patience: int | None = None,
        identity: str = "",
        effort: float = math.inf,
    ) -> None:
        if hold < 1:
            raise ValueError(f"a plan is held for at least 1 round, got {hold}")
        if patience is not None and patience < 1:
            raise ValueError(f"patience is at least 1, got {patience}")
        if not 0.0 <= collapse < 1.0:
            raise ValueError(f"collapse lies in [0, 1), got {collapse}")
        if not effort > 0.0:
            raise ValueError(f"effort is above 0, got {effort}")
        if costs is not None and tuple(costs.space) != tuple(space):
            raise ValueError(f"the costs are over another space: {costs.space!r}, not {space!r}")
        self.space = space
        self.identity = identity or space.target
        self._policy = policy or KnowledgeGradient()
        self._costs = costs or CostModel(space)
        self._hold, self._collapse = hold, collapse
        self._patience, self._effort = patience, effort
        self._owed = 0.0  # seconds that rounds are still to take until the latest ranking is earned
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._holds: dict[_Key, Hold] = {}
        self._rankings: dict[tuple[int, str, frozenset[str]], Ranking] = {}
        self._open: dict[int, tuple[Decision, Hold]] = {}
        self._next_id = 0
        self._pulls = 0
        self._context = Context()
        self._totals: list[list[float]] = [[0, 0.0, 0.0] for _ in space]  # per plan: rounds, tokens, seconds

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
            if hold is None or hold.left == 0 or hold.interrupted(self.space[hold.arm], context):
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
            if hold is None or (known is not decision and known != decision):
                raise ValueError(f"decision {decision.id} ({decision.plan}) is not open: unknown, or observed before")
            changes = self._costs.changes
            self._costs.observe(decision, outcome)
            del self._open[decision.id]
            hold.add(outcome)
            totals = self._totals[hold.arm]
            totals[0] += 1
            totals[1] += outcome.tokens
            totals[2] += outcome.seconds
            self._owed -= outcome.seconds
            if hold.ranking and self._costs.changes > changes:
                hold.ranking.restart()
            self._settle(hold)

    def table(self, context: Context | None = None) -> list[Row]:
        """One row per plan, best forecast first; the context defaults to that of the latest choice."""
        with self._lock:
            forecast = self._costs.rates(context or self._context)
            total = max(sum(rounds for rounds, _, _ in self._totals), 1)
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
            totals = {str(plan): list(sums) for plan, sums in zip(self.space, self._totals) if sums[0]}
            return {
                "format": _FORMAT,
                "version": _VERSION,
                "target": self.identity,
                "totals": totals,
                "policy": {"name": type(self._policy).__name__, "state": self._policy.state_dict()},
                "costs": self._costs.state_dict(),
                "rng": self._rng.bit_generator.state,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` left off; plans that only one of the two spaces holds are passed over.

        A policy's own state is taken by a policy of the same class only. Tickets still open are void.

        Raises:
            ValueError: a state of something else, of a newer version, of another target, or a damaged one, by the place
                of the damage; nothing is taken of it then.
        """
        _check(state, self.identity)
        stored.CONTROLLER(state, "")
        _check_rng(state["rng"], self._rng)
        with self._lock:
            if state["policy"]["name"] == type(self._policy).__name__:
                self._load_policy(state["policy"]["state"])
            self._costs.load_state_dict(state["costs"])
            self._rng.bit_generator.state = state["rng"]
            self._holds, self._open, self._rankings = {}, {}, {}
            self._totals = [list(state["totals"].get(str(plan), (0, 0.0, 0.0))) for plan in self.space]

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
            stored.CONTROLLER(state, "")
        totals = added([state["totals"] for state in states])
        return {**states[0], "totals": totals, "costs": CostModel.merge([state["costs"] for state in states])}

    def _load_policy(self, state: Mapping[str, Any]) -> None:
        """Lets the policy take its own state; one that it cannot take leaves it as it was."""
        before = self._policy.state_dict()
        try:
            self._policy.load_state_dict(state)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            self._policy.load_state_dict(before)
            raise ValueError(f"policy.state: {type(self._policy).__name__} cannot take it: {error!r:.100}") from None

    def _pull(self, context: Context, override: Override | None) -> Hold:
        if override is not None and override.plan is not None:
            if override.plan not in self.space:
                raise ValueError(f"the space does not hold the pinned plan {override.plan}")
            return Hold(self.space.arm(override.plan), 1.0, self._hold)
        ranking = self._ranking(context)
        ranking.uses -= 1
        ranking.rounds += self._hold
        law = ranking.law if override is None else self._restricted(ranking, override)
        arm = law.draw(self._rng.random())
        floor = self._collapse * ranking.rates[arm] * context.batch_size
        best = ranking.best * context.batch_size
        rounds = self._totals[arm][0]
        trust = rounds / (rounds + TRUSTED_ROUNDS)
        seen = ranking.seen.setdefault(arm, Seen())
        return Hold(arm, law.chances[arm], self._hold, best, floor, trust, ranking, seen=seen)

    def _ranking(self, context: Context) -> Ranking:
        """The law and the forecasts of a context, renewed when they are used up."""
        key = (context.bucket, context.tag, idle(context))
        known = self._rankings.pop(key, None) or Ranking()
        self._rankings[key] = known
        if len(self._rankings) > _CONTEXTS:
            self._rankings.pop(next(iter(self._rankings)))
        if not known.uses and known.stands and self._owed > 0.0:
            known.uses = 1
        elif not known.uses:
            began = time.perf_counter()
            self._rank(known, context)
            self._owed = (time.perf_counter() - began) / self._effort
        return known

    def _rank(self, ranking: Ranking, context: Context) -> None:
        changes = self._costs.changes
        law = self._policy.probabilities(self._costs, context, self._rng)
        if self._costs.changes > changes:
            ranking.restart()
        ranking.renew(law, self._patience or self._policy.patience)
        if ranking.old:
            ranking.forecast(self._costs.rates(context) / context.batch_size)

    def _restricted(self, ranking: Ranking, override: Override) -> Law:
        """The law over the plans that a request allows; the best of them by forecast where the law has none."""
        allowed = [override.allows(plan) for plan in self.space]
        rates = [rate if kept else -1.0 for rate, kept in zip(ranking.rates, allowed)]
        return ranking.law.among(allowed) or Law.only(rates.index(max(rates)), len(rates))

    def _keep(self, key: _Key, hold: Hold) -> None:
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

    def _settle(self, hold: Hold) -> None:
        """Reports a hold to the policy once all its rounds are handed out and back."""
        if hold.ranking and hold.rounds and not (hold.left or hold.open):
            self._policy.observe(hold.arm, hold.propensity, hold.rounds)

    def _row(self, arm: int, forecast: float, total: float) -> Row:
        rounds, tokens, seconds = self._totals[arm]
        measured = tokens / seconds if rounds else None
        return Row(self.space[arm], int(rounds), rounds / total, forecast, measured)


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


def _check_rng(state: Mapping[str, Any], like: np.random.Generator) -> None:
    trial = type(like.bit_generator)()
    try:
        trial.state = state
        taken = trial.state == state
    except (ValueError, LookupError, TypeError, ArithmeticError):
        taken = False
    if not taken:
        raise ValueError(f"rng is no state of a {type(trial).__name__}, got {state!r:.60}")
