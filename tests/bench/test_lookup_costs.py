"""The lookup's benchmark runs and its last line is JSON; how fast it is, a test does not judge."""

import json
import sys

import pytest

from adaspec.bench import lookup


@pytest.mark.parametrize("cold", [[], ["--cold"]])
def test_it_prints_microseconds_per_text_context_and_window(monkeypatch, capsys, cold):
    monkeypatch.setattr(sys, "argv", ["lookup", "--contexts", "64", "--windows", "2", "4", "--rounds", "3", *cold])
    assert lookup.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = last["microseconds"]
    assert [(row["text"], row["window"]) for row in rows] == [(kind, n) for kind in lookup.TEXTS for n in (2, 4)]
    assert all(row["proposal"] > 0.0 for row in rows)
    assert [row["drafted"] for row in rows if row["text"] == "periodic"] == [2.0, 4.0]
    assert last["cold"] == bool(cold)
