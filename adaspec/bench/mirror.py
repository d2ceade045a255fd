"""What is told to others than the run's folder while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


class Mirror:
    """Tells nobody."""

    def add(self, prompts: Sequence[Line], rounds: Sequence[Line]) -> None:
        """Takes what one unit brought."""

    def finish(self, summary: Mapping[str, Any], folder: Path) -> None:
        """Takes the end of the run."""


def mirror(record: Any, config: Mapping[str, Any], out: Path, group: str | None) -> Mirror:
    """The mirror that a configuration asks for."""
    return Mirror()
