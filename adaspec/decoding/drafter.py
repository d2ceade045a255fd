"""Drafters propose tokens. A stage verifies any drafter by a model and is itself a drafter: depth is nesting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft, Verdict
from adaspec.decoding.clock import WallClock
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.tally import EdgeTally, Proposal, Verification
from adaspec.outcome import EdgeOutcome


class Drafter(ABC):
    """Proposes tokens that continue the sequence of a batch. ``clock`` is replaced by that of its chain.

    ``one_pass``: it proposes a whole window in one pass, as a lookup does.
    """

    one_pass = False

    def __init__(self) -> None:
        self.clock = WallClock()

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        """The models it runs, whose caches thus hold its drafts."""
        return ()

    @abstractmethod
    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        """Appends up to ``limits`` [B] tokens to ``batch.sequence`` and returns them.

        A row ends early at a stop token, and behind the first token of which the drafter was less sure than ``stop``
        (``confidence.sure_enough``; a drafter that does not know how sure it is takes no notice). Every token must be
        drawn from the law that is returned for it, and a decision to end early may depend only on the tokens that
        are kept (losslessness rests on both).
        """

    def rollback(self, lengths: Tensor) -> None:  # noqa: B027 - nothing to do where only committed tokens are read
        """Forgets what was seen behind ``lengths`` [B]."""

    def start(self, batch_size: int, capacity: int) -> None:  # noqa: B027 - nothing to do where nothing is kept
        """Begins ``batch_size`` new sequences of at most ``capacity`` tokens."""

    def attach(self, verifier: LanguageModel) -> None:  # noqa: B027 - most drafters need nothing of it
        """Called once by the stage that will verify this drafter; a drafter that reads its features keeps it."""


class ModelDrafter(Drafter):
    """A causal model that drafts one token per pass."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return (self.model,)

    def start(self, batch_size: int, capacity: int) -> None:
        self.model.start(batch_size, capacity)

    def rollback(self, lengths: Tensor) -> None:
        self.model.rollback(lengths)

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        return self.model.draft(batch, limits, stop)


class Stage(Drafter):
    """A model that verifies what a drafter proposes, ``window`` tokens at a time; itself a drafter.

    Given the past every token it emits has exactly the verifier's law, and goes out with that law: the right proposal
    for a stage above. Induction gives exactness at any depth. ``stop``: see ``Drafter.propose``, of the inner one.
    """

    def __init__(self, verifier: LanguageModel, inner: Drafter, window: int, stop: float = 0.0) -> None:
        super().__init__()
        self.verifier = verifier
        self.inner = inner
        self.window = window
        self.stop = stop
        self.tally = EdgeTally(window)
        self.part_tallies: dict[str, EdgeTally] = {}
        self._played: list[Verification] = []  # in the running round, not read yet; and those read
        self._proposals: list[Proposal] = []
        self._limits: tuple[int, ...] = ()
        self._windows: list[int] = []
        self._tensors: Sequence[Tensor] = ()
        self._marks: list[tuple[Any, Any, Any]] = []  # drafting began, it ended, the verification ended
        inner.attach(verifier)

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return (self.verifier, *self.inner.models)

    def rollback(self, lengths: Tensor) -> None:
        self.verifier.rollback(lengths)
        self.inner.rollback(lengths)

    def verify(self, batch: Batch, limits: Sequence[int]) -> Verdict:
        """One draft and its verification; appends what is emitted, 1 .. ``limits`` [B] tokens (none where 0).

        A block is cut at its first stop token: nothing leaks behind it.
        """
        clock, sequence = self.verifier.clock, batch.sequence
        began = clock.mark()
        start = sequence.lengths
        windows, most, asked = self._asked(tuple(min(limit, self.window + 1) for limit in limits), start.device)
        draft = self.inner.propose(batch, asked, self.stop)
        drafted = clock.mark()
        verdict = self.verifier.verify(batch, draft, start, most)
        self.inner.rollback(verdict.kept)
        self._played.append(Verification(batch, start, windows, draft, verdict.accepted))
        self._marks.append((began, drafted, clock.mark()))
        return verdict

    def _asked(self, limits: tuple[int, ...], device: torch.device) -> tuple[list[int], Tensor, Tensor]:
        """Tokens to draft for ``limits``, and both as tensors, these first; [B] each, the same until limits change."""
        if limits != self._limits:
            self._limits, self._windows = limits, [max(limit - 1, 0) for limit in limits]
            self._tensors = torch.tensor([limits, self._windows], device=device).unbind()
        most, asked = self._tensors
        return self._windows, most, asked

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        assert not stop, "only the last drafter of a chain stops early"
        start, sequence = batch.sequence.lengths, batch.sequence
        left: list[int] = limits.tolist()
        width, stops = max(left), batch.stops
        law: Tensor | None = None
        counts = torch.zeros_like(limits)
        while any(left):
            verdict = self.verify(batch, left)
            if verdict.law is not None:
                law = verdict.law.new_zeros(len(left), width, verdict.law.shape[2]) if law is None else law
                put_rows(law, counts, verdict.law, verdict.counts)
            counts = counts + verdict.counts
            for row, (tokens, count) in enumerate(zip(verdict.tokens.tolist(), verdict.counts.tolist())):
                ended = count > 0 and tokens[count - 1] in stops[row]
                left[row] = 0 if ended else left[row] - count
        return Draft(sequence.slice(start, width), counts, law)

    def proposals(self) -> list[Proposal]:
        """What was verified in the running round."""
        self._proposals += [each.read() for each in self._played]
        self._played.clear()
        return self._proposals

    def forget(self) -> None:
        """Leaves out what the running round has shown."""
        for each in (self._played, self._proposals, self._marks):
            each.clear()

    def drain(self, verifier: str, drafter: str) -> list[EdgeOutcome]:
        """What the edge has shown since the last call, and behind it what each part of a hybrid has.

        A part has its positions counted from its own first token; of seconds only the whole is told.
        """
        span, drafting, verifying = self.verifier.clock.span, 0.0, 0.0
        for began, drafted, ended in self._marks:
            drafting += span(began, drafted)
            verifying += span(drafted, ended)
        for proposal in self.proposals():
            self.tally.add_rows(proposal, self.part_tallies)
        self.forget()
        edges = [self.tally.drain(verifier, drafter, drafting, verifying)]
        if self.part_tallies:
            name, sign, stop = drafter.partition("?")
            for part, tally in self.part_tallies.items():
                edges.append(tally.drain(verifier, f"{name}.{part}{sign}{stop}", None, None))
        return edges


def put_rows(law: Tensor, offsets: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Writes the first ``counts`` [B] of ``rows`` [B, n, V] into ``law`` [B, width, V] at ``offsets`` [B]."""
    steps = torch.arange(rows.shape[1], device=rows.device)
    row, step = (steps < counts[:, None]).nonzero(as_tuple=True)
    law[row, offsets[row] + step] = rows[row, step]
