"""``adaspec bench``: methods side by side on real models; Hydra reads the words behind it."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command; its options are Hydra's."""
    parser = commands.add_parser(
        "bench", add_help=False, help="our plans and policies against Hugging Face: adaspec bench experiment=smoke"
    )
    parser.add_argument("overrides", nargs="*")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.bench.config import check

    words = [*arguments.rest, *arguments.overrides]
    if {"-h", "--help"} & set(words):
        from adaspec.bench.usage import usage

        print(usage())
        return 0
    check([word for word in words if not word.startswith(("resume=", "sweep="))], "bench")  # before torch is loaded
    from adaspec.bench.harness import main

    return main(words)
