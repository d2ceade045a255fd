"""Published layouts: random checkpoints are written in them and drafted with; a plain forward says what must come."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import VOCAB, tiny
from torch.nn import functional as F

from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.feature_load import (
    is_feature_drafter,
    load_feature_drafter,
    read_feature_drafter,
    save_feature_drafter,
)
from adaspec.decoding.model import Model
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan

SIZE, INNER, HEADS, KV_HEADS, WIDTH = 32, 48, 4, 2, 8
REDUCED = (1, 4, 5, 9, 17, 23, 30, 41, 47)
PROMPT = (5, 6, 7, 11, 3)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
}


_seeds = [0]  # every tensor has its own numbers


def numbers(*shape):
    _seeds[0] += 1
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(_seeds[0]))


def same_numbers_again():
    """From here on the numbers are those of a first call, whatever test ran before."""
    _seeds[0] = 0


def layer(prefix, inputs, *, bias=False):
    """One decoder layer under its published names."""
    tensors = {
        f"{prefix}self_attn.q_proj.weight": numbers(HEADS * WIDTH, inputs),
        f"{prefix}self_attn.k_proj.weight": numbers(KV_HEADS * WIDTH, inputs),
        f"{prefix}self_attn.v_proj.weight": numbers(KV_HEADS * WIDTH, inputs),
        f"{prefix}self_attn.o_proj.weight": numbers(SIZE, HEADS * WIDTH),
        f"{prefix}mlp.gate_proj.weight": numbers(INNER, SIZE),
        f"{prefix}mlp.up_proj.weight": numbers(INNER, SIZE),
        f"{prefix}mlp.down_proj.weight": numbers(SIZE, INNER),
        f"{prefix}post_attention_layernorm.weight": 1 + numbers(SIZE),
    }
    if bias:
        for part, rows in (("q", HEADS * WIDTH), ("k", KV_HEADS * WIDTH), ("v", KV_HEADS * WIDTH)):
            tensors[f"{prefix}self_attn.{part}_proj.bias"] = numbers(rows)
    return tensors


def eagle_1(*, bias=False, qkv_bias=False):
    tensors = layer("layers.0.", SIZE, bias=qkv_bias) | {
        "fc.weight": numbers(SIZE, 2 * SIZE),
        "embed_tokens.weight": numbers(VOCAB, SIZE),
    }
    return tensors | ({"fc.bias": numbers(SIZE)} if bias else {})


def eagle_3():
    offsets = torch.tensor([token - index for index, token in enumerate(REDUCED)])
    return layer("midlayer.", 2 * SIZE) | {
        "midlayer.input_layernorm.weight": 1 + numbers(SIZE),
        "midlayer.hidden_norm.weight": 1 + numbers(SIZE),
        "fc.weight": numbers(SIZE, 3 * SIZE),
        "norm.weight": 1 + numbers(SIZE),
        "lm_head.weight": numbers(len(REDUCED), SIZE),
        "d2t": offsets,
        "t2d": torch.isin(torch.arange(VOCAB), torch.tensor(REDUCED)),
    }


def write(folder, tensors, *, pickled=False, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def rms(x, weight):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def rotate(x, theta):
    """x [n, heads, WIDTH] at positions 0 .. n - 1."""
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = torch.cat((angles, angles), -1).cos()[:, None], torch.cat((angles, angles), -1).sin()[:, None]
    half = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)
    return x * cos + half * sin


def decoder_layer(tensors, prefix, inputs, residual, theta):
    """The layer written down again: no cache, one text, explicit loops over heads."""

    def project(part, heads):
        bias = tensors.get(f"{prefix}self_attn.{part}_proj.bias", 0)
        return (inputs @ tensors[f"{prefix}self_attn.{part}_proj.weight"].T + bias).view(-1, heads, WIDTH)

    query, key, value = (
        rotate(project("q", HEADS), theta),
        rotate(project("k", KV_HEADS), theta),
        project("v", KV_HEADS),
    )
    mixed = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = query[:, head] @ key[:, shared].T / math.sqrt(WIDTH)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        mixed.append(scores.softmax(-1) @ value[:, shared])
    hidden = residual + torch.cat(mixed, -1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T
    inner = rms(hidden, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate = F.silu(inner @ tensors[f"{prefix}mlp.gate_proj.weight"].T) * (
        inner @ tensors[f"{prefix}mlp.up_proj.weight"].T
    )
    return hidden + gate @ tensors[f"{prefix}mlp.down_proj.weight"].T


def reference(tensors, module, text, steps, *, theta=10000.0, norm_before_residual=False):
    """Logits over the vocabulary of ``steps`` greedy drafts behind ``text``, by whole forwards."""
    with torch.no_grad():
        known = module(torch.tensor([text]), output_hidden_states=True).hidden_states
    wide = "midlayer.hidden_norm.weight" in tensors
    if wide:
        depth = len(module.model.layers)
        states = torch.cat([known[k][0] for k in (2, depth // 2, depth - 3)], -1)[:-1] @ tensors["fc.weight"].T
        embedding, head = module.get_input_embeddings().weight, tensors["lm_head.weight"]
    else:
        states, embedding, head = known[-1][0, :-1], tensors["embed_tokens.weight"], module.lm_head.weight
    text, found = list(text), []
    for _ in range(steps):
        embeds = embedding[text[1:]]
        if wide:
            normed = rms(states, tensors["midlayer.hidden_norm.weight"])
            inputs = torch.cat((rms(embeds, tensors["midlayer.input_layernorm.weight"]), normed), -1)
            residual = normed if norm_before_residual else states
            out = decoder_layer(tensors, "midlayer.", inputs, residual, theta)
            reduced = rms(out[-1], tensors["norm.weight"]) @ head.T
            logits = torch.full((VOCAB,), -torch.inf)
            logits[torch.tensor(REDUCED)] = reduced
        else:
            residual = torch.cat((embeds, states), -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
            out = decoder_layer(tensors, "layers.0.", residual, residual, theta)
            logits = out[-1] @ head.T
        found.append(logits)
        text.append(int(logits.argmax()))
        states = torch.cat((states, out[-1:]))
    return torch.stack(found)


def drafted(drafter, target, text, steps):
    """The logits that the drafter itself draws its greedy tokens from."""
    seen = []
    spread = drafter._spread
    drafter._spread = lambda logits: seen.append(spread(logits)) or seen[-1]
    chain = Chain(target, {"head": drafter}, capacity=64)
    chain.prepare([Plan(("target", "head"), (steps,))])
    chain.start(Sequences((tuple(text),), (GREEDY,), (20,), ((),)))
    drafter.propose(chain._batch, torch.tensor([steps]))
    return torch.cat(seen)[:, 0]


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("kind", "tensors", "config"),
    [
        ("llama", eagle_1(), {}),
        ("llama", eagle_1(bias=True), {"rope_theta": 500000.0}),
        ("qwen2", eagle_1(bias=True, qkv_bias=True), {"rope_theta": 1000000.0}),
        ("llama", eagle_3(), {"draft_vocab_size": len(REDUCED)}),
        ("qwen3", eagle_3(), {"draft_vocab_size": len(REDUCED), "norm_before_residual": True, "head_dim": WIDTH}),
    ],
    ids=["eagle-1 llama", "eagle-2 llama", "eagle-1 qwen2", "eagle-3 llama", "eagle-3 qwen3"],
)
def test_a_published_layout_drafts_what_its_forward_says(tmp_path, kind, tensors, config, pickled):
    module = tiny(kind, num_hidden_layers=6)
    target = Model("target", module)
    folder = write(tmp_path / "head", tensors, pickled=pickled, **config)
    assert is_feature_drafter(folder)
    drafter = load_feature_drafter("head", folder, target, precision="stock")
    wanted = reference(
        tensors,
        module,
        PROMPT,
        4,
        theta=config.get("rope_theta", 10000.0),
        norm_before_residual=config.get("norm_before_residual", False),
    )
    torch.testing.assert_close(drafted(drafter, target, PROMPT, 4), wanted, atol=2e-4, rtol=1e-3)


def test_the_layers_that_a_configuration_names_are_read(tmp_path):
    folder = write(tmp_path, eagle_3(), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]})
    assert load_feature_drafter("head", folder, Model("target", tiny("llama", num_hidden_layers=6))).layers == (1, 3, 6)


def test_our_own_layout_comes_back(tmp_path):
    tensors = eagle_1(bias=True) | {
        "layers.0.input_layernorm.weight": 1 + numbers(SIZE),
        "norm.weight": 1 + numbers(SIZE),
    }
    written = read_feature_drafter(write(tmp_path / "a", tensors, rope_theta=100000.0))
    (tmp_path / "b").mkdir()
    save_feature_drafter(tmp_path / "b", written.net, torch.tensor(REDUCED), None, "some target")
    back = read_feature_drafter(tmp_path / "b")
    assert back.token_map.tolist() == list(REDUCED)
    assert back.net.shape.input_norm
    assert back.net.shape.output_norm
    assert json.loads((tmp_path / "b" / "config.json").read_text())["target"] == "some target"
    assert back.acceptance == ()
    torch.testing.assert_close(back.net.rotary.inv_freq, written.net.rotary.inv_freq)
    for name, value in written.net.state_dict().items():
        torch.testing.assert_close(back.net.state_dict()[name], value.half().float())


@pytest.mark.parametrize("runner", ["auto", "torch"])
def test_its_acceptance_comes_back_as_far_as_it_is_known(tmp_path, runner):
    net = read_feature_drafter(write(tmp_path / "a", eagle_1())).net
    (tmp_path / "b").mkdir()
    rows = numbers(len(REDUCED), SIZE)
    save_feature_drafter(tmp_path / "b", net, torch.tensor(REDUCED), rows, "t", [0.4, 0.25, 0.0, 0.5])
    target = Model("target", tiny("llama"))
    assert load_feature_drafter("head", tmp_path / "b", target, runner=runner).acceptance == (0.4, 0.25)


@pytest.mark.parametrize("told", ["high", [1.5], [0.5, "x"], {}, None])
def test_an_acceptance_that_is_none_tells_nothing(tmp_path, told):
    assert read_feature_drafter(write(tmp_path, eagle_1(), acceptance=told)).acceptance == ()


def test_a_reduced_head_is_taken_from_the_embedding_of_a_tied_target(tmp_path):
    offsets = {"d2t": torch.tensor([token - index for index, token in enumerate(REDUCED)])}
    module = tiny("llama", tie_word_embeddings=True)
    drafter = load_feature_drafter(
        "head", write(tmp_path, eagle_1() | offsets), Model("target", module), precision="stock"
    )
    torch.testing.assert_close(drafter._head.weight, module.get_input_embeddings().weight[list(REDUCED)])


def bad_layer_count(tensors, config):
    config["num_hidden_layers"] = 2


def missing(tensors, config):
    del tensors["layers.0.mlp.up_proj.weight"]


def unknown(tensors, config):
    tensors["layers.0.self_attn.q_norm.weight"] = torch.ones(WIDTH)


def another_size(tensors, config):
    config["intermediate_size"] = 64


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (bad_layer_count, "describes no feature drafter: 2 layers"),
        (missing, "known layout: .*up_proj.weight"),
        (unknown, "known layout: .*q_norm.weight"),
        (another_size, "known layout: .*gate_proj.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", "message"),
)
def test_a_folder_of_no_known_layout_is_refused(tmp_path, spoil, message):
    tensors, config = eagle_1(), {}
    spoil(tensors, config)
    with pytest.raises(ValueError, match=message):
        read_feature_drafter(write(tmp_path, tensors, **config))


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (print, ("this must not run",))

    write(tmp_path, {"fc.weight": Harmful()}, pickled=True)
    with pytest.raises(ValueError, match="holds no readable weights"):
        read_feature_drafter(tmp_path)
    assert not is_feature_drafter(tmp_path)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"hidden_size": 64}, eagle_1(), "head reads 32 features, target gives 64 in each of 1 layers"),
        ({"vocab_size": 40}, eagle_3(), "head drafts token 47, target has 40 tokens"),
    ],
)
def test_a_drafter_for_another_model_is_refused(tmp_path, fields, tensors, message):
    target = Model("target", tiny("llama", num_hidden_layers=6, **fields))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_feature_drafter("head", write(tmp_path, tensors), target)


def test_a_model_is_no_feature_drafter(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    assert not is_feature_drafter(tmp_path)
    assert not is_feature_drafter(tmp_path / "nothing")


def decode(chain, plan, prompts, params):
    texts = [[] for _ in prompts]
    chain.start(Sequences(tuple(prompts), (params,) * len(prompts), (16,) * len(prompts), ((),) * len(prompts)))
    drafted = accepted = 0
    while chain.running:
        result = chain.round(Plan.parse(plan))
        for text, new in zip(texts, result.tokens):
            text += new
        for edge in result.outcome.edges[-1:]:
            drafted, accepted = drafted + sum(edge.offered), accepted + sum(edge.accepted)
    return texts, drafted, accepted


def test_sampled_texts_are_reproducible(tmp_path):
    def once():
        target = Model("target", tiny("llama", num_hidden_layers=6))
        drafter = load_feature_drafter("head", folder, target)
        return decode(Chain(target, {"head": drafter}), "target/head:3", [PROMPT], SamplingParams(1.0, seed=4))

    folder = write(tmp_path, eagle_3())
    first = once()
    assert first == once()
    assert first[1] > 0
