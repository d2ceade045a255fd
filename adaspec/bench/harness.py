"""``adaspec bench``: methods side by side in one process, interleaved question by question; tables, records, JSON."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from adaspec.bench.chains import chains
from adaspec.bench.common import bars, command
from adaspec.bench.core import core
from adaspec.bench.figures import figures, table
from adaspec.bench.journal import Journal, Line, check_same, machine
from adaspec.bench.launch import group, launch
from adaspec.bench.lineup import Asking, asking, assembled, best_plan, check_methods, fitting, lineup, questions, setup
from adaspec.bench.methods import Adaptive, Answer, Method
from adaspec.bench.mirror import Mirror, mirror
from adaspec.bench.sweep import definition, draws, fixed_words, product_words
from adaspec.bench.workload import Question
from adaspec.plan import Plan

WARM_UP = "Name three things that one can see from a train window, and say a few words about each of them."
WARM_UP_TOKENS = 16
MEASURES: dict[str, Callable[[DictConfig, Path], dict[str, Any]]] = {"core": core, "chains": chains}  # but texts
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its folder, what was printed as its summary, and the exit code."""

    folder: Path
    overrides: tuple[str, ...]
    summary: dict[str, Any]
    code: int

    @property
    def objective(self) -> float | None:
        """What a search makes large: the speed-up of the first policy."""
        found: float | None = self.summary.get("objective")
        return found


def main(overrides: Sequence[str]) -> int:
    """Runs the words through Hydra; the exit code.

    Raises:
        ValueError: a word, model, file or disk that does not work, in one line.
        KeyboardInterrupt: when a multirun was interrupted.
    """
    files = [word.removeprefix("sweep=") for word in overrides if word.startswith("sweep=")]
    if files:
        outcomes = _swept(files[-1], [word for word in overrides if not word.startswith("sweep=")])
    else:
        outcomes = launch("bench", _resumed(overrides), _run)
    if files or any(word in ("-m", "--multirun") for word in overrides):
        print(combined(outcomes), flush=True)
    return max((outcome.code for outcome in outcomes), default=0)


def _swept(file: str, words: Sequence[str]) -> list[Outcome]:
    """Every trial of a sweep as a run of one multirun; ``words`` go before those of the sweep."""
    sweep = definition(file)
    fixed = _without(fixed_words(sweep), words)
    grid = product_words(sweep)
    if grid is not None:
        return launch("bench", ["-m", *fixed, *_without(grid, words), *words], _run)
    outcomes: list[Outcome] = []
    for number, trial in enumerate(draws(sweep)):
        place = [f"hydra.sweep.dir={outcomes[0].folder.parent}"] if outcomes else []
        own = ["-m", *fixed, *_without(trial, words), *words, *place, f"hydra.sweep.subdir={number}"]
        outcomes += launch("bench", own, _run)
    return outcomes


def _without(words: Sequence[str], later: Sequence[str]) -> list[str]:
    """``words`` but for those that ``later`` ones say anew."""
    keys = {_key(word) for word in later}
    return [word for word in words if _key(word) not in keys]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def combined(outcomes: Sequence[Outcome]) -> str:
    """The runs of a multirun as one table and, as the last line, one JSON object."""
    rows: dict[str, Any] = {}
    runs = []
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes)) if len(outcomes) > 1 else set()
    for outcome in outcomes:
        label = " ".join(word for word in outcome.overrides if word not in common)
        methods = outcome.summary.get("methods", {})
        rows |= {f"{label}: {name}": own for name, own in methods.items()}
        brief = {name: {key: own[key] for key in own if key != "kinds"} for name, own in methods.items()}
        runs.append({"run": _near(outcome.folder), "overrides": list(outcome.overrides), "methods": brief})
    shown = {name: {**own, "kinds": {}} for name, own in rows.items()}
    name = outcomes[0].folder.parent.name if outcomes else None
    return f"\n{table(shown, 'run: method')}\n\n" + json.dumps({"group": name, "runs": runs})


def _near(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def _resumed(overrides: Sequence[str]) -> list[str]:
    """``resume=RUN`` becomes the words with which RUN was begun, and its folder; later words stand.

    Raises:
        ValueError: a folder that is no run.
    """
    found = [word.removeprefix("resume=") for word in overrides if word.startswith("resume=")]
    if not found:
        return list(overrides)
    file = Path(found[-1]) / "overrides.yaml"
    if not file.is_file():
        raise ValueError(f"resume={found[-1]} is no run: it lacks {file.name}")
    words = [word for word in overrides if not word.startswith("resume=")]
    return [*_without(list(OmegaConf.load(file)), words), *words, f"hydra.run.dir={found[-1]}"]


def _run(config: DictConfig, out: Path) -> Outcome:
    """One run.

    Raises:
        KeyboardInterrupt: after what was done is reported, in a multirun, whose other runs it ends.
    """
    words = tuple(HydraConfig.get().overrides.task)
    try:
        summary, code = bench(config, out, words, group())
    except OSError as error:
        kept = f"; what was done is kept, go on with resume={_near(out)}" if (out / "prompts.jsonl").is_file() else ""
        raise ValueError(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}{kept}") from None
    if code == 130 and group():
        raise KeyboardInterrupt
    return Outcome(out, words, summary, code)


def bench(
    config: DictConfig, out: Path, words: Sequence[str], multirun: str | None = None
) -> tuple[dict[str, Any], int]:
    """Measures what ``out`` does not hold yet; the summary and the exit code. ``words``: what was asked for.

    Raises:
        ValueError: a configuration that cannot be measured, in one line.
        OSError: a file that cannot be read or written.
    """
    told = command("adaspec bench", [shlex.quote(word) for word in words])
    check_methods(config)
    read = questions(config)
    journal = Journal(out)
    resolved = _resolved(config, words, journal)
    if config.measure != "texts":
        summary = {"command": told, **MEASURES[config.measure](config, out)}
        journal.write("summary.json", summary)
        print(json.dumps(summary), flush=True)
        return summary, 0
    run = _Run.prepare(config, journal, read)
    mirrored = mirror(config.record, resolved, out, multirun)
    mirrored.add(journal.prompts, journal.rounds)
    code = 0
    try:
        run.play(mirrored)
    except KeyboardInterrupt:
        print(f"interrupted: what was done is kept, go on with: adaspec bench resume={_near(out)}", file=sys.stderr)
        code = 130
    summary = run.summary(told) | {"mirror_seconds": mirrored.seconds}
    journal.write("summary.json", summary)
    shown = table(summary["methods"])
    (out / "table.md").write_text(shown + "\n", encoding="utf-8")
    print(f"{shown}\n\n{_near(out)}\n{json.dumps(summary)}", flush=True)
    mirrored.finish(summary, out)
    return summary, code


def _resolved(config: DictConfig, words: Sequence[str], journal: Journal) -> dict[str, Any]:
    """The configuration as a dict, kept in the folder with its words; the one that is there must agree."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    path = journal.folder / "config.yaml"
    if path.is_file():
        before = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(before, dict)
        check_same(before, found)
    OmegaConf.save(OmegaConf.create(found), path)
    OmegaConf.save(OmegaConf.create(list(words)), journal.folder / "overrides.yaml")
    return {str(key): value for key, value in found.items()}


class _Run:
    """The methods, warmed up, and the questions that are left for each."""

    def __init__(
        self, config: DictConfig, journal: Journal, ask: Asking, asked: Sequence[Question], best: dict[Plan, float]
    ) -> None:
        self._config, self._journal, self._ask, self._asked, self._best = config, journal, ask, asked, best
        self.methods: list[Method] = []

    @classmethod
    def prepare(cls, config: DictConfig, journal: Journal, read: Sequence[Question]) -> _Run:
        """Loads, sweeps for the best fixed plan, loads the peers and warms all of them up."""
        own = setup(config, journal.folder)
        with bars("load", 1) as advance:

            def tell(what: str) -> None:
                advance(what, 0)

            assembly = assembled(config, own, tell)
            ask = asking(config, assembly)
            asked = fitting(config, ask, read)
            run = cls(config, journal, ask, asked, _best(config, journal, ask, asked, tell))
            tell("load what is compared")
            run.methods = lineup(config, assembly, own, next(iter(run._best), None))
            for method in run.methods:
                tell(f"warm up {method.name}")
                for _ in range(config.warmups):
                    method.answer(ask.request(WARM_UP, tokens=WARM_UP_TOKENS))
        return run

    def play(self, mirrored: Mirror) -> None:
        """Every repetition, question and method that is not done; methods take turns in going first."""
        total = self._config.repeats * len(self._asked) * len(self.methods)
        with bars("bench", total) as advance:
            for repeat in range(self._config.repeats):
                for method in self.methods:
                    self._begin(method, repeat)
                for number, question in enumerate(self._asked):
                    first = (number + repeat) % len(self.methods)
                    for method in self.methods[first:] + self.methods[:first]:
                        advance(f"{question.kind}: {method.name}", 0)
                        if (method.name, question.id, repeat) not in self._journal.done:
                            self._unit(method, question, repeat, mirrored)
                        advance("bench", 1)

    def _begin(self, method: Method, repeat: int) -> None:
        """A method at the beginning of a repetition: new, or as it was when the run ended in the midst of it."""
        method.start(self._config.seed + repeat)
        begun = any(name == method.name and own == repeat for name, _, own in self._journal.done)
        state = self._journal.read(f"controller-{method.name}.json") if begun else None
        if state is not None:
            method.restore(state)

    def _unit(self, method: Method, question: Question, repeat: int, mirrored: Mirror) -> None:
        """All turns of one question by one method, into the journal."""
        base = {"method": method.name, "prompt": question.id, "kind": question.kind, "repeat": repeat}
        tag = question.kind if self._config.workload.tagged else ""
        before: list[tuple[str, str]] = []
        prompts: list[Line] = []
        rounds: list[Line] = []
        step = self._journal.steps[method.name]
        for turn, prompt in enumerate(question.turns):
            found = method.answer(self._ask.request(prompt, before, seed=repeat), tag)
            before.append((prompt, self._ask.text(found.tokens)))
            prompts.append({**base, "turn": turn, **_figures(found)})
            for one in found.rounds:
                rounds.append({**base, "turn": turn, "round": step + len(rounds), **one.json()})
        if question.arrival is not None:
            prompts[0]["arrival"] = question.arrival
        self._journal.add(prompts, rounds, method.state())
        mirrored.add(prompts, rounds)

    def summary(self, told: str) -> dict[str, Any]:
        """What the lines of the journal say so far."""
        config = self._config
        methods = figures(self._journal.prompts, greedy=config.sampling.temperature == 0.0)
        own = [method for method in self.methods if isinstance(method, Adaptive)]
        return {
            "command": told,
            "machine": machine(config.runner.device),
            "models": {"target": Path(config.models.target).name, "runners": self._ask.assembly.runners},
            "methods": methods,
            "objective": next((methods[one.name]["speedup"] for one in own if one.name in methods), None),
            "best_fixed_plan": next((str(plan) for plan in self._best), None),
            "sweep": {str(plan): rate for plan, rate in self._best.items()},
            "complete": len(self._journal.done) >= config.repeats * len(self._asked) * len(self.methods),
        }


def _best(
    config: DictConfig, journal: Journal, ask: Asking, asked: Sequence[Question], tell: Tell
) -> dict[Plan, float]:
    """The sweep's plans, the best first; as they were, when the run goes on."""
    if "best_fixed" not in config.methods:
        return {}
    known = journal.read("sweep.json")
    if known is None:
        rates = best_plan(config, ask, asked, tell)
        known = {str(plan): rate for plan, rate in rates.items()}
        journal.write("sweep.json", known)
    return {Plan.parse(text): rate for text, rate in known.items()}


def _figures(found: Answer) -> Line:
    tokens = len(found.tokens)
    return {
        "tokens": tokens,
        "seconds": found.seconds,
        "prefill_seconds": found.prefill_seconds,
        "tokens_per_second": tokens / found.seconds,
        "rounds": found.passes,
        "mean_accepted_length": tokens / found.passes if found.passes else None,
        "digest": hashlib.sha256(json.dumps(found.tokens).encode()).hexdigest(),
    }
