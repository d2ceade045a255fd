"""The verdicts of the vLLM run are true of a right controller and false of broken ones."""

import pytest
from vllm_verdicts import EXPORTED, LEARN, MEASURE, OURS, Phase, verdicts

LOW, HIGH = 1, 8
FASTER_ALONE = {0: 30.0, 1: 40.0, 3: 50.0, 6: 60.0}
SLOWER_UNDER_LOAD = {0: 200.0, 1: 180.0, 3: 150.0, 6: 110.0}
DRAFTING_PAYS = {0: 100.0, 1: 120.0, 3: 110.0, 6: 90.0}  # a draft model that vLLM runs with window 0 too


def phases(choose, alone=FASTER_ALONE, busy=SLOWER_UNDER_LOAD, repeats=3, same=True):
    """A run of a controller that settles at choose(rows), after some steps of everything."""
    rates = {LOW: alone, HIGH: busy}

    def phase(stage, arm, rows, windows):
        seconds = sum(1.0 / rates[rows][window] for window in windows)
        return Phase(stage, arm, rows, len(windows), seconds, [(rows, window) for window in windows], same)

    told = [phase(LEARN, OURS, rows, [0, 1, 3, 6, choose(rows)]) for rows in (LOW, HIGH)]
    for _ in range(repeats):
        for rows in (LOW, HIGH):
            told += [phase(MEASURE, str(window), rows, [window] * 20) for window in alone]
            told += [phase(MEASURE, arm, rows, [choose(rows)] * 20) for arm in (OURS, EXPORTED)]
    return told


def failures(told, state=1000):
    return {each.text.split(":")[0].split(",")[0] for each in verdicts(told, (LOW, HIGH), state) if each.holds is False}


def holds(told, words):
    [found] = [each.holds for each in verdicts(told, (LOW, HIGH), 1000) if words in each.text]
    return found


def test_a_right_controller_passes():
    told = phases(lambda rows: 6 if rows == LOW else 0)
    assert failures(told) == set()
    assert holds(told, "begins again") is True
    assert holds(told, "settles") is True


def test_a_right_controller_passes_where_drafting_pays_under_load_too():
    told = phases(lambda rows: 6 if rows == LOW else 1, busy=DRAFTING_PAYS)
    assert failures(told) == set()
    assert holds(told, "begins again") is None
    assert failures(phases(lambda rows: 1, DRAFTING_PAYS, DRAFTING_PAYS)) == set()


@pytest.mark.parametrize(
    ("choose", "wanted"),
    [
        (
            lambda rows: 6,
            {"at 8 rows ours reaches 0.55 of the best fixed window", "ours settles at window 6 with 1 rows"},
        ),
        (lambda rows: 0, {"at 1 rows ours reaches 0.50 of the best fixed window"}),
        (lambda rows: 0 if rows == LOW else 6, {"at 1 rows ours reaches 0.50 of the best fixed window"}),
        (lambda rows: 6 if rows == LOW else 3, {"at 8 rows ours reaches 0.75 of the best fixed window"}),
    ],
    ids=["always long", "never", "the wrong way round", "not far enough"],
)
def test_a_broken_controller_fails(choose, wanted):
    found = failures(phases(choose))
    assert wanted <= found
    assert "drafting stops under load and begins again (rows" in found


def test_a_window_that_never_changes_fails():
    told = [each for each in phases(lambda rows: 1, DRAFTING_PAYS, DRAFTING_PAYS) if each.stage == MEASURE]
    assert failures(told) == {"the window changes"}


def test_other_tokens_and_a_state_that_holds_nothing_fail():
    def right(rows):
        return 6 if rows == LOW else 0

    assert any(text.startswith("greedy tokens") for text in failures(phases(right, same=False)))
    assert failures(phases(right), state=3) == {"the saved state holds 3 rounds of 130 steps"}


def test_an_interrupted_run_is_judged_by_what_it_has():
    told = phases(lambda rows: 6 if rows == LOW else 0)[:2]
    assert failures(told, state=None) == set()
    assert {each.holds for each in verdicts(told, (LOW, HIGH), None)} == {True, None}
    assert failures([], state=None) == set()
