"""The sequences that a chain works on, what is proposed to continue them, and what becomes of a proposal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.confidence import sure_enough
from adaspec.decoding.sampling import Sampler


@dataclass(slots=True)
class Batch:
    """What all stages of a chain share while a batch is decoded.

    ``stop_ids`` [B, S]: tokens that end a row, padded with -1; ``stops``: the same on the host. ``committed`` [B]:
    lengths at the start of the round, behind which ``sequence`` holds only drafts.
    """

    sequence: TokenBuffer
    sampler: Sampler
    stop_ids: Tensor
    committed: Tensor
    stops: list[list[int]] = field(init=False)
    _texts: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stops = self.stop_ids.tolist()

    def text(self, row: int, committed: int) -> list[int]:
        """The tokens of a row on the host, at least the ``committed`` first; a list that grows with the row."""
        known = self._texts.setdefault(row, [])
        if len(known) < committed:
            known += self.sequence.read(row, len(known), committed)
        return known

    def note(self, row: int, committed: int, tokens: Sequence[int]) -> None:
        """Takes in what was emitted behind the ``committed`` first tokens of a row, so that nobody reads it again."""
        known = self._texts.get(row)
        if known is not None and len(known) == committed:
            known += tokens

    def is_stop(self, tokens: Tensor) -> Tensor:
        """Which of ``tokens`` [B, n] end their row; [B, n] bool."""
        return (tokens[..., None] == self.stop_ids[:, None, :]).any(-1)

    def ends(self, tokens: Tensor) -> Tensor:
        """Which of ``tokens`` [B] end their row; [B] bool."""
        return (tokens[:, None] == self.stop_ids).any(1)

    def cut(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Shortens ``counts`` [B] so that each row of ``tokens`` [B, n] ends at its first stop token."""
        steps = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        ends = torch.where(self.is_stop(tokens), steps, tokens.shape[1])
        return torch.minimum(counts, ends.amin(1)) if tokens.shape[1] else counts


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens [B, m], ``counts`` [B] of them real, and the laws [B, m, V] they were drawn from.

    ``law`` is None when the proposal is deterministic given the sequence (lookup, greedy models): a one-hot law.
    ``confidence`` [B, m]: how sure the drafter is of each token, a function of the tokens before it alone; only told
    of proposals that are deterministic whatever the sampling (so that a token may even be dropped for it).
    ``parts``: name and number of tokens [B] of each part of a hybrid, in the order in which they follow one another.
    """

    tokens: Tensor
    counts: Tensor
    law: Tensor | None
    confidence: Tensor | None = None
    parts: tuple[tuple[str, Tensor], ...] = ()

    @classmethod
    def none(cls, like: Tensor) -> Draft:
        """Of no tokens, for as many rows as ``like`` [B] has."""
        return cls(like.new_empty(len(like), 0), torch.zeros_like(like), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens emitted by a verification, [B, m + 1] of which ``counts`` [B] are real, each with its verifier's law.

    ``accepted`` [B]: of the drafted ones. ``kept`` [B]: tokens that caches may keep, the capacity where a row took no
    part. ``logits``: gives the verifier's own, [B, m + 1, V], before penalties and temperature; until its next pass.
    """

    tokens: Tensor
    counts: Tensor
    accepted: Tensor
    kept: Tensor
    law: Tensor | None
    logits: Callable[[], Tensor]


def one_by_one(
    batch: Batch, limits: Tensor, stop: float, active: Tensor, step: Callable[[Tensor, Tensor], Tensor]
) -> Draft:
    """Drafts one token per pass: a proposal of what can tell the logits of the next token.

    Args:
        batch: whose sequence is continued.
        limits: tokens asked for, [B].
        stop: confidence below which a row ends behind the token.
        active: rows [B] that draft at all.
        step: (last position [B], rows that go on [B]) -> logits [B, 1, V].
    """
    sequence = batch.sequence
    tokens, laws = [], []
    counts = torch.zeros_like(limits)
    while bool(active.any()):
        first = sequence.lengths - 1
        logits = step(first, active)
        token, law = batch.sampler.choose(logits, sequence, first, active)
        sequence.append(token[:, None], active)
        counts = counts + active
        active = active & (counts < limits) & ~batch.ends(token)
        if stop:
            active = active & sure_enough(logits[:, 0], stop)
        tokens.append(token)
        laws.append(law)
    if not tokens:
        return Draft.none(limits)
    stacked = None if laws[0] is None else torch.stack([law for law in laws if law is not None], 1)
    return Draft(torch.stack(tokens, 1), counts, stacked)
