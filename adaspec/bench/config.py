"""The configuration tree: where it lies, what its keys are, and which valid key a wrong one is nearest to."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf

import adaspec


@dataclass
class PolicyConfig:
    """A policy and how a controller runs it; ``rule`` names its class and arguments. See ``tournament.Entrant``."""

    name: str = MISSING
    hold: int = 4
    collapse: float = 0.8
    learns: bool = True
    follow: bool = False
    rule: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScenarioConfig:
    """A scenario; ``make`` names a function of ``adaspec.bench.scenarios`` and its arguments but the seed."""

    name: str = MISSING
    make: dict[str, Any] = field(default_factory=dict)


@dataclass
class SimulateConfig:
    """What ``adaspec simulate`` can be told; ``conf/config.yaml`` explains the keys."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    scenario: ScenarioConfig = field(default_factory=ScenarioConfig)
    policies: list[str] = field(default_factory=list)
    scenarios: list[str] = field(default_factory=list)
    rounds: int = 1000
    seeds: int = 20
    first_seed: int = 0
    workers: int | None = None
    plots: bool = True


GROUPS = {"policy": PolicyConfig, "scenario": ScenarioConfig, "experiment": None}


def register() -> None:
    """Makes the schema known to Hydra."""
    ConfigStore.instance().store(name="schema", node=SimulateConfig)


def folder() -> Path:
    """The tree: beside the package in a checkout, inside it when installed.

    Raises:
        FileNotFoundError: neither is there.
    """
    package = Path(adaspec.__file__).parent
    for found in (package / "conf", package.parent / "conf"):
        if (found / "config.yaml").is_file():
            return found
    raise FileNotFoundError(f"no configuration tree beside or inside {package}")


def names(group: str) -> list[str]:
    """The choices of a group."""
    return sorted(path.stem for path in (folder() / group).glob("*.yaml"))


def load(group: str, name: str) -> dict[str, Any]:
    """One choice of a group, checked against its schema.

    Raises:
        ValueError: a name that the group does not have; the nearest one is told.
    """
    if name not in names(group):
        raise ValueError(f"{group} {name!r} is not known{_nearest(name, names(group))}")
    schema = OmegaConf.structured(GROUPS[group])
    merged = OmegaConf.merge(schema, OmegaConf.load(folder() / group / f"{name}.yaml"))
    found = OmegaConf.to_container(merged)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def build(given: Mapping[str, Any], **more: Any) -> Any:
    """What a ``_target_`` with its arguments makes.

    Raises:
        ValueError: impossible arguments.
        OSError: a file that cannot be read.
    """
    try:
        return instantiate(given, **more)
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from None
        raise ValueError(f"{given.get('_target_')}: {error.__cause__ or error}") from None


def check(overrides: Sequence[str]) -> None:
    """Refuses a key or a choice that does not exist before Hydra does, in one line.

    Raises:
        ValueError: with the nearest valid one.
    """
    keys = _keys(SimulateConfig)
    for override in overrides:
        key, sign, value = override.lstrip("+~").partition("=")
        if override.startswith("-") or not sign or key.startswith(("hydra", "policy.rule.", "scenario.make.")):
            continue
        if key in GROUPS:
            for name in value.split(","):
                if name not in (*names(key), "null"):
                    raise ValueError(f"{key}={name} is not known{_nearest(name, names(key))}")
        elif key not in keys:
            raise ValueError(f"the key {key!r} is not known{_nearest(key, [*keys, *GROUPS])}")


def _keys(schema: Any, prefix: str = "") -> list[str]:
    found = []
    for one in dataclasses.fields(schema):
        own = f"{prefix}{one.name}"
        nested = GROUPS.get(one.name) if not prefix else None
        found += _keys(nested, f"{own}.") if nested else [own]
    return found


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else f"; known are {', '.join(known)}"
