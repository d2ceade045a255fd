"""``adaspec simulate``: policies against simulated and recorded worlds; Hydra reads the words behind it."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command; its options are Hydra's."""
    parser = commands.add_parser(
        "simulate",
        add_help=False,
        help="policies against simulated and recorded worlds: adaspec simulate experiment=tournament",
    )
    parser.add_argument("overrides", nargs="*")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.bench.simulate import main as simulate

    return simulate([*arguments.rest, *arguments.overrides])
