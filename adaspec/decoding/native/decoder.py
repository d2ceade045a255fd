"""A Llama-like Hugging Face model as the arrays that ``forward.c`` computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn

from adaspec.decoding.native.library import INT8, Layer, Pass
from adaspec.decoding.native.stack import NativeStack, Sizes
from adaspec.decoding.native.weights import KINDS, Weights

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def obstacle(module: Any, precision: str) -> str | None:
    """Why ``forward.c`` cannot compute this model in this precision, or None."""
    config, kind = module.config, type(module).__name__
    if kind not in ARCHITECTURES:
        return f"{kind} is none of {', '.join(ARCHITECTURES)}"
    if precision not in KINDS:
        return f"it knows the precisions {', '.join(KINDS)}, not {precision}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    if module.model.rotary_emb.rope_type in ("dynamic", "longrope"):
        return f"the angles of its positions depend on the text's length ({module.model.rotary_emb.rope_type})"
    return _sizes(module).obstacle


def _sizes(module: Any) -> Sizes:
    config = module.config
    return Sizes(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
        config.intermediate_size,
        config.rms_norm_eps,
        module.model.layers[0].self_attn.scaling,
    )


class NativeDecoder(NativeStack):
    """The weights of a model in one precision, and its key/value cache; computes passes on the CPU.

    The module's own linear weights are released, layer by layer, as they are taken over.

    Args:
        module: one for which ``obstacle`` is None, with floating weights on the CPU.
        precision: of the linear weights, one of ``KINDS``; with int4 the head stays in int8, which is what most of the
            agreement with the model's own tokens hangs on.
    """

    def __init__(self, module: Any, precision: str) -> None:
        base, weights = module.model, Weights(precision)
        super().__init__(
            weights,
            [_layer(weights, layer) for layer in base.layers],
            _sizes(module),
            weights.norm(base.norm),
            weights.linear(module.lm_head.weight.detach(), kind=INT8 if precision == "int4" else None),
            base.rotary_emb,
        )
        self.embedding = base.embed_tokens.weight.detach().float().contiguous()

    def forward(
        self, tokens: Tensor, sequence: Tensor, position: Tensor, wanted: Tensor, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """One pass over ``tokens`` [R]; the rest as for ``NativeStack.run``."""
        return self.run(self.embedding[tokens], sequence, position, wanted, taps)

    def products(self, rows: int) -> None:
        """The matrix products of a pass over ``rows`` rows with logits of each, and nothing else: to be timed."""
        decoder = self.structure
        x = torch.ones(rows, max(decoder.inner, decoder.hidden, decoder.heads * decoder.head_dim))
        logits, scratch = torch.empty(rows, self.outputs), torch.empty(max(2 * decoder.inner, x.shape[1] * 3))
        taken = Pass(rows, rows, threads=torch.get_num_threads())
        taken.x, taken.logits, taken.scratch = x.data_ptr(), logits.data_ptr(), scratch.data_ptr()
        self.library.products(byref(decoder), byref(taken))


def _layer(weights: Weights, layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    linear = [getattr(attention, f"{name}_proj") for name in "qkvo"] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    taken = weights.layer(
        linear,
        (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        ),
    )
    for each in linear:
        each.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return taken
