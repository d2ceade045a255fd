"""What the benchmarks share: prompts, progress, and what is written beside their results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaspec.bench.prompts import TEN
from adaspec.files import read_text


def add_prompts(parser: argparse.ArgumentParser, *, max_new_tokens: int = 128) -> None:
    """The options that choose prompts."""
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL with prompt, question or turns (and category); else our own"
    )
    parser.add_argument("--limit", type=int, help="number of prompts")
    parser.add_argument("--raw", action="store_true", help="without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    parser.add_argument("--temperature", type=float, default=0.0)


def read_prompts(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(kind, prompt) in order.

    Raises:
        ValueError: a file that cannot be read, or a line that is no record with a prompt, with its number.
    """
    if arguments.prompts is None:
        return list(TEN[: arguments.limit])
    lines = read_text(arguments.prompts, "--prompts").splitlines()[: arguments.limit]
    return [_record(line, number, arguments.prompts) for number, line in enumerate(lines, 1)]


def _record(line: str, number: int, path: Path) -> tuple[str, str]:
    try:
        record: Mapping[str, Any] = json.loads(line)
        text = record.get("prompt") or record.get("question") or record["turns"][0]
    except (ValueError, AttributeError, LookupError, TypeError):
        raise ValueError(f"line {number} of {path} is no record with a prompt, question or turns") from None
    return str(record.get("category", path.stem)), str(text)


def command(program: str, words: Sequence[str]) -> str:
    """A command, without the folders of this machine."""
    return " ".join([program, *map(_bare, words)])


class Advance(Protocol):
    """Tells what is under way, and that ``steps`` more are done."""

    def __call__(self, what: str, steps: int = 1) -> None: ...


@contextmanager
def bars(what: str, total: int) -> Iterator[Advance]:
    """Shows progress and time left on standard error; yields what advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda now, steps=1: progress.update(bar, advance=steps, description=now)


def _bare(word: str) -> str:
    """A word without the folder of the path that it is, or that stands behind its last ``=`` or ``:``."""
    for sign in ("=", ":"):
        name, found, path = word.rpartition(sign)
        if Path(path).exists():
            return f"{name}{found}{Path(path).name}"
    return word
