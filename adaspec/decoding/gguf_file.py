"""A GGUF file as a value: its metadata, its tensors, and a tensor's rows as float32.

The header is read here rather than with ``gguf.GGUFReader``, which makes a NumPy view of every token of the
vocabulary (3 to 18 s for 49 000 to 152 000 tokens, against 0.3 s) and passes over some truncated files in silence.
The quantised blocks are left to ``gguf.quants``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
MAX_DIMS = 4
CHUNK = 1 << 20  # values dequantised at once: the working set stays near 20 MB whatever the tensor's size


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in the file; ``shape`` is in torch's order (rows first), ``start`` in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str  # the name of the GGML type: F32, F16, Q4_1, ...
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of one file.

    Raises:
        ValueError: the file is no GGUF, of another version or byte order, or ends too early.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        size = path.stat().st_size
        if not size:
            raise ValueError("is empty")
        with path.open("rb") as stream:
            header = _Header(stream, size)
            if header.take(4) != b"GGUF":
                raise ValueError("is no GGUF file")
            if (version := header.scalar("I")) not in VERSIONS:
                raise ValueError(f"is GGUF version {version}, only {VERSIONS} in little-endian order can be read")
            tensors, pairs = header.scalar("Q"), header.scalar("Q")
            metadata = {header.string(): header.value(header.scalar("I")) for _ in range(pairs)}
            infos = [header.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"is broken: alignment {alignment!r}")
        data = -(-header.position // alignment) * alignment
        return cls(path, metadata, {info[0]: _place(*info, data, size) for info in infos})

    def rows(self, tensor: Tensor, order: NDArray[np.intp] | None = None) -> Iterator[NDArray[np.float32]]:
        """Yields blocks of rows as float32 [rows, columns], in file order or in ``order``."""
        raw = np.memmap(self.path, np.uint8, "r", tensor.start, (tensor.rows, tensor.row_bytes))
        step = max(1, CHUNK // tensor.shape[-1])
        kind = GGMLQuantizationType[tensor.kind]
        for first in range(0, tensor.rows, step):
            chosen = slice(first, first + step) if order is None else order[first : first + step]
            yield np.asarray(dequantize(np.ascontiguousarray(raw[chosen]), kind), dtype=np.float32)


@dataclass(slots=True)
class _Header:
    """Reads the header's values one after the other, and never past the end of the file."""

    stream: BinaryIO
    size: int
    position: int = 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise ValueError(f"is truncated: {count} bytes wanted at {self.position}, the file ends at {self.size}")
        self.position += count
        return self.stream.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError:
            raise ValueError(f"is broken: a text before byte {self.position} is no UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        if kind not in SCALARS:
            raise ValueError(f"is broken: value type {kind} at byte {self.position}")
        return self.scalar(SCALARS[kind])

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == ARRAY:
            raise ValueError(f"is broken: an array of arrays at byte {self.position}")
        if kind in SCALARS:
            width = struct.calcsize("<" + SCALARS[kind])
            return [value for (value,) in struct.iter_unpack("<" + SCALARS[kind], self.take(width * count))]
        return [self.value(kind) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self.string(), self.scalar("I")
        if not 1 <= dims <= MAX_DIMS:
            raise ValueError(f"is broken: tensor {name!r} has {dims} dimensions")
        shape = tuple(reversed([self.scalar("Q") for _ in range(dims)]))
        return name, shape, self.scalar("I"), self.scalar("Q")


def _place(name: str, shape: tuple[int, ...], kind: int, offset: int, data: int, size: int) -> Tensor:
    """Checks that a tensor lies within the file, and says where."""
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"holds tensor {name!r} of the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[known]
    if prod(shape) < 1 or shape[-1] % block:
        raise ValueError(f"is broken: tensor {name!r} of type {known.name} has shape {list(shape)}")
    tensor = Tensor(name, shape, known.name, data + offset, shape[-1] // block * block_bytes)
    if (end := tensor.start + tensor.rows * tensor.row_bytes) > size:
        raise ValueError(f"is truncated: tensor {name!r} needs {end} bytes, the file has {size}")
    return tensor
