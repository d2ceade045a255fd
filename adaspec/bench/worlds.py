"""A world to decode in: for every position of a text what each drafter would get accepted, and what a pass costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from adaspec.bench.traces import LONGEST, Ints, Trace, runs
from adaspec.outcome import Pass
from adaspec.plan import PlanSpace
from adaspec.theory import Edge, Floats

CHUNK = 256  # positions in one pass while a model catches up


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one pass of a model: ``base[n]`` for n positions over all rows, plus ``cached`` per cached token."""

    base: Floats
    cached: float = 0.0

    @classmethod
    def line(cls, first: float, more: float, knee: int = 10**9, steep: float = 0.0, cached: float = 0.0) -> Speed:
        """``first`` for one position, ``more`` per further one, ``steep`` instead beyond ``knee`` positions."""
        n = np.arange(CHUNK + 1.0)
        extra = np.maximum(n - knee, 0.0) * max(steep - more, 0.0)
        return cls(first + more * np.maximum(n - 1.0, 0.0) + extra, cached)

    def seconds(self, positions: int, seq_len: float) -> float:
        return float(self.base[min(positions, CHUNK)]) + self.cached * seq_len


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of whole sequences of one character: positions [start, stop), tag, rows, factors on seconds."""

    start: int
    stop: int
    tag: str = ""
    rows: int = 1
    slower: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class World:
    """One realised text with everything that any plan would meet on it.

    ``pairs``: (offered, accepted) per position for every (verifier, drafter). ``left`` [positions]: tokens to go in
    the sequence, this one included. ``seq_len`` [positions]: tokens before it. With several rows the rows of a
    segment read its positions in turn, each from where the one before it ended.
    ``noise``, ``outliers``: standard deviation of the log of a pass's seconds, and the share of passes eight times
    as slow; both only blur what is measured, never what a choice is judged by.
    ``tagged``: whether a controller is told the tag.
    """

    target: str
    pairs: Mapping[Edge, tuple[Ints, Ints]]
    speeds: Mapping[str, Speed]
    lookups: frozenset[str]
    left: Ints
    seq_len: Ints
    segments: tuple[Segment, ...]
    noise: float = 0.05
    outliers: float = 0.02
    tagged: bool = False

    @property
    def positions(self) -> int:
        return len(self.left)

    def starts(self) -> Ints:
        """The first position of every sequence."""
        return np.flatnonzero(np.append(True, self.left[:-1] == 1))

    def catch_up(self, model: str, positions: int, seq_len: int, slower: float) -> float:
        """Seconds until a model has been fed ``positions`` tokens that end at ``seq_len``."""
        speed, full = self.speeds[model], positions // CHUNK
        spent = sum(speed.seconds(CHUNK, seq_len - positions + CHUNK * chunk) for chunk in range(full))
        rest = positions - full * CHUNK
        return slower * (spent + (speed.seconds(rest, seq_len - rest) if rest else 0.0))

    def profile(self, space: PlanSpace, rng: np.random.Generator, scale: Mapping[str, float]) -> list[Pass]:
        """What a start-up profile would show: three noisy passes of every shape that the space can ask for."""
        found = []
        for model, lengths in space.shapes().items():
            for query_len in sorted(lengths):
                noise = np.exp(self.noise * rng.standard_normal(3)) * scale.get(model, 1.0)
                spent = self.speeds[model].seconds(query_len, 32) * noise
                found += [Pass(model, query_len, 1, 32, float(seconds)) for seconds in spent]
        return found


def sequences(lengths: Sequence[int], prompts: Sequence[int]) -> tuple[Ints, Ints]:
    """(left, seq_len) of sequences one after the other; [positions] each."""
    left = np.concatenate([np.arange(length, 0, -1) for length in lengths])
    before = np.concatenate([prompt + np.arange(length) for prompt, length in zip(prompts, lengths)])
    return left, before


def replayed(trace: Trace, order: Sequence[int], seed: int, tagged: bool = False) -> World:
    """The world of a trace with its sequences in the given order; sampled acceptances are drawn once, by ``seed``."""
    ends = np.cumsum(trace.lengths)
    rows = np.concatenate([np.arange(ends[index] - trace.lengths[index], ends[index]) for index in order])
    lengths, rng = trace.lengths[list(order)], np.random.default_rng(seed)
    pairs = {}
    for edge, own in trace.pairs.items():
        if own.accepted is not None:
            pairs[edge] = (own.offered[rows], own.accepted[rows])
        else:
            assert own.chance is not None
            matches = rng.random(len(rows)) < own.chance[rows]
            pairs[edge] = (own.offered[rows], np.minimum(runs(matches, lengths), own.offered[rows]))
    left, seq_len = sequences(lengths.tolist(), trace.prompts[list(order)].tolist())
    speeds = {model: _speed(trace, model) for model in trace.curves}
    segments = _segments([trace.kinds[index] for index in order], lengths.tolist())
    lookups = frozenset(trace.lookups)
    return World(trace.target, pairs, speeds, lookups, left, seq_len, segments, tagged=tagged)


def _segments(kinds: Sequence[str], lengths: Sequence[int]) -> tuple[Segment, ...]:
    """Neighbouring sequences of one kind make a segment."""
    found: list[Segment] = []
    at = 0
    for kind, length in zip(kinds, lengths):
        if found and found[-1].tag == kind:
            found[-1] = Segment(found[-1].start, at + length, kind)
        else:
            found.append(Segment(at, at + length, kind))
        at += length
    return tuple(found)


def _speed(trace: Trace, model: str) -> Speed:
    """Per query length the seconds at no cached token, and one price per cached token for all of them."""
    curve = trace.curves[model]
    mean, seq_lens = curve.seconds.mean(axis=1, keepdims=True), curve.seq_lens - curve.seq_lens.mean()
    cached = float(((curve.seconds - mean) * seq_lens).sum() / max((seq_lens**2).sum() * len(mean), 1.0))
    cached = max(cached, 0.0)
    flat = np.maximum(mean[:, 0] - cached * curve.seq_lens.mean(), 0.1 * mean[:, 0])
    n = np.arange(CHUNK + 1.0)
    base = np.interp(n, curve.query_lens, flat)
    beyond = n > curve.query_lens[-1]
    if len(flat) > 1 and beyond.any():
        slope = max(flat[-1] - flat[-2], 0.0) / (curve.query_lens[-1] - curve.query_lens[-2])
        base[beyond] += slope * (n[beyond] - curve.query_lens[-1])
    return Speed(base, cached)


__all__ = ["CHUNK", "LONGEST", "Segment", "Speed", "World", "replayed", "sequences"]
