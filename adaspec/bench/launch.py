"""Runs a command's words through Hydra: once, or once per combination of a multirun."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from adaspec.bench.config import ROOTS, check, folder
from adaspec.bench.schema import register

Result = TypeVar("Result")


def launch(command: str, overrides: Sequence[str], task: Callable[[DictConfig, Path], Result]) -> list[Result]:
    """Calls ``task`` with the configuration and the folder of each run; its results in order.

    A sweeper that seeks something, such as Optuna's, is told the ``objective`` of a result that has one.

    Raises:
        ValueError: a key, choice or value that does not exist or cannot be, in one line; or what ``task`` raises.
        OSError: what ``task`` raises.
    """
    check(overrides, command)
    register()
    results: list[Result] = []
    failures: list[Exception] = []

    def run(config: DictConfig) -> float | None:
        if failures:
            return None
        try:
            results.append(task(config, Path(HydraConfig.get().runtime.output_dir)))
        except (ValueError, OSError) as error:  # Hydra would print a page
            failures.append(error)
            return None
        found: float | None = getattr(results[-1], "objective", None)
        return found

    with _words(f"adaspec {command}", overrides):
        try:
            hydra.main(config_path=str(folder()), config_name=ROOTS[command][0], version_base="1.3")(run)()
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_reason(error)) from None
        except OSError as error:
            raise ValueError(f"cannot write the folder of the run: {error}") from None
    if failures:
        raise failures[0]
    return results


def group() -> str | None:
    """The name of the multirun that goes on now, None when there is one run only."""
    own = HydraConfig.get()
    return Path(own.sweep.dir).name if own.mode is not None and own.mode.name == "MULTIRUN" else None


@contextmanager
def _words(program: str, overrides: Sequence[str]) -> Iterator[None]:
    """Gives Hydra its words, and has it raise what it would print on a page."""
    kept, reporting = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [program, *overrides], "1"
    try:
        yield
    finally:
        sys.argv = kept
        if reporting is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = reporting


def _reason(error: Any) -> str:
    """What was wrong, with the key and the value, without Hydra's indented details."""
    lines = [line.strip() for one in (error, error.__cause__) if one for line in str(one).splitlines()]
    told = [line for line in lines if line and not line.startswith(("full_key", "object_type", "reference_type"))]
    return "; ".join(dict.fromkeys(told))
