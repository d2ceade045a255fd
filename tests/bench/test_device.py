"""The device script on a CPU: every section's host side, the drafter's construction, and failures that are told."""

import json
import subprocess
import sys

import pytest
import torch

from adaspec.bench import device
from adaspec.bench.device_models import TINY, build
from adaspec.decoding.weight_only import Int8Weights, quantize

SECTIONS = {"attention", "passes", "rounds", "equality", "adaptation", "prepared", "batches"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("device") / "result.json"
    assert device.main(["--device", "cpu", "--tiny", "--output", str(path)]) == 0
    return json.loads(path.read_text())


def test_every_section_runs(result):
    assert result["failed"] == {}
    assert result["skipped"] == []
    assert result.keys() >= {"law", *(f"{TINY[0].name} {section}" for section in SECTIONS)}


def test_greedy_texts_are_equal_and_the_sampled_law_holds(result):
    assert result[f"{TINY[0].name} equality"]["all_equal"]
    assert result["law"]["holds"]
    assert result["law"]["eager_passes"] == {}


def test_every_pass_of_the_script_was_prepared(result):
    prepared = result[f"{TINY[0].name} prepared"]
    for name in ("target", "middle", "draft"):
        assert prepared[name]["graphs"] >= 2
        assert prepared[name]["failed"] == prepared[name]["eager_passes"] == {}


def test_a_rounds_parts_add_up(result):
    for kind in ("eager", "graph"):
        parts = result[f"{TINY[0].name} rounds"][f"target/draft:4 {kind}"]["round_ms"]
        assert all(parts[name] > 0.0 for name in ("draft", "verify", "sampling", "bookkeeping", "host"))


def test_a_section_that_fails_is_told_and_the_rest_runs():
    def broken(bench):
        raise RuntimeError("no such kernel\nand more")

    told = {"failed": {}, "skipped": []}
    run = device.Sections(device.Bench.on("cpu", device.SMALL), 100.0, told)
    assert run("one", "law", broken) is None
    assert run("two", "law", lambda bench: {"fine": True}) == {"fine": True}
    assert told["failed"]["one"].startswith("RuntimeError: no such kernel (test_device.py:")
    assert told["two"]["fine"]


def test_what_there_is_no_time_for_is_told():
    told = {"failed": {}, "skipped": []}
    assert device.Sections(device.Bench.on("cpu", device.SMALL), -1.0, told)("one", "law", lambda bench: {}) is None
    assert told["skipped"] == ["one"]


@pytest.mark.parametrize("overlap", [0.6, 0.85])
def test_the_drafter_overlaps_as_wanted_and_shares_the_targets_weights(overlap):
    family = build(TINY[0], torch.device("cpu"), torch.float32, overlap=overlap)
    assert abs(family.overlap - overlap) < 0.03
    assert family.draft.lm_head.weight is family.target.lm_head.weight
    text = torch.arange(10)[None]
    assert not torch.allclose(family.draft(text).logits, family.target(text).logits, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixed", [True, False])
def test_eight_bit_weights_compute_nearly_the_same(dtype, mixed):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32).to(dtype)
    x = torch.randn(2, 3, 64, dtype=dtype)
    error = (Int8Weights(layer, mixed=mixed)(x) - layer(x)).abs().max()
    assert 0.0 < error < 0.02 * layer(x).abs().max()


def test_every_linear_layer_gets_eight_bit_weights():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ModuleList([torch.nn.Linear(64, 64)]))
    quantize(module)
    assert not any(type(each) is torch.nn.Linear for each in module.modules())


def test_the_script_imports_nothing_but_torch_transformers_numpy_and_scipy():
    code = (
        "import sys, adaspec.bench.device as d;"
        "print([n for n in ('hydra', 'gguf', 'rich', 'platformdirs', 'matplotlib', 'fastapi') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
