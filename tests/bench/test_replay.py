"""Replayed rounds against the table of fixed plans, the forecast of the theorem, and a real decoder's own outcomes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaspec import Context, CostModel, Decision, Plan, PlanSpace
from adaspec.bench.fixed import FixedPlans, seconds_to
from adaspec.bench.replay import Replay
from adaspec.bench.simulators import GOOD, SPEEDS, Regime, space, world
from adaspec.bench.traces import Curve, Proposals, Trace, runs
from adaspec.bench.worlds import Segment, Speed, World, replayed, sequences
from adaspec.theory import forecast

SPACE = PlanSpace.grid("t", ["d", "l"], [1, 3, 8], middles=["m"], inner_windows=[1, 2, 4])
EXACT = {"noise": 0.0, "outliers": 0.0}


def counts(edge):
    return {"reached": edge.reached, "offered": edge.offered, "accepted": edge.accepted}


@pytest.mark.parametrize("plan", SPACE, ids=str)
def test_rounds_of_a_fixed_plan_take_what_the_table_says(plan):
    silent = Regime(100, GOOD, silent=frozenset({"d"}))
    made = world([Regime(300, GOOD), silent, Regime(200, GOOD, slower={"d": 3.0})], 0)
    positions, total = FixedPlans(made, SPACE).marks(SPACE.arm(plan))
    replay, at, spent = Replay(made, SPACE), [0], [0.0]
    while not replay.over:
        replay.round(plan)
        at.append(replay.position)
        spent.append(replay.true_seconds)
    assert at == positions.tolist()
    assert spent == pytest.approx(total.tolist())


@pytest.mark.parametrize("plan", [plan for plan in SPACE if plan.depth < 3], ids=str)
def test_rounds_of_several_rows_take_what_the_table_says(plan):
    pairs = PlanSpace([plan for plan in SPACE if plan.depth < 3])
    made = world([Regime(301, GOOD, rows=4), Regime(100, GOOD), Regime(50, GOOD, rows=3)], 1)
    positions, total = FixedPlans(made, pairs).marks(pairs.arm(plan))
    replay, at = Replay(made, pairs), [0]
    while not replay.over:
        outcome = replay.round(plan)
        at.append(replay.position)
        assert outcome.tokens == at[-1] - at[-2]
    assert at == positions.tolist()
    assert replay.true_seconds == pytest.approx(total[-1])


@pytest.mark.parametrize("text", ["t", "t/d:3", "t/l:8", "t/m:3", "t/m/d:8,4", "t/m/d:3,2", "t/m/l:8,2"])
def test_a_stationary_world_is_what_the_theorem_forecasts(text):
    plan, tokens = Plan.parse(text), 60_000
    made = world([Regime(tokens, GOOD)], 2, **EXACT)
    left, seq_len = sequences([tokens], [0])
    made = World("t", made.pairs, SPEEDS, made.lookups, left, seq_len, (Segment(0, tokens),), **EXACT)
    _, total = FixedPlans(made, PlanSpace([plan])).marks(PlanSpace([plan]).arm(plan))
    rate = forecast(
        plan, {edge: [a] for edge, a in GOOD.items()}, lambda m, q: SPEEDS[m].seconds(q, 0), one_pass=("l",)
    ).rate
    assert tokens / total[-1] == pytest.approx(rate, rel=0.01)  # about four standard errors at 60,000 tokens


def test_an_outcome_holds_the_counts_of_its_verifications():
    accepted, offered = np.array([2, 1, 0, 5, 4, 3, 2, 1, 0, 0]), np.array([8, 8, 0, 3, 8, 8, 8, 8, 8, 8])
    left, seq_len = sequences([10], [4])
    made = World(
        "t",
        {("t", "d"): (offered, np.minimum(accepted, offered))},
        SPEEDS,
        frozenset(),
        left,
        seq_len,
        (Segment(0, 10),),
        **EXACT,
    )
    own = PlanSpace.grid("t", ["d"], [4])
    replay = Replay(made, own)
    first = replay.round(own[1])  # two of four accepted
    assert first.tokens == 3
    assert counts(first.edges[0]) == {"reached": (1, 1, 1, 0), "offered": (1, 1, 1, 0), "accepted": (1, 1, 0, 0)}
    assert (first.edges[0].asked, first.edges[0].drafted) == ((1, 1, 1, 1), (1, 1, 1, 1))
    assert [(one.model, one.query_len) for one in first.passes] == [("d", 1)] * 4 + [("t", 5)]
    assert first.catch_up_seconds == pytest.approx(SPEEDS["d"].seconds(3, 0))
    second = replay.round(own[1])  # three offered, all accepted
    assert [(one.model, one.query_len) for one in second.passes] == [("d", 1)] * 3 + [("t", 4)]
    assert (second.tokens, second.edges[0].drafted, second.catch_up_seconds) == (4, (1, 1, 1, 0), 0.0)
    assert counts(second.edges[0]) == {"reached": (1, 1, 1, 1), "offered": (1, 1, 1, 0), "accepted": (1, 1, 1, 0)}
    third = replay.round(own[1])  # three to go: two are asked for, one accepted
    assert (third.tokens, third.edges[0].asked) == (2, (1, 1, 0, 0))
    last = replay.round(own[1])
    assert (last.tokens, last.edges[0].asked, last.edges[0].reached) == (1, (0, 0, 0, 0), (0, 0, 0, 0))
    assert replay.over
    for outcome in (first, second, third, last):
        assert outcome.seconds == pytest.approx(sum(one.seconds for one in outcome.passes) + outcome.catch_up_seconds)
        CostModel(own).observe(Decision(own[1], Context(), 1.0, 0), outcome)


def test_a_chain_of_three_sums_its_inner_verifications():
    made = world([Regime(256, GOOD)], 3, **EXACT)
    plan = Plan.parse("t/m/d:8,2")
    replay = Replay(made, PlanSpace([plan]))
    while replay.world.left[replay.position] > 9:
        outcome = replay.round(plan)
        outer, inner = outcome.edges
        assert (outer.verifier, outer.drafter, inner.verifier, inner.drafter) == ("t", "m", "m", "d")
        passes = [one for one in outcome.passes if one.model == "m"]
        assert inner.asked[0] == sum(one.query_len > 1 for one in passes)
        assert sum(inner.accepted) + len(passes) == 8  # what the middle hands over, one by one
        assert outer.accepted.count(1) + 1 == outcome.tokens


def test_an_idle_drafter_catches_up_and_is_charged_for_it():
    made = world([Regime(256, GOOD)], 4, **EXACT)
    own = PlanSpace.grid("t", ["d"], [2])
    replay = Replay(made, own)
    replay.round(own[1])
    before = replay.position
    for _ in range(20):
        assert replay.round(own.plain).catch_up_seconds == 0.0
    outcome = replay.round(own[1])
    assert replay.position - before >= 21
    assert outcome.catch_up_seconds == pytest.approx(SPEEDS["d"].seconds(20, 0))
    assert replay.round(own[1]).catch_up_seconds == 0.0


def test_an_idle_lookup_is_scored_as_it_would_have_played():
    made = world([Regime(256, GOOD)], 5)
    own = PlanSpace.grid("t", ["d", "l"], [4])
    lookup = Plan.parse("t/l:4")
    scored, played = Replay(made, own), Replay(made, own)
    idle, active = np.zeros((2, 2, 4))
    while not scored.over:
        for edge in scored.round(own.plain).scored:
            idle += (edge.reached, edge.accepted)
    while not played.over and played.world.left[played.position] > 5:
        edge = played.round(lookup).edges[0]
        active += (edge.reached, edge.accepted)
    assert idle[0, 0] >= active[0, 0] > 100
    assert np.abs(idle - active).max() <= 5  # they differ in the last window only


def test_a_lookup_beneath_a_middle_is_scored_for_the_target_too():
    made = world([Regime(256, GOOD)], 5)
    chain = Plan.parse("t/d/l:4,2")
    replay = Replay(made, PlanSpace([chain, Plan.parse("t/l:4")]))
    scored = [edge for _ in range(20) for edge in replay.round(chain).scored]
    assert {(edge.verifier, edge.drafter) for edge in scored} == {("t", "l")}
    assert not Replay(made, PlanSpace([chain])).round(chain).scored  # no plan has that pair


def test_followers_are_scored_and_charged():
    made = world([Regime(64, GOOD)], 6, **EXACT)
    own = PlanSpace.grid("t", ["d", "l"], [4])
    alone, followed = Replay(made, own), Replay(made, own, follow=True)
    names = set()
    for _ in range(20):
        alone.round(own.plain)
        names |= {edge.drafter for edge in followed.round(own.plain).scored}
    assert names == {"d", "l"}
    assert followed.true_seconds > alone.true_seconds + 20 * SPEEDS["d"].seconds(1, 0) * 0.9
    assert followed.round(Plan.parse("t/d:4")).catch_up_seconds == 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 59))
def test_runs_count_matches_up_to_the_end_of_their_sequence(matches, cut):
    lengths = [length for length in (min(cut, len(matches)), len(matches) - cut) if length > 0]
    found, at = [], 0
    for length in lengths:
        own = matches[at : at + length]
        found += [next((k for k, hit in enumerate(own[i:]) if not hit), length - i) for i in range(length)]
        at += length
    assert runs(np.array(matches), np.array(lengths)).tolist() == [min(count, 32) for count in found]


def trace(chance=False):
    rng = np.random.default_rng(0)
    own = np.full(30, 32), rng.integers(0, 9, 30)
    sampled = Proposals(np.full(30, 32), chance=np.full(30, 0.5))
    pairs = {("t", "d"): sampled if chance else Proposals(*own), ("t", "l"): Proposals(own[1], own[1])}
    curve = Curve(np.array([1, 4, 8]), np.array([16, 64]), np.array([[1.0, 1.48], [2.0, 2.48], [3.0, 3.48]]))
    return Trace(
        "t",
        ("a", "b", "b"),
        np.array([5, 6, 7]),
        np.array([10, 12, 8]),
        pairs,
        dict.fromkeys("tdl", curve),
        ("l",),
        "made up",
    )


@pytest.mark.parametrize("chance", [False, True])
def test_a_trace_is_read_as_it_was_written(tmp_path, chance):
    first = trace(chance)
    first.save(tmp_path / "a.npz")
    second = Trace.load(tmp_path / "a.npz")
    assert (second.target, second.kinds, second.lookups, second.note) == ("t", ("a", "b", "b"), ("l",), "made up")
    for edge, own in first.pairs.items():
        told = second.pairs[edge]
        assert told.offered.tolist() == own.offered.tolist()
        assert (
            np.array_equal(own.accepted, told.accepted)
            if own.chance is None
            else np.array_equal(own.chance, told.chance)
        )
    assert second.curves["d"].seconds == pytest.approx(first.curves["d"].seconds)


def test_what_is_no_trace_is_refused(tmp_path):
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"PK no archive")
    with pytest.raises(ValueError, match=r"bad\.npz is no trace"):
        Trace.load(bad)
    np.savez(bad, head=np.array('{"format": "adaspec.trace", "version": 99}'))
    with pytest.raises(ValueError, match="99"):
        Trace.load(bad)
    np.savez(bad, head=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match=r"bad\.npz is no trace"):
        Trace.load(bad)


def test_a_trace_becomes_a_world_in_any_order_of_its_sequences():
    made = replayed(trace(), [2, 0, 1, 1], 0)
    assert made.left.tolist()[:9] == [8, 7, 6, 5, 4, 3, 2, 1, 10]
    assert [(one.start, one.stop, one.tag) for one in made.segments] == [(0, 8, "b"), (8, 18, "a"), (18, 42, "b")]
    assert made.pairs["t", "d"][1][:8].tolist() == trace().pairs["t", "d"].accepted[22:].tolist()
    assert made.speeds["t"].cached == pytest.approx(0.01)
    assert made.speeds["t"].seconds(4, 64) == pytest.approx(2.48)
    assert made.speeds["t"].seconds(2, 0) == pytest.approx(0.84 + 1 / 3)


def test_sampled_acceptance_is_drawn_by_the_seed():
    first, again, other = (replayed(trace(True), [0, 1, 2], seed).pairs["t", "d"][1] for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    assert first.max() <= 12


def test_a_world_refuses_what_it_cannot_play():
    made = world([Regime(64, GOOD)], 0)
    with pytest.raises(ValueError, match="t/x"):
        Replay(made, PlanSpace.grid("t", ["x"], [2]))
    with pytest.raises(ValueError, match="two models"):
        Replay(world([Regime(64, GOOD, rows=2)], 0), SPACE)


def test_noise_blurs_what_is_measured_and_not_what_counts():
    made = world([Regime(5000, GOOD)], 0, noise=0.1, outliers=0.05)
    replay, measured = Replay(made, space(5)), 0.0
    for _ in range(1000):
        measured += replay.round(space(5).plain).seconds
    assert replay.true_seconds == pytest.approx(1000 * SPEEDS["t"].seconds(1, 0))
    assert measured / replay.true_seconds == pytest.approx(1.35, abs=0.2)  # 5 % of the passes take eight times as long


def test_dependence_and_positions_shape_the_acceptance():
    alike = world([Regime(4000, GOOD, dependence=0.9)], 0)
    apart = world([Regime(4000, GOOD)], 0)
    hits = [[made.pairs[edge][1] > 0 for edge in (("t", "d"), ("t", "m"))] for made in (alike, apart)]
    both = [np.corrcoef(*pair)[0, 1] for pair in hits]
    assert both[0] > 0.4 > 0.1 > abs(both[1])
    falling = world([Regime(4000, {("t", "d"): [0.9, 0.5, 0.1]})], 0).pairs["t", "d"][1]
    shares = [(falling > k).sum() / (falling >= k).sum() for k in range(3)]
    assert shares == pytest.approx([0.9, 0.5, 0.1], abs=0.05)


@pytest.mark.parametrize("plans", [5, 50, 139, 500])
def test_a_space_has_as_many_plans_as_asked_for(plans):
    assert len(space(plans)) == plans
    assert space(plans).plain in space(plans)


def test_seconds_are_read_off_between_the_ends_of_rounds():
    assert seconds_to((np.array([0, 4, 8]), np.array([0.0, 1.0, 3.0])), [2, 4, 6]).tolist() == [0.5, 1.0, 2.0]


def test_a_speed_bends_at_its_knee():
    speed = Speed.line(1.0, 0.1, knee=10, steep=0.5)
    assert speed.seconds(10, 0) == pytest.approx(1.9)
    assert speed.seconds(12, 0) == pytest.approx(1.9 + 1.0)
