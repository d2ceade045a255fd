"""Cached attention for a GPU: the heads that share keys and values become rows of one product. Runs on a CPU too.

`transformers` repeats keys and values for every head of a group when a pass has several queries and a mask, which for
a long cache moves more bytes than the weights have. Not yet run on a device.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from adaspec.decoding import attention_interface

NAME = "adaspec_grouped"


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attends from ``query`` to the cached ``key`` and ``value``; no host sync, every size known from the shapes.

    Args:
        query: [B, H, q, D].
        key: [B, Hkv, K, D], Hkv a divisor of H; may be a view of a longer cache.
        value: [B, Hkv, K, Dv].
        mask: [B, 1, q, K] bool (True: attend) or to be added.
        scale: the factor of the scores.

    Returns:
        [B, q, H, Dv].
    """
    (batch, heads, count, width), shared = query.shape, key.shape[1]
    group = heads // shared
    rows = query.reshape(batch, shared, group * count, width)
    masks = mask.expand(-1, group, -1, -1).reshape(mask.shape[0], 1, group * count, -1) if group > 1 else mask
    mixed = F.scaled_dot_product_attention(rows, key, value, attn_mask=masks, scale=scale)
    return mixed.reshape(batch, heads, count, -1).transpose(1, 2)


def register() -> str:
    """Makes ``attention`` known to transformers and returns the name for ``attn_implementation``; may be repeated."""
    return attention_interface.register(NAME, _uncapped)


def _uncapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    if softcap is not None:
        raise ValueError(f"attention {NAME!r} has no softcap; use another attn_implementation")
    return attention(query, key, value, mask, scale)
