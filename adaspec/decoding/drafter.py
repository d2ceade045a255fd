"""Drafters propose tokens. A stage verifies any drafter by a model and is itself a drafter: depth is nesting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.clock import WallClock
from adaspec.decoding.confidence import sure_enough
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.sampling import Sampler
from adaspec.outcome import EdgeOutcome


@dataclass(slots=True)
class Batch:
    """What all stages of a chain share while a batch is decoded.

    ``stop_ids`` [B, S]: tokens that end a row, padded with -1. ``committed`` [B]: lengths at the start of the round,
    behind which ``sequence`` holds only drafts.
    """

    sequence: TokenBuffer
    sampler: Sampler
    stop_ids: Tensor
    committed: Tensor

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


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft with the lengths [B] that it continued and the number of tokens [B] that it was asked for."""

    start: Tensor
    asked: Tensor
    draft: Draft


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens emitted by a verification, [B, m + 1] of which ``counts`` [B] are real, each with its verifier's law.

    ``logits`` [B, m + 1, V] are the verifier's own, before penalties and temperature.
    """

    tokens: Tensor
    counts: Tensor
    law: Tensor | None
    logits: Tensor


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
        if batch.sampler.takes_largest and bool(limits.any()):
            drafted = self.model.draft(batch.sequence, limits, batch.stop_ids, stop)
            if drafted is not None:
                return Draft(*drafted, None)

        def step(first: Tensor, active: Tensor) -> Tensor:
            return self.model.logits(batch.sequence, first, 1, active)

        return one_by_one(batch, limits, stop, limits > 0, step)


def one_by_one(
    batch: Batch, limits: Tensor, stop: float, active: Tensor, step: Callable[[Tensor, Tensor], Tensor]
) -> Draft:
    """Drafts one token per pass: ``Drafter.propose`` for what can tell the logits of the next token.

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
        return Draft(limits.new_zeros(limits.shape[0], 0), counts, None)
    stacked = None if laws[0] is None else torch.stack([law for law in laws if law is not None], 1)
    return Draft(torch.stack(tokens, 1), counts, stacked)


@dataclass(slots=True)
class EdgeTally:
    """Sums what the verifications of one edge show, until a round ends."""

    window: int
    counts: list[list[int]] = field(init=False)  # reached, offered, accepted, asked, drafted; per position each
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.counts = [[0] * self.window for _ in range(5)]
        self.draft_seconds, self.verify_seconds = 0.0, 0.0

    def add(self, asked: Tensor, offered: Tensor, accepted: Tensor) -> None:
        """Adds one verification per row: tokens asked for, offered and accepted, each [B]."""
        steps = torch.arange(self.window, device=asked.device)
        held, drafted = asked[:, None] > steps, offered[:, None] > steps  # [B, window]
        reached, kept = held & (accepted[:, None] >= steps), accepted[:, None] > steps
        now = torch.stack((reached, reached & drafted, kept, held, drafted)).sum(1).tolist()
        self.counts = [[old + new for old, new in zip(*rows)] for rows in zip(self.counts, now)]

    def add_one(self, asked: int, offered: int, accepted: int) -> None:
        """Adds one verification; as ``add`` of one row."""
        reached = min(asked, accepted + 1)
        for row, count in zip(self.counts, (reached, min(reached, offered), accepted, asked, offered)):
            for position in range(count):
                row[position] += 1

    def drain(self, verifier: str, drafter: str) -> EdgeOutcome:
        """The sums as an outcome; starts again from zero."""
        reached, offered, accepted, asked, drafted = (tuple(row) for row in self.counts)
        outcome = EdgeOutcome(
            verifier, drafter, reached, offered, accepted, asked, drafted, self.draft_seconds, self.verify_seconds
        )
        self.clear()
        return outcome


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
        self.proposals: list[Proposal] = []  # the deterministic ones of the running round
        self._marks: list[tuple[Any, Any, Any]] = []  # drafting began, it ended, the verification ended
        inner.attach(verifier)

    @property
    def models(self) -> tuple[LanguageModel, ...]:
        return (self.verifier, *self.inner.models)

    def rollback(self, lengths: Tensor) -> None:
        self.verifier.rollback(lengths)
        self.inner.rollback(lengths)

    def verify(self, batch: Batch, limits: Tensor) -> Verdict:
        """One draft and its verification; appends what is emitted, 1 .. ``limits`` [B] tokens (none where 0).

        A block is cut at its first stop token: nothing leaks behind it.
        """
        clock, sequence = self.verifier.clock, batch.sequence
        began = clock.mark()
        start, active = sequence.lengths, limits > 0
        asked = (limits - 1).clamp(0, self.window)
        draft = self.inner.propose(batch, asked, self.stop)
        drafted = clock.mark()
        first = start - 1
        logits = self.verifier.logits(sequence, first, draft.tokens.shape[1] + 1, active)
        result, law = batch.sampler.verify(draft.tokens, draft.counts, draft.law, logits, sequence, first, active)
        tokens, counts = self._emit(batch, draft, result.accepted, result.following, active)
        sequence.truncate(start)
        sequence.append(tokens, counts)
        self.rollback(torch.where(active, start + counts - 1, sequence.capacity))
        self._record(batch, Proposal(start, asked, draft), result.accepted)
        self._marks.append((began, drafted, clock.mark()))
        return Verdict(tokens, counts, law, logits)

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        assert not stop, "only the last drafter of a chain stops early"
        start, sequence = batch.sequence.lengths, batch.sequence
        width = int(limits.max())
        law: Tensor | None = None
        counts = torch.zeros_like(limits)
        remaining = limits
        while bool((remaining > 0).any()):
            verdict = self.verify(batch, remaining)
            if verdict.law is not None:
                law = verdict.law.new_zeros(len(limits), width, verdict.law.shape[2]) if law is None else law
                put_rows(law, counts, verdict.law, verdict.counts)
            counts = counts + verdict.counts
            ended = batch.ends(sequence.slice(sequence.lengths - 1, 1)[:, 0]) & (counts > 0)
            remaining = torch.where(ended, 0, limits - counts)
        return Draft(sequence.slice(start, width), counts, law)

    @staticmethod
    def _emit(batch: Batch, draft: Draft, accepted: Tensor, following: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """The accepted tokens and the one after them [B, m + 1], cut at the first stop token; and their counts."""
        padded = torch.cat((draft.tokens, following[:, None]), 1)
        tokens = padded.scatter(1, accepted[:, None], following[:, None])
        return tokens, torch.where(active, batch.cut(tokens, accepted + 1), 0)

    def _record(self, batch: Batch, proposal: Proposal, accepted: Tensor) -> None:
        """A draft that ended at a stop token was not asked for more."""
        asked, draft = proposal.asked, proposal.draft
        if draft.tokens.shape[1]:
            last = draft.tokens.gather(1, (draft.counts - 1).clamp(min=0)[:, None])[:, 0]
            ended = batch.ends(last) & (draft.counts > 0)
            asked = torch.where(ended, draft.counts, asked)
        self.tally.add(asked, draft.counts, accepted)
        before = torch.zeros_like(asked)
        for name, counts in draft.parts:
            tally = self.part_tallies.setdefault(name, EdgeTally(self.window))
            tally.add(asked - before, counts, (accepted - before).minimum(counts))  # below 0: it was not reached
            before = before + counts
        if draft.law is None:
            self.proposals.append(replace(proposal, asked=asked))

    def drain(self, verifier: str, drafter: str) -> list[EdgeOutcome]:
        """What the edge has shown since the last call, and behind it what each part of a hybrid has.

        A part has its positions counted from its own first token; of seconds only the whole is told.
        """
        name, sign, stop = drafter.partition("?")
        self.proposals.clear()
        for began, drafted, ended in self._marks:
            self.tally.draft_seconds += self.verifier.clock.span(began, drafted)
            self.tally.verify_seconds += self.verifier.clock.span(drafted, ended)
        self._marks.clear()
        outcomes = [self.tally.drain(verifier, drafter)]
        for part, tally in self.part_tallies.items():
            outcome = tally.drain(verifier, f"{name}.{part}{sign}{stop}")
            outcomes.append(replace(outcome, draft_seconds=None, verify_seconds=None))
        return outcomes


def put_rows(law: Tensor, offsets: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Writes the first ``counts`` [B] of ``rows`` [B, n, V] into ``law`` [B, width, V] at ``offsets`` [B]."""
    steps = torch.arange(rows.shape[1], device=rows.device)
    row, step = (steps < counts[:, None]).nonzero(as_tuple=True)
    law[row, offsets[row] + step] = rows[row, step]
