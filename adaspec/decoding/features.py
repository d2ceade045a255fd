"""What a model felt at the positions it was fed: its hidden states, kept beside its cache for a drafter to read."""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureBuffer:
    """Hidden states by row and position, [B, capacity + 1, width]; the last position takes what belongs nowhere.

    A position's features are valid as long as its keys and values are: rolling back moves nothing.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self._batch_size = batch_size
        self._capacity = capacity
        self._states: Tensor | None = None  # its width is known with the first pass

    @torch.inference_mode()
    def write(self, slots: Tensor, states: Tensor) -> None:
        """Stores ``states`` [B, q, width] of a pass at ``slots`` [B, q]."""
        if self._states is None:
            self._states = states.new_zeros(self._batch_size, self._capacity + 1, states.shape[2])
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self._states[rows, slots.clamp(max=self._capacity)] = states

    def read(self, first: Tensor, count: int) -> Tensor:
        """The states at positions first .. first + count - 1 of each row, [B, count, width]; ``first`` is [B]."""
        assert self._states is not None, "the model has fed nothing yet"
        slots = first[:, None] + torch.arange(count, device=first.device)
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        return self._states[rows, slots.clamp(0, self._capacity)]
