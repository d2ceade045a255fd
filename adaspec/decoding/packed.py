"""Linear layers packed for a CPU in a chosen precision; a row's result does not depend on the pass it is in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

PRECISIONS = ("stock", "float32", "fp16", "int8")


class Float32Linear(nn.Module):
    """A linear layer whose float32 weight lies in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class Fp16Linear(nn.Module):
    """A linear layer with float16 weights and float32 activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        missing = -count % 3
        if missing:
            rows = F.pad(rows, (0, 0, 0, missing))
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self.packed)
        return y[:count].reshape(*x.shape[:-1], self.out_features)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights per output channel and 8-bit activations scaled row by row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        with _fbgemm():
            self.packed = torch.ops.quantized.linear_prepack(_quantized(weight), None)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        scale = torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True).clamp_min_(1e-30)
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / scale, 1 / 127, 128, self.packed
        )
        y.mul_(scale)
        return y if self.bias is None else y.add_(self.bias)


_LAYERS = {"float32": Float32Linear, "fp16": Fp16Linear, "int8": Int8Linear}


def pack(module: nn.Module, precision: str) -> nn.Module:
    """Replaces every linear layer of ``module`` by a packed one, in place, and returns the module.

    Raises:
        ValueError: an unknown precision, or a weight that is not on the CPU.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "stock":
        return module
    if _is_linear(module):
        return _packed(module, precision)
    done: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _is_linear(child):
                if child not in done:
                    done[child] = _packed(child, precision)
                setattr(parent, name, done[child])
    return module.float()


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


@torch.no_grad()
def _packed(layer: nn.Module, precision: str) -> nn.Module:
    weight, bias = layer.weight, layer.bias
    if weight.device.type != "cpu":
        raise ValueError(f"packed layers are for the CPU, got a weight on {weight.device}")
    weight = weight.T if isinstance(layer, Conv1D) else weight
    return _LAYERS[precision](weight.float().contiguous(), None if bias is None else bias.detach().float())


def _quantized(weight: Tensor) -> Tensor:
    scale = (weight.abs().amax(1) / 64).clamp_min(1e-30).double()
    zero = torch.zeros(weight.shape[0], dtype=torch.int64)
    with warnings.catch_warnings():  # quantised tensors are announced to go one day; packing takes nothing else today
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*", category=UserWarning)
        return torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)


@contextmanager
def _fbgemm() -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
