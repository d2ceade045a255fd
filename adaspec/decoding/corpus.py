"""What follows what in a corpus: the most frequent next token of every n-gram, as a file that is mapped, not read.

The file: 8 bytes of magic, the length of the header (4 bytes, little-endian), the header (JSON), padding to 64 bytes;
then three arrays over the n-grams in the order of their keys: keys (uint64, a hash of the n-gram), tokens (uint32,
what followed most often) and shares (uint16, 65535 times how often it did). Two n-grams with one hash cost acceptance,
never exactness.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaspec.files import read_text

MAGIC = b"\x93ADASPEC"
VERSION = 1
SIZES = range(1, 5)
_ALIGN = 64
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_ARRAYS = (("keys", "<u8"), ("tokens", "<u4"), ("shares", "<u2"))

Progress = Callable[[str, float | None], None]
Array = NDArray[Any]


class HasVocabulary(Protocol):
    """What is needed of a tokenizer to tell it from others."""

    def get_vocab(self) -> Mapping[str, int]: ...


def identity(tokenizer: HasVocabulary) -> str:
    """A digest of the vocabulary: equal for tokenizers whose ids mean the same tokens."""
    items = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(items, ensure_ascii=True).encode()).hexdigest()


class CorpusIndex:
    """The most frequent next token after each n-gram of a corpus, with the share of its occurrences.

    Args:
        arrays: keys (ascending), tokens and shares; see the module.
        sizes: n-gram lengths used as contexts.
        header: what else is known of it.
    """

    def __init__(self, arrays: Mapping[str, Array], sizes: range, header: Mapping[str, Any] | None = None) -> None:
        self._keys, self._tokens, self._shares = (arrays[name] for name, _ in _ARRAYS)
        self._sizes = sizes
        self.longest = sizes[-1]
        self.header = dict(header or {})

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def build(
        cls,
        tokens: Sequence[int] | Array,
        sizes: range = SIZES,
        min_count: int = 2,
        tell: Progress = lambda what, share: None,
    ) -> CorpusIndex:
        """Counts a corpus of token ids.

        ``min_count``: how often the most frequent continuation must have occurred to be believed.
        """
        text = np.asarray(tokens, dtype=np.uint64)
        found: list[tuple[Array, Array, Array]] = []
        hashes = np.zeros(max(len(text) - 1, 0), dtype=np.uint64)  # of the n-gram that ends at each token but the last
        for size in range(1, sizes[-1] + 1):
            tell(f"count {size}-grams", (size - 1) / sizes[-1])
            hashes = _mixed(hashes[1:] if size > 1 else hashes, text[: max(len(text) - size, 0)])
            if size in sizes:
                found.append(_best(hashes, text[size:], min_count))
        columns = [np.concatenate(column) for column in zip(*found)]
        keys, first = np.unique(columns[0], return_index=True)
        arrays = {"keys": keys, "tokens": columns[1][first], "shares": columns[2][first]}
        return cls({name: arrays[name].astype(kind) for name, kind in _ARRAYS}, sizes)

    def next(self, text: Sequence[int]) -> tuple[int, float]:
        """The token to follow ``text`` by the longest known context, and its share; (-1, 0) if none is known."""
        key, keys = 0, []
        for size, token in enumerate(text[: -self.longest - 1 : -1], 1):
            key = ((key + token + 1) * _FACTOR) & _MASK
            key ^= key >> 29
            if size in self._sizes:
                keys.append(key)
        at = np.searchsorted(self._keys, np.array(keys, dtype=np.uint64)).tolist()
        for key, place in zip(reversed(keys), reversed(at)):
            if place < len(self._keys) and int(self._keys[place]) == key:
                return int(self._tokens[place]), int(self._shares[place]) / 65535
        return -1, 0.0

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Writes the index in one step: an interruption leaves what was there before. ``about`` joins the header."""
        header = {**about, "version": VERSION, "sizes": [self._sizes[0], self._sizes[-1]], "ngrams": len(self)}
        packed = json.dumps(header).encode()
        start = -(-(len(MAGIC) + 4 + len(packed)) // _ALIGN) * _ALIGN
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write((MAGIC + len(packed).to_bytes(4, "little") + packed).ljust(start, b"\0"))
                for array, (_, kind) in zip((self._keys, self._tokens, self._shares), _ARRAYS):
                    file.write(np.ascontiguousarray(array, dtype=kind).data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, tokenizer: HasVocabulary, vocab_size: int) -> CorpusIndex:
        """Maps an index that was written for this tokenizer.

        Raises:
            ValueError: a damaged file, another version, another tokenizer, or a token beyond ``vocab_size``.
        """
        header, start = _header(path)
        made_for = header.get("tokenizer", {})
        if made_for.get("identity") != identity(tokenizer):
            raise ValueError(f"the index {path} was made for the tokenizer of {made_for.get('name')}, not for this one")
        count, stored = header["ngrams"], np.memmap(path, dtype=np.uint8, mode="r")
        end = start + count * sum(np.dtype(kind).itemsize for _, kind in _ARRAYS)
        if end != len(stored):
            raise ValueError(f"the index {path} is damaged: it has {len(stored)} bytes, its header says {end}")
        arrays = {}
        for name, kind in _ARRAYS:
            stop = start + count * np.dtype(kind).itemsize
            arrays[name] = np.asarray(stored[start:stop]).view(kind)
            start = stop
        if count and int(arrays["tokens"].max()) >= vocab_size:
            raise ValueError(f"the index {path} is damaged: it holds a token beyond the vocabulary of {vocab_size}")
        return cls(arrays, range(header["sizes"][0], header["sizes"][1] + 1), header)


def is_index(path: Path) -> bool:
    """Whether a file is an index, by its first bytes."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_tokens(files: Iterable[Path], tokenizer: Any, tell: Progress) -> Array:
    """The token ids of text files, one behind the other.

    Raises:
        ValueError: a file that cannot be read or is no UTF-8 text, or no token in any.
    """
    paths = list(files)
    pieces = [np.zeros(0, dtype=np.uint32)]
    for done, path in enumerate(paths):
        tell(f"read {path.name}", done / len(paths))
        text = read_text(path, "the corpus", may_be_empty=True)
        pieces.append(np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.uint32))
    tokens = np.concatenate(pieces)
    if not len(tokens):
        raise ValueError(f"the corpus {', '.join(map(str, paths))} is empty")
    return tokens


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of an index file, and where its arrays begin."""
    with path.open("rb") as file:
        lead = file.read(len(MAGIC) + 4)
        size = int.from_bytes(lead[len(MAGIC) :], "little")
        packed = file.read(min(size, 2**20))
    try:
        header = json.loads(packed)
        version = header["version"]
        low, high = header["sizes"]
        sound = lead[: len(MAGIC)] == MAGIC and 1 <= low <= high and header["ngrams"] >= 0
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ValueError(f"the index {path} is damaged: its header cannot be read")
    if version != VERSION:
        raise ValueError(f"this adaspec reads version {VERSION} of an index, {path} has version {version!r}")
    return header, -(-(len(lead) + size) // _ALIGN) * _ALIGN


def _mixed(hashes: Array, tokens: Array) -> Array:
    """Takes the token in front of each n-gram into its hash; as in ``CorpusIndex.next``, modulo 2^64."""
    mixed = (hashes + tokens + np.uint64(1)) * np.uint64(_FACTOR)
    result: Array = mixed ^ (mixed >> np.uint64(29))
    return result


def _best(keys: Array, following: Array, min_count: int) -> tuple[Array, Array, Array]:
    """Per key the most frequent following token and 65535 times its share, where it occurred often enough.

    Seen n times of m its share is n / (m + 1): what was seen twice is believed less than what was seen often.
    """
    order = np.lexsort((following, keys))
    keys, following = keys[order], following[order]
    pairs = np.flatnonzero(_changes(keys) | _changes(following))
    counts = np.diff(np.append(pairs, len(keys)))
    keys, following = keys[pairs], following[pairs]
    order = np.lexsort((-counts, keys))
    keys, following, counts = keys[order], following[order], counts[order]
    first = np.flatnonzero(_changes(keys))
    totals = np.add.reduceat(counts, first) if len(first) else counts
    kept = counts[first] >= min_count
    shares = np.rint(65535 * counts[first] / (totals + 1))
    return keys[first][kept], following[first][kept], shares[kept]


def _changes(values: Array) -> NDArray[np.bool_]:
    """Where a value differs from the one before; the first always does."""
    changed = np.ones(len(values), dtype=np.bool_)
    changed[1:] = values[1:] != values[:-1]
    return changed
