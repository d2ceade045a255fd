"""Side by side in one process: the controller, plain decoding, and the best fixed plan of a short sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaspec.controller import Controller
from adaspec.decoding.generate import Generation, Generator, Request
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, Plan

SWEEP_TOKENS = 32  # new tokens per plan of the sweep


class Pinned:
    """A chooser that always takes one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def choose(self, context: Context) -> Decision:
        return Decision(self.plan, context, 1.0, 0)

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class PlanUse:
    """How one plan fared: rounds, their share, and tokens per second as forecast and as measured (None: never)."""

    plan: Plan
    rounds: int
    share: float
    forecast: float
    measured: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plain decoding and the best fixed plan on the request that the controller has answered.

    ``texts_equal``: greedy texts of the three runs are the same; None when sampled (another draw of the same law).
    """

    plain: Generation
    best_plan: Plan
    best: Generation
    texts_equal: bool | None


def plan_uses(generation: Generation, controller: Controller) -> list[PlanUse]:
    """The plans that a generation played, the most used first, with the controller's present forecasts."""
    rounds: dict[Plan, list[RoundOutcome]] = defaultdict(list)
    for decision, outcome in generation.steps:
        rounds[decision.plan].append(outcome)
    context = generation.steps[-1][0].context if generation.steps else None
    forecasts = {row.plan: row.forecast for row in controller.table(context)}
    uses = []
    for plan, outcomes in rounds.items():
        seconds = sum(outcome.seconds for outcome in outcomes)
        measured = sum(outcome.tokens for outcome in outcomes) / seconds if seconds else None
        share = len(outcomes) / len(generation.steps)
        uses.append(PlanUse(plan, len(outcomes), share, forecasts[plan], measured))
    return sorted(uses, key=lambda use: -use.rounds)


def run_fixed(generator: Generator, request: Request, plan: Plan) -> Generation:
    """The request again, with one plan throughout."""
    return generator.generate([request], controller=Pinned(plan))


def compare(
    generator: Generator,
    request: Request,
    answer: Generation,
    candidates: Sequence[Plan],
    tell: Callable[[str, float | None], None],
) -> Comparison:
    """Runs plain decoding, a sweep over ``candidates`` on the first tokens, and the sweep's winner to the end."""
    plain_plan = Plan((generator.chain.target.name,))
    tell("plain decoding", None)
    plain = run_fixed(generator, request, plain_plan)
    length = min(request.max_new_tokens, SWEEP_TOKENS)
    short = Request(request.prompt, length, request.sampling, request.stop)
    rates = {}
    for done, plan in enumerate(candidates):
        tell(f"sweep {plan}", done / len(candidates))
        rates[plan] = run_fixed(generator, short, plan).tokens_per_second
    best_plan = max(rates, key=rates.__getitem__, default=plain_plan)
    tell(f"best fixed plan {best_plan}", None)
    best = plain if best_plan == plain_plan else run_fixed(generator, request, best_plan)
    greedy = request.sampling.temperature == 0
    texts = {each.completions[0].tokens for each in (answer, plain, best)}
    return Comparison(plain, best_plan, best, len(texts) == 1 if greedy else None)
