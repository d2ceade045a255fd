"""Drafters on the command line: hybrids, early stopping, bridges, one's own, and the corpus index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved_models import other_tokenizer

from adaspec.assemble import Setup, parse_drafters, span
from adaspec.cli import main


def test_a_bridge_lets_a_drafter_with_another_tokenizer_draft_and_tells_the_overlap(
    generate, tmp_path: Path, capsys
) -> None:
    other = other_tokenizer(tmp_path / "other")
    assert generate("--json", "--plan", "target") == 0
    plain = json.loads(capsys.readouterr().out)["text"]
    assert generate("--json", "--drafter", f"far=bridge:{other}", "--plan", "target/far:4") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["text"] == plain
    assert "bridge to far: 268 of" in captured.err


def test_a_hybrid_and_stops_are_played_and_give_the_same_text(generate, capsys) -> None:
    assert generate("--json", "--plan", "target") == 0
    plain = json.loads(capsys.readouterr().out)["text"]
    drafters = ("--drafter", "lookup", "--drafter", "int8", "--drafter", "lookup+int8", "--drafter", "h=int8+lookup")
    for options in (("--plan", "target/lookup+int8:4?0.3"), ("--plan", "target/h:3"), ("--stops", "0,0.3")):
        assert generate("--json", *drafters, *options) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["text"] == plain
        if options[0] == "--plan":
            assert [plan["plan"] for plan in report["plans"]] == [options[1]]


def test_a_drafter_may_have_a_precision_of_its_own(generate, model: str, capsys) -> None:
    (small,) = parse_drafters([f"small=int8:{model}"])
    assert (small.kind, small.precision, small.model_source) == ("model", "int8", model)
    assert generate("--json", "--plan", "target") == 0
    plain = json.loads(capsys.readouterr().out)["text"]
    assert generate("--json", "--drafter", f"small=int8:{model}", "--plan", "target/small:3") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["text"] == plain
    assert f"load {Path(model).name} (int8)" in captured.err


def test_a_space_holds_no_chain_with_a_model_above_a_hybrid_of_itself() -> None:
    setup = Setup(drafters=parse_drafters(["lookup", "int8", "lookup+int8"]), stops=(0.0, 0.4))
    chains = {(plan.models, plan.stop) for plan in span(setup)}
    assert (("target", "lookup+int8"), 0.4) in chains
    assert (("target", "int8", "lookup"), 0.4) in chains
    assert not any(models[1:] == ("int8", "lookup+int8") for models, _ in chains)


def test_a_drafter_of_ones_own_is_loaded_by_dotted_name(generate, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert generate("--json", "--plan", "target") == 0
    plain = json.loads(capsys.readouterr().out)["text"]
    for options in (("--plan", "target/EchoDrafter:4"), ("--drafter", "lookup")):
        assert generate("--json", "--drafter", "python:examples.echo.EchoDrafter", *options) == 0
        assert json.loads(capsys.readouterr().out)["text"] == plain


def test_the_example_of_the_contributing_page_is_as_short_as_it_says() -> None:
    lines = (Path(__file__).parents[1] / "examples" / "echo.py").read_text().splitlines()
    assert len([line for line in lines[lines.index("class EchoDrafter(Drafter):") :] if line]) <= 30


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return path


def test_a_corpus_is_indexed_and_backs_the_lookup_as_its_text_does(generate, model: str, corpus: Path, capsys) -> None:
    index = corpus.with_name("corpus.index")
    assert main(["index-corpus", str(corpus), "-o", str(index), "--target", model]) == 0
    assert "n-grams of" in capsys.readouterr().out
    reports = []
    for path in (corpus, index):
        assert generate("--json", "--corpus", str(path), "--plan", "target/lookup:4") == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["text"] == reports[1]["text"]
    assert reports[0]["mean_accepted_length"] == reports[1]["mean_accepted_length"]
    index.write_bytes(index.read_bytes()[:-3])
    assert generate("--corpus", str(index)) == 2
    assert "is damaged" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "told"), [(["--min-count", "0"], "--min-count"), (["--max-ngram", "0"], "--max-ngram")]
)
def test_an_index_with_impossible_options_is_refused(model: str, corpus: Path, capsys, options, told) -> None:
    command = ["index-corpus", str(corpus), "-o", str(corpus) + ".index", "--target", model]
    assert main([*command, *options]) == 2
    assert told in capsys.readouterr().err
    assert main(["index-corpus", "/no/such/file", *command[2:]]) == 2
    assert "/no/such/file" in capsys.readouterr().err


def test_an_index_does_not_overwrite_its_corpus(model: str, corpus: Path, tmp_path: Path, capsys) -> None:
    before = corpus.read_bytes()
    assert main(["index-corpus", str(corpus), "-o", str(corpus), "--target", model]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert corpus.read_bytes() == before
    assert main(["index-corpus", str(corpus), "-o", str(tmp_path / "none" / "index"), "--target", model]) == 2
    assert "none/index" in capsys.readouterr().err
