"""Drafting without a model: what followed the same words before, in this text or in a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import TypeVar

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.corpus import CorpusIndex
from adaspec.decoding.drafter import Drafter

T = TypeVar("T")
Gram = tuple[int, ...]
Match = tuple[int, int]  # position of the token that followed, and how many tokens before it agree
CANDIDATES = 8  # occurrences of one n-gram that are weighed, the most recent ones
LONGEST = 16  # tokens of agreement that are told apart
RECENCY = 0.9  # weight of a candidate relative to the next more recent one
_RECENT = tuple(accumulate(repeat(RECENCY, CANDIDATES - 1), mul, initial=1.0))
_AGREED = tuple(2.0**-short for short in range(LONGEST + 1))  # weight of agreement in so many tokens less
FLOOR = 0.1  # default of LookupDrafter
CORPUS_WEIGHT = 2.0  # sum of a corpus's shares after which its record in a text counts as much as the shares
PRIOR_WEIGHT = 6.0  # copied tokens after which a text's own record counts as much as what was believed beforehand


def _believed(length: int) -> float:
    """How often a text goes on as it did after ``length`` tokens of agreement, before anything is known of it."""
    return (length + 1.0) / (length + 4.0)


def check_ngrams(low: int, high: int) -> None:
    """Tells whether an n-gram range makes sense.

    Raises:
        ValueError: it is empty or not positive.
    """
    if not 1 <= low <= high:
        raise ValueError(f"the n-gram range must satisfy 1 <= min <= max, got {low} .. {high}")


class TextIndex:
    """Where each n-gram of one growing text ended, and how far the text can be trusted to repeat itself.

    Every token is indexed once, in time that does not depend on the length of the text. On the way one earlier
    occurrence of the present suffix is followed, and whether it foretold the next token is counted per length of
    agreement: the record behind ``trust``.
    """

    def __init__(self, sizes: range) -> None:
        self.sizes = sizes
        self.tokens: list[int] = []
        self._tail: Gram = ()  # the last tokens, as many as the longest n-gram has
        self._latest: dict[Gram, int] = {}  # the position behind its latest occurrence
        self._earlier = [[0] for _ in sizes]  # per size and position: behind the occurrence before, 0 for none
        self._right = [PRIOR_WEIGHT * _believed(length) for length in range(LONGEST + 1)]
        self._tried = [PRIOR_WEIGHT] * (LONGEST + 1)
        self._followed: Match = (0, 0)

    def trust(self, length: int) -> float:
        """The chance that a match of ``length`` tokens goes on as it did before, from this text's own record."""
        return self._right[length] / self._tried[length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens."""
        text, latest, tail, keep = self.tokens, self._latest, self._tail, -self.sizes[-1]
        at, length = self._followed
        for token in tokens:
            if length:
                foretold = text[at] == token
                self._tried[length] += 1.0
                self._right[length] += foretold
                at, length = (at + 1, min(length + 1, LONGEST)) if foretold else (0, 0)
            text.append(token)
            end = len(text)
            tail = (*tail, token)[keep:]
            for size, earlier in zip(self.sizes, self._earlier):
                known = 0
                if size <= end:
                    gram = tail[-size:]
                    known = latest.get(gram, 0)
                    latest[gram] = end
                earlier.append(known)
                if known and length < size:
                    at, length = known, min(size, LONGEST)
        self._tail, self._followed = tail, (at, length)

    def matches(self, suffix: Sequence[int], before: int) -> list[Match]:
        """The latest occurrences of the longest known n-gram that ends ``suffix``, the most recent first.

        ``before``: only what ended in front of this position, so that a token followed.
        """
        for size, earlier in zip(reversed(self.sizes), reversed(self._earlier)):
            end = self._latest.get(tuple(suffix[-size:]), 0) if size <= len(suffix) else 0
            while end and end >= before:
                end = earlier[end]
            known: list[int] = []
            while end and len(known) < CANDIDATES:
                known.append(end)
                end = earlier[end]
            if known:
                if size < self.sizes[-1]:  # it is known that no longer one occurred
                    return [(end, size) for end in known]
                last = suffix[-LONGEST:]
                return [(end, self._agreement(last, end, size)) for end in known]
        return []

    def _agreement(self, last: Sequence[int], end: int, size: int) -> int:
        """How many of the ``last`` tokens precede ``end`` as well, where ``size`` of them are known to."""
        tokens, most = self.tokens, len(last)
        if end >= most and tokens[end - most : end] == last:
            return most
        most = min(most, end)
        while size < most and tokens[end - size - 1] == last[-size - 1]:
            size += 1
        return min(size, LONGEST)

    def follow(self, end: int, before: int, drafted: list[int], count: int) -> list[int]:
        """The next ``count`` tokens of a text that goes on as it did behind ``end``, which lies before ``before``.

        Read are committed tokens in front of ``before``, then what is ``drafted`` behind it; a copy that comes to the
        end of that repeats its pattern.
        """
        run = self.tokens[end : min(end + count, before)]
        if len(run) < count:
            run += drafted
            run *= -(-count // len(run))
            del run[count:]
        return run


class CorpusRecord:
    """How far one text can trust a corpus: how often what it said of a next token came true, against its shares."""

    def __init__(self) -> None:
        self._right = self._said = CORPUS_WEIGHT
        self._open: tuple[int, int, float] | None = None  # position, token, share

    @property
    def factor(self) -> float:
        """What the corpus's shares are worth here, at most 1."""
        return min(1.0, self._right / self._said)

    def judge(self, tokens: Sequence[int], committed: int) -> None:
        """Counts the open claim once the token it was about is committed."""
        if self._open and self._open[0] < committed:
            position, token, share = self._open
            self._right += float(tokens[position] == token)
            self._said += share
            self._open = None

    def claim(self, position: int, token: int, share: float) -> None:
        """Remembers what the corpus says of a position."""
        self._open = (position, token, share) if share else None


class LookupDrafter(Drafter):
    """Proposes what followed the longest matching suffix in prompt, generated text and ``corpus``; no forward pass.

    Earlier occurrences vote for the next token with a weight that doubles per token of agreement and falls with age;
    the winner's share times the text's ``trust`` in matches of that length is its confidence. The corpus is asked for
    the same place, its share times what such shares have been worth in this text so far, and the surer of both is
    taken. Occurrences that foretold the token go on to vote for the next.
    The proposal ends where nobody has a candidate, where its evidence ends (the product of the confidences so far, the
    chance that the token is reached and accepted, is below ``floor``), or behind a token where ``stop`` says so.

    Lossless: all of it, the length included, is a function of the committed and drafted tokens before.

    Args:
        name: its passes are reported under it.
        min_ngram, max_ngram: tokens of agreement that are looked for.
        corpus: what often follows what, elsewhere.
        floor: chance of being reached and accepted below which a token is not offered; worth what a verifier's pass
            grows by per token, relative to a pass over one.

    Raises:
        ValueError: an empty or non-positive n-gram range, or a floor outside [0, 1].
    """

    one_pass = True

    def __init__(
        self,
        name: str,
        *,
        min_ngram: int = 2,
        max_ngram: int = 4,
        corpus: CorpusIndex | None = None,
        floor: float = FLOOR,
    ) -> None:
        super().__init__()
        check_ngrams(min_ngram, max_ngram)
        if not 0.0 <= floor <= 1.0:
            raise ValueError(f"a lookup's floor lies in [0, 1], got {floor}")
        self.name = name
        self._sizes = range(min_ngram, max_ngram + 1)
        self._corpus = corpus
        self._floor = floor
        self._reach = max(LONGEST, max_ngram, corpus.longest if corpus else 0)
        self._rows: list[TextIndex] = []
        self._records: list[CorpusRecord] = []

    def start(self, batch_size: int, capacity: int) -> None:
        self._rows = [TextIndex(self._sizes) for _ in range(batch_size)]
        self._records = [CorpusRecord() for _ in range(batch_size)]

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        sequence = batch.sequence
        lengths, asked = sequence.lengths.tolist(), limits.tolist()
        if not any(asked):
            return Draft.none(limits)
        with self.clock.measure(self.name, 1, sequence.batch_size, max(lengths)):
            committed: list[int] = batch.committed.tolist()
            ends = enumerate(zip(committed, lengths))
            drafted = [sequence.read(row, known, end) if known < end else [] for row, (known, end) in ends]
            stops = batch.stops
            guesses = [
                self.guess(row, batch.text(row, known), known, drafts, limit, stop, stops[row]) if limit else ([], [])
                for row, (known, drafts, limit) in enumerate(zip(committed, drafted, asked))
            ]
            width = max(len(tokens) for tokens, _ in guesses)
            if not width:
                nothing = limits.new_zeros(len(asked), 0)
                return Draft(nothing, torch.zeros_like(limits), None, nothing.double())
            counts = torch.tensor([len(tokens) for tokens, _ in guesses], device=limits.device)
            tokens = torch.tensor(_padded((tokens for tokens, _ in guesses), width, 0), device=limits.device)
            confidence = _padded((sure for _, sure in guesses), width, 0.0)
            sure = torch.tensor(confidence, dtype=torch.float64, device=limits.device)  # compared with a floor as it is
            if len(guesses) == 1:
                sequence.append_all(tokens, lengths[0])
            else:
                sequence.append(tokens, counts)
        return Draft(tokens, counts, None, sure)

    def guess(
        self,
        row: int,
        text: Sequence[int],
        committed: int,
        drafts: list[int],
        limit: int,
        stop: float = 0.0,
        stop_ids: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        """Up to ``limit`` tokens to follow the first ``committed`` of ``text`` and the ``drafts``; how sure each is.

        The tokens before ``committed`` are indexed once and for all; a later call may ask about an earlier place, and
        then nothing behind that place is read.
        """
        index, record = self._rows[row], self._records[row]
        if len(index.tokens) < committed:
            index.extend(text[len(index.tokens) : committed])
        length = committed + len(drafts)
        tail = index.tokens[max(0, min(committed, length - self._reach)) : committed]
        behind = len(tail)  # where ``tail`` goes on with what is not committed
        tail += drafts
        found: list[int] = []
        sure: list[float] = []
        copies = _Copies(index, [], [])
        reached = 1.0
        while len(found) < limit:
            if not copies.runs:
                copies = _copies(index, tail, committed, tail[behind:], limit - len(found))
            token, confidence = copies.vote()
            if self._corpus is not None:
                other, share = self._corpus.next(tail)
                if not found and not drafts:
                    record.judge(index.tokens, committed)
                    record.claim(committed, other, share)
                if share * record.factor > confidence:
                    token, confidence = other, share * record.factor
            reached *= confidence
            if reached <= 0.0 or reached < self._floor:
                break
            found.append(token)
            sure.append(confidence)
            tail.append(token)
            if confidence < stop or token in stop_ids:
                break
            copies.go_on(token)
        return found, sure


class _Copies:
    """What earlier occurrences foretell: the tokens behind each, and how many before it agree; most recent first."""

    __slots__ = ("_at", "_index", "_lengths", "_longest", "_votes", "runs")

    def __init__(self, index: TextIndex, runs: list[list[int]], lengths: list[int]) -> None:
        self._index, self._at = index, 0
        self._keep(runs, lengths)

    def _keep(self, runs: list[list[int]], lengths: list[int]) -> None:
        self.runs, self._lengths = runs, lengths
        self._longest = max(lengths, default=0)
        self._votes = list(zip(*runs))  # per position, one of each occurrence

    def vote(self) -> tuple[int, float]:
        """The token with the most weight, and its confidence; (-1, 0) where nothing is foretold."""
        if not self.runs:
            return -1, 0.0
        at, longest = self._at, self._longest
        votes = self._votes[at]
        if votes.count(votes[0]) == len(votes):
            return votes[0], self._index.trust(min(longest + at, LONGEST))
        longest = min(longest + at, LONGEST)
        weights: dict[int, float] = {}
        reach: dict[int, int] = {}  # the longest agreement behind each token
        for token, length, recent in zip(votes, self._lengths, _RECENT):
            length = min(length + at, LONGEST)
            weights[token] = weights.get(token, 0.0) + recent * _AGREED[longest - length]
            reach[token] = max(reach.get(token, 0), length)
        best = max(weights, key=weights.__getitem__)
        return best, weights[best] / sum(weights.values()) * self._index.trust(reach[best])

    def go_on(self, token: int) -> None:
        """Keeps the occurrences that foretold ``token``, to vote for the next."""
        if self.runs:
            votes = self._votes[self._at]
            if votes.count(token) != len(votes):
                kept = [number for number, vote in enumerate(votes) if vote == token]
                self._keep([self.runs[number] for number in kept], [self._lengths[number] for number in kept])
        self._at += 1


def _copies(index: TextIndex, text: list[int], committed: int, drafted: list[int], count: int) -> _Copies:
    """The earlier occurrences of the end of ``text``, each with the ``count`` tokens that it foretells."""
    matches = index.matches(text, committed)
    runs = [index.follow(end, committed, drafted, count) for end, _ in matches]
    return _Copies(index, runs, [length for _, length in matches])


def _padded(rows: Iterable[list[T]], width: int, filler: T) -> list[list[T]]:
    return [row + [filler] * (width - len(row)) for row in rows]
