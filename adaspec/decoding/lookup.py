"""Drafting without a model: what followed the same words before, in this text or in a corpus."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adaspec.decoding.corpus import CorpusIndex
from adaspec.decoding.drafter import Batch, Draft, Drafter

Gram = tuple[int, ...]
Match = tuple[int, int]  # position of the token that followed, and how many tokens before it agree
CANDIDATES = 8  # occurrences of one n-gram that are weighed, the most recent ones
LONGEST = 16  # tokens of agreement that are told apart
RECENCY = 0.9  # weight of a candidate relative to the next more recent one
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
        text, latest = self.tokens, self._latest
        at, length = self._followed
        for token in tokens:
            if length:
                foretold = text[at] == token
                self._tried[length] += 1.0
                self._right[length] += foretold
                at, length = (at + 1, min(length + 1, LONGEST)) if foretold else (0, 0)
            text.append(token)
            end = len(text)
            for size, earlier in zip(self.sizes, self._earlier):
                known = 0
                if size <= end:
                    gram = tuple(text[end - size :])
                    known = latest.get(gram, 0)
                    latest[gram] = end
                earlier.append(known)
                if known and length < size:
                    at, length = known, size
        self._followed = at, length

    def matches(self, suffix: Sequence[int], before: int) -> list[Match]:
        """The latest occurrences of the longest known n-gram that ends ``suffix``, the most recent first.

        ``before``: only what ended in front of this position, so that a token followed.
        """
        for size, earlier in zip(reversed(self.sizes), reversed(self._earlier)):
            end = self._latest.get(tuple(suffix[-size:]), 0) if size <= len(suffix) else 0
            while end >= before:
                end = earlier[end]
            known: list[int] = []
            while end and len(known) < CANDIDATES:
                known.append(end)
                end = earlier[end]
            if known:
                longer = size == self.sizes[-1]  # of a shorter n-gram it is known that no longer one occurred
                return [(end, self._agreement(suffix, end, size) if longer else size) for end in known]
        return []

    def _agreement(self, suffix: Sequence[int], end: int, size: int) -> int:
        most = min(LONGEST, len(suffix), end)
        while size < most and self.tokens[end - size - 1] == suffix[-size - 1]:
            size += 1
        return min(size, LONGEST)


class CorpusRecord:
    """How far one text can trust a corpus: how often what it said of a next token came true, against its shares."""

    def __init__(self) -> None:
        self._right = self._said = CORPUS_WEIGHT
        self._open: tuple[int, int, float] | None = None  # position, token, share

    @property
    def factor(self) -> float:
        """What the corpus's shares are worth here, at most 1."""
        return min(1.0, self._right / self._said)

    def judge(self, tokens: Tensor, committed: int) -> None:
        """Counts the open claim once the token it was about is committed."""
        if self._open and self._open[0] < committed:
            position, token, share = self._open
            self._right += float(int(tokens[position]) == token)
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
            return Draft(limits.new_zeros(len(asked), 0), torch.zeros_like(limits), None)
        with self.clock.measure(self.name, 1, sequence.batch_size, max(lengths)):
            committed, stops = batch.committed.tolist(), batch.stop_ids.tolist()
            guesses = [
                self.guess(row, sequence.tokens[row], committed[row], lengths[row], limit, stop, stops[row])
                if limit
                else ([], [])
                for row, limit in enumerate(asked)
            ]
            width = max(len(tokens) for tokens, _ in guesses)
            counts = torch.tensor([len(tokens) for tokens, _ in guesses], device=limits.device)
            tokens = _padded([tokens for tokens, _ in guesses], width, torch.long, limits.device)
            sure = _padded([sure for _, sure in guesses], width, torch.float32, limits.device)
            if width:
                sequence.append(tokens, counts)
        return Draft(tokens, counts, None, sure)

    def guess(
        self,
        row: int,
        tokens: Tensor,
        committed: int,
        length: int,
        limit: int,
        stop: float = 0.0,
        stop_ids: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        """Up to ``limit`` tokens to follow the first ``length`` of ``tokens`` [capacity + 1], and how sure each is.

        The tokens before ``committed`` are indexed once and for all; a later call may ask about an earlier place, and
        then nothing behind that place is read.
        """
        index, record = self._rows[row], self._records[row]
        if len(index.tokens) < committed:
            index.extend(tokens[len(index.tokens) : committed].tolist())
        first = max(0, min(committed, length - self._reach))
        text = tokens[first:length].tolist()
        found: list[int] = []
        sure: list[float] = []
        live: list[Match] = []
        reached = 1.0
        while len(found) < limit:
            live = live or index.matches(text, committed)
            votes = [(_token(index, text, at, committed, first), agreed) for at, agreed in live]
            token, confidence = _winner(index, votes)
            if self._corpus is not None:
                other, share = self._corpus.next(text)
                if not found and length == committed:
                    record.judge(tokens, committed)
                    record.claim(length, other, share)
                if share * record.factor > confidence:
                    token, confidence = other, share * record.factor
            reached *= confidence
            if reached <= 0.0 or reached < self._floor:
                break
            found.append(token)
            sure.append(confidence)
            text.append(token)
            if confidence < stop or token in stop_ids:
                break
            live = [(at + 1, min(agreed + 1, LONGEST)) for (at, agreed), (vote, _) in zip(live, votes) if vote == token]
        return found, sure


def _token(index: TextIndex, text: list[int], at: int, committed: int, first: int) -> int:
    """The token at a position: from the index where it is committed, else from ``text``, which begins at ``first``."""
    return index.tokens[at] if at < committed else text[at - first]


def _winner(index: TextIndex, votes: list[tuple[int, int]]) -> tuple[int, float]:
    """The token with the most weight among (token, agreement), and its confidence; (-1, 0) without votes."""
    if not votes:
        return -1, 0.0
    best, longest = votes[0][0], max(agreed for _, agreed in votes)
    if all(token == best for token, _ in votes):
        return best, index.trust(longest)
    weights: dict[int, float] = {}
    weight = 1.0
    for token, agreed in votes:
        weights[token] = weights.get(token, 0.0) + weight * 2.0 ** (agreed - longest)
        weight *= RECENCY
    best = max(weights, key=weights.__getitem__)
    length = max(agreed for token, agreed in votes if token == best)
    return best, weights[best] / sum(weights.values()) * index.trust(length)


def _padded(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=dtype, device=device).view(len(rows), width)
