"""What a controller has learned, saved, loaded and merged."""

import json

import numpy as np
import pytest
from made_worlds import GOOD, ONE_PASS, SPACE, drive, fresh, play, scripted

from adaspec import Context, Controller, CostModel, Override, PlanSpace
from adaspec.policy import EpsilonGreedy, Fixed


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
