"""The SGLang policy against recorded calls; no live engine was run."""

import json
import sys
import types

import pytest

from adaspec.adapters import sglang
from adaspec.adapters.sglang import AdaptivePolicy, AdaptiveSpeculativeParams


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Worker:
    """The calls that SGLang's AdaptiveController makes of a policy, in their order (adaptive_runtime_state.py)."""

    def __init__(self, policy, graph_sizes):
        self.policy, self.states, self.steps = policy, {}, policy.candidate_steps[0]
        policy.set_cuda_graph_bs(graph_sizes)
        for steps in policy.candidate_steps:
            self.states[steps] = policy.cuda_graph_bs_for_step(steps)

    def activate(self, batch_size):
        target = self.policy.get_steps_for_batch(batch_size)
        assert target in self.states, "a step that no state was built for"
        self.steps = target

    def verified(self, accepted, batch_size):
        new = self.policy.on_verify_complete(accepted, batch_size)
        if new is not None:
            assert new in self.states
            self.steps = new


def rounds(policy):
    return sum(row.rounds for row in policy.controller.table())


def test_graphs_are_captured_for_every_candidate():
    worker = Worker(AdaptivePolicy([1, 3]), [8, 1, 4])
    assert worker.states == {0: [1, 4, 8], 1: [1, 4, 8], 3: [1, 4, 8]}
    assert worker.policy.cuda_graph_bs_for_step(5) == []
    worker.policy.set_cuda_graph_bs(None)
    assert worker.policy.cuda_graph_bs_for_step(3) is None


def play(worker, clock, batch_size, count, cost, good):
    """``count`` rounds one after the other; a round takes cost(steps), every draft is accepted or none."""
    taken = []
    for _ in range(count):
        worker.activate(batch_size)
        taken.append(worker.steps)
        clock.now += cost(worker.steps)
        worker.verified([worker.steps if good else 0] * batch_size, batch_size)
    return taken


def test_it_drafts_where_that_pays_and_stops_where_it_does_not():
    clock = Clock()
    worker = Worker(AdaptivePolicy([0, 1, 3], clock=clock), None)
    good = play(worker, clock, 1, 200, lambda steps: 0.01 + 0.001 * steps, True)
    bad = play(worker, clock, 16, 200, lambda steps: 0.01 * (1 + steps), False)
    assert sum(good[-50:]) / 50 > 2.5
    assert bad[-50:].count(0) > 40
    assert rounds(worker.policy) == 400


def test_reports_that_come_one_round_late_are_matched_to_their_choices():
    clock = Clock()
    worker = Worker(AdaptivePolicy([0, 2], clock=clock), None)
    seen = []
    observe = worker.policy.controller.observe
    worker.policy.controller.observe = lambda ticket, outcome: (
        seen.append((ticket, outcome)),
        observe(ticket, outcome),
    )
    worker.activate(1)
    for _ in range(50):
        ahead = worker.steps
        clock.now += 0.01 * (1 + ahead)
        worker.activate(1)  # the next round starts before this one is reported
        clock.now += 0.001
        worker.verified([ahead], 1)
        clock.now -= 0.001
    assert rounds(worker.policy) == 50
    for ticket, outcome in seen:
        (window,) = ticket.plan.windows or (0,)
        assert outcome.seconds == pytest.approx(0.01 * (1 + window))
        assert outcome.tokens == 1 + window


def test_pauses_and_changed_batches_teach_nothing():
    clock = Clock()
    worker = Worker(AdaptivePolicy([0, 2], clock=clock), None)
    worker.activate(1)
    clock.now += 60.0
    worker.verified([0], 1)
    worker.activate(4)
    clock.now += 0.01
    worker.verified([0, 0], 2)
    worker.verified([0, 0], 2)
    assert rounds(worker.policy) == 0
    play(worker, clock, 2, 3, lambda steps: 0.01, True)
    assert rounds(worker.policy) == 3


@pytest.fixture
def engine(monkeypatch):
    """Stand-ins for the modules of SGLang that the adapter asks for by name."""
    registered = []
    hooks = types.ModuleType("sglang.srt.plugins.hook_registry")
    hooks.HookType = types.SimpleNamespace(REPLACE="replace")
    hooks.HookRegistry = types.SimpleNamespace(register=lambda *given: registered.append(given))
    ranks = types.ModuleType("sglang.srt.distributed")
    ranks.get_tensor_model_parallel_world_size = lambda: 1
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (hooks, ranks):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(registered=registered, ranks=ranks)


def test_the_plug_in_replaces_sglangs_own_policy(engine, tmp_path):
    sglang.register()
    ((target, kind, how),) = engine.registered
    assert target == "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
    assert (kind, how) == (AdaptiveSpeculativeParams, "replace")
    config = tmp_path / "adaptive.json"
    config.write_text(
        json.dumps({"ema_alpha": 0.2, "1": {"candidate_steps": [2, 4]}, "8": {"candidate_steps": [0, 1]}})
    )
    assert kind(initial_steps=4, cfg_path=str(config)).candidate_steps == [0, 1, 2, 4]
    assert kind(initial_steps=3).candidate_steps == [0, 1, 3, 5, 7]


def test_ranks_that_would_decide_apart_are_refused(engine):
    engine.ranks.get_tensor_model_parallel_world_size = lambda: 4
    with pytest.raises(ValueError, match="4 tensor-parallel ranks"):
        AdaptiveSpeculativeParams(initial_steps=3)


@pytest.mark.parametrize("steps", [[], [-1, 2]])
def test_candidates_are_checked(steps):
    with pytest.raises(ValueError, match="candidate steps"):
        AdaptivePolicy(steps)
