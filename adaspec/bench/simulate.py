"""``adaspec simulate``: policies against scenarios, over seeds, in parallel; a table, pictures and one JSON line."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from adaspec.bench.common import bars
from adaspec.bench.config import build, several
from adaspec.bench.launch import launch
from adaspec.bench.scenarios import Setting
from adaspec.bench.tournament import Entrant, Oracle, by_policy, judge, run, standing, summary

COLUMNS = {
    "share_of_best_fixed": "share of best fixed",
    "ci": "+-",
    "share_of_segment_oracle": "of segment oracle",
    "share_first_200": "first 200 rounds",
    "time_regret_seconds": "time regret, s",
    "rounds_to_95": "rounds to 95 %",
    "decision_microseconds": "us per decision",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """One scenario and seed with all policies: a piece of work for one process."""

    scenario: Mapping[str, Any]
    policies: tuple[Mapping[str, Any], ...]
    seed: int
    rounds: int

    @property
    def key(self) -> list[Any]:
        return [self.scenario["name"], self.seed, self.rounds, [own["name"] for own in self.policies]]


def main(overrides: Sequence[str]) -> int:
    """Runs Hydra on ``overrides``; the exit code.

    Raises:
        ValueError: a key or choice that does not exist, or a scenario that cannot be played.
        OSError: a file that cannot be read or written.
    """
    return max(launch("simulate", overrides, simulate), default=0)


def simulate(config: DictConfig, out: Path) -> int:
    """Plays every unit that ``out`` does not hold yet, and writes table, pictures and summary there.

    Raises:
        ValueError: fewer than 1 round or seed, or a scenario that cannot be played.
    """
    for name in ("rounds", "seeds"):
        if config[name] < 1:
            raise ValueError(f"{name} is at least 1, got {config[name]}")
    units, file = _units(config), out / "units.jsonl"
    results = _finished(file)
    done = [result["key"] for result in results]
    todo = [unit for unit in units if unit.key not in done]
    results = [result for result in results if result["key"] in [unit.key for unit in units]]
    code = 0
    try:
        with file.open("a", encoding="utf-8") as lines:
            for result in _play(todo, config.workers or os.cpu_count() or 1):
                results.append(result)
                print(json.dumps(result), file=lines, flush=True)
    except KeyboardInterrupt:
        told = f"{len(results)} of {len(units)} pieces are kept; go on with the same words and hydra.run.dir={out}"
        print(f"interrupted: {told}", file=sys.stderr)
        code = 130
    _report(results, out, plots=config.plots)
    return code


def _finished(file: Path) -> list[dict[str, Any]]:
    """The pieces that ``file`` holds; a last line that a crash has torn is cut off."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        file.write_text("".join(lines[:-1]), encoding="utf-8")
        lines.pop()
    return [json.loads(line) for line in lines]


def _units(config: DictConfig) -> list[Unit]:
    """Seeds in the outer loop, so that an interrupted run has something of every scenario."""
    policies = tuple(several(config, "policy", config.policies))
    scenarios = several(config, "scenario", config.scenarios)
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    return [Unit(scenario, policies, seed, config.rounds) for seed in seeds for scenario in scenarios]


def _play(units: Sequence[Unit], workers: int) -> Iterator[dict[str, Any]]:
    """The results as they come, with progress and time left on standard error."""
    context = multiprocessing.get_context("spawn")
    with bars("simulate", len(units)) as advance:
        pool = ProcessPoolExecutor(min(workers, max(len(units), 1)), context, _quiet)
        try:
            waiting = {pool.submit(play, unit) for unit in units}
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for one in finished:
                    advance("simulate")
                    yield one.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _quiet() -> None:
    """Ctrl-C is for the parent, which keeps what is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def play(unit: Unit) -> dict[str, Any]:
    """One scenario and seed: every policy, judged against the same oracle."""
    setting: Setting = build(unit.scenario["make"], seed=unit.seed)
    oracle = Oracle(setting)
    policies = {}
    for own in unit.policies:
        policies[own["name"]] = judge(run(setting, Entrant.of(own), unit.rounds, unit.seed), oracle)
    return {"key": unit.key, "scenario": unit.scenario["name"], "seed": unit.seed, "policies": policies}


def _report(results: Sequence[Mapping[str, Any]], out: Path, *, plots: bool) -> None:
    """Table and pictures into ``out``, the table and, as the last line, the summary to standard output."""
    figures = {"scenarios": summary(results)}
    (out / "summary.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    table = "\n\n".join([*(_table(name, group) for name, group in figures["scenarios"].items()), _standings(results)])
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    if plots and results:
        from adaspec.bench.plots import draw  # noqa: PLC0415 - plotting takes a second to import

        draw(results, out)
    print(f"\n{out}")
    print(json.dumps(figures), flush=True)


def _standings(results: Sequence[Mapping[str, Any]]) -> str:
    """A line per policy: where it is first or tied by either rule, and how far behind the first it can be."""
    table = by_policy(results)
    lines = [
        "| policy | nobody ahead, seed by seed | intervals overlap | least share of the winner | where |",
        "|---|---:|---:|---:|---|",
    ]
    for policy in dict.fromkeys(policy for group in table.values() for policy in group):
        own = standing(table, policy)
        if own is not None:
            counts = f"{own.tied} of {own.of} | {own.near} of {own.of}"
            lines.append(f"| {policy} | {counts} | {own.worst:.3f} | {own.where} |")
    return "\n".join(lines)


def _table(name: str, group: Mapping[str, Mapping[str, Any]]) -> str:
    head = f"| {name} | " + " | ".join(COLUMNS.values()) + " |\n|---" + "|---:" * len(COLUMNS) + "|"
    ranked = sorted(group.items(), key=lambda item: -item[1]["share_of_best_fixed"])
    rows = [f"| {policy} | " + " | ".join(_number(own[key]) for key in COLUMNS) + " |" for policy, own in ranked]
    return "\n".join([head, *rows])


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"
