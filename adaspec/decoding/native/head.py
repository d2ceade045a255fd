"""A feature drafter whose passes are computed by ``forward.c``, a greedy window of them in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from adaspec.decoding.batch import Batch, Draft
from adaspec.decoding.cache import largest
from adaspec.decoding.confidence import largest_entropy
from adaspec.decoding.feature import FeatureReader
from adaspec.decoding.feature_net import FeatureNet, FeatureShape
from adaspec.decoding.native.greedy import Asked, Greedy
from adaspec.decoding.native.stack import NativeStack, Sizes
from adaspec.decoding.native.weights import KINDS, Weights
from adaspec.outcome import Pass


def obstacle(shape: FeatureShape, precision: str) -> str | None:
    """Why ``forward.c`` cannot compute this feature drafter in this precision, or None."""
    if shape.wide or not (shape.input_norm and shape.output_norm):
        return "it has another layout than one narrow layer with both norms"
    if precision not in KINDS:
        return f"it knows the precisions {', '.join(KINDS)}, not {precision}"
    if shape.llama.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "its rotation depends on the length of the text"
    return _sizes(shape).obstacle


def _sizes(shape: FeatureShape) -> Sizes:
    config = shape.llama
    heads, kv_heads, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    epsilon = float(config.rms_norm_eps)
    return Sizes(shape.hidden_size, heads, kv_heads, shape.head_dim, inner, epsilon, shape.head_dim**-0.5)


class NativeHead(NativeStack):
    """A narrow feature drafter's weights in one precision, and its key/value cache.

    Args:
        net: one for which ``obstacle`` is None.
        embedding: [V, hidden], float32.
        head: [D, hidden].
        token_map: [D] the token of each logit.
        precision: of the linear weights, one of ``KINDS``.
    """

    def __init__(self, net: FeatureNet, embedding: Tensor, head: Tensor, token_map: Tensor, precision: str) -> None:
        weights = Weights(precision)
        projections = [getattr(net, f"{name}_proj") for name in ("q", "k", "v", "o", "gate", "up", "down")]
        super().__init__(
            weights,
            [weights.layer(projections, (net.input_layernorm, net.post_attention_layernorm, None, None))],
            _sizes(net.shape),
            weights.norm(net.norm),
            weights.linear(head.detach()),
            net.rotary,
            weights.stacked(net.fc),
        )
        self.embedding, self.token_map = embedding.detach().float().contiguous(), token_map.contiguous()

    def forward(
        self, tokens: Tensor, states: Tensor, sequence: Tensor, position: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One pass over tokens [R] and the states before them [R, hidden]; the rest as for ``NativeStack.run``.

        Returns:
            logits [n, D], and the states to go on from [R, hidden].
        """
        joined = torch.cat((self.embedding[tokens], states), -1)
        logits, taps = self.run(torch.empty_like(states), sequence, position, wanted, (1,), joined)
        return logits, taps[1]


class NativeFeatureDrafter(FeatureReader):
    """A narrow feature drafter in C. Where nothing is sampled or penalised, it drafts all but the first token at once.

    Args:
        name: its name in plans.
        head: the weights.
        vocab_size, layers, token_map: as for ``FeatureReader``.
    """

    def __init__(
        self, name: str, head: NativeHead, vocab_size: int, layers: tuple[int, ...], token_map: Tensor | None
    ) -> None:
        super().__init__(name, vocab_size, layers, token_map)
        self.head = head
        self._greedy = Greedy(head, head.outputs, head.token_map)
        self._capacity = 0

    def start(self, batch_size: int, capacity: int) -> None:
        super().start(batch_size, capacity)
        self.head.start(batch_size, capacity)
        self._capacity = capacity

    @torch.inference_mode()
    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        able = self._able(batch, limits)
        if not batch.sampler.takes_largest or not bool(able.any()):
            return super().propose(batch, limits, stop)
        states, logits = self._read(batch, able)
        sequence, asked = batch.sequence, torch.where(able, limits, 0)
        at, context = sequence.lengths - 2, largest(sequence.lengths)
        window = Asked(sequence, sequence.lengths, asked, batch.stop_ids)
        found = self._greedy.go_on(window, largest(asked), largest_entropy(stop), at, logits[:, 0], states[:, 0])
        for step, each in enumerate(found.seconds[1:]):
            self.clock.add(Pass(self.name, 1, len(limits), context + step, each))
        sequence.lengths = found.lengths
        return Draft(found.tokens, found.counts, None)

    def _step(self, tokens: Tensor, states: Tensor, slots: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        batch, count = tokens.shape
        rows = torch.arange(batch)[:, None]
        wanted = rows * count + last  # [B, 1]
        slots = slots.clamp(max=self._capacity).reshape(-1)
        sequence = rows.expand(-1, count).reshape(-1)
        logits, after = self.head.forward(tokens.reshape(-1), states.flatten(0, 1), sequence, slots, wanted[:, 0])
        return after[wanted], logits[:, None]
