"""The command line on tiny random models: what it prints, and one clear line for every kind of bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from saved_models import SIZES, other_tokenizer, save_model
from transformers import MambaConfig, MistralConfig

from adaspec.cli import main
from adaspec.decoding.generate import Generator


def test_json_is_the_only_line_on_standard_output_and_holds_what_it_must(generate, capsys) -> None:
    assert generate("--json", "--drafter", "lookup", "--drafter", "int8", "--logprobs") == 0
    [line] = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert {"text", "tokens", "seconds", "tokens_per_second", "rounds", "mean_accepted_length", "plans"} <= set(report)
    assert set(report["plans"][0]) == {"plan", "rounds", "share", "forecast", "measured"}
    assert report["tokens"] == 24 == len(report["logprobs"])
    assert sum(plan["rounds"] for plan in report["plans"]) == report["rounds"]


def test_compare_adds_plain_decoding_and_the_best_fixed_plan(generate, capsys) -> None:
    assert generate("--json", "--compare", "--drafter", "lookup") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["texts_equal"] is True
    assert report["speedup"] == pytest.approx(report["tokens_per_second"] / report["ar_tokens_per_second"])
    assert set(report["best_fixed"]) == {"plan", "tokens_per_second"}


def test_text_goes_to_standard_output_and_is_the_text_of_the_report(generate, capsys) -> None:
    assert generate("--plan", "target/lookup:4") == 0
    text = capsys.readouterr().out
    assert generate("--json") == 0
    assert text.rstrip("\n") == json.loads(capsys.readouterr().out)["text"].rstrip("\n")


def test_a_pinned_chain_of_three_is_played(generate, capsys) -> None:
    assert generate("--json", "--drafter", "lookup", "--drafter", "int8", "--plan", "target/int8/lookup:4,2") == 0
    assert [plan["plan"] for plan in json.loads(capsys.readouterr().out)["plans"]] == ["target/int8/lookup:4,2"]


def test_several_prompts_share_one_report(model: str, capsys) -> None:
    assert main(["generate", "the fox", "a dog", "--target", model, "--max-new-tokens", "4", "--json"]) == 0
    assert [each["tokens"] for each in json.loads(capsys.readouterr().out)["completions"]] == [4, 4]


def test_a_seed_and_a_pinned_plan_reproduce_a_sampled_text(generate, capsys) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        generate("--json", "--temperature", "1", "--plan", "target/lookup:2", "--seed", seed)
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


BAD = [
    (["--plan", "target/lookup:0"], "at least 1 token, got 0"),
    (["--plan", "target/nobody:3"], "names 'nobody'"),
    (["--plan", "lookup"], "target"),
    (["--drafter", "nosuchmodel"], "nosuchmodel"),
    (["--drafter", "lookup:0-2"], "0 .. 2"),
    (["--drafter", "lookup", "--drafter", "lookup"], "different names"),
    (["--windows", "2,x"], "2,x"),
    (["--windows", "0"], "at least 1 token, got 0"),
    (["--max-depth", "0"], "0"),
    (["--max-new-tokens", "0"], "got 0"),
    (["--max-new-tokens", "3000"], "the cache holds 256"),
    (["--cache-length", "8"], "the cache holds 8 (cache_length)"),
    (["--cache-length", "0"], "0"),
    (["--temperature", "-1"], "-1"),
    (["--top-p", "1.5"], "1.5"),
    (["--precision", "int3"], "int3"),
    (["--threads", "0"], "got 0"),
    (["--threads", "100000"], "got 100000"),
    (["--windows", "1000"], "a window of 1000"),
    (["--plan", "target/lookup:" + "9" * 20], "a window of " + "9" * 20),
    (["--plan", ""], "''"),
    (["--plan", "target/lookup:٣"], "target/mid/draft:8,3"),
    (["--plain", "--plan", "target/lookup:4"], "excludes the plan"),
    (["--logprobs"], "--json"),
    (["--repetition-penalty", "1e-300"], "1e-300"),
    (["--top-k", "9" * 20], "9" * 20),
    (["--device", "meta"], "'meta'"),
    (["--drafter", "lookup:4-2"], "4 .. 2"),
    (["--drafter", "lookup:"], "lookup:MIN-MAX"),
    (["--stop", ""], "stop string"),
    (["--stops", "0,x"], "0,x"),
    (["--stops", "1.5"], "1.5"),
    (["--drafter", "bridge:"], "bridge:SOURCE"),
    (["--drafter", "int8:"], "int8:SOURCE"),
    (["--drafter", "python:nothing"], "python:module.Class"),
    (["--drafter", "python:no.such.Thing"], "no.such.Thing"),
    (["--drafter", "python:json.JSONDecodeError"], "JSONDecodeError"),
    (["--drafter", "x=lookup+nobody"], "lookup+nobody"),
    (
        [
            "--drafter",
            "lookup",
            "--drafter",
            "int8",
            "--drafter",
            "lookup+int8",
            "--plan",
            "target/int8/lookup+int8:4,2",
        ],
        "'int8' would verify its own drafts",
    ),
    (["--corpus", "/no/such/file"], "/no/such/file"),
    (["--device", "nowhere"], "nowhere"),
    (["--seed", str(2**70)], str(2**70)),
]


@pytest.mark.parametrize(("options", "told"), BAD, ids=[" ".join(options) for options, _ in BAD])
def test_bad_input_is_one_line_that_names_it(generate, capsys, options: list[str], told: str) -> None:
    assert generate(*options) in (1, 2)
    captured = capsys.readouterr()
    complaint = captured.err.splitlines()[-1]
    assert complaint.startswith("adaspec: ")
    assert told in complaint
    assert captured.err.count("adaspec: ") == 1
    assert "Traceback" not in captured.err


def test_a_bad_prompt_among_several_is_refused_before_any_is_answered(model: str, capsys) -> None:
    assert main(["generate", "the fox", "a " * 400, "--target", model, "--json", "--threads", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the cache holds 256" in captured.err.splitlines()[-1]


def test_a_prompt_that_is_no_utf8_is_refused(model: str, capsys) -> None:
    assert main(["generate", "bytes \udcff", "--target", model]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_negative_seed_works(generate) -> None:
    assert generate("--json", "--seed", "-1", "--temperature", "1") == 0


def test_weights_that_are_missing_are_named_and_not_made_up(tmp_path: Path, capsys) -> None:
    folder = save_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert main(["generate", "the fox", "--target", str(folder)]) == 2
    assert "model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0garbage!", b"\xff" * 64])
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_folder_is_one_line_that_names_it(tmp_path: Path, capsys, file: str, damage: bytes) -> None:
    folder = save_model(tmp_path)
    (folder / file).write_bytes(damage)
    assert main(["generate", "the fox", "--target", str(folder)]) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("adaspec: ")
    assert str(folder) in complaint


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages[7].content }}", "{{ raise_exception('no user') }}"])
def test_a_chat_template_that_fails_is_one_line(tmp_path: Path, capsys, template: str) -> None:
    folder = save_model(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    command = ["generate", "the fox", "--target", str(folder), "--plain", "--max-new-tokens", "1", "--threads", "1"]
    assert main(command) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("adaspec: the model's chat template fails")
    assert main([*command, "--raw"]) == 0


def test_plain_decodes_a_recurrent_model_and_a_long_sliding_window(tmp_path: Path, capsys) -> None:
    for name, config in {
        "mamba": MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, eos_token_id=None, bos_token_id=None),
        "mistral": MistralConfig(**SIZES, sliding_window=16),
    }.items():
        folder = str(save_model(tmp_path / name, config=config))
        command = ["generate", "the quick brown fox jumps", "--target", folder, "--max-new-tokens", "24", "--json"]
        assert main(command) == 2
        assert name in capsys.readouterr().err.splitlines()[-1].lower() or name == "mistral"
        assert main([*command, "--plain"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["tokens"] == 24
        assert report["runners"]["target"].startswith("torch (")


def test_plain_decoding_has_the_runner_and_the_text_of_the_plan_of_the_target_alone(generate, capsys) -> None:
    reports = []
    for options in (["--plain"], ["--plan", "target"]):
        assert generate("--json", "--precision", "float32", *options) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["text"] == reports[1]["text"]
    assert reports[0]["runners"] == reports[1]["runners"] != {}


def test_remote_code_runs_only_when_asked_for(tmp_path: Path, capsys) -> None:
    folder = save_model(tmp_path)
    trace = tmp_path / "it_ran"
    (folder / "evil.py").write_text(
        "import pathlib\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"pathlib.Path({str(trace)!r}).touch()\n"
        "class EvilConfig(LlamaConfig):\n    model_type = 'evil'\n"
        "class EvilModel(LlamaForCausalLM):\n    config_class = EvilConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["generate", "the fox", "--target", str(folder)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("adaspec: ")
    assert not trace.exists()


def test_an_empty_prompt_is_refused(model: str, capsys) -> None:
    assert main(["generate", "", "--target", model]) == 2
    assert "empty" in capsys.readouterr().err


def test_a_drafter_with_another_tokenizer_is_refused_with_both_names_and_the_overlap(
    generate, model: str, tmp_path: Path, capsys
) -> None:
    other = other_tokenizer(tmp_path / "other")
    assert generate("--drafter", other) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert other in complaint
    assert f"bridge:{other}" in complaint
    assert model in complaint
    assert "%" in complaint


def test_interruption_keeps_what_was_generated(generate, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Generator.stream

    def broken(self, *arguments, **options):
        for count, step in enumerate(whole(self, *arguments, **options)):
            if count == 5:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(Generator, "stream", broken)
    assert generate("--json", "--plan", "target") == 130
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["finish_reason"] == "interrupted"
    assert report["tokens"] == 5
    assert captured.err.splitlines()[-1] == "adaspec: interrupted"


def test_an_interrupted_comparison_keeps_the_answer(generate, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("adaspec.compare.run_fixed", broken)
    assert generate("--json", "--compare", "--plan", "target") == 130
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["finish_reason"] == "length"
    assert report["text"]
    assert "speedup" not in report
    assert captured.err.splitlines()[-1] == "adaspec: interrupted"


def test_a_real_interrupt_while_passes_are_timed_or_text_is_generated_ends_in_one_line(model: str) -> None:
    program = (
        "import signal, sys; from adaspec.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with it ignored\n"
        f"sys.exit(main(['generate', 'the', '--target', {model!r}, '--threads', '1', '--max-new-tokens', '240']))"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "time the passes" in line:
                break
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint.splitlines()[-1] == "adaspec: interrupted"
    assert "Traceback" not in complaint


def test_an_interrupt_before_the_command_runs_ends_in_one_line(monkeypatch, capsys) -> None:
    def importing() -> None:
        raise ImportError("initialization failed") from KeyboardInterrupt()  # a compiled module's way of passing it on

    def parsing() -> None:
        raise KeyboardInterrupt

    for broken in (importing, parsing):
        monkeypatch.setattr("adaspec.cli._parser", broken)
        assert main(["models", "list"]) == 130
        assert capsys.readouterr().err == "adaspec: interrupted\n"


def test_models_list_names_the_default(capsys, tmp_path: Path) -> None:
    assert main(["models", "list", "--cache-dir", str(tmp_path)]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_a_full_disk_as_safetensors_tells_it_is_one_line(monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("adaspec.commands.models._list", full)
    assert main(["models", "list"]) == 1
    (complaint,) = capsys.readouterr().err.splitlines()
    assert complaint.startswith("adaspec: ")
    assert "No space left" in complaint


def test_a_tournament_without_its_extra_says_which_one(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra", None)
    for name in [name for name in sys.modules if name.startswith(("adaspec.bench.simulate", "adaspec.bench.config"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["simulate", "experiment=tournament"]) == 1
    assert capsys.readouterr().err == "adaspec: hydra is not installed; try: pip install 'adaspec[bench]'\n"
