"""``adaspec models``: what can be loaded by name, and fetching it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adaspec.commands.consoles import consoles


def add(commands: Any) -> None:
    """The command and its two actions."""
    models = commands.add_parser("models", help="list or fetch models").add_subparsers(required=True, metavar="ACTION")
    listing = models.add_parser("list", help="known and converted models, and where they lie")
    getting = models.add_parser("get", help="fetch (and convert) a model")
    getting.add_argument("name", metavar="NAME", help="known name, hub name, folder or GGUF file")
    for each in (listing, getting):
        each.add_argument("--cache-dir", type=Path, metavar="DIR", help="where converted models are kept")
    listing.set_defaults(run=_list)
    getting.set_defaults(run=_get)


def _list(arguments: argparse.Namespace) -> int:
    from adaspec.decoding.store import conversions, known
    from adaspec.terminal import model_lines

    text, _ = consoles(False)
    for entry in (*known(arguments.cache_dir), *conversions(arguments.cache_dir)):
        text.print(model_lines(entry), soft_wrap=True)
    return 0


def _get(arguments: argparse.Namespace) -> int:
    from adaspec.decoding.store import resolve
    from adaspec.terminal import progress

    text, notes = consoles(False)
    with progress(notes) as tell:
        folder = resolve(arguments.name, progress=tell, cache_dir=arguments.cache_dir)
    text.print(str(folder), soft_wrap=True)
    return 0
