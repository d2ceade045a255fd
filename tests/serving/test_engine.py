"""The engine alone: what shares a batch, and that no job is left without an answer."""

from __future__ import annotations

import pytest

from adaspec.decoding.generate import Request
from adaspec.decoding.sampling import SamplingParams
from adaspec.guard import Guard
from adaspec.plan import Override
from adaspec.serving.engine import Closed, Engine, Failed, Finished, Job, Limits, Piece, QueueFull
from adaspec.telemetry import Telemetry


@pytest.fixture
def engine(new_assembly):
    assembly = new_assembly()
    made = Engine(assembly.generator, Guard(assembly.controller), Telemetry(), Limits(max_batch=3, queue=8))
    yield made
    made.close(10.0)


def job(count: int = 5, *, temperature: float = 0.0, length: int = 4, **options) -> tuple[Job, list]:
    events: list = []
    request = Request(tuple(range(1, length + 1)), count, SamplingParams(temperature))
    return Job(request, events.append, **options), events


def test_a_batch_is_the_oldest_job_with_the_most_similar_of_its_kind(engine: Engine) -> None:
    first, *others = [
        job(10)[0],
        job(90)[0],
        job(12, temperature=1.0)[0],
        job(11)[0],
        job(10, override=Override(max_depth=1))[0],
        job(13)[0],
        job(10, tag="tenant")[0],
    ]
    engine.submit([first, *others])
    assert engine._pick() == [first, others[2], others[4]]


def test_the_queue_takes_all_of_a_request_or_nothing(engine: Engine) -> None:
    engine.submit([job()[0] for _ in range(5)])
    with pytest.raises(QueueFull):
        engine.submit([job()[0] for _ in range(4)])
    assert engine.load() == (0, 5)
    engine.submit([job()[0] for _ in range(3)])


def test_every_job_ends_with_one_last_event(engine: Engine) -> None:
    jobs = [job(count) for count in (3, 9, 5, 7)]
    engine.submit([each for each, _ in jobs])
    engine.start()
    engine.close(60.0)
    for (each, events), count in zip(jobs, (3, 9, 5, 7)):
        *pieces, last = events
        assert all(isinstance(piece, Piece) for piece in pieces)
        assert sum(len(piece.tokens) for piece in pieces) == count
        assert isinstance(last, Finished)
        assert (last.reason, last.usage.tokens, last.usage.prompt) == ("length", count, len(each.request.prompt))
    with pytest.raises(Closed):
        engine.submit([job()[0]])


def test_a_batch_that_fails_is_reported_and_the_next_one_is_decoded(engine: Engine, caplog) -> None:
    stream, calls = engine.generator.stream, []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("broken by the prompt 'my secret'")
        return stream(*arguments, **options)

    engine.generator.stream = failing
    jobs = [job(), job(temperature=1.0)]
    engine.submit([each for each, _ in jobs])
    engine.start()
    engine.close(60.0)
    [failed], (*_, finished) = (events for _, events in jobs)
    assert isinstance(failed, Failed)
    assert failed.status == 500
    assert "broken" not in failed.message
    assert isinstance(finished, Finished)
    [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged.startswith("a batch of 1 requests failed: RuntimeError at test_engine.py:")
    assert "in failing, from engine.py:" in logged
    assert "secret" not in caplog.text


def test_a_cancelled_job_is_dropped_while_it_waits(engine: Engine) -> None:
    (gone, heard), (stays, _) = job(), job()
    engine.submit([gone, stays])
    engine.cancel(gone)
    assert engine.load() == (0, 1)
    engine.start()
    engine.close(60.0)
    assert heard == []
