"""The controller: tickets, holds, state, and whether it finds the fast plan in simulated worlds.

The worlds: acceptance i.i.d. per edge, seconds with 5 % noise and 2 % outliers of eight times the time. Speed is judged
by the expected tokens and seconds of the plans that were chosen, so a threshold speaks about choices, not about luck.
"""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from adaspec import (
    Context,
    Controller,
    CostModel,
    Decision,
    EdgeOutcome,
    Override,
    Pass,
    Plan,
    PlanSpace,
    Policy,
    RoundOutcome,
)
from adaspec.policy import EpsilonGreedy, Fixed
from adaspec.theory import forecast

SPACE = PlanSpace.grid("t", ["d", "lookup"], [2, 3, 5, 8], middles=["m"], inner_windows=[2, 3, 4])
GOOD = {("t", "d"): 0.75, ("t", "m"): 0.85, ("t", "lookup"): 0.15, ("m", "d"): 0.7, ("m", "lookup"): 0.2}
USELESS = dict.fromkeys(GOOD, 0.05)
ONE_PASS = ("lookup",)


def seconds(model, query_len):
    at_one, more = {"t": (0.178, 0.01), "m": (0.1, 0.002), "d": (0.03, 0.001), "lookup": (3e-5, 0.0)}[model]
    return at_one + more * (query_len - 1)


def profile(space, rng):
    """Three passes each at a few query lengths, with the world's noise, as a start-up profile would bring."""
    lengths = {model: (1,) if model in ONE_PASS else (1, 2, 3, 5, 9) for model in space.models}
    kinds = [(model, query_len) for model in space.models for query_len in lengths[model]] * 3
    return [Pass(m, q, 1, 0, seconds(m, q) * np.exp(0.05 * rng.standard_normal())) for m, q in kinds]


def play(plan, hazards, rng):
    """One round of a plan in the world that ``hazards`` and ``seconds`` describe."""
    passes, edges = [], {}

    def forward(model, query_len):
        noise = np.exp(0.05 * rng.standard_normal()) * (8.0 if rng.random() < 0.02 else 1.0)
        passes.append(Pass(model, query_len, 1, 0, seconds(model, query_len) * noise))

    def verify(stage, window):
        model = plan.models[stage]
        if window:
            fill(stage + 1, window)
        forward(model, window + 1)
        if not window:
            return 1
        key = (model, plan.models[stage + 1])
        reached, accepted = edges.setdefault(key, np.zeros((2, plan.windows[stage]), dtype=int))
        for position in range(window):
            reached[position] += 1
            if rng.random() >= hazards[key]:
                return position + 1
            accepted[position] += 1
        return window + 1

    def fill(stage, need):
        if stage == plan.depth - 1:
            for _ in range(1 if plan.models[-1] in ONE_PASS else need):
                forward(plan.models[-1], 1)
            return
        while need > 0:
            need -= verify(stage, min(plan.windows[stage], need - 1))

    tokens = verify(0, plan.windows[0] if plan.windows else 0)
    outcomes = [
        EdgeOutcome(*key, tuple(map(int, r)), tuple(map(int, r)), tuple(map(int, a))) for key, (r, a) in edges.items()
    ]
    return RoundOutcome(tokens, sum(one.seconds for one in passes), edges=tuple(outcomes), passes=tuple(passes))


def expected(hazards):
    """Expected (tokens, seconds) of every plan of the space; [plans, 2]."""
    rounds = [forecast(plan, {k: [v] for k, v in hazards.items()}, seconds, one_pass=ONE_PASS) for plan in SPACE]
    return np.array([(one.tokens, one.seconds) for one in rounds])


def drive(controller, hazards, rounds, rng):
    """Plays rounds; returns the expected (tokens, seconds) of each chosen plan; [rounds, 2]."""
    table, chosen = expected(hazards), []
    for _ in range(rounds):
        decision = controller.choose(Context())
        controller.observe(decision, play(decision.plan, hazards, rng))
        chosen.append(SPACE.arm(decision.plan))
    return table[chosen]


def fresh(seed, acceptance=None, factors=None):
    """A controller that has seen a profile; ``factors``: per model, by which that profile is wrong."""
    rng = np.random.default_rng(seed)
    controller = Controller(SPACE, costs=CostModel(SPACE, one_pass=ONE_PASS, acceptance=acceptance), seed=seed)
    measured = profile(SPACE, rng)
    if factors:
        measured = [replace(one, seconds=one.seconds * factors[one.model]) for one in measured]
    controller.profile(measured)
    return controller, rng


def run(hazards, rounds, seed):
    controller, rng = fresh(seed)
    return drive(controller, hazards, rounds, rng)


def rate(rounds):
    return rounds[:, 0].sum() / rounds[:, 1].sum()


def best(hazards):
    table = expected(hazards)
    return (table[:, 0] / table[:, 1]).max()


def test_a_steady_world_is_played_at_the_speed_of_its_best_plan():
    runs = [run(GOOD, 1000, seed) for seed in range(2)]
    assert best(GOOD) > 1.5 / seconds("t", 1)  # speculation pays here, so plain decoding would fail the test
    assert min(rate(one[:200]) for one in runs) >= 0.9 * best(GOOD)
    assert min(rate(one) for one in runs) >= 0.97 * best(GOOD)


def test_where_speculation_is_useless_little_is_lost_to_plain_decoding():
    plain = 1.0 / seconds("t", 1)
    assert best(USELESS) == pytest.approx(plain)
    runs = [rate(run(USELESS, 100, seed)) for seed in range(6)]
    assert np.mean(runs) >= 0.91 * plain
    assert min(runs) >= 0.88 * plain


def test_a_change_of_regime_is_noticed_both_ways():
    """Staying with the old plans would bring 0.72 of the best after the first change, 0.62 after the second."""
    worse, better = [], []
    for seed in range(3):
        controller, rng = fresh(seed)
        drive(controller, GOOD, 150, rng)
        worse.append(rate(drive(controller, USELESS, 200, rng)[100:]) / best(USELESS))
        better.append(rate(drive(controller, GOOD, 600, rng)[-100:]) / best(GOOD))
    assert np.mean(worse) >= 0.85
    assert np.mean(better) >= 0.93


@pytest.mark.parametrize("lying", ["low", "high", "mixed"])
def test_badly_wrong_priors_are_overcome(lying):
    """Acceptance off by 0.3, times by a factor 3: the last 300 of 1,000 rounds within 10 % of better knowledge."""
    up = {edge: min(value + 0.3, 0.98) for edge, value in GOOD.items()}
    down = {edge: max(value - 0.3, 0.02) for edge, value in GOOD.items()}
    mixed = {edge: (up if number % 2 else down)[edge] for number, edge in enumerate(GOOD)}
    slow = {"t": 1 / 3, "m": 3.0, "d": 3.0, "lookup": 3.0}
    fast = {model: 1.0 / factor for model, factor in slow.items()}
    odd = {"t": 1.0, "m": 1 / 3, "d": 3.0, "lookup": 1.0}
    acceptance, factors = {"low": (down, slow), "high": (up, fast), "mixed": (mixed, odd)}[lying]
    runs = []
    for prior, wrong in ((GOOD, None), (acceptance, factors)):
        played = []
        for seed in range(2):
            controller, rng = fresh(seed, prior, wrong)
            played.append(rate(drive(controller, GOOD, 1000, rng)[-300:]))
        runs.append(np.mean(played))
    assert runs[1] >= 0.9 * runs[0]


def test_no_arm_is_gated_for_ever_and_plain_is_always_one():
    controller, rng = fresh(0)
    assert SPACE.plain in [row.plan for row in controller.table()]
    drive(controller, USELESS, 500, rng)
    later = drive(controller, USELESS, 300, rng)
    plain = expected(USELESS)[0]
    assert (later[:, 1] != plain[1]).any()


class Scripted(Policy):
    """Plays the arms in turn and keeps what it is told."""

    def __init__(self):
        self.arms, self.pulls = 0, []

    def probabilities(self, costs, context, rng):
        law = np.zeros(len(costs.space))
        law[self.arms % len(law)] = 1.0
        self.arms += 1
        return law

    def observe(self, arm, propensity, rounds):
        self.pulls.append((arm, propensity, [outcome.tokens for outcome in rounds]))


def scripted(**options):
    policy = Scripted()
    return Controller(PlanSpace.grid("t", ["d"], [2, 4]), policy, **options), policy


def test_a_hold_is_one_pull_and_late_answers_count():
    controller, policy = scripted(hold=3, collapse=0.0)
    tickets = [controller.choose(Context()) for _ in range(4)]
    assert [str(ticket.plan) for ticket in tickets] == ["t", "t", "t", "t/d:2"]
    assert len({ticket.id for ticket in tickets}) == 4
    for number in (2, 0):
        controller.observe(tickets[number], RoundOutcome(1, 0.5, catch_up_seconds=0.1))
    assert policy.pulls == []
    controller.observe(tickets[3], RoundOutcome(2, 0.5))
    controller.observe(tickets[1], RoundOutcome(1, 1.0))
    assert policy.pulls == [(0, 1.0, [1, 1, 1])]


def test_a_collapse_ends_a_hold_but_catch_up_does_not():
    controller, _ = scripted(hold=4)
    first = controller.choose(Context())
    controller.observe(first, RoundOutcome(1, 0.03 + 10.0, catch_up_seconds=10.0))
    second = controller.choose(Context())
    assert second.plan == first.plan
    controller.observe(second, RoundOutcome(1, 10.0))
    assert controller.choose(Context()).plan != first.plan


def test_contexts_hold_their_own_plans():
    controller, _ = scripted(hold=2)
    plans = [controller.choose(Context(batch_size=size, seq_len=n)).plan for n, size in enumerate([1, 8, 1, 8])]
    assert [str(plan) for plan in plans] == ["t", "t/d:2", "t", "t/d:2"]


def test_a_law_serves_more_pulls_the_longer_a_context_is_known():
    controller, policy = scripted(hold=1, collapse=0.0, patience=3)
    for _ in range(200):
        controller.observe(controller.choose(Context()), RoundOutcome(1, 0.5))
    assert len(policy.pulls) == 200
    changes = [one[0] != other[0] for one, other in zip(policy.pulls, policy.pulls[1:])]
    assert all(changes[:30])
    assert sum(changes[-60:]) == 20
    impatient, policy = scripted(hold=1, collapse=0.0)  # not every policy's law may be used again
    for _ in range(200):
        impatient.observe(impatient.choose(Context()), RoundOutcome(1, 0.5))
    assert policy.arms == 200


def test_a_request_may_pin_a_plan():
    controller, policy = scripted(hold=2, collapse=0.0)
    pinned = Override(plan=Plan.parse("t/d:4"))
    tickets = [controller.choose(Context(), pinned) for _ in range(3)]
    assert {(str(one.plan), one.propensity) for one in tickets} == {("t/d:4", 1.0)}
    for one in tickets:
        controller.observe(one, RoundOutcome(2, 0.5))
    assert policy.arms == 0  # it was not asked ...
    assert policy.pulls == []  # ... and hears nothing
    assert next(row for row in controller.table() if row.rounds).rounds == 3  # but what was seen is learned
    with pytest.raises(ValueError, match="t/x:4"):
        controller.choose(Context(), Override(plan=Plan.parse("t/x:4")))


@pytest.mark.parametrize("override", [Override(max_depth=1), Override(speculation=False), Override(max_depth=2)])
def test_a_request_may_cap_the_depth(override):
    longest = 1 if not override.speculation else override.max_depth
    controller = Controller(SPACE, EpsilonGreedy(1.0), CostModel(SPACE, one_pass=ONE_PASS), hold=1)
    chosen = [controller.choose(Context(), override) for _ in range(200)]
    assert {one.plan.depth for one in chosen} == set(range(1, longest + 1))
    allowed = [plan for plan in SPACE if plan.depth <= longest]
    assert all(one.propensity == pytest.approx(1.0 / len(allowed)) for one in chosen)
    assert any(controller.choose(Context()).plan.depth == 3 for _ in range(50))


def test_where_the_law_leaves_nothing_the_best_allowed_forecast_is_played():
    controller = Controller(SPACE, Fixed(Plan.parse("t/m/d:8,4")), CostModel(SPACE, acceptance={("t", "d"): 0.95}))
    rows = [row for row in controller.table() if row.plan.depth <= 2]
    assert controller.choose(Context(), Override(max_depth=2)).plan == rows[0].plan


def test_impossible_overrides_are_refused():
    with pytest.raises(ValueError, match="max_depth 0"):
        Override(max_depth=0)
    for rest in ({"max_depth": 1}, {"speculation": False}):
        with pytest.raises(ValueError, match="t/d:4"):
            Override(Plan.parse("t/d:4"), **rest)


def test_an_explanation_adds_up():
    controller, rng = fresh(3)
    drive(controller, GOOD, 80, rng)
    decision = replace(controller.choose(Context(2, 50, "")), plan=Plan.parse("t/m/d:5,3"))
    found = controller.explain(decision)
    assert found.rate == pytest.approx(
        found.tokens / (sum(part.seconds for part in found.passes) + found.overhead) * found.factor
    )
    row = next(row for row in controller.table(decision.context) if row.plan == decision.plan)
    assert found.rate == pytest.approx(row.forecast)
    assert [(edge.verifier, edge.drafter, len(edge.acceptance)) for edge in found.edges] == [
        ("t", "m", 5),
        ("m", "d", 3),
    ]
    assert [part.model for part in found.passes] == ["t", "m", "d"]
    assert found.passes[0].passes == pytest.approx(1.0)
    others = [row for row in controller.table(decision.context) if row.plan != decision.plan]
    assert found.runner_up == (others[0].plan, pytest.approx(others[0].forecast))
    text = str(found)
    for part in ("t/m/d:5,3", "t accepts m", "m accepts d", "passes", str(found.runner_up[0]), "tokens/s"):
        assert part in text
    assert controller.explain(decision) == found
    with pytest.raises(ValueError, match="t/x:2"):
        controller.explain(replace(decision, plan=Plan.parse("t/x:2")))


def test_an_explanation_of_the_only_plan_has_no_runner_up():
    controller = Controller(PlanSpace([Plan(("t",))]))
    found = controller.explain(controller.choose(Context()))
    assert (found.runner_up, found.measured, found.edges) == (None, None, ())
    assert "not played yet" in str(found)


def test_foreign_and_repeated_tickets_are_refused():
    controller, _ = scripted()
    ticket = controller.choose(Context())
    with pytest.raises(ValueError, match="not open"):
        controller.observe(Decision(SPACE.plain, Context(), 1.0, 99), RoundOutcome(1, 0.1))
    with pytest.raises(ValueError, match="not open"):
        controller.observe(replace(ticket, propensity=0.5), RoundOutcome(1, 0.1))
    with pytest.raises(ValueError, match="takes time"):
        controller.observe(ticket, RoundOutcome(1, 0.0))
    controller.observe(ticket, RoundOutcome(1, 0.1))
    with pytest.raises(ValueError, match="observed before"):
        controller.observe(ticket, RoundOutcome(1, 0.1))


def test_tickets_that_never_come_back_are_given_up_in_the_end():
    controller = Controller(SPACE, Fixed(SPACE.plain), hold=10**6)
    lost = controller.choose(Context())
    for _ in range(4096):
        last = controller.choose(Context())
    with pytest.raises(ValueError, match="not open"):
        controller.observe(lost, RoundOutcome(1, 0.1))
    controller.observe(last, RoundOutcome(1, 0.1))


def test_the_table_is_for_people():
    controller, rng = fresh(0)
    assert all(row.measured is None and row.rounds == 0 for row in controller.table())
    drive(controller, GOOD, 60, rng)
    rows = controller.table()
    assert sum(row.rounds for row in rows) == 60
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert [row.forecast for row in rows] == sorted((row.forecast for row in rows), reverse=True)
    assert all((row.measured is None) == (row.rounds == 0) for row in rows)


def test_a_saved_controller_goes_on_alike():
    first, rng = fresh(4)
    drive(first, GOOD, 40, rng)
    second = Controller(SPACE, costs=CostModel(SPACE, one_pass=ONE_PASS))
    state = first.state_dict()
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state  # bit for bit
    assert second.table() == first.table()
    first.load_state_dict(first.state_dict())  # ends its open hold, as loading does
    alike = [drive(one, GOOD, 30, np.random.default_rng(1)).tolist() for one in (first, second)]
    assert alike[0] == alike[1]


def test_a_state_fits_another_space_of_the_same_target():
    first, rng = fresh(4)
    drive(first, GOOD, 40, rng)
    other = Controller(PlanSpace.grid("t", ["d", "new"], [3, 12]))
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    known = other.costs.acceptance("t", "d")
    assert known.shape == (12,)
    assert known[0] == pytest.approx(first.costs.acceptance("t", "d")[0], abs=0.02)


def test_merged_halves_are_one_stream():
    """Undiscounted totals are equal; the merged beliefs forecast like those of the whole stream, within 10 %."""
    rng, space = np.random.default_rng(0), SPACE
    whole = Controller(space, EpsilonGreedy(1.0), CostModel(space, one_pass=ONE_PASS), hold=1, seed=1)
    halves = [Controller(space, Fixed(space.plain), CostModel(space, one_pass=ONE_PASS)) for _ in range(2)]
    for number in range(300):
        decision = whole.choose(Context())
        outcome = play(decision.plan, GOOD, rng)
        whole.observe(decision, outcome)
        half = halves[number % 2]
        half.observe(half.choose(Context(), Override(plan=decision.plan)), outcome)
    state = Controller.merge([json.loads(json.dumps(half.state_dict())) for half in halves])
    merged = Controller(space, costs=CostModel(space, one_pass=ONE_PASS))
    merged.load_state_dict(state)
    assert merged.costs.verifications == whole.costs.verifications
    tables = [{row.plan: row for row in one.table()} for one in (merged, whole)]
    for plan in space:
        one, other = (table[plan] for table in tables)
        assert (one.rounds, one.share) == (other.rounds, other.share)
        assert one.measured == pytest.approx(other.measured)
        assert one.forecast == pytest.approx(other.forecast, rel=0.1)


def test_only_states_of_one_kind_are_merged():
    controller, _ = scripted()
    state = controller.state_dict()
    with pytest.raises(ValueError, match="no state"):
        Controller.merge([])
    with pytest.raises(ValueError, match="'x'"):
        Controller.merge([state, state | {"target": "x"}])
    with pytest.raises(ValueError, match="version 2"):
        Controller.merge([state, state | {"version": 1}])


def test_a_newer_state_says_so():
    controller, _ = scripted()
    with pytest.raises(ValueError, match="newer adaspec"):
        controller.load_state_dict(controller.state_dict() | {"version": 99})
    with pytest.raises(ValueError, match="reads version 2") as caught:
        controller.load_state_dict(controller.state_dict() | {"version": 1})
    assert "newer" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"format": "other"}, {"version": 3}, {"target": "x"}])
def test_a_foreign_or_newer_state_is_refused(wrong):
    controller, _ = scripted()
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        controller.load_state_dict(controller.state_dict() | wrong)
    with pytest.raises(ValueError, match="None"):
        controller.load_state_dict({})


@pytest.mark.parametrize("options", [{"hold": 0}, {"patience": 0}, {"collapse": 1.0}, {"collapse": -0.1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        scripted(**options)


def test_costs_of_another_space_are_refused():
    with pytest.raises(ValueError, match="another space"):
        Controller(SPACE, costs=CostModel(PlanSpace([SPACE.plain])))


def test_eight_threads_lose_no_outcome():
    controller = Controller(SPACE, costs=CostModel(SPACE, one_pass=ONE_PASS))
    failures = []

    def work(number):
        rng, tag = np.random.default_rng(number), "ab"[number % 2]
        try:
            for _ in range(125):
                decision = controller.choose(Context(tag=tag))
                controller.observe(decision, play(decision.plan, GOOD, rng))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(row.rounds for row in controller.table()) == 1000
    deep = sum(row.rounds for row in controller.table() if row.plan.depth > 1)
    firsts = [count for (verifier, _), count in controller.costs.verifications.items() if verifier == "t"]
    assert sum(firsts) == deep
