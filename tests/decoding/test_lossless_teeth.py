"""The law check has teeth: each of eleven bugs planted here (a to g seen in shipped code) is found by the same check.

Chi-square over 200,000 rows with fixed seeds; a bug counts as found when p < 1e-6 (0 for an impossible outcome).
"""

import dataclasses

import pytest
import torch
from helpers import ArgmaxDrafter, SureArgmaxDrafter, TableModel, draw, joint_law, p_value, table_model, toy_chain
from torch import Tensor

from adaspec.decoding import hybrid, sampling
from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.chain import Chain
from adaspec.decoding.drafter import ModelDrafter
from adaspec.decoding.hybrid import HybridDrafter
from adaspec.decoding.sampling import Acceptance, Sampler, SamplingParams, history, sample, verify_sampled
from adaspec.plan import Plan

FOUND = 1e-6
FREE = SamplingParams(temperature=1.0, seed=30_000_000)
TARGET = toy_chain().target.table
PAIR, DEEP = Plan(("target", "a"), (2,)), Plan(("target", "a", "b"), (2, 1))


def checked(plan: Plan, params: SamplingParams = FREE, *, stop: int = -1, chain: Chain | None = None) -> float:
    """The p-value of the check of test_lossless.py."""
    law = joint_law(TARGET.numpy(), 3, params, stop)
    value = p_value(draw(chain or toy_chain(), plan, 3, params, stop=stop), law)
    print(f"p-value {value:.3g} for {plan}")
    return value


def pair_with(drafter: ModelDrafter, plan: Plan = PAIR) -> tuple[Chain, Plan]:
    """A chain that knows ``drafter`` as "odd", and ``plan`` with it as the drafter."""
    return toy_chain(odd=drafter), Plan((*plan.models[:-1], "odd"), plan.windows)


def copy_of_target() -> TableModel:
    return table_model("odd", 5, like=TARGET, noise=1.0)


@pytest.mark.parametrize("plan", [PAIR, DEEP], ids=str)
def test_unbroken_the_check_passes(plan):
    assert checked(plan) > 1e-4


def from_p(tokens, counts, draft_law, law, uniforms):
    """(a) After a rejection the token is drawn from p, not from the residual."""
    accepted = verify_sampled(tokens, counts, draft_law, law, uniforms).accepted
    row = law[torch.arange(law.shape[0]), accepted]
    return Acceptance(accepted, sample(row, uniforms.gather(1, counts[:, None]).squeeze(1)))


def bonus_from_the_row_before(tokens, counts, draft_law, law, uniforms):
    """(d) After full acceptance the bonus comes from the row of the last drafted token."""
    accepted, following = verify_sampled(tokens, counts, draft_law, law, uniforms)
    row = law[torch.arange(law.shape[0]), (accepted - 1).clamp(min=0)]
    bonus = sample(row, uniforms.gather(1, counts[:, None]).squeeze(1))
    return Acceptance(accepted, torch.where(accepted == counts, bonus, following))


@pytest.mark.parametrize("plan", [PAIR, DEEP], ids=str)
@pytest.mark.parametrize("mutant", [from_p, bonus_from_the_row_before], ids=lambda mutant: mutant.__name__)
def test_a_wrong_token_behind_the_accepted_ones_is_found(mutant, plan, monkeypatch):
    monkeypatch.setattr(sampling, "verify_sampled", mutant)
    assert checked(plan) < FOUND


@pytest.mark.parametrize("mutant", [from_p, bonus_from_the_row_before], ids=lambda mutant: mutant.__name__)
def test_a_wrong_token_in_the_middle_stage_alone_is_found(mutant, monkeypatch):
    chain = toy_chain()
    chain.prepare([DEEP])
    middle = chain._stages[DEEP][1]
    verify = middle.verify

    def broken(batch, limits):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "verify_sampled", mutant)
            return verify(batch, limits)

    middle.verify = broken
    assert checked(DEEP, chain=chain) < FOUND


def test_a_law_recorded_at_another_temperature_is_found(monkeypatch):
    """(b) The drafter samples at temperature 0.6 and hands over its law at temperature 1."""
    choose = Sampler.choose

    def mutant(self, logits, sequence, first, active):
        token, _ = choose(self, logits, sequence, first, active)
        return token, logits[:, 0].softmax(-1)

    monkeypatch.setattr(Sampler, "choose", mutant)
    params = dataclasses.replace(FREE, temperature=0.6)
    assert checked(PAIR, params) < FOUND
    assert checked(DEEP, params) < FOUND


def test_a_law_recorded_at_another_temperature_by_a_middle_stage_is_found(monkeypatch):
    verify = Sampler.verify

    def mutant(self, tokens, counts, draft_law, logits, sequence, first, active):
        result, _ = verify(self, tokens, counts, draft_law, logits, sequence, first, active)
        return result, logits.softmax(-1)

    monkeypatch.setattr(Sampler, "verify", mutant)
    assert checked(DEEP, dataclasses.replace(FREE, temperature=0.6)) < FOUND


class AsIfSampled(ArgmaxDrafter):
    """(c) An argmax drafter that hands over its softmax, as if it had sampled."""

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        start = batch.sequence.lengths
        draft = super().propose(batch, limits)
        if not draft.tokens.shape[1]:
            return draft
        before = [batch.sequence.slice(start - offset, draft.tokens.shape[1]) for offset in (2, 1)]
        return Draft(draft.tokens, draft.counts, self.model.table[before[0], before[1]].softmax(-1))


@pytest.mark.parametrize("plan", [PAIR, DEEP], ids=str)
def test_an_argmax_drafter_that_claims_to_have_sampled_is_found(plan):
    chain, plan = pair_with(AsIfSampled(copy_of_target()), plan)
    assert checked(plan, chain=chain) < FOUND


class DropsTheUnlikely(ModelDrafter):
    """(e) Ends a draft before the first token it finds unlikely: the dropped token decides that it is dropped."""

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        start = batch.sequence.lengths
        draft = super().propose(batch, limits)
        if draft.law is None:
            return draft
        likely = draft.law.gather(-1, draft.tokens[..., None]).squeeze(-1) > 0.4
        counts = torch.minimum(draft.counts, likely.long().cumprod(1).sum(1))
        batch.sequence.truncate(start + counts)
        self.rollback(start + counts - 1)
        return Draft(draft.tokens, counts, draft.law)


@pytest.mark.parametrize("plan", [PAIR, DEEP], ids=str)
def test_a_token_dropped_for_its_own_probability_is_found(plan):
    chain, plan = pair_with(DropsTheUnlikely(copy_of_target()), plan)
    assert checked(plan, chain=chain) < FOUND


class StopsBeforeTheUnlikely(ModelDrafter):
    """(h) Stops early in front of the token it finds unlikely, having drawn it."""

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        start = batch.sequence.lengths
        draft = super().propose(batch, limits)
        if draft.law is None:
            return draft
        likely = draft.law.gather(-1, draft.tokens[..., None]).squeeze(-1) >= stop
        counts = torch.minimum(draft.counts, likely.long().cumprod(1).sum(1))
        batch.sequence.truncate(start + counts)
        self.rollback(start + counts - 1)
        return Draft(draft.tokens, counts, draft.law)


@pytest.mark.parametrize("plan", [PAIR, DEEP], ids=str)
def test_a_window_that_ends_for_the_probability_of_the_dropped_token_is_found(plan):
    chain, plan = pair_with(StopsBeforeTheUnlikely(copy_of_target()), plan)
    assert checked(dataclasses.replace(plan, stop=0.5), chain=chain) < FOUND


def flat_rows(drafts, width, join=hybrid._join):
    """(i) A hybrid that hands over its deterministic tokens as if they had been drawn from a flat law."""
    flat = [torch.full((*draft.tokens.shape, 4), 0.25) for _, draft in drafts]
    laws = [row if draft.law is None else draft.law for row, (_, draft) in zip(flat, drafts, strict=True)]
    filled = [(at, dataclasses.replace(draft, law=law)) for law, (at, draft) in zip(laws, drafts, strict=True)]
    return join(filled, width)


def rows_of_the_first_place(drafts, width, join=hybrid._join):
    """(j) A hybrid that puts every part's rows where the window begins."""
    return join([(torch.zeros_like(offsets), draft) for offsets, draft in drafts], width)


@pytest.mark.parametrize("mutant", [flat_rows, rows_of_the_first_place], ids=lambda mutant: mutant.__name__)
def test_a_hybrid_that_mixes_up_its_rows_is_found(mutant, monkeypatch):
    parts = {"sure": SureArgmaxDrafter(copy_of_target()), "b": toy_chain().members["b"]}
    monkeypatch.setattr(hybrid, "_join", mutant)
    assert checked(Plan(("target", "mixed"), (3,)), chain=toy_chain(mixed=HybridDrafter(parts, 0.6))) < FOUND


class SaysHowLikelyItsSampleWas(ModelDrafter):
    """(k) A sampling part that gives the probability of the drawn token as its confidence: it is cut for it."""

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        draft = super().propose(batch, limits, stop)
        if draft.law is None:
            return draft
        return dataclasses.replace(draft, confidence=draft.law.gather(-1, draft.tokens[..., None]).squeeze(-1))


def test_a_sampled_part_that_is_cut_for_the_token_it_drew_is_found():
    parts = {"odd": SaysHowLikelyItsSampleWas(copy_of_target()), "b": toy_chain().members["b"]}
    assert checked(Plan(("target", "mixed"), (3,)), chain=toy_chain(mixed=HybridDrafter(parts, 0.4))) < FOUND


@pytest.mark.parametrize("plan", [PAIR, DEEP], ids=str)
def test_penalties_once_per_block_are_found(plan, monkeypatch):
    """(f) Every position of a window is penalised for the tokens before the window only."""

    def mutant(sequence, first, count, vocab_size):
        return history(sequence, first, 1, vocab_size).expand(-1, count, -1)

    monkeypatch.setattr(sampling, "history", mutant)
    assert checked(plan, dataclasses.replace(FREE, repetition_penalty=1.6)) < FOUND


@pytest.mark.parametrize("plan", [PAIR, DEEP], ids=str)
def test_tokens_behind_a_stop_token_are_found(plan, monkeypatch):
    """(g) A block is not cut at a stop token inside it."""
    monkeypatch.setattr(Batch, "cut", lambda self, tokens, counts: counts)
    assert checked(plan, stop=0) < FOUND
