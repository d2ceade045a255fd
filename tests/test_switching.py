"""What idle models lack is charged to the plans that need them, before they are taken up."""

import json

import numpy as np
import pytest

from adaspec import Context, Controller, CostModel, Decision, Pass, Plan, PlanSpace, RoundOutcome
from adaspec.switching import Switching

SPACE = PlanSpace.grid("t", ["d", "l"], [2], middles=["d"], inner_windows=[1])
SECONDS = np.array([1.0, 0.5, 0.0])  # of one pass of t, d and l
DRAFT, LOOKUP = Plan.parse("t/d:2"), Plan.parse("t/l:2")


def lacking(tokens, seq_len=300):
    return Context(1, seq_len, "", (("d", tokens),) if tokens else ())


def rounds(plan, tokens, seconds, count=1):
    decision = Decision(plan, lacking(tokens), 1.0, 0)
    return [(decision, RoundOutcome(2, 2.0 + seconds, catch_up_seconds=seconds))] * count


def test_only_plans_with_the_idle_model_are_charged():
    switching = Switching(SPACE, 0.2, 10.0)
    assert not switching.charge(lacking(0), SECONDS).any()
    charged = switching.charge(lacking(100), SECONDS)
    for arm, plan in enumerate(SPACE):
        assert charged[arm] == pytest.approx(100 * 0.5 * 0.2 / 10.0 if "d" in plan.models else 0.0), plan
    assert switching.charge(lacking(100), np.stack([SECONDS, 2 * SECONDS]))[1] == pytest.approx(2 * charged)


def test_the_price_of_feeding_is_learned():
    switching = Switching(SPACE, 0.2, 1.0)
    switching.learn(rounds(DRAFT, 1000, 1000 * 0.5 * 0.6, count=20), SECONDS)
    price = switching.charge(lacking(100), SECONDS) / (100 * 0.5)
    assert price[SPACE.arm(DRAFT)] == pytest.approx(0.6, rel=0.05)


def test_what_plays_longer_once_it_is_fed_is_charged_less_per_round():
    short, long = Switching(SPACE, 0.2, 10.0), Switching(SPACE, 0.2, 10.0)
    for _ in range(30):
        short.learn(rounds(DRAFT, 50, 5.0) + rounds(DRAFT, 0, 0.0, count=2), SECONDS)
        long.learn(rounds(DRAFT, 50, 5.0) + rounds(DRAFT, 0, 0.0, count=29), SECONDS)
    arm = SPACE.arm(DRAFT)
    assert short.charge(lacking(50), SECONDS)[arm] > 4 * long.charge(lacking(50), SECONDS)[arm]


def test_short_trials_do_not_make_a_feeding_look_dearer():
    """A model that is left again after a few rounds has not shown how long a text lasts."""
    tried = Switching(SPACE, 0.2, 10.0)
    before = tried.charge(lacking(50), SECONDS)
    for _ in range(30):
        tried.learn(rounds(DRAFT, 50, 5.0) + rounds(DRAFT, 0, 0.0) + rounds(LOOKUP, 0, 0.0, count=8), SECONDS)
    arm = SPACE.arm(DRAFT)
    assert tried.charge(lacking(50), SECONDS)[arm] < before[arm]


def test_a_long_prompt_speaks_against_a_drafter_that_has_not_read_it():
    """The drafter is the better one, but 3,000 tokens to be fed first cost more than it gains."""
    costs = CostModel(SPACE, one_pass=["l"], acceptance={("t", "d"): 0.9, ("t", "l"): 0.4})
    costs.profile(Pass(name, q, 1, 32, s * (1 + 0.02 * q)) for name, s in zip("td", (0.1, 0.02)) for q in (1, 2, 3))
    fed, idle = (dict(zip(SPACE, costs.rates(lacking(tokens)))) for tokens in (0, 3000))
    assert fed[DRAFT] > fed[LOOKUP] > idle[DRAFT]
    assert idle[LOOKUP] == fed[LOOKUP]
    assert idle[SPACE.plain] == fed[SPACE.plain]


def test_a_hold_ends_when_another_text_begins():
    controller = Controller(PlanSpace([DRAFT]), hold=8)
    seen = set()
    for text in range(40):
        for turn in range(6):
            decision = controller.choose(lacking(200 if turn == 0 else 0))
            seen.add((turn, decision.plan))
            catch_up = 100.0 if decision.plan == DRAFT and decision.context.lacking else 0.0
            controller.observe(decision, RoundOutcome(2, 0.1 + catch_up, catch_up_seconds=catch_up))
        if text > 10:
            assert controller.choose(lacking(200)).plan == SPACE.plain  # never worth it, also in the middle of a hold


def test_the_state_comes_back_bit_for_bit():
    switching, other = Switching(SPACE, 0.2, 10.0), Switching(SPACE, 0.2, 10.0)
    switching.learn(rounds(DRAFT, 123, 7.7) + rounds(LOOKUP, 0, 0.0), SECONDS)
    other.load_state_dict(json.loads(json.dumps(switching.state_dict())))
    assert np.array_equal(other.charge(lacking(77), SECONDS), switching.charge(lacking(77), SECONDS))
