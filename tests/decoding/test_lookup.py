"""Lookup drafters: what is proposed, how sure, from what, and never from tokens that are not committed."""

import pytest
import torch
from helpers import toy_chain
from hypothesis import given
from hypothesis import strategies as st

from adaspec.decoding.batch import Batch
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Sequences
from adaspec.decoding.corpus import CorpusIndex
from adaspec.decoding.lookup import LONGEST, LookupDrafter, TextIndex
from adaspec.decoding.sampling import GREEDY, Sampler
from adaspec.plan import Plan


def index_of(tokens, sizes=range(2, 4)):
    index = TextIndex(sizes)
    index.extend(tokens)
    return index


def batch_of(*rows, stop=-1, capacity=60):
    sequence = TokenBuffer(len(rows), capacity)
    for row, tokens in enumerate(rows):
        sequence.tokens[row, : len(tokens)] = torch.tensor(tokens)
    sequence.lengths = torch.tensor([len(tokens) for tokens in rows])
    return Batch(sequence, Sampler([GREEDY]), torch.full((len(rows), 1), stop), sequence.lengths)


def started(rows, *, floor=0.0, **options):
    drafter = LookupDrafter("lookup", floor=floor, **options)
    drafter.start(rows, 60)
    return drafter


def proposed(tokens, limit, *, stop=0.0, **options):
    """Tokens and confidences offered behind ``tokens``."""
    draft = started(1, **options).propose(batch_of(tokens), torch.tensor([limit]), stop)
    count = int(draft.counts[0])
    return draft.tokens[0, :count].tolist(), draft.confidence[0, :count].tolist()


def test_the_longest_match_wins_over_a_more_recent_shorter_one():
    assert proposed([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 2)[0] == [7, 9]
    assert proposed([1, 2, 3, 7, 9, 2, 3, 8, 0, 2, 3], 2)[0][0] == 8  # no longer one: the recent one


def test_the_most_frequent_next_token_wins_and_the_latest_on_a_tie():
    assert proposed([1, 2, 5, 1, 2, 5, 1, 2, 6, 0, 1, 2], 1, max_ngram=2)[0] == [5]
    assert proposed([1, 2, 5, 1, 2, 6, 0, 1, 2], 1, max_ngram=2)[0] == [6]


def test_among_longest_n_grams_the_one_with_more_agreement_before_it_wins():
    text = [7, 8, 9, 1, 2, 5, 0, 1, 2, 6, 3, 1, 2, 6, 7, 8, 9, 1, 2]
    assert proposed(text, 1, max_ngram=2)[0] == [5]  # against two that agree in no more than the pair


def test_a_copy_that_reaches_the_end_repeats_its_pattern():
    assert proposed([4, 5, 6, 4, 5], 7)[0] == [6, 4, 5, 6, 4, 5, 6]


def test_no_match_gives_nothing():
    assert proposed([1, 2, 3], 4)[0] == []  # it ends there, nothing followed
    assert proposed([1, 2, 3, 9, 9], 4)[0] == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=3))
def test_candidates_are_the_latest_occurrences_of_the_longest_known_suffix(tokens, cuts):
    """Indexed in any portions, asked about any place, against a plain search."""
    sizes = range(1, 4)
    index, at = TextIndex(sizes), 0
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        index.extend(tokens[at:cut])
        at = cut
    for before in {len(tokens), *(min(cut, len(tokens)) for cut in cuts)} - {0}:
        text = tokens[:before]
        wanted = []
        for size in reversed(sizes):
            ends = [end for end in range(size, before) if tokens[end - size : end] == text[-size:]]
            if ends and size <= before:
                wanted = [(end, _agreement(text, end)) for end in reversed(ends)][:8]
                break
        assert index.matches(text, before) == wanted


def _agreement(text, end):
    size = 0
    while size < min(end, LONGEST) and text[end - size - 1] == text[-size - 1]:
        size += 1
    return size


def defined(tokens, committed, length, limit, sizes, floor, stop):
    """What a lookup says by its definition: searched for, not indexed; trust recounted from the start."""
    right = [6.0 * (n + 1.0) / (n + 4.0) for n in range(LONGEST + 1)]
    tried, at, agreed = [6.0] * (LONGEST + 1), 0, 0
    for end in range(1, committed + 1):
        if agreed:
            same = tokens[at] == tokens[end - 1]
            tried[agreed] += 1.0
            right[agreed] += same
            at, agreed = (at + 1, min(agreed + 1, LONGEST)) if same else (0, 0)
        known = ends_of(tokens[:end], end, sizes)
        if known and agreed < known[0]:
            at, agreed = known[1][0], min(known[0], LONGEST)
    text, live, found, sure, reached = list(tokens[:length]), [], [], [], 1.0
    while len(found) < limit:
        live = live or [(end, _agreement(text, end)) for end in (ends_of(text, committed, sizes) or (0, []))[1][:8]]
        weights = {}
        for rank, (at, agreed) in enumerate(live):
            weights[text[at]] = weights.get(text[at], 0.0) + 0.9**rank * 2.0**agreed
        best = max(weights, key=weights.get, default=None)
        lengths = [agreed for at, agreed in live if text[at] == best]
        chance = weights[best] / sum(weights.values()) * right[max(lengths)] / tried[max(lengths)] if live else 0.0
        reached *= chance
        if not live or reached < floor:
            break
        found, sure, text = [*found, best], [*sure, chance], [*text, best]
        if chance < stop:
            break
        live = [(at + 1, min(agreed + 1, LONGEST)) for at, agreed in live if text[at] == best]
    return found, sure


def ends_of(text, before, sizes):
    """The longest known n-gram's size, and where it ended in front of ``before``, latest first."""
    for size in reversed(sizes):
        ends = [end for end in range(before - 1, size - 1, -1) if text[end - size : end] == text[-size:]]
        if ends and size <= len(text):
            return size, ends
    return None


@st.composite
def texts(draw):
    """A random text, or a repeated pattern with mistakes, of few tokens or many."""
    token = st.integers(0, draw(st.sampled_from((1, 3, 40))))
    if draw(st.booleans()):
        return draw(st.lists(token, min_size=1, max_size=60))
    pattern = draw(st.lists(token, min_size=1, max_size=12))
    text = (pattern * 60)[: draw(st.integers(1, 60))]
    for at in draw(st.lists(st.integers(0, len(text) - 1), max_size=4)):
        text[at] = draw(token)
    return text


@given(texts(), st.data())
def test_proposals_are_those_of_the_definition(tokens, data):
    """The same tokens and, to 1e-9, confidences, at places that follow one another, behind drafts or none."""
    sizes = data.draw(st.sampled_from((range(1, 3), range(2, 5), range(3, 4))))
    floor, stop = data.draw(st.sampled_from((0.0, 0.1, 0.5))), data.draw(st.sampled_from((0.0, 0.6)))
    drafter = started(1, min_ngram=sizes[0], max_ngram=sizes[-1], floor=floor)
    places = data.draw(st.lists(st.integers(1, len(tokens)), min_size=1, max_size=4))
    for committed in sorted(places):
        length, limit = data.draw(st.integers(committed, len(tokens))), data.draw(st.integers(1, 10))
        found, sure = drafter.guess(0, tokens, committed, tokens[committed:length], limit, stop)
        wanted, chances = defined(tokens, committed, length, limit, sizes, floor, stop)
        assert found == wanted
        assert sure == pytest.approx(chances, abs=1e-9)


def test_n_grams_longer_than_agreement_is_told_apart_are_indexed_too():
    tokens, sure = proposed(list(range(20)) * 2, 3, min_ngram=LONGEST + 2, max_ngram=LONGEST + 4)
    assert tokens == [0, 1, 2]
    assert min(sure) > 0.8


def test_trust_follows_how_often_the_text_has_repeated_itself():
    repeating = index_of([1, 2, 3, 4, 5] * 20)
    fooled = index_of([token for n in range(40) for token in (1, 2, 10 + n)])
    fresh = index_of([])
    assert repeating.trust(LONGEST) > 0.95 > fresh.trust(LONGEST)
    assert fooled.trust(2) < 0.15 < fresh.trust(2)
    assert [fresh.trust(length) for length in range(1, 17)] == sorted(fresh.trust(length) for length in range(1, 17))


def test_confidence_grows_along_a_copy_and_falls_with_dissent():
    copied = proposed([1, 2, 3, 4, 5, 6, 1, 2], 4)[1]
    assert copied == sorted(copied)
    assert len(set(copied)) == 4
    one = proposed([1, 2, 5, 9, 1, 2], 1, max_ngram=2)[1]
    two = proposed([1, 2, 5, 9, 1, 2, 6, 9, 1, 2], 1, max_ngram=2)[1]
    assert two < one


def test_stop_ends_behind_the_first_token_that_is_not_sure_enough_and_floor_before_it():
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    tokens, sure = proposed(text, 4)
    assert proposed(text, 4, stop=sure[1] - 1e-6) == (tokens[:1], sure[:1])  # token 0 is kept, though less sure
    assert proposed(text, 4, stop=sure[0] - 1e-6)[0] == tokens
    assert proposed(text, 4, floor=sure[0] + 0.001)[0] == []
    assert proposed(text, 4, floor=sure[0] * sure[1] - 1e-6)[0] == tokens[:2]
    assert proposed(text, 4, floor=sure[0] * sure[1] + 1e-6)[0] == tokens[:1]


def test_confidences_of_a_draft_are_those_of_the_guess_to_the_last_bit():
    """A hybrid compares them with a floor, and one that equals it is kept."""
    tokens = [1, 2, 5, 9, 1, 2, 6, 9, 1, 2, 5, 9, 1, 2]
    _, sure = proposed(tokens, 4)
    assert len(sure) == 4
    assert sure == started(1).guess(0, tokens, len(tokens), [], 4)[1]


def test_nothing_behind_the_place_asked_about_is_read():
    """An index that is ahead (two drafters share it) answers as one that is not, but for its record."""
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2, 5, 1, 2]
    drafter = started(1)
    drafter.guess(0, tokens, len(tokens), [], 3)
    for length in range(1, len(tokens)):
        assert drafter.guess(0, tokens, length, [], 3)[0] == started(1).guess(0, tokens[:length], length, [], 3)[0]


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
    corpus = CorpusIndex.build([6, 7, 8, 6, 7, 8, 6, 7, 8])
    draft = started(2, corpus=corpus).propose(batch_of([1, 6, 7], [6, 7, 5, 6, 7]), torch.tensor([1, 1]))
    assert draft.tokens[0].tolist() == [8]
    assert draft.counts.tolist() == [1, 1]


def test_the_surer_of_text_and_corpus_is_taken_and_the_text_is_asked_again_behind_it():
    corpus = CorpusIndex.build([6, 7, 8, 0] * 30)
    text = [8, 9, 3, 3, 6, 7, 5, 4, 6, 7]  # the text says 5 after 6 7, once; the corpus 8, always
    tokens, sure = proposed(text, 2, corpus=corpus, max_ngram=2, min_ngram=1)
    assert tokens == [8, 0]
    assert sure[0] > 0.9
    assert proposed(text, 2, max_ngram=2, min_ngram=1)[0] == [5, 4]
    weak = CorpusIndex.build([8, 6, 7, 1, 6, 7, 1, 6, 7, 2, 6, 7, 3, 6, 7, 4])  # after 6 7 mostly 1, not often
    tokens, _ = proposed([6, 7, 5, 4] * 8 + [6, 7], 1, corpus=weak)
    assert tokens == [5]


def test_a_corpus_that_is_wrong_in_a_text_loses_its_trust_and_one_that_is_right_keeps_it():
    corpus = CorpusIndex.build([6, 7, 8, 0] * 30)
    for following, trusted in ((5, False), (8, True)):
        text = [token for n in range(12) for token in (6, 7, following, 100 + n)]
        drafter = started(1, corpus=corpus, min_ngram=9, max_ngram=9)  # the corpus alone
        places = [at for at in range(2, len(text)) if text[at - 2 : at] == [6, 7]]
        said = {at: drafter.guess(0, text, at, [], 1) for at in places}
        assert [found for found, _ in said.values()] == [[8]] * len(said)
        sure = [confidence[0] for _, confidence in said.values()]
        assert sure[0] > 0.9
        assert sure == sorted(sure, reverse=True)
        assert (sure[-1] > 0.9) == trusted
        assert trusted or sure[-1] < 0.3


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2), (-1, 1)])
def test_an_impossible_range_is_refused(low, high):
    with pytest.raises(ValueError, match=f"{low} .. {high}"):
        LookupDrafter("lookup", min_ngram=low, max_ngram=high)


def test_an_impossible_floor_is_refused():
    with pytest.raises(ValueError, match=r"1\.5"):
        LookupDrafter("lookup", floor=1.5)


def test_a_new_batch_forgets_the_old_text():
    chain = toy_chain(lookup=LookupDrafter("lookup", min_ngram=1))
    for _ in range(2):
        chain.start(Sequences(((1, 2),), (GREEDY,), (8,), ((),)))
        first = chain.round(Plan.parse("target/lookup:3"))
        assert first.outcome.edges[0].drafted[0] == 0
        while chain.running:
            chain.round(Plan.parse("target/lookup:3"))
