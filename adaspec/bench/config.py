"""The configuration tree: where it lies, what its keys are, and which valid key a wrong one is nearest to."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

import adaspec
from adaspec.bench.schema import BenchConfig, SimulateConfig

ROOTS = {"bench": ("config", BenchConfig), "simulate": ("simulate", SimulateConfig)}  # command -> file, schema


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


def groups(command: str) -> dict[str, Any]:
    """The groups of a command, each with its schema; None for experiments, which set keys of all of them."""
    hints = typing.get_type_hints(ROOTS[command][1])
    found = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind) and (folder() / name).is_dir()
    }
    return {**found, "experiment": None}


def names(group: str, command: str | None = None) -> list[str]:
    """The choices of a group; of the experiments only those of a command, when it is given."""
    paths = sorted((folder() / group).glob("*.yaml"))
    if group == "experiment" and command:
        paths = [path for path in paths if f"\n# adaspec {command} " in path.read_text(encoding="utf-8")]
    return [path.stem for path in paths]


def summary(group: str, name: str) -> str:
    """What a choice is, from its comments; that of an experiment stands behind its command."""
    lines = (folder() / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line[2:] for line in lines if line.startswith("# ") and not line.startswith(("# @", "# adaspec ")))


def load(group: str, name: str) -> dict[str, Any]:
    """One choice of a group, checked against its schema.

    Raises:
        ValueError: a name that the group does not have; the nearest one is told.
    """
    if name not in names(group):
        raise ValueError(f"{group} {name!r} is not known{_nearest(name, names(group))}")
    kinds = groups("bench") | groups("simulate")
    schema = OmegaConf.structured(kinds[group])
    merged = OmegaConf.merge(schema, OmegaConf.load(folder() / group / f"{name}.yaml"))
    return plain(merged)


def plain(config: Any) -> dict[str, Any]:
    """A part of a configuration as a dict, resolved."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def several(config: Any, group: str, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """The choices named in ``chosen``; if that is empty, the one that the configuration itself holds."""
    return [load(group, name) for name in chosen] or [plain(config[group])]


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


def check(overrides: Sequence[str], command: str) -> None:
    """Refuses a key or a choice that does not exist before Hydra does, in one line.

    Raises:
        ValueError: with the nearest valid one.
    """
    own, keys = groups(command), dict(_keys(ROOTS[command][1]))
    open_ended = tuple(f"{key}." for key, kind in keys.items() if typing.get_origin(kind) is dict)
    for override in overrides:
        key, sign, value = override.lstrip("+~").partition("=")
        if override.startswith("-") or not sign or key.startswith(("hydra", *open_ended)):
            continue
        if key in own:
            for name in value.split(",") if "(" not in value else ():
                if name not in (*names(key, command), "null"):
                    raise ValueError(f"{key}={name} is not known{_nearest(name, names(key, command))}")
        elif key not in keys:
            raise ValueError(f"the key {key!r} is not known{_nearest(key, [*keys, *own])}")


def _keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else f"; known are {', '.join(known)}"
