"""Small feature drafters: over a table whose features are its logits, and over tiny Hugging Face models."""

import torch
from helpers import VOCAB, TableModel, table_model
from transformers import LlamaConfig

from adaspec.decoding.chain import Chain
from adaspec.decoding.feature import FeatureDrafter
from adaspec.decoding.feature_net import FeatureNet, FeatureShape
from adaspec.decoding.native.head import NativeFeatureDrafter, NativeHead

SIZE = 8


class SeeingTable(TableModel):
    """A table model with features: its logits after a position, and zeros."""

    def _watch(self, layers):
        assert layers == (1,)

    def _forward(self, tokens, slots, rows):
        logits = super()._forward(tokens, slots, rows)
        at = slots.clamp(max=self._seen.shape[1] - 1)
        states = self.table[self._seen.gather(1, (at - 1).clamp(min=0)), self._seen.gather(1, at)]
        self._now = torch.nn.functional.pad(states, (0, SIZE - VOCAB))
        return logits

    def _states(self, layers):
        return self._now


def toy_shape(*, heads=2, **fields):
    llama = LlamaConfig(
        hidden_size=SIZE, intermediate_size=8, num_attention_heads=heads, num_key_value_heads=1, vocab_size=VOCAB
    )
    return FeatureShape(llama, SIZE, **({"input_norm": True, "output_norm": True} | fields))


def toy_weights(*, kept=None, seed=0, **fields):
    """Random weights large enough to matter: the layer, embeddings [V, size], rows of the head [D, size]."""
    torch.manual_seed(seed)
    net = FeatureNet(toy_shape(**fields)).eval().requires_grad_(False)
    for parameter in net.parameters():
        if parameter.dim() == 2:
            parameter.mul_(1.5)
    embedding, head = torch.randn(VOCAB, SIZE), torch.randn(VOCAB, SIZE)
    head[:, :VOCAB] += torch.eye(VOCAB)
    return net, embedding, head if kept is None else head[list(kept)]


def toy_head(name="head", *, kept=None, seed=0, cls=FeatureDrafter, **fields):
    """``kept``: the tokens of a reduced head."""
    net, embedding, rows = toy_weights(kept=kept, seed=seed, **fields)
    token_map = None if kept is None else torch.tensor(kept)
    return cls(name, net, lambda tokens: embedding[tokens], lambda states: states @ rows.T, VOCAB, (1,), token_map)


def native_head(name="head", *, kept=None, seed=0, cls=NativeFeatureDrafter, precision="float32"):
    """The same in C, with one head of attention: its width there is a multiple of 8."""
    net, embedding, rows = toy_weights(kept=kept, seed=seed, heads=1)
    token_map = torch.arange(VOCAB) if kept is None else torch.tensor(kept)
    head = NativeHead(net, embedding, rows, token_map, precision)
    return cls(name, head, VOCAB, (1,), None if kept is None else token_map)


def seeing_chain(**drafters):
    """target and a with features, b and c without."""
    plain = {name: table_model(name, seed) for name, seed in (("b", 2), ("c", 3))}
    target = SeeingTable("target", table_model("target", 0).table)
    a = SeeingTable("a", table_model("a", 1, like=target.table, noise=0.7).table)
    return Chain(target, {"a": a, **plain, **drafters}, capacity=64)
