"""Weights as ``forward.c`` reads them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaspec.decoding.native.library import FLOAT16, FLOAT32, INT4, INT8, Layer, Linear, library

KINDS = {"float32": FLOAT32, "fp16": FLOAT16, "int8": INT8, "int4": INT4}
LANES = 8  # what widths are multiples of
GROUP, OUTPUTS, BLOCK_BYTES = 32, 8, 160  # of a block of int4: inputs that share a scale, outputs, size
_CHUNK, _LINE = 1 << 26, 64  # bytes
_DTYPES = {FLOAT32: torch.float32, FLOAT16: torch.float16, INT8: torch.int8}


class Weights:
    """Makes the structures of a model's weights and keeps alive what they point to.

    Args:
        precision: of the linear weights, one of ``KINDS``.
    """

    def __init__(self, precision: str) -> None:
        self._kind = KINDS[precision]
        self._held: list[Tensor] = []
        self._arena = Arena()

    @property
    def bytes(self) -> int:
        """What a pass reads."""
        return sum(held.numel() * held.element_size() for held in self._held)

    def floats(self, values: Tensor) -> int:
        """The address of some numbers in float32."""
        return self._address(values.detach().float())

    def stacked(self, *layers: nn.Linear) -> Linear:
        """The outputs of several layers on one input."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        return self.linear(
            torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None
        )

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, kind: int | None = None) -> Linear:
        """A weight [outputs, inputs] and a bias [outputs]; ``kind``: another one than the precision's."""
        kind = self._kind if kind is None else kind
        (outputs, inputs), scale = weight.shape, None
        offset = None if bias is None else self.floats(bias)
        if kind == INT4:
            return Linear(self._address(_blocks(weight)), None, offset, outputs, inputs, INT4)
        if kind == INT8:
            steps = (weight.float().abs().amax(1) / 127).clamp_min(1e-30)
            weight, scale = (weight.float() / steps[:, None]).round(), self.floats(steps)
        width = library().panel_width()
        panels = F.pad(weight, (0, 0, 0, -outputs % width)).to(_DTYPES[kind]).view(-1, width, inputs).transpose(1, 2)
        return Linear(self._address(panels), scale, offset, outputs, inputs, kind)

    def layer(self, projections: Sequence[nn.Linear], norms: Sequence[nn.Module | None]) -> Layer:
        """A decoder layer of projections q, k, v, o, gate, up, down and the norms before attention, before the MLP, of
        queries and of keys.
        """
        query, key, value, out, gate, up, down = projections
        linear = self.stacked(query, key, value), *(self.stacked(each) for each in (out, gate, up, down))
        return Layer(*linear, *(None if norm is None else self.norm(norm) for norm in norms))

    def norm(self, norm: nn.Module) -> int:
        """The address of a norm's weight."""
        weight = norm.weight
        assert isinstance(weight, Tensor)
        return self.floats(weight)

    def _address(self, values: Tensor) -> int:
        size = values.numel() * values.element_size()
        held = self._arena.take(size).view(values.dtype).view(values.shape)
        held.copy_(values)
        self._held.append(held)
        return held.data_ptr()


class Arena:
    """Memory in huge pages where the system gives them: a pass streams all weights, and walks fewer page tables so."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, size: int) -> Tensor:
        """So many bytes, uint8, aligned to a cache line and behind those taken before."""
        if self._used + size > len(self._chunk):
            room = mmap.mmap(-1, max(_CHUNK, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                room.madvise(mmap.MADV_HUGEPAGE)
            self._chunk, self._used = torch.frombuffer(room, dtype=torch.uint8), 0
        taken = self._chunk[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        return taken


def _blocks(weight: Tensor) -> Tensor:
    """A weight [outputs, inputs] as ``struct block`` of ``int4.h``, [outputs / 8, inputs / 32, bytes]."""
    given = weight.float().contiguous()
    outputs, inputs = given.shape
    blocks = torch.empty(-(-outputs // OUTPUTS), -(-inputs // GROUP), BLOCK_BYTES, dtype=torch.uint8)
    library().int4_pack(given.data_ptr(), outputs, inputs, blocks.data_ptr())
    return blocks
