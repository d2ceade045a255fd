"""``adaspec bench`` from end to end on tiny random models: records, figures, failures, resuming."""

import errno
import json
from collections import Counter

import pytest
from bench_runs import lines, words

from adaspec.bench import harness, journal
from adaspec.bench.methods import Adaptive
from adaspec.bench.tiny import save_model
from adaspec.cli import main
from adaspec.plan import Plan

ALL = "methods=[plain,best_fixed,policy,hf,hf_lookup,hf_assisted,hf_assisted_heuristic,target/lookup:4]"
ROUND = {
    "method": str,
    "prompt": str,
    "kind": str,
    "repeat": int,
    "turn": int,
    "round": int,
    "plan": str,
    "propensity": float,
    "pulled": bool,
    "batch_size": int,
    "seq_len": int,
    "tag": str,
    "tokens": int,
    "seconds": float,
    "catch_up_seconds": float,
    "forecast": (float, type(None)),
    "edges": list,
    "passes": list,
}
PROMPT = {
    "method": str,
    "prompt": str,
    "kind": str,
    "repeat": int,
    "turn": int,
    "tokens": int,
    "seconds": float,
    "prefill_seconds": (float, type(None)),
    "tokens_per_second": float,
    "rounds": int,
    "mean_accepted_length": float,
    "digest": str,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Every method, two repetitions."""
    out = tmp_path_factory.mktemp("runs") / "all"
    assert main(words(out, ALL, "repeats=2", "policies=[thompson,exp3]")) == 0
    return out


def test_every_line_of_the_records_is_as_it_should_be(run):
    for name, fields in (("rounds.jsonl", ROUND), ("prompts.jsonl", PROMPT)):
        found = lines(run / name)
        assert found
        for line in found:
            assert set(line) == set(fields)
            for field, kind in fields.items():
                assert isinstance(line[field], kind), (field, line[field])
    for line in lines(run / "rounds.jsonl"):
        Plan.parse(line["plan"])
        assert 0.0 < line["propensity"] <= 1.0
        for edge in line["edges"]:
            reached, offered, accepted = (edge[key] for key in ("reached", "offered", "accepted"))
            assert all(a <= o <= r for a, o, r in zip(accepted, offered, reached, strict=True))
        assert {"model", "query_len", "batch_size", "seq_len", "seconds"} == set(line["passes"][0])


def test_an_answer_tells_its_speed_and_its_tokens_per_round(run):
    for line in lines(run / "prompts.jsonl"):
        assert line["tokens_per_second"] == line["tokens"] / line["seconds"]
        assert line["mean_accepted_length"] == line["tokens"] / line["rounds"]


def test_rounds_add_up_to_the_tokens_of_their_prompts(run):
    sums, numbers = Counter(), {}
    for line in lines(run / "rounds.jsonl"):
        sums[journal.unit(line)] += line["tokens"]
        numbers.setdefault(line["method"], []).append(line["round"])
    prompts = {journal.unit(line): line for line in lines(run / "prompts.jsonl")}
    assert sums == {key: line["tokens"] for key, line in prompts.items() if line["prefill_seconds"] is not None}
    assert all(own == list(range(len(own))) for own in numbers.values())
    assert len(prompts) == 9 * 2 * 2  # methods, prompts, repeats


def test_the_summary_says_what_the_issue_asks_for(run):
    found = json.loads((run / "summary.json").read_text())
    assert list(found["methods"]) == [
        "plain", "best_fixed", "thompson", "exp3", "hf", "hf_lookup", "hf_assisted", "hf_assisted_heuristic",
        "target/lookup:4",
    ]  # fmt: skip
    for own in found["methods"].values():
        assert own["tokens_per_second"] > 0.0
        assert own["mean_accepted_length"] >= 1.0
        assert own["speedup_spread"][0] <= own["speedup"] <= own["speedup_spread"][1]
        assert own["texts_equal"] is True
        assert (own["prompts"], own["repeats"]) == (2, 2)
        assert set(own["kinds"]) == {"chat"}
    assert found["methods"]["plain"]["speedup"] == 1.0
    assert found["objective"] == found["methods"]["thompson"]["speedup"]
    assert str(Plan.parse(found["best_fixed_plan"])) == found["best_fixed_plan"]
    assert found["complete"]
    assert found["machine"]["threads"] == 1
    assert str(run.parent) not in found["command"]


def test_methods_take_turns_in_going_first(run):
    order = {}
    for line in lines(run / "prompts.jsonl"):
        order.setdefault((line["repeat"], line["prompt"]), []).append(line["method"])
    assert [own[0] for own in order.values()] == ["plain", "best_fixed", "best_fixed", "thompson"]
    assert all(len(set(own)) == 9 for own in order.values())


def test_nothing_is_remembered_from_one_repetition_to_the_next(run):
    for method in ("best_fixed", "target/lookup:4"):
        own = [line for line in lines(run / "rounds.jsonl") if line["method"] == method]
        each = [
            [(line["prompt"], line["tokens"], line["edges"]) for line in own if line["repeat"] == n] for n in (0, 1)
        ]
        assert each[0] == each[1] != []


def test_the_last_line_is_the_summary(tmp_path, capsys):
    assert main(words(tmp_path, "methods=[plain,policy]")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads((tmp_path / "summary.json").read_text())


def test_two_turns_are_asked_with_the_answer_between_them(tmp_path, monkeypatch):
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["the quick brown", "and again"]},
        {"question_id": 2, "category": "qa", "turns": ["over the lazy dog"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []
    answer = Adaptive.answer
    monkeypatch.setattr(
        Adaptive, "answer", lambda self, request, tag="": asked.append(request) or answer(self, request, tag)
    )
    out = tmp_path / "run"
    more = ("workload=spec_bench", f"workload.read.path={file}", "methods=[plain,policy]", "warmups=0")
    assert main(words(out, *more)) == 0
    found = [line for line in lines(out / "prompts.jsonl") if line["method"] == "thompson"]
    assert [(line["prompt"], line["kind"], line["turn"]) for line in found] == [
        ("1", "multi_turn", 0), ("1", "multi_turn", 1), ("2", "qa", 0),
    ]  # fmt: skip
    assert asked[1].prompt[: len(asked[0].prompt)] == asked[0].prompt
    assert len(asked[1].prompt) > len(asked[0].prompt) + 8  # the answer and the second turn
    own = json.loads((out / "summary.json").read_text())["methods"]["thompson"]
    assert set(own["kinds"]) == {"multi_turn", "qa"}


def test_sampled_texts_are_not_compared(tmp_path):
    assert main(words(tmp_path, "sampling=t0.7", "methods=[plain,policy,hf]")) == 0
    own = json.loads((tmp_path / "summary.json").read_text())["methods"]
    assert {each["texts_equal"] for each in own.values()} == {None}
    assert len({line["digest"] for line in lines(tmp_path / "prompts.jsonl")}) > 2


def test_a_stream_is_reported_with_its_latency(tmp_path):
    assert main(words(tmp_path, "workload=stream", "methods=[plain]", "workload.limit=4")) == 0
    own = json.loads((tmp_path / "summary.json").read_text())["methods"]["plain"]
    assert own["latency_seconds"] > 0.0


class Stop:
    """Raises once so many units are written."""

    def __init__(self, units, error):
        self.left, self.error, self.append = 2 * units, error, journal._append

    def __call__(self, path, new):
        if not self.left:
            with path.open("a") as file:
                file.write('{"method": "half a li')  # what a full disk leaves
            raise self.error
        self.left -= 1
        self.append(path, new)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [(KeyboardInterrupt(), 130, "interrupted"), (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left")],
)
def test_what_was_done_is_kept_and_a_later_run_goes_on_from_it(tmp_path, capsys, monkeypatch, error, code, told):
    more = ("methods=[plain,policy]", "workload.limit=3")
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_append", Stop(3, error))
        assert main(words(tmp_path, *more)) == code
    shown = capsys.readouterr()
    own = [line for line in shown.err.splitlines() if told in line]
    assert len(own) == 1
    assert "resume=" in own[0]
    assert "Traceback" not in shown.err
    before = lines(tmp_path / "prompts.jsonl")
    assert len(before) == 3
    assert {journal.unit(line) for line in lines(tmp_path / "rounds.jsonl")} == {journal.unit(line) for line in before}
    if code == 130:
        assert json.loads(shown.out.splitlines()[-1])["complete"] is False
    known = json.loads((tmp_path / "controller-thompson.json").read_text())
    assert main(["bench", f"resume={tmp_path}"]) == 0
    after = lines(tmp_path / "prompts.jsonl")
    assert after[:3] == before
    assert len(after) == len({journal.unit(line) for line in after}) == 6
    numbers = [line["round"] for line in lines(tmp_path / "rounds.jsonl") if line["method"] == "thompson"]
    assert numbers == list(range(len(numbers)))
    later = json.loads((tmp_path / "controller-thompson.json").read_text())
    rounds = [sum(row[0] for row in state["totals"].values()) for state in (known, later)]
    assert 0 < rounds[0] < rounds[1] == len(numbers)  # it went on with what it knew


def test_what_a_crash_left_half_written_is_dropped(tmp_path):
    more = ("methods=[plain]",)
    assert main(words(tmp_path, *more)) == 0
    prompts, rounds = tmp_path / "prompts.jsonl", tmp_path / "rounds.jsonl"
    whole = prompts.read_text().splitlines(keepends=True)
    prompts.write_text(whole[0] + whole[1][:20])
    opened = journal.Journal(tmp_path)
    assert [line["prompt"] for line in opened.prompts] == ["ours-1"]
    assert {line["prompt"] for line in lines(rounds)} == {"ours-1"}
    assert prompts.read_text() == whole[0]


def test_a_run_goes_on_only_as_it_began_but_may_grow(tmp_path, capsys):
    assert main(words(tmp_path, "methods=[plain]")) == 0
    assert main(words(tmp_path, "methods=[plain]", "seed=1")) == 2
    assert "begun with seed=0 and cannot go on with seed=1" in capsys.readouterr().err
    assert main(["bench", f"resume={tmp_path}", "repeats=2"]) == 0
    assert [line["repeat"] for line in lines(tmp_path / "prompts.jsonl")] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["policy=tompson"], "thompson"),
        (["policies=[tompson]"], "thompson"),
        (["experiment=smok"], "smoke"),
        (["experiment=tournament"], "smoke"),
        (["worklod.limit=3"], "workload.limit"),
        (["models.targt=x"], "models.target"),
        (["repeats=three"], "repeats"),
        (["policy.hold=many"], "hold"),
        (["repeats=0"], "at least 1"),
        (["methods=[plian]"], "plian"),
        (["methods=[target/lookup:3]"], "target/lookup:3"),
        (["methods=[plain,plain]"], "one name"),
        (["policy=hedgespec"], "hedgespec"),
        (["models.target=/no/such/dir"], "/no/such/dir"),
        (["models.drafters=[lookup]", "methods=[plain,hf_assisted]"], "hf_assisted"),
        (["workload=gsm8k"], "workload.read.path"),
        (["workload=text", "workload.read.path=/no/such/file"], "/no/such/file"),
        (["workload.kinds=[poetry]"], "poetry"),
        (["workload.max_prompt_tokens=1"], "max_prompt_tokens"),
        (["record.mode=onlin"], "onlin"),
        (["resume=/no/such/run"], "/no/such/run"),
        (["sweep=/no/such/sweep.yaml"], "/no/such/sweep.yaml"),
        (["measure=speed"], "speed"),
    ],
)
def test_what_does_not_work_is_told_in_one_line(more, told, tmp_path, capsys):
    assert main(words(tmp_path / "run", *more)) == 2
    error = capsys.readouterr().err
    assert told in error.splitlines()[-1]
    assert sum("adaspec:" in line for line in error.splitlines()) == 1
    assert "Traceback" not in error


def test_a_broken_line_is_told_by_its_number(tmp_path, capsys):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "one"}\n\n{"question": 2}\n')
    assert main(words(tmp_path / "run", "workload=gsm8k", f"workload.read.path={file}")) == 2
    assert f"line 3 of {file}" in capsys.readouterr().err


def test_a_multirun_makes_a_run_per_combination_and_one_table(tmp_path, capsys):
    place = f"hydra.sweep.dir={tmp_path / 'several'}"
    own = [word for word in words(tmp_path) if not word.startswith(("hydra.run", "policy="))]
    assert main([*own, "-m", "policy=thompson,ucb", "seed=0,1", "methods=[plain,policy]", place]) == 0
    shown = capsys.readouterr().out.splitlines()
    found = json.loads(shown[-1])
    assert found["group"] == "several"
    assert [set(one["methods"]) for one in found["runs"]] == [{"plain", "thompson"}] * 2 + [{"plain", "ucb"}] * 2
    assert any(line.startswith("| policy=ucb seed=1: ucb |") for line in shown)
    assert [path.parent.name for path in sorted((tmp_path / "several").glob("*/summary.json"))] == list("0123")


def test_the_help_names_every_choice(capsys):
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("adaspec bench experiment=smoke", "models=", "qwen_coder", "spec_bench", "thompson", "record="):
        assert word in shown
    assert "tournament" not in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_the_core_is_measured_through_the_bench(tmp_path, capsys, monkeypatch):
    from adaspec.bench import core

    monkeypatch.setattr(core, "PASSES", 1)
    monkeypatch.setattr(core, "STREAM_BYTES", 1 << 12)
    assert main(words(tmp_path, "measure=core", "core.precisions=[fp16]", "workload.limit=1")) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["pass_ratios"]["fp16"]) == {"2", "3", "5", "9"}
    assert {"plain", "pair", "lookup", "hf generate float32", "hf assisted bfloat16"} <= set(found["tokens_per_second"])
    for peer in ("generate", "assisted", "lookup"):
        assert found[f"vs_hf_{peer}"] > 0.0
    for name in ("pair", "lookup"):
        assert found["vs_plain"][name] == pytest.approx({"chat": found["vs_plain"][name]["chat"]})
    assert found["texts_equal"]
    assert len(found["adaptive_anatomy"]) == 2
    for parts in (found["round_anatomy"], *found["adaptive_anatomy"].values()):
        assert set(parts) == {"draft", "verify", "catch_up", "sampling", "bookkeeping", "host", "controller"}
        assert min(parts[name] for name in ("verify", "bookkeeping", "host", "controller")) > 0.0
    assert found["round_anatomy"]["draft"] > 0.0  # the controller may find that drafting does not pay here
    assert found["controller_share"] + found["bookkeeping_share"] + found["host_share"] < 1.0
    assert 0.0 < found["controller_share"] < 1.0
    assert found["bandwidth_share"] is not None


def test_assisted_generation_takes_the_weights_of_a_drafter_of_another_precision(tmp_path, capsys):
    save_model(tmp_path / "small", seed=1)
    own = ("methods=[plain,hf_assisted]", f"models.drafters=['draft=int8:{tmp_path / 'small'}']", "workload.limit=1")
    assert main(words(tmp_path / "run", *own)) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]) == {"plain", "hf_assisted"}


def test_chains_of_three_are_measured_beside_their_forecast(tmp_path, capsys):
    three = ("measure=chains", "plans.max_depth=3", "plans.inner_windows=[2]", "workload.limit=3")
    assert main(words(tmp_path, *three)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    depths = {len(plan.split(":")[0].split("/")) for plan in found["plans"]}
    assert depths == {1, 2, 3}
    assert found["plans"]["target"]["speedup"] == 1.0
    for figures in found["plans"].values():
        assert figures["texts_equal"] is True
        assert figures["forecast_tokens_per_second"] > 0.0
        assert set(figures["kinds"]) == {"chat"}
    for key, own in (("measured", "speedup"), ("forecast", "forecast_speedup")):
        three, two = (found["plans"][found["best"][depth]][own] for depth in "32")
        assert found["gain"][key] == pytest.approx(three / two)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("methods=[plian]", "'plian' is not known; known are plain,"),
        ("workload.limit=-1", "workload.limit is at least 1, got -1"),
        ("models.drafters=['lookup+int4']", "lookup+int4 is made of drafters given before it, and lookup is not one"),
    ],
)
def test_what_cannot_be_asked_for_is_told(tmp_path, capsys, word, told):
    assert main(words(tmp_path, word)) == 2
    assert told in capsys.readouterr().err


def test_a_chain_of_three_needs_two_drafters(tmp_path, capsys):
    assert main(words(tmp_path, "measure=chains", "models.drafters=[lookup]")) == 2
    assert "the drafters are lookup, the depth 2" in capsys.readouterr().err


def test_a_cold_policy_knows_nothing_of_the_prompt_before(tmp_path):
    assert main(words(tmp_path, "methods=[plain,policy]", "cold=true")) == 0
    state = json.loads((tmp_path / "controller-thompson.json").read_text())
    last = [
        line for line in lines(tmp_path / "rounds.jsonl") if line["method"] == "thompson" and line["prompt"] == "ours-2"
    ]
    assert sum(row[0] for row in state["totals"].values()) == len(last)


def test_the_words_of_a_resumed_run_are_those_it_was_begun_with(tmp_path):
    (tmp_path / "overrides.yaml").write_text("- models=tiny\n- seed=1\n")
    found = harness._resumed([f"resume={tmp_path}", "seed=2"])
    assert found == ["models=tiny", "seed=2", f"hydra.run.dir={tmp_path}"]


@pytest.mark.slow
def test_the_smoke_experiment_runs_on_the_real_model(tmp_path, capsys):
    assert main(["bench", "experiment=smoke", f"hydra.run.dir={tmp_path}"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["complete"]
    assert set(found["methods"]) == {"plain", "best_fixed", "knowledge_gradient", "hf", "hf_lookup"}
    assert [own["prompts"] for own in found["methods"].values()] == [4] * 5
    for name in ("plain", "best_fixed", "knowledge_gradient"):
        assert found["methods"][name]["texts_equal"] is True
    assert set(found["methods"]["knowledge_gradient"]["kinds"]) == {"chat", "quoting", "code", "maths"}
    assert found["methods"]["best_fixed"]["mean_accepted_length"] > 1.0 or found["best_fixed_plan"] == "target"
