"""A run's records as Weights & Biases shows them, told by a thread of its own: decoding does not wait for it."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

Line = Mapping[str, Any]
PLANS = ("method", "plan", "rounds", "share", "tokens", "seconds", "tokens_per_second", "forecast")


class Mirror:
    """Tells nobody. ``seconds``: processor time that telling took."""

    seconds = 0.0

    def add(self, prompts: Sequence[Line], rounds: Sequence[Line]) -> None:
        """Takes what one unit brought."""

    def finish(self, summary: Mapping[str, Any], folder: Path) -> None:
        """Takes the end of the run."""


def mirror(record: Any, config: Mapping[str, Any], out: Path, group: str | None) -> Mirror:
    """The mirror that a configuration asks for.

    Raises:
        ValueError: W&B cannot be reached, or refuses, in one line.
    """
    return WandbMirror(_begin(record, config, out, group)) if record.wandb else Mirror()


def _begin(record: Any, config: Mapping[str, Any], out: Path, group: str | None) -> Any:
    import wandb  # noqa: PLC0415 - only where it is asked for

    settings = wandb.Settings(
        console="off",
        silent=True,
        save_code=False,
        disable_git=True,
        x_disable_stats=True,  # the machine is measured by us, and nobody's name is told
        x_disable_meta=True,
        x_disable_machine_info=True,
        host="",
    )
    try:
        return wandb.init(
            project=record.project,
            entity=record.entity,
            group=record.group or group,
            job_type=record.job_type,
            mode=record.mode,
            dir=str(out),
            config=dict(config),
            reinit="finish_previous",
            settings=settings,
        )
    except (wandb.Error, OSError) as error:
        raise ValueError(f"W&B: {' '.join(str(error).split())}") from None


class WandbMirror(Mirror):
    """Logs the rounds of policies, with the round as step, and every answer; at the end plans, lengths, artifacts.

    Args:
        run: a run of W&B.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._known: set[str] = set()
        self._plans: dict[tuple[str, str], list[float]] = {}  # rounds, tokens, seconds, seconds forecast
        self._lengths: dict[str, list[int]] = defaultdict(list)
        self._answers: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="wandb-mirror", daemon=True)
        self._thread.start()

    def add(self, prompts: Sequence[Line], rounds: Sequence[Line]) -> None:
        """Takes what one unit brought; returns at once. The lists may grow afterwards."""
        told = tuple(prompts), tuple(rounds)
        self._waiting.put(lambda: self._log(*told))

    def finish(self, summary: Mapping[str, Any], folder: Path) -> None:
        """Waits until everything is told and ends the run of W&B.

        Raises:
            ValueError: what W&B could not take, in one line.
        """
        self._waiting.put(lambda: self._close(summary, folder))
        self._waiting.put(None)
        self._thread.join()
        self._run.finish()
        if self._failure is not None:
            raise ValueError(f"W&B: {' '.join(str(self._failure).split())}; the folder {folder} has everything")

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            if self._failure is None:
                try:
                    task()
                except Exception as error:  # whatever it is, the run's folder has what counts
                    self._failure = error
            self.seconds = time.thread_time()

    def _log(self, prompts: Sequence[Line], rounds: Sequence[Line]) -> None:
        """Every answer; every round of a policy, which alone has something to show from round to round."""
        for line in rounds:
            self._count(line)
            if line["forecast"] is not None:
                values = {name: line[name] for name in ("propensity", "catch_up_seconds", "forecast")}
                values |= {"accepted_length": line["tokens"], "tokens_per_second": line["tokens"] / line["seconds"]}
                self._tell(line["method"], "round", line["round"], values)
        for line in prompts:
            method = line["method"]
            values = {f"answer_{name}": line[name] for name in ("tokens_per_second", "mean_accepted_length")}
            self._tell(method, "answer", self._answers[method], values)
            self._answers[method] += 1

    def _tell(self, method: str, step: str, number: int, values: Mapping[str, Any]) -> None:
        """Values of a method at one of its steps."""
        for name in values:
            if f"{method}/{name}" not in self._known:
                self._known.add(f"{method}/{name}")
                self._run.define_metric(f"{method}/{name}", step_metric=f"{method}/{step}")
        named = {f"{method}/{name}": value for name, value in values.items()}
        self._run.log({f"{method}/{step}": number, **named})

    def _count(self, line: Line) -> None:
        self._lengths[line["method"]].append(line["tokens"])
        sums = self._plans.setdefault((line["method"], line["plan"]), [0.0] * 4)
        told = line["tokens"] / line["forecast"] if line["forecast"] else 0.0
        for slot, value in enumerate((1.0, line["tokens"], line["seconds"], told)):
            sums[slot] += value

    def _close(self, summary: Mapping[str, Any], folder: Path) -> None:
        import wandb  # noqa: PLC0415 - only where it is asked for

        totals = {method: len(lengths) for method, lengths in self._lengths.items()}
        rows = [_row(method, plan, sums, totals[method]) for (method, plan), sums in self._plans.items()]
        closing: dict[str, Any] = {"plans": wandb.Table(columns=list(PLANS), data=rows)}
        for method, lengths in self._lengths.items():
            counts = np.histogram(lengths, bins=np.arange(0.5, max(lengths) + 1.0))
            closing[f"{method}/accepted_lengths"] = wandb.Histogram(np_histogram=counts)
        self._run.log(closing)
        for method, own in summary["methods"].items():
            figures = {key: value for key, value in own.items() if isinstance(value, int | float)}
            self._run.summary.update({f"{method}/{key}": value for key, value in figures.items()})
        self._run.summary.update({"speedup": summary["objective"]})  # what conf/sweep.yaml seeks
        for kind, paths in (("trace", [folder / "rounds.jsonl"]), ("controller", _controllers(folder))):
            for path in paths:
                artifact = wandb.Artifact(f"{path.stem}-{self._run.id}", type=kind)
                artifact.add_file(str(path))
                self._run.log_artifact(artifact)


def _row(method: str, plan: str, sums: Sequence[float], total: int) -> list[Any]:
    rounds, tokens, seconds, told = sums
    forecast = tokens / told if told else None
    return [method, plan, int(rounds), rounds / total, int(tokens), seconds, tokens / seconds, forecast]


def _controllers(folder: Path) -> list[Path]:
    return sorted(folder.glob("controller-*.json"))
