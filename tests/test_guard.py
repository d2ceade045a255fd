"""The guard rails, on a controller that is fed made-up rounds."""

from __future__ import annotations

import numpy as np
import pytest

from adaspec.controller import Controller
from adaspec.guard import Guard, Rules
from adaspec.outcome import EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context, Override, Plan, PlanSpace
from adaspec.policy import Fixed, Policy

SPACE = PlanSpace.grid("target", ["draft", "lookup"], [2, 4])
PLAIN = SPACE.plain
STEP = 0.01  # seconds of plain decoding per token


class Listener:
    def __init__(self) -> None:
        self.rounds, self.fallbacks, self.benches, self.pulls = [], [], [], 0

    def round(self, decision, outcome, note) -> None:
        self.rounds.append((decision, outcome, note.forecast, note.reason))
        self.pulls += note.pulled

    def fallback(self, context, reason, detail) -> None:
        self.fallbacks.append((context, reason, detail))

    def benched(self, drafter, reason, seconds) -> None:
        self.benches.append((drafter, reason, seconds))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def played(plan: Plan, seconds: float, tokens: int = 1, catch_up: float = 0.0) -> RoundOutcome:
    """One round; all that was drafted and not committed was rejected."""
    edges = ()
    if plan.depth > 1:
        [(verifier, drafter, window)] = plan.edges()
        accepted = tuple(int(place < tokens - 1) for place in range(window))
        reached = tuple(int(place < tokens) for place in range(window))
        edges = (EdgeOutcome(verifier, drafter, reached, reached, accepted),)
    passes = (Pass("target", max(plan.windows, default=0) + 1, 1, 32, seconds - catch_up),)
    return RoundOutcome(tokens, seconds, catch_up_seconds=catch_up, edges=edges, passes=passes)


def guard_of(rules: Rules | None = None, clock: Clock | None = None) -> tuple[Guard, Listener]:
    controller = Controller(SPACE)
    controller.profile(Pass(name, q, 1, 32, STEP) for name in ("target", "draft") for q in (1, 3, 5))
    listener = Listener()
    return Guard(controller, rules, listener, clock or Clock()), listener


def play(guard: Guard, count: int, seconds, context: Context | None = None, override=None) -> list[Plan]:
    """Rounds of one token; ``seconds`` of a plan."""
    plans = []
    for _ in range(count):
        decision = guard.choose(context or Context(), override)
        guard.observe(decision, played(decision.plan, seconds(decision.plan)))
        plans.append(decision.plan)
    return plans


def test_a_fall_below_the_floor_ends_in_plain_decoding_with_a_reason_and_then_a_probe() -> None:
    guard, listener = guard_of(Rules(floor=0.8, rounds=8, pause=20, probe=4))
    pinned = Plan.parse("target/draft:4")
    guard.controller._policy = Fixed(pinned)
    slow = lambda plan: STEP if plan == PLAIN else 10 * STEP  # noqa: E731
    plans = play(guard, 8 + 20 + 4 + 40, slow)
    assert plans[:8] == [pinned] * 8
    assert plans[8:28] == [PLAIN] * 20
    assert plans[28:32] == [pinned] * 4
    assert plans[32:72] == [PLAIN] * 40  # twice as long
    assert [reason for _, reason, _ in listener.fallbacks] == ["floor", "floor"]
    assert "of plain decoding over 8 rounds" in listener.fallbacks[0][2]
    assert {reason for decision, _, _, reason in listener.rounds if decision.plan == PLAIN} == {"floor"}


def test_a_probe_that_does_well_ends_the_pause_for_good() -> None:
    guard, listener = guard_of(Rules(rounds=8, pause=20, probe=4))
    pinned = Plan.parse("target/draft:4")
    guard.controller._policy = Fixed(pinned)
    play(guard, 8, lambda plan: 10 * STEP)
    play(guard, 20, lambda plan: STEP)
    assert play(guard, 200, lambda plan: 0.5 * STEP) == [pinned] * 200
    assert len(listener.fallbacks) == 1


def test_a_probe_is_not_charged_with_the_catch_up_that_the_pause_caused() -> None:
    guard, listener = guard_of(Rules(rounds=8, pause=20, probe=4))
    guard.controller._policy = Fixed(Plan.parse("target/draft:4"))
    play(guard, 8, lambda plan: 10 * STEP)
    play(guard, 20, lambda plan: STEP)
    for _ in range(4):
        decision = guard.choose(Context())
        guard.observe(decision, played(decision.plan, 5 * STEP, catch_up=4.5 * STEP))
    assert len(listener.fallbacks) == 1
    assert guard.choose(Context()).plan != PLAIN


def test_contexts_fall_apart() -> None:
    guard, _ = guard_of(Rules(rounds=8, pause=20))
    pinned = Plan.parse("target/lookup:2")
    guard.controller._policy = Fixed(pinned)
    play(guard, 8, lambda plan: 10 * STEP, Context(tag="slow"))
    assert play(guard, 1, lambda plan: STEP, Context(tag="slow")) == [PLAIN]
    assert play(guard, 1, lambda plan: STEP, Context(tag="other")) == [pinned]


def test_no_floor_never_falls() -> None:
    guard, listener = guard_of(Rules(floor=0.0, rounds=4))
    guard.controller._policy = Fixed(Plan.parse("target/draft:4"))
    assert PLAIN not in play(guard, 50, lambda plan: 10 * STEP)
    assert not listener.fallbacks


def test_a_benched_drafter_is_left_out_for_a_while_and_longer_when_it_fails_again() -> None:
    clock = Clock()
    guard, listener = guard_of(Rules(floor=0.0, bench=10.0), clock)
    guard.bench("draft", "RuntimeError: broken")
    guard.bench("draft", "told twice")
    assert guard.benched == {"draft": "RuntimeError: broken"}
    assert not any("draft" in plan.models for plan in play(guard, 60, lambda plan: STEP))
    clock.now += 10.5
    assert not guard.benched
    guard.bench("draft", "again")
    assert [seconds for _, _, seconds in listener.benches] == [10.0, 20.0]
    clock.now += 19.0
    assert guard.benched
    clock.now += 20.0
    play(guard, 4, lambda plan: STEP, override=Override(plan=Plan.parse("target/draft:2")))
    guard.bench("draft", "much later")
    assert listener.benches[-1][2] == 10.0


def test_a_pinned_plan_of_a_benched_drafter_is_decoded_plainly() -> None:
    guard, listener = guard_of()
    guard.bench("draft", "broken")
    assert play(guard, 3, lambda plan: STEP, override=Override(plan=Plan.parse("target/draft:2"))) == [PLAIN] * 3
    assert {reason for *_, reason in listener.rounds} == {"bench"}


def test_what_a_request_demands_holds_beneath_a_bench_too() -> None:
    guard, _ = guard_of(Rules(floor=0.0))
    guard.bench("lookup", "broken")
    for plan in play(guard, 40, lambda plan: STEP, override=Override(max_depth=2)):
        assert "lookup" not in plan.models
    assert set(play(guard, 10, lambda plan: STEP, override=Override(speculation=False))) == {PLAIN}


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_budget_bounds_the_exploring_rounds_of_its_tag(share: float) -> None:
    guard, listener = guard_of(Rules(floor=0.0, budgets={"strict": share}))
    guard.controller._policy = Uniform()
    rng = np.random.default_rng(0)
    for _ in range(600):
        for tag in ("strict", "free"):
            decision = guard.choose(Context(tag=tag))
            guard.observe(decision, played(decision.plan, STEP * (1 + 0.1 * rng.random())))
    reasons = [(decision.context.tag, reason) for decision, _, _, reason in listener.rounds]
    assert ("free", "budget") not in reasons
    explored = 600 - reasons.count(("strict", "budget"))
    assert explored <= 600 * share * len(SPACE) / (len(SPACE) - 1) + 20  # a uniform draw is the best plan now and then
    assert explored >= 600 * share * 0.5


def test_read_only_learns_nothing_and_plays_what_is_best() -> None:
    guard, listener = guard_of(Rules(read_only=True))
    best = guard.controller.table(Context())[0].plan
    before = guard.controller.state_dict()
    assert set(play(guard, 50, lambda plan: STEP)) == {best}
    assert guard.controller.state_dict() == before
    assert len(listener.rounds) == 50
    guard.bench(best.models[-1], "broken")
    assert best not in play(guard, 5, lambda plan: STEP)


def test_a_pull_is_held_for_some_rounds_and_heard_once() -> None:
    guard, listener = guard_of(Rules(floor=0.0))
    guard.controller._policy = Fixed(PLAIN)
    play(guard, 40, lambda plan: STEP)
    assert listener.pulls == guard.controller.pulls == 10


def test_the_listener_hears_the_forecast_of_what_was_played() -> None:
    guard, listener = guard_of()
    play(guard, 1, lambda plan: STEP)
    [(decision, _, forecast, _)] = listener.rounds
    rates = {row.plan: row.forecast for row in guard_of()[0].controller.table(Context())}
    assert forecast == pytest.approx(rates[decision.plan])


def test_rules_refuse_what_makes_no_sense() -> None:
    for wrong in ({"floor": 1.5}, {"exploration": -0.1}, {"budgets": {"a": 2.0}}, {"rounds": 0}, {"bench": 0.0}):
        with pytest.raises(ValueError, match=r"share|at least|more than"):
            Rules(**wrong)


class Uniform(Policy):
    def probabilities(self, costs, context, rng):
        return np.full(len(costs.space), 1.0 / len(costs.space))
