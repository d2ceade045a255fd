"""Windows shrink as a batch grows: the controller sees the batch, and a full device makes verified tokens dear."""

import json

import numpy as np
import pytest

from adaspec.bench import batches
from adaspec.controller import Controller
from adaspec.outcome import EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import Context

FREE_POSITIONS = 24  # positions over all rows up to which a pass costs what one position costs
SECONDS = {"target": 10e-3, "draft": 0.2e-3}


def seconds(model, query_len, rows):
    return SECONDS[model] * max(1.0, rows * query_len / FREE_POSITIONS)


def simulate(plan, rows, rng, acceptance=0.8):
    """One round of a batch whose rows accept different counts."""
    window = max(plan.windows, default=0)
    accepted = np.minimum(rng.geometric(1.0 - acceptance, rows) - 1, window)
    passes = [Pass("draft", 1, rows, 64, seconds("draft", 1, rows))] * window
    passes.append(Pass("target", window + 1, rows, 64, seconds("target", window + 1, rows)))
    reached = tuple(int((accepted >= at).sum()) for at in range(window))
    kept = tuple(int((accepted > at).sum()) for at in range(window))
    edges = (EdgeOutcome("target", "draft", reached, reached, kept, (rows,) * window, (rows,) * window),)
    spent = sum(one.seconds for one in passes)
    return RoundOutcome(int(accepted.sum()) + rows, spent, rows, edges=edges if window else (), passes=tuple(passes))


def test_windows_shrink_as_the_batch_grows():
    rng, controller = np.random.default_rng(0), Controller(batches.SPACE, seed=0)
    controller.profile(
        Pass(model, query_len, rows, 32, seconds(model, query_len, rows))
        for rows in batches.SIZES
        for model, lengths in batches.SPACE.shapes().items()
        for query_len in lengths
    )
    windows = []
    for rows in batches.SIZES:
        played = []
        for _ in range(200):
            decision = controller.choose(Context(rows, 64))
            controller.observe(decision, simulate(decision.plan, rows, rng))
            played.append(decision.plan)
        windows.append(batches.mean_window(played[100:]))
    assert windows[0] > windows[1] + 1.0
    assert windows[1] > windows[2] + 1.0
    assert windows[2] < 2.0


def test_the_benchmark_tells_every_batch_size_and_plan(capsys):
    assert batches.main(["--device", "cpu", "--tiny"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for rows in batches.SIZES:
        found = result[f"batch {rows}"]
        assert found["best"] in found["tokens_per_second"]
        assert len(found["tokens_per_second"]) == len(batches.SPACE)
        assert 0.0 <= found["mean_window"] <= 8.0


def test_a_batch_of_plain_plans_has_no_window():
    assert batches.mean_window([batches.SPACE.plain]) == 0.0
    assert batches.mean_window(batches.SPACE[1:3]) == pytest.approx(1.5)
