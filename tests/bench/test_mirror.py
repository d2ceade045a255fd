"""The mirror to Weights & Biases: offline, read back from its file, without a key or a name of this machine."""

import json
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from bench_runs import lines, words

from adaspec.bench.mirror import Mirror, WandbMirror, mirror
from adaspec.bench.schema import RecordConfig
from adaspec.cli import main

KEY = "0123456789abcdef" * 5
BLOCK, HEAD = 1 << 15, 7


def records(path):
    """The records of a .wandb file: a LevelDB log behind a header of 7 bytes, protobuf inside."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), HEAD, b""
    assert data[:4] == b":W&B"
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEAD])
        parts += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A multirun of one, mirrored, with a key in the environment."""
    import wandb

    out = tmp_path_factory.mktemp("wandb") / "group"
    own = [word for word in words(out, "methods=[plain,policy]") if not word.startswith("hydra.run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        for name in ("DATA", "CACHE", "CONFIG"):
            patch.setenv(f"WANDB_{name}_DIR", str(out.parent / name))
        assert main([*own, "-m", "record=wandb", f"hydra.sweep.dir={out}"]) == 0
        wandb.teardown()
    return out / "0"


@pytest.fixture(scope="module")
def kept(run):
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    return list(records(file))


def logged(kept, key):
    """What was logged together with a key, in order."""
    history = [record.history.item for record in kept if record.WhichOneof("record_type") == "history"]
    rows = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in history]
    return [row for row in rows if key in row]


def test_every_round_of_a_policy_is_there_with_its_number_as_step(run, kept):
    rounds = [line for line in lines(run / "rounds.jsonl") if line["method"] == "thompson"]
    found = logged(kept, "thompson/tokens_per_second")
    assert len(found) == len(rounds) > 0
    for line, row in zip(rounds, found):
        assert row["thompson/round"] == line["round"]
        assert row["thompson/accepted_length"] == line["tokens"]
        assert row["thompson/propensity"] == line["propensity"]
        assert row["thompson/tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
    metrics = [record.metric for record in kept if record.WhichOneof("record_type") == "metric"]
    steps = {metric.name: metric.step_metric for metric in metrics}
    assert steps["thompson/tokens_per_second"] == "thompson/round"
    assert steps["plain/answer_tokens_per_second"] == "plain/answer"


def test_every_answer_is_there(run, kept):
    for method in ("plain", "thompson"):
        own = [line for line in lines(run / "prompts.jsonl") if line["method"] == method]
        found = logged(kept, f"{method}/answer_tokens_per_second")
        assert [row[f"{method}/answer"] for row in found] == list(range(len(own)))
        for line, row in zip(own, found):
            assert row[f"{method}/answer_tokens_per_second"] == pytest.approx(line["tokens_per_second"])


def test_table_histogram_configuration_group_and_artifacts_are_there(kept):
    kinds = [record.WhichOneof("record_type") for record in kept]
    own = next(record.run for record in kept if record.WhichOneof("record_type") == "run")
    assert (own.run_group, own.job_type, own.project) == ("group", "bench", "adaspec")
    config = {item.key: json.loads(item.value_json) for item in own.config.update}
    assert config["models"]["target"] == "random:0"
    assert config["policy"]["name"] == "thompson"
    (values,) = logged(kept, "plans/_type")
    assert values["plans/_type"] == "table-file"
    assert values["thompson/accepted_lengths/_type"] == "histogram"
    assert kinds[-1] == "exit"
    artifacts = [record.artifact for record in kept if record.WhichOneof("record_type") == "artifact"]
    assert {"trace", "controller"} <= {artifact.type for artifact in artifacts}
    summaries = [
        item for record in kept if record.WhichOneof("record_type") == "summary" for item in record.summary.update
    ]
    assert any(item.key == "speedup" or list(item.nested_key) == ["speedup"] for item in summaries)


def test_no_key_and_no_name_is_written(run, kept):
    files = [path for path in run.rglob("*") if path.is_file() and "models" not in path.parts]
    assert len(files) > 5
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    own = next(record.run for record in kept if record.WhichOneof("record_type") == "run")
    assert own.host == ""
    assert not list(run.rglob("wandb-metadata.json"))  # user, host, program, git


def test_wandb_would_sync_the_run(run):
    (folder,) = run.glob("wandb/offline-run-*")
    code = "from wandb.cli.cli import cli; cli(['sync', '--dry-run', " + repr(str(folder)) + "])"
    done = subprocess.run([sys.executable, "-c", code], cwd=run, capture_output=True, text=True, timeout=120)
    assert "Would sync 1 run" in done.stdout + done.stderr


class FakeRun:
    """Takes logs slowly, or not at all."""

    id = "fake"

    def __init__(self, error=None):
        self.error, self.threads, self.finished, self.summary = error, set(), False, {}

    def log(self, values):
        self.threads.add(threading.current_thread().name)
        time.sleep(0.05)
        if self.error:
            raise self.error

    def define_metric(self, *args, **more):
        """Says nothing."""

    def log_artifact(self, artifact):
        """Says nothing."""

    def finish(self):
        self.finished = True


LINE = {
    "method": "m",
    "plan": "target",
    "round": 0,
    "tokens": 1,
    "seconds": 0.1,
    "propensity": 1.0,
    "catch_up_seconds": 0.0,
    "forecast": 9.0,
}
SUMMARY = {"methods": {}, "objective": None}


def test_decoding_does_not_wait_for_the_mirror(tmp_path):
    own = FakeRun()
    mirrored = WandbMirror(own)
    began = time.perf_counter()
    mirrored.add([], [LINE] * 10)
    assert time.perf_counter() - began < 0.25  # half of what logging takes
    (tmp_path / "rounds.jsonl").write_text("")
    mirrored.finish(SUMMARY, tmp_path)
    assert own.finished
    assert own.threads == {"wandb-mirror"}


def test_what_the_mirror_could_not_take_is_told_at_the_end(tmp_path):
    own = FakeRun(OSError("No space left on device"))
    mirrored = WandbMirror(own)
    mirrored.add([], [LINE])
    mirrored.add([], [LINE])
    with pytest.raises(ValueError, match=r"W&B: No space left on device; the folder .* has everything"):
        mirrored.finish(SUMMARY, tmp_path)
    assert own.finished


def test_it_is_off_by_default(tmp_path):
    assert type(mirror(RecordConfig(name="local"), {}, tmp_path, None)) is Mirror


def test_what_is_added_to_a_list_later_is_not_told_with_it():
    told = []
    run = SimpleNamespace(log=told.append, define_metric=lambda *_, **__: None)
    slow = WandbMirror(run)
    answers = [{"method": "plain", "tokens_per_second": 1.0, "mean_accepted_length": 1.0}]
    hold = threading.Event()
    slow._waiting.put(hold.wait)
    slow.add(answers, [])
    answers.append(answers[0])
    hold.set()
    slow._waiting.put(None)
    slow._thread.join()
    assert len(told) == 1
