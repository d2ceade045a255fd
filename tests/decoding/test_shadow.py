"""A lookup drafter is judged on committed text exactly as it would have fared in play."""

import torch
from helpers import toy_chain

from adaspec.decoding.chain import Sequences
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.sampling import SamplingParams
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
    """Verification by verification; those near the end of the budget are cut differently and left out."""
    prompts = ((1, 2, 1, 2, 1),)
    played = [edge for outcome in rounds(LOOKUP, prompts) for edge in outcome.edges]
    scored = [edge for outcome in rounds(PLAIN, prompts) for edge in outcome.scored]
    assert sum(edge.accepted[0] for edge in played) > 3
    assert all(edge.verifications == 1 for edge in scored)
    mine, theirs = ([(e.reached, e.offered, e.accepted) for e in edges] for edges in (scored, played))
    assert len(theirs) > 6
    assert mine[: len(theirs) - 4] == theirs[:-4]


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
