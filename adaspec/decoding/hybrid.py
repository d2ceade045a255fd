"""A drafter made of drafters: the first that has something to say proposes, the next goes on behind it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.cache import largest
from adaspec.decoding.clock import WallClock
from adaspec.decoding.drafter import Drafter, ModelDrafter, put_rows
from adaspec.decoding.language_model import LanguageModel

FLOOR = 0.4  # confidence below which a lookup leaves the word to the next part


class HybridDrafter(Drafter):
    """Asks its parts in turn, each for what is left of the window behind the tokens of those before it.

    A deterministic part that tells its confidence (a lookup) is cut in front of the first token of which it is less
    sure than ``floor``, unless no part follows: the next may know better. Nor does the next go on behind it where the
    product of its confidences is below ``floor``: it would hardly be reached. A plan's ``stop`` ends the whole window.

    Lossless: a part proposes behind a kept prefix, which includes the tokens of the parts before it, and who proposes
    is decided by that prefix. A deterministic token is a one-hot law, so it may be dropped for its confidence; a
    sampled one keeps its row. One draft holds both kinds of rows. Each part's acceptance is tallied apart.

    Args:
        parts: name -> drafter, or a model to draft with, in order; the names show in what is reported.
        floor: in [0, 1].

    Raises:
        ValueError: fewer than two parts, or a floor outside its range.
    """

    def __init__(self, parts: Mapping[str, LanguageModel | Drafter], floor: float = FLOOR) -> None:
        if len(parts) < 2:
            raise ValueError(f"a hybrid has at least two parts, got {', '.join(parts) or 'none'}")
        if not 0.0 <= floor <= 1.0:
            raise ValueError(f"a hybrid's floor lies in [0, 1], got {floor}")
        self.parts: dict[str, Drafter] = {
            name: ModelDrafter(part) if isinstance(part, LanguageModel) else part for name, part in parts.items()
        }
        self.floor = floor
        super().__init__()

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return tuple(model for part in self.parts.values() for model in part.models)

    @property
    def clock(self) -> WallClock:
        """The clock of all parts."""
        return self._clock

    @clock.setter
    def clock(self, clock: WallClock) -> None:
        self._clock = clock
        for part in self.parts.values():
            part.clock = clock
        for model in self.models:
            model.clock = clock

    def attach(self, verifier: LanguageModel) -> None:
        for part in self.parts.values():
            part.attach(verifier)

    def start(self, batch_size: int, capacity: int) -> None:
        for part in self.parts.values():
            part.start(batch_size, capacity)

    def rollback(self, lengths: Tensor) -> None:
        for part in self.parts.values():
            part.rollback(lengths)

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        sequence, start, left = batch.sequence, batch.sequence.lengths, limits.tolist()
        used = torch.zeros_like(limits)
        drafts: list[tuple[Tensor, Draft]] = []  # with where each begins, [B]
        parts: list[tuple[str, Tensor]] = []
        last = len(self.parts) - 1
        for index, (name, part) in enumerate(self.parts.items()):
            if not any(left):
                parts.append((name, torch.zeros_like(limits)))
                continue
            draft = part.propose(batch, torch.tensor(left, device=limits.device), stop)
            if index < last:
                draft = self._cut(batch, part, draft)
            drafts.append((used, draft))
            parts.append((name, draft.counts))
            used = used + draft.counts if len(drafts) > 1 else draft.counts
            left = self._left(batch, draft, left, stop)
        spoke = [draft for _, draft in drafts if draft.tokens.shape[1]]
        if len(spoke) == 1:
            return Draft(spoke[0].tokens, used, spoke[0].law, parts=tuple(parts))
        width = largest(used)
        return Draft(sequence.slice(start, width), used, _join(drafts, width), parts=tuple(parts))

    def _cut(self, batch: Batch, part: Drafter, draft: Draft) -> Draft:
        """Leaves out what a deterministic part is not sure of, and everything behind it."""
        if draft.confidence is None or not draft.tokens.shape[1]:
            return draft
        counts: list[int] = draft.counts.tolist()
        kept = [_leading(sure[:count], self.floor) for sure, count in zip(draft.confidence.tolist(), counts)]
        if kept == counts:
            return draft
        few = torch.tensor(kept, device=draft.counts.device)
        batch.sequence.truncate(batch.sequence.lengths - draft.counts + few)
        part.rollback(batch.sequence.lengths)
        width = max(kept)
        return Draft(draft.tokens[:, :width], few, draft.law, draft.confidence[:, :width])

    def _left(self, batch: Batch, draft: Draft, left: list[int], stop: float) -> list[int]:
        """What the next part is asked for: nothing behind a stop token, an unsure one, or what will hardly be reached.

        ``left``: what this one was asked for.
        """
        told = draft.confidence.tolist() if draft.confidence is not None else [None] * len(left)
        found = []
        for count, tokens, sure, ends, most in zip(
            draft.counts.tolist(), draft.tokens.tolist(), told, batch.stops, left
        ):
            if not count or not most:
                found.append(most)
                continue
            ended = tokens[count - 1] in ends
            if sure is None:
                ended = ended or (stop > 0.0 and count < most)
            else:
                ended = ended or sure[count - 1] < stop or prod(sure[:count]) < self.floor
            found.append(0 if ended else most - count)
        return found


def _leading(sure: list[float], floor: float) -> int:
    """How many leading numbers are not below the floor."""
    return next((at for at, each in enumerate(sure) if each < floor), len(sure))


def _join(drafts: list[tuple[Tensor, Draft]], width: int) -> Tensor | None:
    """The laws [B, width, V] of drafts behind one another, each from its row's offset [B] on; None: all one-hot."""
    known = [draft.law for _, draft in drafts if draft.law is not None]
    if not known:
        return None
    law = known[0].new_zeros(known[0].shape[0], width, known[0].shape[2])
    for offsets, draft in drafts:
        rows = draft.law
        if rows is None:
            rows = law.new_zeros(*draft.tokens.shape, law.shape[2]).scatter_(-1, draft.tokens[..., None], 1.0)
        put_rows(law, offsets, rows, draft.counts)
    return law
