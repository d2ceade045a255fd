"""What each drafter is worth beneath the target, per kind of prompt, measured side by side in one process.

python -m adaspec.bench.drafters --drafter lookup --drafter int8
python -m adaspec.bench.drafters --target T.gguf --drafter draft=D.gguf --drafter lookup --drafter lookup+draft

Every prompt is decoded plainly and with every drafter and window. Reported per drafter and kind: acceptance by
position, accepted length and milliseconds per proposal at every window, and the speed-up of the window that was best
on these prompts. Ctrl-C ends early and reports what is done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adaspec.assemble import Assembly, assemble
from adaspec.bench.common import add_prompts, command, read_prompts
from adaspec.compare import run_fixed
from adaspec.decoding.generate import Generation, Request
from adaspec.decoding.sampling import SamplingParams
from adaspec.options import add_models, read_setup
from adaspec.outcome import EdgeOutcome
from adaspec.plan import Plan

Run = tuple[Generation, float]  # with the speed-up against plain decoding of the same prompt
Runs = dict[tuple[str, str], dict[int, list[Run]]]  # (drafter, kind) -> window -> one run per prompt


def main() -> int:
    """Prints a table per kind of prompt and one JSON object as the last line; progress goes to standard error."""
    arguments = _parser().parse_args()
    assembly = assemble(replace(read_setup(arguments), max_depth=2), lambda what, share: _note(what))
    runs: Runs = defaultdict(lambda: defaultdict(list))
    prompts = read_prompts(arguments)
    done, equal = 0, True
    try:
        for kind, prompt in prompts:
            sampling = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
            request = assembly.request(
                prompt, raw=arguments.raw, max_new_tokens=arguments.max_new_tokens, sampling=sampling
            )
            _note(f"prompt {done + 1} of {len(prompts)} ({kind})")
            equal &= _add(runs, kind, _measured(assembly, request))
            done += 1
    except KeyboardInterrupt:
        _note("interrupted")
    rows = [_row(drafter, kind, by_window) for (drafter, kind), by_window in sorted(_with_all(runs).items())]
    for row in rows:
        print(_line(row))
    same = equal if arguments.temperature == 0 else None
    report = {
        "command": command("python -m adaspec.bench.drafters", sys.argv[1:]),
        "threads": torch.get_num_threads(),
        "prompts": done,
    }
    print(json.dumps(report | {"texts_equal": same, "drafters": rows}))
    return 130 if done < len(prompts) else int(same is False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    add_prompts(parser, max_new_tokens=64)
    return parser


def _note(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _measured(assembly: Assembly, request: Request) -> dict[Plan, Generation]:
    """One generation per plan, plain decoding first."""
    return {plan: run_fixed(assembly.generator, request, plan) for plan in assembly.space}


def _add(runs: Runs, kind: str, measured: Mapping[Plan, Generation]) -> bool:
    """Files the runs of one prompt; returns whether all gave the same text."""
    plain, *others = measured.items()
    for plan, generation in others:
        _, drafter, window = next(plan.edges())
        speedup = generation.tokens_per_second / plain[1].tokens_per_second
        runs[drafter, kind][window].append((generation, speedup))
    return len({generation.completions[0].tokens for generation in measured.values()}) == 1


def _with_all(runs: Runs) -> Runs:
    """The runs of each drafter by kind, and over all kinds."""
    merged: Runs = defaultdict(lambda: defaultdict(list))
    for (drafter, kind), by_window in runs.items():
        for window, group in by_window.items():
            merged[drafter, kind][window] += group
            merged[drafter, "all"][window] += group
    return merged


def _row(drafter: str, kind: str, by_window: Mapping[int, Sequence[Run]]) -> dict[str, Any]:
    windows = {window: _window(group) for window, group in sorted(by_window.items())}
    best = max(windows, key=lambda window: windows[window]["speedup"] or 0.0)
    longest = [edge for generation, _ in by_window[max(by_window)] for edge in _edges(generation)]
    reached, offered, accepted = (_summed(longest, name) for name in ("reached", "offered", "accepted"))
    return {
        "drafter": drafter,
        "kind": kind,
        "prompts": len(by_window[best]),
        "offered_of_reached": _ratios(offered, reached),
        "accepted_of_offered": _ratios(accepted, offered),
        "windows": windows,
        "best_window": best,
        "speedup": windows[best]["speedup"],
    }


def _window(group: Sequence[Run]) -> dict[str, float | None]:
    edges = [edge for generation, _ in group for edge in _edges(generation)]
    proposals = sum(edge.verifications for edge in edges)
    seconds = sum(edge.draft_seconds or 0.0 for edge in edges)
    rounds = sum(len(generation.steps) for generation, _ in group)
    return {
        "accepted_length": sum(generation.tokens for generation, _ in group) / max(rounds, 1),
        "proposal_ms": 1e3 * seconds / proposals if proposals else None,
        "speedup": statistics.median(speedup for _, speedup in group),
    }


def _edges(generation: Generation) -> list[EdgeOutcome]:
    """The total edge of every round; those of a hybrid's parts come behind it."""
    return [outcome.edges[0] for _, outcome in generation.steps]


def _summed(edges: Sequence[EdgeOutcome], counter: str) -> list[int]:
    return [sum(column) for column in zip(*(getattr(edge, counter) for edge in edges))]


def _ratios(some: Sequence[int], of: Sequence[int]) -> list[float | None]:
    return [round(part / whole, 3) if whole else None for part, whole in zip(some, of)]


def _line(row: Mapping[str, Any]) -> str:
    lengths = " ".join(f"{window}:{each['accepted_length']:.2f}" for window, each in row["windows"].items())
    spent = row["windows"][row["best_window"]]["proposal_ms"]
    taken = " ".join("-" if each is None else f"{each:.2f}" for each in row["accepted_of_offered"])
    return (
        f"{row['drafter']:<16} {row['kind']:<10} accepted length {lengths}  proposal "
        f"{'-' if spent is None else f'{spent:.2f}'} ms  best window {row['best_window']}: {row['speedup']:.2f}x  "
        f"acceptance {taken}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
