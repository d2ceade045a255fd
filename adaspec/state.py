"""What a controller has learned, in a file that is always whole (stand-in: the adapters' branch has it)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adaspec.controller import Controller


class StateFile:
    """One state in one file, which is replaced as a whole; a file that holds no JSON object is set aside."""

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        self._path = Path(place)

    def load(self) -> dict[str, Any] | None:
        """The last state that was saved whole; None where there is none."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            state = json.loads(content)
        except ValueError:
            state = None
        if isinstance(state, dict):
            return state
        self.set_aside()
        return None

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces it."""
        new = self._path.with_name(f".{self._path.name}.new")
        with new.open("wb") as file:
            file.write(json.dumps(state, allow_nan=False).encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    def set_aside(self) -> str:
        """Renames what is there, so that it is neither used nor lost; returns its new place."""
        return str(self._path.rename(f"{self._path}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"))


def restore(controller: Controller, store: StateFile) -> bool:
    """Loads what a store holds into a controller; whether there was anything that could be used.

    Raises:
        ValueError: a state of something else, of another version or of another target.
    """
    state = store.load()
    if state is None:
        return False
    before = controller.state_dict()
    meant = all(state.get(key) == before[key] for key in ("format", "version", "target"))
    try:
        controller.load_state_dict(state)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        if not meant:
            raise
        controller.load_state_dict(before)
        store.set_aside()
        return False
    return True
