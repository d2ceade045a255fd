"""What the cost model believes: before anything, after a profile, after rounds, and after things have changed."""

import json

import numpy as np
import pytest

from adaspec import Context, CostModel, CostPriors, Decision, EdgeOutcome, Pass, Plan, PlanSpace, RoundOutcome

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
    assert costs.acceptance("t", "m")[0] == pytest.approx(0.9 * priors.caution)
    with pytest.raises(KeyError):
        costs.acceptance("d", "t")


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
    played(costs, 0.14, 150)
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
    played(without, 0.14, 50)
    played(charged, 0.24, 50, catch_up=0.1)
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
        (RoundOutcome(1, 0.1, edges=(edge([1], [2]),)), "accepted <= reached"),
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


def test_the_state_comes_back_through_json():
    first, second = CostModel(SPACE), CostModel(SPACE)
    played(first, 0.16, 20, catch_up=0.01)
    learn(
        first, RoundOutcome(4, 0.2, 4, passes=tuple(passes("t", 1, 0.15, 2, 4, 100))), 3, SPACE.plain, Context(4, 100)
    )
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for context in (ONE, Context(4, 100), Context(2, 50)):
        assert np.array_equal(first.rates(context), second.rates(context))
        assert np.array_equal(first.upper_rates(0.1, context), second.upper_rates(0.1, context))
