"""A chain's border and books: refusals, counters, censoring, catch-up and the profile."""

import pytest
from helpers import PROMPT, table_model, toy_chain

from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.decoding.tally import EdgeTally
from adaspec.plan import Plan, PlanSpace

SAMPLED = SamplingParams(temperature=1.0, seed=3)
TREE = Plan.parse("target/a/b:4,2")


def sequences(prompts=(PROMPT,), *, new=12, sampling=SAMPLED, stop=()):
    size = len(prompts)
    return Sequences(tuple(prompts), (sampling,) * size, (new,) * size, (stop,) * size)


def rounds(chain, plan, batch):
    chain.start(batch)
    while chain.running:
        yield chain.round(plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("target/a/nobody:4,2", "'nobody'; known are target, a, b, c, lookup"),
        ("a/b:2", "has the target 'a', this chain has 'target'"),
        ("target/lookup/a:4,2", "'lookup' can only draft, not verify"),
    ],
)
def test_plans_that_cannot_be_played_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        toy_chain(lookup=LookupDrafter("lookup")).prepare([Plan.parse(plan)])


def test_a_drafter_with_the_targets_name_is_refused():
    with pytest.raises(ValueError, match="the target's name 'target'"):
        Chain(table_model("target", 0), {"target": table_model("target", 1)})


def test_a_request_beyond_the_cache_is_refused_with_both_numbers_and_the_row():
    with pytest.raises(ValueError, match=r"need 65 tokens \(prompt 1 has 5\), the cache holds 64"):
        toy_chain().start(sequences([PROMPT, (1, 2, 0, 0, 1)], new=60))
    toy_chain().start(sequences([PROMPT, (1, 2, 0, 0, 1)], new=59))


def test_the_row_that_is_too_long_is_named_even_when_its_prompt_is_short():
    long = Sequences((PROMPT, (1, 2, 0)), (GREEDY,) * 2, (70, 2), ((), ()))
    with pytest.raises(ValueError, match=r"need 72 tokens \(prompt 0 has 2\), the cache holds 64"):
        toy_chain().start(long)


def test_empty_requests_are_refused():
    with pytest.raises(ValueError, match="there is no prompt"):
        sequences([])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        sequences([PROMPT, ()])
    with pytest.raises(ValueError, match="max_new_tokens is at least 1, got 0"):
        sequences(new=0)


@pytest.mark.parametrize("stop", [(), (0,)], ids=["no stop", "stop token"])
@pytest.mark.parametrize("plan", ["target", "target/a:3", "target/a/b:4,2", "target/a/b/lookup:4,3,2"])
def test_the_tokens_of_the_outcomes_sum_to_what_was_emitted(plan, stop):
    chain = toy_chain(lookup=LookupDrafter("lookup", min_ngram=1))
    texts, total = [[], [], []], 0
    for result in rounds(chain, Plan.parse(plan), sequences([PROMPT, (0, 1, 3), (2, 2)], stop=stop)):
        assert result.outcome.tokens == sum(map(len, result.tokens))
        assert result.outcome.seconds >= result.outcome.catch_up_seconds >= 0
        total += result.outcome.tokens
        for text, tokens in zip(texts, result.tokens, strict=True):
            text += tokens
    assert total == sum(map(len, texts))
    for text in texts:
        assert len(text) == 12 or text[-1] in stop
        assert not set(text[:-1]) & set(stop)


def test_rows_that_ended_are_not_counted_and_emit_nothing():
    batch = Sequences((PROMPT,) * 3, (SAMPLED,) * 3, (1, 4, 9), ((),) * 3)
    left = [1, 4, 9]
    for result in rounds(toy_chain(), Plan.parse("target/a:3"), batch):
        assert result.outcome.rows == sum(budget > 0 for budget in left)
        left = [budget - len(tokens) for budget, tokens in zip(left, result.tokens, strict=True)]
        assert min(left) >= 0
        assert result.finished == [budget == 0 for budget in left]


@pytest.mark.parametrize("plan", ["target/a:3", "target/a/b:4,2"])
def test_at_the_target_every_round_emits_what_was_accepted_and_one_token_more(plan):
    """Without stop tokens; a verification asked for nothing when one token of budget was left."""
    size = 5
    batch = sequences([PROMPT] * size, new=15)
    batch = Sequences(batch.prompts, tuple(SamplingParams(1.0, seed=s) for s in range(size)), *_rest(batch))
    for result in rounds(toy_chain(), Plan.parse(plan), batch):
        edge = result.outcome.edges[0]
        assert (edge.verifier, edge.drafter) == ("target", plan.split("/")[1].split(":")[0])
        assert sum(edge.accepted) + result.outcome.rows == result.outcome.tokens
        assert edge.verifications <= result.outcome.rows
        counts = zip(edge.reached, edge.offered, edge.accepted, edge.asked, edge.drafted, strict=True)
        for reached, offered, accepted, asked, drafted in counts:
            assert accepted <= offered <= reached <= asked
            assert offered <= drafted <= asked
        assert list(edge.accepted) == sorted(edge.accepted, reverse=True)


def _rest(batch):
    return batch.max_new_tokens, batch.stop_ids


def test_a_position_behind_the_first_rejection_is_not_reached():
    """Rows: all of 3 accepted; rejected at once; second rejected; drafter silent after one; asked for one only."""
    tally = EdgeTally(3)
    for asked, offered, accepted in ((3, 3, 3), (3, 3, 0), (3, 3, 1), (3, 1, 1), (1, 1, 1)):
        tally.add(asked, offered, accepted)
    edge = tally.drain("t", "d")
    assert edge.reached == (5, 3, 1)
    assert edge.offered == (5, 2, 1)
    assert edge.accepted == (4, 1, 1)
    assert edge.asked == (5, 4, 4)
    assert edge.drafted == (5, 3, 3)
    assert edge.verifications == 5
    assert tally.drain("t", "d").reached == (0, 0, 0)


def test_a_draft_that_ended_at_a_stop_token_reaches_no_further():
    """A perfect drafter whose text stops: nothing behind the stop token counts as a silent position."""
    target = table_model("target", 0)
    chain = Chain(target, {"twin": table_model("twin", 0)}, capacity=64)
    texts = [t for r in rounds(chain, Plan(("target",)), sequences(sampling=GREEDY)) for t in r.tokens[0]]
    stop = next(token for token in texts if texts.index(token) == 1)  # the second token, new there
    (result,) = rounds(chain, Plan.parse("target/twin:4"), sequences(sampling=GREEDY, stop=(stop,)))
    edge = result.outcome.edges[0]
    assert result.tokens == [texts[:2]]
    assert edge.reached == edge.offered == edge.accepted == (1, 1, 0, 0)


def test_a_round_that_broke_off_leaves_nothing_to_the_next_batch():
    """What its middle stage had verified is of rows that are gone."""
    chain, broken = (
        toy_chain(lookup=LookupDrafter("lookup", min_ngram=1)),
        toy_chain(lookup=LookupDrafter("lookup", min_ngram=1)),
    )
    plan, verify = Plan.parse("target/a/lookup:4,2"), broken.target.verify
    broken.start(sequences([PROMPT, (0, 1, 3, 0, 1), (2, 2, 2)]))

    def fails(*arguments):
        raise RuntimeError("out of memory")

    broken.target.verify = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.round(plan)
    broken.target.verify = verify
    outcomes = []
    for each in (chain, broken):
        outcome = next(rounds(each, plan, sequences())).outcome
        outcomes.append([(edge.asked, edge.accepted) for edge in (*outcome.edges, *outcome.scored)])
    assert outcomes[0] == outcomes[1]


def test_a_silent_drafter_was_reached_and_offered_nothing():
    chain = toy_chain(lookup=LookupDrafter("lookup", min_ngram=4, max_ngram=4))
    result = next(rounds(chain, Plan.parse("target/lookup:3"), sequences()))
    edge = result.outcome.edges[0]
    assert (edge.reached, edge.offered, edge.accepted) == ((1, 0, 0), (0, 0, 0), (0, 0, 0))
    assert result.outcome.tokens == 1


def test_catch_up_is_charged_to_the_round_that_needs_it():
    chain = toy_chain()
    chain.start(sequences(new=20))
    plain, drafted = Plan(("target",)), Plan.parse("target/a:2")
    assert chain.round(plain).outcome.catch_up_seconds == 0
    for _ in range(4):
        chain.round(plain)
    assert chain.round(drafted).outcome.catch_up_seconds > 0  # "a" has never been fed
    assert chain.round(drafted).outcome.catch_up_seconds == 0


def test_passes_are_recorded_with_their_shapes():
    chain = toy_chain()
    chain.start(sequences([PROMPT, (1, 2, 3)], new=20))
    chain.round(TREE)
    outcome = chain.round(TREE).outcome
    names = [each.model for each in outcome.passes]
    assert names.count("target") == 1
    assert names[-1] == "target"
    assert names.count("a") == len([each for each in outcome.passes if each.model == "a"]) >= 1
    target = outcome.passes[-1]
    assert target.query_len == 5
    assert target.batch_size == 2
    assert all(each.seconds >= 0 for each in outcome.passes)


def test_a_round_leaves_no_model_ahead_of_the_text():
    """The one rule of caches: a cache is never longer than the committed text, less its last token."""
    chain = toy_chain()
    chain.start(sequences([PROMPT, (0, 1, 2), (3, 3)], new=20, stop=(0,)))
    plans = list(PlanSpace.grid("target", ["b", "c"], [2, 4], middles=["a"], inner_windows=[1, 3]))
    turn = 0
    while chain.running:
        chain.round(plans[turn % len(plans)])
        turn += 3
        for model in chain.members.values():
            assert bool((model.lengths < chain._batch.sequence.lengths).all())


def test_the_profile_gives_a_pass_per_shape():
    chain = toy_chain(lookup=LookupDrafter("lookup"))
    space = PlanSpace.grid("target", ["b", "lookup"], [2, 4], middles=["a"], inner_windows=[1])
    shapes = space.shapes()
    measured = chain.profile(shapes, batch_size=3, repeats=2)
    wanted = {(name, length) for name, lengths in shapes.items() if name != "lookup" for length in lengths}
    assert len(measured) == len(wanted)
    assert {(each.model, each.query_len) for each in measured} == wanted
    assert all(each.seconds > 0 and each.batch_size == 3 for each in measured)


def test_the_context_tells_running_rows_and_their_mean_length():
    chain = toy_chain()
    chain.start(Sequences((PROMPT, (1, 2, 3, 0)), (SAMPLED,) * 2, (1, 5), ((), ())))
    assert (chain.context("x").batch_size, chain.context("x").seq_len, chain.context("x").tag) == (2, 3, "x")
    chain.round(Plan(("target",)))
    assert (chain.context().batch_size, chain.context().seq_len) == (1, 5)
