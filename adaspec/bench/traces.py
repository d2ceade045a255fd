"""What a set of models does on some prompts, as counts and seconds: enough to replay any plan, and no text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adaspec.theory import Edge, Floats

Ints: TypeAlias = NDArray[np.int64]
FORMAT, VERSION = "adaspec.trace", 1
LONGEST = 32  # proposals are followed this far


@dataclass(frozen=True, slots=True)
class Proposals:
    """What a drafter proposes to a verifier at every position of the target's own text.

    ``offered`` [positions]: tokens it would propose there, up to ``LONGEST``; 0 where it is silent.
    ``accepted`` [positions]: of those, how many the verifier would accept (greedy decoding); or None, and
    ``chance`` [positions]: the probability that the next token is accepted, given all before it (sampled decoding).

    Raises:
        ValueError: not exactly one of accepted and chance, or arrays of different lengths.
    """

    offered: Ints
    accepted: Ints | None = None
    chance: Floats | None = None

    def __post_init__(self) -> None:
        if (self.accepted is None) == (self.chance is None):
            raise ValueError("proposals hold either what is accepted or the chance of it")
        told = self.chance if self.accepted is None else self.accepted
        assert told is not None
        if told.shape != self.offered.shape:
            raise ValueError(f"one record per position, got {self.offered.shape} and {told.shape}")


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one pass of a model: [query lengths, cached lengths]."""

    query_lens: Ints
    seq_lens: Ints
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Trace:
    """A target's texts, position by position, and what its drafters would have done there.

    ``kinds``, ``prompts``, ``lengths`` [sequences]: kind of prompt, tokens of the prompt, tokens generated.
    ``pairs``: proposals per (verifier, drafter), over all sequences one after the other. In a pair without the
    target both are read along the target's text; behind a token that the target would reject that is an
    approximation, which only touches how many passes are spent on tokens that are lost anyway.
    ``curves``: seconds per model. ``lookups``: drafters that propose a window in one pass. ``note``: where it is from.
    """

    target: str
    kinds: tuple[str, ...]
    prompts: Ints
    lengths: Ints
    pairs: Mapping[Edge, Proposals]
    curves: Mapping[str, Curve]
    lookups: tuple[str, ...] = ()
    note: str = ""

    @property
    def positions(self) -> int:
        return int(self.lengths.sum())

    def save(self, path: Path) -> None:
        """Writes an ``.npz`` of plain arrays."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "target": self.target,
            "kinds": self.kinds,
            "lookups": self.lookups,
            "pairs": list(self.pairs),
            "models": list(self.curves),
            "note": self.note,
        }
        arrays: dict[str, NDArray[Any]] = {"prompts": self.prompts, "lengths": self.lengths}
        for index, own in enumerate(self.pairs.values()):
            arrays[f"offered{index}"] = own.offered.astype(np.uint8)
            if own.accepted is not None:
                arrays[f"accepted{index}"] = own.accepted.astype(np.uint8)
            else:
                arrays[f"chance{index}"] = np.asarray(own.chance, dtype=np.float16)
        for index, curve in enumerate(self.curves.values()):
            arrays |= {f"query_lens{index}": curve.query_lens, f"seq_lens{index}": curve.seq_lens}
            arrays[f"seconds{index}"] = curve.seconds.astype(np.float32)
        np.savez_compressed(path, allow_pickle=False, head=np.array(json.dumps(head)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Reads what ``save`` wrote.

        Raises:
            ValueError: a file of another format or version, or one whose arrays do not fit together.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls._of(json.loads(str(arrays["head"])), arrays)
        except (KeyError, TypeError, ValueError, EOFError) as error:
            raise ValueError(f"{path} is no trace that this adaspec reads: {error}") from None

    @classmethod
    def _of(cls, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Trace:
        if (head["format"], head["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {head['format']!r} version {head['version']!r}, not {FORMAT!r} {VERSION}")
        lengths = arrays["lengths"].astype(np.int64)
        pairs = {(str(v), str(d)): _proposals(arrays, index) for index, (v, d) in enumerate(head["pairs"])}
        for edge, own in pairs.items():
            if len(own.offered) != lengths.sum():
                raise ValueError(f"{len(own.offered)} positions of {'/'.join(edge)}, {lengths.sum()} in all")
        curves = {str(model): _curve(arrays, index) for index, model in enumerate(head["models"])}
        kinds, lookups = tuple(map(str, head["kinds"])), tuple(map(str, head["lookups"]))
        prompts = arrays["prompts"].astype(np.int64)
        return cls(str(head["target"]), kinds, prompts, lengths, pairs, curves, lookups, str(head["note"]))


def _proposals(arrays: Mapping[str, NDArray[Any]], index: int) -> Proposals:
    offered = arrays[f"offered{index}"].astype(np.int64)
    if f"accepted{index}" in arrays:
        return Proposals(offered, arrays[f"accepted{index}"].astype(np.int64))
    return Proposals(offered, chance=arrays[f"chance{index}"].astype(np.float64))


def _curve(arrays: Mapping[str, NDArray[Any]], index: int) -> Curve:
    query_lens, seq_lens = (arrays[f"{name}{index}"].astype(np.int64) for name in ("query_lens", "seq_lens"))
    seconds = arrays[f"seconds{index}"].astype(np.float64)
    if seconds.shape != (len(query_lens), len(seq_lens)):
        raise ValueError(f"seconds {seconds.shape} of {len(query_lens)} query and {len(seq_lens)} cached lengths")
    return Curve(query_lens, seq_lens, seconds)


def runs(matches: NDArray[np.bool_], lengths: Ints) -> Ints:
    """How many matches in a row begin at every position, within its sequence, up to ``LONGEST``; [positions]."""
    at, stop = np.arange(len(matches)), np.repeat(np.cumsum(lengths), lengths)
    wrong = np.flatnonzero(~matches)
    after = np.append(wrong, len(matches))[np.searchsorted(wrong, at)]
    counts: Ints = np.minimum(np.minimum(after, stop) - at, LONGEST)
    return counts
