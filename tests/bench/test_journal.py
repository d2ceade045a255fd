"""The folder of a run, without models: units are kept whole or not at all, and a run goes on only as it began."""

import json
from pathlib import Path

import pytest
from bench_runs import lines

from adaspec.bench import journal
from adaspec.bench.journal import Journal, check_same


def unit(prompt, repeat=0, method="ours", rounds=2):
    base = {"method": method, "prompt": prompt, "repeat": repeat}
    return [{**base, "turn": 0}], [{**base, "turn": 0, "round": number} for number in range(rounds)]


def kept(folder):
    return [[line["prompt"] for line in lines(folder / name)] for name in ("prompts.jsonl", "rounds.jsonl")]


def test_what_is_done_is_known_at_once_and_after_opening_again(tmp_path):
    first = Journal(tmp_path)
    first.add(*unit("a"), {"n": 1})
    first.add(*unit("a", repeat=1, rounds=3), {"n": 2})
    first.add(*unit("a", method="plain", rounds=1), None)
    for opened in (first, Journal(tmp_path)):
        assert opened.done == {("ours", "a", 0), ("ours", "a", 1), ("plain", "a", 0)}
        assert opened.steps == {"ours": 5, "plain": 1}
        assert len(opened.prompts) == 3
        assert opened.read("controller-ours.json") == {"n": 2}
        assert opened.read("controller-plain.json") is None


@pytest.mark.parametrize("name", ["rounds.jsonl", "prompts.jsonl"])
def test_a_unit_that_breaks_off_in_either_file_leaves_no_trace(tmp_path, monkeypatch, name):
    opened, append = Journal(tmp_path), journal._append
    opened.add(*unit("a"), {"n": 1})

    def broken(path, new):
        append(path, new)
        if path.name == name:
            raise KeyboardInterrupt

    monkeypatch.setattr(journal, "_append", broken)
    with pytest.raises(KeyboardInterrupt):
        opened.add(*unit("b"), {"n": 2})
    assert kept(tmp_path) == [["a"], ["a", "a"]]
    assert (opened.done, opened.steps["ours"]) == ({("ours", "a", 0)}, 2)
    assert opened.read("controller-ours.json") == {"n": 1}


def test_a_unit_killed_between_its_files_is_dropped_on_opening(tmp_path, monkeypatch):
    """Whichever file was written first: only what ``prompts.jsonl`` holds is done, so the rounds must be there."""
    opened, written = Journal(tmp_path), []
    opened.add(*unit("a"), None)
    append = journal._append

    def first_only(path, new):
        if not written:
            append(path, new)
        written.append(path)

    monkeypatch.setattr(journal, "_append", first_only)  # as though killed before the second
    opened.add(*unit("b"), None)
    again = Journal(tmp_path)
    assert again.done == {("ours", "a", 0)}
    assert again.steps == {"ours": 2}
    assert kept(tmp_path) == [["a"], ["a", "a"]]


def test_what_stands_behind_a_broken_line_is_not_trusted(tmp_path):
    opened = Journal(tmp_path)
    for prompt in "abc":
        opened.add(*unit(prompt), None)
    path = tmp_path / "prompts.jsonl"
    first, _, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{{broken\n{third}\n")
    assert Journal(tmp_path).done == {("ours", "a", 0)}
    assert kept(tmp_path) == [["a"], ["a", "a"]]


@pytest.mark.parametrize("full", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, full):
    opened, write = Journal(tmp_path), Path.write_text
    opened.write("sweep.json", {"t": 1.0})

    def beside(path, text, **options):
        assert path.name != "sweep.json", "is written over, so that a crash would leave half of it"
        write(path, text[:5] if full else text, **options)
        if full:
            raise OSError("full")

    monkeypatch.setattr(Path, "write_text", beside)
    if full:
        with pytest.raises(OSError, match="full"):
            opened.write("sweep.json", {"t": 2.0})
    else:
        opened.write("sweep.json", {"t": 2.0})
    assert json.loads((tmp_path / "sweep.json").read_text()) == {"t": 1.0 if full else 2.0}
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"seed": 1, "policy": {"hold": 4}, "repeats": 3}, "begun with seed=0 and cannot go on with seed=1"),
        ({"seed": 0, "policy": {"hold": 8}, "repeats": 3}, r"policy\.hold=4 and cannot go on with policy\.hold=8"),
        ({"seed": 0, "policy": {"hold": 4, "repeats": 9}, "repeats": 3}, r"policy\.repeats=None"),
        ({"seed": 0, "policy": "other", "repeats": 3}, "policy="),
        ({"policy": {"hold": 4}, "repeats": 3}, "seed=None"),
    ],
)
def test_a_run_may_grow_but_nothing_that_was_measured_may_change(now, told):
    before = {"seed": 0, "policy": {"hold": 4}, "repeats": 3}
    check_same(before, before | {"repeats": 9, "methods": ["plain"], "record": {"mode": "none"}})
    with pytest.raises(ValueError, match=told):
        check_same(before, now)
