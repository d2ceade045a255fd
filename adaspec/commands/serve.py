"""``adaspec serve``: an OpenAI-compatible service of one model."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaspec.commands.consoles import consoles
from adaspec.files import check_file
from adaspec.options import add_models, read_setup


def add(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser("serve", help="an OpenAI-compatible service of one model, with a live page")
    add_models(parser)
    group = parser.add_argument_group("service")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    group.add_argument("--name", metavar="MODEL", help="what clients call the model (default: the target)")
    group.add_argument("--max-batch", type=int, default=8, help="rows decoded together (default: %(default)s)")
    group.add_argument("--batch-wait-ms", type=float, default=10.0, help="for more of them (default: %(default)s)")
    group.add_argument("--queue", type=int, default=64, help="requests that may wait (default: %(default)s)")
    group.add_argument("--timeout", type=float, default=300.0, help="seconds of a request (default: %(default)s)")
    group.add_argument(
        "--grace", type=float, default=30.0, help="seconds to finish in at the end (default: %(default)s)"
    )
    group.add_argument("--max-body", type=int, default=1 << 20, help="bytes of a request (default: %(default)s)")
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="bearer token (or the environment: ADASPEC_API_KEY)"
    )
    group.add_argument("--state", metavar="FILE", help="keeps what the controller learned")
    group.add_argument("--log-json", action="store_true", help="one JSON object a line on standard error")
    rules = parser.add_argument_group("guard rails")
    rules.add_argument("--floor", type=float, default=0.8, help="least share of plain speed (default: %(default)s)")
    rules.add_argument("--exploration", type=float, default=1.0, help="share of rounds that may explore, per tag")
    rules.add_argument(
        "--budget", action="append", default=[], metavar="TAG=SHARE", help="repeatable: exploration of one tag"
    )
    rules.add_argument("--bench", type=float, default=30.0, help="seconds without a drafter that failed")
    rules.add_argument("--read-only", action="store_true", help="play what is known to be best, learn nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.assemble import assemble
    from adaspec.guard import Rules
    from adaspec.serving.engine import Limits
    from adaspec.serving.gate import LOOPBACK
    from adaspec.serving.server import TOKEN_VARIABLE, Server, bind, log_to_stderr, read_token
    from adaspec.serving.service import Service, Settings
    from adaspec.terminal import progress

    setup = read_setup(arguments)
    if arguments.state and "://" not in arguments.state:
        check_file(Path(arguments.state), "--state", replaced=True)
    rules = Rules(
        floor=arguments.floor,
        exploration=arguments.exploration,
        budgets=_budgets(arguments.budget),
        bench=arguments.bench,
        read_only=arguments.read_only,
    )
    settings = Settings(
        model=arguments.name or arguments.target,
        limits=Limits(arguments.max_batch, arguments.batch_wait_ms / 1e3, arguments.queue),
        timeout=arguments.timeout,
        grace=arguments.grace,
        max_body=arguments.max_body,
        token=read_token(os.environ.get(TOKEN_VARIABLE), arguments.api_key_file),
        state=arguments.state,
    )
    with bind(arguments.host, arguments.port) as listener:
        text, notes = consoles(False)
        with progress(notes) as tell:
            assembly = assemble(setup, tell)
        gc.collect()
        gc.freeze()  # what was loaded stays: no collection has to walk it in the middle of a round
        log_to_stderr(machine=arguments.log_json)
        service = Service(assembly, settings, rules)
        if settings.token is None and arguments.host not in LOOPBACK:
            notes.print(f"{arguments.host} is open to others, and no bearer token is set", style="yellow")

        def ready(url: str) -> None:
            text.print(f"{settings.model} at {url}/v1, live page at {url}/", soft_wrap=True)

        try:
            Server(service, arguments.host, arguments.port, ready).run([listener])
        finally:
            service.close(0.0)  # a third Ctrl-C skips the server's own way of closing it
    return 0


def _budgets(texts: Sequence[str]) -> dict[str, float]:
    budgets = {}
    for text in texts:
        tag, _, share = text.rpartition("=")
        try:
            budgets[tag] = float(share)
        except ValueError:
            raise ValueError(f"a budget is written TAG=SHARE, got {text!r}") from None
    return budgets
