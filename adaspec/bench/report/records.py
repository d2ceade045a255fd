"""Reads what a run left behind: rounds, prompts, configuration, summary, what its controllers had learned.

A run may have been interrupted: its summary may be missing, and half a last line is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from adaspec.acceptance import check_edge
from adaspec.outcome import Decision, EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context, Plan

ROUNDS, PROMPTS = "rounds.jsonl", "prompts.jsonl"
Turn: TypeAlias = tuple[str, int, int]
"""One answer of a method: prompt, repetition, turn of the conversation."""
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a method: where it was played, what was chosen and what came of it.

    ``pulled``: the policy was asked, so a new hold begins; ``forecast``: tokens/s expected at the choice, or None.
    """

    method: str
    turn: Turn
    kind: str
    decision: Decision
    outcome: RoundOutcome
    pulled: bool = True
    forecast: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One answer of a method; ``seconds`` include the prefill, as Spec-Bench counts. ``rounds``: 0 if not told."""

    method: str
    turn: Turn
    kind: str
    tokens: int
    seconds: float
    rounds: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder. ``states``: controller state per method; ``cut``: files whose last line was half written.

    Digests of sampled texts are left out, since another draw of the same law is another text.
    """

    folder: Path
    rounds: tuple[Round, ...]
    prompts: tuple[Prompt, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cut: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last two parts of the folder's path: date and time of a single run, time and number of a multirun."""
        return "/".join(self.folder.absolute().parts[-2:])


def find(places: Sequence[Path]) -> list[Path]:
    """The run folders at or beneath ``places``, each once.

    Raises:
        ValueError: a place that is not there, or holds no run.
    """
    found: dict[Path, None] = {}
    for place in places:
        if not place.exists():
            raise ValueError(f"there is no run {str(place)!r}")
        inside = sorted({file.parent for name in (ROUNDS, PROMPTS) for file in place.rglob(name)})
        if not inside:
            raise ValueError(f"there is nothing to report in {str(place)!r}: neither {ROUNDS} nor {PROMPTS}")
        found |= dict.fromkeys(one for one in inside if not any(parent in inside for parent in one.parents))
    return list(found)


class EmptyRun(ValueError):
    """A run that ended before anything was finished."""


def read_all(folders: Iterable[Path], skip: Callable[[str], None]) -> list[Run]:
    """The runs that hold anything; ``skip`` is told of the others.

    Raises:
        EmptyRun: none does.
        ValueError, OSError: see ``read``.
    """
    found, empty = [], []
    for folder in folders:
        try:
            found.append(read(folder))
        except EmptyRun as error:
            empty.append(error)
    if not found:
        raise empty[0]
    for reason in empty:
        skip(str(reason))
    return found


def read(folder: Path) -> Run:
    """One run.

    Raises:
        ValueError: a line that is no record, by its number; a file that is no JSON or YAML.
        EmptyRun: no record at all.
        OSError: a file that cannot be read.
    """
    rounds, rounds_cut = _lines(folder / ROUNDS, _round)
    prompts, prompts_cut = _lines(folder / PROMPTS, _prompt)
    if not (rounds or prompts):
        raise EmptyRun(f"there is nothing to report in {str(folder)!r}: no round and no prompt was finished")
    states = {file.stem.removeprefix("controller-"): _json(file) for file in sorted(folder.glob("controller-*.json"))}
    summary = _json(folder / "summary.json") if (folder / "summary.json").exists() else None
    cut = tuple(name for name, half in ((ROUNDS, rounds_cut), (PROMPTS, prompts_cut)) if half)
    config = _config(folder / "config.yaml")
    if (config.get("sampling") or {}).get("temperature"):
        prompts = tuple(replace(one, digest="") for one in prompts)
    return Run(folder, rounds, prompts, config, summary, states, cut)


def _lines(path: Path, parse: Callable[[Mapping[str, Any]], _Record]) -> tuple[tuple[_Record, ...], bool]:
    """The records of a JSONL file, and whether half a last line was passed over."""
    if not path.exists():
        return (), False
    *whole, rest = path.read_bytes().split(b"\n")
    found = [_parsed(line, number, path, parse) for number, line in enumerate(whole, 1) if line.strip()]
    if rest.strip():
        try:
            found.append(_parsed(rest, len(whole) + 1, path, parse))
        except ValueError:
            return tuple(found), True
    return tuple(found), False


def _parsed(line: bytes, number: int, path: Path, parse: Callable[[Mapping[str, Any]], _Record]) -> _Record:
    try:
        return parse(json.loads(line.decode("utf-8"), parse_constant=_no_number))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"line {number} of {str(path)!r} is no record: {reason}") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} holds no JSON object")
    return found


def _config(path: Path) -> dict[str, Any]:
    """The resolved configuration; empty where there is none."""
    if not path.exists():
        return {}
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} is no configuration: {error}") from None
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _turn(record: Mapping[str, Any]) -> Turn:
    return str(record["prompt"]), int(record["repeat"]), int(record["turn"])


def _round(record: Mapping[str, Any]) -> Round:
    rows, seq_len = int(record["batch_size"]), int(record["seq_len"])
    context = Context(rows, seq_len, str(record.get("tag") or ""))
    decision = Decision(
        Plan.parse(record["plan"]), context, _above("propensity", record["propensity"]), int(record["round"])
    )
    outcome = RoundOutcome(
        int(record["tokens"]),
        _above("seconds", record["seconds"]),
        rows,
        float(record.get("catch_up_seconds") or 0.0),
        tuple(map(_edge, record.get("edges") or ())),
        tuple(map(_pass, record.get("passes") or ())),
    )
    forecast = None if record.get("forecast") is None else _above("forecast", record["forecast"])
    pulled = bool(record.get("pulled", True))
    return Round(str(record["method"]), _turn(record), str(record["kind"]), decision, outcome, pulled, forecast)


def _edge(record: Mapping[str, Any]) -> EdgeOutcome:
    reached, offered, accepted = (_counts(record[name]) for name in ("reached", "offered", "accepted"))
    found = EdgeOutcome(str(record["verifier"]), str(record["drafter"]), reached, offered, accepted)
    check_edge(found)
    if len(offered) != len(reached):
        raise ValueError(f"per position, one count of offered tokens; got {offered} of {reached}")
    return found


def _counts(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))


def _pass(record: Mapping[str, Any]) -> Pass:
    query_len, rows, seq_len = (int(record[name]) for name in ("query_len", "batch_size", "seq_len"))
    return Pass(str(record["model"]), query_len, rows, seq_len, _above("seconds of a pass", record["seconds"]))


def _prompt(record: Mapping[str, Any]) -> Prompt:
    return Prompt(
        str(record["method"]),
        _turn(record),
        str(record["kind"]),
        int(record["tokens"]),
        _above("seconds", record["seconds"]),
        int(record.get("rounds") or 0),
        str(record.get("digest") or ""),
    )


def _above(what: str, value: Any) -> float:
    number = float(value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"{what} is above 0, got {value!r}")
    return number
