"""The corpus index: what it counts, its file, and what it refuses."""

import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaspec.decoding import corpus
from adaspec.decoding.corpus import MAGIC, CorpusIndex, identity, is_index, read_tokens


class Words:
    """A tokenizer of whole words."""

    def __init__(self, *words):
        self.ids = {word: index for index, word in enumerate(words)}

    def get_vocab(self):
        return self.ids

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [self.ids[word] for word in text.split()]}


TOKENIZER = Words(*"abcdefgh")
TEXT = [0, 1, 2, 0, 1, 2, 0, 1, 3, 4, 0, 1, 2, 5, 5, 5]


def save(path, tokens=TEXT, tokenizer=TOKENIZER):
    about = {"tokenizer": {"identity": identity(tokenizer), "name": "abc"}}
    CorpusIndex.build(tokens).save(path, about)
    return path


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 3))
def test_the_index_gives_the_most_frequent_token_behind_the_longest_known_context(tokens, min_count):
    """Against counting with dictionaries; a tie may fall either way."""
    sizes = range(1, 4)
    index = CorpusIndex.build(tokens, sizes, min_count)
    counts = defaultdict(Counter)
    for end in range(1, len(tokens)):
        for size in sizes:
            if size <= end:
                counts[tuple(tokens[end - size : end])][tokens[end]] += 1
    for length in range(1, 4):
        for start in range(0, len(tokens) - length, 5):
            text = tokens[start : start + length]
            token, share = index.next(text)
            known = [
                counts[tuple(text[-size:])]
                for size in range(length, 0, -1)
                if max(counts[tuple(text[-size:])].values(), default=0) >= min_count
            ]
            if known:
                best = max(known[0].values())
                assert known[0][token] == best
                assert share == pytest.approx(best / (known[0].total() + 1), abs=1e-4)
            else:
                assert (token, share) == (-1, 0.0)


def test_a_short_corpus_is_no_error():
    for tokens in ([], [1], [1, 2], [1, 2, 3]):
        assert CorpusIndex.build(tokens).next([1]) == (-1, 0.0)
    assert CorpusIndex.build(TEXT).next([]) == (-1, 0.0)


def test_a_saved_index_answers_as_the_one_in_memory_and_is_mapped(tmp_path):
    path = save(tmp_path / "abc.index")
    assert is_index(path)
    loaded, built = CorpusIndex.load(path, TOKENIZER, 8), CorpusIndex.build(TEXT)
    assert len(loaded) == len(built) > 5
    for start in range(len(TEXT)):
        for stop in range(start, len(TEXT)):
            assert loaded.next(TEXT[start:stop]) == built.next(TEXT[start:stop])
    assert not loaded._keys.flags.owndata
    assert not loaded._keys.flags.writeable


def test_an_index_for_another_tokenizer_is_refused_by_name(tmp_path):
    path = save(tmp_path / "abc.index")
    with pytest.raises(ValueError, match="made for the tokenizer of abc"):
        CorpusIndex.load(path, Words(*"badcefgh"), 8)
    assert identity(Words("a", "b")) != identity(Words("b", "a"))
    assert identity(Words("a", "b")) == identity(Words("a", "b"))


def test_damaged_files_are_refused_in_one_line(tmp_path):
    path = save(tmp_path / "abc.index")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", whole[:20], MAGIC, MAGIC + b"\xff\xff\xff\xff{"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"abc\.index is damaged"):
            CorpusIndex.load(path, TOKENIZER, 8)
    path.write_bytes(whole.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(ValueError, match="has version 2"):
        CorpusIndex.load(path, TOKENIZER, 8)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="beyond the vocabulary of 3"):
        CorpusIndex.load(path, TOKENIZER, 3)


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = save(tmp_path / "abc.index")
    before = path.read_bytes()

    def broken(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus.np, "ascontiguousarray", broken)
    with pytest.raises(KeyboardInterrupt):
        save(path, [1, 2] * 50)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_header_is_readable_json(tmp_path):
    whole = save(tmp_path / "abc.index").read_bytes()
    size = int.from_bytes(whole[8:12], "little")
    assert json.loads(whole[12 : 12 + size])["version"] == 1


def test_files_are_read_one_behind_the_other_and_no_text_is_told(tmp_path):
    first, second = tmp_path / "one.txt", tmp_path / "two.txt"
    first.write_text("a b")
    second.write_text("c a")
    told = []
    tokens = read_tokens([first, second], TOKENIZER, lambda what, share: told.append((what, share)))
    np.testing.assert_array_equal(tokens, [0, 1, 2, 0])
    assert told == [("read one.txt", 0.0), ("read two.txt", 0.5)]
    second.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"two\.txt is no UTF-8"):
        read_tokens([second], TOKENIZER, lambda what, share: None)
