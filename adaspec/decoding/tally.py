"""What the verifications of a round show of an edge, counted on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.cache import numbers
from adaspec.outcome import EdgeOutcome


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft and its verification, row by row.

    ``start``: lengths that it continued. ``asked``: tokens asked for, no more than drafted where a draft ended at a
    stop token. ``tokens``: drafted. ``accepted``: how many. ``deterministic``: given the sequence, see ``Draft.law``.
    ``parts``: name and number of tokens per row of each part of a hybrid, in their order.
    """

    start: list[int]
    asked: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    deterministic: bool
    parts: list[tuple[str, list[int]]]


@dataclass(frozen=True, slots=True)
class Verification:
    """One that has been made: where ``draft`` stands, and per row [B] what was asked for and accepted."""

    batch: Batch
    start: Tensor
    asked: list[int]
    draft: Draft
    accepted: Tensor

    def read(self) -> Proposal:
        """Its numbers, from the device."""
        draft, stops = self.draft, self.batch.stops
        start, counts, accepted = numbers(self.start, draft.counts, self.accepted)
        tokens = [row[:count] for row, count in zip(draft.tokens.tolist(), counts)]
        asked = [len(row) if row and row[-1] in ends else most for row, ends, most in zip(tokens, stops, self.asked)]
        parts = [(name, of.tolist()) for name, of in draft.parts]
        return Proposal(start, asked, tokens, accepted, draft.law is None, parts)


class EdgeTally:
    """Sums what the verifications of one edge show, until a round ends. ``window``: positions told apart."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._shown: list[_Counts] = []  # by each verification since the last call of ``drain``

    def __bool__(self) -> bool:
        return bool(self._shown)

    def add(self, asked: int, offered: int, accepted: int) -> None:
        """Adds a verification of ``offered`` tokens where ``asked`` were asked for; below 0 accepted: not reached."""
        self._shown.append(_counts(self._window, asked, offered, accepted))

    def add_rows(self, proposal: Proposal, parts: dict[str, EdgeTally]) -> None:
        """Adds every row of a proposal; and to ``parts``, by name, what each part of it did from its first token on."""
        for row, (asked, tokens, accepted) in enumerate(zip(proposal.asked, proposal.tokens, proposal.accepted)):
            self.add(asked, len(tokens), accepted)
            before = 0
            for name, counts in proposal.parts:
                tally = parts.setdefault(name, EdgeTally(self._window))
                tally.add(asked - before, counts[row], min(accepted - before, counts[row]))
                before += counts[row]

    def drain(
        self, verifier: str, drafter: str, draft_seconds: float | None = 0.0, verify_seconds: float | None = 0.0
    ) -> EdgeOutcome:
        """The sums as an outcome; starts again from zero."""
        shown = self._shown or [_counts(self._window, 0, 0, 0)]
        self._shown = []
        sums = shown[0] if len(shown) == 1 else [tuple(map(sum, zip(*each))) for each in zip(*shown)]
        reached, offered, accepted, asked, drafted = sums
        parts = (reached, offered, accepted, asked, drafted, draft_seconds, verify_seconds)
        return EdgeOutcome(verifier, drafter, *parts)


_Counts: TypeAlias = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def _counts(window: int, asked: int, offered: int, accepted: int) -> _Counts:
    """1 per position of a window that one verification reached, was offered, accepted, was asked for, drafted, else 0.

    Few differ; they are kept, as Python counts slowly behind a pass, which leaves no code in the processor's caches.
    """
    reached = min(asked, accepted + 1)
    sizes = (reached, min(reached, offered), accepted, asked, offered)
    return tuple(tuple(int(position < size) for position in range(window)) for size in sizes)


def agreement(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    count = 0
    for token, other in zip(tokens, others):
        if token != other:
            break
        count += 1
    return count
