"""What is trained is what drafts: the unrolled network against the drafter itself, and the counts against a loop."""

import pytest
import torch
from tiny_models import VOCAB, tiny

from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.feature import FeatureDrafter
from adaspec.decoding.feature_net import FeatureNet
from adaspec.decoding.model import Model
from adaspec.decoding.sampling import GREEDY
from adaspec.plan import Plan
from adaspec.training.collect import Text
from adaspec.training.start import Ridge, frequent_tokens, shape_of
from adaspec.training.unroll import Head, acceptance, accepted_length, curve, loss, unroll

PROMPT = (5, 6, 7, 11, 3, 9, 40, 2)


@pytest.fixture(scope="module")
def parts():
    """A tiny target, a random network for it and a reduced head."""
    module = tiny("llama")
    torch.manual_seed(1)
    net = FeatureNet(shape_of(module.config)).eval().requires_grad_(False)
    for parameter in net.parameters():
        if parameter.dim() == 2:
            parameter.mul_(2)
    kept = torch.tensor([token for token in range(VOCAB) if token % 4])
    return module, net, Head(module.lm_head.weight[kept], kept)


def text_of(module, tokens, learned_from=0):
    with torch.no_grad():
        states = module(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    return Text(torch.tensor(tokens), states, torch.arange(len(tokens)) >= learned_from)


def drafts(module, net, head, prompt, count):
    """Greedy tokens of the drafter behind a prompt and the reduced logits they come from, [count, D]."""
    seen = []
    drafter = FeatureDrafter(
        "head",
        net,
        module.get_input_embeddings(),
        lambda states: seen.append(head.logits(states)) or seen[-1],
        VOCAB,
        (2,),
        head.token_map,
    )
    chain = Chain(Model("target", module), {"head": drafter}, capacity=64)
    chain.prepare([Plan(("target", "head"), (count,))])
    chain.start(Sequences((tuple(prompt),), (GREEDY,), (20,), ((),)))
    return drafter.propose(chain._batch, torch.tensor([count])).tokens[0].tolist(), torch.cat(seen)[:, 0]


def test_the_unrolled_network_computes_what_the_drafter_does(parts):
    module, net, head = parts
    tokens, wanted = drafts(module, net, head, PROMPT, 4)
    text = text_of(module, [*PROMPT, *tokens[:3]])
    tops = unroll(net, module.get_input_embeddings(), text, 4)
    found = [head.logits(top[len(PROMPT) - 2 + step]) for step, top in enumerate(tops)]
    torch.testing.assert_close(torch.stack(found), wanted, atol=1e-5, rtol=1e-4)


def test_acceptance_is_what_greedy_drafts_from_every_position_would_get(parts):
    module, net, head = parts
    tokens, _ = drafts(module, net, head, PROMPT, 5)
    text = text_of(module, [*PROMPT, *tokens, 3, 4, *PROMPT], learned_from=3)
    wanted = torch.zeros(2, 3, dtype=torch.long)
    whole = text.tokens.tolist()
    for start in range(3, len(whole)):  # the first drafted position
        guessed, _ = drafts(module, net, head, whole[:start], 3)
        for step, (guess, true) in enumerate(zip(guessed, whole[start:])):
            wanted[0, step] += 1
            if guess != true:
                break
            wanted[1, step] += 1
    found = acceptance(net, module.get_input_embeddings(), head, text, 3)
    assert found.tolist() == wanted.tolist()
    assert found[1, 2] > 0


def test_the_loss_is_the_entropy_of_the_target_for_a_drafter_that_is_right():
    """A network that is replaced by the truth; only learned tokens count, later steps less."""
    torch.manual_seed(0)
    features, rows = torch.randn(9, 6), torch.randn(5, 6)
    text = Text(torch.arange(9), features, torch.arange(9) >= 4)
    head = Head(rows, torch.arange(5))

    class Perfect:
        def fuse(self, states):
            return states

        def __call__(self, embeds, states, positions, attend):
            return states, features[None, 1:]

    entropy = torch.distributions.Categorical(logits=features[3:8] @ rows.T).entropy().sum()
    found = loss(Perfect(), lambda tokens: torch.zeros(1, 8, 6), head, text, 2, decay=0.5)
    torch.testing.assert_close(found, 1.5 * entropy)


def test_curves_and_accepted_lengths():
    rates = curve(torch.tensor([[10, 4, 0], [5, 1, 0]]))
    assert rates == [0.5, 0.25, 0.0]
    assert accepted_length(rates) == 0.625


def test_the_ridge_finds_a_linear_map():
    torch.manual_seed(0)
    weight, bias, ridge = torch.randn(3, 6), torch.randn(3), Ridge(3)
    for _ in range(20):
        inputs = torch.randn(50, 6) * torch.tensor([0.01, 1, 1, 1, 5, 1])
        ridge.add(inputs[:, :3], inputs[:, 3:], inputs @ weight.T + bias)
    found, offset = ridge.solve()
    torch.testing.assert_close(found, weight, atol=0.1, rtol=0.02)
    torch.testing.assert_close(offset, bias, atol=0.05, rtol=0)


def test_frequent_tokens_are_those_of_the_texts_and_ties_go_to_low_ids():
    texts = [torch.tensor([7, 7, 3]), torch.tensor([7, 9, 9, 3])]
    assert frequent_tokens(texts, 3, 12).tolist() == [3, 7, 9]
    assert frequent_tokens(texts, 5, 12, always=[11]).tolist() == [0, 3, 7, 9, 11]
    assert frequent_tokens(texts, 50, 12).tolist() == list(range(12))
