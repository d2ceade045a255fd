"""``adaspec generate``: continues prompts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from adaspec.commands.consoles import consoles
from adaspec.options import add_models, read_setup

if TYPE_CHECKING:
    from rich.console import Console

    from adaspec.assemble import Assembly
    from adaspec.compare import Comparison
    from adaspec.decoding.generate import Generation, Request

EXAMPLES = """examples:
  adaspec generate "Write a haiku about rivers"
  adaspec generate - --json < prompt.txt
  adaspec generate "Write quicksort in Python" --compare
  adaspec generate "..." --drafter lookup --drafter int8 --plan target/int8/lookup:8,3
  adaspec generate "..." --target Qwen/Qwen2.5-1.5B-Instruct --drafter Qwen/Qwen2.5-0.5B-Instruct --drafter lookup
"""


def add(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues prompts with a language model, faster, with exactly the model's own law of text.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to answer; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    add_models(parser)
    _add_sampling(parser)
    parser.add_argument("--compare", action="store_true", help="also run plain decoding and the best fixed plan")
    parser.add_argument("--json", action="store_true", help="one JSON object as the only line on standard output")
    parser.set_defaults(run=run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling and stopping")
    group.add_argument("--max-new-tokens", type=int, default=128, help="(default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0 is off")
    group.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    group.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable: end before this text")
    group.add_argument("--logprobs", action="store_true", help="with --json: log-probability of every token")


def run(arguments: argparse.Namespace) -> int:
    from adaspec.assemble import assemble
    from adaspec.decoding.sampling import SamplingParams
    from adaspec.terminal import progress

    sampling = SamplingParams(
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.min_p,
        arguments.repetition_penalty,
        arguments.seed,
    )
    if arguments.logprobs and not arguments.json:
        raise ValueError("--logprobs needs --json")
    if arguments.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is at least 1, got {arguments.max_new_tokens}")
    if not all(arguments.stop):
        raise ValueError("a stop string may not be empty")
    setup = read_setup(arguments)
    prompts = [_prompt(prompt) for prompt in arguments.prompts]
    text, notes = consoles(arguments.json)
    with progress(notes) as tell:
        assembly = assemble(setup, tell)
    requests = [
        assembly.request(
            prompt,
            raw=arguments.raw,
            max_new_tokens=arguments.max_new_tokens,
            sampling=sampling,
            stop=tuple(arguments.stop),
        )
        for prompt in prompts
    ]
    for request in requests:
        assembly.generator.check([request])
    reports = []
    for request in requests:
        report, interrupted = _answer(arguments, assembly, request, text, notes)
        reports.append(report)
        if interrupted:
            break
    if arguments.json:
        print(json.dumps(reports[0] if len(reports) == 1 else {"completions": reports}), flush=True)
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _prompt(text: str) -> str:
    """A prompt as given, or standard input for ``-``."""
    if text == "-":
        text = sys.stdin.read()
    if not text:
        raise ValueError("the prompt is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is no UTF-8 text (at character {error.start})") from None
    return text


def _answer(
    arguments: argparse.Namespace, assembly: Assembly, request: Request, text: Console, notes: Console
) -> tuple[dict[str, Any], bool]:
    """The report on one request, and whether Ctrl-C ended it or its comparison."""
    from adaspec.compare import compare, plan_uses
    from adaspec.terminal import comparison_table, plan_table, progress, summary

    generation = stream(assembly, request, text, logprobs=arguments.logprobs)
    notes.print()
    notes.print(plan_table(plan_uses(generation, assembly.controller)))
    notes.print(summary(generation), soft_wrap=True)
    comparison = None
    interrupted = generation.completions[0].finish_reason == "interrupted"
    if arguments.compare and not interrupted:
        try:
            with progress(notes) as tell:
                comparison = compare(assembly.generator, request, generation, _candidates(assembly), tell)
        except KeyboardInterrupt:  # the answer stands
            interrupted = True
    if comparison is not None:
        notes.print(comparison_table(generation, comparison))
        if comparison.texts_equal is False:
            notes.print("the texts differ: see 'Lossless' in the README, and please report it", style="yellow")
    setting = {"target": arguments.target, "precision": arguments.precision, "seed": arguments.seed}
    return setting | _report(generation, assembly, comparison), interrupted


def stream(assembly: Assembly, request: Request, console: Console, *, logprobs: bool = False) -> Generation:
    """Streams one request; on Ctrl-C what was generated so far is returned, marked as interrupted."""
    from adaspec.decoding.generate import Recorder
    from adaspec.terminal import Stream

    recorder = Recorder([request], assembly.generator.stop_ids)
    with Stream(console) as stream:
        try:
            for step in assembly.generator.stream([request], logprobs=0 if logprobs else None):
                recorder.add(step)
                stream.show(step)
        except KeyboardInterrupt:
            return recorder.result(interrupted=True)
    return recorder.result()


def _candidates(assembly: Assembly) -> list[Any]:
    """The fixed plans that a sweep tries: those of the best forecast, plain decoding among them."""
    rows = sorted(assembly.controller.table(), key=lambda row: -(row.measured or row.forecast))
    plans = [row.plan for row in rows if row.plan in assembly.space][:5]
    return plans if assembly.space.plain in plans else [*plans, assembly.space.plain]


def _report(generation: Generation, assembly: Assembly, comparison: Comparison | None) -> dict[str, Any]:
    from adaspec.compare import plan_uses

    completion = generation.completions[0]
    report: dict[str, Any] = {
        "text": completion.text,
        "tokens": generation.tokens,
        "finish_reason": completion.finish_reason,
        "seconds": generation.seconds,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "profile_seconds": assembly.profile_seconds,
        "runners": assembly.runners,
        "tokens_per_second": generation.tokens_per_second,
        "rounds": len(generation.steps),
        "mean_accepted_length": generation.mean_accepted_length,
        "plans": [
            {
                "plan": str(use.plan),
                "rounds": use.rounds,
                "share": use.share,
                "forecast": use.forecast,
                "measured": use.measured,
            }
            for use in plan_uses(generation, assembly.controller)
        ],
    }
    if completion.logprobs is not None:
        report["logprobs"] = completion.logprobs
    if comparison is not None:
        plain = comparison.plain.tokens_per_second
        report["ar_tokens_per_second"] = plain
        report["best_fixed"] = {
            "plan": str(comparison.best_plan),
            "tokens_per_second": comparison.best.tokens_per_second,
        }
        report["speedup"] = generation.tokens_per_second / plain if plain else None
        report["texts_equal"] = comparison.texts_equal
    return report
