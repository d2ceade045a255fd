"""Seconds of passes. The clock of a chain is shared by its models; a round drains it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    """Waits for the device around each pass. Not yet run on a device; event timing is a later step."""

    @staticmethod
    def now() -> float:
        """Seconds since an arbitrary start, read once the device is idle."""
        import torch  # noqa: PLC0415 - only needed with a device

        torch.cuda.synchronize()
        return time.perf_counter()
