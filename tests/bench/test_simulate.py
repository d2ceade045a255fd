"""The tournament: what is judged, the configuration tree, and the command line around it."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from adaspec import Fixed, Plan, PlanSpace, Policy
from adaspec.bench import config, schema, simulate
from adaspec.bench.replay import Replay
from adaspec.bench.scenarios import DATA, Setting, appearing, breaking, changing, loaded, misled, steady, traced
from adaspec.bench.simulate import Unit, play
from adaspec.bench.simulators import GOOD, HOPELESS, Regime, space, world
from adaspec.bench.tournament import Course, Entrant, Oracle, Standing, judge, run, standing, summary
from adaspec.bench.traces import Curve, Proposals, Trace
from adaspec.cli import main

FIXED = {"hold": 1, "collapse": 0.0, "learns": False}


def two_regimes():
    """A drafter that is good and then useless, so that no fixed plan is best all the way."""
    return Setting(world([Regime(1024, GOOD), Regime(1024, HOPELESS)], 0), space(5))


def test_the_best_fixed_plan_has_a_share_of_one():
    setting = two_regimes()
    oracle = Oracle(setting)
    best = oracle.best(2048)
    course = run(setting, Entrant(Fixed(setting.space[best]), **FIXED), 10_000, 0)
    figures = judge(course, oracle)
    assert figures["tokens"] == 2048
    assert figures["share_of_best_fixed"] == pytest.approx(1.0)
    assert figures["time_regret_seconds"] == pytest.approx(0.0, abs=1e-6)
    assert figures["share_of_segment_oracle"] < 0.98
    assert figures["rounds_to_95"] == 0
    others = [run(setting, Entrant(Fixed(plan), **FIXED), 10_000, 0).seconds[-1] for plan in setting.space]
    assert int(np.argmin(others)) == best


def test_the_segment_oracle_is_a_policy_that_knows_the_segments():
    setting = two_regimes()
    oracle, replay, spent = Oracle(setting), Replay(setting.world, setting.space), []
    for segment in setting.world.segments:
        each = []
        for plan in setting.space:
            own = Replay(setting.world, setting.space)
            while own.position < segment.start:
                own.round(setting.space.plain)
            before = own.true_seconds
            while own.position < segment.stop:
                own.round(plan)
            each.append(own.true_seconds - before)
        spent.append(min(each))
    assert oracle.by_segment(np.array([1024, 2048])) == pytest.approx([spent[0], sum(spent)])
    assert replay.position == 0


def test_rounds_until_the_speed_is_there():
    course = Course(np.arange(301), np.concatenate(([0.0], np.cumsum([2.0] * 150 + [1.0] * 150))), 0.0)

    class Even:
        def best(self, position):
            return 0

        def seconds(self, arm, positions):
            return np.asarray(positions, dtype=float)

        def by_segment(self, positions):
            return np.asarray(positions, dtype=float)

    figures = judge(course, Even())
    assert figures["rounds_to_95"] == 145  # from there on 100 rounds take at most 105.3 s
    assert figures["share_of_best_fixed"] == pytest.approx(300 / 450)
    assert figures["share_early"] == pytest.approx(200 / 350)
    assert figures["curve"]["share"][0] == pytest.approx(0.5)
    assert figures["curve"]["share"][-1] == pytest.approx(300 / 450)


def test_a_summary_averages_over_seeds():
    def unit(share, reached):
        names = ("share_of_segment_oracle", "time_regret_seconds", "share_early", "decision_microseconds")
        return {
            "scenario": "s",
            "policies": {"p": dict.fromkeys(names, 2.0) | {"share_of_best_fixed": share, "rounds_to_95": reached}},
        }

    own = summary([unit(0.8, 10), unit(1.0, None), unit(0.9, 30)])["s"]["p"]
    assert own["share_of_best_fixed"] == pytest.approx(0.9)
    assert own["ci"] == pytest.approx(1.96 * 0.1 / np.sqrt(3))
    assert (own["rounds_to_95"], own["seeds"]) == (30.0, 3)
    assert summary([unit(0.8, None)])["s"]["p"]["rounds_to_95"] is None


def test_a_standing_counts_ties_and_finds_the_worst_place():
    def runs(share, *regrets):
        return [{"share_of_best_fixed": share, "time_regret_seconds": regret} for regret in regrets]

    table = {
        "apart": {"p": runs(0.9, 5.0, 5.1, 5.2, 5.3), "q": runs(1.0, 0.0, 0.1, 0.2, 0.4)},
        "together": {"p": runs(0.97, 2.0, 9.0, 4.0, 1.0), "q": runs(1.0, 1.0, 8.5, 3.5, 0.3)},  # always a little behind
        "crossed": {"p": runs(0.98, 2.0, 4.0, 6.0, 8.0), "q": runs(1.0, 7.9, 1.9, 3.9, 5.9)},
    }
    assert standing(table, "p") == Standing(1, 2, 3, 0.9, "apart")
    assert standing(table, "q") == Standing(3, 3, 3, 1.0, "apart")
    assert standing(table, "nobody") is None


def test_a_lead_counts_less_the_more_policies_were_looked_at():
    """A lead that one rival alone has at the 5 % level is no lead of the best of thirty."""

    def runs(*regrets):
        return [{"share_of_best_fixed": 1.0, "time_regret_seconds": regret} for regret in regrets]

    pair = {"p": runs(1.0, 2.0, 3.0, 4.0), "q": runs(0.5, 1.1, 2.6, 3.7)}
    many = pair | {f"r{number}": runs(9.0, 9.1, 9.3, 9.2) for number in range(29)}
    assert standing({"s": pair}, "p").tied == 0
    assert standing({"s": many}, "p").tied == 1


@pytest.mark.parametrize("name", config.names("policy"))
def test_every_policy_of_the_tree_can_be_built_and_plays(name):
    given = config.load("policy", name)
    policy = config.build(given["rule"])
    assert isinstance(policy, Policy)
    rest = {key: given[key] for key in ("hold", "collapse", "learns", "follow")}
    course = run(steady(0, 50), Entrant(policy, **rest), 30, 0)
    assert course.rounds == 30
    assert given["name"] == name


def recorded(name):
    """Whether what a scenario is played on is there: a trace may have to be recorded first."""
    trace = config.load("scenario", name)["make"].get("trace")
    return trace is None or (DATA / f"{trace}.npz").is_file()


@pytest.mark.parametrize("name", [name for name in config.names("scenario") if not recorded(name)])
def test_a_trace_that_is_not_there_is_named(name):
    given = config.load("scenario", name)
    with pytest.raises(FileNotFoundError, match=given["make"]["trace"]):
        config.build(given["make"], seed=3)


@pytest.mark.parametrize("name", [name for name in config.names("scenario") if recorded(name)])
def test_every_scenario_of_the_tree_can_be_built_and_repeats_itself(name):
    given = config.load("scenario", name)
    first, again = (config.build(given["make"], seed=3) for _ in range(2))
    assert given["name"] == name
    assert first.world.positions >= 1000
    for edge, (_, accepted) in first.world.pairs.items():
        assert np.array_equal(accepted, again.world.pairs[edge][1])
    Replay(first.world, first.space).round(first.space[-1])


@pytest.mark.parametrize("name", config.names("experiment", "simulate"))
def test_every_experiment_names_what_there_is(name):
    path = config.folder() / "experiment" / f"{name}.yaml"
    assert f"\n# adaspec simulate experiment={name}\n" in path.read_text()
    schema.register()
    with initialize_config_dir(str(config.folder()), version_base="1.3"):
        found = compose("simulate", [f"experiment={name}"])
    assert set(found.policies) <= set(config.names("policy"))
    assert set(found.scenarios) <= set(config.names("scenario"))


def test_the_tournament_has_every_policy_and_every_scenario():
    found = OmegaConf.load(config.folder() / "experiment" / "tournament.yaml")
    assert sorted([*found.policies, "ucb"]) == config.names("policy")  # the same as optimistic
    assert sorted(found.scenarios) == [name for name in config.names("scenario") if recorded(name)]
    assert found.seeds >= 20


def test_a_scenario_does_what_its_name_says():
    assert len(steady(0, 139).space) == 139
    assert {segment.rows for segment in loaded(0, [1, 8], 64, [2]).world.segments} == {1, 8}
    assert changing(0, 50, ["good", "hopeless"], 600).world.segments[1].tag == "hopeless"
    broken = breaking(0, 50, 1200, 2.0).world
    assert broken.pairs["t", "d"][1][:1200].mean() > 1.0
    assert broken.pairs["t", "d"][1][1200:].max() == 0
    appeared = appearing(0, 50, 800).world
    assert appeared.pairs["t", "d"][0][:800].max() == 0 < appeared.pairs["t", "d"][0][800:].min()
    wrong = misled(0, 50, 0.3, 3.0)
    assert all(abs(wrong.acceptance[edge] - a) > 0.05 for edge, a in GOOD.items())
    scales = [scale for seed in range(3) for scale in misled(seed, 5, 0.3, 3.0).profile_scale.values()]
    assert {round(scale, 3) for scale in scales} == {0.333, 3.0}


def test_a_traced_scenario_mixes_texts_in_blocks_of_one_kind(tmp_path):
    lengths = np.array([30, 20, 40, 25])
    own = Proposals(np.full(115, 32), np.arange(115) % 4)
    curve = Curve(np.array([1, 8]), np.array([16, 64]), np.array([[1.0, 1.1], [2.0, 2.1]]))
    pairs, curves = {("t", "d"): own, ("t", "l"): own}, dict.fromkeys("tdl", curve)
    file = str(tmp_path / "a.npz")
    Trace("t", ("chat", "code", "chat", "code"), np.full(4, 9), lengths, pairs, curves, ("l",)).save(Path(file))
    setting = traced(0, file, ["chat", "code"], ["d", "l"], [], [2, 4], block=3, tagged=True)
    tags = [segment.tag for segment in setting.world.segments]
    assert len(setting.space) == 5
    assert set(tags) == {"chat", "code"}
    assert all(one != other for one, other in pairwise(tags))
    assert run(setting, Entrant(Fixed(setting.space[1]), **FIXED), 50, 0).rounds == 50
    with pytest.raises(ValueError, match="poetry"):
        traced(0, file, ["poetry"], ["d"], [], [2])


def test_a_unit_plays_all_policies_on_the_same_text():
    policies = tuple(config.load("policy", name) for name in ("plain", "likelihood"))
    result = play(Unit(config.load("scenario", "pair_best_5"), policies, 1, 60))
    assert json.loads(json.dumps(result)) == result
    assert result["policies"]["plain"]["tokens"] == 60
    assert result["policies"]["likelihood"]["share_of_best_fixed"] > result["policies"]["plain"]["share_of_best_fixed"]


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("policy=tompson", "thompson"),
        ("scenario=pair_best_51", "pair_best_50"),
        ("experiment=turnament", "tournament"),
        ("roundz=3", "rounds"),
        ("rounds=three", "rounds"),
        ("policy.hld=3", "policy.hold"),
        ("policies=[tompson]", "thompson"),
    ],
)
def test_a_typo_is_told_its_nearest_neighbour_in_one_line(override, near, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", override, "workers=1"]) == 2
    error = capsys.readouterr().err
    assert near in error
    assert error.count("\n") == 1


def test_impossible_arguments_are_told():
    with pytest.raises(ValueError, match="at least 1 draw"):
        config.build({"_target_": "adaspec.policy.ThompsonSampling", "draws": 0})
    with pytest.raises(ValueError, match="draw_count"):
        config.build({"_target_": "adaspec.policy.ThompsonSampling", "draw_count": 1})


def test_a_small_tournament_writes_table_pictures_and_one_json_line(tmp_path):
    words = ["policies=[thompson,plain]", "scenarios=[pair_best_5]", "seeds=2", "rounds=20", "workers=1"]
    code = f"import sys; from adaspec.cli import main; sys.exit(main(['simulate', *{words!r}, 'hydra.run.dir=out']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    own = json.loads(done.stdout.splitlines()[-1])["scenarios"]["pair_best_5"]["thompson"]
    assert {"share_of_best_fixed", "ci", "share_of_segment_oracle", "time_regret_seconds"} <= set(own)
    assert own["seeds"] == 2
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["scenarios"]["pair_best_5"]["thompson"] == own
    assert "| thompson |" in (tmp_path / "out" / "table.md").read_text()
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"regret.png", "share.png"}
    assert len((tmp_path / "out" / "units.jsonl").read_text().splitlines()) == 2


def test_an_interrupted_run_keeps_what_is_done_and_goes_on_from_it(tmp_path, capsys, monkeypatch):
    def some(units, workers):
        for unit in units[:2]:
            yield play(unit)
        raise KeyboardInterrupt

    given = OmegaConf.structured(schema.SimulateConfig(policies=["plain"], scenarios=["pair_best_5"], rounds=20))
    given.seeds, given.plots = 3, False
    monkeypatch.setattr(simulate, "_play", some)
    assert simulate.simulate(given, tmp_path) == 130
    shown = capsys.readouterr()
    assert "2 of 3 pieces are kept" in shown.err
    assert f"hydra.run.dir={tmp_path}" in shown.err
    with (tmp_path / "units.jsonl").open("a") as file:
        file.write('{"key": ["pair')  # as a crash leaves it
    assert json.loads(shown.out.splitlines()[-1])["scenarios"]["pair_best_5"]["plain"]["seeds"] == 2
    monkeypatch.setattr(simulate, "_play", lambda units, workers: map(play, units))
    assert simulate.simulate(given, tmp_path) == 0
    assert len((tmp_path / "units.jsonl").read_text().splitlines()) == 3
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["scenarios"]["pair_best_5"]["plain"]["seeds"] == 3


@pytest.mark.parametrize("name", ["rounds", "seeds"])
def test_a_count_below_1_is_refused(name, tmp_path):
    given = OmegaConf.structured(schema.SimulateConfig(policies=["plain"], scenarios=["pair_best_5"]))
    given[name] = -5
    with pytest.raises(ValueError, match=f"{name} is at least 1, got -5"):
        simulate.simulate(given, tmp_path)


def test_a_space_of_any_plan_can_be_pinned():
    plan = Plan.parse("t/m/d:3,2")
    setting = Setting(world([Regime(512, GOOD)], 0), PlanSpace([plan]))
    assert run(setting, Entrant(Fixed(plan), **FIXED), 20, 0).rounds == 20


def test_the_tree_lies_beside_the_package_or_inside_it():
    assert (config.folder() / "config.yaml").is_file()
    assert Path(config.folder()).name == "conf"
