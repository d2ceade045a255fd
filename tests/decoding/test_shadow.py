"""A drafter that the target did not verify is judged on committed text as it would have fared in play."""

import dataclasses

import torch
from helpers import ArgmaxDrafter, TableModel, table_model, toy_batch, toy_chain
from hypothesis import given
from hypothesis import strategies as st

from adaspec.decoding.chain import Sequences
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.decoding.shadow import overhear
from adaspec.decoding.tally import EdgeTally, Proposal
from adaspec.plan import Plan

PLAIN, LOOKUP = Plan(("target",)), Plan(("target", "lookup"), (3,))


def counts(outcomes):
    total = [torch.zeros(3, dtype=torch.long) for _ in range(3)]
    for edge in outcomes:
        for sums, new in zip(total, (edge.reached, edge.offered, edge.accepted)):
            sums += torch.tensor(new)
    return torch.stack(total).tolist()


def rounds(plan, prompts, tokens=50, temperature=0.0):
    chain = toy_chain(lookup=LookupDrafter("lookup", min_ngram=1))
    chain.prepare([PLAIN, LOOKUP])
    rows = len(prompts)
    sampling = tuple(SamplingParams(temperature, seed=row) for row in range(rows))
    chain.start(Sequences(prompts, sampling, (tokens,) * rows, ((),) * rows))
    outcomes = []
    while chain.running:
        outcomes.append(chain.round(plan).outcome)
    return outcomes


def test_scores_of_plain_decoding_are_those_of_playing_the_drafter_greedily():
    """As many verifications at a time as are told together; those near the end of the budget are left out."""
    prompts = ((1, 2, 1, 2, 1),)
    played = [edge for outcome in rounds(LOOKUP, prompts) for edge in outcome.edges]
    scored = [edge for outcome in rounds(PLAIN, prompts) for edge in outcome.scored]
    assert sum(edge.accepted[0] for edge in played) > 3
    assert all(edge.verifications == 1 for edge in played)
    compared = 0
    for mine in scored:
        theirs, played = played[: mine.verifications], played[mine.verifications :]
        if len(played) < 4:
            break
        assert counts([mine]) == counts(theirs)
        compared += len(theirs)
    assert compared > 6


def test_an_idle_drafter_is_judged_where_much_has_gathered_where_a_row_ends_and_before_it_plays():
    chain = toy_chain(lookup=LookupDrafter("lookup", min_ngram=1))
    chain.prepare([PLAIN, LOOKUP])
    chain.start(Sequences(((1, 2, 1, 2, 1),), (GREEDY,), (40,), ((),)))
    told = [len(chain.round(PLAIN).outcome.scored) for _ in range(20)]
    assert not any(told[:15])
    assert told[15] == 1
    assert not any(told[16:])
    assert [edge.drafter for edge in chain.round(LOOKUP).outcome.scored] == ["lookup"]
    while chain.running:
        last = chain.round(PLAIN).outcome
    assert last.scored


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(-3, 8)), max_size=20))
def test_a_tally_counts_position_by_position(sizes):
    """By the definition of ``EdgeOutcome``; what was asked, offered and accepted, each at most the one before."""
    sizes = [(asked, min(asked, offered), min(asked, offered, accepted)) for asked, offered, accepted in sizes]
    tally = EdgeTally(8)
    for each in sizes:
        tally.add(*each)
    edge = tally.drain("t", "d")
    for k in range(8):
        reached = [each for each in sizes if each[0] > k and each[2] >= k]
        assert edge.reached[k] == len(reached)
        assert edge.offered[k] == sum(offered > k for _, offered, _ in reached)
        assert edge.accepted[k] == sum(accepted > k for *_, accepted in sizes)
        assert edge.asked[k] == sum(asked > k for asked, *_ in sizes)
        assert edge.drafted[k] == sum(offered > k for _, offered, _ in sizes)


def test_parts_of_a_hybrid_are_tallied_from_their_own_first_token_on():
    """Rows: b follows two of a and is rejected; a is rejected at once, so b was not reached; b alone."""
    tokens = [[1, 2, 3], [1, 2, 3], [4]]
    parts = [("a", [2, 2, 0]), ("b", [1, 1, 1])]
    proposal = Proposal([5, 5, 5], [4, 4, 1], tokens, [2, 0, 1], deterministic=True, parts=parts)
    whole, found = EdgeTally(4), {}
    whole.add_rows(proposal, found)
    edges = {name: tally.drain("t", name) for name, tally in [("whole", whole), *found.items()]}
    assert edges["whole"].reached == (3, 1, 1, 0)
    assert edges["whole"].accepted == (2, 1, 0, 0)
    assert (edges["a"].reached, edges["a"].accepted) == ((3, 1, 1, 0), (1, 1, 0, 0))
    assert (edges["b"].reached, edges["b"].offered, edges["b"].accepted) == ((2, 0, 0, 0), (2, 0, 0, 0), (1, 0, 0, 0))
    assert edges["b"].asked == (3, 2, 0, 0)


def test_a_played_drafter_is_not_scored_a_second_time():
    assert all(not outcome.scored for outcome in rounds(LOOKUP, ((1, 2, 1),)))


def test_rows_of_a_batch_are_scored_apart():
    prompts = ((1, 2, 1, 2), (3, 3, 3))
    together = counts(edge for outcome in rounds(PLAIN, prompts) for edge in outcome.scored)
    alone = [counts(edge for outcome in rounds(PLAIN, (prompt,)) for edge in outcome.scored) for prompt in prompts]
    assert together == [[a + b for a, b in zip(*rows)] for rows in zip(*alone)]


def test_sampled_scores_estimate_the_acceptance_in_play():
    """Mean acceptance of the first position over 200 rows of 50 tokens agrees within 0.03."""
    prompts = tuple((1, 2, row % 4) for row in range(200))
    scored = counts(edge for outcome in rounds(PLAIN, prompts, temperature=1.0) for edge in outcome.scored)
    played = counts(edge for outcome in rounds(LOOKUP, prompts, temperature=1.0) for edge in outcome.edges)
    assert abs(scored[2][0] / scored[0][0] - played[2][0] / played[0][0]) < 0.03


def test_stopping_early_a_lookup_is_scored_apart_and_also_while_it_plays_elsewhere():
    early, beneath = Plan(("target", "lookup"), (3,), 0.6), Plan(("target", "a", "lookup"), (3, 2))
    chain = toy_chain(lookup=LookupDrafter("lookup", min_ngram=1))
    chain.prepare([LOOKUP, early, beneath])
    for plan, scored in (
        (PLAIN, {"lookup", "lookup?0.6"}),
        (LOOKUP, {"lookup?0.6"}),
        (beneath, {"lookup", "lookup?0.6"}),
    ):
        chain.start(Sequences(((1, 2, 1, 2),), (GREEDY,), (30,), ((),)))
        edges = []
        while chain.running:
            edges += chain.round(plan).outcome.scored
        assert {edge.drafter for edge in edges} == scored
        sums = {name: sum(sum(edge.drafted) for edge in edges if edge.drafter == name) for name in scored}
        assert sums["lookup?0.6"] > 0
        assert sums.get("lookup", 99) > sums["lookup?0.6"]


def test_what_committed_tokens_say_of_a_proposal():
    """Rows: all agree and more is committed; cut by the end of the text; wrong at 1; prefix not committed; silent."""
    batch = toy_batch(GREEDY, 5, 8, prompts=[(0, 1, 2, 3, 0, 1)])
    tokens = [[1, 2, 3], [0, 1, 2], [1, 3, 3], [0, 0, 0], []]
    proposal = Proposal([1, 4, 1, 6, 2], [3] * 5, tokens, [0] * 5, deterministic=True, parts=[])
    tally = EdgeTally(3)
    overhear(batch, [proposal, dataclasses.replace(proposal, deterministic=False)], tally)
    edge = tally.drain("t", "d")
    assert edge.reached == (4, 3, 1)
    assert edge.offered == (3, 3, 1)
    assert edge.accepted == (3, 2, 1)


def test_a_chain_tells_how_its_last_drafter_would_have_fared_beneath_the_target():
    """A deterministic drafter beneath a, sampled text: acceptance of its first position within 0.03 of that in play."""
    rates = {}
    for plan in (Plan(("target", "a", "argmax"), (4, 2)), Plan(("target", "argmax"), (2,))):
        chain = toy_chain(argmax=ArgmaxDrafter(table_model("argmax", 6, like=toy_chain().target.table, noise=0.8)))
        sampling = tuple(SamplingParams(1.0, seed=row) for row in range(200))
        chain.start(Sequences(((1, 2),) * 200, sampling, (40,) * 200, ((),) * 200))
        accepted = reached = 0
        while chain.running:
            outcome = chain.round(plan).outcome
            for edge in outcome.scored if plan.depth == 3 else outcome.edges:
                assert (edge.verifier, edge.drafter) == ("target", "argmax")
                accepted, reached = accepted + edge.accepted[0], reached + edge.reached[0]
        assert reached > 2000
        rates[plan.depth] = accepted / reached
    assert abs(rates[3] - rates[2]) < 0.03


def test_twins_at_both_ends_of_a_chain_always_agree_and_sampled_ends_are_not_scored():
    plan = Plan(("target", "a", "twin"), (4, 2))
    chain = toy_chain(twin=TableModel("twin", toy_chain().target.table), noise=table_model("noise", 8))
    for params in (GREEDY, SamplingParams(1.0, seed=3)):
        chain.start(Sequences(((1, 2), (3, 0)), (params,) * 2, (30,) * 2, ((),) * 2))
        edges = []
        while chain.running:
            edges += chain.round(plan).outcome.scored
        assert bool(edges) == (params is GREEDY)
        assert all(edge.accepted == edge.reached for edge in edges)
