"""What the cost model believes: before anything, after a profile, after rounds, and after things have changed."""

import json

import numpy as np
import pytest

from adaspec import Context, CostModel, CostPriors, Decision, EdgeOutcome, Pass, Plan, PlanSpace, RoundOutcome, forecast
from adaspec.acceptance import imputed
from adaspec.merging import added
from adaspec.priors import one_rate

SPACE = PlanSpace.grid("t", ["d", "m"], [2, 4, 8], middles=["m"], inner_windows=[2, 3])
PAIR = Plan.parse("t/d:4")
ONE = Context()


def decision(plan=PAIR, context=ONE):
    return Decision(plan, context, 1.0, 0)


def edge(reached, accepted, pair=("t", "d")):
    return EdgeOutcome(*pair, tuple(reached), tuple(reached), tuple(accepted))


def passes(model, query_len, seconds, times=1, batch_size=1, seq_len=0):
    return [Pass(model, query_len, batch_size, seq_len, seconds)] * times


def learn(costs, outcome, times=1, plan=PAIR, context=ONE):
    for _ in range(times):
        costs.observe(decision(plan, context), outcome)


def test_an_unknown_pair_has_the_documented_prior():
    costs = CostModel(SPACE, acceptance={("t", "m"): 0.9})
    priors = costs.priors
    assert costs.acceptance("t", "d").tolist() == pytest.approx(
        [priors.acceptance * priors.caution ** (k + 1) for k in range(8)]
    )
    assert costs.acceptance("t", "m").tolist() == pytest.approx([0.9] * 8)
    with pytest.raises(KeyError):
        costs.acceptance("d", "t")


def test_what_is_known_beforehand_gives_way_to_what_is_seen():
    """After its weight in positions the belief stands about half way; it is drawn from with that weight."""
    costs = CostModel(SPACE, acceptance={("t", "d"): 0.9})
    wide = CostModel(SPACE, CostPriors(known_strength=1.0), acceptance={("t", "d"): 0.9})
    drawn = [each.sample_rates(np.random.default_rng(0), ONE, 400)[:, SPACE.arm(PAIR)] for each in (costs, wide)]
    assert drawn[0].std() < 0.95 * drawn[1].std()
    learn(costs, RoundOutcome(1, 0.1, edges=(edge([1], [0]),)), times=int(costs.priors.known_strength))
    assert 0.3 < costs.acceptance("t", "d")[4] < 0.6


@pytest.mark.parametrize(
    ("hazards", "rate"), [([0.5], 0.5), ([0.5, 0.5, 0.5], 0.5), ([0.8, 0.5], 1.2 / 1.8), ([1.0, 0.0], 0.5)]
)
def test_positions_weigh_as_often_as_they_are_reached(hazards, rate):
    assert one_rate(hazards) == pytest.approx(rate)


def test_acceptance_is_learned_per_position_and_extrapolated_beyond():
    costs = CostModel(SPACE)
    rng = np.random.default_rng(0)
    for _ in range(300):
        first = int(rng.random() < 0.9)
        learn(
            costs, RoundOutcome(1 + first, 0.1, edges=(edge([1, first], [first, int(first and rng.random() < 0.6)]),))
        )
    found = costs.acceptance("t", "d")
    assert found[0] == pytest.approx(0.9, abs=0.05)  # three standard errors
    assert found[1] == pytest.approx(0.6, abs=0.1)
    rate = 0.76  # (0.9 + 0.9 * 0.6) / 1.9, the edge's one rate, times the caution per unseen position
    ratios = found[3:] / found[2:-1]
    assert found[2] == pytest.approx(rate * costs.priors.caution, abs=0.06)
    assert ratios.tolist() == pytest.approx([costs.priors.caution] * 5, abs=1e-6)


def test_a_silent_drafter_counts_as_not_accepted():
    costs = CostModel(SPACE)
    learn(costs, RoundOutcome(1, 0.1, edges=(EdgeOutcome("t", "d", (10,), (0,), (0,)),)))
    assert costs.acceptance("t", "d")[0] < 0.1


def test_one_edge_teaches_every_plan_that_holds_it_and_no_other():
    costs = CostModel(SPACE)
    before = costs.forecast(ONE)[0]
    learn(costs, RoundOutcome(5, 0.1, edges=(edge([20] * 4, [20] * 4),)), 5)
    gain = costs.forecast(ONE)[0] / before
    for plan, more in zip(SPACE, gain):
        assert (more > 1.2) == (plan.models[:2] == ("t", "d")), plan


def test_pairs_and_models_outside_the_space_are_passed_over():
    costs = CostModel(SPACE)
    before = costs.forecast(ONE)
    learn(costs, RoundOutcome(1, 0.1, edges=(edge([5], [5], ("t", "x")),), passes=tuple(passes("x", 1, 9.0))))
    # the pass counts as time of the round only, none of which is outside its passes
    assert np.allclose(costs.forecast(ONE), before)


def test_before_any_pass_the_guess_follows_the_target():
    costs = CostModel(SPACE)
    assert costs.seconds("t", 1, ONE) == pytest.approx(0.03, rel=0.05)
    costs.profile(passes("t", 1, 0.9, 3))
    assert costs.seconds("t", 1, ONE) == pytest.approx(0.9, rel=0.01)
    assert costs.seconds("m", 1, ONE) == pytest.approx(0.9 * costs.priors.middle_ratio, rel=0.05)
    assert costs.seconds("d", 1, ONE) == pytest.approx(0.9 * costs.priors.drafter_ratio, rel=0.05)


def test_a_profile_is_believed_between_and_beyond_its_query_lengths():
    costs = CostModel(SPACE)
    for query_len in (1, 5, 9):
        costs.profile(passes("t", query_len, 0.1 + 0.02 * query_len, 4))
    costs.profile([*passes("d", 1, 0.01, 2), Pass("d", 1, 1, 0, 5.0)])
    for query_len in range(1, 10):
        assert costs.seconds("t", query_len, ONE) == pytest.approx(0.1 + 0.02 * query_len, rel=0.05)
    assert costs.seconds("d", 1, ONE) == pytest.approx(0.01, rel=0.01)  # the median of three


def test_seconds_grow_with_batch_and_context_as_measured():
    costs = CostModel(SPACE)

    def truth(q, b, s):
        return 0.05 + 0.01 * b * q + 0.04 * b * s / 1024

    for batch_size in (1, 4):
        for query_len in (1, 5, 9):
            for seq_len in (0, 512, 2048):
                one = truth(query_len, batch_size, seq_len)
                costs.profile(passes("t", query_len, one, 3, batch_size, seq_len))
    assert costs.seconds("t", 3, Context(2, 1024)) == pytest.approx(truth(3, 2, 1024), rel=0.1)  # a batch never seen
    assert costs.seconds("t", 5, Context(4, 2048)) > 1.5 * costs.seconds("t", 5, Context(4, 0))


def test_an_outlier_moves_little_and_a_lasting_change_is_followed():
    costs = CostModel(SPACE)
    usual = RoundOutcome(1, 0.1, passes=tuple(passes("t", 1, 0.1)))
    learn(costs, usual, 30, SPACE.plain)
    learn(costs, RoundOutcome(1, 5.0, passes=tuple(passes("t", 1, 5.0))), 1, SPACE.plain)
    assert costs.seconds("t", 1, ONE) < 0.105
    assert costs.rates(ONE)[0] > 9.0
    learn(costs, RoundOutcome(1, 0.3, passes=tuple(passes("t", 1, 0.3))), 150, SPACE.plain)
    assert costs.seconds("t", 1, ONE) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize(("factor", "believed"), [(3.0, False), (1 / 3, False), (1.2, True)])
def test_a_grossly_wrong_profile_keeps_its_shape_and_gives_up_its_level(factor, believed):
    """The target was profiled at ``factor`` x its seconds, which 4 rounds at one query length show."""
    costs = CostModel(SPACE)
    costs.profile(one for q in (1, 2, 3, 5, 9) for one in passes("t", q, factor * 0.1 * (1 + 0.02 * q), 3))
    learn(costs, RoundOutcome(1, 0.102, passes=tuple(passes("t", 1, 0.102))), 4, SPACE.plain)
    assert costs.seconds("t", 1, ONE) == pytest.approx(0.102, rel=0.12)
    other = 0.118 * (factor if believed else 1.0)
    assert costs.seconds("t", 9, ONE) == pytest.approx(other, rel=0.1)


def played(costs, seconds, times, catch_up=0.0):
    """Rounds of the pair whose passes take what they should, while the whole round takes ``seconds``."""
    inside = (*passes("t", 5, 0.1), *passes("d", 1, 0.01, 4))
    counts = edge([10] * 4, [8] * 4)
    learn(costs, RoundOutcome(3, seconds, catch_up_seconds=catch_up, edges=(counts,), passes=inside), times)


def test_measurement_overrules_the_theorem_in_time():
    costs, arm = CostModel(SPACE), SPACE.arm(PAIR)
    played(costs, 0.14, 1)
    tokens, seconds = costs.forecast(ONE)
    assert costs.rates(ONE)[arm] == pytest.approx(tokens[arm] / seconds[arm], rel=0.03)
    played(costs, 0.14, 300)
    tokens, seconds = costs.forecast(ONE)
    theorem, believed, measured = tokens[arm] / seconds[arm], costs.rates(ONE)[arm], 3 / 0.14
    assert min(theorem, measured) < believed < max(theorem, measured)
    assert abs(np.log(believed / measured)) < 0.5 * abs(np.log(theorem / measured))


def test_time_outside_the_passes_is_charged_by_depth():
    costs, arm = CostModel(SPACE), SPACE.arm(PAIR)
    played(costs, 0.14, 50)
    before = costs.forecast(ONE)[1]
    costs = CostModel(SPACE)
    played(costs, 0.19, 50)
    assert costs.forecast(ONE)[1][arm] - before[arm] == pytest.approx(0.05, rel=0.02)


def test_catch_up_is_charged_to_the_plan_that_needs_it():
    without, charged = CostModel(SPACE), CostModel(SPACE)
    played(without, 0.14, 100)
    played(charged, 0.24, 100, catch_up=0.1)
    assert np.allclose(without.forecast(ONE)[1], charged.forecast(ONE)[1])  # the theorem does not know of it
    ratio = charged.rates(ONE) / without.rates(ONE)
    arm = SPACE.arm(PAIR)
    assert ratio[arm] < 0.85
    assert np.allclose(np.delete(ratio, arm), 1.0)


def test_a_change_of_acceptance_is_noticed_within_25_rounds():
    costs = CostModel(SPACE)
    learn(costs, RoundOutcome(4, 0.1, edges=(edge([1, 1, 1, 1], [1, 1, 1, 0]),)), 200)
    assert costs.acceptance("t", "d")[0] > 0.9
    learn(costs, RoundOutcome(1, 0.1, edges=(edge([1, 0, 0, 0], [0, 0, 0, 0]),)), 25)
    assert costs.acceptance("t", "d")[0] < 0.2


def test_what_is_not_played_is_forgotten_slowly():
    costs = CostModel(SPACE)
    learn(costs, RoundOutcome(1, 0.1, edges=(edge([5], [0]),)), 4)
    low = costs.acceptance("t", "d")[0]
    learn(costs, RoundOutcome(1, 0.1), 20, SPACE.plain)
    assert costs.acceptance("t", "d")[0] < low + 0.02
    learn(costs, RoundOutcome(1, 0.1), 1500, SPACE.plain)
    assert costs.acceptance("t", "d")[0] > 0.35


def test_draws_surround_the_forecast_and_share_their_world():
    costs = CostModel(SPACE)
    played(costs, 0.14, 30)
    draws = costs.sample_rates(np.random.default_rng(0), ONE, 400)
    assert draws.shape == (400, len(SPACE))
    arms = [SPACE.arm(Plan.parse(f"t/d:{window}")) for window in (2, 4)]
    assert np.median(draws[:, arms], axis=0) == pytest.approx(costs.rates(ONE)[arms], rel=0.05)
    unknown = np.log(draws[:, [SPACE.arm(Plan.parse(f"t/m:{window}")) for window in (2, 4)]])
    assert np.corrcoef(unknown.T)[0, 1] > 0.7
    sharp = costs.sample_rates(np.random.default_rng(0), ONE, 400, sharpness=4.0)
    assert np.log(sharp[:, 2]).std() < 0.75 * np.log(draws[:, 2]).std()


def test_upper_rates_are_above_and_fall_with_delta():
    costs = CostModel(SPACE)
    played(costs, 0.14, 30)
    high, low = costs.upper_rates(0.05, ONE), costs.upper_rates(0.4, ONE)
    assert (high > low).all()
    assert (low > costs.rates(ONE) * 0.999).all()
    with pytest.raises(ValueError, match=r"0\.9"):
        costs.upper_rates(0.9, ONE)


def test_a_batch_counts_its_tokens():
    costs = CostModel(SPACE)
    assert costs.forecast(Context(4))[0] == pytest.approx(4 * costs.forecast(ONE)[0])


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (RoundOutcome(1, 0.0), "takes time"),
        (RoundOutcome(1, float("nan")), "takes time"),
        (RoundOutcome(-1, 0.1), "loses no token"),
        (RoundOutcome(1, 0.1, catch_up_seconds=float("nan")), "catch-up takes time"),
        (RoundOutcome(1, 0.1, catch_up_seconds=-0.1), "catch-up takes time"),
        (RoundOutcome(0, 0.1, rows=0), "at least 1 row"),
        (RoundOutcome(1, 0.1, edges=(edge([1], [2]),)), "accepted <= reached"),
        (RoundOutcome(1, 0.1, scored=(edge([1, 0], [1]),)), "accepted <= reached"),
        (RoundOutcome(1, 0.1, edges=(EdgeOutcome("t", "d", (1,), (1,), (1,), (1,), (2,)),)), "drafted <= asked"),
        (RoundOutcome(1, 0.1, passes=(Pass("t", 1, 1, 0, -0.1),)), "a pass takes time"),
    ],
)
def test_impossible_rounds_are_refused(outcome, message):
    with pytest.raises(ValueError, match=message):
        learn(CostModel(SPACE), outcome)


def test_a_plan_outside_the_space_is_refused():
    with pytest.raises(ValueError, match="t/d:7"):
        learn(CostModel(SPACE), RoundOutcome(1, 0.1), plan=Plan.parse("t/d:7"))


@pytest.mark.parametrize("wrong", [{"acceptance": 1.0}, {"keep": 1.1}, {"idle_keep": 0.0}, {"pass_spread": -1.0}])
def test_impossible_priors_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CostPriors(**wrong)


def drafts(asked, drafted, pair=("t", "d")):
    """A verification whose drafted tokens are all accepted."""
    return EdgeOutcome(*pair, tuple(asked), tuple(drafted), tuple(drafted), tuple(asked), tuple(drafted))


def test_the_length_of_drafts_is_learned_per_position_and_priced():
    costs, arm = CostModel(SPACE), SPACE.arm(Plan.parse("t/d:8"))
    assert costs.drafted("t", "d").tolist() == [1.0] * 8
    full = costs.forecast(ONE)[1]
    learn(costs, RoundOutcome(1, 0.1, edges=(drafts([10] * 4, [9, 6, 5, 1]),), passes=tuple(passes("t", 1, 0.1))), 40)
    found = costs.drafted("t", "d")
    assert found[:4].tolist() == pytest.approx([0.9, 0.6, 0.5, 0.1], abs=0.05)
    assert (np.diff(found) <= 0.0).all()
    assert costs.drafted("t", "m").tolist() == [1.0] * 8
    costs.profile([*passes("d", 1, 0.05, 40), *passes("t", 9, 0.1, 40)])
    lengths = {edge: costs.drafted(*edge) for edge in [("t", "d")]}
    hazards = {edge: costs.acceptance(*edge) for edge in lengths}
    by_hand = forecast(SPACE[arm], hazards, lambda model, q: costs.seconds(model, q, ONE), drafted=lengths)
    assert costs.forecast(ONE)[1][arm] == pytest.approx(by_hand.seconds, rel=1e-9)
    assert by_hand.passes_of("d") == pytest.approx(found.sum())
    assert full.shape == (len(SPACE),)


def test_a_drafter_with_a_stop_is_believed_to_draft_less_until_seen():
    space = PlanSpace([Plan.parse("t/d:4?0.4"), Plan.parse("t/d:4")])
    costs = CostModel(space)
    assert costs.drafted("t", "d?0.4").tolist() == pytest.approx([1.0, 0.8, 0.64, 0.512])
    assert costs.drafted("t", "d").tolist() == [1.0] * 4
    plain, stopping, full = costs.forecast(ONE)[1]
    assert plain < stopping < full
    sure = drafts([20] * 4, [20] * 4, ("t", "d?0.4"))
    learn(costs, RoundOutcome(5, 0.1, edges=(sure,)), 10, space[1])
    assert costs.drafted("t", "d?0.4").min() > 0.95


def test_an_engine_that_tells_no_draft_lengths_leaves_them_as_believed():
    costs = CostModel(SPACE)
    learn(costs, RoundOutcome(1, 0.1, edges=(edge([5] * 4, [1, 0, 0, 0]),)), 20)
    assert costs.drafted("t", "d").tolist() == [1.0] * 8


def test_a_tag_starts_from_the_others_and_goes_its_own_way():
    costs, good, bad = CostModel(SPACE), Context(tag="good"), Context(tag="bad")
    learn(costs, RoundOutcome(4, 0.1, edges=(edge([10] * 4, [9] * 4),)), 40, context=good)
    shown = costs.acceptance("t", "d", "good")[0]
    assert shown > 0.85
    assert costs.acceptance("t", "d", "bad")[0] == pytest.approx(shown, abs=0.1)
    draws = [costs.sample_rates(np.random.default_rng(0), one, 400)[:, 2] for one in (good, bad)]
    assert np.log(draws[1]).std() > 1.2 * np.log(draws[0]).std()  # believed, but less sure
    learn(costs, RoundOutcome(1, 0.1, edges=(edge([3, 0, 0, 0], [0, 0, 0, 0]),)), 30, context=bad)
    assert costs.acceptance("t", "d", "bad")[0] < 0.2
    assert costs.acceptance("t", "d", "good")[0] > 0.8
    assert 0.2 < costs.acceptance("t", "d", "third")[0] < 0.85


def test_one_tag_alone_is_as_none():
    plain, tagged = CostModel(SPACE), CostModel(SPACE)
    played(plain, 0.14, 30)
    for _ in range(30):
        counts = edge([10] * 4, [8] * 4)
        inside = (*passes("t", 5, 0.1), *passes("d", 1, 0.01, 4))
        learn(tagged, RoundOutcome(3, 0.14, edges=(counts,), passes=inside), context=Context(tag="x"))
    assert np.allclose(plain.rates(ONE), tagged.rates(Context(tag="x")))


def test_more_tags_than_are_kept_apart_still_teach_the_rest():
    costs = CostModel(SPACE)
    for number in range(70):
        learn(costs, RoundOutcome(4, 0.1, edges=(edge([10] * 4, [9] * 4),)), context=Context(tag=str(number)))
    assert costs.acceptance("t", "d", "0")[0] > 0.75  # given up as a tag of its own
    assert costs.verifications["t", "d"] == 700
    assert len(costs.state_dict()["acceptance"]["tags"]) == 64


def test_seconds_are_kept_apart_by_bucket_of_batch_sizes():
    costs = CostModel(SPACE)
    for size, seconds in ((1, 0.1), (8, 0.4), (9, 0.4)):
        one = RoundOutcome(size, seconds, size, passes=tuple(passes("t", 1, seconds, 1, size)))
        learn(costs, one, 40, SPACE.plain, Context(size))
    assert costs.seconds("t", 1, ONE) == pytest.approx(0.1, rel=0.05)
    assert costs.seconds("t", 1, Context(8)) == pytest.approx(0.4, rel=0.1)
    assert costs.rates(Context(8))[0] == pytest.approx(20.0, rel=0.1)


def test_batch_sizes_of_one_bucket_that_are_learned_together_fade_what_was_there_once():
    costs, priors = CostModel(SPACE), CostPriors()
    for _ in range(2):
        for size in (8, 9):
            one = RoundOutcome(size, 0.4, size, passes=tuple(passes("t", 1, 0.4, 1, size)))
            learn(costs, one, 1, SPACE.plain, Context(size))
        count = costs.state_dict()["passes"]["cells"]["8"]["t"]["1"][0]
    assert count == pytest.approx(2.0 * priors.idle_keep**2 * priors.pass_keep + 2.0)


def silent_round(rng, rows=1, acceptance=0.8, t_seconds=0.2, d_seconds=0.03):
    """A round of the pair of which the engine tells tokens and seconds alone."""
    accepted = sum(min(int(rng.geometric(1.0 - acceptance)) - 1, 4) for _ in range(rows))
    return RoundOutcome(accepted + rows, (t_seconds + 4 * d_seconds) * np.exp(0.05 * rng.standard_normal()), rows)


@pytest.mark.parametrize("rows", [1, 6])
def test_tokens_and_seconds_of_rounds_are_enough(rows):
    """Plain rounds tell the target's seconds, rounds of the pair the rest; 250 of each, acceptance within 0.05."""
    costs, rng, context = CostModel(SPACE), np.random.default_rng(2), Context(rows)
    for _ in range(250):
        learn(costs, RoundOutcome(rows, 0.2 * np.exp(0.05 * rng.standard_normal()), rows), 1, SPACE.plain, context)
        learn(costs, silent_round(rng, rows), 1, PAIR, context)
    assert costs.acceptance("t", "d")[:4] == pytest.approx(np.full(4, 0.8), abs=0.06)
    assert costs.seconds("t", 1, context) == pytest.approx(0.2, rel=0.05)
    tokens, seconds = costs.forecast(context)
    arm = SPACE.arm(PAIR)
    assert seconds[arm] == pytest.approx(0.32, rel=0.07)
    assert tokens[arm] / rows == pytest.approx((1 - 0.8**5) / 0.2, rel=0.05)
    assert costs.rates(context)[arm] == pytest.approx(tokens[arm] / 0.32, rel=0.1)


def test_a_total_of_accepted_tokens_is_spread_over_the_window():
    one = imputed("t", "d", 4, 1, 2)
    assert (one.reached, one.accepted) == ((1, 1, 1, 0), (1, 1, 0, 0))
    assert imputed("t", "d", 4, 3, 0).accepted == (0, 0, 0, 0)
    assert imputed("t", "d", 4, 3, 99).accepted == (3, 3, 3, 3)
    many = imputed("t", "d", 4, 100, 236)  # a geometric of 0.8 brings 2.36 a row
    assert many.accepted == pytest.approx((80, 64, 51, 41), abs=1)
    assert all(a <= r for a, r in zip(many.accepted, many.reached))


def test_outcomes_may_come_in_any_order():
    forwards, backwards = CostModel(SPACE), CostModel(SPACE)
    rng = np.random.default_rng(1)
    rounds = []
    for _ in range(60):
        first = int(rng.random() < 0.7)
        counts = edge([1, first, 0, 0], [first, 0, 0, 0])
        rounds.append(RoundOutcome(1 + first, 0.14, edges=(counts,), passes=tuple(passes("t", 5, 0.1))))
    for costs, order in ((forwards, rounds), (backwards, rounds[::-1])):
        for outcome in order:
            learn(costs, outcome)
    assert forwards.verifications == backwards.verifications
    assert forwards.rates(ONE) == pytest.approx(backwards.rates(ONE), rel=0.05)


def test_any_pair_may_be_scored_for_free():
    costs = CostModel(SPACE)
    scored = (edge([10] * 4, [9] * 4, ("m", "d")), edge([10] * 4, [1, 0, 0, 0], ("t", "m")))
    learn(costs, RoundOutcome(1, 0.1, passes=tuple(passes("t", 1, 0.1)), scored=scored), 10, SPACE.plain)
    assert costs.acceptance("m", "d")[0] > 0.8
    assert costs.acceptance("t", "m")[0] < 0.2


def test_merged_halves_are_one_stream():
    """Undiscounted counts are equal; without discounts so are rates, up to rounding."""
    still = CostPriors(keep=1.0, pass_keep=1.0, round_keep=1.0, idle_keep=1.0)
    whole, halves = CostModel(SPACE, still), [CostModel(SPACE, still) for _ in range(2)]
    for number in range(80):
        tag = "ab"[number % 3 == 0]
        counts, context = edge([2, 1, 1, 0], [1, 1, 0, 0]), Context(1, 10, tag)
        inside = (*passes("t", 5, 0.1), *passes("d", 1, 0.01, 4))
        for costs in (whole, halves[number % 2]):
            learn(costs, RoundOutcome(3, 0.15, edges=(counts,), passes=inside), context=context)
            costs.forecast(context)  # each round is learned by itself
    merged = CostModel(SPACE, still)
    merged.load_state_dict(json.loads(json.dumps(CostModel.merge([half.state_dict() for half in halves]))))
    assert merged.verifications == whole.verifications
    one, other = merged.state_dict()["acceptance"], whole.state_dict()["acceptance"]
    assert (one["sums"], one["all"]) == (other["sums"], other["all"])
    for tag in "ab":
        assert one["tags"][tag]["counts"] == other["tags"][tag]["counts"]
        assert merged.rates(Context(1, 10, tag)) == pytest.approx(whole.rates(Context(1, 10, tag)), rel=1e-6)


def test_states_of_different_shape_do_not_add_up():
    with pytest.raises(ValueError, match="shape"):
        added([{"a": 1}, {"a": [1]}])
    with pytest.raises(ValueError, match="str"):
        added([{"a": "x"}])


def test_the_state_comes_back_through_json():
    first, second = CostModel(SPACE), CostModel(SPACE)
    played(first, 0.16, 20, catch_up=0.01)
    learn(
        first, RoundOutcome(4, 0.2, 4, passes=tuple(passes("t", 1, 0.15, 2, 4, 100))), 3, SPACE.plain, Context(4, 100)
    )
    state = first.state_dict()
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state
    for context in (ONE, Context(4, 100), Context(2, 50)):
        assert np.array_equal(first.rates(context), second.rates(context))
        assert np.array_equal(first.upper_rates(0.1, context), second.upper_rates(0.1, context))
