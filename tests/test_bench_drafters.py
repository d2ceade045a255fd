"""The drafter benchmark on a tiny model: what its last line holds, and what an interrupt leaves."""

import json
import sys

import pytest

from adaspec.bench import drafters
from adaspec.compare import run_fixed


@pytest.fixture
def bench(model, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    records = [
        {"category": "chat", "prompt": "the fox"},
        {"category": "code", "turns": ["the dog runs"]},
        {"category": "chat", "question": "the lazy dog and the lazy dog"},
    ]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))

    def run(*options):
        base = ["bench", "--target", model, "--prompts", str(prompts), "--max-new-tokens", "12", "--threads", "1"]
        monkeypatch.setattr(sys, "argv", [*base, *options])
        code = drafters.main()
        captured = capsys.readouterr()
        return code, json.loads(captured.out.splitlines()[-1]), captured

    return run


def test_every_drafter_kind_and_window_is_reported(bench) -> None:
    options = ("--drafter", "lookup", "--drafter", "int8", "--drafter", "lookup+int8", "--windows", "2,4")
    code, report, captured = bench(*options, "--stops", "0,0.3")
    assert (code, report["prompts"], report["texts_equal"]) == (0, 3, True)
    assert "prompt 3 of 3 (chat)" in captured.err
    rows = {(row["drafter"], row["kind"]): row for row in report["drafters"]}
    names = {f"{name}{stop}" for name in ("lookup", "int8", "lookup+int8") for stop in ("", "?0.3")}
    assert set(rows) == {(name, kind) for name in names for kind in ("chat", "code", "all")}
    row = rows["int8", "all"]
    assert row["prompts"] == 3
    assert set(row["windows"]) == {"2", "4"}
    assert len(row["accepted_of_offered"]) == len(row["offered_of_reached"]) == 4
    assert row["offered_of_reached"][0] == 1.0
    assert row["accepted_of_offered"][0] > 0.5  # the target's own weights, rounded
    for each in row["windows"].values():
        assert 1 <= each["accepted_length"] <= 5
        assert each["proposal_ms"] > 0
    assert row["speedup"] == max(each["speedup"] for each in row["windows"].values())
    assert row["windows"][str(row["best_window"])]["speedup"] == row["speedup"]
    assert rows["int8", "chat"]["prompts"] == 2


def test_an_interrupt_keeps_the_prompts_that_are_done(bench, monkeypatch) -> None:
    seen = []

    def broken(generator, request, plan):
        seen.append(request)
        if len(set(seen)) == 3:
            raise KeyboardInterrupt
        return run_fixed(generator, request, plan)

    monkeypatch.setattr(drafters, "run_fixed", broken)
    code, report, captured = bench("--windows", "2")
    assert (code, report["prompts"]) == (130, 2)
    assert {row["kind"] for row in report["drafters"]} == {"chat", "code", "all"}
    assert captured.err.splitlines()[-1] == "interrupted"


def test_a_line_that_is_no_prompt_is_told_with_its_number(bench, tmp_path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*prompts\.jsonl"):
        bench()
