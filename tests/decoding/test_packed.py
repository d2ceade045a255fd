import functools
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.pytorch_utils import Conv1D

from adaspec.decoding.attention import NAME, attention, register
from adaspec.decoding.packed import PRECISIONS, Int8Linear, _quantized, pack

PACKED = [name for name in PRECISIONS if name != "stock"]
TOLERANCE = {"float32": 1e-6, "fp16": 5e-4, "int8": 3e-2}  # of the largest output
SHAPES = [(576, 192), (576, 576), (1536, 576), (896, 4864), (4864, 896), (576, 49152)]
COUNTS = (1, 2, 3, 5, 7, 9, 14, 17, 32, 64, 121, 512)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SMALL, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61),
    "opt": OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=16),
    "gpt_neox": GPTNeoXConfig(**SMALL, intermediate_size=64),
}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_differ(layer, inputs, counts=COUNTS, threads=(1, 2)):
    """The (threads, rows) whose pass gives a row other bits than a pass of its own."""
    torch.set_num_threads(1)
    alone = torch.cat([layer(row[None]) for row in inputs[:17]])
    found = set()
    for number in threads:
        torch.set_num_threads(number)
        for count in counts:
            for start in (0, 5):
                rows = layer(inputs[start : start + count])[: 17 - start]
                if not torch.equal(rows, alone[start : start + count]):
                    found.add((number, count))
    return found


def inputs_of_unequal_size(width, count=520):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, width, generator=generator) * (1 + torch.arange(count)[:, None] % 7)


def linear(shape, bias=False):
    torch.manual_seed(sum(shape))
    return nn.Linear(*shape, bias=bias)


@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_every_pass(shape, precision):
    counts = COUNTS if shape[1] < 10_000 else (2, 3, 5, 7, 9, 17)
    assert not rows_differ(pack(linear(shape), precision), inputs_of_unequal_size(shape[0]), counts)


def test_the_check_of_rows_can_fail():
    inputs = inputs_of_unequal_size(576)
    weight = linear((576, 192)).weight.detach()
    packed = torch.ops.quantized.linear_prepack(_quantized(weight), None)
    assert rows_differ(lambda rows: torch.ops.quantized.linear_dynamic(rows, packed, True), inputs)  # one scale for all
    assert rows_differ(lambda rows: F.linear(rows, weight), inputs)  # another kernel for one row


@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("bias", [False, True])
def test_it_agrees_with_the_stock_layer(precision, bias):
    layer = linear((576, 192), bias)
    inputs = inputs_of_unequal_size(576, 12).reshape(3, 2, 2, 576)
    wanted = layer(inputs).detach()
    found = pack(layer, precision)(inputs)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < TOLERANCE[precision] * wanted.abs().max()


@pytest.mark.parametrize("precision", PACKED)
def test_inputs_of_any_layout(precision):
    layer = pack(linear((24, 16), bias=True), precision)
    inputs = torch.randn(3, 5, 24)
    assert torch.equal(layer(inputs.transpose(0, 1)), layer(inputs).transpose(0, 1))
    assert layer(inputs[:, :0]).shape == (3, 0, 16)
    assert torch.equal(layer(torch.zeros(1, 24))[0], layer(torch.zeros(4, 24))[3])
    assert layer(torch.zeros(1, 24)).isfinite().all()


def test_int8_sums_do_not_saturate():
    layer = Int8Linear(torch.ones(8, 4096), None)
    assert torch.allclose(layer(torch.ones(1, 4096)), torch.tensor(4096.0), rtol=1e-5)


@pytest.mark.parametrize("precision", PACKED)
def test_a_transposed_linear(precision):
    layer = Conv1D(8, 24)
    nn.init.normal_(layer.bias)
    inputs = torch.randn(2, 24)
    wanted = layer(inputs).detach()
    assert torch.allclose(pack(layer, precision)(inputs), wanted, atol=float(TOLERANCE[precision] * wanted.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_model(name, precision):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    tokens = torch.arange(14).reshape(2, 7)
    wanted = model(tokens).logits
    assert pack(model, precision) is model
    left = [kind for kind in model.modules() if isinstance(kind, nn.Linear | Conv1D)]
    assert not left
    scale = float(wanted.abs().max())
    assert (model(tokens).logits - wanted).abs().max() < 10 * TOLERANCE[precision] * scale
    assert model.get_input_embeddings().weight.shape[0] == 61


@torch.no_grad()
@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("name", CONFIGS)
def test_with_exact_attention_a_position_has_the_same_logits_alone_and_in_a_sequence(name, precision):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=register()).eval()
    pack(model, precision)
    tokens = torch.arange(40)[None] % 61
    cached = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    whole = model(tokens).logits
    for count in (1, 2, 5):
        first = model(tokens[:, :20], use_cache=True)
        logits, cache = [first.logits], first[cached]
        for start in range(20, 40, count):
            output = model(tokens[:, start : start + count], **{cached: cache})
            logits.append(output.logits)
        assert torch.equal(torch.cat(logits, 1), whole), count


@pytest.mark.parametrize("precision", PACKED)
def test_the_float_weights_are_released(precision):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    weights = [weakref.ref(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)]
    pack(model, precision)
    gc.collect()
    assert weights
    assert not [weight for weight in weights if weight() is not None]
    names = [name for name, _ in model.named_parameters()]
    assert names
    assert not [name for name in names if "proj" in name or "lm_head" in name]


def test_a_layer_used_twice_is_packed_once():
    layer = nn.Linear(8, 8)
    model = pack(nn.ModuleDict({"one": layer, "two": nn.Sequential(layer, layer)}), "fp16")
    assert model["one"] is model["two"][0] is model["two"][1]


def test_half_precision_models_become_float32_around_the_packed_layers():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()
    assert pack(model, "int8")(torch.randn(2, 8)).dtype == torch.float32


def test_stock_is_left_alone_and_the_unknown_refused():
    layer = nn.Linear(4, 4)
    assert pack(layer, "stock") is layer
    with pytest.raises(ValueError, match="'int3'"):
        pack(layer, "int3")
    with pytest.raises(ValueError, match="meta"):
        pack(nn.Linear(4, 4, device="meta"), "int8")


@functools.cache
def cache_and_row(heads, kv_heads, width):
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(2, 2, kv_heads, 900, width, generator=generator)
    return cache, torch.randn(heads, width, generator=generator)


def cached_case(heads, kv_heads, width, seen, count, place, batch, spare):
    """One fixed row of attention amid others: ``seen`` slots, ``place``-th of ``count`` queries, ``spare`` slots."""
    cache, row = cache_and_row(heads, kv_heads, width)
    slots = seen + count - 1 - place + spare
    query = torch.randn(batch, heads, count, width)
    query[0, :, place] = row
    mask = torch.arange(slots) < (seen - place + torch.arange(count))[:, None]
    key, value = cache[:, :batch, :, :slots]
    return query, key, value, mask.expand(batch, 1, count, slots)


def attention_by_sdpa(query, key, value, mask, scale):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return mixed.transpose(1, 2).flatten(2)


def attention_rows_differ(function, heads, kv_heads, width):
    found = []
    for seen in (20, 64, 192, 193, 333, 384, 700):
        wanted = None
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 5, 9, 17, 80):
                for place in {0, count - 1} if count < seen else {0}:
                    for batch, spare in ((1, 0), (2, 3), (1, 60)):
                        case = cached_case(heads, kv_heads, width, seen, count, place, batch, spare)
                        row = function(*case, width**-0.5)[0, place]
                        wanted = row if wanted is None else wanted
                        if not torch.equal(row, wanted):
                            found.append((seen, threads, count, place, batch, spare))
    return found


@pytest.mark.parametrize("shape", [(9, 3, 64), (12, 2, 128), (4, 4, 32), (4, 1, 64)], ids=str)
def test_a_row_of_attention_has_the_same_bits_in_every_pass(shape):
    assert not attention_rows_differ(attention, *shape)


def test_the_check_of_attention_can_fail():
    assert attention_rows_differ(attention_by_sdpa, 9, 3, 64)


@pytest.mark.parametrize("seen", [1, 5, 15, 40, 300])
def test_attention_agrees_with_sdpa(seen):
    case = cached_case(9, 3, 64, seen, 3, 0, 2, 4)
    assert torch.allclose(attention(*case, 0.2), attention_by_sdpa(*case, 0.2), atol=2e-6)
    *rest, mask = case
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert torch.equal(attention(*rest, added, 0.2), attention(*case, 0.2))


def test_what_attention_cannot_do_is_refused():
    function = AttentionInterface()[register()]
    module, query = nn.Module().eval(), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="position_bias"):
        function(module, query, query, query, None, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match=f"{NAME}.*dropout 0.5"):
        function(module.train(), query, query, query, None, dropout=0.5)
    causal, _ = function(module.eval(), query, query, query, None)
    wanted = F.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2)
    assert torch.allclose(causal, wanted, atol=1e-6)
