"""A model in C drafts a greedy window in one call, the one that single passes would draft."""

from functools import partial

import pytest
import torch
from tiny_models import tiny

from adaspec.decoding.batch import one_by_one
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.drafter import ModelDrafter
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.model import Model
from adaspec.decoding.native.model import NativeCopy, NativeModel
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan

PROMPTS = ((5, 6, 7, 11, 3, 9, 4), (8, 9, 4), (20, 3, 20, 3))


def drafting(kind="llama", params=GREEDY, vocab_size=None, precision="fp16"):
    """A drafter in C behind prompts of different length, and their chain."""
    target, model = Model("target", tiny(kind), vocab_size), NativeModel("draft", tiny(kind), precision, vocab_size)
    chain = Chain(target, {"draft": model}, capacity=64)
    chain.prepare([Plan.parse("target/draft:6")])
    chain.start(Sequences(PROMPTS, (params,) * 3, (20,) * 3, ((),) * 3))
    return ModelDrafter(model), chain


def singly(drafter, batch, limits, stop):
    """The same window pass by pass."""
    return one_by_one(
        batch, limits, stop, limits > 0, lambda first, active: drafter.model.logits(batch.sequence, first, 1, active)
    )


@pytest.mark.parametrize("vocab_size", [None, 24, 80])
@pytest.mark.parametrize("stop", [0.0, 0.02, 0.4])
@pytest.mark.parametrize("limits", [(5, 5, 5), (1, 6, 3), (0, 4, 2), (0, 0, 0)])
def test_a_window_in_one_call_is_that_of_single_passes(limits, stop, vocab_size):
    """Ragged limits, stop tokens, early ends, a vocabulary cut or filled up; and again after what was rejected."""
    once, chain = drafting(vocab_size=vocab_size)
    other, beside = drafting(vocab_size=vocab_size)
    drafts = []
    for turn in range(3):
        ends = torch.full((3, 2), -1)
        ends[1, 0] = drafts[0].tokens[1, 1] if turn and drafts[0].tokens.shape[1] > 1 else -1
        for each in (chain, beside):
            each._batch.stop_ids = ends
        found = once.propose(chain._batch, torch.tensor(limits), stop)
        wanted = singly(other, beside._batch, torch.tensor(limits), stop)
        assert found.counts.tolist() == wanted.counts.tolist()
        assert found.law is None
        for row, count in enumerate(wanted.counts.tolist()):
            assert found.tokens[row, :count].tolist() == wanted.tokens[row, :count].tolist()
            assert chain._batch.sequence.row(row) == beside._batch.sequence.row(row)
        assert once.model.lengths.tolist() == other.model.lengths.tolist()
        passes = [[one.query_len for one in each._clock.drain()[0]] for each in (chain, beside)]
        assert passes[0] == passes[1]
        drafts.append(found)
        for each, drafter in ((chain, once), (beside, other)):
            sequence = each._batch.sequence
            sequence.truncate(sequence.lengths - found.counts + found.counts.clamp(max=turn))
            drafter.rollback((sequence.lengths - 1).clamp(min=0))
    assert stop or not any(limits) or any(int(draft.counts.max()) > 1 for draft in drafts)


def test_it_is_one_call(monkeypatch):
    drafter, chain = drafting()
    single = []
    feed = drafter.model._feed
    monkeypatch.setattr(drafter.model, "_feed", lambda *given, **more: single.append(0) or feed(*given, **more))
    drafter.propose(chain._batch, torch.tensor([4, 4, 4]))
    assert len(single) <= 2  # the prompt and the first token


@pytest.mark.parametrize("params", [SamplingParams(0.7, seed=1), SamplingParams(repetition_penalty=50.0)])
def test_what_is_not_the_largest_logit_goes_token_by_token(params):
    drafter, chain = drafting(params=params)
    drafter.model._greedy = None  # would raise
    assert drafter.propose(chain._batch, torch.tensor([3, 3, 3])).counts.tolist() == [3, 3, 3]


def test_states_are_kept_of_every_position():
    """Where a feature drafter reads the model, windows go token by token."""
    drafter, chain = drafting()
    drafter.model.tap((1,))
    drafter.propose(chain._batch, torch.tensor([4, 4, 4]))
    lengths = drafter.model.lengths
    assert (drafter.model.features((1,), lengths - 1, 1).abs().sum((1, 2)) > 0).all()


def test_a_copy_over_the_targets_cache_drafts_the_same():
    texts = []
    for whole in (True, False):
        target = NativeModel("target", tiny("llama"), "fp16")
        copy = NativeCopy("int8", tiny("llama"), "int8", target, None)
        if not whole:
            copy.draft = partial(LanguageModel.draft, copy)
        chain = Chain(target, {"int8": copy}, capacity=64)
        chain.start(Sequences(PROMPTS, (GREEDY,) * 3, (24,) * 3, ((),) * 3))
        accepted = [chain.round(Plan.parse("target/int8:4")).outcome.edges[0].accepted for _ in range(4)]
        texts.append((accepted, [chain._batch.sequence.row(row) for row in range(3)]))
    assert texts[0] == texts[1]
