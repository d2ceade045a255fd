"""What a trial of a plan is worth: the closed form against draws, and what it must not depend on."""

from dataclasses import replace

import numpy as np
import pytest

from adaspec import Context, CostModel, Decision, EdgeOutcome, Pass, Plan, PlanSpace, RoundOutcome
from adaspec.prospects import Prospects

HORIZON = 300.0


def prospects(rates, shared=(0.0, 0.0), own=0.0, half=8.0, **changes):
    """Two plans; one part that both may have."""
    rates = np.array(rates, dtype=float)
    ones = np.ones(2)
    found = Prospects(
        rates, rates, ones, 0.0 * ones, np.array([shared]), np.full((1, 2), half), own * ones, half * ones, 0.0 * ones
    )
    return replace(found, **changes)


def test_the_best_plan_is_worth_no_trial_and_a_known_one_neither():
    assert prospects([2.0, 1.9]).values(HORIZON, 0.0)[0] == 0.0
    assert prospects([2.0, 1.9]).values(HORIZON, 0.0)[1] < 0.0
    assert prospects([1.9, 2.0], own=0.1).values(HORIZON, 0.0)[1] == 0.0


def test_the_value_is_the_expected_win_less_the_price():
    """Against draws of what the trial of 4, 16 or 64 rounds says; standard error below 0.2 rounds."""
    found = prospects([2.0, 1.8], shared=(0.0, 0.2), half=8.0).values(HORIZON, 0.0)[1]
    gap, luck = np.log(2.0 / 1.8), np.random.default_rng(0).standard_normal(400_000)
    drawn = []
    for rounds in (4, 16, 64):
        told = 0.2 * np.sqrt(rounds / (rounds + 8.0)) * luck
        drawn.append(HORIZON * np.maximum(told - gap, 0.0).mean() - rounds * 0.1)
    assert found == pytest.approx(max(drawn), abs=0.2)
    assert found > 0.0


def test_a_doubt_that_the_best_plan_shares_is_no_reason_to_try_another():
    assert prospects([2.0, 1.9], shared=(0.3, 0.3)).values(HORIZON, 0.0)[1] < 0.0
    assert prospects([2.0, 1.9], shared=(0.3, 0.0)).values(HORIZON, 0.0)[1] < 0.0  # it has not got that part
    assert prospects([2.0, 1.9], shared=(0.0, 0.3)).values(HORIZON, 0.0)[1] > 0.0


def test_feeding_is_paid_once_and_little_evidence_is_worth_more():
    new, known = (prospects([2.0, 1.9], shared=(0.0, 0.3), half=half).values(HORIZON, 0.0)[1] for half in (8.0, 800.0))
    assert new > known
    fed = prospects([2.0, 1.9], shared=(0.0, 0.3), feeding=np.array([0.0, 5.0])).values(HORIZON, 0.0)[1]
    assert fed == pytest.approx(new - 5.0)


def test_a_profile_that_may_be_grossly_wrong_is_worth_a_look():
    blind = prospects([2.0, 1.0], gross=np.array([0.0, 2.5]))
    assert blind.values(HORIZON, 0.0)[1] < 0.0
    assert blind.values(HORIZON, 0.05)[1] == pytest.approx(HORIZON * 0.05 * np.log(1.25) - 4 * 0.5, abs=1e-3)


SPACE = PlanSpace.grid("t", ["d", "l"], [2, 4], middles=["d"], inner_windows=[1])


def learned():
    costs = CostModel(SPACE, one_pass=["l"])
    costs.profile(Pass(name, q, 1, 0, s) for name, s in zip("tdl", (0.1, 0.02, 1e-4)) for q in (1, 2, 3, 5))
    edge = EdgeOutcome("t", "d", (1, 1), (1, 1), (1, 0))
    passes = (Pass("d", 1, 1, 0, 0.02), Pass("d", 1, 1, 0, 0.02), Pass("t", 3, 1, 0, 0.1))
    for _ in range(20):
        costs.observe(
            Decision(Plan.parse("t/d:2"), Context(), 1.0, 0), RoundOutcome(2, 0.14, edges=(edge,), passes=passes)
        )
    return costs


@pytest.mark.parametrize("context", [Context(), Context(1, 200, "", (("d", 150),)), Context(4, 20)])
def test_the_prospects_of_a_model_agree_with_its_forecast(context):
    found = learned().prospects(context)
    assert found.rates == pytest.approx(learned().rates(context))
    assert (found.fed >= found.rates * (1 - 1e-12)).all()
    assert (found.feeding > 0.0).any() == bool(context.lacking)
    assert (found.shared >= -1e-12).all()


def test_the_forecast_that_prospects_leave_behind_is_of_their_context_and_no_older_than_the_rounds():
    costs, fresh = learned(), learned()
    costs.prospects(Context())
    assert costs.rates(Context(4, 20)) == pytest.approx(fresh.rates(Context(4, 20)))
    costs.prospects(Context())
    for one in (costs, fresh):
        one.observe(Decision(SPACE.plain, Context(), 1.0, 0), RoundOutcome(1, 0.3))
    assert costs.rates(Context()) == pytest.approx(fresh.rates(Context()))
    assert costs.rates(Context()) != pytest.approx(learned().rates(Context()))


def test_only_plans_with_a_part_hang_on_it():
    costs = learned()
    found = costs.prospects(Context())
    edges = list(costs.verifications)
    for row, name in enumerate(["caution", *edges, *SPACE.models]):
        for arm, plan in enumerate(SPACE):
            pairs = [edge[:2] for edge in plan.edges()]
            has = name == "caution" or name in pairs or name in plan.models
            assert has or found.shared[row, arm] <= 1e-12, (name, plan)
    of = dict(zip(edges, found.shared[1:]))
    long = SPACE.arm(Plan.parse("t/d:2"))
    assert of["t", "d"][long] < 0.3 * of["t", "l"][SPACE.arm(Plan.parse("t/l:2"))]  # played, and never
    assert found.gross[SPACE.arm(Plan.parse("t/l:2"))] > 0.0
    assert found.gross[long] == 0.0
