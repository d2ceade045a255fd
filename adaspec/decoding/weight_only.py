"""Linear layers with 8-bit integer weights for a GPU: a copy of a target that reads half of its bytes.

Made by torchao where it can be imported; else weights are rounded per output channel to 8 bits and multiplied by
torch's own mixed kernel, or, where that refuses, made floating again for each product (slower than no copy at all).
Not yet run on a device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Int8Weights(nn.Module):
    """Weights [out, in] as 8-bit integers with a scale per output channel; activations and sums stay floating."""

    def __init__(self, layer: nn.Linear, *, mixed: bool) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-30)
        self.out_features, self.in_features = weight.shape
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", (weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = layer.bias
        self._mixed = mixed

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        if self._mixed:
            rows = x.reshape(-1, self.in_features)
            y = torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], self.out_features)
        else:
            y = nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


def quantize(module: nn.Module) -> str:
    """Gives every linear layer of ``module`` 8-bit weights, in place; returns what multiplies with them."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415 - not everyone has it
    except ImportError:
        pass
    else:
        quantize_(module, Int8WeightOnlyConfig())
        return "torchao"
    mixed = _has_mixed(next(module.parameters()))
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Weights(child, mixed=mixed))
    return "torch._weight_int8pack_mm" if mixed else "floating weights made for each product"


def _has_mixed(like: Tensor) -> bool:
    """Whether torch multiplies 8-bit weights with activations like these."""
    weight, scale = torch.ones(64, 64, dtype=torch.int8, device=like.device), like.new_ones(64)
    try:
        return bool((torch._weight_int8pack_mm(like.new_ones(2, 64), weight, scale) == 64).all())
    except RuntimeError:
        return False
