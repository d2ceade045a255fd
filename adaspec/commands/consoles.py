"""Where commands write to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def consoles(machine: bool) -> tuple[Console, Console]:
    """Where the text goes and where everything else goes: with --json standard output holds only the JSON line."""
    from rich.console import Console

    notes = Console(stderr=True, highlight=False)
    return (notes if machine else Console(highlight=False)), notes
