"""Timing passes and rounds, for benchmarks: what takes turns is disturbed alike by a noisy neighbour."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Chain
from adaspec.decoding.drafter import Stage
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.sampling import Sampler
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context

CONTEXT = 128  # cached tokens while passes are timed
QUERY_LENS = (1, 2, 3, 5, 9)


def step(
    model: LanguageModel, query_len: int, *, batch_size: int = 1, longest: int = max(QUERY_LENS)
) -> Callable[[], None]:
    """A pass over ``query_len`` tokens per row behind ``CONTEXT`` cached ones, to be repeated.

    ``longest``: of the query lengths that will be timed, so that the cache is kept.
    """
    device, length = model.device, CONTEXT + query_len
    buffer = TokenBuffer(batch_size, length, device)
    tokens = (torch.arange(length, device=device) % model.vocab_size).expand(batch_size, -1)
    buffer.append(tokens, torch.full((batch_size,), length, device=device))
    start = torch.full((batch_size,), CONTEXT, device=device)
    active = torch.ones(batch_size, dtype=torch.bool, device=device)

    def run() -> None:
        model.rollback(start)
        model.logits(buffer, start, query_len, active)

    model.start(batch_size, CONTEXT + longest)
    model.catch_up(buffer, start)
    return run


def seconds(run: Callable[[], object]) -> float:
    """What one call takes, the device's part included."""
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def medians(runs: Mapping[str, Callable[[], object]], repeats: int, until: float = float("inf")) -> dict[str, float]:
    """Median seconds of what takes turns, after one call each that does not count.

    ``until``: moment of ``time.perf_counter`` after which no further turn is begun.
    """
    spent: dict[str, list[float]] = defaultdict(list)
    for run in runs.values():
        seconds(run)
    for turn in range(repeats):
        if turn and time.perf_counter() > until:
            break
        for name, run in runs.items():
            spent[name].append(seconds(run))
    return {name: statistics.median(times) for name, times in spent.items()}


def stream_sum(device: torch.device | str, size: int) -> Callable[[], object]:
    """Reads ``size`` bytes once: the memory bandwidth that can be had."""
    stream = torch.ones(size // 4, device=device)
    return stream.sum


class Timed:
    """A chooser that adds up what another one's ``choose`` and ``observe`` take."""

    def __init__(self, chooser: Any) -> None:
        self._chooser = chooser
        self.seconds = 0.0

    def choose(self, context: Context) -> Decision:
        began = time.perf_counter()
        decision: Decision = self._chooser.choose(context)
        self.seconds += time.perf_counter() - began
        return decision

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        began = time.perf_counter()
        self._chooser.observe(decision, outcome)
        self.seconds += time.perf_counter() - began


@dataclass(slots=True)
class Spent:
    """Seconds inside some methods, as they add up."""

    seconds: float = 0.0


Methods = Sequence[tuple[type, str]]
SAMPLING: Methods = ((Sampler, "choose"), (Sampler, "verify"))  # laws, choices and verdicts on the host
PROMPTS: Methods = ((Chain, "start"),)  # the target's part of them
BOOKKEEPING: Methods = (  # what a controller is told
    (Chain, "context"),
    (Chain, "_settle"),
    (Chain, "_score"),
    (Stage, "drain"),
)


@contextmanager
def inside(methods: Methods) -> Iterator[Spent]:
    """Adds up what methods take that do not call one another, while the context is open."""
    spent = Spent()

    def timed(method: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                spent.seconds += time.perf_counter() - began

        return run

    own = [(owner, name, getattr(owner, name)) for owner, name in methods]
    for owner, name, method in own:
        setattr(owner, name, timed(method))
    try:
        yield spent
    finally:
        for owner, name, method in own:
            setattr(owner, name, method)


def anatomy(
    outcomes: Sequence[RoundOutcome],
    target: str,
    whole: float,
    *,
    sampling: float = 0.0,
    bookkeeping: float = 0.0,
    controller: float = 0.0,
) -> dict[str, float]:
    """Where rounds spend their time, milliseconds per round: passes that draft, passes of the target, the rest.

    ``whole``: seconds of the loop of all rounds, ``sampling``, ``bookkeeping`` and ``controller`` of it.
    What is not told apart is the host's: preparing passes, committing, text.
    """
    passes = [one for outcome in outcomes for one in outcome.passes]
    verify = sum(one.seconds for one in passes if one.model == target)
    draft = sum(one.seconds for one in passes) - verify
    catch_up = sum(outcome.catch_up_seconds for outcome in outcomes)
    parts = {"draft": draft, "verify": verify, "catch_up": catch_up, "sampling": sampling}
    parts |= {"bookkeeping": bookkeeping, "controller": controller}
    parts["host"] = whole - sum(parts.values())
    return {name: 1e3 * each / len(outcomes) for name, each in parts.items()}
