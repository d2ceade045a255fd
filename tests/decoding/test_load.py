"""Which code computes a model's passes: C where it can, torch where it must, and the reason is told."""

import pytest
import torch
from tiny_models import greedy_loop, tiny

from adaspec.decoding import load
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.load import check_runner, load_model, load_plain
from adaspec.decoding.model import Model, PlainModel
from adaspec.decoding.native.library import CompileError
from adaspec.decoding.native.model import NativeModel


@pytest.fixture
def folder(tmp_path, request):
    tiny(getattr(request, "param", "llama")).save_pretrained(tmp_path)
    return tmp_path


def next_token(model, prompt):
    model.start(1, len(prompt) + 1)
    buffer = TokenBuffer(1, len(prompt))
    buffer.append(torch.tensor([prompt]), torch.tensor([len(prompt)]))
    return int(model.logits(buffer, buffer.lengths - 1, 1, torch.ones(1, dtype=torch.bool)).argmax())


@pytest.mark.parametrize("runner", ["auto", "native", "torch"])
def test_every_runner_computes_the_same_model(folder, runner):
    model = load_model("target", folder, precision="float32", runner=runner)
    assert model.runner == ("torch" if runner == "torch" else "native")
    assert isinstance(model, NativeModel) == (runner != "torch")
    prompt = (3, 9, 27, 4)
    assert next_token(model, prompt) == greedy_loop(tiny("llama"), prompt, 1)[0]


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_what_the_native_runner_cannot_compute_falls_back_with_the_reason(folder):
    model = load_model("target", folder)
    assert model.runner.startswith("torch (GPT2LMHeadModel is none of")
    next_token(model, (3, 4))
    with pytest.raises(ValueError, match=r"target: .*: GPT2LMHeadModel is none of"):
        load_model("target", folder, runner="native")


def test_without_a_compiler_torch_takes_over(folder, monkeypatch):
    def fails():
        raise CompileError("no C compiler (cc) on this machine")

    monkeypatch.setattr(load, "library", fails)
    model = load_model("target", folder)
    assert model.runner == "torch (no C compiler (cc) on this machine)"
    next_token(model, (3, 4))
    with pytest.raises(ValueError, match="no C compiler"):
        load_model("target", folder, runner="native")


@pytest.mark.parametrize(
    "wrong",
    [
        ("fast", "fp16", "cpu"),
        ("native", "stock", "cpu"),
        ("native", "fp16", "cuda"),
        ("graphs", "fp16", "cpu"),
        ("torch", "int4", "cpu"),
    ],
)
def test_a_runner_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="runner"):
        check_runner(*wrong)


def test_int4_is_computed_in_c_or_not_at_all(folder, monkeypatch):
    assert isinstance(load_model("target", folder, precision="int4"), NativeModel)

    def fails():
        raise CompileError("no C compiler (cc) on this machine")

    monkeypatch.setattr(load, "library", fails)
    with pytest.raises(ValueError, match="target: the native runner cannot compute it: no C compiler"):
        load_model("target", folder, precision="int4")


@pytest.mark.parametrize("runner", ["auto", "native", "torch"])
def test_plain_decoding_is_computed_by_the_runner_of_speculation(folder, runner):
    model = load_plain("target", folder, capacity=32, precision="float32", runner=runner)
    assert type(model) is (Model if runner == "torch" else NativeModel)
    prompt = (3, 9, 27, 4)
    assert next_token(model, prompt) == greedy_loop(tiny("llama"), prompt, 1)[0]


@pytest.fixture
def sliding(tmp_path):
    tiny("mistral", sliding_window=16).save_pretrained(tmp_path)
    return tmp_path


def test_a_sliding_window_is_decoded_plainly_by_torch_where_the_sequence_may_outgrow_it(sliding):
    assert isinstance(load_plain("target", sliding, capacity=16, precision="float32"), NativeModel)
    model = load_plain("target", sliding, capacity=17, precision="float32")
    assert isinstance(model, PlainModel)
    assert model.runner.startswith("torch (its sliding window")
    prompt = tuple(range(3, 30))
    assert next_token(model, prompt) == greedy_loop(tiny("mistral", sliding_window=16), prompt, 1)[0]


@pytest.mark.parametrize("asked", [{"runner": "native"}, {"precision": "int4"}])
def test_the_native_runner_is_refused_where_plain_decoding_needs_torch(sliding, asked):
    with pytest.raises(ValueError, match="target: the native runner cannot compute it: its sliding window"):
        load_plain("target", sliding, capacity=17, **asked)
