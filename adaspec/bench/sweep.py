"""A W&B sweep definition played on this machine, without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Trials = list[list[str]]


def definition(path: str) -> dict[str, Any]:
    """The definition in a file.

    Raises:
        ValueError: a file that cannot be read, no YAML, or no sweep.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not isinstance(found.get("parameters"), dict):
        raise ValueError(f"{path} is no sweep: it has no parameters")
    return found


def fixed_words(sweep: Mapping[str, Any]) -> list[str]:
    """The words of its command that every trial has, but those about records: nothing is told to a server."""
    words = [str(word) for word in sweep.get("command", ())]
    after = words[words.index("bench") + 1 :] if "bench" in words else []
    return [word for word in after if "${" not in word and not word.startswith("record")]


def product_words(sweep: Mapping[str, Any]) -> list[str] | None:
    """The words of a multirun over all combinations, None where the method of the sweep is not grid.

    Raises:
        ValueError: a parameter without values.
    """
    if sweep.get("method") != "grid":
        return None
    return [f"{name}={','.join(map(_word, _values(name, own)))}" for name, own in sweep["parameters"].items()]


def draws(sweep: Mapping[str, Any], seed: int = 0) -> Trials:
    """``run_cap`` combinations (10 by default) drawn at random, whatever the method but grid: bayes needs the server.

    Raises:
        ValueError: a parameter of which nothing can be drawn.
    """
    rng = np.random.default_rng(seed)
    named, turns = sweep["parameters"].items(), range(int(sweep.get("run_cap", 10)))
    return [[f"{name}={_word(_draw(name, own, rng))}" for name, own in named] for _ in turns]


def _values(name: str, own: Mapping[str, Any]) -> Sequence[Any]:
    found: Sequence[Any] = own.get("values") or ([own["value"]] if "value" in own else [])
    if not found:
        raise ValueError(f"the sweep's parameter {name} has no values")
    return found


def _draw(name: str, own: Mapping[str, Any], rng: np.random.Generator) -> Any:
    if "min" not in own or "max" not in own:
        known = _values(name, own)
        return known[int(rng.integers(len(known)))]
    low, high, law = own["min"], own["max"], str(own.get("distribution", ""))
    if law == "log_uniform_values":
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))
    if "int" in law or (not law and isinstance(low, int) and isinstance(high, int)):
        return int(rng.integers(low, high + 1))
    return float(rng.uniform(low, high))


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
