"""Laws against transformers' own processors, random streams, samples and verdicts."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import toy_chain
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Sequences
from adaspec.decoding.sampling import Sampler, SamplingParams, Uniforms, sample, verify_greedy, verify_sampled
from adaspec.plan import Plan

V = 40
ROWS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, repetition_penalty=1.7),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, top_k=1000, repetition_penalty=0.6),
]


def processors(params):
    """What transformers' generate would build, in its order."""
    chosen = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chosen.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chosen.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chosen.append(MinPLogitsWarper(params.min_p))
    return chosen


@pytest.mark.parametrize("together", [False, True], ids=["alone", "one batch"])
def test_laws_agree_with_transformers(together):
    """All parameter sets in one batch of ragged rows, and each alone; three positions each; to 1e-6."""
    generator = torch.Generator().manual_seed(1)
    sequence = TokenBuffer(len(ROWS), 20)
    sequence.append(torch.randint(V, (len(ROWS), 15), generator=generator), 9 + torch.arange(len(ROWS)))
    first = sequence.lengths - 3
    logits = 3 * torch.randn(len(ROWS), 3, V, generator=generator)
    for row, params in enumerate(ROWS):
        if together:
            sampler = Sampler(ROWS)
            law = sampler.law(sampler.penalise(logits, sequence, first))[row]
        else:
            part = TokenBuffer(1, 20)
            part.append(sequence.tokens[row : row + 1, :15], sequence.lengths[row : row + 1])
            sampler = Sampler([params])
            law = sampler.law(sampler.penalise(logits[row : row + 1], part, first[row : row + 1]))[0]
        for step in range(3):
            text = torch.tensor([sequence.row(row)[: int(first[row]) + step + 1]])
            want = processors(params)(text, logits[row, step][None].clone()).softmax(-1)[0]
            torch.testing.assert_close(law[step], want, atol=1e-6, rtol=0)


def test_temperature_zero_is_the_one_hot_law_of_the_largest_logit():
    logits = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(2))
    law = Sampler([SamplingParams(), SamplingParams(temperature=1.0)]).law(logits)
    assert torch.equal(law[0], torch.nn.functional.one_hot(logits[0].argmax(-1), V).float())
    torch.testing.assert_close(law[1], logits[1].softmax(-1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("seed", 2**63),
    ],
)
def test_values_outside_their_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}.*{value}"):
        SamplingParams(**{field: value})


def every_row(uniforms, count, size):
    return uniforms.draw(count, torch.full((size,), count))


def test_uniforms_are_uniform_and_independent_across_rows_and_steps():
    """Kolmogorov-Smirnov at p > 1e-3, correlations of neighbouring rows and steps within 5 standard errors."""
    numbers = every_row(Uniforms(torch.arange(1000)), 200, 1000).numpy()
    assert 0 <= numbers.min() < 1e-3
    assert numbers.max() < 1
    for part in (numbers.ravel(), numbers[0], numbers[:, 0], numbers[:, 199]):
        assert kstest(part, "uniform").pvalue > 1e-3
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.size)


def test_no_number_is_used_twice():
    uniforms = Uniforms(torch.tensor([0, 1, -5, 2**62]))
    numbers = torch.cat([every_row(uniforms, count, 4) for count in (1, 3, 1, 50, 7)], 1)
    assert numbers.unique().numel() == numbers.numel()


def test_a_stream_depends_on_its_seed_and_on_what_it_has_used_only():
    alone, batch = Uniforms(torch.tensor([7])), Uniforms(torch.tensor([3, 7, 9]))
    expected = every_row(alone, 6, 1)[0]
    first = batch.draw(4, torch.tensor([4, 2, 0]))  # row 1 looks at four numbers and uses up two
    assert torch.equal(first[1], expected[:4])
    batch.draw(3, torch.tensor([3, 0, 1]))
    assert torch.equal(batch.draw(4, torch.tensor([1, 4, 1]))[1], expected[2:6])


def sampled_texts(seeds, plan, stop):
    chain = toy_chain()
    prompts = [((1, 2), (0, 3, 1), (2, 2, 2, 1))[seed % 3] for seed in seeds]
    params = tuple(SamplingParams(temperature=1.0, top_p=0.95, seed=seed) for seed in seeds)
    size = len(seeds)
    chain.start(Sequences(tuple(prompts), params, (20,) * size, (stop,) * size))
    texts = [[] for _ in seeds]
    while chain.running:
        for text, tokens in zip(texts, chain.round(plan).tokens, strict=True):
            text += tokens
    return texts


@pytest.mark.parametrize("stop", [(), (3,)], ids=["no stop", "stop token"])
@pytest.mark.parametrize("plan", ["target", "target/a:3", "target/a/b:5,2", "target/a/b/c:5,3,2"])
def test_a_seed_gives_its_text_alone_and_in_any_batch(plan, stop):
    seeds = range(12)
    together = sampled_texts(seeds, Plan.parse(plan), stop)
    assert together == sampled_texts(seeds, Plan.parse(plan), stop)
    assert together == [sampled_texts([seed], Plan.parse(plan), stop)[0] for seed in seeds]
    assert len({tuple(text) for text in together}) > 4


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.3, 1.0, 5.0]), min_size=1, max_size=9).filter(any),
    st.sampled_from([0.0, 2.0**-48, 0.25, 0.5, 1 - 2.0**-48]),
)
def test_a_sample_is_never_a_token_of_probability_zero(weights, uniform):
    token = int(sample(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0


def test_samples_follow_their_law():
    law = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    steps = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = sample(law.expand(1000, -1), steps).bincount(minlength=4)
    assert (counts - torch.tensor([100, 0, 600, 300])).abs().max() <= 1


def test_verify_greedy_stops_at_the_first_difference_and_at_the_count():
    top = torch.tensor([[1, 2, 3, 4]] * 4)
    tokens = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    result = verify_greedy(tokens, torch.tensor([3, 3, 3, 1]), top)
    assert result.accepted.tolist() == [3, 1, 0, 1]
    assert result.following.tolist() == [4, 2, 1, 2]


def test_an_empty_draft_gives_the_verifiers_own_token():
    empty = torch.zeros(2, 0, dtype=torch.long)
    none = torch.zeros(2, dtype=torch.long)
    assert verify_greedy(empty, none, torch.tensor([[3], [5]])).following.tolist() == [3, 5]
    law = torch.tensor([[[0.0, 1.0, 0.0]], [[0.5, 0.0, 0.5]]])
    for draft_law in (None, torch.zeros(2, 0, 3)):
        result = verify_sampled(empty, none, draft_law, law, torch.tensor([[0.3], [0.9]], dtype=torch.float64))
        assert result.accepted.tolist() == [0, 0]
        assert result.following.tolist() == [1, 2]


def test_rows_with_fewer_drafted_tokens_take_the_bonus_from_their_own_row():
    law = torch.eye(5)[torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]])]  # surely 0, 1, 2, 3
    tokens = torch.tensor([[0, 1, 2], [0, 4, 4], [4, 4, 4]])
    counts = torch.tensor([3, 1, 0])
    result = verify_sampled(tokens, counts, None, law, torch.full((3, 4), 0.5, dtype=torch.float64))
    assert result.accepted.tolist() == [3, 1, 0]
    assert result.following.tolist() == [3, 1, 0]


@pytest.mark.parametrize(("drafted", "accepted"), [(0.5, 1), (0.7, 1), (1.0, 0)])
def test_a_token_is_kept_with_probability_p_over_q(drafted, accepted):
    """p = 0.5 and u = 0.6: kept while 0.6 q < 0.5; after a rejection only the residual is left."""
    law = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    draft_law = torch.tensor([[[drafted, 1 - drafted]]])
    uniforms = torch.tensor([[0.6, 0.1]], dtype=torch.float64)
    result = verify_sampled(torch.tensor([[0]]), torch.tensor([1]), draft_law, law, uniforms)
    assert (result.accepted.item(), result.following.item()) == (accepted, 1 - accepted)


def test_mixed_rows_keep_their_parameters():
    params = dataclasses.replace(ROWS[1], top_k=1)
    law = Sampler([params, ROWS[0]]).law(torch.randn(2, 1, V, generator=torch.Generator().manual_seed(3)))
    assert (law > 0).sum(-1).flatten().tolist() == [1, V]


def test_a_temperature_near_zero_is_nearly_greedy_and_never_nan():
    logits = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(4))
    law = Sampler([SamplingParams(temperature=1e-38)]).law(logits)
    assert torch.equal(law, torch.nn.functional.one_hot(logits.argmax(-1), 9).float())
