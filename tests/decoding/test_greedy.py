"""Greedy decoding in float32: whatever plan plays, the tokens are those of plain decoding and of the module itself."""

import random

import pytest
import torch
from tiny_models import ARCHITECTURES, greedy_loop, noisy, tiny

from adaspec.decoding import sampling
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.hybrid import HybridDrafter
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.model import Model
from adaspec.decoding.sampling import GREEDY
from adaspec.plan import Plan, PlanSpace

PROMPTS = ((3, 4, 5, 3, 4), (7, 8, 9, 10, 11, 12, 13, 7), (20,))
NEW = 12
PLAIN = Plan(("target",))
GRID = PlanSpace.grid("target", ["c", "lookup"], [2, 4], middles=["a", "b"], inner_windows=[1, 2, 3], max_depth=4)
EARLY = [*map(Plan.parse, ("target/c:4?0.16", "target/lookup:4?0.4", "target/a/c:4,3?0.16"))]
MIXED = [*map(Plan.parse, ("target/lookup+c:4", "target/lookup+c:4?0.16", "target/a/b/lookup+c:4,3,2"))]
SPACE = PlanSpace([*GRID, *EARLY, *MIXED])
FEW = [PLAIN, *map(Plan.parse, ("target/c:3", "target/lookup:2", "target/a/c:4,2", "target/b/a/lookup:4,3,2"))]
FEW += [EARLY[0], MIXED[1]]
LARGE = ("llama", "gpt2")


class Family:
    """A target, two middles and a drafter of one architecture, their chain, and what greedy decoding must give."""

    def __init__(self, kind):
        self.module = tiny(kind)
        drafters = {
            name: Model(name, noisy(self.module, amount, seed))
            for seed, (name, amount) in enumerate([("a", 0.05), ("b", 0.1), ("c", 0.2)])
        }
        lookup = LookupDrafter("lookup", min_ngram=1, max_ngram=2)
        both = HybridDrafter({"lookup": lookup, "c": drafters["c"]})
        self.chain = Chain(Model("target", self.module), {**drafters, "lookup": lookup, "lookup+c": both})
        self.expected = [greedy_loop(self.module, prompt, NEW) for prompt in PROMPTS]


_FAMILIES = {}


def family(kind):
    if kind not in _FAMILIES:
        _FAMILIES[kind] = Family(kind)
    return _FAMILIES[kind]


def decode(chain, plans, prompts=PROMPTS, budgets=None, stop_ids=()):
    """The new tokens per row; ``plans`` yields the plan of each round. Also the outcomes."""
    size = len(prompts)
    chain.start(Sequences(prompts, (GREEDY,) * size, budgets or (NEW,) * size, (stop_ids,) * size))
    texts, outcomes = [[] for _ in prompts], []
    while chain.running:
        result = chain.round(next(plans))
        outcomes.append(result.outcome)
        for text, tokens in zip(texts, result.tokens):
            text += tokens
    return texts, outcomes


def always(plan):
    while True:
        yield plan


def shuffled(plans, seed):
    generator = random.Random(seed)
    while True:
        yield generator.choice(plans)


def assert_as_expected(models, plans, index):
    """All rows in one batch, and one of them alone; ``plans()`` yields the plan of each round."""
    assert decode(models.chain, plans())[0] == models.expected, index
    row = index % len(PROMPTS)
    assert decode(models.chain, plans(), PROMPTS[row : row + 1])[0] == [models.expected[row]], index


def test_the_space_is_large_and_holds_four_models():
    assert len(SPACE) >= 30
    assert max(plan.depth for plan in SPACE) == 4


@pytest.mark.parametrize("kind", LARGE)
def test_every_plan_of_a_large_space_gives_the_modules_own_tokens(kind):
    for index, plan in enumerate(SPACE):
        assert_as_expected(family(kind), lambda plan=plan: always(plan), index)


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in LARGE])
def test_some_plans_of_every_architecture_give_the_modules_own_tokens(kind):
    for index, plan in enumerate(FEW):
        assert_as_expected(family(kind), lambda plan=plan: always(plan), index)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_plans_drawn_every_round_give_the_modules_own_tokens(kind):
    for seed in range(3):
        assert_as_expected(family(kind), lambda seed=seed: shuffled(list(SPACE), seed), seed)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_drafters_of_these_tests_are_neither_perfect_nor_useless(kind):
    offered = accepted = 0
    for plan in (Plan.parse("target/c:4"), Plan.parse("target/b/c:4,2")):
        for outcome in decode(family(kind).chain, always(plan))[1]:
            offered += sum(sum(edge.offered) for edge in outcome.edges)
            accepted += sum(sum(edge.accepted) for edge in outcome.edges)
    assert 0.2 < accepted / offered < 0.98


def test_windows_end_early_in_these_tests_but_not_always_and_both_parts_of_the_hybrid_speak():
    asked = drafted = 0
    for outcome in decode(family("llama").chain, always(EARLY[0]))[1]:
        asked, drafted = asked + sum(outcome.edges[0].asked), drafted + sum(outcome.edges[0].drafted)
    assert 0.1 < drafted / asked < 0.9
    parts = {"lookup+c.lookup": 0, "lookup+c.c": 0}
    for outcome in decode(family("llama").chain, always(MIXED[0]))[1]:
        for edge in outcome.edges[1:]:
            parts[edge.drafter] += sum(edge.drafted)
    assert min(parts.values()) > 3


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_stop_ids_and_budgets_trim_the_text_as_in_plain_decoding(kind):
    models = family(kind)
    stop_ids = (models.expected[0][6], models.expected[1][8])
    budgets = (NEW, 10, 5)
    expected = [
        greedy_loop(models.module, prompt, budget, stop_ids) for prompt, budget in zip(PROMPTS, budgets, strict=True)
    ]
    assert len(expected[0]) < NEW  # a stop token inside
    for plans in (*map(always, FEW), shuffled(list(SPACE), 5), shuffled(list(SPACE), 6)):
        texts, outcomes = decode(models.chain, plans, budgets=budgets, stop_ids=stop_ids)
        assert texts == expected
        assert sum(outcome.tokens for outcome in outcomes) == sum(map(len, expected))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_request_may_fill_the_models_positions_to_the_last(kind):
    """Rows that ended stay in the batch: their unused slots must not leave the table of positions."""
    module = tiny(kind, **{"n_positions" if kind == "gpt2" else "max_position_embeddings": 16})
    chain = Chain(Model("target", module), {"c": Model("c", noisy(module, 0.2, 1))})
    prompts = (tuple(range(3, 15)), (5, 6))
    budgets = (4, 14)
    texts, _ = decode(chain, always(Plan.parse("target/c:4")), prompts, budgets)
    assert texts == [greedy_loop(module, prompt, budget) for prompt, budget in zip(prompts, budgets, strict=True)]


def test_a_verifier_that_accepts_one_token_too_many_is_found(monkeypatch):
    """The comparison has teeth."""

    def mutant(tokens, counts, top):
        accepted = (sampling.verify_greedy_unbroken(tokens, counts, top).accepted + 1).minimum(counts)
        return sampling.Acceptance(accepted, top.gather(1, accepted[:, None]).squeeze(1))

    monkeypatch.setattr(sampling, "verify_greedy_unbroken", sampling.verify_greedy, raising=False)
    monkeypatch.setattr(sampling, "verify_greedy", mutant)
    models = family("llama")
    assert decode(models.chain, always(Plan.parse("target/c:4")))[0] != models.expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_chain_decodes_as_plain_decoding_does():
    """Not yet run on a device."""
    module = tiny("llama")
    draft = Model("draft", noisy(module, 0.1, 1).cuda())
    chain = Chain(Model("target", module.cuda()), {"draft": draft})
    texts = []
    for plan in (Plan(("target",)), Plan(("target", "draft"), (3,))):
        chain.start(Sequences(((5, 6, 7), (8, 9)), (GREEDY, GREEDY), (20, 20), ((), ())))
        rows = [[], []]
        while chain.running:
            for row, new in zip(rows, chain.round(plan).tokens):
                row += new
        texts.append(rows)
    assert texts[0] == texts[1]
