"""Simulated worlds for controllers, and a policy that plays the arms in turn.

Acceptance is i.i.d. per edge, seconds have 5 % noise and 2 % outliers of eight times the time.
"""

from dataclasses import replace

import numpy as np

from adaspec import Context, Controller, CostModel, EdgeOutcome, Pass, PlanSpace, Policy, RoundOutcome
from adaspec.theory import forecast

SPACE = PlanSpace.grid("t", ["d", "lookup"], [2, 3, 5, 8], middles=["m"], inner_windows=[2, 3, 4])
GOOD = {("t", "d"): 0.75, ("t", "m"): 0.85, ("t", "lookup"): 0.15, ("m", "d"): 0.7, ("m", "lookup"): 0.2}
USELESS = dict.fromkeys(GOOD, 0.05)
ONE_PASS = ("lookup",)


def seconds(model, query_len):
    at_one, more = {"t": (0.178, 0.01), "m": (0.1, 0.002), "d": (0.03, 0.001), "lookup": (3e-5, 0.0)}[model]
    return at_one + more * (query_len - 1)


def profile(space, rng):
    """Three passes each at a few query lengths, with the world's noise, as a start-up profile would bring."""
    lengths = {model: (1,) if model in ONE_PASS else (1, 2, 3, 5, 9) for model in space.models}
    kinds = [(model, query_len) for model in space.models for query_len in lengths[model]] * 3
    return [Pass(m, q, 1, 0, seconds(m, q) * np.exp(0.05 * rng.standard_normal())) for m, q in kinds]


def play(plan, hazards, rng):
    """One round of a plan in the world that ``hazards`` and ``seconds`` describe."""
    passes, edges = [], {}

    def forward(model, query_len):
        noise = np.exp(0.05 * rng.standard_normal()) * (8.0 if rng.random() < 0.02 else 1.0)
        passes.append(Pass(model, query_len, 1, 0, seconds(model, query_len) * noise))

    def verify(stage, window):
        model = plan.models[stage]
        if window:
            fill(stage + 1, window)
        forward(model, window + 1)
        if not window:
            return 1
        key = (model, plan.models[stage + 1])
        reached, accepted = edges.setdefault(key, np.zeros((2, plan.windows[stage]), dtype=int))
        for position in range(window):
            reached[position] += 1
            if rng.random() >= hazards[key]:
                return position + 1
            accepted[position] += 1
        return window + 1

    def fill(stage, need):
        if stage == plan.depth - 1:
            for _ in range(1 if plan.models[-1] in ONE_PASS else need):
                forward(plan.models[-1], 1)
            return
        while need > 0:
            need -= verify(stage, min(plan.windows[stage], need - 1))

    tokens = verify(0, plan.windows[0] if plan.windows else 0)
    outcomes = [
        EdgeOutcome(*key, tuple(map(int, r)), tuple(map(int, r)), tuple(map(int, a))) for key, (r, a) in edges.items()
    ]
    return RoundOutcome(tokens, sum(one.seconds for one in passes), edges=tuple(outcomes), passes=tuple(passes))


def expected(hazards):
    """Expected (tokens, seconds) of every plan of the space; [plans, 2]."""
    rounds = [forecast(plan, {k: [v] for k, v in hazards.items()}, seconds, one_pass=ONE_PASS) for plan in SPACE]
    return np.array([(one.tokens, one.seconds) for one in rounds])


def drive(controller, hazards, rounds, rng):
    """Plays rounds; returns the expected (tokens, seconds) of each chosen plan; [rounds, 2]."""
    table, chosen = expected(hazards), []
    for _ in range(rounds):
        decision = controller.choose(Context())
        controller.observe(decision, play(decision.plan, hazards, rng))
        chosen.append(SPACE.arm(decision.plan))
    return table[chosen]


def fresh(seed, acceptance=None, factors=None):
    """A controller that has seen a profile; ``factors``: per model, by which that profile is wrong."""
    rng = np.random.default_rng(seed)
    controller = Controller(SPACE, costs=CostModel(SPACE, one_pass=ONE_PASS, acceptance=acceptance), seed=seed)
    measured = profile(SPACE, rng)
    if factors:
        measured = [replace(one, seconds=one.seconds * factors[one.model]) for one in measured]
    controller.profile(measured)
    return controller, rng


class Scripted(Policy):
    """Plays the arms in turn and keeps what it is told."""

    def __init__(self):
        self.arms, self.pulls = 0, []

    def probabilities(self, costs, context, rng):
        law = np.zeros(len(costs.space))
        law[self.arms % len(law)] = 1.0
        self.arms += 1
        return law

    def observe(self, arm, propensity, rounds):
        self.pulls.append((arm, propensity, [outcome.tokens for outcome in rounds]))


def scripted(**options):
    policy = Scripted()
    return Controller(PlanSpace.grid("t", ["d"], [2, 4]), policy, **options), policy
