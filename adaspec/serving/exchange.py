"""The jobs of one HTTP request, seen from the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from adaspec.decoding.generate import Request
from adaspec.plan import Override
from adaspec.serving.engine import Closed, Engine, Event, Failed, Finished, Job, Piece, QueueFull
from adaspec.serving.errors import ApiError
from adaspec.telemetry import Telemetry


class Exchange:
    """Submits jobs and yields their events; whoever stops listening, or waits too long, cancels what is left.

    Args:
        engine: decodes.
        telemetry: is told how each job ended.
        requests: one per job.
        timeout: seconds until the jobs must have ended.

    Raises:
        ApiError: 429 when the queue is full, 503 when the server shuts down.
    """

    def __init__(
        self,
        engine: Engine,
        telemetry: Telemetry,
        requests: Sequence[Request],
        *,
        tag: str,
        override: Override | None,
        logprobs: int | None,
        timeout: float,
    ) -> None:
        self._engine, self._telemetry = engine, telemetry
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._began = time.monotonic()
        self._timeout = timeout
        self._first: dict[int, float] = {}  # job -> seconds to its first token
        self.jobs = [
            Job(request, self._putter(index), tag, override, logprobs) for index, request in enumerate(requests)
        ]
        self._left = set(range(len(self.jobs)))
        try:
            engine.submit(self.jobs)
        except QueueFull:
            self._close("refused")
            raise ApiError(429, "too many requests wait, try again later", code="queue_full", retry=1.0) from None
        except Closed:
            self._close("refused")
            raise ApiError(503, "the server is shutting down", code="shutting_down") from None

    def _putter(self, index: int) -> Callable[[Event], None]:
        def put(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return put

    async def events(self) -> AsyncGenerator[tuple[int, Piece | Finished], None]:
        """Yields (job, event) as they come, until every job has finished.

        Raises:
            ApiError: a job failed, or the time is up.
        """
        reason = "abort"
        try:
            while self._left:
                index, event = await self._next()
                if isinstance(event, Failed):
                    raise ApiError(event.status, event.message)
                if isinstance(event, Finished):
                    self._finish(index, event.reason)
                else:
                    self._first.setdefault(index, time.monotonic() - self._began)
                yield index, event
        except ApiError as error:
            reason = "timeout" if error.status == 504 else "error"
            raise
        finally:
            self._close(reason)

    async def _next(self) -> tuple[int, Event]:
        try:
            async with asyncio.timeout(max(self._began + self._timeout - time.monotonic(), 0.0)):
                return await self._events.get()
        except TimeoutError:
            message = f"not finished within {self._timeout:g} seconds; ask for fewer tokens or try again later"
            raise ApiError(504, message, code="timeout") from None

    def _finish(self, index: int, reason: str) -> None:
        self._left.discard(index)
        job, seconds = self.jobs[index], time.monotonic() - self._began
        prompt = len(job.request.prompt) if job.rounds else 0
        self._telemetry.request(reason, prompt, len(job.tokens), seconds, self._first.get(index))

    def _close(self, reason: str) -> None:
        """Cancels the jobs that have not finished."""
        for index in list(self._left):
            self._engine.cancel(self.jobs[index])
            self._finish(index, reason)
