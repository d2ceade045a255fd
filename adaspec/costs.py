"""What a controller has learned: acceptance per edge and position, seconds per pass, a residual per plan.

Every round teaches all plans that share an edge or a model with the one that was played; the theorem
(``adaspec.theory``) turns the parts into a forecast for every plan, and the residual lets measurement overrule it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from scipy.special import ndtri

from adaspec import stored
from adaspec.acceptance import Acceptance, check_edge, imputed
from adaspec.forecaster import Forecaster
from adaspec.merging import added
from adaspec.outcome import Decision, EdgeOutcome, Pass, RoundOutcome
from adaspec.passes import Passes, check_passes
from adaspec.plan import Context, Plan, PlanSpace
from adaspec.priors import CostPriors
from adaspec.prospects import Prospects, each_own, half_lives
from adaspec.rounds import Rounds
from adaspec.switching import Switching
from adaspec.theory import Edge, Floats, Forecast, forecast

_PENDING = 32  # rounds that are learned together at most
_Round: TypeAlias = tuple[Decision, RoundOutcome]
_BETTER = 0.1587  # chance of being a standard deviation better than expected, or more
_BLUNDER = 3.0  # factor on a model's seconds by which a start-up profile may be grossly wrong
_FAR = 2.0  # log seconds by which one round may move what its passes are believed to take


class CostModel:
    """Learns the parts of every plan's speed from rounds, and forecasts every plan of a space from the parts.

    Acceptance is a discounted Beta per (verifier, drafter) and position, shrunk to one rate per edge and extrapolated
    geometrically; so is the length of drafts. Both are kept per tag and shrink to what all tags show. Seconds are a
    regression per model on (1, query length, batch x query length, cached tokens), with a correction per query length
    and bucket of batch sizes actually seen; before any pass of a model they are a guess from its place in the chains.
    What a round spends outside its passes is learned per depth. A plan's own rounds correct its forecast by a factor,
    per batch size and tag. What feeding its idle models costs is charged to it, spread over some rounds, where the
    context tells what they lack; elsewhere that is part of its own rounds.

    Outcomes may come late and in any order. An engine that does not tell its passes is understood from the seconds of
    its rounds, one that does not tell its edges from their tokens. Rounds are learned together when beliefs are next
    asked for. Edges, models and query lengths that no plan of the space uses are passed over.

    Args:
        space: the plans.
        priors: what is believed beforehand.
        one_pass: drafters that propose a whole window in one pass (prompt lookup).
        acceptance: acceptance believed beforehand per (verifier, drafter), where something is known.
    """

    def __init__(
        self,
        space: PlanSpace,
        priors: CostPriors | None = None,
        one_pass: Collection[str] = (),
        acceptance: Mapping[Edge, float] | None = None,
    ) -> None:
        self.space = space
        self.priors = priors or CostPriors()
        self._one_pass = frozenset(one_pass)
        self._forecaster = Forecaster(space, one_pass)
        edges, positions = self._forecaster.edges, self._forecaster.positions
        self._acceptance = Acceptance(edges, positions, self.priors, acceptance or {}, space)
        self._passes = Passes(space, self._forecaster.query_lens, self.priors)
        self._rounds = Rounds(space, self.priors)
        self._switching = Switching(space, self.priors.feeding, self.priors.stays)
        pairs = [{edge[:2] for edge in plan.edges()} for plan in space]
        self._holders = np.array([[edge in held for held in pairs] for edge in edges])  # [edges, plans]
        self._nothing = np.zeros(len(space.models))
        self.changes = 0  # of an edge's acceptance that were noticed so far
        self._pending: list[_Round] = []
        self._known: tuple[Context, Floats, Floats] | None = None  # the latest forecast

    def profile(self, passes: Iterable[Pass]) -> None:
        """Takes start-up measurements as first observations; several of one kind count by their median.

        Raises:
            ValueError: a pass whose seconds are negative or no number.
        """
        given = tuple(passes)
        check_passes(given)
        self._settle()
        self._known = None
        self._passes.profile(given)

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        """Learns from one round.

        Raises:
            ValueError: a plan that the space does not hold, seconds that are not above 0, negative tokens or seconds of
                catch-up, no row, or counts that contradict themselves.
        """
        if decision.plan not in self.space:
            raise ValueError(f"the space does not hold plan {decision.plan}")
        if not (0.0 < outcome.seconds < math.inf and outcome.tokens >= 0):
            raise ValueError(f"a round takes time and loses no token: {outcome.tokens} in {outcome.seconds} s")
        if not 0.0 <= outcome.catch_up_seconds < math.inf:
            raise ValueError(f"catch-up takes time, got {outcome.catch_up_seconds} s")
        if outcome.rows < 1:
            raise ValueError(f"a round has at least 1 row, got {outcome.rows}")
        for edge in (*outcome.edges, *outcome.scored):
            check_edge(edge)
        check_passes(outcome.passes)
        self._pending.append((decision, outcome))
        if len(self._pending) >= _PENDING:
            self._settle()

    def forecast(self, context: Context) -> tuple[Floats, Floats]:
        """Expected (tokens, seconds) of a round by the theorem alone, over all rows; [plans] each."""
        self._settle()
        if self._known is None or self._known[0] != context:
            logs, _, _ = self._passes.table(context)
            self._known = (context, *self._evaluate(self._acceptance.mean(context.tag), np.exp(logs), context))
        return self._known[1:]

    def rates(self, context: Context) -> Floats:
        """Expected tokens per second of every plan, measurement included; [plans]."""
        tokens, seconds = self.forecast(context)
        factor, _ = self._residual(tokens / seconds, context)
        logs = self._passes.table(context)[0] if context.lacking else np.zeros((1, 2))
        return self._rates(tokens, seconds, factor, logs, context)

    def sample_rates(
        self, rng: np.random.Generator, context: Context, draws: int = 1, sharpness: float = 1.0
    ) -> Floats:
        """Tokens per second under ``draws`` draws from the posterior; [draws, plans].

        One draw shares its acceptances and seconds among all plans, so they are compared within one possible world;
        only the residuals are drawn per plan. ``sharpness`` multiplies the counts behind the posterior (it divides
        its variances); 1 is the posterior itself.
        """
        self._settle()
        logs, common, cell = self._passes.table(context)
        wide = 1.0 / math.sqrt(sharpness)
        luck = rng.standard_normal((draws, len(logs), 1 + logs.shape[1]))
        logs = logs + wide * (common * luck[..., :1] + cell * luck[..., 1:])
        hazards = self._acceptance.sample(context.tag, rng, draws, sharpness)
        tokens, seconds = self._evaluate(hazards, np.exp(logs), context)
        residual, spread = self._residual(tokens / seconds, context)
        luck = rng.standard_normal(tokens.shape[::-1]).T  # laid out as the rates are
        return self._rates(tokens, seconds, residual + wide * spread * luck, logs, context)

    def upper_rates(self, delta: float, context: Context) -> Floats:
        """Optimistic tokens per second: every part at its 1 - delta quantile; [plans].

        A rate rises with each acceptance and falls with each pass's seconds, so optimistic parts make an optimistic
        plan.

        Raises:
            ValueError: a delta outside (0, 0.5].
        """
        if not 0.0 < delta <= 0.5:
            raise ValueError(f"delta lies in (0, 0.5], got {delta}")
        self._settle()
        quantile = -float(ndtri(delta))
        logs, common, cell = self._passes.table(context)
        fast = np.exp(logs - quantile * np.hypot(common, cell))
        tokens, seconds = self._evaluate(self._acceptance.upper(context.tag, delta), fast, context)
        residual, spread = self._residual(tokens / seconds, context)
        return self._rates(tokens, seconds, residual + quantile * spread, logs, context)

    def prospects(self, context: Context) -> Prospects:
        """What is expected of every plan, and by how much each part of it may prove better."""
        self._settle()
        logs, common, cell = self._passes.table(context)
        mean, upper, bold, reached = self._acceptance.outlook(context.tag, _BETTER)
        known = self._passes.evidence
        unknown = (known < 1.0).tolist()
        faster, far = 2 + len(mean), 2 + len(mean) + len(logs)  # where the rows of models and of blunders begin
        rows = far + len(logs) * any(unknown)  # all as believed, no caution, edges, models, blunders
        hazards, times = np.empty((rows, *mean.shape)), np.empty((rows, *logs.shape))
        hazards[:], times[:] = mean, logs
        hazards[1] = bold
        each_own(hazards[2:faster])[:] = upper
        each_own(times[faster:far])[:] -= np.hypot(common, cell)
        each_own(times[far:])[:] -= math.log(_BLUNDER)
        tokens, seconds = self._evaluate(hazards, np.exp(times), context)
        self._known = (context, tokens[0], seconds[0])  # ``rates`` will need it
        factor, spread = self._residual(tokens[0] / seconds[0], context)
        rates = tokens / seconds * np.exp(factor)  # [rows, plans]
        spent, one_pass = seconds[0] * np.exp(-factor), np.exp(logs[:, 1])
        charged = self._switching.charge(context, one_pass) if context.lacking else 0.0
        gross = np.zeros(len(spent))
        if any(unknown):
            gross = (rates[far:] * (self._switching.uses * unknown).T).max(axis=0)
        return Prospects(
            rates=tokens[0] / (spent + charged),
            fed=rates[0],
            seconds=spent,
            feeding=self._switching.feeding(context, one_pass),
            shared=np.log(rates[1:far] / rates[0]),
            half=half_lives(
                0.5 * self.priors.position_strength,
                reached,
                known + self._passes.profiled,
                tokens[0] / context.batch_size,
            ),
            own=spread,
            own_half=self._rounds.halving((context.bucket, context.tag)),
            gross=gross,
        )

    def acceptance(self, verifier: str, drafter: str, tag: str = "") -> Floats:
        """Believed acceptance per position of a window; [positions]; KeyError for a pair that no plan has."""
        self._settle()
        hazards: Floats = self._acceptance.mean(tag)[self._acceptance.rows[verifier, drafter]]
        return hazards

    def drafted(self, verifier: str, drafter: str, tag: str = "") -> Floats:
        """Believed chance that a draft holds each position; [positions]; KeyError for a pair that no plan has."""
        self._settle()
        row, lengths = self._acceptance.rows[verifier, drafter], self._acceptance.drafted(tag)
        return np.ones(self._forecaster.positions) if lengths is None else lengths[row]

    def seconds(self, model: str, query_len: int, context: Context) -> float:
        """Believed seconds of one pass; KeyError for a model that no plan has."""
        self._settle()
        logs, _, _ = self._passes.table(context)
        return math.exp(logs[self._passes.rows[model], query_len])

    def measured(self, plan: Plan, context: Context) -> tuple[float, float]:
        """(tokens per second, rounds) of a plan's own rounds in a context, discounted; (0, 0) when it was not played.

        KeyError for a plan that the space does not hold.
        """
        self._settle()
        tokens, seconds, rounds = self._rounds.measured((context.bucket, context.tag), self.space.arm(plan))
        return (tokens / seconds * context.batch_size if rounds else 0.0), rounds

    def parts(self, plan: Plan, context: Context) -> tuple[Forecast, float, float]:
        """(forecast per row by the theorem, seconds outside its passes, factor by measurement) of one plan."""
        self._settle()
        arm = self.space.arm(plan)
        tokens, seconds = self.forecast(context)
        factor = math.exp(self._residual(tokens / seconds, context)[0][arm])
        return self._forecast_of(plan, context), float(self._rounds.overheads(context.bucket)[arm]), factor

    @property
    def verifications(self) -> Mapping[Edge, int]:
        """How often each pair of the space was verified, ever."""
        self._settle()
        counts = self._acceptance.sums[0, :, :1].sum(axis=-1).astype(np.int64).tolist()
        return dict(zip(self._forecaster.edges, counts))

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, JSON-able, by name: it can be loaded into another space with the same models."""
        self._settle()
        return {
            "acceptance": self._acceptance.state_dict(),
            "passes": self._passes.state_dict(),
            "rounds": self._rounds.state_dict(),
            "switching": self._switching.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces everything learned but for names that the space lacks; ValueError, and nothing, if damaged."""
        stored.COSTS(state, "costs")
        self._acceptance.load_state_dict(state["acceptance"])
        self._passes.load_state_dict(state["passes"])
        self._rounds.load_state_dict(state["rounds"])
        self._switching.load_state_dict(state["switching"])
        self._pending, self._known = [], None

    @staticmethod
    def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state from those of several replicas: the evidence of all, equally recent."""
        merged: dict[str, Any] = added(states)
        for model in merged["passes"]["models"].values():
            model["fresh"] = model["count"]  # the regressions are fitted again
        return merged

    def _settle(self) -> None:
        """Learns the rounds that were observed since; consecutive ones of one context together."""
        if not self._pending:
            return
        pending, self._pending, self._known = self._pending, [], None
        for (bucket, tag), group in groupby(pending, lambda one: (one[0].context.bucket, one[0].context.tag)):
            self._learn(bucket, tag, list(group))

    def _learn(self, bucket: int, tag: str, group: list[_Round]) -> None:
        edges, passes = self._evidence(group)
        self._acceptance.forget(len(group))
        self._passes.forget(bucket, len(group))
        self._rounds.forget(len(group))
        changed = self._acceptance.learn(tag, edges)
        for row in changed:
            self._rounds.doubt(self._holders[row], tag)
        self.changes += len(changed)
        outliers = self._passes.learn(passes)
        told = next((decision.context for decision, _ in group if decision.context.lacking), None)
        self._switching.learn(group, np.exp(self._passes.table(told)[0][:, 1]) if told else self._nothing)
        by_plan: dict[Plan, list[tuple[_Round, float]]] = {}
        for one, outside in zip(group, outliers):
            by_plan.setdefault(one[0].plan, []).append((one, outside))
        for plan, rounds in by_plan.items():
            self._learn_plan(plan, bucket, tag, rounds)

    def _learn_plan(self, plan: Plan, bucket: int, tag: str, group: list[tuple[_Round, float]]) -> None:
        """The rounds of one plan as wholes, less their seconds in outliers."""
        tokens = sum(outcome.tokens / max(decision.context.batch_size, 1) for (decision, outcome), _ in group)
        seconds = sum(_own_seconds(*one, extra) for one, extra in group)
        self._rounds.add((bucket, tag), self.space.arm(plan), tokens, seconds, len(group))
        told = [outcome for (_, outcome), _ in group if outcome.passes]
        if told:
            self._rounds.add_overhead(bucket, plan.depth, sum(map(_outside, told)), len(told))

    def _evidence(self, group: list[_Round]) -> tuple[list[EdgeOutcome], list[Sequence[Pass]]]:
        """Edges of some rounds, and passes of each, imputed where the engine does not tell."""
        edges: list[EdgeOutcome] = []
        passes: list[Sequence[Pass]] = []
        for decision, outcome in group:
            edges += outcome.edges
            edges += outcome.scored
            passes.append(outcome.passes)
            if decision.plan.windows and not outcome.edges:
                verifier, drafter, window = next(decision.plan.edges())
                edges.append(imputed(verifier, drafter, window, outcome.rows, outcome.tokens - outcome.rows))
        silent: dict[Plan, list[int]] = {}
        for place, (decision, outcome) in enumerate(group):
            if not outcome.passes:
                silent.setdefault(decision.plan, []).append(place)
        for plan, places in silent.items():
            believed = self._imputed_passes(plan, [group[place] for place in places])
            for place in places:
                passes[place] = believed
        return edges, passes

    def _imputed_passes(self, plan: Plan, group: list[_Round]) -> list[Pass]:
        """What the passes of a round must have taken to explain the median seconds of some, one of each kind.

        A deviation from the forecast is spread over the kinds of passes in proportion to variance x share of the
        round, as a Kalman filter without noise would.
        """
        context = group[0][0].context
        logs, common, cell = self._passes.table(context)
        found = self._forecast_of(plan, context)
        outside = float(self._rounds.overheads(context.bucket)[self.space.arm(plan)])
        spent = statistics.median(outcome.seconds - outcome.catch_up_seconds for _, outcome in group)
        missing = math.log(max(spent, 1e-9) / (found.seconds + outside))
        kinds = [(self._passes.rows[model], query_len, count) for (model, query_len), count in found.passes.items()]
        shares = [count * math.exp(logs[row, q]) / found.seconds for row, q, count in kinds]
        variances = [float(common[row, 0] ** 2 + cell[row, q] ** 2) for row, q, _ in kinds]
        total = sum(variance * share**2 for variance, share in zip(variances, shares))
        moved = min(max(missing, -_FAR), _FAR) / total
        return [
            Pass(name, q, context.batch_size, context.seq_len, math.exp(logs[row, q] + moved * variance * share))
            for (name, q), (row, _, _), share, variance in zip(found.passes, kinds, shares, variances)
        ]

    def _forecast_of(self, plan: Plan, context: Context) -> Forecast:
        """The forecast of one plan per row, with its expected passes."""
        logs, _, _ = self._passes.table(context)
        table, lengths = self._acceptance.mean(context.tag), self._acceptance.drafted(context.tag)
        rows = {(verifier, drafter): self._acceptance.rows[verifier, drafter] for verifier, drafter, _ in plan.edges()}
        return forecast(
            plan,
            {edge: table[row] for edge, row in rows.items()},
            lambda model, query_len: math.exp(logs[self._passes.rows[model], query_len]),
            one_pass=self._one_pass,
            drafted=None if lengths is None else {edge: lengths[row] for edge, row in rows.items()},
        )

    def _evaluate(self, hazards: Floats, seconds: Floats, context: Context) -> tuple[Floats, Floats]:
        tokens, spent = self._forecaster(hazards, seconds, self._acceptance.drafted(context.tag))
        return tokens * context.batch_size, spent + self._rounds.overheads(context.bucket)

    def _rates(self, tokens: Floats, seconds: Floats, factor: Floats, logs: Floats, context: Context) -> Floats:
        """Tokens per second [..., plans]; ``factor``: log of measured over forecast. What models lack is charged."""
        spent = seconds * np.exp(-factor)
        if context.lacking:
            spent = spent + self._switching.charge(context, np.exp(logs[..., 1]))
        rates: Floats = tokens / spent
        return rates

    def _residual(self, rates: Floats, context: Context) -> tuple[Floats, Floats]:
        return self._rounds.residual(rates / context.batch_size, (context.bucket, context.tag))


def _own_seconds(decision: Decision, outcome: RoundOutcome, outliers: float) -> float:
    """What a round says of its plan: less what it spent in outliers, and on catch-up where that is charged apart."""
    apart = outcome.catch_up_seconds if decision.context.lacking else 0.0
    return max(outcome.seconds - outliers - apart, 0.1 * (outcome.seconds - apart))


def _outside(outcome: RoundOutcome) -> float:
    """Seconds of a round outside its passes; a wild one counts no more than the passes do."""
    inside = sum(one.seconds for one in outcome.passes)
    return min(max(outcome.seconds - inside - outcome.catch_up_seconds, 0.0), inside)
