"""The C forward computes what the module computes, and a row's bits do not depend on what is computed beside it."""

import copy
import platform
import subprocess

import pytest
import torch
from tiny_models import greedy_loop, noisy, tiny

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.model import Model
from adaspec.decoding.native import library
from adaspec.decoding.native.decoder import NativeDecoder, obstacle
from adaspec.decoding.native.library import CompileError
from adaspec.decoding.native.model import NativeModel
from adaspec.decoding.native.weights import _blocks
from adaspec.decoding.sampling import GREEDY
from adaspec.plan import Plan

KINDS = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {"float32": 1e-5, "fp16": 2e-3, "int8": 0.1, "int4": 0.3}  # of the largest logit


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decoder(kind, precision="float32", **fields):
    module = tiny(kind, **fields)
    return module, NativeDecoder(copy.deepcopy(module), precision)


def passes(native, tokens, sizes):
    """Logits [n, V] of one sequence fed in passes of the given sizes, repeated."""
    native.start(1, len(tokens))
    first, found, turn = 0, [], 0
    while first < len(tokens):
        size = min(sizes[turn % len(sizes)], len(tokens) - first)
        at = torch.arange(first, first + size)
        found.append(native.forward(tokens[at], torch.zeros(size, dtype=torch.long), at, torch.arange(size))[0])
        first, turn = first + size, turn + 1
    return torch.cat(found)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_module(kind, precision):
    module, native = decoder(kind, precision)
    tokens = torch.arange(3, 40)
    expected = module(tokens[None]).logits[0]
    error = (passes(native, tokens, [37]) - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[precision]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
        ("llama", {"vocab_size": 45, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_variants_of_the_architecture(kind, fields):
    module, native = decoder(kind, **fields)
    for layer in module.model.layers if fields.get("attention_bias") else ():
        layer.self_attn.q_proj.bias.normal_()
        layer.self_attn.o_proj.bias.normal_()
    native = NativeDecoder(copy.deepcopy(module), "float32")
    tokens = torch.arange(3, 40)
    expected = module(tokens[None]).logits[0]
    assert (passes(native, tokens, [37]) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_gates_far_below_zero_are_closed():
    """silu(-100) is 0, where e^100 is beyond float32."""
    module = tiny("llama")
    for layer in module.model.layers:
        layer.mlp.gate_proj.weight.mul_(800)
    tokens, lowest = torch.arange(3, 40), []
    hooks = [
        layer.mlp.gate_proj.register_forward_hook(lambda *given: lowest.append(float(given[-1].min())))
        for layer in module.model.layers
    ]
    expected = module(tokens[None]).logits[0]
    assert min(lowest) < -200
    for hook in hooks:
        hook.remove()
    error = (passes(NativeDecoder(module, "float32"), tokens, [37]) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_row_is_the_same_bits_in_every_pass_and_on_every_number_of_threads(kind, precision):
    _, native = decoder(kind, precision, seed=3)
    tokens = torch.randint(3, 48, (70,), generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(1)
    alone = passes(native, tokens, [1])
    for threads, shapes in (
        (1, [[2], [3], [4], [5], [6], [7], [9, 1], [13, 2], [70]]),
        (2, [[9, 1], [70]]),
        (3, [[70]]),
    ):
        torch.set_num_threads(threads)
        for sizes in shapes:
            assert torch.equal(passes(native, tokens, sizes), alone), (threads, sizes)


def test_a_row_is_the_same_bits_whatever_batch_it_is_in():
    _, native = decoder("llama", "fp16")
    tokens = torch.randint(3, 48, (3, 12), generator=torch.Generator().manual_seed(2))
    alone = [passes(native, row, [12]) for row in tokens]
    native.start(3, 20)
    order = torch.randperm(36, generator=torch.Generator().manual_seed(3)).sort().values.view(12, 3).flatten()
    sequence, position = order % 3, order // 3  # the rows of the sequences interleaved
    logits, _ = native.forward(tokens[sequence, position], sequence, position, torch.arange(36))
    for row in range(3):
        assert torch.equal(logits[sequence == row], alone[row])


def quantised(weight):
    """Weights [outputs, inputs] -> (codes, steps, minima) of groups of 32, read back from what C packs."""
    blocks = _blocks(weight)
    columns, groups, _ = blocks.shape
    packed = blocks[..., :128].view(columns, groups, 4, 8, 4)  # [.., pair of steps, output, input]
    codes = torch.stack((packed & 15, packed >> 4), 3).permute(0, 4, 1, 2, 3, 5).reshape(8 * columns, groups, 32)
    halves = blocks[..., 128:].contiguous().view(torch.float16).view(columns, groups, 2, 8).float()
    steps, minima = halves.permute(2, 0, 3, 1).reshape(2, 8 * columns, groups, 1)
    return codes, steps, minima


def test_int4_weights_on_a_grid_of_four_bits_are_met_exactly():
    """Even where a group does not use all of its codes."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (24, 3, 32), generator=random)
    codes[:8] = codes[:8].clamp(2, 11)
    weight = codes * 2.0**-6 - 0.125
    found, steps, minima = quantised(weight.view(24, 96))
    assert torch.equal(found * steps + minima, weight)


def test_int4_is_closer_than_rounding_from_the_least_to_the_largest_weight():
    weight = torch.randn(20, 70, generator=torch.Generator().manual_seed(1))
    codes, steps, minima = quantised(weight)
    padded = torch.nn.functional.pad(weight, (0, 26, 0, 4)).view(24, 3, 32)
    low, high = padded.amin(-1, keepdim=True), padded.amax(-1, keepdim=True)
    plain = ((padded - low) / ((high - low) / 15).clamp_min(1e-9)).round() * (high - low) / 15 + low
    errors = [((each - padded)[:20, :2] ** 2).sum() for each in (codes * steps + minima, plain)]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.slow  # it compiles
@pytest.mark.parametrize("flags", [(), ("-mno-avx512vnni",), ("-mno-avx2", "-mno-f16c", "-mno-fma", "-mno-avx512f")])
def test_int4_computes_what_its_codes_say(monkeypatch, tmp_path, flags):
    """Products of the rounded rows with the rounded weights; with VNNI, without, and in plain C."""
    monkeypatch.setattr(library, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(
        library, "FLAGS", (*library.FLAGS, "-O1", *flags) if platform.machine() == "x86_64" else library.FLAGS
    )
    library.library.cache_clear()
    try:
        module, native = decoder("llama", "int4", num_hidden_layers=1)
        found = passes(native, torch.arange(3, 20), [17])
    finally:
        library.library.cache_clear()
    for layer in module.modules():
        if layer is module.lm_head:  # stays in int8
            step = layer.weight.abs().amax(1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / step).round() * step)
        elif isinstance(layer, torch.nn.Linear):
            codes, steps, minima = quantised(layer.weight)
            restored = (codes * steps + minima).flatten(1)[: layer.out_features, : layer.in_features]
            layer.weight.copy_(restored)
            layer.register_forward_pre_hook(lambda layer, args: (rounded(args[0]),))
    expected = module(torch.arange(3, 20)[None]).logits[0]
    assert (found - expected).abs().max() < 2e-2 * expected.abs().max()


def rounded(x):
    """Rows in groups of 32, each to 127 steps of its largest magnitude."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    step = padded.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((padded / step).round() * step).flatten(-2)[..., : x.shape[-1]]


def test_rejected_slots_are_overwritten():
    _, native = decoder("llama")
    tokens = torch.arange(3, 23)
    expected = passes(native, tokens, [20])
    native.start(1, 20)
    zero = torch.zeros(20, dtype=torch.long)
    native.forward(tokens[:10], zero[:10], torch.arange(10), torch.arange(0))
    native.forward(tokens[:5].flip(0), zero[:5], torch.arange(10, 15), torch.arange(0))  # drafted, rejected
    logits, _ = native.forward(tokens[10:], zero[:10], torch.arange(10, 20), torch.arange(10))
    assert torch.equal(logits, expected[10:])


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_more_logits_than_rows_write_nowhere_else(count):
    """A draft that ends at a stop token is asked about as if it filled its window."""
    _, native = decoder("llama")
    native.start(1, 4)
    memory = torch.full((60, 32), 7.0)
    one = torch.zeros(1, dtype=torch.long)
    alone, _ = native.run(memory[:1].clone(), one, one, one, ())
    found, _ = native.run(memory[:1], one, one, torch.zeros(count, dtype=torch.long), ())
    assert bool((memory[1:] == 7.0).all())
    assert torch.equal(found, alone.expand(count, -1))


def test_states_of_the_layers_are_those_of_the_module():
    module, native = decoder("qwen2")
    tokens = torch.arange(3, 17)
    states = module(tokens[None], output_hidden_states=True).hidden_states
    native.start(1, 14)
    zero = torch.zeros(14, dtype=torch.long)
    _, found = native.forward(tokens, zero, torch.arange(14), torch.arange(1), taps=(0, 1, 2))
    for layer, expected in enumerate(states):
        assert torch.allclose(found[layer], expected[0], atol=1e-5), layer


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("plan", ["target/a:4", "target/lookup:3", "target/a/lookup:5,2"])
def test_greedy_decoding_is_plain_decoding(plan, precision):
    """Ragged batches, rows that end early; for float32 also the tokens of the module itself."""
    module = tiny("llama")
    prompts = ((3, 4, 5, 3, 4), (7, 8, 9, 10, 11, 12, 13, 7), (20,))
    members = {"a": NativeModel("a", noisy(module, 0.1, 1), precision), "lookup": LookupDrafter("lookup", min_ngram=1)}
    chain = Chain(NativeModel("target", copy.deepcopy(module), precision), members)
    texts = []
    for each in (Plan(("target",)), Plan.parse(plan)):
        chain.start(Sequences(prompts, (GREEDY,) * 3, (12, 5, 14), ((),) * 3))
        texts.append([[], [], []])
        while chain.running:
            for text, tokens in zip(texts[-1], chain.round(each).tokens):
                text += tokens
    assert texts[0] == texts[1]
    if precision == "float32":
        assert texts[0] == [greedy_loop(module, prompt, count) for prompt, count in zip(prompts, (12, 5, 14))]


def test_a_longer_request_makes_room_again():
    native = NativeModel("target", tiny("llama"), "fp16")
    for batch, capacity in ((1, 8), (1, 100), (2, 16), (1, 8)):
        native.start(batch, capacity)
        buffer = TokenBuffer(batch, capacity)
        buffer.append(torch.full((batch, capacity), 5), torch.full((batch,), capacity))
        logits = native.logits(buffer, buffer.lengths - 1, 1, torch.ones(batch, dtype=torch.bool))
        assert logits.shape == (batch, 1, 48)
        assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "precision", "fields", "reason"),
    [
        ("gpt2", "fp16", {}, "GPT2LMHeadModel is none of"),
        ("llama", "stock", {}, "not stock"),
        ("llama", "fp16", {"hidden_act": "gelu"}, "gelu"),
        ("llama", "fp16", {"mlp_bias": True}, "biases"),
        ("llama", "fp16", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("llama", "fp16", {"intermediate_size": 44}, "its MLPs are 44 wide, which is no multiple of 8"),
        ("llama", "fp16", {"head_dim": 12}, "its heads are 12 wide, which is no multiple of 8"),
        ("llama", "fp16", {"hidden_size": 36, "head_dim": 8}, "its states are 36 wide, which is no multiple of 8"),
    ],
)
def test_what_it_cannot_compute_is_named(kind, precision, fields, reason):
    module = tiny(kind, **fields)
    assert reason in obstacle(module, precision)
    with pytest.raises(ValueError, match=reason):
        NativeModel("target", module, precision)


def test_without_a_working_compiler_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_cache_folder", lambda: tmp_path / "native")
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-no-such-flag"))
    with pytest.raises(CompileError, match=r"cannot compile forward\.c: .*no-such-flag"):
        library.build()
    assert not list((tmp_path / "native").iterdir())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompileError, match="no C compiler"):
        library.build()


def test_a_compiler_may_come_with_arguments(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(library, "FLAGS", ("-O0", *library.FLAGS[2:]))
    built = set()
    for command in ("gcc", "gcc -DA", "env 'gcc' -DB='b c'"):
        monkeypatch.setenv("CC", command)
        built.add(library.build())
    assert len(built) == 3 == len(set(tmp_path.glob("*.so")) & built)  # the arguments are part of what is kept
    monkeypatch.setenv("CC", " ")
    assert library.build() == library.build()  # as if it was not set


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("no-such-compiler -m64", r"no C compiler \(no-such-compiler\)"),
        ("gcc -no-such-flag", "gcc -no-such-flag cannot compile forward.c: .*error: .*-no-such-flag"),
        ("env no-such-compiler", "env no-such-compiler cannot compile forward.c: .*no-such-compiler"),
        ("gcc 'half", r"CC is no command \(gcc 'half\): No closing quotation"),
        ("true", "true cannot compile forward.c: no reason given"),
    ],
)
def test_a_compiler_that_cannot_be_used_is_told_in_one_line(monkeypatch, tmp_path, command, told):
    monkeypatch.setattr(library, "_cache_folder", lambda: tmp_path)
    monkeypatch.setenv("CC", command)
    library.library.cache_clear()
    try:
        with pytest.raises(CompileError, match=told) as error:
            library.library()
    finally:
        library.library.cache_clear()
    assert "\n" not in str(error.value)


def test_what_cannot_be_loaded_is_told_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "half.so").write_bytes(b"\x7fELF")
    monkeypatch.setattr(library, "build", lambda: tmp_path / "half.so")
    library.library.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"cannot be loaded: .*half\.so"):
            library.library()
    finally:
        library.library.cache_clear()


def test_it_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(library, "FLAGS", ("-O0", *library.FLAGS[2:]))
    built = library.build()
    monkeypatch.setattr(subprocess, "run", None)
    assert library.build() == built
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_tapped_states_are_those_that_the_torch_layers_show():
    module, layers = tiny("llama"), (0, 1, 2)
    prompts = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(4))
    shown = []
    for model in (Model("t", copy.deepcopy(module)), NativeModel("t", copy.deepcopy(module), "float32")):
        model.start(2, 12)
        model.tap(layers)
        buffer = TokenBuffer(2, 12)
        buffer.append(prompts, torch.tensor([9, 6]))
        model.logits(buffer, buffer.lengths - 1, 1, torch.ones(2, dtype=torch.bool))
        shown.append(model.features(layers, torch.tensor([0, 0]), 6))
    assert torch.allclose(*shown, atol=1e-5)
    with pytest.raises(ValueError, match=r"layers 0 \.\. 2"):
        model.tap((3,))
