"""Every policy, published baselines included, gives a law over plans; each its own."""

import json

import numpy as np
import pytest

from adaspec import (
    Context,
    Controller,
    CostModel,
    Decision,
    EdgeOutcome,
    EpsilonGreedy,
    Exp3,
    Fixed,
    KnowledgeGradient,
    Optimistic,
    Pass,
    Plan,
    PlanSpace,
    RoundOutcome,
    ThompsonSampling,
)
from adaspec.baselines import (
    CachedStateMachine,
    DrafterByPrompt,
    EmaTiers,
    EXP3Spec,
    HedgeSpec,
    HuggingFaceHeuristic,
    MaximumLikelihoodWindow,
    QLearning,
    StateMachine,
    ThroughputAware,
    UCBSpec,
)
from adaspec.baselines.hedge import _normal_hedge

SPACE = PlanSpace.grid("t", ["d", "l"], [1, 2, 4, 8], middles=["d"], inner_windows=[2])
PAIR = Plan.parse("t/d:4")
BUILDERS = {
    "knowledge": KnowledgeGradient,
    "thompson": ThompsonSampling,
    "thompson1": lambda: ThompsonSampling(1),
    "optimistic": Optimistic,
    "exp3": Exp3,
    "epsilon": lambda: EpsilonGreedy(0.2),
    "fixed": lambda: Fixed(PAIR),
    "ucbspec": UCBSpec,
    "exp3spec": EXP3Spec,
    "likelihood": MaximumLikelihoodWindow,
    "states": StateMachine,
    "cached": CachedStateMachine,
    "qlearning": QLearning,
    "by-prompt": DrafterByPrompt,
    "hugging-face": HuggingFaceHeuristic,
    "ema": EmaTiers,
    "throughput": ThroughputAware,
    "hedge": HedgeSpec,
}
WINDOW_RULES = ["likelihood", "states", "cached", "qlearning", "hugging-face", "ema", "throughput"]


def costs(acceptance=0.5):
    model = CostModel(SPACE, acceptance={("t", "d"): acceptance}, one_pass=("l",))
    passes = [Pass("t", q, 1, 0, 0.1) for q in (1, 2, 3, 5, 9)] + [Pass("d", 1, 1, 0, 0.02), Pass("l", 1, 1, 0, 1e-5)]
    model.profile(passes)
    return model


def outcome(plan, hits, drafter=None, draft=0.02, scored=()):
    """A round whose top pair accepts ``hits`` tokens of its window."""
    if plan.depth == 1:
        return RoundOutcome(1, 0.1, passes=(Pass("t", 1, 1, 9, 0.1),), scored=scored)
    window = plan.windows[0]
    hits = min(hits, window)
    reached = tuple(int(k <= hits) for k in range(window))
    accepted = tuple(int(k < hits) for k in range(window))
    edge = EdgeOutcome("t", plan.models[1], reached, reached, accepted, (1,) * window, (1,) * window)
    passes = (*(Pass(plan.models[1], 1, 1, 9, draft) for _ in range(window)), Pass("t", window + 1, 1, 9, 0.1))
    return RoundOutcome(hits + 1, 0.1 + draft * window, edges=(edge,), passes=passes, scored=scored)


def silent(plan):
    edge = EdgeOutcome("t", plan.models[1], (1,), (0,), (0,), (1,), (0,)) if plan.depth > 1 else None
    return RoundOutcome(1, 0.1, edges=(edge,) if edge else ())


def play(policy, hits, rounds=200, model=None, seed=0, draft=0.02):
    """Plays rounds that accept ``hits`` tokens; returns the plans."""
    controller, played = Controller(SPACE, policy, model or costs(), hold=1, seed=seed), []
    for _ in range(rounds):
        decision = controller.choose(Context())
        controller.observe(decision, outcome(decision.plan, hits(decision.plan), draft=draft))
        played.append(decision.plan)
    return played


@pytest.mark.parametrize("name", BUILDERS)
def test_a_policy_gives_a_law_and_repeats_it_with_the_same_seed(name):
    def laws():
        policy, model, rng = BUILDERS[name](), costs(), np.random.default_rng(5)
        for step in range(60):
            law = policy.probabilities(model, Context(1, 10 * step, "ab"[step % 2]), rng)
            arm = int(rng.choice(len(law), p=law))
            policy.observe(arm, float(law[arm]), [outcome(SPACE[arm], step % 5), outcome(SPACE[arm], step % 3)])
            yield law

    first, second = list(laws()), list(laws())
    for law in first:
        assert law.shape == (len(SPACE),)
        assert law.sum() == pytest.approx(1.0)
        assert (law >= 0.0).all()
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_policy_goes_on_from_its_saved_state(name):
    model, policy, twin = costs(), BUILDERS[name](), BUILDERS[name]()
    rng = np.random.default_rng(0)
    for step in range(40):
        law = policy.probabilities(model, Context(), rng)
        arm = int(rng.choice(len(law), p=law))
        policy.observe(arm, float(law[arm]), [outcome(SPACE[arm], step % 4)])
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    laws = [each.probabilities(model, Context(), np.random.default_rng(1)) for each in (policy, twin)]
    assert laws[0].tolist() == laws[1].tolist()
    assert json.dumps(twin.state_dict()) == json.dumps(policy.state_dict())


@pytest.mark.parametrize("name", BUILDERS)
def test_a_policy_survives_silent_and_late_rounds_and_those_of_other_plans(name):
    policy, model, rng = BUILDERS[name](), costs(), np.random.default_rng(0)
    policy.observe(1, 0.5, [outcome(SPACE[1], 1)])  # of a life before a restart
    policy.probabilities(model, Context(), rng)
    for arm in range(len(SPACE)):
        policy.observe(arm, 0.5, [silent(SPACE[arm])])
        policy.observe(arm, 0.5, [RoundOutcome(1, 0.1)])  # an engine that tells nothing
        policy.observe(arm, 0.5, [outcome(SPACE[arm], 1)] * 2)
    law = policy.probabilities(model, Context(batch_size=3), rng)
    assert law.sum() == pytest.approx(1.0)
    bare = CostModel(PlanSpace([Plan(("t",))]))
    if name != "fixed":
        assert BUILDERS[name]().probabilities(bare, Context(), rng).tolist() == [1.0]


@pytest.mark.parametrize("name", WINDOW_RULES)
def test_a_window_rule_plays_one_drafter_only(name):
    assert {plan.models for plan in play(BUILDERS[name](), lambda plan: 2)} == {("t", "d")}
    with pytest.raises(ValueError, match="nobody"):
        type(BUILDERS[name]())("nobody").probabilities(costs(), Context(), np.random.default_rng(0))


@pytest.mark.parametrize("name", [name for name in WINDOW_RULES if name != "qlearning"])
def test_a_window_rule_goes_up_when_all_is_accepted_and_down_when_nothing_is(name):
    assert [plan.windows[0] for plan in play(BUILDERS[name](), lambda plan: 8)][-1] == 8
    assert [plan.windows[0] for plan in play(BUILDERS[name](), lambda plan: 0)][-1] == 1


def test_q_learning_ends_at_the_window_that_pays():
    played = play(QLearning(epsilon=0.2), lambda plan: 4, rounds=2000)[-500:]
    assert np.mean([plan.windows[0] == 4 for plan in played]) > 0.6


def test_the_likeliest_acceptance_is_right_censored_and_the_window_is_the_best_for_it():
    policy = MaximumLikelihoodWindow(memory=4)
    model, rng = costs(), np.random.default_rng(0)
    policy.probabilities(model, Context(), rng)
    for hits in (4, 2, 4, 1):  # 11 accepted, 2 rejected: the drafts accepted whole say nothing of position 5
        policy.observe(SPACE.arm(PAIR), 1.0, [outcome(PAIR, hits)])
    alpha = 11 / 13
    value = {w: (1 - alpha ** (w + 1)) / (1 - alpha) / (0.1 + 0.02 * w) for w in (1, 2, 4, 8)}
    law = policy.probabilities(model, Context(), rng)
    assert SPACE[int(law.argmax())].windows == (max(value, key=value.get),)


def test_ucbspec_uses_the_count_of_the_plan_itself_and_ignores_time():
    policy, model, rng = UCBSpec(delta=0.1), costs(), np.random.default_rng(0)
    plans = len(SPACE)
    counts = np.array([5 + arm % 3 for arm in range(plans)])
    policy.probabilities(model, Context(), rng)
    for arm, count in enumerate(counts):
        policy.observe(arm, 1.0, [RoundOutcome(2, 1.0 + 100.0 * arm)] * int(count))
    inside = plans * counts.sum() ** 2 * np.sqrt(1 + counts) / 0.1
    index = 2 + 4.5 * np.sqrt((1 + counts) / counts**2 * (1 + 2 * np.log(inside)))
    assert policy.probabilities(model, Context(), rng).argmax() == index.argmax()


def test_exp3spec_weighs_losses_by_importance():
    policy, model, rng = EXP3Spec(), costs(), np.random.default_rng(0)
    policy.probabilities(model, Context(), rng)
    policy.observe(3, 0.25, [RoundOutcome(3, 9.0), RoundOutcome(5, 1.0)])  # mean 4 of at most 9
    losses = np.zeros(len(SPACE))
    losses[3] = (1 - 4 / 9) / 0.25
    weights = np.exp(-np.sqrt(np.log(len(SPACE)) / (len(SPACE) * 2)) * losses)
    assert policy.probabilities(model, Context(), rng) == pytest.approx(weights / weights.sum())


def test_hedging_follows_the_better_drafter_from_scores_alone():
    policy, model, rng = HedgeSpec(window=4), costs(), np.random.default_rng(0)
    for _ in range(50):
        law = policy.probabilities(model, Context(), rng)
        good = EdgeOutcome("t", "l", (1, 1), (1, 1), (1, 1))
        policy.observe(SPACE.arm(PAIR), 0.5, [outcome(PAIR, 0, scored=(good,))])
    assert law[SPACE.arm(Plan.parse("t/l:4"))] > 0.9


@pytest.mark.parametrize("regret", [[3.0, 1.0, -2.0], [2.0], [5.0, 5.0, 5.0, 5.0], [0.0, -1.0], [1e-9, 1e4]])
def test_normal_hedge_is_a_law_that_leaves_out_what_is_behind(regret):
    law = _normal_hedge(np.array(regret))
    assert law.sum() == pytest.approx(1.0)
    if max(regret) > 0.0:
        assert (law[np.array(regret) <= 0.0] == 0.0).all()
        assert law.argmax() == np.argmax(regret)


def test_exp3_leaves_a_plan_that_stops_paying():
    policy, model = Exp3(), costs(0.8)
    played = play(policy, lambda plan: 0, rounds=600, model=model)
    first, last = [np.mean([plan.depth == 1 for plan in part]) for part in (played[:20], played[-100:])]
    assert last > 0.5 > first


def test_thompson_gives_each_plan_its_chance_of_being_best():
    model = costs()
    draws = model.sample_rates(np.random.default_rng(0), Context(), 4000)
    chance = np.bincount(draws.argmax(axis=-1), minlength=len(SPACE)) / 4000
    law = ThompsonSampling(4000, sharpness=1.0).probabilities(model, Context(), np.random.default_rng(1))
    assert law == pytest.approx(chance, abs=0.05)  # 4.5 standard errors of a difference of two shares
    assert (chance > 0.05).sum() >= 2


def test_thompson_is_sharp_where_the_matter_is_clear():
    space = PlanSpace.grid("t", ["d"], [2, 4, 8])
    policy, hopeless = ThompsonSampling(), CostModel(space)
    hopeless.profile([Pass("t", q, 1, 0, 0.1) for q in (1, 3, 5, 9)] + [Pass("d", 1, 1, 0, 0.02)])
    for _ in range(30):
        missed = EdgeOutcome("t", "d", (1, 0), (1, 0), (0, 0))
        hopeless.observe(Decision(PAIR, Context(), 1.0, 0), RoundOutcome(1, 0.18, edges=(missed,)))
    law = np.mean([policy.probabilities(hopeless, Context(), np.random.default_rng(s)) for s in range(20)], axis=0)
    assert law[space.arm(space.plain)] > 0.95


def test_knowledge_is_sought_while_it_is_worth_its_price_and_no_longer():
    model, rng = costs(0.8), np.random.default_rng(0)
    assert KnowledgeGradient().probabilities(model, Context(), rng).argmax() == 1 + np.argmax(
        model.prospects(Context()).values(200.0, 0.05)[1:]
    )
    law = KnowledgeGradient(horizon=1e-3).probabilities(model, Context(), rng)
    assert law[model.rates(Context()).argmax()] == 1.0  # what is learned is of no use any more
    played = play(KnowledgeGradient(), lambda plan: 2 if plan.models[1:2] == ("d",) else 0, rounds=400)
    late = [plan for plan in played[-200:] if plan.models != ("t", "d")]
    assert len(set(played)) > 3
    assert len(late) <= 40


def test_optimism_takes_the_best_upper_forecast():
    model = costs()
    law = Optimistic(0.05).probabilities(model, Context(), np.random.default_rng(0))
    assert law[model.upper_rates(0.05, Context()).argmax()] == 1.0


def test_epsilon_greedy_takes_the_best_forecast_and_sometimes_any():
    model = costs(0.9)
    law = EpsilonGreedy(0.2).probabilities(model, Context(), np.random.default_rng(0))
    assert law.min() == pytest.approx(0.2 / len(SPACE))
    assert law.argmax() == model.rates(Context()).argmax()


def test_fixed_plays_its_plan_and_refuses_a_foreign_one():
    law = Fixed(PAIR).probabilities(costs(), Context(), np.random.default_rng(0))
    assert law[SPACE.arm(PAIR)] == 1.0
    assert Fixed().probabilities(costs(), Context(), np.random.default_rng(0))[0] == 1.0
    with pytest.raises(ValueError, match="t/d:5"):
        Fixed(Plan.parse("t/d:5")).probabilities(costs(), Context(), np.random.default_rng(0))


@pytest.mark.parametrize(
    "build",
    [
        lambda: ThompsonSampling(0),
        lambda: ThompsonSampling(sharpness=0.0),
        lambda: KnowledgeGradient(horizon=0.0),
        lambda: KnowledgeGradient(blunder=-0.5),
        lambda: EpsilonGreedy(-0.5),
        lambda: Optimistic(0.0),
        lambda: Exp3(rate=0.0),
        lambda: Exp3(explore=-0.5),
        lambda: UCBSpec(0.0),
        lambda: StateMachine(start=0),
        lambda: EmaTiers(smoothing=0.0),
        lambda: ThroughputAware(memory=0),
        lambda: MaximumLikelihoodWindow(memory=0),
        lambda: QLearning(epsilon=-0.5),
        lambda: DrafterByPrompt(trials=0),
        lambda: HedgeSpec(0),
    ],
)
def test_impossible_parameters_are_refused(build):
    with pytest.raises(ValueError, match=r"0|-0\.5"):
        build()
