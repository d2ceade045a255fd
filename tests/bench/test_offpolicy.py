"""Off-policy values against what the same world really does with the plan in question."""

from __future__ import annotations

import pytest
from run_folders import Player, exploring, methods, write_run

from adaspec.bench.offpolicy import always, value
from adaspec.bench.report import measures, records
from adaspec.bench.report.records import Round
from adaspec.plan import Plan

PLAN = Plan.parse("t/d:4")


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Round]]:
    """Of a policy that explores, and of a fixed plan on the same texts."""
    players: dict[str, Player] = {"explorer": exploring(0, 0.7)["thompson"], "fixed": methods(0)["fixed-d4"]}
    folder = tmp_path_factory.mktemp("runs") / "one"
    run = records.read(write_run(folder, players=players, prompts=40, repeats=1, kinds=("quoting",)))
    return {name: measures.in_order(run, name) for name in players}


def rate(rounds: list[Round]) -> float:
    return sum(one.outcome.tokens for one in rounds) / sum(one.outcome.seconds for one in rounds)


def test_the_interval_holds_what_the_plan_really_does(rounds: dict[str, list[Round]]) -> None:
    found = value(rounds["explorer"], always(PLAN))
    assert found.low < rate(rounds["fixed"]) < found.high
    assert found.effective <= found.holds + 1e-9
    assert found.high - found.low < rate(rounds["fixed"])


def test_a_policy_is_worth_what_it_did_under_its_own_law(rounds: dict[str, list[Round]]) -> None:
    found = value(rounds["explorer"], lambda first: {first.decision.plan: first.decision.propensity})
    assert found.rate == pytest.approx(rate(rounds["explorer"]))
    assert found.effective == pytest.approx(found.holds)


def test_weights_undo_what_was_drawn_rarely(rounds: dict[str, list[Round]]) -> None:
    """Plans drawn alike, of which one was rare: its holds count as often as the other's."""
    plans = {one.decision.plan for one in rounds["explorer"]}
    mix = value(rounds["explorer"], lambda first: dict.fromkeys(plans, 1.0 / len(plans)))
    alone = [value(rounds["explorer"], always(plan)) for plan in plans]
    assert min(one.rate for one in alone) < mix.rate < max(one.rate for one in alone)
    assert mix.rate != pytest.approx(rate(rounds["explorer"]), rel=1e-3)


def test_a_plan_that_was_never_played_is_refused(rounds: dict[str, list[Round]]) -> None:
    with pytest.raises(ValueError, match="was ever played"):
        value(rounds["fixed"], always(Plan(("t",))))
