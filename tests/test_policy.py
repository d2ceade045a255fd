"""Every policy gives a law over plans; each its own."""

import numpy as np
import pytest

from adaspec import (
    Context,
    CostModel,
    Decision,
    EdgeOutcome,
    EpsilonGreedy,
    Fixed,
    Pass,
    Plan,
    PlanSpace,
    RoundOutcome,
    ThompsonSampling,
)

SPACE = PlanSpace.grid("t", ["d"], [2, 4, 8])
PAIR = Plan.parse("t/d:4")


def costs(acceptance=0.5):
    model = CostModel(SPACE, acceptance={("t", "d"): acceptance})
    model.profile([Pass("t", q, 1, 0, 0.1) for q in (1, 3, 5, 9)] + [Pass("d", 1, 1, 0, 0.02)])
    return model


@pytest.mark.parametrize("policy", [ThompsonSampling(), ThompsonSampling(1), Fixed(PAIR), EpsilonGreedy(0.2)])
def test_a_policy_gives_a_law_and_repeats_it_with_the_same_seed(policy):
    laws = [policy.probabilities(costs(), Context(), np.random.default_rng(5)) for _ in range(2)]
    assert laws[0].shape == (len(SPACE),)
    assert laws[0].sum() == pytest.approx(1.0)
    assert (laws[0] >= 0.0).all()
    assert laws[0].tolist() == laws[1].tolist()
    policy.observe(1, 0.5, RoundOutcome(3, 0.2))
    policy.load_state_dict(policy.state_dict())


def test_thompson_gives_each_plan_its_chance_of_being_best():
    model = costs()
    draws = model.sample_rates(np.random.default_rng(0), Context(), 4000)
    chance = np.bincount(draws.argmax(axis=-1), minlength=len(SPACE)) / 4000
    law = ThompsonSampling(4000, sharpness=1.0).probabilities(model, Context(), np.random.default_rng(1))
    assert law == pytest.approx(chance, abs=0.05)  # 4.5 standard errors of a difference of two shares
    assert (chance > 0.05).sum() >= 2


def test_thompson_is_sharp_where_the_matter_is_clear():
    policy = ThompsonSampling()
    hopeless, plain = costs(), SPACE.plain
    for _ in range(30):
        missed = EdgeOutcome("t", "d", (1, 0), (1, 0), (0, 0))
        hopeless.observe(Decision(PAIR, Context(), 1.0, 0), RoundOutcome(1, 0.18, edges=(missed,)))
    law = np.mean([policy.probabilities(hopeless, Context(), np.random.default_rng(s)) for s in range(20)], axis=0)
    assert law[SPACE.arm(plain)] > 0.95


def test_epsilon_greedy_takes_the_best_forecast_and_sometimes_any():
    model = costs(0.9)
    law = EpsilonGreedy(0.2).probabilities(model, Context(), np.random.default_rng(0))
    assert law.min() == pytest.approx(0.2 / len(SPACE))
    assert law.argmax() == model.rates(Context()).argmax()


def test_fixed_plays_its_plan_and_refuses_a_foreign_one():
    law = Fixed(PAIR).probabilities(costs(), Context(), np.random.default_rng(0))
    assert law[SPACE.arm(PAIR)] == 1.0
    with pytest.raises(ValueError, match="t/d:5"):
        Fixed(Plan.parse("t/d:5")).probabilities(costs(), Context(), np.random.default_rng(0))


@pytest.mark.parametrize(
    "build", [lambda: ThompsonSampling(0), lambda: ThompsonSampling(sharpness=0.0), lambda: EpsilonGreedy(-0.5)]
)
def test_impossible_parameters_are_refused(build):
    with pytest.raises(ValueError, match=r"0|-0\.5"):
        build()
