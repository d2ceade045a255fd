"""What the pictures show, as values: speed-ups, tracks, plans, acceptance per position, seconds per pass."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from adaspec.bench.report.groups import Group
from adaspec.bench.report.records import Prompt, Round, Run
from adaspec.bench.speeds import Told, mean_speed, speed_ratios, speeds
from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.plan import Context, Plan, PlanSpace

ALL = "all tasks"
SURE = 1.96  # standard errors of a 95 % interval


@dataclass(frozen=True, slots=True)
class Speedup:
    """Mean tokens/s of a method over that of plain decoding, on the answers that both have given.

    ``ratio``: the mean over repetitions; ``low``, ``high``: the least and the greatest, None with a single one.
    ``differing``: answers whose text is not plain decoding's, None where no digest tells.
    """

    method: str
    kind: str
    ratio: float
    low: float | None
    high: float | None
    repetitions: int
    answers: int
    tokens_per_second: float
    mean_accepted_length: float | None
    differing: int | None


@dataclass(frozen=True, slots=True)
class Track:
    """What a method played in one run: plan per round, and where each answer begins with its kind."""

    method: str
    run: str
    plans: tuple[Plan, ...]
    begins: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class PlanUse:
    """A plan in the hands of a method. ``margin``: half of a 95 % interval of ``measured``, holds as units.

    ``forecast``: tokens/s expected, the mean over the plan's rounds; None where none was recorded.
    """

    method: str
    plan: Plan
    rounds: int
    share: float
    forecast: float | None
    measured: float
    margin: float


@dataclass(frozen=True, slots=True)
class Position:
    """Acceptance of one edge at one position of its window (from 1), over all rounds; see ``EdgeOutcome``.

    ``rate``: accepted of reached, what the theorem needs; silence counts as not accepted. ``low``, ``high``: its 95 %
    interval (Wilson, 1927). ``spoken``: accepted of offered, None where nothing was drafted.
    """

    edge: tuple[str, str]
    position: int
    reached: int
    offered: int
    accepted: int
    rate: float
    low: float
    high: float
    spoken: float | None


@dataclass(frozen=True, slots=True)
class PassTime:
    """Passes of one model, query length and batch size: quartiles of their seconds, and the cost model's belief."""

    model: str
    query_len: int
    batch_size: int
    passes: int
    lower: float
    median: float
    upper: float
    fit: float


def fixed_methods(rounds: Iterable[Round]) -> dict[str, Plan]:
    """Methods that play one plan and leave nothing to chance, with it."""
    plans: dict[str, set[Plan]] = defaultdict(set)
    chance: set[str] = set()
    for one in rounds:
        plans[one.method].add(one.decision.plan)
        if one.decision.propensity < 1.0:
            chance.add(one.method)
    return {method: min(own, key=str) for method, own in plans.items() if len(own) == 1 and method not in chance}


def adaptive_methods(rounds: Sequence[Round]) -> list[str]:
    """Methods that choose among plans, in order of appearance."""
    fixed = fixed_methods(rounds)
    return [method for method in dict.fromkeys(one.method for one in rounds) if method not in fixed]


def plain_method(group: Group) -> str | None:
    """The method that decodes plainly: the one of that name, else one that plays the target alone."""
    if any(one.method == "plain" for one in group.prompts):
        return "plain"
    return next((name for name, plan in fixed_methods(group.rounds).items() if plan.depth == 1), None)


def speedups(group: Group) -> list[Speedup]:
    """Every other method against plain decoding, over all tasks and per kind of task."""
    plain = plain_method(group)
    base = {(run, one.turn): one for run, one in _answers(group) if one.method == plain}
    pairs: dict[str, list[tuple[int, Prompt, Prompt]]] = defaultdict(list)
    for run, one in _answers(group):
        if one.method != plain and (run, one.turn) in base:
            pairs[one.method].append((run, one, base[run, one.turn]))
    kinds = list(dict.fromkeys(one.kind for one in group.prompts))
    found = []
    for method, own in pairs.items():
        for kind in (ALL, *(kinds if len(kinds) > 1 else ())):
            chosen = [pair for pair in own if kind in (ALL, pair[1].kind)]
            found += [_speedup(method, kind, chosen)] if chosen else []
    return found


def _answers(group: Group) -> Iterator[tuple[int, Prompt]]:
    """With the number of their run."""
    return ((number, one) for number, run in enumerate(group.runs) for one in run.prompts)


def _speedup(method: str, kind: str, pairs: Sequence[tuple[int, Prompt, Prompt]]) -> Speedup:
    speed = speeds(_told(run, own) for run, own, _ in pairs)
    ratios = speed_ratios(speed, speeds(_told(run, plain) for run, _, plain in pairs))
    several = len(ratios) > 1
    tokens, rounds = (sum(getattr(own, name) for _, own, _ in pairs if own.rounds) for name in ("tokens", "rounds"))
    told = [own.digest != plain.digest for _, own, plain in pairs if own.digest and plain.digest]
    return Speedup(
        method,
        kind,
        fmean(ratios),
        min(ratios) if several else None,
        max(ratios) if several else None,
        len(ratios),
        len(pairs),
        mean_speed(speed),
        tokens / rounds if rounds else None,
        sum(told) if told else None,
    )


def _told(run: int, answer: Prompt) -> Told:
    question, repeat, _ = answer.turn
    return (run, repeat), question, answer.tokens, answer.seconds


def tracks(group: Group) -> list[Track]:
    """What the adaptive methods played, run by run; of all methods where none is adaptive."""
    found = []
    for run in group.runs:
        for method in adaptive_methods(run.rounds) or dict.fromkeys(one.method for one in run.rounds):
            own = in_order(run, method)
            begins = [(at, one.kind) for at, one in enumerate(own) if at == 0 or one.turn != own[at - 1].turn]
            found.append(Track(method, run.name, tuple(one.decision.plan for one in own), tuple(begins)))
    return found


def in_order(run: Run, method: str) -> list[Round]:
    """The rounds of a method as it played them."""
    return sorted((one for one in run.rounds if one.method == method), key=lambda one: one.decision.id)


def plan_uses(group: Group) -> list[PlanUse]:
    """The plans of every adaptive method, the most used first."""
    played: dict[str, dict[Plan, list[list[Round]]]] = defaultdict(lambda: defaultdict(list))
    for run in group.runs:
        for method in adaptive_methods(run.rounds):
            for plan, hold in holds(in_order(run, method)):
                played[method][plan].append(hold)
    found = []
    for method, plans in played.items():
        total = sum(len(hold) for own in plans.values() for hold in own)
        uses = [_plan_use(method, plan, own, total) for plan, own in plans.items()]
        found += sorted(uses, key=lambda use: -use.rounds)
    return found


def holds(rounds: Sequence[Round]) -> Iterator[tuple[Plan, list[Round]]]:
    """The rounds of every pull, together."""
    hold: list[Round] = []
    for one in rounds:
        if hold and (one.pulled or one.decision.plan != hold[-1].decision.plan):
            yield hold[-1].decision.plan, hold
            hold = []
        hold.append(one)
    if hold:
        yield hold[-1].decision.plan, hold


def _plan_use(method: str, plan: Plan, holds: Sequence[Sequence[Round]], total: int) -> PlanUse:
    rounds = [one for hold in holds for one in hold]
    told = [one.forecast for one in rounds if one.forecast is not None]
    tokens, seconds = (
        np.array([sum(getattr(one.outcome, name) for one in hold) for hold in holds], dtype=float)
        for name in ("tokens", "seconds")
    )
    rate = float(tokens.sum() / seconds.sum())
    error = float(np.sqrt(((tokens - rate * seconds) ** 2).sum())) / float(seconds.sum())  # of a ratio of sums
    mean = float(np.mean(told)) if told else None
    return PlanUse(method, plan, len(rounds), len(rounds) / total, mean, rate, SURE * error if len(holds) > 1 else 0.0)


def acceptance(group: Group) -> list[Position]:
    """Acceptance of every edge that was played, position by position."""
    counts: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    for one in group.rounds:
        for edge in one.outcome.edges:
            own = counts[edge.verifier, edge.drafter]
            own += [[0, 0, 0] for _ in range(len(edge.reached) - len(own))]
            for sums, seen in zip(own, zip(edge.reached, edge.offered, edge.accepted)):
                sums[:] = [total + new for total, new in zip(sums, seen)]
    return [
        _position(edge, number, *sums) for edge, own in counts.items() for number, sums in enumerate(own, 1) if sums[0]
    ]


def _position(edge: tuple[str, str], number: int, reached: int, offered: int, accepted: int) -> Position:
    rate, low, high = wilson(accepted, reached)
    return Position(edge, number, reached, offered, accepted, rate, low, high, accepted / offered if offered else None)


def wilson(successes: int, trials: int) -> tuple[float, float, float]:
    """(rate, low, high) of a 95 % interval (Wilson, 1927); ``trials`` above 0."""
    rate, square = successes / trials, SURE**2 / trials
    centre = (rate + square / 2.0) / (1.0 + square)
    half = math.sqrt(rate * (1.0 - rate) * square + square**2 / 4.0) / (1.0 + square)
    return rate, max(centre - half, 0.0), min(centre + half, 1.0)


def cost_model(group: Group) -> tuple[CostModel, str] | None:
    """What a controller of the group believed in the end, and whose beliefs they are; None where nothing was played.

    The state that the run kept (of several runs: merged); else a cost model that learns the recorded rounds again.

    Raises:
        ValueError: a state that is none of a controller.
    """
    rounds = list(group.rounds)
    if not rounds:
        return None
    space = PlanSpace(one.decision.plan for one in rounds)
    for method in adaptive_methods(rounds):
        states = [run.states[method] for run in group.runs if method in run.states]
        if states:
            controller = Controller(space)
            try:
                controller.load_state_dict(Controller.merge(states) if len(states) > 1 else states[0])
            except ValueError as error:
                raise ValueError(f"controller-{method}.json is no controller's state: {error}") from None
            return controller.costs, f"what the controller of {method} believed in the end"
    costs = CostModel(space)
    for one in rounds:
        costs.observe(one.decision, one.outcome)
    return costs, "a cost model that has learned the recorded rounds"


def pass_times(group: Group, costs: CostModel) -> list[PassTime]:
    """Seconds per pass of every model, at the query lengths that the plans ask for."""
    shapes = {model: max(lengths) for model, lengths in costs.space.shapes().items()}
    spent: dict[tuple[str, int, int], list[tuple[float, int]]] = defaultdict(list)
    for round_ in group.rounds:
        for one in round_.outcome.passes:
            if one.query_len <= shapes.get(one.model, 0):
                spent[one.model, one.query_len, one.batch_size].append((one.seconds, one.seq_len))
    return [_pass_time(costs, *shape, own) for shape, own in sorted(spent.items(), key=lambda item: item[0])]


def _pass_time(
    costs: CostModel, model: str, query_len: int, batch_size: int, seen: Sequence[tuple[float, int]]
) -> PassTime:
    seconds, seq_lens = np.array(seen).T
    lower, median, upper = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    fit = costs.seconds(model, query_len, Context(batch_size, round(float(seq_lens.mean()))))
    return PassTime(model, query_len, batch_size, len(seen), lower, median, upper, fit)


def models_of(times: Iterable[PassTime]) -> list[str]:
    """The models, the most often passed first."""
    counts: Counter[str] = Counter()
    for one in times:
        counts[one.model] += one.passes
    return [model for model, _ in counts.most_common()]
