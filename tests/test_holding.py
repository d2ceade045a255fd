"""When a hold ends early, and when a law of the policy is void."""

import numpy as np
import pytest

from adaspec import RoundOutcome
from adaspec.holding import Hold, Ranking, Seen


def ranked(rounds=1000, patience=10):
    ranking = Ranking(rounds)
    ranking.renew(np.array([0.5, 0.25, 0.25]), patience)
    ranking.forecast(np.array([3.0, 1.0, 2.0]))
    return ranking


def hold(ranking, trust, arm=0, seen=None, best=10.0):
    """A hold of four rounds, all handed out but three, that is to bring 8 tokens per second or more."""
    return Hold(arm, 0.5, 3, best, 8.0, trust, ranking, 4, seen=seen or Seen())


def test_a_new_plan_is_given_up_at_once_and_the_law_goes_on_without_it():
    ranking = ranked()
    tried = hold(ranking, trust=0.0)
    tried.add(RoundOutcome(1, 0.2))
    assert tried.left == 0
    assert ranking.uses == 10
    assert ranking.law.chances == [0.0, 0.5, 0.5]
    for arm in (1, 2):
        hold(ranking, 0.0, arm).add(RoundOutcome(1, 0.2))
    assert ranking.uses == 0  # nothing is left of it


def test_a_familiar_plan_is_forgiven_a_bad_round_but_not_many():
    """Half the floor: within chance for 6 rounds at trust 1 (1.25 / sqrt(6) = 0.51), no more at the 7th."""
    ranking, seen = ranked(), Seen()
    for _ in range(6):
        kept = hold(ranking, 1.0, seen=seen)
        kept.add(RoundOutcome(4, 1.0))
        assert (kept.left, ranking.uses) == (3, 10)
    kept = hold(ranking, 1.0, seen=seen)
    kept.add(RoundOutcome(4, 1.0))
    assert (kept.left, ranking.uses) == (0, 0)


def test_catch_up_is_no_collapse():
    kept = hold(ranked(), 0.0)
    kept.add(RoundOutcome(1, 5.1, catch_up_seconds=5.0))
    assert kept.left == 3


@pytest.mark.parametrize(("tokens", "void"), [(13, False), (15, True)])
def test_a_plan_far_above_the_best_forecast_calls_for_a_new_law(tokens, void):
    """4 rounds: 10 x (1 + 0.8 / sqrt(4)) = 14 tokens per second."""
    ranking = ranked()
    kept = hold(ranking, 0.0)
    for left in (2, 1, 0):
        kept.add(RoundOutcome(tokens, 1.0))
        assert ranking.uses == 10
        kept.left = left
    kept.add(RoundOutcome(tokens, 1.0))
    assert (ranking.uses == 0) == void


def test_laws_serve_longer_in_a_context_that_is_known_and_not_after_a_change():
    assert [ranked(rounds, 8).uses for rounds in (0, 31, 32, 100, 10**6)] == [1, 1, 2, 4, 8]
    ranking = ranked()
    assert not ranking.old
    ranking.restart()
    assert ranking.old
    assert ranking.uses == 0
    ranking.renew(np.ones(3) / 3, 8)
    assert ranking.uses == 1


@pytest.mark.parametrize(
    ("law", "arm", "trust", "after"),
    [
        ([1.0, 0.0, 0.0], 0, 1.0, [0.0, 1.0, 0.0]),  # a trial failed: back to what is forecast to be best
        ([0.0, 1.0, 0.0], 1, 1.0, [0.0, 1.0, 0.0]),  # so did that itself: nothing better is known
        ([0.5, 0.5, 0.0], 1, 1.0, [0.0, 1.0, 0.0]),
        ([0.5, 0.5, 0.0], 1, 0.1, [1.0, 0.0, 0.0]),  # hardly known: the law goes on without it
    ],
)
def test_after_a_collapse_the_best_plan_known_may_play_until_there_is_a_new_law(law, arm, trust, after):
    ranking = Ranking(1000)
    ranking.renew(np.array(law), 10)
    ranking.forecast(np.array([1.0, 3.0, 2.0]))
    ranking.collapsed(arm, trust)
    assert ranking.law.chances == after
    assert ranking.uses == (10 if trust < 0.5 else 0)
    assert ranking.stands


def test_a_plan_that_soars_may_play_on_until_there_is_a_new_law():
    ranking = ranked()
    ranking.soared(2)
    assert ranking.law.chances == [0.0, 0.0, 1.0]
    assert (ranking.uses, ranking.stands) == (0, True)


def test_a_new_law_does_not_wait_where_a_context_has_changed_or_nothing_is_left_of_the_old_one():
    ranking = ranked()
    ranking.restart()
    assert not ranking.stands
    ranking.renew(np.array([1.0, 0.0, 0.0]), 10)
    assert ranking.stands
    ranking.collapsed(0, 0.0)
    assert not ranking.stands
