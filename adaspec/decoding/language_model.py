"""What a chain asks of a model: logits at positions of a growing, shrinking sequence. The cache rule lives here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft, Verdict, one_by_one
from adaspec.decoding.cache import TokenBuffer, largest
from adaspec.decoding.clock import WallClock
from adaspec.decoding.features import FeatureBuffer


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
        self._features: dict[tuple[int, ...], FeatureBuffer] = {}
        self._capacity = 0
        self._context = 0  # tokens in the longest row as a pass begins

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @abstractmethod
    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """One pass over ``tokens`` [B, q] at positions ``slots`` [B, q]; returns the logits of the positions with
        index ``rows`` [B, n] within the pass, [B, n, V], or [B, 0, V] for n = 0. ``_context`` is the largest of the
        first slots, known without asking the device.
        """

    def start(self, batch_size: int, capacity: int) -> None:
        """Begins new sequences of at most ``capacity`` tokens. Subclasses allocate their cache here."""
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=self.device)
        self._capacity = capacity
        self._features = {layers: FeatureBuffer(batch_size, capacity) for layers in self._features}

    def tap(self, layers: tuple[int, ...]) -> None:
        """From now on keeps the features of these layers at every position it is fed; once is enough.

        Positions fed before have none and are fed again. Layer k is the state that enters decoder layer k, counted
        from 0; the number of layers stands for the last state, which the head reads.

        Raises:
            ValueError: the model has no such layers.
        """
        if layers not in self._features:
            self._watch(layers)
            self._features[layers] = FeatureBuffer(self.lengths.shape[0], self._capacity)
            self.rollback(torch.zeros_like(self.lengths))

    def features(self, layers: tuple[int, ...], first: Tensor, count: int) -> Tensor:
        """The tapped states at positions first .. first + count - 1 of each row, layer by layer, [B, count, width]."""
        return self._features[layers].read(first, count)

    def _watch(self, layers: tuple[int, ...]) -> None:
        """Makes ``_states`` give these layers. Subclasses that have features override both."""
        raise ValueError(f"{self.name} shows no hidden states to draft from")

    def _states(self, layers: tuple[int, ...]) -> Tensor:
        """The states of the last pass, [B, q, width]."""
        raise NotImplementedError

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
        query_len = self._read(pending)
        if query_len > count + 1:
            self.catch_up(sequence, torch.where(active, first, self.lengths))
            pending = torch.where(active, sequence.lengths - self.lengths, 0)
            query_len = self._read(pending)
        if not query_len:  # no row takes part
            return torch.zeros(len(pending), count, self.vocab_size, device=pending.device)
        rows = (first - self.lengths)[:, None]  # [B, count]
        if count > 1:
            rows = rows + torch.arange(count, device=first.device)
        return self._feed(sequence, query_len, rows.clamp_(0, query_len - 1), pending)

    def draft(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        """Drafts behind the sequences, token by token; see ``Drafter.propose``."""

        def step(first: Tensor, active: Tensor) -> Tensor:
            return self.logits(batch.sequence, first, 1, active)

        return one_by_one(batch, limits, stop, limits > 0, step)

    def verify(self, batch: Batch, draft: Draft, start: Tensor, limits: Tensor) -> Verdict:
        """Verifies what was drafted behind ``start`` [B] in one pass, and replaces it by what is emitted.

        That is at most one token more than was drafted, and none where ``limits`` [B] is 0. A block is cut at its
        first stop token: nothing leaks behind it. What the cache holds of rejected tokens is forgotten.
        """
        sequence, first, active = batch.sequence, start - 1, limits > 0
        logits = self.logits(sequence, first, draft.tokens.shape[1] + 1, active)
        result, law = batch.sampler.verify(draft.tokens, draft.counts, draft.law, logits, sequence, first, active)
        padded = torch.cat((draft.tokens, result.following[:, None]), 1)
        tokens = padded.scatter(1, result.accepted[:, None], result.following[:, None])
        counts = torch.where(active, batch.cut(tokens, result.accepted + 1), 0)
        sequence.truncate(start)
        sequence.append(tokens, counts)
        kept = torch.where(active, start + counts - 1, sequence.capacity)
        self.rollback(kept)
        return Verdict(tokens, counts, result.accepted, kept, law, lambda: logits)

    def catch_up(self, sequence: TokenBuffer, stop: Tensor) -> None:
        """Feeds the positions before ``stop`` [B] that the cache lacks, in chunks, timed as catch-up."""
        none = stop.new_zeros(stop.shape[0], 0)
        while True:
            pending = (stop - self.lengths).clamp(min=0, max=self.catch_up_chunk)
            query_len = self._read(pending)
            if query_len == 0:
                return
            self._feed(sequence, query_len, none, pending, catch_up=True)

    def _read(self, pending: Tensor) -> int:
        """The most tokens that a row lacks; and ``_context``, the most that one holds."""
        self._context = largest(self.lengths)
        return largest(pending)

    def _feed(
        self, sequence: TokenBuffer, query_len: int, rows: Tensor, pending: Tensor, *, catch_up: bool = False
    ) -> Tensor:
        slots = self.lengths[:, None]  # [B, q]
        if query_len > 1:
            slots = slots + torch.arange(query_len, device=rows.device)
        tokens = sequence.tokens.gather(1, slots.clamp(max=sequence.capacity))
        with self.clock.measure(self.name, query_len, sequence.batch_size, self._context, catch_up=catch_up):
            logits = self._forward(tokens, slots, rows)
            for layers, buffer in self._features.items():
                buffer.write(slots, self._states(layers))
        self.lengths = self.lengths + pending
        return logits

    def prepare(  # noqa: B027 - nothing to do where any shape can be run at once
        self, query_lens: Collection[int], batch_sizes: Collection[int], capacity: int
    ) -> None:
        """Makes passes of these shapes ready, so that none is made ready later. Most models need nothing.

        Args:
            query_lens: positions per row; a pass of fewer may be run as one of more.
            batch_sizes: rows; likewise.
            capacity: of the longest sequence to come.
        """
