"""A ``Model`` whose passes are computed by ``forward.c``: the fast path of Llama-like models on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft, Verdict
from adaspec.decoding.cache import largest, numbers
from adaspec.decoding.confidence import largest_entropy
from adaspec.decoding.model import Model, fit
from adaspec.decoding.native.decoder import NativeDecoder, obstacle
from adaspec.decoding.native.greedy import Asked, Greedy
from adaspec.outcome import Pass


class NativeModel(Model):
    """A Llama-like model on the CPU, exact by row: a row has the same bits whatever pass, batch or thread computes it.

    Args:
        name: the model's name in plans.
        module: the causal LM with its stock layers; their weights are taken over and released.
        precision: of the linear weights, "float32", "fp16", "int8" (per output channel) or "int4" (see ``int4.h``).
        vocab_size: as for ``Model``.

    Raises:
        ValueError: the model cannot be computed here; the reason is named.
        CompileError: no C compiler.
    """

    def __init__(self, name: str, module: Any, precision: str, vocab_size: int | None = None) -> None:
        super().__init__(name, module, vocab_size)
        if reason := obstacle(module, precision):
            raise ValueError(f"{name}: {reason}")
        self.runner = "native"
        self.decoder = NativeDecoder(module, precision)
        self._greedy = Greedy(self.decoder, min(self.vocab_size, self.decoder.outputs))

    def start(self, batch_size: int, capacity: int) -> None:
        super().start(batch_size, capacity)
        self.decoder.start(batch_size, capacity)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        batch, count = tokens.shape
        sequence = torch.arange(batch)[:, None]
        wanted = sequence * count + rows if batch > 1 else rows  # [B, n]
        logits, states = self.decoder.forward(
            tokens.clamp(max=self._embeddings - 1).reshape(-1),
            sequence.expand(-1, count).reshape(-1),
            slots.clamp(max=self._capacity).reshape(-1),
            wanted.reshape(-1),
            tuple(self._seen),
        )
        for layer, state in states.items():
            self._seen[layer] = state.view(batch, count, -1)
        return fit(logits.view(*rows.shape, logits.shape[-1]), self.vocab_size)

    def draft(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        """Drafts in C where nothing is sampled or penalised and no features are kept of every position."""
        width = largest(limits)
        if not width or self._features or not batch.sampler.takes_largest:
            return super().draft(batch, limits, stop)
        asked = Asked(batch.sequence, batch.sequence.lengths, limits, batch.stop_ids)
        fed, rows, query_len = self._pending(asked, 1)
        found = self._greedy.draft(asked, fed, rows, width, largest_entropy(stop))
        for step, seconds in enumerate(found.seconds):
            self.clock.add(Pass(self.name, 1 if step else query_len, len(limits), self._context + step, seconds))
        batch.sequence.lengths, self.lengths = found.lengths, found.kept
        return Draft(found.tokens, found.counts, None)

    def verify(self, batch: Batch, draft: Draft, start: Tensor, limits: Tensor) -> Verdict:
        """Verifies in C where ``draft`` would draft in C."""
        if self._features or not batch.sampler.takes_largest:
            return super().verify(batch, draft, start, limits)
        asked, width = Asked(batch.sequence, start, limits, batch.stop_ids), draft.tokens.shape[1] + 1
        fed, rows, query_len = self._pending(asked, width)
        found = self._greedy.verify(asked, fed, rows, width)
        if rows:
            self.clock.add(Pass(self.name, query_len, len(limits), self._context, found.seconds))
        batch.sequence.lengths, self.lengths = found.lengths, found.fed

        def logits() -> Tensor:
            places = torch.where(limits > 0, draft.counts + 1, 0).cumsum(0) - 1 - draft.counts  # [B] of the first one
            steps = torch.arange(width).clamp(max=draft.counts[:, None])
            return fit(found.logits[(places[:, None] + steps).clamp(min=0)], self.vocab_size)

        return Verdict(found.tokens, found.counts, found.accepted, found.kept, None, logits)

    def _pending(self, asked: Asked, count: int) -> tuple[Tensor, int, int]:
        """Tokens in the cache [B]; and what a pass with ``count`` logits per row has to feed: in all, in one row.

        A model that has been idle catches up first, timed apart.
        """
        while True:
            fed = self.lengths
            columns = numbers(asked.sequence.lengths, fed, asked.limits)
            pending = [length - known for length, known, limit in zip(*columns) if limit > 0]
            most, self._context = max(pending, default=0), max(columns[1])
            if most <= count + 1:
                return fed, sum(pending), most
            self.catch_up(asked.sequence, torch.where(asked.limits > 0, asked.start - 1, self.lengths))

    def rollback(self, lengths: Tensor) -> None:
        self.lengths = _every(min, self.lengths, lengths)

    def _watch(self, layers: tuple[int, ...]) -> None:
        self._check_layers(layers)
        for layer in layers:
            self._seen.setdefault(layer, torch.empty(0))


class NativeCopy(NativeModel):
    """The target's own weights in another precision, over the target's own cache: it never has to catch up.

    It writes only behind what the target has fed, where the target writes again when it verifies; so the target reads
    nothing that it did not write itself, and stays exact. The copy's law rests on the target's keys and values, hence
    on the past alone.

    Args:
        name, module, precision, vocab_size: as for ``NativeModel``.
        target: a model of the same shape.
    """

    def __init__(self, name: str, module: Any, precision: str, target: NativeModel, vocab_size: int | None) -> None:
        self.target = target
        super().__init__(name, module, precision, vocab_size)
        self.runner = f"native, over the cache of {target.name}"

    @property
    def lengths(self) -> Tensor:
        """Positions [B] whose keys and values are valid, the target's included."""
        return _every(max, self._fed, self.target.lengths)

    @lengths.setter
    def lengths(self, lengths: Tensor) -> None:
        self._fed = lengths

    def rollback(self, lengths: Tensor) -> None:
        self._fed = _every(min, self._fed, lengths)

    def start(self, batch_size: int, capacity: int) -> None:
        """Begins new sequences, of the target too: they share what is kept of them."""
        self.target.start(batch_size, capacity)
        super().start(batch_size, capacity)
        self.decoder.share(self.target.decoder)

    def _watch(self, layers: tuple[int, ...]) -> None:
        raise ValueError(f"{self.name} reads the cache of {self.target.name}, so it has no hidden states of its own")


def _every(choose: Callable[[int, int], int], one: Tensor, other: Tensor) -> Tensor:
    """The smaller or larger of each two numbers of [B] and [B]; one of the tensors itself where it has them all."""
    first, second = numbers(one, other)
    found = list(map(choose, first, second))
    return one if found == first else other if found == second else torch.tensor(found)
