"""Which runs belong together: those whose configurations differ in nothing but the seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaspec.bench.report.records import Prompt, Round, Run

_OWN = ("seed", "hydra", "record", "run_dir", "out")  # what may differ between repetitions of one experiment


@dataclass(frozen=True, slots=True)
class Group:
    """Repetitions of one experiment. ``name``: what tells it from the others; empty when there is only one."""

    name: str
    runs: tuple[Run, ...]

    @property
    def rounds(self) -> Iterator[Round]:
        return (one for run in self.runs for one in run.rounds)

    @property
    def prompts(self) -> Iterator[Prompt]:
        return (one for run in self.runs for one in run.prompts)


def group(runs: Sequence[Run]) -> list[Group]:
    """The runs by what tells their configurations apart, in order of appearance.

    A run without a configuration is a group of its own, named by its folder.
    """
    told = [run.config for run in runs if run.config]
    found: dict[str, list[Run]] = {}
    for run in runs:
        name = _difference(run.config, told) if run.config else run.name
        found.setdefault(name, []).append(run)
    if len(found) == 1:
        return [Group("", tuple(runs))]
    return [Group(name, tuple(own)) for name, own in found.items()]


def _difference(config: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """What of a configuration not all of ``others`` have, as short as it can be told."""
    parts = []
    for key in dict.fromkeys(key for other in others for key in other if key not in _OWN):
        values = [other.get(key) for other in others]
        if any(value != values[0] for value in values):
            parts.append(_told(key, config.get(key), values))
    return ", ".join(parts)


def _told(key: str, own: Any, values: Sequence[Any]) -> str:
    """``key=name`` where a group's name tells its values apart, else every key of it that differs."""
    if not all(isinstance(value, Mapping) for value in (own, *values)):
        return f"{key}={own}"
    names = {str(value.get("name")) for value in values}
    if "None" not in names and len(names) == len({repr(value) for value in values}):
        return f"{key}={own['name']}"
    inner = _difference(own, values)
    return ", ".join(f"{key}.{part}" for part in inner.split(", ")) if inner else ""
