"""What a target is asked while its output is collected: templates filled at random, and prompts kept for measuring."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from adaspec.files import read_text

DEFAULT = Path(__file__).with_name("prompts.toml")
WORDS = 100  # of an earlier answer that serve as a passage


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts of one kind. ``fillers``: the values of each placeholder that comes from a list."""

    templates: tuple[str, ...]
    fillers: dict[str, tuple[str, ...]]
    held_out: tuple[str, ...]


def read_prompts(path: Path = DEFAULT) -> dict[str, Kind]:
    """Reads a TOML file with a table per kind: ``templates``, ``held_out`` and a list per placeholder (``topics``).

    Raises:
        ValueError: a file that cannot be read, no TOML, a kind without templates or held-out prompts, or a placeholder
            that has no list.
    """
    text = read_text(path, "--prompts")
    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no TOML file of prompts: {error}") from None
    kinds = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path} is no TOML file of prompts: {name!r} is no table of a kind")
        fillers = {key[:-1]: tuple(table[key]) for key in table if key not in ("templates", "held_out")}
        kinds[name] = Kind(tuple(table.get("templates", ())), fillers, tuple(table.get("held_out", ())))
        if not kinds[name].templates:
            raise ValueError(f"{path}: the kind {name!r} has no templates")
        for template in kinds[name].templates:
            unknown = sorted(_placeholders(template) - fillers.keys() - {"a", "b", "c"})
            if unknown:
                raise ValueError(f"{path}: {name!r} has no list {unknown[0]}s for {template!r}")
        if not kinds[name].held_out:
            raise ValueError(f"{path}: the kind {name!r} has no held_out prompts")
    return kinds


class PromptSource:
    """Fills templates at random: every kind equally often, and a passage now and then with an earlier answer."""

    def __init__(self, kinds: dict[str, Kind], seed: str) -> None:
        self._kinds = list(kinds.values())
        self._random = random.Random(seed)
        self._answers: list[str] = []

    def answered(self, text: str) -> None:
        """Keeps an answer to be quoted later."""
        words = text.split(" ")
        if len(words) >= WORDS // 3:
            self._answers = [*self._answers[-31:], " ".join(words[:WORDS])]

    def next(self) -> str:
        kind = self._random.choice(self._kinds)
        template = self._random.choice(kind.templates)
        return template.format(**{name: self._fill(kind, name) for name in sorted(_placeholders(template))})

    def chance(self, share: float) -> bool:
        """True in this share of the calls."""
        return self._random.random() < share

    def _fill(self, kind: Kind, name: str) -> str:
        if name in ("a", "b", "c"):
            low, high = {"a": (20, 200), "b": (3, 30), "c": (2, 9)}[name]
            return str(self._random.randint(low, high))
        values: Sequence[str] = kind.fillers[name]
        if name == "passage" and self._answers and self._random.random() < 0.8:
            values = self._answers
        return self._random.choice(values)


def _placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}
