"""``adaspec export``: what was learned, as an engine's static table."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser("export", help="write a learned state as an engine's static table")
    parser.add_argument("engine", choices=("vllm", "sglang", "tensorrt-llm"), help="whose table")
    parser.add_argument("states", nargs="+", metavar="STATE", help="state file or URL; several are merged")
    parser.add_argument("--drafter", default="", metavar="NAME", help="whose windows, when the state knows several")
    parser.add_argument("--max-batch-size", type=int, default=64, help="(default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.adapters.tables import learned_ranges, sglang_config, tensorrt_schedule, vllm_table
    from adaspec.state import StateFile, merge

    if arguments.max_batch_size < 1:
        raise ValueError(f"--max-batch-size is at least 1, got {arguments.max_batch_size}")
    states = {}
    for place in arguments.states:
        state = StateFile(place).read()  # no load: that would rename a file given by mistake
        if state is None:
            raise ValueError(f"there is no state in {place}")
        states[place] = state
    state = merge(states)
    write = {"vllm": vllm_table, "sglang": sglang_config, "tensorrt-llm": tensorrt_schedule}[arguments.engine]
    try:
        print(write(learned_ranges(state, arguments.max_batch_size, drafter=arguments.drafter)))
    except ValueError as error:
        raise ValueError(f"{', '.join(states)}: {error}") from None
    return 0
