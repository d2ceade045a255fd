"""Keeps a drafter's failure away from the text: it costs a draft, never a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.language_model import LanguageModel
from adaspec.faults import told, words

logger = logging.getLogger("adaspec.decoding")
T = TypeVar("T")
Report = Callable[[str, str], None]
"""(drafter, reason): told of every failure; no word of a foreign error is in a reason, see ``adaspec.faults``."""


class NoDraft(ValueError):
    """A proposal that is no draft, in words of ours."""


class Shield:
    """Stands between every verifier and its drafter; see ``Chain.shield``.

    A drafter that raises or proposes what no drafter may is taken to have stayed silent: what it appended is taken
    back, its caches go back to the start of its draft, and its verifier emits one token as plain decoding would. The
    law of the text stays exact as long as whether a drafter fails does not hang on the very tokens it drew.

    Args:
        report: is told of every failure.
        vocab_size: token ids lie below it.
    """

    def __init__(self, report: Report, vocab_size: int) -> None:
        self._report = report
        self._vocab_size = vocab_size
        self._out: set[str] = set()  # could not begin the running batch

    def wrap(self, name: str, inner: Drafter) -> Drafter:
        """``inner``, shielded."""
        return _Shielded(name, inner, self)

    def start(self, name: str, member: LanguageModel | Drafter, batch_size: int, capacity: int) -> None:
        """Begins new sequences in a drafter; one that cannot is silent until the next batch."""
        self._out.discard(name)
        try:
            member.start(batch_size, capacity)
        except Exception as error:
            self._out.add(name)
            self._failed(name, error)

    def attempt(self, name: str, action: Callable[[], T]) -> T | None:
        """What a drafter does, or None when it failed."""
        if name in self._out:
            return None
        try:
            return action()
        except Exception as error:
            self._failed(name, error)
            return None

    def _failed(self, name: str, error: Exception) -> None:
        logger.debug("%s failed: %s", name, words(error))
        self._report(name, words(error) if isinstance(error, NoDraft) else told(error))

    def check(self, draft: Draft, limits: Tensor) -> None:
        """Tells whether a draft is one.

        Raises:
            NoDraft: another shape than its tokens have, more tokens than asked for, tokens outside the vocabulary,
                or laws that are none.
        """
        tokens, counts, law = draft.tokens, draft.counts, draft.law
        if counts.shape != limits.shape or tokens.dim() != 2 or tokens.shape[0] != limits.shape[0]:
            raise NoDraft(f"a draft of shape {tuple(tokens.shape)} for {limits.shape[0]} rows")
        if bool(((counts < 0) | (counts > limits) | (counts > tokens.shape[1])).any()):
            raise NoDraft(f"a draft of {counts.tolist()} tokens where {limits.tolist()} were asked for")
        drafted = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]  # [B, m]
        if bool((drafted & ((tokens < 0) | (tokens >= self._vocab_size))).any()):
            raise NoDraft(f"a drafted token outside the vocabulary of {self._vocab_size}")
        if law is not None and not bool(((law.sum(-1) - 1.0).abs() < 1e-2).masked_fill(~drafted, True).all()):
            raise NoDraft("a drafted token's law does not sum to 1")


class _Shielded(Drafter):
    def __init__(self, name: str, inner: Drafter, shield: Shield) -> None:
        super().__init__()
        self._name, self.inner, self._shield = name, inner, shield

    def attach(self, verifier: LanguageModel) -> None:
        self.inner.attach(verifier)

    def start(self, batch_size: int, capacity: int) -> None:
        self._shield.start(self._name, self.inner, batch_size, capacity)

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return self.inner.models

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        start = batch.sequence.lengths

        def draft() -> Draft:
            found = self.inner.propose(batch, limits, stop)
            self._shield.check(found, limits)
            return found

        found = self._shield.attempt(self._name, draft)
        if found is not None:
            return found
        batch.sequence.truncate(start)
        self.rollback(start - 1)
        return Draft.none(limits)

    def rollback(self, lengths: Tensor) -> None:
        self._shield.attempt(self._name, lambda: self.inner.rollback(lengths))
