"""A Llama-like Hugging Face model as the arrays that ``forward.c`` computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof, byref, c_void_p
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaspec.decoding.native.library import FLOAT16, FLOAT32, INT8, Decoder, Layer, Linear, Pass, library

KINDS = {"float32": FLOAT32, "fp16": FLOAT16, "int8": INT8}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LANES, PANEL = 8, 2  # numbers computed at once; outputs that are stored together
_DTYPES = {FLOAT32: torch.float32, FLOAT16: torch.float16, INT8: torch.int8}


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
    width = _head_dim(config)
    for size in (width, config.hidden_size, config.intermediate_size, width * config.num_attention_heads):
        if size % LANES:
            return f"its width {size} is no multiple of {LANES}"
    return None


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class NativeDecoder:
    """The weights of a model in one precision, and its key/value cache; computes passes on the CPU.

    The module's own linear weights are released, layer by layer, as they are taken over.

    Args:
        module: one for which ``obstacle`` is None, with floating weights on the CPU.
        precision: of the linear weights, one of ``KINDS``; all sums are float32.
    """

    def __init__(self, module: Any, precision: str) -> None:
        self._library = library()
        self._kind = KINDS[precision]
        self._held: list[Tensor] = []  # what the structures point to
        config, base = module.config, module.model
        self._rotary = base.rotary_emb
        self._embedding = base.embed_tokens.weight.detach()
        self.vocab_size = module.lm_head.weight.shape[0]
        self._layers = (Layer * len(base.layers))(*map(self._layer, base.layers))
        self._decoder = Decoder(
            self._layers,
            self._floats(base.norm.weight),
            self._linear(module.lm_head.weight.detach()),
            len(base.layers),
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            _head_dim(config),
            config.intermediate_size,
            0,
            config.rms_norm_eps,
            base.layers[0].self_attn.scaling,
        )
        self._cache = torch.zeros(0, 0, 0, 0, 0, 0)
        self._scratch = torch.zeros(0)

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def start(self, batch_size: int, capacity: int) -> None:
        """Makes room for ``batch_size`` sequences of ``capacity`` tokens; what fits is kept."""
        decoder, slots = self._decoder, capacity + 1
        if self._cache.shape[2] != batch_size or self._cache.shape[4] < slots:
            self._cache = torch.zeros(self.depth, 2, batch_size, decoder.kv_heads, slots, decoder.head_dim)
            decoder.slots = slots
            for layer, (keys, values) in zip(self._layers, self._cache):
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def forward(
        self, tokens: Tensor, sequence: Tensor, position: Tensor, wanted: Tensor, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """One pass over R rows.

        Args:
            tokens: [R] int64.
            sequence: [R], which of the batch's sequences a row belongs to.
            position: [R], the slot a row writes; it attends to those up to it, so rows of a sequence come in order.
            wanted: [n], the rows whose logits are asked for.
            taps: layers whose states are asked for: k for the state that enters layer k, ``depth`` for the last one.

        Returns:
            float32 logits [n, vocab_size], and the states [R, hidden] by layer.
        """
        x = self._embedding[tokens].float()
        cosine, sine = (angles[0].float().contiguous() for angles in self._rotary(x[None], position[None]))
        logits = x.new_empty(len(wanted), self.vocab_size)
        states = {layer: x.clone() if layer == 0 else torch.empty_like(x) for layer in taps}
        behind = [states[layer].data_ptr() if layer in states else None for layer in range(1, self.depth + 1)]
        pointers = (c_void_p * self.depth)(*behind)
        threads = torch.get_num_threads()
        size = self._library.scratch_size(byref(self._decoder), len(tokens), threads)
        if self._scratch.numel() < size:
            self._scratch = torch.zeros(size)
        arrays = (sequence.contiguous(), position.contiguous(), cosine, sine, wanted.contiguous(), x, logits)
        addresses = [array.data_ptr() for array in arrays]
        taken = Pass(len(tokens), len(wanted), *addresses, addressof(pointers), self._scratch.data_ptr(), threads)
        self._library.forward(byref(self._decoder), byref(taken))
        return logits, states

    def products(self, rows: int) -> None:
        """The matrix products of a pass over ``rows`` rows with one row of logits, and nothing else: to be timed."""
        decoder = self._decoder
        x = torch.ones(rows, max(decoder.inner, decoder.hidden, decoder.heads * decoder.head_dim))
        logits, scratch = torch.empty(1, self.vocab_size), torch.empty(max(2 * decoder.inner, x.shape[1] * 3))
        taken = Pass(rows, 1, threads=torch.get_num_threads())
        taken.x, taken.logits, taken.scratch = x.data_ptr(), logits.data_ptr(), scratch.data_ptr()
        self._library.products(byref(decoder), byref(taken))

    @property
    def weight_bytes(self) -> int:
        """What a pass reads of weights."""
        return sum(held.numel() * held.element_size() for held in self._held)

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return Layer(
            self._stacked(attention.q_proj, attention.k_proj, attention.v_proj),
            self._stacked(attention.o_proj),
            self._stacked(mlp.gate_proj, mlp.up_proj),
            self._stacked(mlp.down_proj),
            self._floats(layer.input_layernorm.weight),
            self._floats(layer.post_attention_layernorm.weight),
            *(None if norm is None else self._floats(norm.weight) for norm in norms),
        )

    def _stacked(self, *layers: nn.Linear) -> Linear:
        """The outputs of several layers on one input; their own weights are released."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        taken = self._linear(
            torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None
        )
        for layer in layers:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return taken

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        (outputs, inputs), scale = weight.shape, None
        if self._kind == INT8:
            steps = (weight.float().abs().amax(1) / 127).clamp_min(1e-30)
            weight, scale = (weight.float() / steps[:, None]).round(), self._floats(steps)
        weight = F.pad(weight, (0, 0, 0, -outputs % PANEL)).to(_DTYPES[self._kind])
        panels = weight.view(-1, PANEL, inputs // LANES, LANES).transpose(1, 2)  # [outputs / 2, inputs / 8, 2, 8]
        offset = None if bias is None else self._floats(bias)
        return Linear(self._address(panels), scale, offset, outputs, inputs, self._kind)

    def _floats(self, values: Tensor) -> int:
        return self._address(values.detach().float())

    def _address(self, values: Tensor) -> int:
        held = values.contiguous()
        self._held.append(held)
        return held.data_ptr()
