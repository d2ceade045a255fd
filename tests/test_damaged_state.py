"""A damaged state: refused by the place of its damage and with nothing taken of it, or else harmless."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_worlds import GOOD, ONE_PASS, SPACE, play, profile, scripted

from adaspec import Context, Controller, CostModel, EdgeOutcome, Policy, baselines
from adaspec.baselines import DrafterByPrompt, HedgeSpec, MaximumLikelihoodWindow, ThroughputAware, UCBSpec
from adaspec.policy import EpsilonGreedy, Exp3
from adaspec.state import StateFile, restore

CONTEXTS = (Context(), Context(4, 100, "tenant"), Context(1, 20, "", lacking=(("d", 7),)))


def learned(seed: int, policy: Policy | None = None) -> Controller:
    """One that has something to say in every part of its state."""
    rng = np.random.default_rng(seed)
    controller = Controller(SPACE, policy or EpsilonGreedy(1.0), CostModel(SPACE, one_pass=ONE_PASS), hold=1, seed=seed)
    controller.profile(profile(SPACE, rng))
    for number in range(45):
        decision = controller.choose(CONTEXTS[number % 3])
        outcome = play(decision.plan, GOOD, rng)
        scored = (EdgeOutcome("t", "lookup", (1,), (1,), (number % 2,)),)
        controller.observe(decision, replace(outcome, scored=scored, catch_up_seconds=0.01 * (number % 3 == 2)))
    return controller


WHOLE = json.dumps(learned(1).state_dict())
MINE = json.dumps(learned(2).state_dict())


def places(value, before=()):
    """The paths of all that is inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*before, key))
    if before:
        yield before


PLACES = list(places(json.loads(WHOLE)))
DAMAGES = {
    "null": lambda value: None,
    "text": lambda value: "7",
    "true": lambda value: True,
    "negative": lambda value: -abs(value) - 1 if isinstance(value, int | float) else -1,
    "nan": lambda value: math.nan,
    "infinite": lambda value: math.inf,
    "huge": lambda value: 10**400,
    "half": lambda value: value + 0.5 if isinstance(value, int | float) else 0.5,
    "cut": lambda value: value[:-1] if isinstance(value, list | str) else [],
    "longer": lambda value: [*value, 0] if isinstance(value, list) else [value],
    "empty": lambda value: [],
}


def damaged(path, damage, whole=WHOLE):
    state = json.loads(whole)
    *outer, last = path
    held = state
    for key in outer:
        held = held[key]
    if damage == "drop":
        del held[last]
    else:
        held[last] = DAMAGES[damage](held[last])
    return state


@settings(max_examples=400)
@given(path=st.sampled_from(PLACES), damage=st.sampled_from(["drop", *DAMAGES]))
def test_one_damage_is_refused_and_nothing_taken_or_does_no_harm(path, damage) -> None:
    controller = Controller(SPACE, EpsilonGreedy(1.0), CostModel(SPACE, one_pass=ONE_PASS), hold=1)
    controller.load_state_dict(json.loads(MINE))
    open_ticket = controller.choose(Context())
    before = controller.state_dict()
    try:
        controller.load_state_dict(damaged(path, damage))
    except ValueError:
        assert controller.state_dict() == before
        controller.observe(open_ticket, play(open_ticket.plan, GOOD, np.random.default_rng(0)))  # is still open
    else:
        json.dumps(controller.state_dict(), allow_nan=False)
    for context in CONTEXTS:
        decision = controller.choose(context)
        controller.observe(decision, play(decision.plan, GOOD, np.random.default_rng(0)))
        assert all(math.isfinite(row.forecast) and row.forecast > 0.0 for row in controller.table(context))


@pytest.mark.parametrize("seed", [1, 2])
def test_an_undamaged_state_is_taken(seed) -> None:
    state = learned(seed).state_dict()
    other = Controller(SPACE, costs=CostModel(SPACE, one_pass=ONE_PASS))
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.state_dict()["costs"] == state["costs"]
    assert Controller.merge([state, state])["target"] == "t"


COUNTS = ("costs", "acceptance", "sums", "t/d")


@pytest.mark.parametrize(
    ("path", "damage", "told"),
    [
        (("totals",), "drop", "a state lacks 'totals'"),
        (("totals", "t"), "cut", r"totals\.t is a list of 3"),
        (("totals", "t", 0), "half", r"totals\.t\[0\] is a whole number"),
        (COUNTS, "cut", r"costs\.acceptance\.sums\.t/d is a list of 4"),
        ((*COUNTS, 2), "cut", r"sums\.t/d has rows of \d and of \d items"),
        ((*COUNTS, 0, 0), "negative", r"sums\.t/d\[0\]\[0\] is a finite number of at least 0, got -\d"),
        (("costs", "passes", "models", "t", "scale"), "nan", r"passes\.models\.t\.scale is a finite number, got nan"),
        (("costs", "passes", "models", "t", "moments", 3, 1), "null", r"t\.moments\[3\]\[1\] is a number, got None"),
        (("costs", "passes", "models", "t", "spread"), "drop", r"passes\.models\.t lacks 'spread'"),
        (("costs", "switching", "fed"), "text", r"costs\.switching\.fed is a list of 3, got '7'"),
        (("totals", "t", 1), "huge", r"totals\.t\[1\] is a finite number of at least 0, got 1000"),
        (("rng", "state", "inc"), "negative", "rng is no state of a PCG64"),
    ],
)
def test_the_place_of_a_damage_is_named(path, damage, told) -> None:
    for take in (learned(2).load_state_dict, lambda state: Controller.merge([state])):
        if path[0] != "rng" or take.__name__ == "load_state_dict":
            with pytest.raises(ValueError, match=told):
                take(damaged(path, damage))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda costs: costs["acceptance"]["all"]["t/d"][1].__setitem__(0, 1e6), "accepted <= reached"),
        (lambda costs: costs["passes"]["models"]["t"].update(count=0.0, fresh=1.0), "fresh are counted"),
        (lambda costs: costs["passes"]["models"]["t"].update(spread=[0.0, 0.0]), "spread has a weight"),
        (lambda costs: costs["passes"]["cells"].update({"one": {}}), "cells is numbered, got 'one'"),
        (lambda costs: costs["passes"]["cells"]["1"]["t"].update({"-1": [1.0, 1.0, 1.0, 1.0]}), "numbered, got '-1'"),
    ],
)
def test_numbers_that_contradict_themselves_are_refused(change, told) -> None:
    state = json.loads(WHOLE)["costs"]
    change(state)
    costs = learned(2).costs
    before = costs.state_dict()
    with pytest.raises(ValueError, match=told):
        costs.load_state_dict(state)
    assert costs.state_dict() == before


def test_what_a_policy_cannot_take_leaves_it_as_it_was() -> None:
    controller, policy = scripted()
    taken = []

    def take(state):
        taken.append(state)
        if state:
            raise KeyError("weights")

    policy.load_state_dict = take
    before = controller.state_dict()
    with pytest.raises(ValueError, match=r"policy\.state: Scripted cannot take it"):
        controller.load_state_dict(before | {"policy": {"name": "Scripted", "state": {"a": 1}}})
    assert taken == [{"a": 1}, {}]  # what it had is given back
    assert controller.state_dict() == before


STATEFUL = (Exp3, *(getattr(baselines, name) for name in baselines.__all__))


@pytest.mark.parametrize("kind", STATEFUL)
def test_one_damage_in_a_policys_own_state_is_refused_or_does_no_harm(kind) -> None:
    costs, policy = learned(3).costs, kind()
    whole = json.dumps(learned(1, policy).state_dict()["policy"]["state"])
    known = list(places(json.loads(whole)))

    @settings(max_examples=150)
    @given(path=st.sampled_from(known), damage=st.sampled_from(["drop", *DAMAGES]))
    def check(path, damage) -> None:
        taken = kind()
        learned(2, taken)
        before = json.dumps(taken.state_dict())
        taken.load_state_dict(taken.state_dict())  # what it says itself it takes
        assert json.dumps(taken.state_dict()) == before
        try:
            taken.load_state_dict(damaged(path, damage, whole))
        except ValueError:
            assert json.dumps(taken.state_dict()) == before
        for step in range(3):
            rng = np.random.default_rng(step)
            law = taken.probabilities(costs, Context(), rng)
            assert law.min() >= 0.0
            assert law.sum() == pytest.approx(1.0)
            arm = int(rng.choice(len(law), p=law))
            taken.observe(arm, float(law[arm]), [play(SPACE[arm], GOOD, rng)])
        json.dumps(taken.state_dict(), allow_nan=False)

    check()


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        (Exp3, {"weights": [0.5, 0.6], "tokens": 1.0, "seconds": 1.0, "largest": 1.0}, "weights: weights sum to 1"),
        (Exp3, {"weights": [1.5, -0.5], "tokens": 1.0, "seconds": 1.0, "largest": 1.0}, r"weights\[1\] is a finite"),
        (UCBSpec, {"count": [1.0], "sum": []}, "every plan has a count and a sum"),
        (ThroughputAware, {"recent": [[[0, 1], [0, 0]]]}, r"recent\[0\]: two counts per position"),
        (MaximumLikelihoodWindow, {"pulls": [[1, 1, 0.0, 0.0]]}, r"pulls\[0\]: passes take some seconds"),
        (HedgeSpec, {"regret": {"d": "much"}}, r"regret\.d is a number, got 'much'"),
        (DrafterByPrompt, {"pulls": {}, "moments": {"d": [[[0.0] * 10] * 10, [0.0] * 10]}}, "positive definite"),
        (DrafterByPrompt, {"pulls": {}, "moments": {"d": [np.eye(10).tolist(), [0.0] * 10]}}, "come from pulls"),
    ],
)
def test_what_contradicts_itself_in_a_policys_own_state_is_refused_by_its_place(kind, state, told) -> None:
    controller = learned(2, kind())
    before = controller.state_dict()
    with pytest.raises(ValueError, match=rf"policy\.state: {kind.__name__} cannot take it: .*{told}"):
        controller.load_state_dict(before | {"policy": {"name": kind.__name__, "state": state}})
    assert controller.state_dict() == before


def test_a_damaged_file_is_set_aside_and_the_log_tells_where_it_is_damaged(tmp_path, caplog) -> None:
    path, controller = tmp_path / "state.json", learned(2)
    path.write_text(json.dumps(damaged(("costs", "switching", "fed"), "null")))
    before = controller.state_dict()
    assert not restore(controller, StateFile(path))
    assert controller.state_dict() == before
    assert "costs.switching.fed is a list of 3, got None" in caplog.text
    assert list(tmp_path.glob("state.json.corrupt-*"))
