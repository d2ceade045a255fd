"""Question sets: their formats, the choice among them, and streams."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaspec.bench.workload import MT_BENCH, Question, choose, ours, paragraphs, records, spec_bench, stream

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_spec_bench_has_six_categories_and_keeps_both_turns(tmp_path):
    rows = [{"question_id": n, "category": kind, "turns": ["a", "b"]} for n, kind in enumerate(MT_BENCH)]
    rows += [{"question_id": 100 + n, "category": kind, "turns": ["c"]} for n, kind in enumerate(TASKS)]
    found = spec_bench(write(tmp_path / "q.jsonl", rows))
    assert Counter(question.kind for question in found) == {"multi_turn": 8, **dict.fromkeys(TASKS, 1)}
    assert found[0] == Question("0", "multi_turn", ("a", "b"))


@pytest.mark.parametrize(
    "line",
    ["{", "3", '"a"', '{"question_id": 1, "category": "qa"}', '{"question_id": 1, "category": "qa", "turns": []}'],
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 0, "category": "qa", "turns": ["a"]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"^line 3 of .*q\.jsonl"):
        spec_bench(str(file))


def test_bytes_that_are_no_text_are_a_broken_line(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n\xff\xfe\n')
    with pytest.raises(ValueError, match="line 2"):
        records(str(file), "code", "prompt")


def test_records_take_their_own_names_or_numbers(tmp_path):
    file = write(tmp_path / "q.jsonl", [{"task_id": "HumanEval/0", "prompt": "def"}, {"prompt": "class"}])
    assert [question.id for question in records(file, "code", "prompt")] == ["HumanEval/0", "code-2"]


def test_a_text_is_cut_into_paragraphs(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("one\ntwo\n\n\n\nthree\n")
    assert [question.turns for question in paragraphs(str(file))] == [("one\ntwo",), ("three",)]
    file.write_text(" \n\n")
    with pytest.raises(ValueError, match=r"the workload .* is empty"):
        paragraphs(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        paragraphs(str(file))


def test_kinds_take_turns_so_that_a_part_has_them_all():
    found = choose(ours(), [], 2, 4)
    assert [question.kind for question in found] == ["chat", "quoting", "code", "maths"]
    assert {question.kind for question in choose(ours(), ["code"], None, None)} == {"code"}
    with pytest.raises(ValueError, match="'poetry'"):
        choose(ours(), ["poetry"], None, None)
    with pytest.raises(ValueError, match="limit is at least 1, got 0"):
        choose(ours(), [], None, 0)
    with pytest.raises(ValueError, match="same name"):
        choose([*ours(), *ours()], [], None, None)


PHASES = [
    {"seconds": 50, "rate": 1.0, "mix": {"chat": 1.0}},
    {"seconds": 50, "rate": 0.0, "mix": {"chat": 1.0}},
    {"seconds": 50, "rate": 2.0, "mix": {"code": 0.5, "maths": 0.5}},
]
MANY = [Question(f"{kind}{n}", kind, ("a",)) for kind in ("chat", "code", "maths") for n in range(200)]


@given(seed=st.integers(0, 1000))
def test_a_stream_follows_its_phases_and_asks_nothing_twice(seed):
    found = stream(MANY, seed, PHASES)
    times = [question.arrival for question in found]
    assert times == sorted(times)
    assert len({question.id for question in found}) == len(found)
    assert not [at for at in times if 50 <= at < 100]
    assert {question.kind for question in found if question.arrival < 50} <= {"chat"}
    assert {question.kind for question in found if question.arrival >= 100} <= {"code", "maths"}
    assert found == stream(MANY, seed, PHASES)


def test_the_rate_of_a_stream_is_what_is_asked_for():
    counts = [len([one for one in stream(MANY, seed, PHASES) if one.arrival < 50]) for seed in range(100)]
    assert 45 < sum(counts) / 100 < 55  # Poisson of mean 50: the mean of 100 has a standard deviation of 0.7


def test_a_stream_that_cannot_be_is_told():
    with pytest.raises(ValueError, match="'poetry'"):
        stream(MANY, 0, [{"seconds": 1, "rate": 1, "mix": {"poetry": 1}}])
    with pytest.raises(ValueError, match="not negative"):
        stream(MANY, 0, [{"seconds": 1, "rate": -1, "mix": {"chat": 1}}])
    with pytest.raises(ValueError, match="no request arrives"):
        stream(MANY, 0, [{"seconds": 1, "rate": 0, "mix": {"chat": 1}}])
