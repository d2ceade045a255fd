"""Features of a model: those that Hugging Face shows, at every position that was fed, and at no cost to the rows."""

import pytest
import torch
from helpers import toy_chain
from tiny_models import greedy_loop, noisy, tiny

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.feature_load import load_feature_drafter, save_feature_drafter
from adaspec.decoding.feature_net import FeatureNet
from adaspec.decoding.features import FeatureBuffer
from adaspec.decoding.model import Model
from adaspec.decoding.sampling import GREEDY
from adaspec.plan import Plan
from adaspec.training.start import Ridge, guess, like_the_last_layer, shape_of

ROWS = ((5, 6, 7, 11, 3, 9), (8, 9, 4, 4))


def fed(model, rows=ROWS):
    sequence = TokenBuffer(len(rows), 20)
    for at, row in enumerate(rows):
        sequence.tokens[at, : len(row)] = torch.tensor(row)
    sequence.lengths = torch.tensor([len(row) for row in rows])
    model.start(len(rows), 20)
    return sequence, model.logits(sequence, sequence.lengths - 1, 1, torch.ones(len(rows), dtype=torch.bool))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox"])
def test_they_are_the_hidden_states_of_hugging_face(kind):
    module = tiny(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 3})
    model, layers = Model("m", module), (0, 2, 3)
    model.tap(layers)
    model.tap((3,))
    fed(model)
    for at, row in enumerate(ROWS):
        with torch.no_grad():
            states = module(torch.tensor([row]), output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer][0] for layer in layers], -1)
        found = model.features(layers, torch.zeros(2, dtype=torch.long), len(row))[at]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        assert torch.equal(model.features((3,), torch.tensor([1, 1]), 3)[at], found[1:4, -wanted.shape[1] // 3 :])


def test_the_logits_of_a_tapped_model_are_those_of_an_untapped_one():
    module = tiny("llama")
    plain, tapped = Model("plain", module), Model("tapped", module)
    wanted = fed(plain)[1]
    tapped.tap((0, 2))
    assert torch.equal(fed(tapped)[1], wanted)


def test_a_model_that_is_tapped_later_is_fed_again():
    module = tiny("llama")
    model, other = Model("m", module), Model("n", module)
    other.tap((2,))
    fed(other)
    sequence, _ = fed(model)
    model.tap((2,))
    assert model.lengths.tolist() == [0, 0]
    model.catch_up(sequence, sequence.lengths)
    nought = torch.zeros(2, dtype=torch.long)
    torch.testing.assert_close(model.features((2,), nought, 4), other.features((2,), nought, 4))
    model.tap((2,))
    assert model.lengths.tolist() == [6, 4]


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"m has the layers 0 \.\. 2 to draft from, got \(1, 3\)"):
        Model("m", tiny("llama")).tap((1, 3))


def test_a_later_write_replaces_what_was_rolled_back_and_rows_stay_apart():
    buffer = FeatureBuffer(2, 6)
    buffer.write(torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.arange(6.0).view(2, 3, 1))
    buffer.write(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[[10.0], [11.0]], [[12.0], [13.0]]]))
    assert buffer.read(torch.tensor([0, 2]), 3)[..., 0].tolist() == [[0.0, 10.0, 11.0], [5.0, 12.0, 13.0]]
    buffer.write(torch.tensor([[5, 6, 7], [0, 1, 2]]), torch.zeros(2, 3, 1))  # past the end belongs nowhere
    assert buffer.read(torch.tensor([0, 2]), 3)[..., 0].tolist() == [[0.0, 10.0, 11.0], [0.0, 12.0, 13.0]]


def begun(folder, module, kept):
    """A reduced drafter of a tied module that has learned nothing but its closed-form beginning."""
    net = FeatureNet(shape_of(module.config))
    like_the_last_layer(net, module.model.layers[-1], module.model.norm)
    depth, ridge = len(module.model.layers), Ridge(module.config.hidden_size)
    texts = torch.randint(0, module.config.vocab_size, (40, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = module(texts, output_hidden_states=True).hidden_states
        for text, last, entering in zip(texts, states[-1], states[depth - 1]):
            ridge.add(module.get_input_embeddings()(text[1:]), last[:-1], entering[1:])
    guess(net, ridge)
    folder.mkdir()
    save_feature_drafter(folder, net, torch.tensor(kept), None, "tiny")
    return folder


@pytest.mark.parametrize("prompts", [(ROWS[0],), (*ROWS, (3,))], ids=["one row", "three rows"])
@pytest.mark.parametrize(
    "plans", [["target/head:4"], ["target/mid/inner:4,2"], ["target/head:2", "target/mid/inner:3,2"]]
)
def test_greedy_text_is_the_targets_whatever_its_drafter_gets_right(tmp_path, prompts, plans):
    module = tiny("llama", num_hidden_layers=3, tie_word_embeddings=True, initializer_range=0.15)
    target, mid = Model("target", module), Model("mid", noisy(module, 0.05, 1))
    kept = [token for token in range(48) if token % 5]
    head = load_feature_drafter("head", begun(tmp_path / "a", module, kept), target, precision="stock")
    inner = load_feature_drafter("inner", begun(tmp_path / "b", mid.module, kept), mid, precision="stock")
    chain = Chain(target, {"mid": mid, "head": head, "inner": inner}, capacity=64)
    chain.start(Sequences(prompts, (GREEDY,) * len(prompts), (24,) * len(prompts), ((),) * len(prompts)))
    texts, counts, turn = [[] for _ in prompts], {}, 0
    while chain.running:
        result = chain.round(Plan.parse(plans[turn % len(plans)]))
        turn += 1
        for text, new in zip(texts, result.tokens):
            text += new
        edge = result.outcome.edges[-1]
        offered, accepted = counts.get(edge.drafter, (0, 0))
        counts[edge.drafter] = (offered + sum(edge.offered), accepted + sum(edge.accepted))
    assert texts == [greedy_loop(module, prompt, 24) for prompt in prompts]
    for offered, accepted in counts.values():
        assert 0 < accepted < offered


def test_an_idle_verifier_catches_up_before_its_drafter_reads_it(tmp_path):
    module = tiny("llama", tie_word_embeddings=True)
    target, mid = Model("target", module), Model("mid", noisy(module, 0.05, 1))
    inner = load_feature_drafter("inner", begun(tmp_path / "b", mid.module, list(range(48))), mid, precision="stock")
    chain = Chain(target, {"mid": mid, "inner": inner}, capacity=64)
    chain.start(Sequences((ROWS[0],), (GREEDY,), (20,), ((),)))
    chain.prepare([Plan.parse("target/mid/inner:3,2")])
    for _ in range(3):
        chain.round(Plan(("target",)))
    assert mid.lengths.tolist() == [0]
    outcome = chain.round(Plan.parse("target/mid/inner:3,2")).outcome
    assert outcome.catch_up_seconds > 0
    assert outcome.edges[1].drafted[0] > 0


def test_a_toy_without_features_says_so():
    with pytest.raises(ValueError, match="target shows no hidden states to draft from"):
        toy_chain().target.tap((1,))
