"""A model in C verifies a greedy draft in one call, as the reference does pass by pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.native.model import NativeModel
from adaspec.decoding.sampling import GREEDY, Sampler

PROMPTS = ((5, 6, 7, 11, 3, 9, 4), (8, 9, 4), (20, 3, 20, 3))
WIDTH = 4


def model(**options):
    return NativeModel("target", tiny("llama"), "float32", **options)


def start(one, prompts=PROMPTS, ends=()):
    """The model behind all but the last token of each prompt, and the batch."""
    sequence = TokenBuffer(len(prompts), 32)
    for row, prompt in enumerate(prompts):
        sequence.tokens[row, : len(prompt)] = torch.tensor(prompt)
    sequence.lengths = torch.tensor([len(prompt) for prompt in prompts])
    stops = torch.tensor([ends or (-1,)] * len(prompts))
    batch = Batch(sequence, Sampler([GREEDY] * len(prompts)), stops, sequence.lengths)
    one.start(len(prompts), 32)
    one.catch_up(sequence, sequence.lengths - 1)
    return batch


def verdict(one, batch, drafts, limits, verify):
    """What becomes of drafted tokens, row by row: everything that a verification tells or leaves behind."""
    first, counts = batch.sequence.lengths, torch.tensor([len(row) for row in drafts])
    tokens = torch.tensor([[*row, *[0] * (WIDTH - len(row))] for row in drafts])
    batch.sequence.append(tokens, counts)
    found = verify(one, batch, Draft(tokens, counts, None), first, torch.tensor(limits))
    logits = found.logits()
    rows = []
    for row, count in enumerate(found.counts.tolist()):
        own = (found.tokens[row, :count].tolist(), count, int(found.kept[row]), int(one.lengths[row]))
        of = (int(found.accepted[row]), logits[row, : len(drafts[row]) + 1]) if limits[row] else (None, None)
        rows.append((own, batch.sequence.row(row), of))
    return rows


def both(one, drafts, limits, **options):
    return [
        verdict(one, start(one, **options), drafts, limits, verify)
        for verify in (NativeModel.verify, LanguageModel.verify)
    ]


def assert_alike(in_c, reference):
    for (own, text, (accepted, logits)), (wanted, same, (expected, exact)) in zip(in_c, reference, strict=True):
        assert own == wanted
        assert text == same
        assert accepted == expected
        assert logits is None or torch.equal(logits, exact)


@pytest.fixture(scope="module")
def target():
    return model()


@pytest.fixture(scope="module")
def own(target):
    """What the target itself goes on with, per prompt."""
    batch, found = start(target), []
    for _ in range(WIDTH + 1):
        nothing, lengths = Draft.none(batch.sequence.lengths), batch.sequence.lengths
        found.append(LanguageModel.verify(target, batch, nothing, lengths, torch.tensor([9] * 3)).tokens[:, 0].tolist())
    return list(zip(*found))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_is_the_verdict_of_the_reference(target, own, data):
    """Ragged drafts, right for a while, rows that take no part, and tokens that end a row."""
    drafts, limits = [], []
    for right in own:
        size, same = data.draw(st.integers(0, WIDTH)), data.draw(st.integers(0, WIDTH))
        takes_part = data.draw(st.booleans())
        wrong = data.draw(st.integers(0, 40))
        drafts.append([*right[:same], *[wrong] * WIDTH][: size if takes_part else 0])
        limits.append(size + 1 if takes_part else 0)
    ends = (data.draw(st.sampled_from(own[1])), data.draw(st.integers(0, 40)))
    assert_alike(*both(target, drafts, limits, ends=ends))


def test_a_right_draft_is_accepted_and_a_wrong_one_is_not(target, own):
    drafts = [list(own[0][:WIDTH]), [*own[1][:1], (own[1][1] + 1) % 40], []]
    rows = verdict(target, start(target), drafts, [9, 9, 9], NativeModel.verify)
    assert [accepted for *_, (accepted, _) in rows] == [WIDTH, 1, 0]
    assert [tuple(tokens) for (tokens, *_), *_ in rows] == [own[0], own[1][:2], own[2][:1]]


def test_nothing_follows_a_token_that_ends_a_row(target, own):
    end = own[0][1]
    (tokens, *_), *_ = verdict(
        target, start(target, ends=(end,)), [list(own[0][:WIDTH]), [], []], [9, 0, 0], NativeModel.verify
    )[0]
    assert tokens == list(own[0][: own[0].index(end) + 1])


@pytest.mark.parametrize("verify", [NativeModel.verify, LanguageModel.verify])
def test_where_no_row_takes_part_there_is_no_pass(target, verify):
    """A pass over nothing has no row whose logits could be read."""
    batch = start(target)
    target.clock.drain()
    rows = verdict(target, batch, [[], [], []], [0, 0, 0], verify)
    assert [tokens for (tokens, *_), *_ in rows] == [[], [], []]
    assert target.clock.drain()[0] == ()


def test_of_equal_logits_the_first_is_the_largest():
    """Also where two threads have found one each."""
    module = tiny("llama")
    torch.nn.init.zeros_(module.lm_head.weight)
    one, before = NativeModel("flat", module, "float32"), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows = verdict(one, start(one), [[0, 0], [0, 1], [1]], [3, 3, 3], NativeModel.verify)
            assert [tokens for (tokens, *_), *_ in rows] == [[0, 0, 0], [0, 0], [0]]
    finally:
        torch.set_num_threads(before)


def test_a_token_without_an_embedding_is_fed_as_the_last_one_that_has_one():
    """Two heads of one tokenizer differ in padding, so a prompt may hold ids that a smaller model lacks."""
    one = model(vocab_size=400)
    size = one.module.get_input_embeddings().num_embeddings
    assert_alike(*both(one, [[3, size + 5], [4], []], [3, 2, 1], prompts=((5, size + 90), (8, 9, 4), (size, size))))


def test_a_vocabulary_that_is_cut_leaves_the_rest_out():
    one = model(vocab_size=7)
    rows, reference = both(one, [[1, 2], [3], []], [3, 3, 3], prompts=((5, 6), (3, 4), (1, 2)))
    assert_alike(rows, reference)
    assert all(token < 7 for (tokens, *_), *_ in rows for token in tokens)
