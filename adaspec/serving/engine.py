"""The decode thread: small batches formed from waiting jobs, every job finished or told why not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adaspec.decoding.chain import Score
from adaspec.decoding.generate import Generator, Request, Step, finish_reason
from adaspec.faults import log_failure
from adaspec.guard import Guard
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, Override
from adaspec.telemetry import Telemetry

logger = logging.getLogger("adaspec.serving")


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a job with the tokens it came from, and their scores when asked for."""

    text: str
    tokens: tuple[int, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a job took. ``accepted``: tokens beyond one per round; ``plans``: rounds per plan."""

    prompt: int
    tokens: int
    rounds: int
    plans: dict[str, int]

    @property
    def accepted(self) -> int:
        return self.tokens - self.rounds


@dataclass(frozen=True, slots=True)
class Finished:
    """A job came to its end."""

    reason: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """A job will not come to its end. ``status``: of HTTP."""

    status: int
    message: str


Event = Piece | Finished | Failed


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way. ``put`` is called from the decode thread and must not block.

    ``logprobs``: how many of the most likely tokens it wants with the score of each of its own; None: no scores.
    """

    request: Request
    put: Callable[[Event], None]
    tag: str = ""
    override: Override | None = None
    logprobs: int | None = None
    cancelled: bool = False
    ended: bool = False
    rounds: int = 0
    tokens: list[int] = field(default_factory=list)
    plans: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, Override | None, bool]:
        """Jobs of one kind may share a batch: they share a context and, greedy or not, a path through the sampler."""
        return self.tag, self.override, self.request.sampling.temperature == 0.0

    @property
    def length(self) -> int:
        return len(self.request.prompt) + self.request.max_new_tokens

    def end(self, event: Finished | Failed) -> None:
        """Tells the last event, once."""
        if not self.ended:
            self.ended = True
            self.put(event)


class QueueFull(Exception):
    """As many jobs wait as may."""


class Closed(Exception):
    """The engine takes no more jobs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows of a batch, seconds that a batch waits for more of them, jobs that may wait.

    Raises:
        ValueError: fewer than 1 row or waiting job, or a negative wait.
    """

    max_batch: int = 8
    batch_wait: float = 0.01
    queue: int = 64

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.queue < 1:
            raise ValueError(f"a batch and the queue hold at least 1 job, got {self.max_batch} and {self.queue}")
        if not 0.0 <= self.batch_wait < 60.0:
            raise ValueError(f"a batch waits for 0 to 60 seconds, got {self.batch_wait}")


class Engine:
    """Decodes jobs in a thread of its own, batch by batch; a batch runs to its end.

    The next batch is the job that has waited longest with those of its kind that are most similar in length.

    Args:
        generator: decodes a batch.
        guard: chooses plans.
        telemetry: is told the load.
        limits: see there.
        between: called in the decode thread after every round.
    """

    def __init__(
        self,
        generator: Generator,
        guard: Guard,
        telemetry: Telemetry,
        limits: Limits | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.generator = generator
        self._guard, self._telemetry, self._between = guard, telemetry, between
        self.limits = limits or Limits()
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="adaspec-decode", daemon=True)

    def start(self) -> None:
        """Starts the decode thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are taken and decoded."""
        return self._thread.is_alive() and not self._closed

    def load(self) -> tuple[int, int]:
        """Jobs that are decoded and jobs that wait."""
        with self._changed:
            return sum(not job.ended for job in self._running), len(self._waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs, all or none.

        Raises:
            QueueFull: there is no room for them.
            Closed: the engine is shutting down.
        """
        with self._changed:
            if self._closed:
                raise Closed
            if len(self._waiting) + len(jobs) > self.limits.queue:
                raise QueueFull
            self._waiting += jobs
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Ends a job: at once when it waits, with the next round when it is decoded."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self, grace: float) -> None:
        """Takes no more jobs; finishes those it has for ``grace`` seconds, then tells the rest that it ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._join(grace)
        with self._changed:
            left = [*self._waiting, *self._running]
            self._waiting.clear()
        for job in left:
            job.cancelled = True
            job.end(Failed(503, "the server is shutting down and could not finish this request"))
        self._join(grace + 30.0)

    def _join(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while jobs := self._take():
            try:
                self._decode(jobs)
            except Exception as error:
                log_failure(logger, f"a batch of {len(jobs)} requests failed", error)
                for job in jobs:
                    job.end(Failed(500, "decoding failed; the server's log tells why"))
            with self._changed:
                self._running = []
            self._telemetry.load(*self.load())

    def _take(self) -> list[Job]:
        """The next batch, as soon as there is one; [] once the engine is closed and nothing waits."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            until = time.monotonic() + self.limits.batch_wait
            while 0 < len(self._waiting) < self.limits.max_batch and (left := until - time.monotonic()) > 0.0:
                self._changed.wait(left)
            if not self._waiting:  # all of them hung up meanwhile
                return self._take()
            self._running = self._pick()
            self._waiting = [job for job in self._waiting if job not in self._running]
            jobs = self._running
        self._telemetry.load(*self.load())
        return jobs

    def _pick(self) -> list[Job]:
        first = self._waiting[0]
        alike = [job for job in self._waiting[1:] if job.kind == first.kind]
        alike.sort(key=lambda job: abs(job.length - first.length))
        return [first, *alike[: self.limits.max_batch - 1]]

    def _decode(self, jobs: Sequence[Job]) -> None:
        tag, override, _ = jobs[0].kind
        steps = self.generator.stream(
            [job.request for job in jobs],
            tag=tag,
            logprobs=max((job.logprobs for job in jobs if job.logprobs is not None), default=None),
            controller=_Steered(self._guard, override),
            cancelled=lambda row: jobs[row].cancelled,
        )
        for step in steps:
            for row, job in enumerate(jobs):
                self._deliver(job, row, step)
            try:
                self._between()
            except Exception:
                logger.exception("what is done between rounds failed")

    def _deliver(self, job: Job, row: int, step: Step) -> None:
        """Hands a job what a round brought it."""
        if job.ended:
            return
        tokens = step.tokens[row]
        plan = str(step.decision.plan)
        job.tokens += tokens
        job.rounds += 1
        job.plans[plan] = job.plans.get(plan, 0) + 1
        if tokens and not job.cancelled:
            scores = step.scores[row] if step.scores is not None and job.logprobs is not None else ()
            job.put(Piece(step.pieces[row], tuple(tokens), tuple(scores)))
        if step.finished[row]:
            reason = finish_reason(job.tokens, job.request, self.generator.stop_ids, step.stopped[row])
            job.end(Finished(reason, Usage(len(job.request.prompt), len(job.tokens), job.rounds, job.plans)))


@dataclass(frozen=True, slots=True)
class _Steered:
    """A guard under what the requests of one batch demand."""

    guard: Guard
    override: Override | None

    def choose(self, context: Context) -> Decision:
        return self.guard.choose(context, self.override)

    def observe(self, decision: Decision, outcome: RoundOutcome) -> None:
        self.guard.observe(decision, outcome)
