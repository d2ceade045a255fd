"""Where training begins: the target's own last layer, fed by a linear guess of what would enter it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from adaspec.decoding.feature_net import FeatureNet, FeatureShape

RIDGE = 1e-2  # of each input's mean square


def shape_of(config: Any) -> FeatureShape:
    """The narrow drafter of a target: a layer of the target's own sizes, with both norms and a bias.

    Raises:
        ValueError: the target lacks a size that a Llama layer has.
    """
    fields = {}
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        fields[name] = getattr(config, name, None) or getattr(config, "num_attention_heads", None)
        if not fields[name]:
            raise ValueError(f"a drafter's layer needs {name}, which {config.model_type} does not tell")
    if getattr(config, "head_dim", None):
        fields["head_dim"] = config.head_dim
    for name in ("rope_parameters", "max_position_embeddings", "rms_norm_eps"):
        if getattr(config, name, None):
            fields[name] = getattr(config, name)
    llama = LlamaConfig(**fields)
    bias = bool(getattr(config, "attention_bias", False)) or config.model_type == "qwen2"
    return FeatureShape(llama, llama.hidden_size, input_norm=True, output_norm=True, fc_bias=True, qkv_bias=bias)


def like_the_last_layer(net: FeatureNet, layer: nn.Module, norm: nn.Module | None) -> list[str]:
    """Copies every parameter of the target's last layer and last norm that has a place; returns what was copied."""
    own, copied = dict(net.named_parameters()), []
    theirs = [(".".join(name.split(".")[-2:]), value) for name, value in layer.named_parameters()]
    theirs += [("norm.weight", value) for value in (norm.parameters() if norm is not None else ())]
    for name, value in theirs:
        if name in own and own[name].shape == value.shape:
            own[name].data.copy_(value)
            copied.append(name)
    return copied


class Ridge:
    """Accumulates the regression from [embedding, state before] to the input of the target's last layer."""

    def __init__(self, size: int) -> None:
        self._square = torch.zeros(2 * size + 1, 2 * size + 1, dtype=torch.float64)
        self._product = torch.zeros(2 * size + 1, size, dtype=torch.float64)

    def add(self, embeds: Tensor, states: Tensor, entering: Tensor) -> None:
        """Adds entries: embeddings of tokens, last states before them, last layer's inputs at them; all [m, size]."""
        inputs = torch.cat((embeds, states, torch.ones_like(embeds[:, :1])), -1).double().cpu()
        self._square += inputs.T @ inputs
        self._product += inputs.T @ entering.double().cpu()

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weight [size, 2 size] and bias [size]; each input is shrunk relative to its own mean square."""
        shrink = RIDGE * self._square.diagonal()
        shrink[-1] = 0
        found = torch.linalg.solve(self._square + shrink.diag(), self._product).float()
        return found[:-1].T.contiguous(), found[-1].contiguous()


def frequent_tokens(texts: Sequence[Tensor], size: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
    """The ``size`` most frequent tokens, ascending; ties and tokens never seen by their id (byte pairs merged early).

    Args:
        texts: token ids, each [n].
        size: how many; all of them when the vocabulary has no more.
        vocab_size: tokens of the target.
        always: tokens that are kept however rare.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for tokens in texts:
        counts += torch.bincount(tokens, minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def guess(net: FeatureNet, ridge: Ridge) -> None:
    """Sets the joining layer of ``net`` to the regression."""
    weight, bias = ridge.solve()
    net.fc.weight.data.copy_(weight)
    net.fc.bias.data.copy_(bias)
