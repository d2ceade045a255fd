"""One self-contained HTML page of some runs, and the same figures as PNG."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from adaspec.bench.report import pictures, theme
from adaspec.bench.report.groups import Group, group
from adaspec.bench.report.measures import ALL, Speedup
from adaspec.bench.report.pictures import Picture
from adaspec.bench.report.records import Run

_PER_GROUP = (pictures.timeline, pictures.forecasts, pictures.acceptance, pictures.passes, pictures.regret)


@dataclass(frozen=True, slots=True)
class Section:
    """The pictures of one group of runs; ``key`` is in the names of its files, empty for the only one."""

    name: str
    key: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a page shows: the runs, the figures in one line each, the picture that compares all, and every group's."""

    runs: tuple[Run, ...]
    headlines: tuple[Speedup, ...]
    overview: Picture
    sections: tuple[Section, ...]

    def figures(self) -> Iterator[tuple[str, Picture]]:
        """Every picture with a name of its own."""
        yield self.overview.key, self.overview
        for section in self.sections:
            for picture in section.pictures:
                yield _joined(section.key, picture.key), picture


def report(runs: Sequence[Run]) -> Report:
    """Measures everything.

    Raises:
        ValueError: a controller's state that is none.
    """
    groups = group(runs)
    found = pictures.compared(groups)
    overall = tuple(one for one in found if one.kind == ALL)
    sections = tuple(_section(own, number) for number, own in enumerate(groups, 1))
    return Report(tuple(runs), overall, pictures.speedup(found), sections)


def _section(own: Group, number: int) -> Section:
    key = f"{number}-{re.sub('[^a-z0-9]+', '-', own.name.lower()).strip('-')[:40]}".rstrip("-") if own.name else ""
    return Section(own.name, key, tuple(make(own) for make in _PER_GROUP))


def html(found: Report) -> str:
    """The page; everything that comes from a run is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))
    with theme.style():
        drawn = {name: _variants(name, picture) for name, picture in found.figures()}
    return template.render(
        report=found,
        drawn=drawn,
        joined=_joined,
        colors={variable: (light, theme.DARK[light]) for light, variable in theme.VARIABLES.items()},
        machine=_machine,
    )


def save_pngs(found: Report, folder: Path) -> list[Path]:
    """Writes every picture as PNG; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with theme.style():
        for name, picture in found.figures():
            if picture.draw is not None:
                paths.append(folder / f"{name}.png")
                theme.save_png(picture.draw(theme.WIDE), paths[-1])
    return paths


def _variants(name: str, picture: Picture) -> dict[str, Markup]:
    """The picture for a narrow and for a wide window."""
    if picture.draw is None:
        return {}
    widths = {"narrow": theme.NARROW, "wide": theme.WIDE}
    return {kind: Markup(theme.svg(picture.draw(width), f"{name}-{kind}")) for kind, width in widths.items()}


def _joined(*parts: str) -> str:
    return "-".join(filter(None, parts))


def _machine(summary: Mapping[str, Any] | None) -> str:
    """What a summary says of its machine, as one line."""
    told = (summary or {}).get("machine") or {}
    if not isinstance(told, Mapping):
        return str(told)
    return ", ".join(f"{key} {value}".replace("_", " ") for key, value in told.items())
