"""``adaspec train-drafter``: distils a small drafter from a target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adaspec.commands.consoles import consoles
from adaspec.files import check_folder

EXAMPLES = """examples:
  adaspec train-drafter my-head                                   (for the default target; hours on two cores)
  adaspec train-drafter my-head --target Qwen/Qwen2.5-0.5B-Instruct --device cuda --tokens 2000000
  adaspec train-drafter my-head --text notes.txt --text code.py   (from given text as well)
  adaspec generate "..." --drafter my-head --drafter lookup
"""


def add(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser(
        "train-drafter",
        help="distil a small drafter from a target",
        description="Distils a feature drafter from a target's own output. Run again with the same values it goes on "
        "where it was interrupted, to the same weights.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="DIR", help="where the drafter goes; DIR/work holds what is resumed")
    parser.add_argument("--target", default="smollm2-135m", help="model to draft for (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="TOML file of prompts (default: our own)")
    parser.add_argument("--text", action="append", type=Path, default=[], metavar="FILE", help="repeatable: given text")
    parser.add_argument("--tokens", type=int, default=400_000, help="of its own output (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=12_288, help="tokens it can draft (default: %(default)s)")
    parser.add_argument("--begin", type=Path, metavar="DIR", help="an earlier drafter of the target to go on from")
    parser.add_argument("--epochs", type=int, default=2, help="at most (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=63, help="texts collected side by side (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where converted models are kept")
    parser.add_argument("--offline", action="store_true", help="use only what is on this machine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.decoding.device import check_device, use_threads
    from adaspec.decoding.store import resolve
    from adaspec.terminal import progress
    from adaspec.training.collect import Recipe
    from adaspec.training.distil import Distillation, distil
    from adaspec.training.prompts import DEFAULT
    from adaspec.training.trainer import Schedule

    check_folder(arguments.out, "DIR")
    if arguments.begin is not None and not arguments.begin.is_dir():
        raise ValueError(f"--begin {arguments.begin} is no folder")
    check_device(arguments.device)
    if arguments.threads is not None:
        use_threads(arguments.threads)
    text, notes = consoles(False)
    with progress(notes) as tell:
        source = resolve(arguments.target, offline=arguments.offline, progress=tell, cache_dir=arguments.cache_dir)
        job = Distillation(
            arguments.target,
            source,
            arguments.out,
            prompts=arguments.prompts or DEFAULT,
            texts=tuple(arguments.text),
            tokens=arguments.tokens,
            vocabulary=arguments.vocabulary,
            begin=arguments.begin,
            device=arguments.device,
            recipe=Recipe(seed=arguments.seed, rows=arguments.rows),
            schedule=Schedule(seed=arguments.seed, epochs=arguments.epochs),
        )
        result = distil(job, tell)
    text.print(
        f"{arguments.out}: {result.parameters:,} parameters, {result.steps} steps, {result.tokens:,} tokens",
        soft_wrap=True,
    )
    for kind, rates in (("before training", result.before), *result.after.items()):
        text.print(
            f"held-out acceptance by position, {kind}: {' '.join(f'{rate:.2f}' for rate in rates)}", soft_wrap=True
        )
    return 0
