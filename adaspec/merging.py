"""Adding up nested states of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any


def added(states: Sequence[Any]) -> Any:
    """The sum of nested dicts and lists of numbers; a key or an item that only some have counts as zero elsewhere.

    Raises:
        ValueError: states of different shape, or leaves that are no numbers.
    """
    first = states[0]
    if all(isinstance(state, dict) for state in states):
        keys = dict.fromkeys(key for state in states for key in state)
        return {key: added([state[key] for state in states if key in state]) for key in keys}
    if all(isinstance(state, list) for state in states):
        return [added([item for item in items if item is not None]) for items in zip_longest(*states)]
    if all(isinstance(state, int | float) for state in states):
        return sum(states[1:], first)
    raise ValueError(f"states of different shape do not add up: {', '.join(type(state).__name__ for state in states)}")
