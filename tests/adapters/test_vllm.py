"""The logic of the vLLM adapter against a fake scheduler. The real engine: tests/engines/run_vllm.py."""

import importlib
import sys
import time
import types
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from adaspec.state import StateFile


@dataclass
class FakeOutput:
    num_scheduled_tokens: dict
    scheduled_spec_decode_tokens: dict
    scheduled_new_reqs: list = field(default_factory=list)
    num_invalid_spec_tokens: dict | None = None

    @property
    def total_num_scheduled_tokens(self):
        return sum(self.num_scheduled_tokens.values())


class FakeScheduler:
    """What the adapter touches of vLLM's scheduler: it looks up a window per step and drafts it for the next one."""

    def __init__(self, config, table=((1, 1, 2), (2, 8, 4))):
        self.vllm_config = config
        self.num_spec_tokens = config.speculative_config.num_speculative_tokens
        self.dynamic_sd_lookup = [0] * 9 if table else None
        config.speculative_config.num_speculative_tokens_per_batch_size = table
        self.running = []
        self.window = 0
        self.closed = False

    def schedule(self):
        drafts = {request.name: [-1] * self.window for request in self.running if self.window}
        counts = {request.name: 1 + self.window for request in self.running}
        if counts:
            self.window = self.dynamic_sd_lookup[len(counts)]
        return FakeOutput(counts, drafts)

    def update_from_output(self, scheduler_output, model_runner_output):
        return {}

    def shutdown(self):
        self.closed = True


@pytest.fixture
def adapter(monkeypatch):
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, kind in (("scheduler", "Scheduler"), ("async_scheduler", "AsyncScheduler")):
        module = types.ModuleType(f"vllm.v1.core.sched.{name}")
        setattr(module, kind, type(kind, (FakeScheduler,), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "adaspec.adapters.vllm", raising=False)
    yield importlib.import_module("adaspec.adapters.vllm")
    sys.modules.pop("adaspec.adapters.vllm", None)


def config(method="draft_model", longest=4, **settings):
    speculative = types.SimpleNamespace(method=method, num_speculative_tokens=longest)
    return types.SimpleNamespace(speculative_config=speculative, additional_config={"adaspec": settings})


def requests(count):
    return [types.SimpleNamespace(name=f"r{number}", num_computed_tokens=50) for number in range(count)]


def results(output, accepted):
    """All requests accept up to ``accepted`` of their drafts."""
    tokens = [
        [7] * (1 + min(accepted, len(output.scheduled_spec_decode_tokens.get(name, ()))))
        for name in output.num_scheduled_tokens
    ]
    index = {name: place for place, name in enumerate(output.num_scheduled_tokens)}
    return types.SimpleNamespace(sampled_token_ids=tokens, req_id_to_index=index)


def rounds(scheduler):
    return {str(row.plan): row.rounds for row in scheduler.adaspec.controller.table()}


def run(scheduler, steps, accepted=4):
    for _ in range(steps):
        output = scheduler.schedule()
        time.sleep(1e-5)
        scheduler.update_from_output(output, results(output, accepted))


def test_the_table_names_the_windows(adapter):
    scheduler = adapter.AdaptiveScheduler(config(longest=3))
    plans = {str(plan) for plan in scheduler.adaspec.controller.space}
    assert plans == {"target", "target/draft:2", "target/draft:3"}


def test_a_window_shows_its_result_one_step_later(adapter):
    scheduler = adapter.AdaptiveScheduler(config())
    scheduler.running = requests(2)
    seen = []
    observe = scheduler.adaspec.controller.observe
    scheduler.adaspec.controller.observe = lambda ticket, outcome: (
        seen.append((ticket, outcome)),
        observe(ticket, outcome),
    )
    run(scheduler, 300, accepted=1)
    assert len({window for _, window in scheduler.adaspec.recent}) > 1
    assert sum(rounds(scheduler).values()) == len(seen) > 20
    for ticket, outcome in seen:
        (window,) = ticket.plan.windows or (0,)
        assert outcome.tokens == 2 * (1 + min(window, 1))
        assert all(edge.drafted == (2,) * window for edge in outcome.edges)
        assert 0.0 < outcome.seconds < 1.0


def test_a_step_that_drafts_another_window_is_passed_over_unless_drafting_is_free(adapter):
    for method, told in (("draft_model", False), ("ngram", True)):
        scheduler = adapter.AdaptiveScheduler(config(method, hold=1))
        scheduler.running = requests(1)
        run(scheduler, 100)
        windows = [window for _, window in scheduler.adaspec.recent]
        changes = sum(before != after for before, after in pairwise(windows))
        assert changes > 0
        assert sum(rounds(scheduler).values()) == 99 - (0 if told else changes)


def test_a_step_with_a_prompt_and_a_step_after_idling_teach_nothing(adapter):
    scheduler = adapter.AdaptiveScheduler(config())
    scheduler.running = requests(1)
    run(scheduler, 2)
    before = rounds(scheduler)
    output = scheduler.schedule()
    output.num_scheduled_tokens["new"] = 17
    output.scheduled_new_reqs = [object()]
    scheduler.update_from_output(output, results(output, 4))
    assert rounds(scheduler) == before
    scheduler.running = []
    scheduler.update_from_output(*(lambda o: (o, results(o, 0)))(scheduler.schedule()))
    scheduler.running = requests(1)
    run(scheduler, 1)
    assert rounds(scheduler) == before


def test_steps_may_overlap_as_in_async_scheduling(adapter):
    scheduler = adapter.AsyncAdaptiveScheduler(config("ngram"))
    scheduler.running = requests(1)
    ahead = scheduler.schedule()
    for _ in range(30):
        behind, ahead = ahead, scheduler.schedule()
        scheduler.update_from_output(behind, results(behind, 4))
    assert sum(rounds(scheduler).values()) == 29


def test_a_dropped_step_does_not_shift_the_others(adapter):
    scheduler = adapter.AdaptiveScheduler(config("ngram"))
    scheduler.running = requests(1)
    scheduler.schedule()  # never comes back
    run(scheduler, 10, accepted=4)
    total = rounds(scheduler)
    assert sum(total.values()) == 10


def test_state_is_saved_and_taken_up(adapter, tmp_path):
    path = str(tmp_path / "state.json")
    scheduler = adapter.AdaptiveScheduler(config(state=path, save_seconds=3600.0))
    scheduler.running = requests(1)
    run(scheduler, 30)
    scheduler.shutdown()
    assert scheduler.closed
    again = adapter.AdaptiveScheduler(config(state=path))
    assert rounds(again) == rounds(scheduler)
    again.shutdown()
    shared = adapter.AdaptiveScheduler(config(state=str(tmp_path), replica="b", save_seconds=0.0))
    assert rounds(shared) == rounds(scheduler)  # a new replica inherits what the folder holds
    shared.running = requests(1)
    run(shared, 1)
    assert (tmp_path / "b.json").exists()


@pytest.mark.parametrize("settings", [{"state": "state.json"}, {"state": "folder", "replica": "a"}])
def test_a_state_file_belongs_to_one_engine(adapter, tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    first = adapter.AdaptiveScheduler(config(**settings))
    with pytest.raises(ValueError, match=r"(state|a)\.json is the state of another process; give each its own file"):
        adapter.AdaptiveScheduler(config(**settings))
    if "replica" in settings:
        adapter.AdaptiveScheduler(config(**settings | {"replica": "b"})).shutdown()
    first.shutdown()
    first.shutdown()
    adapter.AdaptiveScheduler(config(**settings)).shutdown()


def test_a_state_of_something_else_is_refused_and_left_to_others(adapter, tmp_path):
    (tmp_path / "state.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"state\.json: .*'other'") as refused:
        adapter.AdaptiveScheduler(config(state=str(tmp_path / "state.json")))
    StateFile(tmp_path / "state.json").claim()
    assert refused.tb is not None  # which kept the first claim alive, had it not been given back


def test_an_unwritable_state_does_not_stop_the_engine(adapter, tmp_path, caplog):
    scheduler = adapter.AdaptiveScheduler(config(state=str(tmp_path / "state.json")))
    (tmp_path / ".state.json.new").mkdir()
    scheduler.shutdown()
    assert "cannot save" in caplog.text


@pytest.mark.parametrize(
    ("table", "settings", "told"), [((), {}, "per_batch_size"), (((1, 8, 2),), {"window": 3}, "window")]
)
def test_what_cannot_work_is_refused_at_the_start(adapter, table, settings, told):
    with pytest.raises(ValueError, match=told):
        adapter.AdaptiveScheduler(config(**settings), table)
