"""Times single passes on a made-up text, so that the cost model starts with measured seconds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.clock import WallClock
from adaspec.decoding.feature import FeatureReader
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.sampling import GREEDY, Sampler
from adaspec.outcome import Pass

CONTEXT = 32  # tokens in the cache while passes are timed


@dataclass(frozen=True, slots=True)
class Profiler:
    """Times passes over ``batch_size`` rows by the clock of the models; the median of ``repeats``.

    ``capacity``: tokens that the caches hold at most. Every call starts the models' caches anew.
    """

    clock: WallClock
    capacity: int
    batch_size: int = 1
    repeats: int = 3

    def forward(self, model: LanguageModel, query_len: int) -> Pass:
        """A pass of ``model`` over ``query_len`` tokens behind a short context."""
        buffer, start = self._made_up(model, query_len)
        buffer.lengths = start + query_len
        active = torch.ones(self.batch_size, dtype=torch.bool, device=model.device)
        model.start(self.batch_size, buffer.capacity)
        model.catch_up(buffer, start)
        for _ in range(self.repeats):
            model.rollback(start)
            model.logits(buffer, start, query_len, active)
        seconds = statistics.median(each.seconds for each in self.clock.drain()[0])
        return Pass(model.name, query_len, self.batch_size, int(start[0]), seconds)

    def step(self, drafter: FeatureReader, verifier: LanguageModel) -> Pass:
        """The step of a drafter from its own states; each draft has one that catches up before it."""
        buffer, start = self._made_up(verifier, 2)
        ends = torch.full((self.batch_size, 0), -1, device=verifier.device)
        batch = Batch(buffer, Sampler([GREEDY] * self.batch_size, verifier.device), ends, start)
        for member in (verifier, drafter):
            member.start(self.batch_size, buffer.capacity)
        for _ in range(self.repeats + 1):
            buffer.truncate(start)
            drafter.rollback(start - 1)
            drafter.propose(batch, torch.full_like(start, 2))
        passes = [each for each in self.clock.drain()[0] if each.model == drafter.name]
        seconds = statistics.median(each.seconds for each in passes[3::2])  # behind the first draft, which warms up
        return Pass(drafter.name, 1, self.batch_size, int(start[0]), seconds)

    def _made_up(self, model: LanguageModel, more: int) -> tuple[TokenBuffer, Tensor]:
        """A text for ``more`` tokens behind some context, and the context's length [B]."""
        context = max(1, min(CONTEXT, self.capacity - more))
        buffer = TokenBuffer(self.batch_size, context + more, model.device)
        buffer.tokens[:] = torch.arange(buffer.tokens.shape[1]) % model.vocab_size
        return buffer, torch.full((self.batch_size,), context, device=model.device)
