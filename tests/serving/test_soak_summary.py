"""What the soak tells of the plans it saw."""

from __future__ import annotations

from collections import Counter

import pytest

from adaspec.outcome import RoundOutcome
from adaspec.serving.soak import Mix, difference


def test_the_difference_of_two_mixes_is_that_of_their_shares() -> None:
    one, other = Mix(Counter(target=30, lookup=10)), Mix(Counter(target=1, lookup=1, head=2))
    assert difference(one, one) == 0.0
    assert difference(one, Mix(Counter(target=3, lookup=1))) == 0.0
    assert difference(one, other) == pytest.approx(0.5)
    assert difference(one, Mix(Counter(head=7))) == 1.0


def test_a_mix_is_told_in_ratios_of_sums() -> None:
    mix = Mix()
    mix.add("target", RoundOutcome(tokens=4, seconds=0.5, rows=4))
    mix.add("target/lookup:2", RoundOutcome(tokens=5, seconds=0.1, rows=2))
    told = mix.told()
    assert told["rows_per_round"] == 3.0
    assert told["tokens_per_row_and_round"] == 1.5
    assert told["tokens_per_second"] == 15.0
    assert told["plan_shares"] == {"target": 0.5, "target/lookup:2": 0.5}
