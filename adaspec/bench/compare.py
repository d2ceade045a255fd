"""Plain decoding, the controller and fixed plans side by side, interleaved prompt by prompt in one process.

python -m adaspec.bench.compare --compare-plan target/lookup:4
python -m adaspec.bench.compare --target T.gguf --drafter draft=D.gguf --prompts humaneval.jsonl --raw --limit 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adaspec.assemble import Assembly, Setup, assemble, parse_drafters
from adaspec.bench.prompts import TEN
from adaspec.compare import Pinned
from adaspec.decoding.generate import Generation, Request
from adaspec.decoding.sampling import SamplingParams
from adaspec.plan import Plan


def main() -> int:
    """Prints a line per prompt while it goes, and one JSON object as the last line."""
    arguments = _parser().parse_args()
    setup = Setup(
        target=arguments.target,
        drafters=parse_drafters(arguments.drafter or ["lookup"]),
        precision=arguments.precision,
        threads=arguments.threads,
        windows=tuple(map(int, arguments.windows.split(","))),
        inner_windows=tuple(map(int, arguments.inner_windows.split(","))),
    )
    assembly = assemble(setup, lambda what, share: None)
    fixed = [Plan.parse(text) for text in arguments.compare_plan]
    rows = []
    for kind, prompt in _prompts(arguments):
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
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", metavar="[NAME=]SOURCE")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--windows", default="2,4,8")
    parser.add_argument("--inner-windows", default="2,4")
    parser.add_argument("--compare-plan", action="append", default=[], metavar="PLAN", help="a fixed plan; repeatable")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL with prompt, question or turns; else our own"
    )
    parser.add_argument("--limit", type=int, help="number of prompts")
    parser.add_argument("--raw", action="store_true", help="without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repetitions; the median rate counts")
    parser.add_argument("--cold", action="store_true", help="a new controller for every prompt and repetition")
    parser.add_argument("--threads", type=int)
    return parser


def _prompts(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    if arguments.prompts is None:
        return list(TEN[: arguments.limit])
    records = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    return [_record(record, arguments.prompts.stem) for record in records[: arguments.limit]]


def _record(record: Mapping[str, Any], kind: str) -> tuple[str, str]:
    text = record.get("prompt") or record.get("question") or record["turns"][0]
    return record.get("category", kind), text


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


def _bare(word: str) -> str:
    """An argument without the folders of this machine."""
    name, sign, path = word.rpartition("=")
    return f"{name}{sign}{Path(path).name}" if Path(path).exists() else word


def _summary(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(rows[0]["speedup"]) if rows else []
    return {
        "command": " ".join(["python -m adaspec.bench.compare", *(_bare(word) for word in sys.argv[1:])]),
        "threads": torch.get_num_threads(),
        "median_speedup": {name: statistics.median(row["speedup"][name] for row in rows) for name in names},
        "median_tokens_per_second": {
            name: statistics.median(row["tokens_per_second"][name] for row in rows) for name in names
        },
        "prompts": rows,
    }


if __name__ == "__main__":
    raise SystemExit(main())
