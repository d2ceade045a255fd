"""Behind a feature drafter the joint law is the target's own; chi-square over 100,000 rows, p > 1e-4."""

import dataclasses
from functools import partial

import pytest
import torch
from feature_toys import native_head, seeing_chain, toy_head
from helpers import PROMPT, VOCAB, count, draw, joint_law, p_value, play, toy_batch

from adaspec.decoding.batch import Batch
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Sequences
from adaspec.decoding.feature import FeatureDrafter
from adaspec.decoding.native.head import NativeFeatureDrafter
from adaspec.decoding.sampling import GREEDY, Sampler, SamplingParams
from adaspec.plan import Plan

HOLDS, DRAWS = 1e-4, 100_000
FREE = SamplingParams(temperature=1.0, seed=30_000_000)
ALL = SamplingParams(temperature=0.9, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=1.4, seed=40_000_000)
HEADS = {"torch": toy_head, "native": native_head}
TARGET = seeing_chain().target.table.numpy()


@pytest.mark.parametrize("kept", [None, (0, 2, 3)], ids=["whole head", "reduced head"])
@pytest.mark.parametrize("plan", ["target/head:1", "target/head:3", "target/head:3?0.4", "target/a/head:4,2"])
@pytest.mark.parametrize("head", HEADS)
def test_the_law_is_the_targets(plan, kept, head):
    chain = seeing_chain(head=HEADS[head](kept=kept))
    assert p_value(draw(chain, Plan.parse(plan), 3, FREE, extra=2, draws=DRAWS), joint_law(TARGET, 3, FREE)) > HOLDS


@pytest.mark.parametrize("kept", [None, (1, 3)], ids=["whole head", "reduced head"])
@pytest.mark.parametrize("head", [*HEADS, "wide"])
def test_the_law_holds_with_everything_on_and_a_stop_token_inside_windows(kept, head):
    chain = seeing_chain(head=toy_head(kept=kept, wide=True) if head == "wide" else HEADS[head](kept=kept))
    law = joint_law(TARGET, 3, ALL, stop=3)
    assert p_value(draw(chain, Plan.parse("target/head:3"), 3, ALL, stop=3, draws=DRAWS), law) > HOLDS


@pytest.mark.parametrize("own_history", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_the_law_holds_when_plans_change_with_what_was_accepted(own_history, head):
    chain = seeing_chain(head=HEADS[head](kept=(0, 1, 3)), inner=HEADS[head]("inner", seed=1))
    plans = [Plan.parse(text) for text in ("target/head:2", "target/a/inner:3,2", "target", "target/b:2")]
    counts = draw(chain, plans, 3, FREE, own_history=own_history, draws=DRAWS)
    assert p_value(counts, joint_law(TARGET, 3, FREE)) > HOLDS


@pytest.mark.parametrize("head", HEADS)
def test_rows_of_different_length_each_have_the_law(head):
    prompts = (PROMPT, (0, 3, 1), (2, 2, 0, 1))
    chain, batch = seeing_chain(head=HEADS[head](kept=(0, 1, 2))), toy_batch(FREE, 90_000, 4, prompts=prompts)
    tokens = play(chain, Plan.parse("target/head:2"), batch, 2, extra=2)
    for index, prompt in enumerate(prompts):
        law = joint_law(TARGET, 2, FREE, prompt=prompt)
        assert p_value(count(tokens[index :: len(prompts)], 2), law) > HOLDS


class Leaky:
    """Claims a little probability for the tokens that its head does not have."""

    def propose(self, batch, limits, stop=0.0):
        draft = super().propose(batch, limits)
        return draft if draft.law is None else dataclasses.replace(draft, law=0.8 * draft.law + 0.2 / VOCAB)


class Cold:
    """Records the law at another temperature than it draws at."""

    def propose(self, batch, limits, stop=0.0):
        draft = super().propose(batch, limits)
        if draft.law is None:
            return draft
        return dataclasses.replace(draft, law=torch.softmax(1.5 * draft.law.clamp(min=1e-9).log(), -1))


class Misplaced:
    """Names its tokens by the rows of its head, but its law by the tokens they stand for."""

    def propose(self, batch, limits, stop=0.0):
        draft = super().propose(batch, limits)
        return draft if draft.law is None else dataclasses.replace(draft, law=draft.law.roll(1, -1))


@pytest.mark.parametrize("mutant", [Leaky, Cold, Misplaced])
@pytest.mark.parametrize(("head", "cls"), [("torch", FeatureDrafter), ("native", NativeFeatureDrafter)])
def test_a_wrong_law_is_found(mutant, head, cls):
    chain = seeing_chain(head=HEADS[head](kept=(0, 2, 3), cls=type("Wrong", (mutant, cls), {})))
    assert (
        p_value(draw(chain, Plan.parse("target/head:3"), 3, FREE, extra=2, draws=DRAWS), joint_law(TARGET, 3, FREE))
        < 1e-9
    )


def test_some_drafts_are_accepted_and_some_are_not():
    """Else the laws above would prove little."""
    chain = seeing_chain(head=toy_head(kept=(0, 2, 3)))
    chain.start(Sequences((PROMPT,) * 50, tuple(SamplingParams(1.0, seed=s) for s in range(50)), (9,) * 50, ((),) * 50))
    edge = chain.round(Plan.parse("target/head:3")).outcome.edges[0]
    assert 0.2 < edge.accepted[0] / edge.offered[0] < 0.8
    assert edge.accepted[1] > 0


def fresh(text, drafter, seed):
    """A draft of three tokens behind ``text`` by a drafter that has seen nothing."""
    chain = seeing_chain(head=drafter)
    chain.prepare([Plan.parse("target/head:3")])
    sequence = TokenBuffer(1, 40)
    sequence.append(torch.tensor([text]), torch.tensor([len(text)]))
    batch = Batch(sequence, Sampler([SamplingParams(1.0, seed=seed)]), torch.full((1, 1), -1), sequence.lengths)
    chain.begin(batch)
    return drafter.propose(batch, torch.tensor([3]))


@pytest.mark.parametrize("plan", ["target/head:3", "target/a/head:4,2"])
@pytest.mark.parametrize(
    "make", [toy_head, partial(toy_head, wide=True), native_head], ids=["narrow", "wide", "native"]
)
def test_a_draft_depends_on_the_text_alone(plan, make):
    """After any rounds it is what a drafter without a past would draft: predicted states are gone, rows kept apart."""
    drafter, plan = make(), Plan.parse(plan)
    chain = seeing_chain(head=drafter)
    prompts = (PROMPT, (0, 3, 1), (2, 2, 0, 1))
    chain.start(Sequences(prompts, tuple(SamplingParams(1.0, seed=s) for s in range(3)), (25,) * 3, ((),) * 3))
    verifier = chain.members[plan.models[-2]]
    for turn in range(4):
        chain.round(plan if turn != 2 else Plan(("target",)))
        batch = chain._batch
        lengths = batch.sequence.lengths
        batch.committed = lengths
        batch.sampler = Sampler([SamplingParams(1.0, seed=100 + turn)] * 3)
        draft = drafter.propose(batch, torch.tensor([3, 3, 3]))
        batch.sequence.truncate(lengths)
        for row in range(3):
            other = make()
            if plan.depth == 3:
                other_chain = seeing_chain(head=other)
                other_chain.prepare([plan])
                sequence = TokenBuffer(1, 40)
                text = batch.sequence.row(row)
                sequence.append(torch.tensor([text]), torch.tensor([len(text)]))
                own = Batch(sequence, Sampler([SamplingParams(1.0, seed=100 + turn)]), torch.full((1, 1), -1), None)
                own.committed = sequence.lengths
                other_chain.begin(own)
                wanted = other.propose(own, torch.tensor([3]))
            else:
                wanted = fresh(batch.sequence.row(row), other, 100 + turn)
            torch.testing.assert_close(draft.law[row], wanted.law[0], atol=1e-5, rtol=1e-4)
        assert bool((verifier.lengths < lengths).all())
        drafter.rollback(lengths - 1)


def test_another_verifier_is_refused():
    chain = seeing_chain(head=toy_head())
    chain.prepare([Plan.parse("target/head:3"), Plan.parse("target/head:5")])
    with pytest.raises(ValueError, match="head drafts for target, it cannot draft for a"):
        chain.prepare([Plan.parse("target/a/head:3,2")])


def test_a_verifier_without_features_is_refused():
    with pytest.raises(ValueError, match="b shows no hidden states"):
        seeing_chain(head=toy_head()).prepare([Plan.parse("target/b/head:3,2")])


@pytest.mark.parametrize("head", HEADS)
def test_a_prompt_of_one_token_is_decoded_before_anything_is_drafted(head):
    chain = seeing_chain(head=HEADS[head]())
    chain.start(Sequences(((1,), PROMPT), (GREEDY,) * 2, (6, 6), ((), ())))
    edge = chain.round(Plan.parse("target/head:2")).outcome.edges[0]
    assert edge.drafted[0] == 1
    assert chain.round(Plan.parse("target/head:2")).outcome.edges[0].drafted[0] == 2


@pytest.mark.parametrize("head", HEADS)
def test_passes_are_timed_under_its_own_name(head):
    chain = seeing_chain(head=HEADS[head]())
    chain.start(Sequences((PROMPT,), (GREEDY,), (12,), ((),)))
    chain.round(Plan.parse("target/head:3"))
    passes = [each for each in chain.round(Plan.parse("target/head:3")).outcome.passes if each.model == "head"]
    assert len(passes) == 3
    assert [each.query_len for each in passes][1:] == [1, 1]


@pytest.mark.parametrize("head", HEADS)
def test_it_goes_on_behind_tokens_that_another_drafter_put_there(head):
    """The verifier is not fed drafts: behind them the drafter works from its own predicted states."""
    drafter = HEADS[head]()
    chain = seeing_chain(head=drafter)
    chain.prepare([Plan.parse("target/head:3")])
    chain.start(Sequences((PROMPT, (0, 3, 1)), (GREEDY,) * 2, (20, 20), ((), ())))
    batch = chain._batch
    own = drafter.propose(batch, torch.tensor([4, 4]))
    start = batch.sequence.lengths - own.counts
    batch.sequence.truncate(start + torch.tensor([2, 0]))
    rest = drafter.propose(batch, torch.tensor([2, 4]))
    assert rest.tokens[0, :2].tolist() == own.tokens[0, 2:].tolist()
    assert rest.tokens[1].tolist() == own.tokens[1].tolist()
    assert chain.target.lengths.tolist() == (start - 1).tolist()
