"""What a chain asks of a model: logits at positions of a growing, shrinking sequence. The cache rule lives here."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.clock import WallClock


class LanguageModel(ABC):
    """A causal model with a cache. One rule replaces the special cases: its cache length never exceeds the sequence,
    and it always feeds ``sequence[cache_length : stop]``.

    ``lengths`` [B] is the number of positions whose keys and values are valid. Subclasses implement ``_forward``.
    ``rollback_obstacle``: why the model cannot be rolled back, None where it can.
    """

    rollback_obstacle: str | None = None
    catch_up_chunk = 256  # positions in one pass while the model catches up

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.clock = WallClock()
        self.lengths = torch.zeros(0, dtype=torch.long)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @abstractmethod
    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """One pass over ``tokens`` [B, q] at positions ``slots`` [B, q]; returns the logits of the positions with
        index ``rows`` [B, n] within the pass, [B, n, V], or [B, 0, V] for n = 0.
        """

    def start(self, batch_size: int, capacity: int) -> None:
        """Begins new sequences of at most ``capacity`` tokens. Subclasses allocate their cache here."""
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=self.device)

    def rollback(self, lengths: Tensor) -> None:
        """Declares everything behind ``lengths`` [B] unseen; rows that are shorter stay as they are."""
        self.lengths = torch.minimum(self.lengths, lengths)

    def logits(self, sequence: TokenBuffer, first: Tensor, count: int, active: Tensor) -> Tensor:
        """Feeds what the cache lacks; returns the logits at positions first .. first + count - 1 of each row.

        Rows that are not ``active`` [B] keep their cache, and their logits mean nothing, as do those of positions
        behind the end of a row. A model that has been idle first catches up to ``first``, timed apart.

        Returns:
            [B, count, vocab_size] float32 logits of the next token after each position.
        """
        pending = torch.where(active, sequence.lengths - self.lengths, 0)
        if int(pending.max()) > count + 1:
            self.catch_up(sequence, torch.where(active, first, self.lengths))
            pending = torch.where(active, sequence.lengths - self.lengths, 0)
        rows = (first - self.lengths)[:, None] + torch.arange(count, device=first.device)  # [B, count]
        query_len = int(pending.max())
        return self._feed(sequence, query_len, rows.clamp(0, query_len - 1), pending)

    def catch_up(self, sequence: TokenBuffer, stop: Tensor) -> None:
        """Feeds the positions before ``stop`` [B] that the cache lacks, in chunks, timed as catch-up."""
        none = stop.new_zeros(stop.shape[0], 0)
        while True:
            pending = (stop - self.lengths).clamp(min=0, max=self.catch_up_chunk)
            query_len = int(pending.max())
            if query_len == 0:
                return
            self._feed(sequence, query_len, none, pending, catch_up=True)

    def _feed(
        self, sequence: TokenBuffer, query_len: int, rows: Tensor, pending: Tensor, *, catch_up: bool = False
    ) -> Tensor:
        slots = self.lengths[:, None] + torch.arange(query_len, device=rows.device)  # [B, q]
        tokens = sequence.slice(self.lengths, query_len)
        context = int(self.lengths.max())
        with self.clock.measure(self.name, query_len, sequence.batch_size, context, catch_up=catch_up):
            logits = self._forward(tokens, slots, rows)
        self.lengths = self.lengths + pending
        return logits
