"""Distillation of a tiny random target: acceptance on held-out text rises, and an interruption changes nothing."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from saved_models import SIZES, save_model
from transformers import LlamaConfig

from adaspec.cli import main
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.feature_load import is_feature_drafter, load_feature_drafter, save_feature_drafter
from adaspec.decoding.feature_net import FeatureNet
from adaspec.decoding.model import Model, load_module
from adaspec.decoding.sampling import GREEDY
from adaspec.plan import Plan
from adaspec.training import distil as whole
from adaspec.training.collect import Collector, Recipe
from adaspec.training.distil import Distillation, distil
from adaspec.training.start import shape_of
from adaspec.training.trainer import Schedule, Trainer

CONFIG = SIZES | {"initializer_range": 0.1, "eos_token_id": 7, "tie_word_embeddings": True}
PROMPTS = """
[talk]
templates = ["the quick {animal}", "a lazy {animal} and a {animal} {a}", "jumps {b} over"]
animals = ["dog", "fox", "brown bear", "river", "bank"]
held_out = ["the lazy dog again", "a fox runs along", "the river bank", "again and again", "over the quick dog"]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), config=LlamaConfig(**CONFIG))


@pytest.fixture
def job(source, tmp_path):
    (tmp_path / "prompts.toml").write_text(PROMPTS)
    return Distillation(
        "tiny",
        source,
        tmp_path / "head",
        prompts=tmp_path / "prompts.toml",
        tokens=4000,
        vocabulary=120,
        begin_tokens=0,
        answer_tokens=24,
        recipe=Recipe(rows=21, passes=100, length=40),
        schedule=Schedule(epochs=4, batch_tokens=64, rate=3e-3, warmup=10, evaluate_every=20, window=3),
    )


def quiet(what, share):
    pass


def test_acceptance_on_held_out_text_rises_from_chance(job, source):
    result = distil(job, quiet)
    assert result.before[0] < 0.1
    assert result.after["all"][0] > result.before[0] + 0.2
    card = (job.out / "README.md").read_text()
    assert f"| after | {result.after['all'][0]:.2f} |" in card
    assert str(job.prompts) not in card
    assert is_feature_drafter(job.out)
    target = Model("target", load_module(source))
    chain = Chain(target, {"head": load_feature_drafter("head", job.out, target)}, capacity=100)
    accepted, texts = 0, []
    for plan in (Plan(("target",)), Plan(("target", "head"), (3,))):
        chain.start(Sequences(((5, 6, 7), (20, 21), (9, 8, 7, 6)), (GREEDY,) * 3, (30,) * 3, ((7,),) * 3))
        rows = [[], [], []]
        while chain.running:
            result = chain.round(plan)
            accepted += sum(sum(edge.accepted) for edge in result.outcome.edges)
            for row, new in zip(rows, result.tokens):
                row += new
        texts.append(rows)
    assert texts[0] == texts[1]
    assert accepted > 5


def test_the_closed_form_beginning_is_far_above_chance(job):
    job = dataclasses.replace(job, begin_tokens=2000, schedule=dataclasses.replace(job.schedule, epochs=1))
    assert distil(job, quiet).before[0] > 0.3


class Interrupted(Exception):
    pass


def interrupt_at(words, count):
    """A ``tell`` that stops everything when it has heard these words so often."""
    heard = [0]

    def tell(what, share):
        heard[0] += words in what
        if heard[0] == count:
            raise Interrupted

    return tell


@pytest.mark.parametrize(("words", "count"), [("part 2", 30), ("train", 27), ("train", 61)])
def test_an_interruption_changes_nothing(job, tmp_path, monkeypatch, words, count):
    job = dataclasses.replace(job, schedule=dataclasses.replace(job.schedule, epochs=2))
    distil(job, quiet)
    monkeypatch.setattr("adaspec.training.trainer.SAVE_SECONDS", 0.0)
    again = dataclasses.replace(job, out=tmp_path / "again")
    with pytest.raises(Interrupted):
        distil(again, interrupt_at(words, count))
    resumed = distil(again, quiet)
    assert resumed.steps > count or words != "train"
    first, second = (load_file(folder / "model.safetensors") for folder in (job.out, again.out))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (job.out / "README.md").read_text() == (again.out / "README.md").read_text()


def test_it_ends_when_it_no_longer_improves(job):
    schedule = dataclasses.replace(job.schedule, epochs=50, rate=1e-9, evaluate_every=3, patience=2)
    result = distil(dataclasses.replace(job, schedule=schedule), quiet)
    assert result.steps == 6
    assert result.after["all"] == result.before


def test_the_best_weights_are_kept(job):
    """A learning rate that destroys what the closed form began with."""
    schedule = dataclasses.replace(job.schedule, epochs=1, rate=0.5, warmup=1, evaluate_every=5)
    result = distil(dataclasses.replace(job, begin_tokens=2000, schedule=schedule), quiet)
    assert result.after["all"] == result.before


def test_given_text_is_learned_from_too(job, tmp_path):
    (tmp_path / "given.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    plain = distil(dataclasses.replace(job, schedule=dataclasses.replace(job.schedule, epochs=1)), quiet)
    more = dataclasses.replace(job, out=tmp_path / "more", texts=(tmp_path / "given.txt",))
    result = distil(dataclasses.replace(more, schedule=dataclasses.replace(job.schedule, epochs=1)), quiet)
    assert result.tokens > plain.tokens + 50
    assert "given text" in (tmp_path / "more" / "README.md").read_text()
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"bad\.txt is no UTF-8 text"):
        distil(dataclasses.replace(more, out=tmp_path / "other", texts=(tmp_path / "bad.txt",)), quiet)


def never(*arguments):
    pytest.fail("the target's output was collected first")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer_tokens": 254}, r"no room for a held-out prompt of \d+ tokens with an answer of 254: .* is 256"),
        ({"recipe": Recipe(rows=2, passes=2, length=256)}, "no room for a text of 256 tokens: .* is 256"),
        ({"texts": ("bad.txt",)}, r"bad\.txt is no UTF-8 text"),
        ({"begin": "other"}, "is no drafter of this layout"),
        ({"prompts": "few.toml"}, "the kind 'talk' has no held_out prompts"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_long_work(job, tmp_path, monkeypatch, change, message):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "other").mkdir()
    (tmp_path / "few.toml").write_text(PROMPTS.partition("held_out")[0])
    wider = FeatureNet(shape_of(LlamaConfig(**CONFIG | {"intermediate_size": 80})))
    save_feature_drafter(tmp_path / "other", wider, torch.arange(0, 300, 3), None, "tiny")
    places = {"texts": (tmp_path / "bad.txt",), "begin": tmp_path / "other", "prompts": tmp_path / "few.toml"}
    change = {name: places.get(name, value) for name, value in change.items()}
    monkeypatch.setattr(Collector, "shard", never)
    with pytest.raises(ValueError, match=message):
        distil(dataclasses.replace(job, **change), quiet)
    assert not job.work.exists()  # so that other values may be tried


def test_another_job_does_not_go_on_from_these_files(job):
    distil(dataclasses.replace(job, schedule=dataclasses.replace(job.schedule, epochs=1)), quiet)
    with pytest.raises(ValueError, match=r"holds another distillation \(job\.json tells which\)"):
        distil(job, quiet)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tokens": 0}, "tokens is at least 1, got 0"), ({"vocabulary": -3}, "vocabulary is at least 1, got -3")],
)
def test_numbers_out_of_range_are_refused(job, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(job, **change)


@pytest.mark.parametrize("change", [{"epochs": 0}, {"rate": 2.0}, {"window": 0}])
def test_schedules_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        Schedule(**change)


def test_the_command_trains_and_tells_the_curve(job, source, capsys, monkeypatch):
    monkeypatch.setattr(whole, "Trainer", small(Trainer))
    options = ["--target", str(source), "--prompts", str(job.prompts), "--tokens", "3000", "--rows", "9"]
    assert (
        main(["train-drafter", str(job.out), *options, "--vocabulary", "150", "--epochs", "1", "--threads", "1"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{job.out}: ")
    assert [line.partition(":")[0].rpartition(", ")[2] for line in lines[1:]] == ["before training", "talk", "all"]
    assert json.loads((job.out / "config.json").read_text())["draft_vocab_size"] == 150


def small(cls):
    """The trainer, ending after five steps."""

    class Short(cls):
        def run(self, tell, *, until=None):
            super().run(tell, until=5)

    return Short
