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
    """Seconds inside the sampler, as they add up."""

    seconds: float = 0.0


@contextmanager
def sampling_timed() -> Iterator[Spent]:
    """Adds up what laws, choices and verdicts take on the host while the context is open."""
    spent, own = Spent(), (Sampler.choose, Sampler.verify)

    def timed(method: Any) -> Any:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent.seconds += time.perf_counter() - began

        return run

    Sampler.choose, Sampler.verify = map(timed, own)  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Sampler.choose, Sampler.verify = own  # type: ignore[method-assign]


def anatomy(
    outcomes: Sequence[RoundOutcome], target: str, sampling: float = 0.0, controller: float = 0.0
) -> dict[str, float]:
    """Where rounds spend their time, milliseconds per round: passes that draft, passes of the target, the rest.

    ``sampling``, ``controller``: seconds of all rounds; what is not told apart is counted as host.
    """
    passes = [one for outcome in outcomes for one in outcome.passes]
    verify = sum(one.seconds for one in passes if one.model == target)
    draft = sum(one.seconds for one in passes) - verify
    catch_up = sum(outcome.catch_up_seconds for outcome in outcomes)
    whole = sum(outcome.seconds for outcome in outcomes)
    parts = {"draft": draft, "verify": verify, "catch_up": catch_up, "sampling": sampling}
    parts |= {"host": whole - sum(parts.values()), "controller": controller}
    return {name: 1e3 * each / len(outcomes) for name, each in parts.items()}
