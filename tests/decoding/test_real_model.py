"""The embedded model for real (slow: it is fetched once): greedy equality, and the law of sampled tokens."""

import random

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from adaspec.assemble import Assembly, DrafterSpec, Setup, assemble
from adaspec.bench.prompts import TEN
from adaspec.compare import Pinned, run_fixed
from adaspec.decoding.chain import Sequences
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan

pytestmark = pytest.mark.slow
MORE = (
    "Name three rivers in France.",
    "Give me a recipe for pancakes.",
    "Write a short letter to a landlord about a broken heater.",
    "What is the difference between a list and a tuple in Python?",
    "Translate 'good morning, my friend' into French, Spanish and German.",
    "Write a bash loop that renames all .txt files to .md.",
    "Count from 1 to 30, separated by commas.",
    "List the months of the year, one per line, twice.",
    "Explain photosynthesis in three sentences.",
    "Write a limerick about a cat.",
)


class Random(Pinned):
    """A chooser that takes any plan at random before every round."""

    def __init__(self, plans, seed: int) -> None:
        super().__init__(plans[0])
        self.plans, self.rng = plans, random.Random(seed)

    def choose(self, context):
        self.plan = self.rng.choice(self.plans)
        return super().choose(context)


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    drafters = tuple(DrafterSpec.parse(text) for text in ("lookup", "int8"))
    return assemble(Setup(drafters=drafters, threads=1), lambda what, share: None)


@pytest.mark.parametrize("prompt", [text for _, text in TEN] + list(MORE))
def test_greedy_text_is_that_of_plain_decoding(assembly: Assembly, prompt: str) -> None:
    request = assembly.request(prompt, raw=False, max_new_tokens=48, sampling=GREEDY)
    plain = run_fixed(assembly.generator, request, assembly.space.plain).completions[0]
    adaptive = assembly.generator.generate([request]).completions[0]
    mixed = assembly.generator.generate([request], controller=Random(assembly.space, 1)).completions[0]
    assert adaptive.tokens == plain.tokens
    assert mixed.tokens == plain.tokens
    assert adaptive.text == plain.text


def test_sampled_tokens_of_a_chain_have_the_law_of_plain_decoding(assembly: Assembly) -> None:
    """Two samples of the third token; p > 1e-3 with fixed seeds, and a wrong temperature is told apart."""
    plain = sample_third_token(assembly, Plan(("target",)), 0.8, seed=0)
    chain = sample_third_token(assembly, Plan(("target", "int8", "lookup"), (4, 2)), 0.8, seed=10_000)
    wrong = sample_third_token(assembly, Plan(("target", "int8", "lookup"), (4, 2)), 1.6, seed=20_000)
    assert two_sample_p(plain, chain) > 1e-3
    assert two_sample_p(plain, wrong) < 1e-6


def sample_third_token(assembly: Assembly, plan: Plan, temperature: float, seed: int, rows: int = 128) -> list[int]:
    request = assembly.request("Once upon a time there was a", raw=True, max_new_tokens=5, sampling=GREEDY)
    found = []
    chain = assembly.generator.chain
    for start in range(0, 384, rows):
        sampling = tuple(SamplingParams(temperature, seed=seed + start + row) for row in range(rows))
        chain.start(Sequences((request.prompt,) * rows, sampling, (5,) * rows, ((),) * rows))
        texts: list[list[int]] = [[] for _ in range(rows)]
        while chain.running:
            for text, new in zip(texts, chain.round(plan).tokens):
                text += new
        found += [text[2] for text in texts]
    return found


def two_sample_p(first: list[int], second: list[int]) -> float:
    """Chi-square over the tokens seen at least 20 times in both together; the rest is one cell."""
    tokens, counts = np.unique(first + second, return_counts=True)
    frequent = tokens[counts >= 20]
    table = [[sum(token == each for each in sample) for token in frequent] for sample in (first, second)]
    table = [[*row, len(sample) - sum(row)] for row, sample in zip(table, (first, second))]
    return float(chi2_contingency(np.array(table)).pvalue)
