"""Feature drafters on the command line: named by their folder, or ``head`` for the one that comes with a target."""

import json

import pytest
import torch
from test_cli import SIZES, save_model
from transformers import LlamaConfig

from adaspec.assemble import DrafterSpec, Setup, span
from adaspec.cli import main
from adaspec.decoding import feature_load
from adaspec.decoding.feature_load import HEADS, is_feature_drafter, save_feature_drafter
from adaspec.decoding.feature_net import FeatureNet
from adaspec.training.start import shape_of


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), config=LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A drafter with random weights."""
    folder = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    save_feature_drafter(folder, FeatureNet(shape_of(LlamaConfig(**SIZES))), torch.arange(0, 300, 3), None, "tiny")
    return folder


def generate(target, capsys, *options):
    assert main(["generate", "the quick brown", "--target", str(target), "--threads", "1", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder_is_recognised_and_the_text_stays_the_targets(target, folder, capsys):
    plain = generate(target, capsys, "--max-new-tokens", "20", "--plan", "target", "--drafter", "lookup")
    drafted = generate(
        target, capsys, "--max-new-tokens", "20", "--drafter", f"feature={folder}", "--plan", "target/feature:3"
    )
    assert drafted["text"] == plain["text"]
    assert drafted["plans"][0]["plan"] == "target/feature:3"


def test_the_head_of_a_target_goes_by_its_name(target, folder, capsys, monkeypatch):
    monkeypatch.setattr(feature_load, "HEADS", folder.parent)  # where there are others, but none of this target
    with pytest.raises(ValueError, match="no drafter comes with the project for other"):
        feature_load.feature_folder("head", "other")
    assert feature_load.feature_folder("head", folder.name) == folder
    assert feature_load.feature_folder("elsewhere", "other").name == "elsewhere"
    assert main(["generate", "x", "--target", str(target), "--drafter", "head", "--threads", "1"]) == 2
    assert "no drafter comes with the project for" in capsys.readouterr().err


def test_it_stands_only_beneath_the_target(folder):
    drafters = tuple(DrafterSpec.parse(text) for text in (f"feature={folder}", "int8", "lookup"))
    models = {plan.models for plan in span(Setup(drafters=drafters))}
    assert ("target", "feature") in models
    assert ("target", "int8", "lookup") in models
    assert not any("feature" in names for names in models if len(names) > 2)


@pytest.mark.parametrize("path", sorted(HEADS.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_committed_heads_are_small_and_complete(path):
    folder = path.parent
    assert is_feature_drafter(folder)
    assert sum(each.stat().st_size for each in folder.iterdir()) < 30_000_000
    assert json.loads(path.read_text())["target"] == folder.name
    assert "Acceptance" in (folder / "README.md").read_text()
    stored = feature_load.read_feature_drafter(folder)
    assert stored.head is None
    assert stored.token_map.tolist() == sorted(set(stored.token_map.tolist()))
    assert all(bool(value.isfinite().all()) for value in stored.net.state_dict().values())
