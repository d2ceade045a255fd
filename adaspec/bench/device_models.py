"""Models of real shape with random weights, whose drafter agrees with its target about as often as real ones do.

The drafter is the first layers of the target with the target's own embedding and head. The layers behind those move
the residual stream only by a factor ``reach``, found by bisection such that the drafter's law overlaps the target's by
a wanted share. Every matrix is full and read in every pass, so the seconds are those of the shape.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from adaspec.decoding.gpu_attention import register
from adaspec.decoding.weight_only import quantize

BISECTIONS = 9


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama's shape; ``draft_layers``: how many of its layers draft."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    shared_heads: int
    vocab: int
    draft_layers: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.shared_heads,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
        )


REAL = (  # TinyLlama's and Llama 3's shape
    Size("llama-1.1b", 2048, 5632, 22, 32, 4, 32000, 2),
    Size("llama-8b", 4096, 14336, 32, 32, 8, 128256, 2),
)
TINY = (Size("llama-tiny", 64, 128, 3, 4, 2, 211, 1),)


@dataclass(frozen=True, slots=True)
class Family:
    """A target with what may draft for it: modules, how the middle multiplies, and the overlap that was reached."""

    target: nn.Module
    draft: nn.Module
    middle: nn.Module
    middle_kernel: str
    overlap: float


def build(size: Size, device: torch.device, dtype: torch.dtype, *, overlap: float = 0.8, seed: int = 0) -> Family:
    """Target, drafter and an 8-bit copy of the target."""
    torch.manual_seed(seed)
    with device:
        target: Any = AutoModelForCausalLM.from_config(size.config(), dtype=dtype, attn_implementation=register())
    target.eval().requires_grad_(False)
    nn.init.normal_(target.lm_head.weight, std=2.0 * size.hidden**-0.5)  # laws far from uniform
    draft = first_layers(target, size.draft_layers)
    reached = _bring_near(target, draft, size, overlap)
    middle = copy.deepcopy(target)
    return Family(target, draft, middle, quantize(middle), reached)


def first_layers(module: Any, count: int) -> nn.Module:
    """A model of the first ``count`` layers of a Llama, which shares its weights."""
    config = copy.deepcopy(module.config)
    config.num_hidden_layers = count
    with torch.device("meta"):
        short: Any = AutoModelForCausalLM.from_config(config, attn_implementation=register())
    short.model.embed_tokens, short.model.norm = module.model.embed_tokens, module.model.norm
    short.model.rotary_emb, short.lm_head = module.model.rotary_emb, module.lm_head
    short.model.layers = module.model.layers[:count]
    return short.eval().requires_grad_(False)  # type: ignore[no-any-return]


@torch.no_grad()
def _bring_near(target: Any, draft: Any, size: Size, wanted: float) -> float:
    """Scales what the later layers add until the laws overlap by ``wanted`` on random text; the overlap reached."""
    device = target.lm_head.weight.device
    text = torch.randint(size.vocab, (4, 64), device=device, generator=torch.Generator(device).manual_seed(1))
    drafted = draft(text).logits.float().softmax(-1)
    ends = [each for layer in target.model.layers[size.draft_layers :] for each in (layer.self_attn.o_proj, layer.mlp)]
    outputs = [end.down_proj if hasattr(end, "down_proj") else end for end in ends]
    own = [output.weight.clone() for output in outputs]
    low, high, reached = 0.0, 8.0, 1.0
    for _ in range(BISECTIONS):
        reach = (low + high) / 2
        for output, weight in zip(outputs, own, strict=True):
            output.weight.copy_(weight * reach)
        law = target(text).logits.float().softmax(-1)
        reached = float(torch.minimum(law, drafted).sum(-1).mean())
        low, high = (reach, high) if reached > wanted else (low, reach)
    return reached
