"""What is asked: our own prompts, the formats of public question sets, a text file, and streams of requests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaspec.bench.prompts import TEN
from adaspec.files import read_text

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MULTI_TURN = "multi_turn"  # Spec-Bench's name for the task of which these are the categories: multi-turn conversation


@dataclass(frozen=True, slots=True)
class Question:
    """One or more turns of a person, answered one after the other. ``arrival``: seconds since the stream began."""

    id: str
    kind: str
    turns: tuple[str, ...]
    arrival: float | None = None


def ours() -> list[Question]:
    """The ten prompts of ``adaspec.bench.prompts``."""
    return [Question(f"ours-{number}", kind, (prompt,)) for number, (kind, prompt) in enumerate(TEN, 1)]


def spec_bench(path: str) -> list[Question]:
    """Questions in Spec-Bench's format: JSONL with question_id, category and turns.

    Raises:
        ValueError: a line that is no such record, with its number.
        OSError: a file that cannot be read.
    """
    return [
        Question(
            str(record["question_id"]),
            MULTI_TURN if record["category"] in MT_BENCH else str(record["category"]),
            _texts(record["turns"]),
        )
        for record in _records(path, question_id=(str, int), category=(str,), turns=(list,))
    ]


def records(path: str, kind: str, field: str) -> list[Question]:
    """JSONL with the prompt in one field, as HumanEval (prompt) and GSM8K (question) come.

    Raises:
        ValueError: a line that is no such record, with its number.
        OSError: a file that cannot be read.
    """
    found = enumerate(_records(path, **{field: (str,)}), 1)
    return [
        Question(str(record.get("task_id", f"{kind}-{number}")), kind, _texts([record[field]]))
        for number, record in found
    ]


def paragraphs(path: str) -> list[Question]:
    """A prompt per paragraph of a text file.

    Raises:
        ValueError: a file that cannot be read, is no UTF-8 text, or is empty.
    """
    text = read_text(Path(path), "the workload")
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    return [Question(f"text-{number}", "text", (part,)) for number, part in enumerate(parts, 1)]


def stream(source: Sequence[Question], seed: int, phases: Sequence[Mapping[str, Any]]) -> list[Question]:
    """Questions of ``source`` as requests that arrive by a Poisson process, in phases of seconds, rate and mix.

    ``mix`` gives the weight of each kind. No question is asked twice: what is used up is left out.

    Raises:
        ValueError: a kind that the source does not have, a negative number, or no question that ever arrives.
    """
    rng, waiting, found = np.random.default_rng(seed), defaultdict(list), []
    for question in reversed(source):
        waiting[question.kind].append(question)
    begin = 0.0
    for phase in phases:
        mix, rate = {str(kind): float(weight) for kind, weight in phase["mix"].items()}, float(phase["rate"])
        _check_phase(mix, rate, float(phase["seconds"]), waiting)
        for arrival in _arrivals(rng, begin, begin + float(phase["seconds"]), rate):
            weights = np.array([mix[kind] if waiting[kind] else 0.0 for kind in mix])
            if weights.sum():
                kind = list(mix)[rng.choice(len(mix), p=weights / weights.sum())]
                found.append(replace(waiting[kind].pop(), arrival=arrival))
        begin += float(phase["seconds"])
    if not found:
        raise ValueError("no request arrives in the stream: the rates are too low for its seconds")
    return found


def choose(
    questions: Sequence[Question], kinds: Sequence[str], per_kind: int | None, limit: int | None
) -> list[Question]:
    """The first so many of the kinds asked for. With ``per_kind`` the kinds take turns, so that a part has them all.

    Raises:
        ValueError: a kind that is not there, a count below 1, or nothing left.
    """
    for name, count in (("per_kind", per_kind), ("limit", limit)):
        if count is not None and count < 1:
            raise ValueError(f"workload.{name} is at least 1, got {count}")
    known = dict.fromkeys(question.kind for question in questions)
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"no question is of kind {kind!r}; there are {', '.join(known)}")
    kept = [question for question in questions if not kinds or question.kind in kinds]
    if per_kind is not None:
        of = {kind: [question for question in kept if question.kind == kind] for kind in known}
        kept = [own[turn] for turn in range(per_kind) for own in of.values() if turn < len(own)]
        if any(question.arrival is not None for question in kept):
            kept.sort(key=lambda question: question.arrival or 0.0)
    kept = kept[:limit]
    if not kept:
        raise ValueError("no question is left to ask")
    if len({question.id for question in kept}) < len(kept):
        raise ValueError("two questions have the same name; names must differ")
    return kept


def _records(path: str, **fields: tuple[type, ...]) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file, each checked to have ``fields`` of these types."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                ok = all(
                    isinstance(record[name], kinds) and record[name] not in ("", []) for name, kinds in fields.items()
                )
            except (ValueError, LookupError, TypeError):
                ok = False
            if not ok:
                raise ValueError(f"line {number} of {path} is no record with {' and '.join(fields)}")
            yield record


def _texts(turns: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(turn) for turn in turns)


def _check_phase(mix: Mapping[str, float], rate: float, seconds: float, known: Mapping[str, object]) -> None:
    for kind in mix:
        if kind not in known:
            raise ValueError(f"the stream mixes {kind!r}, of which its source has nothing")
    if min(rate, seconds, *mix.values()) < 0.0:
        raise ValueError("seconds, rate and mix of a phase are not negative")


def _arrivals(rng: np.random.Generator, begin: float, end: float, rate: float) -> Iterator[float]:
    at = begin
    while rate > 0.0 and (at := at + float(rng.exponential(1.0 / rate))) < end:
        yield at
