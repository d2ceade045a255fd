"""Decoder layers with their key/value cache: passes of ``forward.c``, whatever enters and leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from adaspec.decoding.native.library import Decoder, Layer, Linear, Pass, library
from adaspec.decoding.native.weights import LANES, Weights


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder layer. ``epsilon``: of the norms; ``scale``: of the products of queries and keys."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    epsilon: float
    scale: float

    @property
    def obstacle(self) -> str | None:
        """Why ``forward.c`` cannot compute layers of these sizes, or None."""
        widths = {"head": self.head_dim, "state": self.hidden, "MLP": self.inner}
        odd = (f"{part}s are {size} wide" for part, size in widths.items() if size % LANES)
        told = next(odd, None)
        return None if told is None else f"its {told}, which is no multiple of {LANES}"


class NativeStack:
    """Layers, what joins their inputs and what reads their outputs, and a cache; computes passes on the CPU.

    Attributes:
        embedding: of the tokens that are drafted, contiguous float32 [V, hidden]; set by subclasses.

    Args:
        weights: keeps what the structures point to.
        layers: at least one.
        sizes: of every layer.
        norm: address of the last norm.
        head: from the last state to logits.
        rotary: (states, positions [1, R]) -> cosines and sines [1, R, head_dim], of each position alone.
        join: from what is joined to what enters the first layer; None: that is given.
    """

    embedding: Tensor

    def __init__(
        self,
        weights: Weights,
        layers: Sequence[Layer],
        sizes: Sizes,
        norm: int,
        head: Linear,
        rotary: Any,
        join: Linear | None = None,
    ) -> None:
        self.library = library()
        self._weights, self._rotary = weights, rotary
        self._layers = (Layer * len(layers))(*layers)
        self.structure = Decoder(
            self._layers,
            norm,
            join or Linear(),
            head,
            len(layers),
            sizes.hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.inner,
            0,
            None,
            None,
            sizes.epsilon,
            sizes.scale,
        )
        self._cache = torch.zeros(0, 0, 0, 0, 0, 0)
        self._angles = (torch.zeros(0), torch.zeros(0))  # cosines and sines by position, [slots, head_dim]
        self._scratch, self._fitted = torch.zeros(0), (0, 0, 0)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def hidden(self) -> int:
        """Width of a state."""
        return int(self.structure.hidden)

    @property
    def outputs(self) -> int:
        """Number of logits."""
        return int(self.structure.head.outputs)

    @property
    def weight_bytes(self) -> int:
        """What a pass reads of weights."""
        return self._weights.bytes

    def start(self, batch_size: int, capacity: int) -> None:
        """Makes room for ``batch_size`` sequences of ``capacity`` tokens; what fits is kept."""
        decoder, slots = self.structure, -(-(capacity + 1) // LANES) * LANES
        if len(self._angles[0]) < slots:
            cosines, sines = self._rotary(self._scratch, torch.arange(slots)[None])
            self._angles = cosines[0].float().contiguous(), sines[0].float().contiguous()
            decoder.cosines, decoder.sines = (each.data_ptr() for each in self._angles)
        if self._cache.shape[2] != batch_size or self._cache.shape[4] < slots:
            self._cache = torch.zeros(self.depth, 2, batch_size, decoder.kv_heads, slots, decoder.head_dim)
            decoder.slots = slots
            for layer, (keys, values) in zip(self._layers, self._cache):
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def share(self, other: NativeStack) -> None:
        """Uses the cache of ``other``, which has layers of the same sizes, as it is now."""
        self._cache = other._cache
        self.structure.slots = other.structure.slots
        for layer, theirs in zip(self._layers, other._layers, strict=True):
            layer.keys, layer.values = theirs.keys, theirs.values

    def run(
        self,
        x: Tensor,
        sequence: Tensor,
        position: Tensor,
        wanted: Tensor,
        taps: Sequence[int],
        joined: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass over R rows.

        Args:
            x: what enters the first layer, contiguous float32 [R, hidden]; overwritten.
            sequence: [R], which of the batch's sequences a row belongs to.
            position: [R], the slot a row writes; it attends to those up to it, so rows of a sequence come in order.
            wanted: [n], the rows whose logits are asked for.
            taps: layers whose states are asked for: k for the state that enters layer k, ``depth`` for the last one.
            joined: rows [R, inputs of the join] to compute ``x`` from, contiguous float32.

        Returns:
            float32 logits [n, outputs], and the states [R, hidden] by layer.
        """
        if len(wanted) > len(x):  # rows may be asked for twice, and each is gathered in x
            x = functional.pad(x, (0, 0, 0, len(wanted) - len(x)))
        logits = x.new_empty(len(wanted), self.outputs)
        states = {layer: x[: len(sequence)].clone() for layer in taps}
        behind = [states[layer].data_ptr() if layer in states else None for layer in range(1, self.depth + 1)]
        pointers = (c_void_p * self.depth)(*behind)
        threads, rows = torch.get_num_threads(), len(sequence)
        arrays = (sequence.contiguous(), position.contiguous(), wanted.contiguous())
        joins = None if joined is None else joined.data_ptr()
        addresses = (*(array.data_ptr() for array in arrays), joins, x.data_ptr(), logits.data_ptr())
        taken = Pass(
            rows, len(wanted), *addresses, addressof(pointers), self.scratch_for(rows, threads), threads=threads
        )
        self.library.forward(byref(self.structure), byref(taken))
        return logits, states

    def scratch_for(self, rows: int, threads: int) -> int:
        """The address of what a pass needs besides."""
        needs = (rows, threads, self.structure.slots)
        if needs != self._fitted:
            size = self.library.scratch_size(byref(self.structure), rows, threads)
            if self._scratch.numel() < size:
                self._scratch = torch.zeros(size)
            self._fitted = needs
        return self._scratch.data_ptr()
