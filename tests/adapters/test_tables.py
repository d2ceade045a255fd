import json
from itertools import pairwise

import pytest

from adaspec import Context, Controller, Plan, PlanSpace
from adaspec.adapters.tables import learned_ranges, sglang_config, tensorrt_schedule, vllm_table
from adaspec.adapters.windows import round_outcome, window_controller, window_of
from adaspec.cli import main


@pytest.fixture(scope="module")
def state():
    """A drafter that is always right: at one row long windows win, at eight a step's time is its positions."""
    controller = window_controller([1, 3, 6], one_pass=True)
    for batch_size in ((1,) * 10 + (8,) * 10) * 15:
        ticket = controller.choose(Context(batch_size))
        window = window_of(ticket.plan)
        positions = batch_size * (window + 1)
        seconds = 0.01 + 0.01 * max(positions - 8, 0)
        controller.observe(ticket, round_outcome(ticket, [window] * batch_size, [window] * batch_size, seconds))
    return controller.state_dict()


def test_ranges_cover_every_batch_size_once(state):
    ranges = learned_ranges(state, 16)
    assert [size for first, last, _ in ranges for size in range(first, last + 1)] == list(range(1, 17))
    assert all(window != after for (_, _, window), (_, _, after) in pairwise(ranges))
    assert ranges[0][2] == 6
    assert ranges[-1][2] == 0
    assert ranges == learned_ranges(Controller.merge([state, state]), 16)


RANGES = ((1, 2, 6), (3, 4, 3), (5, 12, 1), (13, 64, 0))


def test_vllm_reads_inclusive_ranges():
    assert json.loads(vllm_table(RANGES)) == {
        "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 4, 3], [5, 12, 1], [13, 64, 0]],
    }


def test_sglang_reads_the_smallest_batch_size_of_each_entry():
    assert json.loads(sglang_config(RANGES)) == {
        "1": {"candidate_steps": [6]},
        "3": {"candidate_steps": [3]},
        "5": {"candidate_steps": [1]},
        "13": {"candidate_steps": [0]},
    }


def test_tensorrt_reads_the_largest_batch_size_of_each_entry():
    assert tensorrt_schedule(RANGES) == "max_draft_len: 6\ndraft_len_schedule:\n  2: 6\n  4: 3\n  12: 1"
    grows = ((1, 1, 2), (2, 4, 3), (5, 8, 1))
    assert tensorrt_schedule(grows) == "max_draft_len: 2\ndraft_len_schedule:\n  4: 2\n  8: 1"
    with pytest.raises(ValueError, match="batch size 1"):
        tensorrt_schedule(((1, 8, 0),))


def test_what_is_no_state_or_names_no_drafter_is_refused(state):
    with pytest.raises(ValueError, match="format"):
        learned_ranges({}, 8)
    with pytest.raises(ValueError, match="at least 1"):
        learned_ranges(state, 0)
    with pytest.raises(ValueError, match="'other'"):
        learned_ranges(state, 8, drafter="other")
    with pytest.raises(ValueError, match="no round"):
        learned_ranges(state | {"costs": state["costs"] | {"rounds": {"contexts": {}, "overhead": {}}}}, 8)
    plain = Controller(PlanSpace([Plan(("target",))]))
    with pytest.raises(ValueError, match="it has none"):
        learned_ranges(plain.state_dict(), 8)


def test_the_command_line_merges_states_and_writes_a_table(state, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(state))
    command = ["export", "vllm", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--max-batch-size", "16"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["num_speculative_tokens"] == 6
    assert main(["export", "sglang", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "change", "told"),
    [
        ([], {"format": "other"}, "'other'"),
        ([], {"totals": {"target": [1, 2.0]}}, "totals.target is a list of 3"),
        ([], {"totals": {}}, "it has none"),
        (["good.json"], {"totals": {"target": [1, 2.0]}}, "totals.target is a list of 3"),
        (["good.json"], {"target": "somebody else"}, "'somebody else', not of 'target'"),
    ],
)
def test_a_state_that_cannot_be_exported_is_named(state, tmp_path, monkeypatch, capsys, others, change, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.json").write_text(json.dumps(state))
    (tmp_path / "bad.json").write_text(json.dumps(state | change))
    assert main(["export", "vllm", *others, "bad.json"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("adaspec: bad.json: ")
    assert told in complaint


def test_a_window_that_took_no_time_is_passed_over(state):
    contexts = {"1": {"": {"target": [0.0, 0.0, 0.0], "target/draft:3": [9.0, 0.0, 5.0]}}}
    rounds = state["costs"]["rounds"] | {"contexts": contexts}
    with pytest.raises(ValueError, match="no round"):
        learned_ranges(state | {"costs": state["costs"] | {"rounds": rounds}}, 8)


def test_exporting_what_is_no_state_leaves_it_alone(tmp_path, capsys):
    notes = tmp_path / "notes.md"
    notes.write_text("# my notes")
    assert main(["export", "vllm", str(notes)]) == 2
    assert "notes.md holds no state" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
