"""The overhead command runs and its last line is JSON; how fast it is, a test does not judge."""

import json
import sys

import pytest

from adaspec.bench import overhead


def test_it_prints_microseconds_per_size(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["overhead", "--plans", "5", "40", "--rounds", "64"])
    assert overhead.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last["microseconds"]) == ["5", "40"]
    assert all(value > 0.0 for value in last["microseconds"].values())


@pytest.mark.parametrize("size", [2, 5, 50, 150, 500])
def test_a_space_has_the_size_that_was_asked_for(size):
    space = overhead.space_of(size)
    assert len(space) == size
    assert {plan.depth for plan in space} >= ({1, 2, 3} if size >= 5 else {1})


def test_one_plan_is_no_choice():
    with pytest.raises(ValueError, match="1"):
        overhead.space_of(1)
