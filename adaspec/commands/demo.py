"""``adaspec demo``: three prompts of different character, against plain decoding."""

from __future__ import annotations

import argparse
from typing import Any

from adaspec.commands.consoles import consoles
from adaspec.commands.generate import stream
from adaspec.options import add_models, read_setup

DEMO = (
    ("chat", "I have a free Sunday and it is raining. What could I do at home? Give me a few ideas.", 80),
    (
        "summarise and quote",
        "Here is a note: 'The library opens at nine on weekdays and at ten on Saturdays. Members may borrow six books "
        "for three weeks. Late books cost ten pence a day. The reading room on the second floor is for quiet study, "
        "and the cafe by the entrance closes one hour before the library does.' First repeat the note word for word, "
        "then repeat it word for word once more.",
        128,
    ),
    ("code", "Write a Python class for a bank account with deposit, withdraw and transfer methods.", 128),
)


def add(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser("demo", help="three prompts of different character, against plain decoding")
    add_models(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.assemble import assemble
    from adaspec.compare import plan_uses, run_fixed
    from adaspec.decoding.sampling import GREEDY
    from adaspec.terminal import comparison_line, plan_table, progress

    setup = read_setup(arguments)
    text, notes = consoles(False)
    with progress(notes) as tell:
        assembly = assemble(setup, tell)
    for kind, prompt, limit in DEMO:
        text.print(f"\n[bold]{kind}[/bold]: {prompt}\n", style="dim")
        request = assembly.request(prompt, raw=False, max_new_tokens=limit, sampling=GREEDY)
        generation = stream(assembly, request, text)
        if generation.completions[0].finish_reason == "interrupted":
            raise KeyboardInterrupt
        with progress(notes) as tell:
            tell("the same with plain decoding", None)
            plain = run_fixed(assembly.generator, request, assembly.space.plain)
        text.print()
        text.print(plan_table(plan_uses(generation, assembly.controller)))
        same = generation.completions[0].tokens == plain.completions[0].tokens
        text.print(comparison_line(generation, plain), "(same text)" if same else "(TEXTS DIFFER)")
    return 0
