"""Streamed text: pieces join to the decoded text, stop strings cut, nothing leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from adaspec.decoding.text import ByteTable, Offsets, TextStream, token_bytes

CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "naïve café über",
    "日本語の文章です",
    "👩\u200d👩\u200d👧 family 👍🏽 thumbs",
]


class ByteLevel:
    """A byte-level BPE tokenizer: most characters outside its corpus are split into single bytes."""

    def __init__(self):
        self.inner = Tokenizer(models.BPE())
        self.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        self.inner.train_from_iterator(
            CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
        )

    def encode(self, text):
        return self.inner.encode(text).ids

    def decode(self, token_ids, *, skip_special_tokens):
        return self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids):
        return self.inner.id_to_token(ids)


class SentencePiece:
    """A vocabulary that writes what it does not know byte by byte, and one token that nobody can spell."""

    TOKENS = ("▁cat", "<0xE2>", "▁\ufffd")

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(" cat" if token == 0 else "\ufffd" for token in token_ids)

    def convert_ids_to_tokens(self, ids):
        return self.TOKENS[ids]


TOKENIZER = ByteLevel()
FRAGMENTS = st.sampled_from(
    ["the ", "cat", "日本", "é", "👩\u200d👩\u200d👧", "👍🏽", "\u200d", "\ufffd", "\n\n", "\U0001d518", " "]
)
STOPS = ("cat", "at", "the c", "日本", "\n\n", " ", "👍")
BOTH = pytest.mark.parametrize("table", [None, ByteTable(TOKENIZER.inner)], ids=["decoding", "by table"])
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=10).map("".join)


def stream(ids, stop=(), sizes=(1,), table=None):
    """Pieces, and how many tokens stay; the tokens arrive in groups of the given sizes, in turn."""
    text, pieces, at, turn = TextStream(TOKENIZER, stop, table), [], 0, 0
    while at < len(ids):
        group = ids[at : at + sizes[turn % len(sizes)]]
        kept = text.push(group)
        pieces.append(text.take())
        if kept is not None:
            return pieces, at + kept, text
        at, turn = at + len(group), turn + 1
    pieces.append(text.finish())
    return pieces, len(ids), text


@BOTH
@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_pieces_join_to_the_decoded_text(table, text, sizes):
    pieces, _, done = stream(TOKENIZER.encode(text), sizes=sizes, table=table)
    assert "".join(pieces) == text
    assert done.text == text


@BOTH
@given(ids=st.lists(st.integers(0, 255), max_size=24))
def test_pieces_of_any_tokens_join_to_what_the_tokenizer_decodes(table, ids):
    """Also of tokens that are no valid UTF-8."""
    pieces, _, _ = stream(ids, table=table)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=True)


@BOTH
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_no_piece_holds_half_a_character(table, text):
    pieces, _, _ = stream(TOKENIZER.encode(text), table=table)
    assert not any("\ufffd" in piece for piece in pieces)


@BOTH
@given(text=TEXTS, stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string(table, text, stop):
    ids = TOKENIZER.encode(text)
    pieces, kept, done = stream(ids, stop, table=table)
    found = [at for at in map(text.find, stop) if at >= 0]
    assert done.stopped == bool(found)
    cut = "".join(pieces)
    if not found:
        assert cut == text
        return
    assert not any(word in cut for word in stop)
    assert text.startswith(cut)
    # the first stop string to be complete decides; without overlaps that is the first one
    assert min(found) <= len(cut) <= min(at + len(word) for word in stop if (at := text.find(word)) >= 0)
    assert any(text.startswith(word, len(cut)) for word in stop)
    whole = TOKENIZER.decode(ids[:kept], skip_special_tokens=True)
    assert any(word in whole for word in stop)
    before = TOKENIZER.decode(ids[: kept - 1], skip_special_tokens=True)
    if table or not before.endswith("\ufffd"):  # by decoding, a character that has begun is waited for
        assert not any(word in before for word in stop)


def test_a_table_is_for_byte_level_vocabularies_that_tidy_nothing_up():
    """Special tokens add nothing, and added ones what they are, also those that no byte-level vocabulary spells."""
    real = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(TOKENIZER.inner.to_str()), eos_token="<end>")
    real.add_tokens(["日本!", "\ufffd"])
    real.clean_up_tokenization_spaces = False
    table = ByteTable.of(real)
    ids = [*real.encode("the cat <end>日本!日本\ufffd"), real.eos_token_id, *real.encode("👍")[:-1]]
    text = TextStream(real, (), table)
    text.push(ids)
    assert text.take() + text.finish() == real.decode(ids, skip_special_tokens=True)
    assert table[real.eos_token_id] == table[len(real) + 5] == b""
    real.clean_up_tokenization_spaces = True
    assert ByteTable.of(real) is None
    real.clean_up_tokenization_spaces = False
    real.backend_tokenizer.decoder = decoders.Metaspace()
    assert ByteTable.of(real) is None
    assert ByteTable.of(TOKENIZER) is None


def test_a_stop_string_across_tokens_is_held_back_until_it_is_certain():
    text = TextStream(TOKENIZER, ["sat on"])
    ids = [TOKENIZER.encode(letter)[0] for letter in "cat sat of"]
    pieces = [(text.push([token]), text.take())[1] for token in ids]
    assert pieces[:5] == ["c", "a", "t", " ", ""]
    assert pieces[-2:] == ["", "sat of"]
    assert text.finish() == ""


def test_overlapping_stop_strings_cut_at_the_first_to_begin():
    ids = [TOKENIZER.encode(letter)[0] for letter in "xabcd"]
    assert "".join(stream(ids, ["abc", "bcd"])[0]) == "x"
    assert "".join(stream(ids, ["bc", "abcd"])[0]) == "xa"  # "bc" is complete first


def test_a_group_of_tokens_is_cut_inside():
    ids = [TOKENIZER.encode(letter)[0] for letter in "one.two.three"]
    text = TextStream(TOKENIZER, ["."])
    assert text.push(ids) == 4
    assert text.take() + text.finish() == "one"


def test_finish_hands_out_what_was_held_back():
    text = TextStream(TOKENIZER, ["never"])
    ids = TOKENIZER.encode("ne") + TOKENIZER.encode("🦜")[:-1]
    text.push(ids)
    assert text.take() == ""
    assert text.finish() == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert text.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string"):
        TextStream(TOKENIZER, ["a", ""])


@given(TEXTS)
def test_the_bytes_of_tokens_join_to_the_text(text):
    joined = [byte for token in TOKENIZER.encode(text) for byte in token_bytes(TOKENIZER, token)]
    assert bytes(joined) == text.encode()


@given(TEXTS)
def test_a_token_stands_where_its_first_character_does(text):
    offsets, seen = Offsets(TOKENIZER), 0
    for token in TOKENIZER.encode(text):
        assert offsets.place(token) == len(text.encode()[:seen].decode(errors="ignore"))
        seen += len(token_bytes(TOKENIZER, token))


@given(st.lists(st.integers(0, 255), max_size=24))
def test_offsets_of_any_tokens_rise_within_the_text(ids):
    """Also of tokens that are no valid UTF-8."""
    offsets = Offsets(TOKENIZER)
    found = [offsets.place(token) for token in ids]
    assert found == sorted(found)
    assert all(0 <= at <= len(TOKENIZER.decode(ids, skip_special_tokens=True)) for at in found)


def test_offsets_know_no_special_tokens_and_no_space_that_decoding_drops():
    class Stripping(SentencePiece):
        """Token 3 is special; the first space is dropped, as SentencePiece's is."""

        def decode(self, token_ids, *, skip_special_tokens):
            kept = [token for token in token_ids if token != 3 or not skip_special_tokens]
            return super().decode(kept, skip_special_tokens=True).removeprefix(" ")

    offsets = Offsets(Stripping())
    assert [offsets.place(token) for token in (3, 0, 0, 3, 0, 3)] == [0, 0, 3, 7, 7, 11]  # of "cat cat cat"


def test_bytes_that_a_vocabulary_spells_out_or_does_not_tell():
    spelt = [token_bytes(SentencePiece(), token) for token in range(3)]
    assert spelt == [list(b" cat"), [0xE2], None]
