"""A drafter that fails costs its draft: the text is that of the target, whatever fails and wherever."""

from __future__ import annotations

import pytest
import torch
from helpers import PROMPT, VOCAB, count, joint_law, p_value, play, toy_batch, toy_chain

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.chain import Sequences
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan


class Faulty(Drafter):
    """Proposes what ``fault`` makes, in every ``every``-th call; else a token of its own."""

    def __init__(self, fault: str, every: int = 2) -> None:
        super().__init__()
        self.fault, self.every, self.calls = fault, every, 0

    def start(self, batch_size: int, capacity: int) -> None:
        if self.fault == "start":
            raise RuntimeError("no memory for my secret")

    def rollback(self, lengths) -> None:
        if self.fault == "rollback":
            raise RuntimeError("no way back for my secret")

    def propose(self, batch: Batch, limits, stop=0.0):
        self.calls += 1
        counts = limits.clamp(max=2)
        tokens = torch.full((len(limits), 2), self.calls % VOCAB)
        if self.calls % self.every:
            batch.sequence.append(tokens, counts)
            return Draft(tokens, counts, None)
        batch.sequence.append(tokens, counts)  # half done when it fails
        match self.fault:
            case "raise":
                raise RuntimeError("broken by my secret")
            case "outside":
                return Draft(tokens + VOCAB, counts, None)
            case "negative":
                return Draft(tokens - VOCAB, counts, None)
            case "too many":
                return Draft(tokens.repeat(1, 9), limits + 5, None)
            case "no law":
                return Draft(tokens, counts, torch.full((len(limits), 2, VOCAB), torch.nan))
            case "shape":
                return Draft(tokens[:, 0], counts, None)
            case _:
                return Draft(tokens, counts, None)


FAULTS = ["raise", "outside", "negative", "too many", "no law", "shape", "start", "rollback"]
PLANS = ["target/faulty:3", "target/a/faulty:3,2"]


def decode(chain, plan: Plan, sequences: Sequences) -> list[list[int]]:
    chain.start(sequences)
    texts: list[list[int]] = [[] for _ in sequences.prompts]
    while chain.running:
        for text, tokens in zip(texts, chain.round(plan).tokens):
            text += tokens
    return texts


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("plan", PLANS)
def test_greedy_texts_are_the_target_own_and_the_failure_is_told(fault: str, plan: str) -> None:
    rows = Sequences((PROMPT, (3, 0, 1)), (GREEDY, GREEDY), (20, 13), ((), ()))
    wanted = decode(toy_chain(), Plan(("target",)), rows)
    told: list[tuple[str, str]] = []
    chain = toy_chain(faulty=Faulty(fault))
    chain.shield(lambda name, reason: told.append((name, reason)))
    assert decode(chain, Plan.parse(plan), rows) == wanted
    assert {name for name, _ in told} == {"faulty"}
    wanted_reason = "RuntimeError at test_shield.py:" if fault in ("raise", "start", "rollback") else "a draft"
    assert all(reason.startswith(wanted_reason) and "secret" not in reason for _, reason in told)


def test_a_middle_model_that_fails_is_named_and_passed_over() -> None:
    rows = Sequences((PROMPT,), (GREEDY,), (20,), ((),))
    wanted = decode(toy_chain(), Plan(("target",)), rows)
    told: list[str] = []
    chain = toy_chain()
    chain.shield(lambda name, reason: told.append(name))
    forward, calls = chain.members["a"]._forward, [0]

    def failing(tokens, slots, rows):
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise RuntimeError("out of memory")
        return forward(tokens, slots, rows)

    chain.members["a"]._forward = failing
    assert decode(chain, Plan.parse("target/a/b:4,2"), rows) == wanted
    assert set(told) == {"a"}


def test_a_lookup_drafter_that_only_watches_may_fail_too() -> None:
    from adaspec.decoding.lookup import LookupDrafter

    rows = Sequences((PROMPT,), (GREEDY,), (20,), ((),))
    wanted = decode(toy_chain(), Plan(("target",)), rows)
    told: list[str] = []
    lookup = LookupDrafter("lookup")
    chain = toy_chain(lookup=lookup)
    chain.prepare([Plan.parse("target/lookup:2")])
    chain.shield(lambda name, reason: told.append(name))

    def broken(*arguments):
        raise RuntimeError("broken")

    lookup.guess = broken
    assert decode(chain, Plan(("target",)), rows) == wanted
    assert set(told) == {"lookup"}


def test_without_a_shield_a_failure_is_raised() -> None:
    rows = Sequences((PROMPT,), (GREEDY,), (20,), ((),))
    with pytest.raises(RuntimeError, match="broken"):
        decode(toy_chain(faulty=Faulty("raise")), Plan.parse(PLANS[0]), rows)


@pytest.mark.parametrize("plan", PLANS)
def test_sampled_texts_have_the_target_law_while_a_drafter_fails_now_and_then(plan: str) -> None:
    """200 000 rows of one batch; the failure hits all rows at once and depends on the call alone."""
    params = SamplingParams(temperature=0.9, seed=5)
    chain = toy_chain(faulty=Faulty("raise", every=3))
    told: list[str] = []
    chain.shield(lambda name, reason: told.append(name))
    tokens = play(chain, Plan.parse(plan), toy_batch(params, 200_000, 4), 3)
    law = joint_law(chain.target.table.numpy(), 3, params)
    assert told
    assert p_value(count(tokens, 3), law) > 1e-4
