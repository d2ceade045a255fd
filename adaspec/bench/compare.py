"""Plain decoding, the controller and fixed plans side by side, interleaved prompt by prompt in one process.

python -m adaspec.bench.compare --compare-plan target/lookup:4
python -m adaspec.bench.compare --target T.gguf --drafter draft=D.gguf --prompts humaneval.jsonl --raw --limit 10
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from adaspec.assemble import Assembly, assemble
from adaspec.bench.common import add_prompts, command, read_prompts
from adaspec.compare import Pinned
from adaspec.decoding.generate import Generation, Request
from adaspec.decoding.sampling import SamplingParams
from adaspec.options import add_models, read_setup
from adaspec.plan import Plan


def main() -> int:
    """Prints a line per prompt while it goes, and one JSON object as the last line."""
    arguments = _parser().parse_args()
    assembly = assemble(read_setup(arguments), lambda what, share: None)
    fixed = [Plan.parse(text) for text in arguments.compare_plan]
    rows = []
    for kind, prompt in read_prompts(arguments):
        sampling = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
        request = assembly.request(
            prompt, raw=arguments.raw, max_new_tokens=arguments.max_new_tokens, sampling=sampling
        )
        rows.append(_measure(assembly, kind, request, fixed, arguments))
        print(_line(len(rows), rows[-1]), flush=True)
    print(json.dumps(_summary(arguments, rows)))
    return 0 if all(row["texts_equal"] in (True, None) for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    add_prompts(parser)
    parser.add_argument("--compare-plan", action="append", default=[], metavar="PLAN", help="a fixed plan; repeatable")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repetitions; the median rate counts")
    parser.add_argument("--cold", action="store_true", help="a new controller for every prompt and repetition")
    return parser


def _measure(
    assembly: Assembly, kind: str, request: Request, fixed: list[Plan], arguments: argparse.Namespace
) -> dict[str, Any]:
    plans = {"plain": assembly.space.plain, **{str(plan): plan for plan in fixed}}
    runs: dict[str, list[Generation]] = defaultdict(list)
    for _ in range(arguments.repeats):
        for name, plan in plans.items():
            runs[name].append(assembly.generator.generate([request], controller=Pinned(plan)))
        controller = assembly.fresh_controller(arguments.seed) if arguments.cold else None
        runs["adaspec"].append(assembly.generator.generate([request], controller=controller))
    rates = {name: statistics.median(each.tokens_per_second for each in group) for name, group in runs.items()}
    texts = {each.completions[0].tokens for group in runs.values() for each in group}
    return {
        "kind": kind,
        "tokens": runs["plain"][0].tokens,
        "tokens_per_second": rates,
        "speedup": {name: rate / rates["plain"] for name, rate in rates.items()},
        "mean_accepted_length": {name: group[-1].mean_accepted_length for name, group in runs.items()},
        "texts_equal": len(texts) == 1 if request.sampling.temperature == 0 else None,
    }


def _line(number: int, row: Mapping[str, Any]) -> str:
    rates = "  ".join(
        f"{name} {rate:.1f} ({row['speedup'][name]:.2f}x)" for name, rate in row["tokens_per_second"].items()
    )
    same = {True: "same text", False: "TEXTS DIFFER", None: "sampled"}[row["texts_equal"]]
    return f"{number:3d} {row['kind']:<12} {row['tokens']:4d} tokens  {rates}  {same}"


def _summary(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(rows[0]["speedup"]) if rows else []
    return {
        "command": command("adaspec.bench.compare"),
        "threads": torch.get_num_threads(),
        "median_speedup": {name: statistics.median(row["speedup"][name] for row in rows) for name in names},
        "median_tokens_per_second": {
            name: statistics.median(row["tokens_per_second"][name] for row in rows) for name in names
        },
        "prompts": rows,
    }


if __name__ == "__main__":
    raise SystemExit(main())
