"""The network of a feature drafter: one decoder layer over token embeddings and its verifier's hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotated queries [B, H, q, D], keys and values [B, Hkv, q, D] -> what is attended to [B, q, H * D]."""


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """What a feature drafter looks like.

    Two families. Narrow (EAGLE-1 and 2; Li et al. 2024): ``fc`` joins the embedding and the verifier's last state, and
    the layer's output stands for that state in the next step. ``wide`` (EAGLE-3; Li et al. 2025): ``fc`` joins the
    states of several layers, the layer attends from embedding and state side by side, and its output, before the last
    norm, goes on.

    ``llama``: sizes, rotation and eps. ``feature_width``: of the verifier's states, all layers together.
    ``norm_before_residual``: a wide layer's residual is the normed state.
    """

    llama: LlamaConfig
    feature_width: int
    wide: bool = False
    input_norm: bool = False
    output_norm: bool = False
    norm_before_residual: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False

    @property
    def hidden_size(self) -> int:
        size: int = self.llama.hidden_size
        return size

    @property
    def head_dim(self) -> int:
        size: int = self.llama.head_dim
        return size


class FeatureNet(nn.Module):
    """The layer and what joins its inputs. ``forward`` leaves attention to the caller, who owns the cache.

    Args:
        shape: sizes and family.
    """

    def __init__(self, shape: FeatureShape) -> None:
        super().__init__()
        self.shape = shape
        config, size = shape.llama, shape.hidden_size
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, shape.head_dim
        inputs = 2 * size if shape.wide else size
        self.fc = nn.Linear(shape.feature_width + (0 if shape.wide else size), size, bias=shape.fc_bias)
        self.q_proj = nn.Linear(inputs, heads * width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(inputs, kv_heads * width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(inputs, kv_heads * width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(heads * width, size, bias=False)
        self.gate_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)
        self.input_layernorm = self._norm(shape.input_norm or shape.wide)
        self.hidden_norm = self._norm(shape.wide)
        self.post_attention_layernorm = self._norm(True)
        self.norm = self._norm(shape.output_norm)
        self.rotary = LlamaRotaryEmbedding(config)

    def _norm(self, there: bool) -> nn.Module:
        return nn.RMSNorm(self.shape.hidden_size, eps=self.shape.llama.rms_norm_eps) if there else nn.Identity()

    def fuse(self, features: Tensor) -> Tensor:
        """The verifier's features [..., feature_width] as states that ``forward`` takes."""
        fused: Tensor = self.fc(features) if self.shape.wide else features
        return fused

    def forward(self, embeds: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            embeds: embeddings of the tokens [B, q, size].
            states: of the positions before them, [B, q, size].
            positions: [B, q].
            attend: keeps keys and values, and attends.

        Returns:
            the states to go on from, and those that the head reads, both [B, q, size].
        """
        if self.shape.wide:
            normed = self.hidden_norm(states)
            residual = normed if self.shape.norm_before_residual else states
            inputs = torch.cat((self.input_layernorm(embeds), normed), -1)
        else:
            residual = self.fc(torch.cat((embeds, states), -1))
            inputs = self.input_layernorm(residual)
        hidden = residual + self.o_proj(attend(*self._rotated(inputs, positions)))
        inputs = self.post_attention_layernorm(hidden)
        hidden = hidden + self.down_proj(F.silu(self.gate_proj(inputs)) * self.up_proj(inputs))
        top = self.norm(hidden)
        return (hidden if self.shape.wide else top), top

    def _rotated(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys by position, and values, each [B, heads, q, head_dim]."""
        query, key, value = (
            layer(inputs).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary(inputs, positions)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        return query, key, value
