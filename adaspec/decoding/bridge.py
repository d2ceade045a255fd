"""Drafting by a model of another tokenizer: its text is tokenised again, as universal assisted generation does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.clock import WallClock
from adaspec.decoding.confidence import sure_enough
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.language_model import LanguageModel

SEAM = 4  # the target's last tokens, tokenised again with what follows them, as a word may go on


class BridgeDrafter(Drafter):
    """A model with its own tokenizer and sequence: decodes greedily, and offers its text in the target's tokens.

    Before a proposal the row's text is tokenised for the model; where that differs from what it has seen it is rolled
    back. What it writes is tokenised for the target together with the last few tokens before; a proposal that would
    have to change those is dropped.

    Lossless at any temperature: its own choice is greedy, so a proposal, its length included, is a function of the
    text so far and goes out as a one-hot law, not as a sample. Exact, but at a high temperature a greedy guess is
    accepted less often than a sampled draft would be.

    Args:
        model: over its own vocabulary.
        tokenizer: the model's.
        target_tokenizer: the target's.
        capacity: tokens of its own that the model can hold; a row that needs more gets no proposal.
        stop_ids: its tokens that end a text.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,
        target_tokenizer: Any,
        *,
        capacity: int,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.model = model
        self._own, self._target = tokenizer, target_tokenizer
        self._capacity = capacity
        self._stop_ids = frozenset(stop_ids)
        super().__init__()

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return (self.model,)

    @property
    def clock(self) -> WallClock:
        """The clock of its model."""
        return self.model.clock

    @clock.setter
    def clock(self, clock: WallClock) -> None:
        self.model.clock = clock

    def start(self, batch_size: int, capacity: int) -> None:
        self.model.start(batch_size, self._capacity)
        self._sequence = TokenBuffer(batch_size, self._capacity, self.model.device)

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        asked, stops = limits.tolist(), batch.stops
        texts = [batch.sequence.row(row) if limit else [] for row, limit in enumerate(asked)]
        written = self._write(texts, asked, stop)
        found = []
        for text, new, limit, ends in zip(texts, written, asked, stops):
            tokens = self._translated(text, new)[:limit]
            cut = next((at for at, token in enumerate(tokens, 1) if token in ends), len(tokens))
            found.append(tokens[:cut])
        width = max(map(len, found))
        counts = torch.tensor([len(tokens) for tokens in found], device=limits.device)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        drafted = torch.tensor(padded, dtype=torch.long, device=limits.device).view(len(found), width)
        if width:
            batch.sequence.append(drafted, counts)
        return Draft(drafted, counts, None)

    def _write(self, texts: Sequence[Sequence[int]], limits: Sequence[int], stop: float) -> list[str]:
        """What the model writes behind each text of target tokens, up to ``limits`` tokens of its own."""
        for row, text in enumerate(texts):
            if text:
                self._follow(row, self._encoded(self._own, self._decoded(self._target, text)))
        sequence = self._sequence
        start, room = sequence.lengths, (self._capacity - sequence.lengths).clamp(min=0)
        left = torch.minimum(torch.tensor(limits, device=start.device), room)
        left = torch.where(start > 0, left, 0)
        ends = torch.tensor(sorted(self._stop_ids), device=start.device)
        while bool((left > 0).any()):
            active = left > 0
            logits = self.model.logits(sequence, sequence.lengths - 1, 1, active)[:, 0]
            token = logits.argmax(-1)
            ended = torch.isin(token, ends)
            sequence.append(token[:, None], (active & ~ended).long())
            left = torch.where(active & ~ended & sure_enough(logits, stop), left - 1, 0)
        return [self._decoded(self._own, sequence.row(row, int(start[row]))) for row in range(len(texts))]

    def _follow(self, row: int, tokens: list[int]) -> None:
        """Makes ``tokens`` the row's sequence; what the model has seen stays valid as far as it agrees."""
        sequence = self._sequence
        tokens = tokens if len(tokens) < self._capacity else []
        before = sequence.row(row)
        same = next((at for at, (old, new) in enumerate(zip(before, tokens)) if old != new), None)
        common = min(len(before), len(tokens)) if same is None else same
        lengths = sequence.lengths.clone()
        lengths[row] = len(tokens)
        sequence.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        sequence.truncate(lengths)
        seen = self.model.lengths.clone()
        seen[row] = min(common, max(len(tokens) - 1, 0))
        self.model.rollback(seen)

    def _translated(self, text: Sequence[int], new: str) -> list[int]:
        """The target's tokens for ``new`` behind ``text``, [] where they would change its last tokens."""
        new = new.rstrip("\ufffd")
        if not new:
            return []
        tail = self._decoded(self._target, text[-SEAM:])
        known = self._encoded(self._target, tail)
        both = self._encoded(self._target, tail + new)
        return both[len(known) :] if both[: len(known)] == known else []

    @staticmethod
    def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @staticmethod
    def _encoded(tokenizer: Any, text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens
