"""A copy over its target's cache drafts for it, never has to catch up, and leaves the target's numbers alone."""

import copy

import pytest
import torch
from tiny_models import greedy_loop, noisy, tiny

from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.load import load_model
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.native.model import NativeCopy, NativeModel
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan

PROMPTS = ((3, 4, 5, 3, 4), (7, 8, 9, 10, 11, 12, 13, 7), (20,))
LIMITS = (24, 9, 17)


def chain(precision, target_precision="float32"):
    module = tiny("llama")
    target = NativeModel("target", copy.deepcopy(module), target_precision)
    low = NativeCopy("low", copy.deepcopy(module), precision, target, None)
    return module, Chain(target, {"low": low, "lookup": LookupDrafter("lookup", min_ngram=1)}, capacity=64)


def decode(chain, plans, params=GREEDY):
    """Texts, and the outcomes of the rounds."""
    chain.start(Sequences(PROMPTS, (params,) * 3, LIMITS, ((),) * 3))
    texts, outcomes = [[], [], []], []
    while chain.running:
        result = chain.round(Plan.parse(plans[len(outcomes) % len(plans)]))
        outcomes.append(result.outcome)
        for text, new in zip(texts, result.tokens):
            text += new
    return texts, outcomes


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize(
    "plans",
    [
        ["target/low:3"],
        ["target/low/lookup:5,2"],
        ["target", "target/low:4", "target/lookup:2", "target/low/lookup:4,3", "target", "target/low:1"],
    ],
    ids=["pair", "middle", "turns"],
)
def test_greedy_text_is_the_targets(precision, plans):
    module, members = chain(precision)
    for _ in range(2):  # a second batch begins anew
        texts, _ = decode(members, plans)
        assert texts == [greedy_loop(module, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS)]


def test_the_target_computes_the_same_bits_behind_drafts_as_without():
    """Every number it has kept, whatever the copy wrote where it writes."""
    _, members = chain("int4", "fp16")
    kept = []
    for plans in (["target"], ["target/low:3", "target/low/lookup:4,2"]):
        decode(members, plans)
        lengths = [len(prompt) + limit - 1 for prompt, limit in zip(PROMPTS, LIMITS)]
        cache = members.target.decoder._cache  # [layers, 2, B, heads, slots, width]
        kept.append([cache[:, :, row, :, :length].clone() for row, length in enumerate(lengths)])
    for plain, drafted in zip(*kept):
        assert torch.equal(plain, drafted)


def test_the_same_precision_agrees_always():
    _, members = chain("float32")
    _, outcomes = decode(members, ["target/low:3"])
    assert all(outcome.edges[0].accepted == outcome.edges[0].offered for outcome in outcomes)


def test_it_never_has_to_catch_up():
    _, members = chain("int8")
    _, outcomes = decode(members, ["target", "target", "target/low:2"])
    assert sum(outcome.catch_up_seconds for outcome in outcomes) == 0.0
    assert {each.query_len for outcome in outcomes for each in outcome.passes if each.model == "low"} == {1}
    assert members.context().lacking == ()


def test_sampled_texts_are_reproducible_and_partly_accepted():
    _, members = chain("int4")
    params = SamplingParams(1.0, seed=5)
    first, outcomes = decode(members, ["target/low:3"], params)
    assert decode(members, ["target/low:3"], params)[0] == first
    assert any(sum(outcome.edges[0].accepted) for outcome in outcomes)


def test_its_passes_can_be_timed():
    _, members = chain("int8")
    decode(members, ["target/low:2"])
    timed = members.profile({"target": [1, 3], "low": [1]})
    assert [(each.model, each.query_len) for each in timed] == [("target", 1), ("target", 3), ("low", 1)]
    decode(members, ["target/low:2"])


def test_it_has_no_states_to_draft_from():
    _, members = chain("int8")
    with pytest.raises(ValueError, match="low reads the cache of target"):
        members.members["low"].tap((2,))


def test_loading_shares_the_cache_where_both_are_native(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    target = load_model("target", tmp_path)
    low = load_model("low", tmp_path, precision="int4", target=target)
    assert isinstance(low, NativeCopy)
    assert low.runner == "native, over the cache of target"
    other = load_model("target", tmp_path, runner="torch")
    assert not isinstance(load_model("low", tmp_path, precision="int8", target=other), NativeCopy)


def test_a_copy_forgets_what_was_rejected():
    """Its own tokens behind the first rejected one are not valid any more; those that the target fed are."""
    target = NativeModel("target", tiny("llama"), "float32")
    copy = NativeCopy("int4", noisy(tiny("llama"), 0.4, 1), "int4", target, None)
    chain = Chain(target, {"int4": copy}, capacity=64)
    chain.start(Sequences(((5, 6, 7), (8, 9, 4)), (GREEDY,) * 2, (24,) * 2, ((),) * 2))
    rejected = 0
    while chain.running:
        outcome = chain.round(Plan.parse("target/int4:4")).outcome
        rejected += sum(outcome.edges[0].reached) - sum(outcome.edges[0].accepted)
        assert copy.lengths.tolist() == (chain._batch.sequence.lengths - 1).tolist() == target.lengths.tolist()
    assert rejected > 3
