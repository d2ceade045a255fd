"""The command line. Heavy imports happen when a subcommand runs."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from adaspec.assemble import Assembly, Setup
    from adaspec.compare import Comparison
    from adaspec.decoding.generate import Generation, Request

EXAMPLES = """examples:
  adaspec generate "Write a haiku about rivers"
  adaspec generate - --json < prompt.txt
  adaspec generate "Write quicksort in Python" --compare
  adaspec generate "..." --drafter lookup --drafter int8 --plan target/int8/lookup:8,3
  adaspec generate "..." --target Qwen/Qwen2.5-1.5B-Instruct --drafter Qwen/Qwen2.5-0.5B-Instruct --drafter lookup
"""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. A foreseeable failure is one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the text
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        print("adaspec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (ValueError, OSError, MemoryError) as error:
        print(f"adaspec: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except ModuleNotFoundError as error:
        extra = "serve" if arguments.run is _serve else "decoding"
        print(f"adaspec: {error.name} is not installed; try: pip install 'adaspec[{extra}]'", file=sys.stderr)
        return 1


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adaspec", description="Speculative decoding that chooses drafter, chain depth and windows as it runs."
    )
    parser.add_argument("--version", action="version", version=f"adaspec {version('adaspec')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues prompts with a language model, faster, with exactly the model's own law of text.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to answer; - reads standard input")
    generate.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    _add_models(generate)
    _add_sampling(generate)
    generate.add_argument("--compare", action="store_true", help="also run plain decoding and the best fixed plan")
    generate.add_argument("--json", action="store_true", help="one JSON object as the only line on standard output")
    generate.set_defaults(run=_generate)
    demo = commands.add_parser("demo", help="three prompts of different character, against plain decoding")
    _add_models(demo)
    demo.set_defaults(run=_demo)
    _add_serve(commands.add_parser("serve", help="an OpenAI-compatible service of one model, with a live page"))
    models = commands.add_parser("models", help="list or fetch models").add_subparsers(required=True, metavar="ACTION")
    listing = models.add_parser("list", help="known and converted models, and where they lie")
    getting = models.add_parser("get", help="fetch (and convert) a model")
    getting.add_argument("name", metavar="NAME", help="known name, hub name, folder or GGUF file")
    for each in (listing, getting):
        each.add_argument("--cache-dir", type=Path, metavar="DIR", help="where converted models are kept")
    listing.set_defaults(run=_list_models)
    getting.set_defaults(run=_get_model)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models and plans")
    group.add_argument("--target", default="smollm2-135m", help="model that defines the text (default: %(default)s)")
    group.add_argument(
        "--drafter",
        action="append",
        metavar="[NAME=]SOURCE",
        help="repeatable: lookup, lookup:MIN-MAX (n-grams), a precision such as int8 (the target's own weights in it), "
        "or a model (default: lookup)",
    )
    group.add_argument("--plan", metavar="PLAN", help="pin one plan, such as target/mid/draft:8,3, or target")
    group.add_argument("--windows", default="2,4,8", help="windows to choose from (default: %(default)s)")
    group.add_argument("--inner-windows", default="2,4", help="the same beneath a middle model (default: %(default)s)")
    group.add_argument("--max-depth", type=int, default=3, help="longest chain (default: %(default)s)")
    group.add_argument("--corpus", type=Path, metavar="FILE", help="text whose n-grams back the lookup drafter")
    group.add_argument("--plain", action="store_true", help="decode plainly, also a model that cannot be rolled back")
    group.add_argument(
        "--precision",
        default="fp16",
        help="of the weights: float32, fp16, int8, stock (torch's own layers) (default: %(default)s)",
    )
    group.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: measured at the start)")
    group.add_argument("--cache-length", type=int, default=2048, help="tokens, prompt included (default: %(default)s)")
    group.add_argument("--cache-dir", type=Path, metavar="DIR", help="where converted models are kept")
    group.add_argument("--offline", action="store_true", help="use only what is on this machine")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model")
    group.add_argument("--seed", type=int, default=0, help="of sampling and of the controller (default: %(default)s)")


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


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
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
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from adaspec.assemble import assemble
    from adaspec.guard import Rules
    from adaspec.serving.engine import Limits
    from adaspec.serving.server import TOKEN_VARIABLE, Server, log_to_stderr, read_token
    from adaspec.serving.service import Service, Settings
    from adaspec.terminal import progress

    setup = _setup(arguments)
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
    text, notes = _consoles(False)
    with progress(notes) as tell:
        assembly = assemble(setup, tell)
    log_to_stderr(machine=arguments.log_json)
    service = Service(assembly, settings, rules)
    if settings.token is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        notes.print(f"{arguments.host} is open to others, and no bearer token is set", style="yellow")

    def ready(url: str) -> None:
        text.print(f"{settings.model} at {url}/v1, live page at {url}/", soft_wrap=True)

    Server(service, arguments.host, arguments.port, ready).run()
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


def _setup(arguments: argparse.Namespace) -> Setup:
    from adaspec.assemble import DrafterSpec, Setup
    from adaspec.plan import Plan

    return Setup(
        target=arguments.target,
        drafters=tuple(DrafterSpec.parse(text) for text in arguments.drafter or ["lookup"]),
        plan=None if arguments.plan is None else Plan.parse(arguments.plan),
        windows=_numbers("--windows", arguments.windows),
        inner_windows=_numbers("--inner-windows", arguments.inner_windows),
        max_depth=arguments.max_depth,
        precision=arguments.precision,
        device=arguments.device,
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


def _consoles(machine: bool) -> tuple[Console, Console]:
    """Where the text goes and where everything else goes: with --json standard output holds only the JSON line."""
    from rich.console import Console

    notes = Console(stderr=True, highlight=False)
    return (notes if machine else Console(highlight=False)), notes


def _generate(arguments: argparse.Namespace) -> int:
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
    setup = _setup(arguments)
    prompts = [_prompt(prompt) for prompt in arguments.prompts]
    text, notes = _consoles(arguments.json)
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
        report = _answer(arguments, assembly, request, text, notes)
        reports.append(report)
        if report["finish_reason"] == "interrupted":
            break
    if arguments.json:
        print(json.dumps(reports[0] if len(reports) == 1 else {"completions": reports}), flush=True)
    if reports[-1]["finish_reason"] == "interrupted":
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
) -> dict[str, Any]:
    from adaspec.compare import compare, plan_uses
    from adaspec.terminal import comparison_table, plan_table, progress, summary

    generation = _stream(assembly, request, text, logprobs=arguments.logprobs)
    notes.print()
    notes.print(plan_table(plan_uses(generation, assembly.controller)))
    notes.print(summary(generation), soft_wrap=True)
    comparison = None
    if arguments.compare and generation.completions[0].finish_reason != "interrupted":
        with progress(notes) as tell:
            comparison = compare(assembly.generator, request, generation, _candidates(assembly), tell)
        notes.print(comparison_table(generation, comparison))
        if comparison.texts_equal is False:
            notes.print("the texts differ: see 'Lossless' in the README, and please report it", style="yellow")
    setting = {"target": arguments.target, "precision": arguments.precision, "seed": arguments.seed}
    return setting | _report(generation, assembly, comparison)


def _stream(assembly: Assembly, request: Request, console: Console, *, logprobs: bool = False) -> Generation:
    """Streams one request; on Ctrl-C what was generated so far is returned, marked as interrupted."""
    from adaspec.decoding.generate import Recorder
    from adaspec.terminal import Stream

    recorder = Recorder([request], assembly.generator.stop_ids)
    with Stream(console) as stream:
        try:
            for step in assembly.generator.stream([request], logprobs=logprobs):
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


def _demo(arguments: argparse.Namespace) -> int:
    from adaspec.assemble import assemble
    from adaspec.compare import plan_uses, run_fixed
    from adaspec.decoding.sampling import GREEDY
    from adaspec.terminal import comparison_line, plan_table, progress

    setup = _setup(arguments)
    text, notes = _consoles(False)
    with progress(notes) as tell:
        assembly = assemble(setup, tell)
    for kind, prompt, limit in DEMO:
        text.print(f"\n[bold]{kind}[/bold]: {prompt}\n", style="dim")
        request = assembly.request(prompt, raw=False, max_new_tokens=limit, sampling=GREEDY)
        generation = _stream(assembly, request, text)
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


def _list_models(arguments: argparse.Namespace) -> int:
    from adaspec.decoding.store import conversions, known
    from adaspec.terminal import model_lines

    text, _ = _consoles(False)
    for entry in (*known(arguments.cache_dir), *conversions(arguments.cache_dir)):
        text.print(model_lines(entry), soft_wrap=True)
    return 0


def _get_model(arguments: argparse.Namespace) -> int:
    from adaspec.decoding.store import resolve
    from adaspec.terminal import progress

    text, notes = _consoles(False)
    with progress(notes) as tell:
        folder = resolve(arguments.name, progress=tell, cache_dir=arguments.cache_dir)
    text.print(str(folder), soft_wrap=True)
    return 0
