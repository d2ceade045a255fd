"""One policy in one scenario, and the oracle it is held against."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

from adaspec.bench.config import build
from adaspec.bench.fixed import FixedPlans, seconds_to
from adaspec.bench.replay import Replay
from adaspec.bench.scenarios import Setting
from adaspec.bench.traces import Ints
from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, PlanSpace
from adaspec.policy import Policy
from adaspec.theory import Edge, Floats

EARLY = 200  # rounds of the early share
STEPS = 50  # points of a curve
LEVEL = 0.05  # of a test of who is ahead


class ProfileOnly(CostModel):
    """What a rule with statistics of its own is given: the start-up profile, and nothing learned from rounds."""

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        """Learns nothing."""

    def rates(self, context: Context) -> Floats:
        """Nothing is forecast, so no hold ends early; [plans]."""
        return np.zeros(len(self.space))


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy and how it is run.

    ``hold``, ``collapse``: of the controller. ``learns``: whether it reads a cost model. ``follow``: whether every
    drafter is fed and scored on what is committed, at the cost of that.
    """

    policy: Policy
    hold: int = 4
    collapse: float = 0.8
    learns: bool = True
    follow: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Entrant:
        """From a choice of ``conf/policy``.

        Raises:
            ValueError: arguments that the policy refuses.
        """
        return cls(build(given["rule"]), **{key: given[key] for key in ("hold", "collapse", "learns", "follow")})

    def controller(
        self,
        space: PlanSpace,
        one_pass: Collection[str],
        seed: int,
        acceptance: Mapping[Edge, float] | None = None,
    ) -> Controller:
        """A controller that knows nothing yet; ``one_pass``: drafters whose window costs one pass."""
        costs = (CostModel if self.learns else ProfileOnly)(space, one_pass=one_pass, acceptance=acceptance)
        return Controller(space, self.policy, costs, self.hold, self.collapse, seed)


@dataclass(frozen=True, slots=True)
class Course:
    """What a policy did: position and true seconds after every round [rounds + 1], processor time spent deciding."""

    positions: Ints
    seconds: Floats
    deciding: float

    @property
    def rounds(self) -> int:
        return len(self.positions) - 1


def run(setting: Setting, entrant: Entrant, rounds: int, seed: int) -> Course:
    """Lets a policy decode for so many rounds, or to the end of the text."""
    replay = Replay(setting.world, setting.space, seed, entrant.follow)
    controller = entrant.controller(setting.space, setting.world.lookups, seed, setting.acceptance)
    controller.profile(setting.world.profile(setting.space, np.random.default_rng(seed), setting.profile_scale))
    positions, seconds, deciding = [0], [0.0], 0.0
    while len(positions) <= rounds and not replay.over:
        context, began = replay.context(), time.thread_time()
        decision = controller.choose(context)
        chosen = time.thread_time()
        outcome = replay.round(decision.plan)
        played = time.thread_time()
        controller.observe(decision, outcome)
        deciding += chosen - began + time.thread_time() - played
        positions.append(replay.position)
        seconds.append(replay.true_seconds)
    return Course(np.array(positions), np.array(seconds), deciding)


class Oracle:
    """Every fixed plan on the text of a setting, for comparisons in hindsight over the same tokens."""

    def __init__(self, setting: Setting) -> None:
        fixed = FixedPlans(setting.world, setting.space)
        self._marks = [fixed.marks(arm) for arm in range(len(setting.space))]
        self._segments = setting.world.segments
        edges = [0, *(segment.stop for segment in self._segments)]
        self._at = np.array([seconds_to(marks, edges) for marks in self._marks])  # [plans, segments + 1]

    def best(self, position: int) -> int:
        """The plan that commits the first ``position`` tokens soonest."""
        return int(np.argmin([seconds_to(marks, [position])[0] for marks in self._marks]))

    def seconds(self, arm: int, positions: Ints) -> Floats:
        return seconds_to(self._marks[arm], positions)

    def by_segment(self, positions: Ints) -> Floats:
        """Seconds to each of ``positions`` with the best plan of every segment (a segment that is cut: of its part)."""
        whole = np.append(0.0, np.cumsum(np.diff(self._at, axis=1).min(axis=0)))
        index = np.searchsorted([segment.stop for segment in self._segments], positions)
        there = np.array([seconds_to(marks, positions) for marks in self._marks])  # [plans, positions]
        reached: Floats = whole[index] + (there - self._at[:, index]).min(axis=0)
        return reached


def judge(course: Course, oracle: Oracle) -> dict[str, Any]:
    """The figures of one run, JSON-able. Curves are over ``STEPS`` evenly spaced rounds."""
    points = np.unique(np.linspace(0, course.rounds, STEPS + 1).astype(int))[1:]
    end = int(course.positions[-1])
    best = oracle.best(end)
    fixed = oracle.seconds(best, course.positions)
    segment = oracle.by_segment(course.positions[points])
    early = min(EARLY, course.rounds)
    return {
        "share_of_best_fixed": float(fixed[-1] / course.seconds[-1]),
        "share_of_segment_oracle": float(segment[-1] / course.seconds[-1]),
        "share_early": float(fixed[early] / course.seconds[early]),
        "time_regret_seconds": float(course.seconds[-1] - fixed[-1]),
        "segment_regret_seconds": float(course.seconds[-1] - segment[-1]),
        "rounds_to_95": _rounds_to(course, fixed),
        "decision_microseconds": 1e6 * course.deciding / course.rounds,
        "rounds": course.rounds,
        "tokens": end,
        "best": best,
        "curve": {
            "rounds": points.tolist(),
            "regret": (course.seconds[points] - fixed[points]).tolist(),
            "share": (fixed[points] / course.seconds[points]).tolist(),
        },
    }


def _rounds_to(course: Course, fixed: Floats, share: float = 0.95, width: int = 100) -> int | None:
    """The first round from which ``width`` rounds run at ``share`` of the best fixed plan's speed; None if never."""
    if course.rounds < width:
        return None
    spans = (fixed[width:] - fixed[:-width]) / (course.seconds[width:] - course.seconds[:-width])
    there = np.flatnonzero(spans >= share)
    return int(there[0]) if there.size else None


Table = dict[str, dict[str, list[Mapping[str, Any]]]]  # scenario -> policy -> what was judged, seed by seed


def summary(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds per scenario and policy; ``ci``: half the width of a 95 % interval of share_of_best_fixed."""
    table = by_policy(results)
    return {name: {policy: _means(runs) for policy, runs in group.items()} for name, group in table.items()}


def by_policy(results: Iterable[Mapping[str, Any]]) -> Table:
    """What every policy did in every scenario, seed by seed."""
    table: Table = {}
    for unit in results:
        for policy, figures in unit["policies"].items():
            table.setdefault(unit["scenario"], {}).setdefault(policy, []).append(figures)
    return table


@dataclass(frozen=True, slots=True)
class Standing:
    """How a policy stands against the best one of every scenario, by time regret.

    Two rules say when it is tied for first. ``tied``: no other policy has less regret seed by seed (one-sided paired
    t-tests at 5 %, Bonferroni over the others, since the best of them is only known afterwards). ``near``: the 95 %
    intervals of the two means overlap. ``of``: all scenarios; ``worst``: its least share of the winner's speed, reached
    in ``where``.
    """

    tied: int
    near: int
    of: int
    worst: float
    where: str


def standing(table: Table, policy: str) -> Standing | None:
    """The standing of a policy; None where it did not play."""
    ratios, tied, near = {}, 0, 0
    for name, group in table.items():
        if policy in group:
            regret = {other: np.array([run["time_regret_seconds"] for run in runs]) for other, runs in group.items()}
            others = [regret[other] for other in group if other != policy]
            tied += all(_behind(regret[policy], other) * len(others) > LEVEL for other in others)
            winner = regret[min(regret, key=lambda other: float(regret[other].mean()))]
            near += regret[policy].mean() - winner.mean() <= _half_width(regret[policy]) + _half_width(winner)
            shares = [np.mean([run["share_of_best_fixed"] for run in runs]) for runs in group.values()]
            ratios[name] = float(np.mean([run["share_of_best_fixed"] for run in group[policy]]) / max(shares))
    if not ratios:
        return None
    where = min(ratios, key=ratios.__getitem__)
    return Standing(tied, int(near), len(ratios), ratios[where], where)


def _behind(own: Floats, other: Floats) -> float:
    """The chance of a lead of ``other`` as large as this one, were there none; regrets by seed."""
    lead = own - other
    if np.ptp(lead) < 1e-12 or len(lead) < 2:  # the same policy under two names, or too few seeds to tell
        return 1.0
    return float(ttest_1samp(lead, 0.0, alternative="greater").pvalue)


def _half_width(values: Floats) -> float:
    """Of a 95 % interval of the mean; 0 for a single seed."""
    return float(1.96 * np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _means(runs: list[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(key: str) -> float:
        return float(np.mean([run[key] for run in runs]))

    shares = [run["share_of_best_fixed"] for run in runs]
    reached = float(np.median([np.inf if run["rounds_to_95"] is None else run["rounds_to_95"] for run in runs]))
    return {
        "share_of_best_fixed": mean("share_of_best_fixed"),
        "ci": _half_width(np.array(shares)) if len(runs) > 1 else None,
        "share_of_segment_oracle": mean("share_of_segment_oracle"),
        "time_regret_seconds": mean("time_regret_seconds"),
        "share_first_200": mean("share_early"),
        "rounds_to_95": reached if np.isfinite(reached) else None,
        "decision_microseconds": mean("decision_microseconds"),
        "seeds": len(runs),
    }
