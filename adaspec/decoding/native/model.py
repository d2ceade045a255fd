"""A ``Model`` whose passes are computed by ``forward.c``: the fast path of Llama-like models on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.confidence import largest_entropy
from adaspec.decoding.model import Model, fit
from adaspec.decoding.native.decoder import NativeDecoder, obstacle
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

    @torch.inference_mode()
    def draft(self, sequence: TokenBuffer, limits: Tensor, ends: Tensor, stop: float) -> tuple[Tensor, Tensor] | None:
        """Drafts in C, but for the first token; token by token where features are kept of every position."""
        if self._features or self._embeddings < min(self.vocab_size, self.decoder.outputs):
            return None
        last, active = sequence.lengths - 1, limits > 0
        logits = self.logits(sequence, last, 1, active)[:, 0, : self.decoder.outputs]
        tokens, counts, seconds = self.decoder.draft(logits, last, limits, ends, largest_entropy(stop))
        for step, each in enumerate(seconds, 1):
            self.clock.add(Pass(self.name, 1, len(limits), self._context + step, each))
        sequence.append(tokens, counts)
        self.lengths = torch.where(active, sequence.lengths - 1, self.lengths)  # the last one is not fed
        return tokens, counts

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
        return torch.maximum(self._fed, self.target.lengths)

    @lengths.setter
    def lengths(self, lengths: Tensor) -> None:
        self._fed = lengths

    def start(self, batch_size: int, capacity: int) -> None:
        """Begins new sequences, of the target too: they share what is kept of them."""
        self.target.start(batch_size, capacity)
        super().start(batch_size, capacity)
        self.decoder.share(self.target.decoder)

    def _watch(self, layers: tuple[int, ...]) -> None:
        raise ValueError(f"{self.name} reads the cache of {self.target.name}, so it has no hidden states of its own")
