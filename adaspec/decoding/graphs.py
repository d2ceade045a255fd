"""Passes of fixed shape, captured once and replayed: a GPU then runs a pass without waiting for Python.

A graph belongs to a number of rows, of positions per row and of cache slots that it attends to. It reads its tokens and
slots from buffers of its own and never looks at a number on the host, so that one replay is right for all that fits:
fewer rows or positions write to the slot that belongs to nobody. Everything is captured before the first round; what
fits no graph is computed eagerly, with the reason.

``CudaCapture`` captures for real; **it has not been run on a device yet**. ``Rehearsal`` runs the same function on the
same buffers at every replay: the whole host side, on a CPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from adaspec.decoding.cache import KVCache
from adaspec.decoding.model import Model, fit, pick

KEY_BUCKETS = (512, 2048, 8192, 32768)  # cache slots that a graph attends to; the whole cache is always the last
ALIGNED = 64  # caches have a multiple of so many slots: kernels take masks whose rows are aligned
WARM_UPS = 2  # eager runs before a capture: kernels are chosen and workspaces allocated there

Outputs = tuple[Tensor, ...]


class Capture(Protocol):
    """Turns a function of fixed buffers into outputs that live on and a replay that fills them again."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]: ...

    def held_bytes(self) -> int:
        """What the device has reserved for this process so far."""


class Rehearsal:
    """The stand-in on a CPU: a replay calls the function again and copies what it returns into the first outputs."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        outputs = tuple(output.clone() for output in run())

        def replay() -> None:
            for kept, new in zip(outputs, run(), strict=True):
                kept.copy_(new)

        return outputs, replay

    def held_bytes(self) -> int:
        return 0


class CudaCapture:
    """CUDA graphs of one device, in one memory pool, captured on one side stream. Not yet run on a device."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()
        return outputs, graph.replay

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)


@cache
def cuda_capture(device: str) -> CudaCapture:
    """The capture that all models of a device share: their graphs never run at once, so that one pool serves them."""
    return CudaCapture(device)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Rows, positions per row, and cache slots attended to."""

    batch_size: int
    query_len: int
    slots: int

    def holds(self, batch_size: int, query_len: int, filled: int) -> bool:
        """Whether a pass fits in, if need be among rows and positions that belong to nobody."""
        return batch_size <= self.batch_size and query_len <= self.query_len and filled <= self.slots


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured pass with its buffers: ``tokens`` and ``slots`` [B, q] in, logits [B, q, V] and states out.

    What comes out is overwritten by the next replay, and is used up before it: laws and choices are new tensors.
    """

    shape: Shape
    tokens: Tensor
    slots: Tensor
    logits: Tensor
    states: dict[int, Tensor]
    replay: Callable[[], None]
    nowhere: int

    def load(self, tokens: Tensor, slots: Tensor) -> None:
        """Copies a pass of [B, q] or less into the buffers; what is left over writes nowhere."""
        batch_size, query_len = tokens.shape
        if (batch_size, query_len) != (self.shape.batch_size, self.shape.query_len):
            self.slots.fill_(self.nowhere)
        self.tokens[:batch_size, :query_len].copy_(tokens)
        self.slots[:batch_size, :query_len].copy_(slots)


@dataclass(slots=True)
class Report:
    """What was prepared: seconds and bytes that took, shapes that would not be captured and why, passes run eagerly."""

    seconds: float = 0.0
    bytes: int = 0
    shapes: list[Shape] = field(default_factory=list)
    failed: dict[Shape, str] = field(default_factory=dict)
    eager: Counter[str] = field(default_factory=Counter)
    replays: int = 0


class GraphModel(Model):
    """A ``Model`` whose decoding passes are replayed graphs, and eager where none fits.

    Args:
        name: the model's name in plans.
        module: the causal LM, in evaluation mode.
        capture: what makes graphs.
        vocab_size: as for ``Model``.

    Attributes:
        report: what was prepared and what was not, see ``Report``.
    """

    def __init__(self, name: str, module: Any, capture: Capture, vocab_size: int | None = None) -> None:
        super().__init__(name, module, vocab_size)
        self.runner = "graphs"
        self.report = Report()
        self._capture = capture
        self._graphs: list[Graph] = []  # smallest first
        self._static: KVCache | None = None
        self._positions = 0

    @torch.inference_mode()
    def prepare(self, query_lens: Collection[int], batch_sizes: Collection[int], capacity: int) -> None:
        """Captures every combination of rows, positions and key buckets, the largest first (one pool serves all).

        Its cache is allocated here, once; what was prepared before is given up.
        """
        self._graphs, self._positions, began = [], capacity, time.perf_counter()
        slots = -(-(capacity + 1) // ALIGNED) * ALIGNED
        self._static = self._store = KVCache(max(batch_sizes), slots - 1)
        self.report, before = Report(), self._capture.held_bytes()
        buckets = [*(bucket for bucket in KEY_BUCKETS if bucket < slots), slots]
        for shape in sorted((Shape(*each) for each in product(batch_sizes, query_lens, buckets)), reverse=True):
            try:
                self._graphs.insert(0, self._graph(shape, self._static))
            except RuntimeError as error:
                self.report.failed[shape] = str(error).splitlines()[0]
        self.report.shapes = [graph.shape for graph in self._graphs]
        self.report.seconds = time.perf_counter() - began
        self.report.bytes = self._capture.held_bytes() - before

    def _graph(self, shape: Shape, store: KVCache) -> Graph:
        size = (shape.batch_size, shape.query_len)
        tokens = torch.zeros(size, dtype=torch.long, device=self.device)
        slots = torch.full(size, store.capacity, device=self.device)
        layers = tuple(self._seen)

        def run() -> Outputs:
            store.aim(slots, shape.slots)
            positions = slots.clamp(max=self._positions - 1)
            logits = self.module(**self._inputs(tokens, positions, store)).logits.float()
            return fit(logits, self.vocab_size), *(self._seen[layer] for layer in layers)

        (logits, *states), replay = self._capture(run)
        return Graph(shape, tokens, slots, logits, dict(zip(layers, states)), replay, store.capacity)

    def start(self, batch_size: int, capacity: int) -> None:
        """Begins new sequences, in the prepared cache if they fit."""
        held = self._static
        if held is not None and batch_size <= held.batch_size and capacity <= self._positions:
            self._store = held
        super().start(batch_size, capacity)

    def _watch(self, layers: tuple[int, ...]) -> None:
        if not self._seen.keys() >= set(layers):
            self._graphs = []  # they lack these states
        super()._watch(layers)

    def _fitting(self, batch_size: int, query_len: int) -> Graph | None:
        """The smallest graph that a pass of the running batch fits in; without one ``report`` is told."""
        prepared = self._store is self._static
        for graph in self._graphs if prepared else ():
            if graph.shape.holds(batch_size, query_len, self._context + query_len):
                return graph
        reason = "no such shape was prepared" if prepared else "nothing was prepared for sequences that large"
        self.report.eager[f"{batch_size} x {query_len}: {reason}"] += 1
        return None

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        graph = self._fitting(*tokens.shape) if rows.shape[1] else None  # prompts are fed eagerly
        if graph is None:
            return super()._forward(tokens, slots, rows)
        batch_size, query_len = tokens.shape
        graph.load(tokens, slots)
        graph.replay()
        self.report.replays += 1
        for layer, states in graph.states.items():
            self._seen[layer] = states[:batch_size, :query_len]
        return pick(graph.logits[:batch_size, :query_len], rows)
