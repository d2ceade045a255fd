"""Drafting without a model: what followed the same words before, in this text or in a corpus."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from adaspec.decoding.drafter import Batch, Draft, Drafter

Gram = tuple[int, ...]
MAX_CANDIDATES = 32  # occurrences of one n-gram that are ranked, the most recent first


class NgramIndex:
    """Where each n-gram of one growing token sequence ended, for n in ``sizes``; every token is indexed once."""

    def __init__(self, sizes: range) -> None:
        self.sizes = sizes
        self.tokens: list[int] = []
        self._ends: dict[Gram, list[int]] = defaultdict(list)  # positions behind the n-gram, ascending

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size in self.sizes:
                if size <= end:
                    self._ends[tuple(self.tokens[end - size : end])].append(end)

    def continuation(self, suffix: Sequence[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens that followed the longest suffix found, [] when none was found.

        Among its occurrences the most frequent next token wins, the most recent on a tie; the most recent occurrence
        with that token is copied. A copy that reaches the end goes on with what it has copied (a repeating pattern).
        """
        for size in reversed(self.sizes):
            ends = self._ends.get(tuple(suffix[-size:])) if size <= len(suffix) else None
            known = [end for end in islice(reversed(ends or ()), MAX_CANDIDATES) if end < len(self.tokens)]
            if known:
                votes = Counter(self.tokens[end] for end in known)  # insertion order: the most recent first
                best = max(votes, key=votes.__getitem__)
                start = next(end for end in known if self.tokens[end] == best)
                period = len(self.tokens) - start
                return [self.tokens[start + step % period] for step in range(limit)]
        return []


class CorpusCounts:
    """The most frequent next token after each n-gram of a corpus.

    Args:
        tokens: the corpus as token ids.
        sizes: n-gram lengths used as contexts.
        min_count: how often the most frequent continuation must have occurred to be believed.
    """

    def __init__(self, tokens: Sequence[int], sizes: range = range(1, 5), min_count: int = 2) -> None:
        counts: dict[Gram, Counter[int]] = defaultdict(Counter)
        for end in range(1, len(tokens)):
            for size in sizes:
                if size <= end:
                    counts[tuple(tokens[end - size : end])][tokens[end]] += 1
        self._sizes = sizes
        self.longest = sizes[-1]
        self._best = {
            gram: token
            for gram, followers in counts.items()
            for token, count in followers.most_common(1)
            if count >= min_count
        }

    def continuation(self, suffix: Sequence[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens, each the most frequent after the longest known context."""
        text = list(suffix[-self._sizes[-1] :])
        found: list[int] = []
        while len(found) < limit:
            token = self._next(text)
            if token is None:
                break
            found.append(token)
            text.append(token)
        return found

    def _next(self, text: list[int]) -> int | None:
        for size in reversed(self._sizes):
            token = self._best.get(tuple(text[-size:])) if size <= len(text) else None
            if token is not None:
                return token
        return None


class LookupDrafter(Drafter):
    """Proposes what followed the longest matching suffix in prompt and generated text; costs no forward pass.

    Where the text has no match, ``corpus`` is asked if given. With neither it stays silent (an empty draft).

    Raises:
        ValueError: an empty or non-positive n-gram range.
    """

    def __init__(
        self, name: str, *, min_ngram: int = 2, max_ngram: int = 4, corpus: CorpusCounts | None = None
    ) -> None:
        super().__init__()
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"the n-gram range must satisfy 1 <= min <= max, got {min_ngram} .. {max_ngram}")
        self.name = name
        self._sizes = range(min_ngram, max_ngram + 1)
        self._corpus = corpus
        self._longest = max_ngram if corpus is None else max(max_ngram, corpus.longest)
        self._rows: list[NgramIndex] = []

    def start(self, batch_size: int, capacity: int) -> None:
        self._rows = [NgramIndex(self._sizes) for _ in range(batch_size)]

    def rollback(self, lengths: Tensor) -> None:
        """Nothing to do: only committed tokens are indexed."""

    def propose(self, batch: Batch, limits: Tensor) -> Draft:
        sequence = batch.sequence
        context = int(sequence.lengths.max())
        with self.clock.measure(self.name, 1, sequence.batch_size, context):
            found = [self._row(batch, index, limit) for index, limit in enumerate(limits.tolist())]
            counts = torch.tensor([len(tokens) for tokens in found], device=limits.device)
            width = max(map(len, found))
            padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
            tokens = torch.tensor(padded, dtype=torch.long, device=limits.device).view(len(found), width)
            counts = batch.cut(tokens, counts)
            sequence.append(tokens, counts)
        return Draft(tokens, counts, None)

    def _row(self, batch: Batch, row: int, limit: int) -> list[int]:
        if limit == 0:
            return []
        length, committed = int(batch.sequence.lengths[row]), int(batch.committed[row])
        return self.guess(row, batch.sequence.tokens[row], committed, length, limit)

    def guess(self, row: int, tokens: Tensor, committed: int, length: int, limit: int) -> list[int]:
        """Up to ``limit`` tokens to follow the first ``length`` of ``tokens`` [capacity + 1].

        Those before ``committed`` are indexed once and for all; calls for one row never go back behind them.
        """
        index = self._rows[row]
        index.extend(tokens[len(index.tokens) : committed].tolist())
        suffix = tokens[max(0, length - self._longest) : length].tolist()
        found = index.continuation(suffix, limit)
        return found if found or self._corpus is None else self._corpus.continuation(suffix, limit)
