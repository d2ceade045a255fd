"""Seconds of passes. The clock of a chain is shared by its models; a round drains it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from adaspec.outcome import Pass


class WallClock:
    """Wall-clock seconds, right wherever a pass returns only when it is done (a CPU)."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.catch_up_seconds = 0.0

    @staticmethod
    def now() -> float:
        """Seconds since an arbitrary start."""
        return time.perf_counter()

    def mark(self) -> Any:
        """This moment, for ``span``."""
        return self.now()

    def span(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""
        return float(end - start)

    @contextmanager
    def measure(
        self, model: str, query_len: int, batch_size: int, seq_len: int, *, catch_up: bool = False
    ) -> Iterator[None]:
        """Records the enclosed pass; a catch-up pass only adds to ``catch_up_seconds``."""
        start = self.now()
        yield
        seconds = self.now() - start
        if catch_up:
            self.catch_up_seconds += seconds
        else:
            self.add(Pass(model, query_len, batch_size, seq_len, seconds))

    def add(self, timed: Pass) -> None:
        """Records a pass that something else has timed."""
        self.passes.append(timed)

    def drain(self) -> tuple[tuple[Pass, ...], float]:
        """The passes and catch-up seconds since the last call."""
        passes, seconds = tuple(self.passes), self.catch_up_seconds
        self.passes, self.catch_up_seconds = [], 0.0
        return passes, seconds


class CudaClock(WallClock):
    """CUDA events around each pass, recorded without waiting and read when a round is drained.

    A round ends with a read of its tokens, so its events are done by then and nothing waits for the clock. ``now`` is
    the host's: right where the host has just read what the device computed, as it has at both ends of a round.
    Catch-up is kept apart. Not yet run on a device.

    Args:
        event: makes an event with ``record``, ``synchronize`` and ``elapsed_time`` in milliseconds; a CUDA event.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._pending: list[tuple[Pass | None, Any, Any]] = []  # None: a catch-up pass

    def mark(self) -> Any:
        """A moment on the device, for ``span``."""
        event = self._event()
        event.record()
        return event

    def span(self, start: Any, end: Any) -> float:
        """Seconds between two marks; waits until the device has come to the second."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    @contextmanager
    def measure(
        self, model: str, query_len: int, batch_size: int, seq_len: int, *, catch_up: bool = False
    ) -> Iterator[None]:
        """Records events around the enclosed pass; see ``WallClock.measure``."""
        start = self.mark()
        yield
        known = None if catch_up else Pass(model, query_len, batch_size, seq_len, 0.0)
        self._pending.append((known, start, self.mark()))

    def drain(self) -> tuple[tuple[Pass, ...], float]:
        """The passes and catch-up seconds since the last call, once the device is through with them."""
        pending, self._pending = self._pending, []
        for known, start, end in pending:
            seconds = self.span(start, end)
            if known is None:
                self.catch_up_seconds += seconds
            else:
                self.passes.append(replace(known, seconds=seconds))
        return super().drain()
