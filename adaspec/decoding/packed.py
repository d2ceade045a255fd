"""Linear layers packed for a CPU, in a chosen precision.

A packed layer gives a row the same bits whatever pass it is in: with 1 or 512 rows, at any place, with 1 or 2 threads
(tried on AVX2 and AVX-512, ``tests/decoding/test_packed.py``). ``nn.Linear`` does not: its matrix product has three
kernels, for 1, for 2 and 3, and for more rows. With ``attention.attention`` the whole forward of a model is then exact
by row (of layers whose inner width is a multiple of 32: torch rounds the last few SiLUs of a tensor differently), and
a verified text is the text of plain decoding bit for bit; ``python -m adaspec.bench.linear`` measures what it costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

PRECISIONS = ("stock", "float32", "fp16", "int8")
CPU_PRECISIONS = (*PRECISIONS, "int4")  # int4 is computed in C alone, see ``native``


class Float32Linear(nn.Module):
    """Float32 throughout, the weight in oneDNN's blocked layout (prepared for 8 rows: for 1 row it would be another
    kernel than for more). With AVX-512 one row alone is still summed in another order than two or more, so it gets a
    second one. Exact by row; agrees with ``nn.Linear`` to 1e-6 of the largest output.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return _filled(self._product, x, int(x.numel() == self.in_features))

    def _product(self, rows: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return y


class Fp16Linear(nn.Module):
    """Float16 weights, float32 activations and sums; agrees with ``nn.Linear`` to 5e-4 of the largest output.

    FBGEMM sums 1 or 2 rows in another order than 3 to 6, and cuts 7, 14, 32, ... rows so that 1 or 2 are left over.
    Rows are filled up to a multiple of 3, where no count up to 400 leaves any: that makes it exact by row, at the
    price that one row costs what three do (SmolLM2: 1.35 times as long).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with _fbgemm():
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return _filled(self._product, x, -(x.numel() // self.in_features) % 3)

    def _product(self, rows: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self.packed)
        return y


class Int8Linear(nn.Module):
    """Integer weights per output channel, 8-bit activations scaled by each row's largest magnitude.

    A row is quantised alone and summed in integers, so it is exact by row. Dynamic quantisation as torch has it takes
    one scale for all rows. Before VNNI, pairs of products are summed in 16 bits: 255 * 64 * 2 fits, so weights have 7
    bits. Activations need the eighth more: the divergence from float32 falls to a third (SmolLM2 and Qwen2.5).
    Agrees with ``nn.Linear`` to 3e-2 of the largest output. A row with a NaN or an infinity means nothing.
    """

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


def _filled(product: Callable[[Tensor], Tensor], x: Tensor, missing: int) -> Tensor:
    """The product of ``x`` [..., in], computed with ``missing`` rows of zeros behind it that are cut off again."""
    if not missing:
        return product(x)
    rows = F.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, missing))
    return product(rows)[:-missing].view(*x.shape[:-1], -1)


_LAYERS = {"float32": Float32Linear, "fp16": Fp16Linear, "int8": Int8Linear}


def pack(module: nn.Module, precision: str) -> nn.Module:
    """Replaces every linear layer of ``module`` by a packed one, in place.

    The float weights are released. A head tied to the embedding is packed and the embedding keeps its own table. All
    that is not linear becomes float32. Packed layers are for inference: they have no gradient and no parameter.

    Args:
        module: a model of any floating dtype, or a linear layer (also `transformers`' transposed ``Conv1D``).
        precision: one of ``PRECISIONS``; "stock" leaves everything as it is.

    Returns:
        ``module``, or its packed form when it is itself a linear layer.

    Raises:
        ValueError: an unknown precision, one that this CPU has no kernel for, or a weight that is not on the CPU.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "stock":
        return module
    _check(precision)
    if _is_linear(module):
        return _packed(module, precision)
    done: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and _is_linear(child):
                if child not in done:
                    done[child] = _packed(child, precision)
                setattr(parent, name, done[child])
    return module.float()


def _check(precision: str) -> None:
    float32 = precision == "float32"
    known = torch._C._has_mkldnn if float32 else "fbgemm" in torch.backends.quantized.supported_engines
    if not known:
        raise ValueError(f"precision {precision!r} needs {'oneDNN' if float32 else 'FBGEMM'}, this torch lacks it")


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


@torch.no_grad()
def _packed(layer: nn.Linear | Conv1D, precision: str) -> nn.Module:
    weight, bias = layer.weight, layer.bias
    if weight.device.type != "cpu":
        raise ValueError(f"packed layers are for the CPU, got a weight on {weight.device}")
    weight = weight.T if isinstance(layer, Conv1D) else weight
    return _LAYERS[precision](weight.float().contiguous(), None if bias is None else bias.detach().float().clone())


def _quantized(weight: Tensor) -> Tensor:
    scale = (weight.abs().amax(1) / 64).clamp_min(1e-30).double()
    zero = torch.zeros(weight.shape[0], dtype=torch.int64)
    with warnings.catch_warnings():  # quantised tensors are announced to go one day; packing takes nothing else today
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*", category=UserWarning)
        return torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)


@contextmanager
def _fbgemm() -> Iterator[None]:
    """With VNNI torch would pack for oneDNN, which lacks the fused call."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
