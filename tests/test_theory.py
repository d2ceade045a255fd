"""The forecast against closed forms, the design's worked cases, an independent vectorised form and simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaspec.forecaster import Forecaster
from adaspec.plan import Plan, PlanSpace
from adaspec.theory import (
    accepted_distribution,
    accepted_length,
    accepted_variance,
    expected_passes,
    forecast,
    insertion_gain,
    insertion_pays,
    insertion_pays_published,
    polybasic_seconds,
    survival,
)

SECONDS = {"t": 1.0, "m": 0.35, "d": 0.05}
WORKED = [  # a12, a23, inner window, outer window, exact rate, rate by the formula with L_2 = own tokens
    (0.90, 0.70, 4, 8, 2.316, 2.860),
    (0.95, 0.80, 5, 10, 3.287, 3.753),
    (0.80, 0.60, 3, 6, 1.593, 2.118),
]
hazards = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def flat(model, query_len):
    return SECONDS[model]


def test_accepted_length_of_a_constant_hazard_is_the_geometric_sum():
    assert accepted_length([0.8], 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert accepted_length([0.9, 0.5]) == pytest.approx(1 + 0.9 + 0.45)
    assert accepted_length([], 0) == 1.0


@given(hazards, st.integers(0, 12))
def test_the_distribution_is_one_and_has_the_accepted_length_as_mean(given_hazards, window):
    law = accepted_distribution(given_hazards, window)
    assert law.shape == (window + 1,)
    assert law.sum() == pytest.approx(1.0)
    assert (law >= -1e-12).all()
    assert 1.0 + law @ np.arange(window + 1) == pytest.approx(accepted_length(given_hazards, window))


@given(hazards, st.integers(0, 12))
def test_the_variance_is_that_of_the_distribution(given_hazards, window):
    law, counts = accepted_distribution(given_hazards, window), np.arange(window + 1)
    assert accepted_variance(given_hazards, window) == pytest.approx(law @ counts**2 - (law @ counts) ** 2, abs=1e-9)


@pytest.mark.parametrize("a", [0.3, 0.8, 0.97])
def test_the_variance_of_a_capped_geometric(a):
    """Against sum_k (2k - 1) a^k - (sum_k a^k)^2 in closed form, and against 200,000 draws within 2 %."""
    cap = 6
    mean = a * (1 - a**cap) / (1 - a)
    weighted = a * (1 - (cap + 1) * a**cap + cap * a ** (cap + 1)) / (1 - a) ** 2  # sum of k a^k
    assert accepted_variance([a], cap) == pytest.approx(2 * weighted - mean - mean**2)
    counts = np.minimum(np.random.default_rng(0).geometric(1 - a, 200_000) - 1, cap)
    assert accepted_variance([a], cap) == pytest.approx(counts.var(), rel=0.02)
    assert accepted_variance([a] * cap) == pytest.approx(accepted_variance([a], cap))


@pytest.mark.parametrize(("bad", "window"), [([], 1), ([1.5], 1), ([-0.1], 1), ([float("nan")], 1), ([0.5], -1)])
def test_impossible_hazards_are_refused(bad, window):
    with pytest.raises(ValueError, match=r"hazard|window"):
        survival(bad, window)


def test_expected_passes_by_hand():
    # 2 tokens, window 2: cut to 1 drafted token; accepted (.6): 2 tokens in 1 pass; else a second, plain pass.
    assert expected_passes(2, 2, [0.6]) == pytest.approx(1.4)
    assert expected_passes(2, 2, [0.6], cut=False) == pytest.approx(1.4)
    assert expected_passes(5, 3, [0.0]) == pytest.approx(5.0)
    assert expected_passes(8, 3, [1.0]) == pytest.approx(2.0)
    assert expected_passes(0, 3, [0.5]) == 0.0


@pytest.mark.parametrize(("a12", "a23", "inner", "outer", "exact", "published"), WORKED)
def test_the_worked_cases_of_the_design(a12, a23, inner, outer, exact, published):
    plan = Plan(("t", "m", "d"), (outer, inner))
    found = forecast(plan, {("t", "m"): [a12], ("m", "d"): [a23]}, flat, cut=False)
    own = accepted_length([a23], inner)
    by_formula = found.tokens / polybasic_seconds(found.tokens, [found.tokens, own], [1.0, 0.35, 0.05], inner)
    assert found.rate == pytest.approx(exact, abs=5e-4)
    assert by_formula == pytest.approx(published, abs=5e-4)


@pytest.mark.parametrize(("a12", "a23", "inner", "outer", "exact", "published"), WORKED)
def test_with_final_tokens_per_pass_the_formula_is_an_identity(a12, a23, inner, outer, exact, published):
    plan = Plan(("t", "m", "d"), (outer, inner))
    found = forecast(plan, {("t", "m"): [a12], ("m", "d"): [a23]}, flat, cut=False)
    lengths = [found.tokens, found.tokens / found.passes_of("m")]
    beta = found.passes_of("d") / found.passes_of("m")
    assert polybasic_seconds(found.tokens, lengths, [1.0, 0.35, 0.05], beta) == pytest.approx(found.seconds)


def test_plain_decoding_and_a_pair_by_hand():
    plain = forecast(Plan(("t",)), {}, flat)
    assert (plain.tokens, plain.seconds, plain.rate, plain.passes) == (1.0, 1.0, 1.0, {("t", 1): 1.0})
    pair = forecast(Plan.parse("t/d:4"), {("t", "d"): [0.7]}, lambda model, q: SECONDS[model] * (1 + 0.1 * q))
    assert pair.tokens == pytest.approx(accepted_length([0.7], 4))
    assert pair.seconds == pytest.approx(1.5 + 4 * 0.055)
    assert pair.passes == {("d", 1): 4.0, ("t", 5): 1.0}
    one = forecast(Plan.parse("t/d:4"), {("t", "d"): [0.7]}, flat, one_pass=("d",))
    assert one.seconds == pytest.approx(1.05)


def test_an_edge_without_acceptance_is_named():
    with pytest.raises(ValueError, match="t/d"):
        forecast(Plan.parse("t/d:4"), {}, flat)


def play(plan, table, cut, rng, spent, stage=0, need=0, drafted=(1.0,), at_once=False):
    """Plays a chain token by token; returns what ``models[stage]`` hands over when ``need`` tokens are asked for.

    ``drafted``: chance that a draft holds each position. ``table``: acceptance of a token that is there.
    """
    model = plan.models[stage]
    if stage == plan.depth - 1:
        luck = rng.random()
        made = sum(luck < drafted[min(position, len(drafted) - 1)] for position in range(need))
        spent.extend([(model, 1)] * (1 if at_once else made))
        return made
    made = 0
    while made < need or not stage:
        window = plan.windows[stage]
        if cut and stage:
            window = min(window, need - made - 1)
        block = play(plan, table, cut, rng, spent, stage + 1, window, drafted, at_once) if window else 0
        spent.append((model, block + 1))
        accepted = 0
        steps = table[list(plan.edges())[stage][:2]]
        while accepted < block and rng.random() < steps[min(accepted, len(steps) - 1)]:
            accepted += 1
        made += accepted + 1
        if not stage:
            return made
    return made


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("text", ["t/d:3", "t/m/d:6,3", "t/m/n/d:7,4,2"])
def test_the_forecast_agrees_with_simulation(text, cut):
    """4000 rounds; tokens and seconds within 5 standard errors of their means, which are below 3 % and 1.5 %."""
    plan, rng = Plan.parse(text), np.random.default_rng(11)
    table = {(v, d): [0.9, 0.7, 0.8][: 2 + row] for row, (v, d, _) in enumerate(plan.edges())}

    def seconds(model, query_len):
        return {"t": 1.0, "m": 0.4, "n": 0.2, "d": 0.05}[model] * (1.0 + 0.1 * query_len)

    rounds = []
    for _ in range(4000):
        spent = []
        tokens = play(plan, table, cut, rng, spent)
        rounds.append((tokens, sum(seconds(*one) for one in spent)))
    found = forecast(plan, table, seconds, cut=cut)
    mean, error = np.mean(rounds, axis=0), np.std(rounds, axis=0) / np.sqrt(len(rounds))
    assert abs(mean[0] - found.tokens) < 5 * error[0]
    assert abs(mean[1] - found.seconds) < 5 * error[1] + 1e-9
    assert (error / mean < (0.03, 0.015)).all()


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("text", ["t/d:4?0.4", "t/m/d:6,3?0.4", "t/m/n/d:6,4,3?0.4"])
def test_drafts_of_varying_length_agree_with_simulation(text, at_once, cut):
    """3000 rounds; tokens and seconds within 5 standard errors of their means, which are below 3 % and 2 %.

    Given that position k is reached, a token is there with chance drafted[k] / drafted[k - 1] and is then accepted.
    """
    plan, rng = Plan.parse(text), np.random.default_rng(5)
    drafted = [0.8, 0.5, 0.4, 0.1]
    table = {(v, d): [0.9, 0.7, 0.8][: 2 + row] for row, (v, d, _) in enumerate(plan.edges())}
    last = list(table)[-1]
    there = np.array(drafted) / np.array([1.0, *drafted[:-1]])
    hazards = table | {last: [table[last][min(k, len(table[last]) - 1)] * chance for k, chance in enumerate(there)]}

    def seconds(model, query_len):
        return {"t": 1.0, "m": 0.4, "n": 0.2, "d": 0.05}[model] * (1.0 + 0.4 * query_len**2)

    rounds = []
    for _ in range(3000):
        spent = []
        tokens = play(plan, table, cut, rng, spent, drafted=drafted, at_once=at_once)
        rounds.append((tokens, sum(seconds(*one) for one in spent)))
    one_pass = ("d",) if at_once else ()
    found = forecast(plan, hazards, seconds, cut, one_pass, {last: drafted})
    mean, error = np.mean(rounds, axis=0), np.std(rounds, axis=0) / np.sqrt(len(rounds))
    assert abs(mean[0] - found.tokens) < 5 * error[0]
    assert abs(mean[1] - found.seconds) < 5 * error[1] + 1e-9
    assert (error / mean < (0.03, 0.02)).all()
    full = forecast(plan, hazards, seconds, cut, one_pass)
    assert full.seconds - found.seconds > 7 * error[1]  # so the test would notice drafts taken for full
    assert full.tokens == found.tokens or (not cut and plan.depth > 2)


def test_a_silent_drafter_costs_its_guess_and_a_plain_pass():
    silent = forecast(Plan.parse("t/d:4"), {("t", "d"): [0.0]}, flat, True, ("d",), {("t", "d"): [0.0]})
    assert silent.passes == {("t", 1): 1.0, ("d", 1): 1.0}
    assert (silent.tokens, silent.seconds) == (1.0, pytest.approx(1.05))


@pytest.mark.parametrize("wrong", [[], [1.2], [0.4, 0.5], [float("nan")]])
def test_impossible_draft_lengths_are_refused(wrong):
    with pytest.raises(ValueError, match="drafted"):
        forecast(Plan.parse("t/d:4"), {("t", "d"): [0.5]}, flat, drafted={("t", "d"): wrong})


@given(hazards, st.floats(0.01, 0.3), st.integers(1, 8), st.integers(0, 7))
def test_more_acceptance_is_never_worse_and_none_is_plain_decoding(given_hazards, more, window, position):
    plan, place = Plan(("t", "d"), (window,)), position % len(given_hazards)
    raised = [min(h + more, 1.0) if k == place else h for k, h in enumerate(given_hazards)]
    below, above = (forecast(plan, {("t", "d"): table}, flat) for table in (given_hazards, raised))
    assert above.tokens >= below.tokens - 1e-12
    assert above.seconds == below.seconds
    none = forecast(plan, {("t", "d"): [0.0]}, flat)
    assert none.tokens == 1.0
    assert none.seconds == pytest.approx(1.0 + 0.05 * window)
    assert 1.0 <= below.tokens <= window + 1.0
    wider = forecast(Plan(("t", "d"), (window + 1,)), {("t", "d"): given_hazards}, flat)
    assert wider.tokens >= below.tokens - 1e-12


@given(st.floats(0.0, 0.9), st.floats(0.0, 0.9), st.floats(0.01, 0.09))
def test_a_chain_gains_by_each_acceptance(outer, inner, more):
    plan = Plan.parse("t/m/d:6,3")

    def rate(a_tm, a_md):
        return forecast(plan, {("t", "m"): [a_tm], ("m", "d"): [a_md]}, flat).rate

    assert rate(outer + more, inner) >= rate(outer, inner) - 1e-12
    assert rate(outer, inner + more) >= rate(outer, inner) - 1e-12


def test_the_two_block_rules_differ():
    plan = Plan.parse("t/m/d:8,4")
    table = {("t", "m"): [0.9], ("m", "d"): [0.7]}
    assert forecast(plan, table, flat, cut=False).tokens > forecast(plan, table, flat, cut=True).tokens + 0.1


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_forecaster_agrees_with_the_forecast_of_every_plan(lead, varying):
    deep = [
        Plan.parse(text) for text in ("t/m/n/d:5,3,2", "t/n/m/d:7,4,1", "t/m/n/l:4,4,4", "t/m/d:5,3?0.4", "t/d:6?0.2")
    ]
    space = PlanSpace([*PlanSpace.grid("t", ["d", "l"], [1, 2, 5], middles=["m", "n"]), *deep])
    forecaster, rng = Forecaster(space, one_pass=("l",)), np.random.default_rng(3)
    chances = rng.uniform(0.0, 1.0, (*lead, len(forecaster.edges), forecaster.positions))
    seconds = rng.uniform(0.1, 1.0, (*lead, len(forecaster.models), forecaster.query_lens))
    drafted = np.sort(rng.uniform(0.0, 1.0, chances.shape[-2:]))[:, ::-1] if varying else None
    tokens, spent = forecaster(chances, seconds, drafted)
    lengths = dict(zip(forecaster.edges, drafted)) if varying else {}
    assert tokens.shape == spent.shape == (*lead, len(space))
    pick = (2,) if lead else ()
    table = dict(zip(forecaster.edges, chances[pick]))
    for arm, plan in enumerate(space):

        def spend(model, query_len):
            return seconds[pick][forecaster.models.index(model), query_len]

        one = forecast(plan, table, spend, one_pass=("l",), drafted=lengths)
        assert tokens[(*pick, arm)] == pytest.approx(one.tokens, rel=1e-12)
        assert spent[(*pick, arm)] == pytest.approx(one.seconds, rel=1e-12)


def test_a_forecaster_of_plain_decoding_alone():
    forecaster = Forecaster(PlanSpace([Plan(("t",))]))
    tokens, seconds = forecaster(np.zeros((0, 0)), np.array([[0.0, 0.25]]))
    assert (tokens.tolist(), seconds.tolist()) == ([1.0], [0.25])


@given(st.floats(0.5, 0.99), st.floats(0.3, 0.95), st.floats(0.3, 0.95), st.floats(0.01, 0.9), st.floats(0.01, 0.3))
def test_the_exact_insertion_test_is_right_about_total_time(a_tm, a_td, a_md, t_mid, t_draft):
    table = {("t", "m"): [a_tm], ("t", "d"): [a_td], ("m", "d"): [a_md]}
    times = {"t": 1.0, "m": t_mid, "d": t_draft}
    pair = forecast(Plan.parse("t/d:4"), table, lambda model, q: times[model])
    chain = forecast(Plan.parse("t/m/d:6,3"), table, lambda model, q: times[model])
    mids = chain.passes_of("m")
    pays = insertion_pays(
        t_mid, 1.0, t_draft, chain.tokens / mids, pair.tokens, chain.tokens, 4.0, chain.passes_of("d") / mids
    )
    if abs(chain.rate / pair.rate - 1.0) > 1e-9:
        assert pays == (chain.rate > pair.rate)


def test_the_published_insertion_test_can_be_wrong():
    # a model between target and drafter that saves drafter time: the published test does not see that saving
    assert not insertion_pays_published(0.3, 1.0, 2.0, 4.0, 5.0)
    assert insertion_pays(0.3, 1.0, 0.2, 2.0, 4.0, 5.0, 8.0, 1.0)
    assert insertion_pays_published(0.09, 1.0, 2.0, 4.0, 5.0)


@given(st.floats(0.3, 0.99), st.floats(0.3, 0.95), st.floats(0.3, 0.95), st.floats(0.01, 0.9), st.floats(0.01, 0.3))
def test_the_gain_of_an_insertion_agrees_with_the_exact_test(a_tm, a_td, a_md, t_mid, t_draft):
    table = {("t", "m"): [a_tm], ("t", "d"): [a_td], ("m", "d"): [a_md]}
    times = {"t": 1.0, "m": t_mid, "d": t_draft}
    found = insertion_gain(Plan.parse("t/d:4"), Plan.parse("t/m/d:6,3"), table, lambda model, q: times[model])
    mids = found.after.passes_of("m")
    beta = found.after.passes_of("d") / mids
    lengths = (found.after.tokens / mids, found.before.tokens, found.after.tokens)
    assert found.gain == pytest.approx(found.after.rate / found.before.rate)
    if abs(found.gain - 1.0) > 1e-9:
        assert found.pays == insertion_pays(t_mid, 1.0, t_draft, *lengths, 4.0, beta)


def test_an_insertion_where_the_published_test_errs():
    """By hand: L_new = 2.18, L_i = 2.31, L_{i,new} = 3.69, so the published test allows T_new / T_i up to 0.35."""
    table = {("t", "m"): [0.8], ("t", "d"): [0.6], ("m", "d"): [0.6]}
    times = {"t": 1.0, "m": 0.25, "d": 0.01}
    found = insertion_gain(Plan.parse("t/d:4"), Plan.parse("t/m/d:5,3"), table, lambda model, q: times[model])
    assert found.published
    assert not found.pays
    assert found.gain == pytest.approx(0.9, abs=0.1)


def test_a_new_drafter_has_no_published_test_and_other_changes_are_refused():
    table = {("t", "m"): [0.8], ("m", "d"): [0.6]}
    found = insertion_gain(Plan.parse("t/m:4"), Plan.parse("t/m/d:6,3"), table, flat)
    assert found.published is None
    for before, after in [
        ("t/m:4", "t/d:4"),
        ("t/m/d:4,2", "t/d/m/x:4,2,1"),
        ("t/m:2", "x/t/m:4,2"),
        ("t/m:2", "t/m:3"),
    ]:
        with pytest.raises(ValueError, match=after):
            insertion_gain(Plan.parse(before), Plan.parse(after), table, flat)


def test_the_formula_refuses_other_numbers_of_lengths():
    with pytest.raises(ValueError, match="n - 1"):
        polybasic_seconds(10.0, [2.0], [1.0], 1.0)
