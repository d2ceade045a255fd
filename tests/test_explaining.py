"""What a controller tells people: the explanation of a plan, and the table of all."""

from dataclasses import replace

import pytest
from made_worlds import GOOD, drive, fresh

from adaspec import Context, Controller, Plan, PlanSpace


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


def test_the_table_is_for_people():
    controller, rng = fresh(0)
    assert all(row.measured is None and row.rounds == 0 for row in controller.table())
    drive(controller, GOOD, 60, rng)
    rows = controller.table()
    assert sum(row.rounds for row in rows) == 60
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert [row.forecast for row in rows] == sorted((row.forecast for row in rows), reverse=True)
    assert all((row.measured is None) == (row.rounds == 0) for row in rows)
