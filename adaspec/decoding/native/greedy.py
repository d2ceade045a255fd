"""Greedy windows in one call of C each: what ``draft.c`` drafts and ``verify.c`` verifies, a batch at a time."""

from __future__ import annotations

from ctypes import addressof, byref, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.native.library import Pass, Text, Verdict, Window
from adaspec.decoding.native.stack import NativeStack


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the sequences of a batch.

    ``start`` [B]: tokens in front of the drafts that are to be verified, all of them where there are none.
    ``limits`` [B]: tokens asked for, 0 where a row takes no part. ``ends`` [B, S]: tokens that end a row.
    """

    sequence: TokenBuffer
    start: Tensor
    limits: Tensor
    ends: Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens [B, m], ``counts`` [B] of them real, with the ``lengths`` [B] of the sequences then.

    ``kept`` [B]: tokens in the cache then. ``seconds``: of each pass.
    """

    tokens: Tensor
    counts: Tensor
    lengths: Tensor
    kept: Tensor
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens [B, m + 1] emitted, ``counts`` [B] of them real, ``accepted`` [B] drafts, ``lengths`` [B] then.

    ``kept`` [B]: tokens that caches may keep, the capacity where a row took no part; ``fed`` [B]: those in this cache.
    ``logits`` [n, outputs]: from the positions start - 1 on of the rows that take part, one row after the other, then
    anything; overwritten by the next pass.
    """

    tokens: Tensor
    counts: Tensor
    accepted: Tensor
    lengths: Tensor
    kept: Tensor
    fed: Tensor
    logits: Tensor
    seconds: float


class Greedy:
    """The greedy windows of a stack of layers, with the room that its passes need.

    Args:
        stack: the layers.
        considered: outputs that count, the first ones.
        token_map: the token of each output, [outputs]; None: its number.
    """

    def __init__(self, stack: NativeStack, considered: int, token_map: Tensor | None = None) -> None:
        self._stack, self._token_map = stack, token_map
        self._pass = Pass(considered=considered)
        self._taps = (c_void_p * stack.depth)()
        self._text = Text()
        self._about: tuple[TokenBuffer, Tensor] | None = None  # sequences and ends that it points to
        self._make_room(1, 1)

    def _make_room(self, rows: int, threads: int) -> None:
        hidden, outputs = self._stack.hidden, self._stack.outputs
        self._places = torch.zeros(3, rows, dtype=torch.long)  # sequence, position and wanted
        self._x, self._logits = torch.zeros(rows, hidden), torch.zeros(rows, outputs)
        self._best = torch.zeros(threads, rows, dtype=torch.long)  # a float and an index each
        taken = self._pass
        taken.sequence, taken.position, taken.wanted = (each.data_ptr() for each in self._places)
        taken.x, taken.logits, taken.best = self._x.data_ptr(), self._logits.data_ptr(), self._best.data_ptr()
        taken.taps, taken.threads = addressof(self._taps), threads

    def _room(self, rows: int) -> Pass:
        """A pass over at most so many rows, logits of each."""
        threads = torch.get_num_threads()
        if rows > len(self._x) or threads != self._pass.threads:
            self._make_room(max(rows, len(self._x)), threads)
        self._pass.scratch = self._stack.scratch_for(len(self._x), threads)
        return self._pass

    def _given(self, asked: Asked, fed: Tensor | None) -> Text:
        """What is asked, as C takes it; ``fed`` [B]: tokens in the cache, None where the first pass has been made."""
        text, sequence, ends = self._text, asked.sequence, asked.ends
        if self._about is None or sequence is not self._about[0] or ends is not self._about[1]:
            embedding = self._stack.embedding
            text.tokens, text.ends, text.embedding = sequence.tokens.data_ptr(), ends.data_ptr(), embedding.data_ptr()
            (text.batch, text.stride), text.end_count = sequence.tokens.shape, ends.shape[1]
            text.embedded, self._about = len(embedding), (sequence, ends)
        text.lengths, text.start = sequence.lengths.data_ptr(), asked.start.data_ptr()
        text.limits, text.fed = asked.limits.data_ptr(), None if fed is None else fed.data_ptr()
        return text

    def verify(self, asked: Asked, fed: Tensor, rows: int, width: int) -> Verified:
        """One pass over what the cache lacks of the sequences, drafts included, and what it makes of the drafts.

        Args:
            asked: of the sequences, which get the tokens emitted.
            fed: tokens in the cache, [B].
            rows: of the pass, as long as it may be.
            width: one more than the most drafts that a row has.
        """
        taken, text, batch = self._room(rows), self._given(asked, fed), len(fed)
        tokens = torch.empty(batch, width, dtype=torch.long)
        told = torch.empty(5, batch, dtype=torch.long).unbind()
        verdict = Verdict(*(each.data_ptr() for each in (tokens, *told)), width, asked.sequence.capacity)
        seconds = self._stack.library.verify(byref(self._stack.structure), byref(taken), byref(text), byref(verdict))
        counts, accepted, lengths, kept, left = told
        return Verified(tokens, counts, accepted, lengths, kept, left, self._logits, seconds)

    def draft(self, asked: Asked, fed: Tensor, rows: int, width: int, unsure: float) -> Drafted:
        """Drafts behind the sequences, which get the tokens.

        Args:
            asked: of the sequences.
            fed: tokens in the cache, [B].
            rows: of the first pass, as long as it may be.
            width: the most tokens that are asked of a row.
            unsure: entropy of a law above which its row ends behind the token.
        """
        return self._draft(asked, fed, Window(width=width, unsure=unsure), self._room(rows))

    def go_on(
        self, asked: Asked, width: int, unsure: float, position: Tensor, logits: Tensor, states: Tensor
    ) -> Drafted:
        """Drafts on from a pass that has been made; its states are joined with the tokens drafted.

        Args:
            asked: of the sequences.
            width: the most tokens that are asked of a row.
            unsure: see ``draft``.
            position: the slots that the pass wrote, [B].
            logits: of it, [B, outputs].
            states: of it, [B, hidden].
        """
        rows = asked.limits.nonzero()[:, 0]
        count, hidden = len(rows), self._stack.hidden
        taken = self._room(count)
        taken.rows = taken.outputs = count
        for place, values in zip(self._places, (rows, position[rows], torch.arange(count))):
            place[:count] = values
        self._logits[:count] = logits[rows]
        behind, joined = states[rows], torch.empty(count, 2 * hidden)
        self._taps[self._stack.depth - 1] = behind.data_ptr()
        taken.joined = joined.data_ptr()
        window = Window(joined=joined.data_ptr(), states=behind.data_ptr(), width=width, unsure=unsure)
        return self._draft(asked, None, window, taken)

    def _draft(self, asked: Asked, fed: Tensor | None, window: Window, taken: Pass) -> Drafted:
        stack, batch, width = self._stack, len(asked.limits), window.width
        text, tokens = self._given(asked, fed), torch.empty(batch, width, dtype=torch.long)
        told = torch.empty(3, batch, dtype=torch.long).unbind()
        seconds = torch.empty(width, dtype=torch.float64)
        window.tokens, window.seconds = tokens.data_ptr(), seconds.data_ptr()
        window.counts, window.lengths, window.kept = (each.data_ptr() for each in told)
        window.token = None if self._token_map is None else self._token_map.data_ptr()
        passes = stack.library.draft(byref(stack.structure), byref(taken), byref(text), byref(window))
        counts, lengths, kept = told
        tokens = tokens if passes == width else tokens[:, :passes]
        return Drafted(tokens, counts, lengths, kept, seconds.tolist()[:passes])
