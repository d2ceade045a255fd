"""Lookup drafters: what is proposed, from what, and never from tokens that are not committed."""

import pytest
import torch
from helpers import toy_chain
from hypothesis import given
from hypothesis import strategies as st

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Sequences
from adaspec.decoding.drafter import Batch
from adaspec.decoding.lookup import CorpusCounts, LookupDrafter, NgramIndex
from adaspec.decoding.sampling import GREEDY, Sampler
from adaspec.plan import Plan


def index_of(tokens, sizes=range(2, 4)):
    index = NgramIndex(sizes)
    index.extend(tokens)
    return index


def batch_of(*rows, stop=-1, capacity=40):
    sequence = TokenBuffer(len(rows), capacity)
    for row, tokens in enumerate(rows):
        sequence.tokens[row, : len(tokens)] = torch.tensor(tokens)
    sequence.lengths = torch.tensor([len(tokens) for tokens in rows])
    return Batch(sequence, Sampler([GREEDY]), torch.full((len(rows), 1), stop), sequence.lengths)


def started(rows, **options):
    drafter = LookupDrafter("lookup", **options)
    drafter.start(rows, 40)
    return drafter


def test_the_longest_match_wins_over_a_more_recent_shorter_one():
    assert index_of([1, 2, 3, 7, 9, 2, 3, 8]).continuation([1, 2, 3], 2) == [7, 9]
    assert index_of([1, 2, 3, 7, 9, 2, 3, 8]).continuation([0, 2, 3], 2)[0] == 8  # no longer one: the recent one


def test_the_most_frequent_next_token_wins_and_the_latest_on_a_tie():
    assert index_of([1, 2, 5, 1, 2, 5, 1, 2, 6]).continuation([1, 2], 1) == [5]
    assert index_of([1, 2, 5, 1, 2, 6]).continuation([1, 2], 1) == [6]


def test_a_copy_that_reaches_the_end_repeats_its_pattern():
    assert index_of([4, 5, 6, 4, 5]).continuation([4, 5], 7) == [6, 4, 5, 6, 4, 5, 6]


def test_no_match_gives_nothing():
    assert index_of([1, 2, 3]).continuation([2, 3], 4) == []  # it ends there, nothing followed
    assert index_of([1, 2, 3]).continuation([9, 9], 4) == []
    assert index_of([]).continuation([], 4) == []


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 30), max_size=3), st.integers(1, 6))
def test_every_proposal_begins_as_some_occurrence_went_on(tokens, cuts, limit):
    """Indexed in any portions, against a plain search for the longest suffix that occurred before."""
    index, at = NgramIndex(range(1, 4)), 0
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        index.extend(tokens[at:cut])
        at = cut
    found = index.continuation(tokens, limit)
    for size in (3, 2, 1):
        suffix = tokens[-size:]
        followers = [
            tokens[end]
            for end in range(size, len(tokens))
            if len(suffix) == size and tokens[end - size : end] == suffix
        ]
        if followers:
            assert len(found) == limit
            assert followers.count(found[0]) == max(map(followers.count, followers))
            return
    assert found == []


def test_a_corpus_gives_the_most_frequent_token_behind_the_longest_known_context():
    counts = CorpusCounts([1, 2, 3, 1, 2, 3, 9, 2, 4, 9, 2, 4, 9, 2, 4], sizes=range(1, 3))
    assert counts.continuation([1, 2], 2) == [3, 1] or counts.continuation([1, 2], 1) == [3]
    assert counts.continuation([7, 2], 1) == [4]  # after 2 alone, 4 is more frequent
    assert counts.continuation([8], 3) == []
    assert CorpusCounts([1, 2], min_count=2).continuation([1], 1) == []  # seen once is not believed


def test_a_batch_is_proposed_row_by_row_with_its_limits():
    batch = batch_of([1, 2, 3, 1, 2], [5, 6, 7], [8, 9, 8, 9], [1, 2, 1, 2])
    before = batch.sequence.lengths
    draft = started(4).propose(batch, torch.tensor([2, 4, 1, 0]))
    assert draft.law is None
    assert draft.counts.tolist() == [2, 0, 1, 0]
    assert batch.sequence.row(0)[5:] == draft.tokens[0, :2].tolist() == [3, 1]
    assert batch.sequence.row(2)[4:] == [8]
    assert (batch.sequence.lengths - before).tolist() == [2, 0, 1, 0]


def test_a_proposal_ends_at_a_stop_token():
    draft = started(1).propose(batch_of([1, 2, 3, 4, 1, 2], stop=3), torch.tensor([4]))
    assert draft.tokens[0, : int(draft.counts[0])].tolist() == [3]


def test_drafted_tokens_are_looked_up_but_not_learnt():
    batch = batch_of([1, 2, 3, 4, 9])
    drafter = started(1)
    batch.sequence.append(torch.tensor([[2, 3]]), torch.tensor([2]))  # drafted below, not committed
    assert drafter.propose(batch, torch.tensor([1])).tokens.tolist() == [[4]]
    batch.sequence.truncate(torch.tensor([5]))
    batch.sequence.append(torch.tensor([[7, 9, 2]]), torch.tensor([3]))
    batch.committed = batch.sequence.lengths
    assert drafter.propose(batch, torch.tensor([1])).counts.tolist() == [0]  # "9 2" went on in the draft only


def test_the_corpus_is_asked_where_the_text_is_silent():
    drafter = started(2, corpus=CorpusCounts([6, 7, 8, 6, 7, 8]))
    draft = drafter.propose(batch_of([1, 6, 7], [6, 7, 5, 6, 7]), torch.tensor([1, 1]))
    assert draft.tokens.tolist() == [[8], [5]]


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2), (-1, 1)])
def test_an_impossible_range_is_refused(low, high):
    with pytest.raises(ValueError, match=f"{low} .. {high}"):
        LookupDrafter("lookup", min_ngram=low, max_ngram=high)


def test_a_new_batch_forgets_the_old_text():
    chain = toy_chain(lookup=LookupDrafter("lookup", min_ngram=1))
    for _ in range(2):
        chain.start(Sequences(((1, 2),), (GREEDY,), (8,), ((),)))
        first = chain.round(Plan.parse("target/lookup:3"))
        assert first.outcome.edges[0].drafted[0] == 0
        while chain.running:
            chain.round(Plan.parse("target/lookup:3"))
