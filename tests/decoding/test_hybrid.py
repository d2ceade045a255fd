"""Hybrids: who speaks, where the next goes on, what is told of each part, and what is refused."""

import pytest
import torch
from helpers import PROMPT, table_model, toy_chain
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Sequences
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.hybrid import HybridDrafter
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.sampling import GREEDY, Sampler, SamplingParams
from adaspec.plan import Plan


class Says(Drafter):
    """Always proposes the same tokens, with the same confidences (None: it does not tell)."""

    def __init__(self, tokens, sure=None):
        super().__init__()
        self.tokens, self.sure, self.asked, self.rolled = tokens, sure, [], []

    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        self.asked.append((limits.tolist(), stop))
        tokens = torch.tensor([self.tokens] * len(limits), dtype=torch.long).view(len(limits), -1)
        counts = limits.clamp(max=len(self.tokens))
        batch.sequence.append(tokens, counts)
        sure = None if self.sure is None else torch.tensor([self.sure] * len(limits))
        return Draft(tokens, counts, None, sure)

    def rollback(self, lengths: Tensor) -> None:
        self.rolled.append(lengths.tolist())


def propose(hybrid, limits, *, stop=0.0, stop_id=-1):
    sequence = TokenBuffer(len(limits), 30)
    sequence.append(torch.tensor([[1, 2]] * len(limits)), torch.full((len(limits),), 2))
    batch = Batch(sequence, Sampler([GREEDY]), torch.full((len(limits), 1), stop_id), sequence.lengths)
    draft = hybrid.propose(batch, torch.tensor(limits), stop)
    rows = [draft.tokens[row, :count].tolist() for row, count in enumerate(draft.counts.tolist())]
    assert rows == [sequence.row(row, 2) for row in range(len(limits))]
    return rows, {name: counts.tolist() for name, counts in draft.parts}


def test_the_next_part_is_asked_for_what_is_left_of_each_row():
    first, second = Says([3, 4]), Says([5, 6, 7])
    rows, parts = propose(HybridDrafter({"x": first, "y": second}), [1, 3, 6, 0])
    assert rows == [[3], [3, 4, 5], [3, 4, 5, 6, 7], []]
    assert parts == {"x": [1, 2, 2, 0], "y": [0, 1, 3, 0]}
    assert second.asked == [([0, 1, 4, 0], 0.0)]


def test_a_part_that_fills_the_window_leaves_the_next_unasked():
    second = Says([5])
    rows, parts = propose(HybridDrafter({"x": Says([3, 4]), "y": second}), [2, 1])
    assert rows == [[3, 4], [3]]
    assert parts["y"] == [0, 0]
    assert second.asked == []


def test_what_a_deterministic_part_is_not_sure_of_is_left_to_the_next_but_not_of_the_last_part():
    first = Says([3, 4, 3], [0.9, 0.3, 0.9])
    assert propose(HybridDrafter({"x": first, "y": Says([5])}, 0.5), [4])[0] == [[3, 5]]
    assert propose(HybridDrafter({"y": Says([5]), "x": first}, 0.5), [4])[0] == [[5, 3, 4, 3]]
    assert first.rolled[0] == [3]  # behind what was kept of it


def test_a_stop_ends_the_whole_window_and_silence_does_not():
    ended = HybridDrafter({"x": Says([3, 4], [0.9, 0.6]), "y": Says([5])}, 0.5)
    assert propose(ended, [4], stop=0.7)[0] == [[3, 4]]
    assert propose(ended, [4], stop=0.5)[0] == [[3, 4, 5]]
    silent = HybridDrafter({"x": Says([], []), "y": Says([5])})
    assert propose(silent, [4], stop=0.7)[0] == [[5]]
    untold = HybridDrafter({"x": Says([3]), "y": Says([5])})
    assert propose(untold, [4], stop=0.7)[0] == [[3]]  # it ended early, so it was not sure
    assert propose(untold, [4])[0] == [[3, 5]]


def test_nobody_goes_on_where_the_next_token_would_hardly_be_reached():
    likely, unlikely = Says([3, 4], [0.8, 0.7]), Says([3, 4], [0.7, 0.7])
    assert propose(HybridDrafter({"x": likely, "y": Says([5])}, 0.5), [4])[0] == [[3, 4, 5]]
    assert propose(HybridDrafter({"x": unlikely, "y": Says([5])}, 0.5), [4])[0] == [[3, 4]]
    assert propose(HybridDrafter({"x": unlikely, "y": Says([5])}, 0.5), [1])[0] == [[3]]


def test_nobody_goes_on_behind_a_stop_token():
    assert propose(HybridDrafter({"x": Says([3]), "y": Says([5])}), [4], stop_id=3)[0] == [[3]]


def test_greedy_text_is_that_of_plain_decoding_and_parts_are_reported_behind_the_plans_edges():
    near = table_model("near", 9, like=toy_chain().target.table, noise=0.5)
    lookup = LookupDrafter("lookup", min_ngram=1, max_ngram=2)
    texts = []
    for plan in map(Plan.parse, ("target", "target/both:4", "target/a/both:4,2", "target/both:4?0.6")):
        chain = toy_chain(lookup=lookup, near=near, both=HybridDrafter({"lookup": lookup, "near": near}))
        chain.start(Sequences((PROMPT, (0, 1, 3, 0, 1)), (GREEDY,) * 2, (30, 30), ((),) * 2))
        text = [[], []]
        while chain.running:
            result = chain.round(plan)
            for row, tokens in zip(text, result.tokens, strict=True):
                row += tokens
            names = [(edge.verifier, edge.drafter) for edge in result.outcome.edges]
            if plan.depth > 1:
                assert names[: plan.depth - 1] == [edge[:2] for edge in plan.edges()]
                stop = "?0.6" if plan.stop else ""
                mine = [(plan.models[-2], f"both.{part}{stop}") for part in ("lookup", "near")]
                assert names[plan.depth - 1 :] in ([], mine)
                assert {each.model for each in result.outcome.passes} <= {"target", "a", "lookup", "near"}
        texts.append(text)
    assert texts[1:] == texts[:1] * 3


def test_acceptance_of_the_parts_sums_to_that_of_the_whole():
    near = table_model("near", 9, like=toy_chain().target.table, noise=0.5)
    lookup = LookupDrafter("lookup", min_ngram=1, max_ngram=2)
    chain = toy_chain(both=HybridDrafter({"lookup": lookup, "near": near}, 0.2))
    chain.start(Sequences((PROMPT,) * 5, tuple(SamplingParams(1.0, seed=s) for s in range(5)), (40,) * 5, ((),) * 5))
    sums = {"both": 0, "both.lookup": 0, "both.near": 0}
    while chain.running:
        for edge in chain.round(Plan.parse("target/both:4")).outcome.edges:
            sums[edge.drafter] += sum(edge.accepted)
            assert all(a <= o <= r <= k for a, o, r, k in zip(edge.accepted, edge.offered, edge.reached, edge.asked))
    assert sums["both"] == sums["both.lookup"] + sums["both.near"]
    assert min(sums.values()) > 3


def test_until_it_has_played_a_hybrid_is_believed_to_cost_a_pass_of_its_model_per_token():
    near = table_model("near", 9, like=toy_chain().target.table)
    lookup = LookupDrafter("lookup")
    chain = toy_chain(both=HybridDrafter({"lookup": lookup, "near": near}), lookup=lookup)
    [timed] = chain.profile({"both": [1], "lookup": [1]})
    assert (timed.model, timed.query_len) == ("both", 1)


def test_a_verifier_inside_the_hybrid_beneath_it_is_refused():
    chain = toy_chain()
    chain = toy_chain(both=HybridDrafter({"lookup": LookupDrafter("lookup"), "a": chain.members["a"]}))
    chain.members["a"] = chain.members["both"].models[0]
    with pytest.raises(ValueError, match="'a' would verify its own drafts in 'both'"):
        chain.prepare([Plan.parse("target/a/both:4,2")])


def test_a_hybrid_of_one_or_with_an_impossible_floor_is_refused():
    with pytest.raises(ValueError, match="at least two parts, got x"):
        HybridDrafter({"x": Says([1])})
    with pytest.raises(ValueError, match=r"1\.5"):
        HybridDrafter({"x": Says([1]), "y": Says([2])}, 1.5)
