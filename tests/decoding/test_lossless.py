"""The joint law of the first tokens is the target's own, whatever plays; the mutants are in test_lossless_teeth.py.

Chi-square over 200,000 rows with fixed seeds; the law holds when p > 1e-4.
"""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import (
    PROMPT,
    ArgmaxDrafter,
    SureArgmaxDrafter,
    count,
    draw,
    joint_law,
    p_value,
    play,
    reference_law,
    table_model,
    toy_batch,
    toy_chain,
)
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.drafter import ModelDrafter, Stage
from adaspec.decoding.hybrid import HybridDrafter
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.sampling import GREEDY, Sampler, SamplingParams
from adaspec.plan import Plan

HOLDS = 1e-4
FREE = SamplingParams(temperature=1.0, seed=10_000_000)
ALL = SamplingParams(temperature=0.9, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=1.4, seed=20_000_000)
TARGET = toy_chain().target.table.numpy()


def chain_plan(*windows: int) -> Plan:
    """target, a, b, c with these windows."""
    return Plan(("target", "a", "b", "c")[: len(windows) + 1], windows)


def random_plan(seed: int) -> Plan:
    generator = np.random.default_rng(seed)
    depth = 2 + seed % 3
    middles = generator.permutation(["a", "b", "c"])[: depth - 1]
    return Plan(("target", *middles.tolist()), tuple(generator.integers(1, 5, depth - 1).tolist()))


@pytest.mark.parametrize(
    "plan",
    [chain_plan(), chain_plan(1), chain_plan(3), chain_plan(4, 2), chain_plan(1, 3), chain_plan(3, 2, 1)],
    ids=str,
)
def test_the_law_is_the_targets_at_every_depth(plan):
    assert p_value(draw(toy_chain(), plan, 3, FREE, extra=2), joint_law(TARGET, 3, FREE)) > HOLDS


@pytest.mark.parametrize("seed", range(5))
def test_the_law_is_the_targets_for_random_chains_and_windows(seed):
    params = dataclasses.replace(FREE, seed=seed * 1_000_000)
    assert p_value(draw(toy_chain(), random_plan(seed), 3, params, extra=2), joint_law(TARGET, 3, params)) > HOLDS


def test_the_law_of_four_tokens_is_the_targets():
    assert p_value(draw(toy_chain(), chain_plan(2, 1), 4, FREE), joint_law(TARGET, 4, FREE)) > HOLDS


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"repetition_penalty": 1.6}],
    ids=lambda change: next(iter(change)),
)
def test_the_law_is_the_processed_one(change):
    params = dataclasses.replace(FREE, **change)
    law = joint_law(TARGET, 3, params)
    assert p_value(draw(toy_chain(), chain_plan(2), 3, params), law) > HOLDS
    assert p_value(np.rint(200_000 * joint_law(TARGET, 3, FREE)), law) < 1e-6  # the change is large enough to show


@pytest.mark.parametrize("plan", [chain_plan(2), chain_plan(3, 2, 1)], ids=str)
def test_the_law_holds_with_everything_on_and_a_stop_token_inside_windows(plan):
    law = joint_law(TARGET, 3, ALL, stop=3)
    assert p_value(draw(toy_chain(), plan, 3, ALL, stop=3), law) > HOLDS


def test_the_law_holds_for_a_stop_token_alone():
    assert p_value(draw(toy_chain(), chain_plan(4, 2), 3, FREE, stop=0), joint_law(TARGET, 3, FREE, stop=0)) > HOLDS


@pytest.mark.parametrize("models", [("target", "argmax"), ("target", "a", "argmax")], ids="/".join)
def test_the_law_is_the_targets_behind_a_deterministic_drafter(models):
    chain = toy_chain(argmax=ArgmaxDrafter(table_model("c", 3, like=torch.from_numpy(TARGET))))
    plan = Plan(models, (3, 2)[: len(models) - 1])
    assert p_value(draw(chain, plan, 3, FREE), joint_law(TARGET, 3, FREE)) > HOLDS


SWITCHED = [chain_plan(2), Plan(("target", "b", "c"), (2, 1)), chain_plan(), chain_plan(3, 1)]


@pytest.mark.parametrize("own_history", [False, True])
def test_the_law_is_the_targets_when_plans_change_with_what_was_accepted(own_history):
    counts = draw(toy_chain(), SWITCHED, 3, FREE, own_history=own_history)
    assert p_value(counts, joint_law(TARGET, 3, FREE)) > HOLDS


class StopsBehindUnlikely(ModelDrafter):
    """Ends a draft behind the first token that was unlikely, and keeps it: a decision on the past only."""

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        start = batch.sequence.lengths
        draft = super().propose(batch, limits)
        chosen = draft.law.gather(-1, draft.tokens[..., None]).squeeze(-1)
        steps = torch.arange(1, draft.tokens.shape[1] + 1)
        counts = torch.minimum(draft.counts, torch.where(chosen < 0.5, steps, steps[-1]).amin(1))
        batch.sequence.truncate(start + counts)
        self.rollback(start + counts - 1)
        return Draft(draft.tokens, counts, draft.law)


def test_ending_a_draft_behind_an_unlikely_kept_token_is_allowed():
    chain = toy_chain(careful=StopsBehindUnlikely(table_model("c", 3, like=torch.from_numpy(TARGET))))
    assert p_value(draw(chain, Plan(("target", "careful"), (3,)), 3, FREE), joint_law(TARGET, 3, FREE)) > HOLDS


EARLY = [Plan(("target", "a"), (4,), 0.6), Plan(("target", "a", "b"), (4, 3), 0.7), Plan(("target", "b"), (2,), 0.99)]


@pytest.mark.parametrize("params", [FREE, ALL], ids=["free", "all"])
@pytest.mark.parametrize("plan", EARLY, ids=str)
def test_the_law_is_the_targets_when_the_drafter_stops_early(plan, params):
    assert p_value(draw(toy_chain(), plan, 3, params, extra=2), joint_law(TARGET, 3, params)) > HOLDS


def test_the_drafters_of_these_tests_do_stop_early_but_not_always():
    for plan in EARLY[:2]:
        chain = toy_chain()
        draw(chain, plan, 3, FREE, draws=2000, extra=3)
        inner = chain._stages[plan][-1].drain("above", "below")[0]
        assert 0.1 < sum(inner.drafted) / sum(inner.asked) < 0.9


@pytest.mark.parametrize("params", [FREE, ALL], ids=["free", "all"])
@pytest.mark.parametrize(
    "plan", ["target/hybrid:4", "target/a/hybrid:4,3", "target/hybrid:4?0.7", "target/a/hybrid:3,2?0.7"]
)
def test_the_law_is_the_targets_behind_a_hybrid_of_one_hot_and_sampled_rows(plan, params):
    chain = toy_chain(hybrid=hybrid())
    assert p_value(draw(chain, Plan.parse(plan), 3, params, extra=3), joint_law(TARGET, 3, params)) > HOLDS


def hybrid(floor=0.4):
    """A deterministic drafter that says how sure it is, then one that samples."""
    near = table_model("c", 3, like=torch.from_numpy(TARGET))
    return HybridDrafter({"sure": SureArgmaxDrafter(near), "b": toy_chain().members["b"]}, floor)


def test_both_parts_of_the_hybrid_of_these_tests_speak():
    chain, plan = toy_chain(hybrid=hybrid()), Plan.parse("target/hybrid:4")
    draw(chain, plan, 3, FREE, draws=2000, extra=4)
    whole, sure, sampled = chain._stages[plan][0].drain("target", "hybrid")
    assert [part.drafter for part in (sure, sampled)] == ["hybrid.sure", "hybrid.b"]
    assert min(sum(sure.drafted), sum(sampled.drafted)) > 0.05 * sum(whole.drafted)
    assert sum(sure.drafted) + sum(sampled.drafted) == sum(whole.drafted)
    assert sum(sure.accepted) + sum(sampled.accepted) == sum(whole.accepted)


@pytest.mark.parametrize("plan", ["target/lookup:3", "target/lookup:3?0.5", "target/mixed:3", "target/a/mixed:4,2?0.6"])
def test_the_law_is_the_targets_behind_a_lookup_and_a_hybrid_with_one(plan):
    """20,000 rows, as a lookup goes row by row."""
    lookup = LookupDrafter("lookup", min_ngram=1, max_ngram=2)
    near = table_model("c", 3, like=torch.from_numpy(TARGET))
    chain = toy_chain(lookup=lookup, mixed=HybridDrafter({"lookup": lookup, "near": near}, 0.3))
    batch = toy_batch(FREE, 20_000, 6, prompts=[(0, 1, 2, 0, 3, 1, 2)])
    tokens = play(chain, Plan.parse(plan), batch, 3, extra=3)
    assert p_value(count(tokens, 3), joint_law(TARGET, 3, FREE, prompt=(1, 2))) > HOLDS


def test_greedy_and_sampled_rows_share_a_batch():
    kinds, rows = (FREE, ALL, GREEDY), 210_000
    kind = (torch.arange(rows) % 21).div(10, rounding_mode="floor")  # 10 rows free, 10 with everything on, 1 greedy
    batch = toy_batch(FREE, rows, 4)
    sampler = Sampler(kinds)
    for name in ("_divisor", "_greedy_rows", "_top_k", "_top_p", "_min_p", "_penalty"):
        setattr(sampler, name, getattr(sampler, name)[kind])  # as from 210,000 SamplingParams, but fast
    sampler.uniforms, batch.sampler = batch.sampler.uniforms, sampler
    tokens = play(toy_chain(), chain_plan(2, 1), batch, 3, extra=1)
    counts = [count(tokens[kind == index], 3) for index in range(3)]
    laws = [joint_law(TARGET, 3, params) for params in kinds]
    assert p_value(np.concatenate(counts[:2]), np.concatenate(laws[:2]) / 2) > HOLDS
    assert counts[2][laws[2].argmax()] == rows // 21


def test_prompts_of_different_length_share_a_batch():
    prompts = (PROMPT, (3, 0, 1, 0), (2, 2, 1))
    batch = toy_batch(ALL, 200_001, 5, prompts=prompts)
    tokens = play(toy_chain(), chain_plan(2, 1), batch, 3)
    counts = [count(tokens[index::3], 3) for index in range(3)]
    laws = [joint_law(TARGET, 3, ALL, prompt=prompt) / 3 for prompt in prompts]
    assert p_value(np.concatenate(counts), np.concatenate(laws)) > HOLDS


@pytest.mark.parametrize("params", [FREE, ALL], ids=["free", "all"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_draft_carries_the_law_of_the_model_that_emits_it(depth, params):
    """Exact: at every emitted position the recorded row is the model's own processed law, to 1e-5."""
    chain = toy_chain()
    a, b, c = (chain.members[name] for name in "abc")
    drafter = {1: ModelDrafter(a), 2: Stage(a, ModelDrafter(b), 2), 3: Stage(a, Stage(b, ModelDrafter(c), 2), 3)}[depth]
    batch = toy_batch(params, 60, 6, stop=3, prompts=(PROMPT, (0, 1, 0), (2, 0, 0, 1)))
    for model in (a, b, c):
        model.start(60, batch.sequence.capacity)
    start = batch.sequence.lengths
    limits = torch.arange(60) % 7  # 0 .. 6 tokens wanted
    draft = drafter.propose(batch, limits)
    checked = 0
    for row in range(60):
        text = batch.sequence.row(row)
        assert text[int(start[row]) :] == draft.tokens[row, : int(draft.counts[row])].tolist()
        assert int(draft.counts[row]) == int(limits[row]) or text[-1] == 3
        for step in range(int(draft.counts[row])):
            want = reference_law(a.table.numpy(), text[: int(start[row]) + step], params)
            np.testing.assert_allclose(draft.law[row, step].numpy(), want, atol=1e-5)
            checked += 1
    assert checked > 60
