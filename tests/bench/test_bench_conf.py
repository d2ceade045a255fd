"""The tree of ``adaspec bench``: every choice composes and can be made; a sweep's command is one of ours."""

import json
import shlex
import sys
from itertools import chain

import pytest
import yaml
from bench_runs import TINY, words
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from adaspec.bench import config, lineup, schema, sweep
from adaspec.bench.workload import Question
from adaspec.cli import main

CHOICES = [(group, name) for group in config.groups("bench") for name in config.names(group, "bench")]


def composed(*overrides):
    schema.register()
    with initialize_config_dir(str(config.folder()), version_base="1.3"):
        return compose("config", list(overrides))


def written(tmp_path, name):
    """A file in the format that a workload reads."""
    record = {"question_id": 1, "category": "writing", "turns": ["a", "b"], "question": "a", "prompt": "a"}
    path = tmp_path / name
    path.write_text(json.dumps(record) + "\n")
    return path


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes_and_can_be_made(group, name, tmp_path):
    found = composed(f"{group}={name}")
    if OmegaConf.is_missing(found.workload.read, "path"):
        found.workload.read.path = str(written(tmp_path, "questions.jsonl"))
    OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    lineup.check_methods(found)
    asked = lineup.questions(found)
    assert all(isinstance(question, Question) for question in asked)
    if found.runner.device == "cpu":
        own = lineup.setup(found, tmp_path)
        assert own.target
    assert config.build(config.plain(found.policy.rule))
    assert found[group].name == name if group != "experiment" else True
    assert config.summary(group, name)


@pytest.mark.parametrize("name", config.names("experiment", "bench"))
def test_every_experiment_begins_with_its_command(name):
    lines = (config.folder() / "experiment" / f"{name}.yaml").read_text().splitlines()
    said = shlex.split(lines[1].removeprefix("# "))
    assert said[:3] == ["adaspec", "bench", f"experiment={name}"]
    config.check(said[2:], "bench")
    composed(*said[2:])


def test_every_experiment_belongs_to_a_command():
    own = [config.names("experiment", command) for command in config.ROOTS]
    assert sorted(chain(*own)) == config.names("experiment")


def test_every_group_of_the_defaults_is_a_folder_with_choices():
    defaults = OmegaConf.load(config.folder() / "config.yaml").defaults
    named = [key for entry in defaults if OmegaConf.is_dict(entry) for key in entry if not key.startswith("override")]
    assert named == list(config.groups("bench"))
    assert all(config.names(group, "bench") for group in named)


def test_the_wandb_sweep_is_a_command_of_ours_as_an_agent_writes_it(tmp_path, capsys):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    file = config.folder() / "sweep.yaml"
    own = yaml.safe_load(file.read_text())
    drawn = {name: {"value": given["values"][-1]} for name, given in own["parameters"].items()}
    args = create_sweep_command_args({"args": drawn})
    command = create_sweep_command(own["command"])
    said = [
        word for chunk in command for word in (args["args_no_hyphens"] if chunk == "${args_no_hyphens}" else [chunk])
    ]
    assert said[:2] == ["adaspec", "bench"]
    config.check(said[2:], "bench")
    composed(*said[2:])
    local = [word for word in said[1:] if not word.startswith("record")]
    run = [word for word in TINY if not word.startswith(tuple(word.partition("=")[0] + "=" for word in local))]
    assert main([*local, *run, "methods=[plain,policy]", f"hydra.run.dir={tmp_path}"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["objective"] == found["methods"]["optimistic"]["speedup"]
    assert own["metric"]["name"] == "speedup"
    assert json.loads((tmp_path / "controller-optimistic.json").read_text())["policy"]["name"] == "Optimistic"


def swept(tmp_path, capsys, **parts):
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"command": ["adaspec", "bench", "record=wandb", "seed=3", "${args}"], **parts}))
    given = words(tmp_path, "methods=[plain,policy]", "workload.limit=1")
    own = [word for word in given if not word.startswith(("hydra.run", "policy="))]
    assert main([*own, f"sweep={file}", f"hydra.sweep.dir={tmp_path / 'out'}"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_grid_is_played_here_as_a_multirun(tmp_path, capsys):
    found = swept(tmp_path, capsys, method="grid", parameters={"policy": {"values": ["exp3", "ucb"]}})
    assert [set(one["methods"]) for one in found["runs"]] == [{"plain", "exp3"}, {"plain", "ucb"}]
    assert all("seed=3" in one["overrides"] for one in found["runs"])
    assert not list(tmp_path.rglob("offline-run-*"))


def test_a_search_draws_its_trials_here(tmp_path, capsys):
    parameters = {"policy.hold": {"min": 1, "max": 8}, "policy.collapse": {"min": 0.1, "max": 0.9}}
    found = swept(tmp_path, capsys, method="bayes", run_cap=2, parameters=parameters)
    assert found["group"] == "out"
    assert len(found["runs"]) == 2
    assert (tmp_path / "out" / "1" / "summary.json").is_file()


def test_draws_lie_in_their_ranges():
    parameters = {
        "a": {"min": 1, "max": 3},
        "b": {"min": 0.5, "max": 2.0},
        "c": {"values": ["x", None, True]},
        "d": {"min": 0.001, "max": 1.0, "distribution": "log_uniform_values"},
        "e": {"value": 7},
    }
    found = sweep.draws({"parameters": parameters, "run_cap": 200})
    assert len(found) == 200
    columns = list(zip(*[[word.partition("=")[2] for word in trial] for trial in found]))
    assert set(columns[0]) == {"1", "2", "3"}
    assert all(0.5 <= float(value) <= 2.0 for value in columns[1])
    assert set(columns[2]) == {"x", "null", "true"}
    assert 40 < sum(float(value) < 0.03 for value in columns[3]) < 160  # about half: the scale is logarithmic
    assert set(columns[4]) == {"7"}
    with pytest.raises(ValueError, match="no values"):
        sweep.draws({"parameters": {"a": {}}})


@pytest.mark.parametrize("text", ["- a", "method: grid", "a: [", "parameters: 3"])
def test_what_is_no_sweep_is_told(text, tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no"):
        sweep.definition(str(file))


def test_the_tree_needs_no_torch_for_its_help():
    import subprocess

    code = "import sys, adaspec.bench.usage as u; u.usage(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
