"""Token and key/value storage of fixed size. Rolling back is declaring an earlier length: nothing moves."""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 64  # rows up to which a list is made faster than a maximum


def largest(values: Tensor) -> int:
    """The largest of ``values`` [B]; waits for the device that holds them."""
    return int(max(values.tolist()) if len(values) <= FEW else values.max())


def numbers(*columns: Tensor) -> list[list[int]]:
    """Several [B] as lists: in one read where a device holds them, one by one, which is quicker, where none does."""
    if columns[0].device.type == "cpu":
        return [column.tolist() for column in columns]
    return torch.stack(columns).tolist()


class TokenBuffer:
    """The sequences of a batch: committed tokens, and behind them the drafted ones of the running round.

    ``tokens`` is [B, capacity + 1] int64 (the last column takes writes that belong nowhere), ``lengths`` is [B].
    """

    def __init__(self, batch_size: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.tokens = torch.zeros(batch_size, capacity + 1, dtype=torch.long, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Appends the first ``counts[b]`` of ``tokens[b]`` to row b; tokens [B, m], counts [B]."""
        if tokens.shape[1] == 1:
            slots = torch.where(counts > 0, self.lengths, self.capacity)[:, None]
        else:
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            slots = torch.where(steps < counts[:, None], self.lengths[:, None] + steps, self.capacity)  # [B, m]
        self.tokens.scatter_(1, slots, tokens)
        self.lengths = self.lengths + counts

    def append_all(self, tokens: Tensor, at: int) -> None:
        """Appends ``tokens`` [B, m] to rows that all hold ``at`` tokens: a copy, where ``append`` scatters."""
        self.tokens.narrow(1, at, tokens.shape[1]).copy_(tokens)
        self.lengths = self.lengths + tokens.shape[1]

    def truncate(self, lengths: Tensor) -> None:
        """Forgets everything behind ``lengths`` [B]."""
        self.lengths = lengths

    def slice(self, first: Tensor, count: int) -> Tensor:
        """Tokens at positions first .. first + count - 1 of each row, [B, count]; past the end anything."""
        slots = first[:, None] + torch.arange(count, device=first.device)
        return self.tokens.gather(1, slots.clamp(0, self.capacity))

    def read(self, row: int, first: int, stop: int) -> list[int]:
        """The tokens of one row at positions first .. stop - 1."""
        tokens: list[int] = self.tokens[row, first:stop].tolist()
        return tokens

    def row(self, index: int, start: int = 0) -> list[int]:
        """The tokens of one row from ``start`` on."""
        return self.read(index, start, int(self.lengths[index]))


class KVCache:
    """Keys and values of every layer, [batch_size, heads, capacity + 1, head_dim], written at given slots.

    ``begin`` or ``aim`` name the slots of the coming pass, of as many rows or fewer; ``write`` stores one layer's keys
    and values there and returns the filled part, a view over slots 0 .. ``filled`` - 1. Slots behind a row's own length
    hold stale numbers: they are masked by the caller and overwritten later. The last slot takes writes that belong
    nowhere.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.batch_size = batch_size
        self.capacity = capacity
        self.filled = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: Tensor | None = None  # [B, 1]; None: every row writes the same slots
        self._slots: Tensor | slice = slice(0, 0)

    def begin(self, slots: Tensor, filled: int) -> None:
        """Sets the slots [B, q] of the coming pass (consecutive per row, past ``capacity`` = nowhere).

        Looks for the quicker write of rows that are equally long; not on a GPU, which it would have to wait for.
        """
        first = slots[:, 0]
        if slots.is_cuda or int(slots.max()) > self.capacity or not bool((first == first[0]).all()):
            self.aim(slots, filled)
        else:
            self.filled = filled
            self._rows, self._slots = None, slice(int(first[0]), int(first[0]) + slots.shape[1])

    def aim(self, slots: Tensor, filled: int) -> None:
        """As ``begin``, without a look at the numbers: fit for a graph that is replayed with others."""
        self.filled = filled
        self._rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self._slots = slots.clamp(max=self.capacity)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, heads, q, head_dim] of a layer; returns views [B, heads, filled, head_dim]."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(keys), self._empty(values))
        stored = [each[: keys.shape[0]] for each in self._layers[layer]]
        for store, new in zip(stored, (keys, values)):
            if self._rows is None:
                store[:, :, self._slots] = new
            else:
                store[self._rows, :, self._slots] = new.transpose(1, 2)
        return stored[0][:, :, : self.filled], stored[1][:, :, : self.filled]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.batch_size, like.shape[1], self.capacity + 1, like.shape[3])
