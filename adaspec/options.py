"""The options that commands share, and the setup they describe. Heavy imports happen when they are read."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adaspec.setup import Setup


def add_models(parser: argparse.ArgumentParser) -> None:
    """The options of a setup."""
    group = parser.add_argument_group("models and plans")
    add_store(group)
    group.add_argument(
        "--drafter",
        action="append",
        metavar="[NAME=]SOURCE",
        help="repeatable: lookup, lookup:MIN-MAX (n-grams), a precision such as int8 (the target's own weights in it), "
        "head (the feature drafter made for the default target), a model or feature drafter, int8:MODEL (in its own "
        "precision), bridge:MODEL (of another tokenizer), A+B (two named before, as one), python:module.Class (yours) "
        "(default: lookup, and int4 and lookup+int4 for the default target where there is a C compiler)",
    )
    group.add_argument("--plan", metavar="PLAN", help="pin one plan, such as target/mid/draft:8,3, or target")
    group.add_argument("--windows", default="2,4,8", help="windows to choose from (default: %(default)s)")
    group.add_argument("--inner-windows", default="2,4", help="the same beneath a middle model (default: %(default)s)")
    group.add_argument(
        "--stops", default="0", help="confidences below which a drafter ends its window early; 0: never (default: 0)"
    )
    group.add_argument("--max-depth", type=int, default=3, help="longest chain (default: %(default)s)")
    group.add_argument("--corpus", type=Path, metavar="FILE", help="text or index that backs the lookup drafter")
    group.add_argument("--plain", action="store_true", help="decode plainly, also a model that cannot be rolled back")
    group.add_argument(
        "--precision",
        default="fp16",
        help="of the weights: float32, fp16, int8, int4, stock (torch's own layers) (default: %(default)s)",
    )
    group.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    group.add_argument(
        "--runner",
        default="auto",
        help="native (C, compiled once with your compiler; CPU), graphs (CUDA), torch, or auto (default: auto)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: measured at the start)")
    group.add_argument("--cache-length", type=int, default=2048, help="tokens, prompt included (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of sampling and of the controller (default: %(default)s)")


def add_store(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options that tell a target and where models come from."""
    parser.add_argument("--target", default="smollm2-135m", help="model that defines the text (default: %(default)s)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where converted models are kept")
    parser.add_argument("--offline", action="store_true", help="use only what is on this machine")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model")


def read_setup(arguments: argparse.Namespace) -> Setup:
    """What the options of ``add_models`` ask for.

    Raises:
        ValueError: an option that does not make sense, named.
    """
    from adaspec.plan import Plan
    from adaspec.setup import Setup, parse_drafters

    return Setup(
        target=arguments.target,
        drafters=parse_drafters(arguments.drafter or []),
        plan=None if arguments.plan is None else Plan.parse(arguments.plan),
        windows=_numbers("--windows", arguments.windows),
        inner_windows=_numbers("--inner-windows", arguments.inner_windows),
        stops=_shares("--stops", arguments.stops),
        max_depth=arguments.max_depth,
        precision=arguments.precision,
        device=arguments.device,
        runner=arguments.runner,
        threads=arguments.threads,
        cache_length=arguments.cache_length,
        corpus=arguments.corpus,
        plain=arguments.plain,
        seed=arguments.seed,
        offline=arguments.offline,
        trust_remote_code=arguments.trust_remote_code,
        cache_dir=arguments.cache_dir,
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} is a list of numbers like 2,4,8, got {text!r}") from None


def _shares(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} is a list of numbers like 0,0.4, got {text!r}") from None
