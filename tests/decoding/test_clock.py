"""Seconds of passes: events are recorded in passing and read when a round is drained."""

import pytest
import torch
from tiny_models import noisy, tiny

from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.clock import CudaClock, WallClock
from adaspec.decoding.model import Model
from adaspec.decoding.sampling import GREEDY
from adaspec.outcome import Pass
from adaspec.plan import Plan


class FakeEvent:
    """Events a quarter of a millisecond apart on a device that the host must wait for."""

    count, waits = 0, 0

    def record(self):
        FakeEvent.count += 1
        self.at = 0.25 * FakeEvent.count
        self.done = False

    def synchronize(self):
        self.done = True
        FakeEvent.waits += 1

    def elapsed_time(self, end):
        assert end.done, "read before the device came to it"
        return end.at - self.at


@pytest.fixture
def clock():
    FakeEvent.count = FakeEvent.waits = 0
    return CudaClock(FakeEvent)


def test_events_are_read_only_when_the_round_is_drained(clock):
    with clock.measure("m", 3, 2, 10):
        pass
    with clock.measure("m", 4, 2, 10, catch_up=True):
        pass
    assert FakeEvent.waits == 0
    assert clock.drain() == ((Pass("m", 3, 2, 10, 0.25e-3),), 0.25e-3)
    assert clock.drain() == ((), 0.0)


def test_the_time_between_marks_is_the_devices(clock):
    marks = [clock.mark() for _ in range(5)]
    assert clock.span(marks[0], marks[4]) == pytest.approx(1e-3)


def test_a_round_waits_for_no_event_before_its_end_and_tells_where_its_time_went(clock):
    module = tiny("llama")
    chain = Chain(Model("target", module), {"draft": Model("draft", noisy(module, 0.3, 1))}, capacity=64, clock=clock)
    plan = Plan.parse("target/draft:3")
    chain.start(Sequences(((3, 4, 5),), (GREEDY,), (20,), ((),)))
    emit = chain.emit

    def watched(*args):
        before = FakeEvent.waits
        verdict = emit(*args)
        assert FakeEvent.waits == before
        return verdict

    chain.emit = watched
    chain.round(plan)
    outcome = chain.round(plan).outcome
    edge = outcome.edges[0]
    assert [one.model for one in outcome.passes] == ["draft"] * 3 + ["target"]
    assert {one.seconds for one in outcome.passes} == {0.25e-3}
    assert edge.draft_seconds == pytest.approx(7 * 0.25e-3)  # three pairs of events, and the two marks around them
    assert edge.verify_seconds == pytest.approx(3 * 0.25e-3)


def test_a_wall_clock_reads_at_once():
    clock = WallClock()
    start = clock.mark()
    assert clock.span(start, start + 2.0) == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_events_measure_a_product():
    clock, x = CudaClock(), torch.ones(2048, 2048, device="cuda")
    with clock.measure("m", 1, 1, 0):
        for _ in range(20):
            x @ x
    assert 0.0 < clock.drain()[0][0].seconds < 10.0
