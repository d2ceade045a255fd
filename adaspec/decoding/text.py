"""From tokens to text while they arrive: whole Unicode characters only, and nothing behind a stop string."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Spells(Decodes, Protocol):
    """A tokenizer that also tells how its vocabulary writes a token."""

    def convert_ids_to_tokens(self, ids: int) -> str: ...


_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that GPT-2's vocabulary writes as they are
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]  # the others, written from U+0100 on
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + at): byte for at, byte in enumerate(_HIDDEN)}
_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's


def token_bytes(tokenizer: Spells, token: int) -> list[int] | None:
    """The bytes of a token, which may be a part of a character; None where the vocabulary does not tell them."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return list(text.encode())
    written = tokenizer.convert_ids_to_tokens(token)
    one = _ONE_BYTE.fullmatch(written)
    return [int(one[1], 16)] if one else _spelt(written)


def _spelt(written: str) -> list[int] | None:
    """The bytes of a token of a byte-level vocabulary; None where it is written otherwise."""
    return [_BYTES[sign] for sign in written] if all(sign in _BYTES for sign in written) else None


class ByteTable:
    """The bytes of the tokens of a byte-level vocabulary, whose texts are those bytes joined; filled as it is asked."""

    def __init__(self, vocabulary: Tokenizer) -> None:
        self._vocabulary = vocabulary
        added = vocabulary.get_added_tokens_decoder()
        self._known = {token: b"" for token, of in added.items() if of.special}

    @classmethod
    def of(cls, tokenizer: Any) -> ByteTable | None:
        """That of a tokenizer of `transformers`; None where texts are put together in another way."""
        vocabulary: Any = getattr(tokenizer, "backend_tokenizer", None)
        tidies = getattr(tokenizer, "clean_up_tokenization_spaces", True)
        if tidies or not isinstance(vocabulary, Tokenizer) or not isinstance(vocabulary.decoder, ByteLevel):
            return None
        return cls(vocabulary)

    def __getitem__(self, token: int) -> bytes:
        """Of a token; none of a special one."""
        known = self._known.get(token)
        if known is None:
            spelt = _spelt(self._vocabulary.id_to_token(token) or "")
            known = self._vocabulary.decode([token]).encode() if spelt is None else bytes(spelt)
            self._known[token] = known
        return known


class Offsets:
    """Where the tokens of one row stand in its text, special tokens left out: in characters, one token at a time.

    A token that begins within a character stands where that character does. Told before later tokens are known: of
    bytes that are no text at all, one that could go on with a character is taken to do so.
    """

    def __init__(self, tokenizer: Spells) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the last settled text, as a context, and those after it
        self._context = 0  # of them
        self._known = 0  # characters of the context
        self._settled = 0  # characters of the text up to there
        self._tail = ""  # behind it
        self._open = 0  # where a character in the tail is not whole yet

    def place(self, token: int) -> int:
        """The offset of the next token."""
        self._ids.append(token)
        after = self._decode()[self._known :]
        offset = self._open if self._goes_on(token) else _alike(self._tail, after)
        found = self._settled + offset
        self._tail, self._open = after, offset + len(after[offset:].rstrip("\ufffd"))
        if after and not after.endswith("\ufffd"):
            self._settle()
        return found

    def _goes_on(self, token: int) -> bool:
        """Whether the token's first byte goes on with the character that the text broke off in."""
        spelt = token_bytes(self._tokenizer, token) if self._tail.endswith("\ufffd") else None
        return any(0x80 <= byte < 0xC0 for byte in (spelt or ())[:1])

    def _settle(self) -> None:
        self._settled += len(self._tail)
        self._ids = self._ids[self._context :]
        self._context, self._known, self._tail = len(self._ids), len(self._decode()), ""

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


class TextStream:
    """The text of one row. Pieces handed out join to the decoded text, cut before the first stop string.

    A character whose bytes are split over tokens is held back until it is whole, and so is anything that may be the
    beginning of a stop string.

    Args:
        tokenizer: decodes.
        stop: strings that end the text.
        table: of the tokenizer, if it has one: decoding is quicker by it, and the same.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = (), table: ByteTable | None = None) -> None:
        if any(not text for text in stop):
            raise ValueError("a stop string may not be empty")
        self._tokenizer, self._table = tokenizer, table
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._prefix = self._read = 0  # ids[prefix:read] is decoded text, the context of what follows
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> int | None:
        """Takes in tokens; returns how many of them stay if a stop string was completed by the last of these."""
        for count, token in enumerate(tokens, 1):
            self._advance(self._characters.decode(self._table[token]) if self._table else self._decode_new(token))
            if self.stopped:
                return count
        return None

    def take(self) -> str:
        """Text that became certain since the last call."""
        ready = len(self._held) if self.stopped else len(self._held) - self._uncertain()
        piece, self._held = self._held[:ready], self._held[ready:]
        self.text += piece
        return piece

    def finish(self) -> str:
        """The rest, once no token will follow; an unfinished character comes out as the tokenizer decodes it."""
        if not self.stopped:
            self._advance(self._characters.decode(b"", final=True) if self._table else self._decode_new())
        self.text += self._held
        piece, self._held = self._held, ""
        return piece

    def _decode_new(self, token: int | None = None) -> str:
        """The text that a token adds; None: that is left at the end."""
        if token is not None:
            self._ids.append(token)
        known = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and token is not None):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _advance(self, piece: str) -> None:
        self._held += piece
        found = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True

    def _uncertain(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = max((len(text) - 1 for text in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._stop):
                return size
        return 0
