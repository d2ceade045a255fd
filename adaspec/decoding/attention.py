"""Cached attention whose rows come out bit for bit the same whatever pass, batch and cache length they are in.

``F.scaled_dot_product_attention`` gives one row other last bits for 1 and for 5 queries, and for 64 and for 67 key
slots. Four properties of a CPU's matrix product and softmax (MKL, AVX2 and AVX-512, 1 and 2 threads, tried) allow a
formulation without that flaw, and folding the heads of a group into the rows makes it no slower:

* a product of a multiple of 4 rows uses one micro-kernel, so a row does not see how many rows there are;
* a column of ``q k^T`` does not see how many columns there are, from 12 columns on;
* ``softmax`` does not see appended zeros, from 8 columns on (16 where vectors hold 16 numbers);
* ``p v`` is summed in slot order in blocks of 384 slots, so appended slots of probability 0 change nothing; only a
  sum over 193 to 383 slots is cut in two halves, so that one is filled up to 384.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from adaspec.decoding import attention_interface

NAME = "adaspec_rows"
_ROWS = 4
_MIN_SLOTS = 16
_BLOCK, _WHOLE = 192, 384
_QUERIES = 64  # queries at a time, which bounds the memory of a long prefill


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Attends from ``query`` to the cached ``key`` and ``value``, each row bitwise independent of all others.

    Args:
        query: [B, H, q, D].
        key: [B, Hkv, K, D], Hkv a divisor of H; may be a view of a longer cache.
        value: [B, Hkv, K, Dv]; slots that are masked must hold finite numbers.
        mask: [B or 1, 1, q, K]; boolean (True: attend) or to be added.
        scale: the factor of the scores.
        softcap: scores are capped to ``softcap * tanh(scores / softcap)`` when given.

    Returns:
        [B, q, H * Dv], contiguous.
    """
    missing = _MIN_SLOTS - key.shape[2]
    if missing > 0:
        key, value = F.pad(key, (0, 0, 0, missing)), F.pad(value, (0, 0, 0, missing))
        mask = F.pad(mask, (0, missing), value=False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
    if query.shape[2] <= _QUERIES:
        return _attend(query, key, value, mask, scale, softcap)
    parts = zip(torch.split(query, _QUERIES, 2), torch.split(mask, _QUERIES, 2))
    return torch.cat([_attend(rows, key, value, masks, scale, softcap) for rows, masks in parts], 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    batch, heads, count, width = query.shape
    slots = key.shape[2]
    rows = (query * scale).reshape(key.shape[0] * key.shape[1], -1, width)  # [B * Hkv, G * q, D]
    used = rows.shape[1]
    if used % _ROWS:
        rows = F.pad(rows, (0, 0, 0, -used % _ROWS))
    padded = torch.bmm(rows, key.reshape(-1, slots, width).transpose(1, 2))  # [B * Hkv, G * q, K]
    scores = padded[:, :used].view(batch, -1, heads // key.shape[1], count, slots)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask[:, :, None], torch.finfo(scores.dtype).min)
    else:
        scores.add_(mask[:, :, None])
    mixed = _mix(padded.softmax(-1), value.reshape(-1, slots, value.shape[-1]))[:, :used]  # [B * Hkv, G * q, Dv]
    return mixed.reshape(batch, heads, count, -1).transpose(1, 2).reshape(batch, count, -1)


def _mix(law: Tensor, value: Tensor) -> Tensor:
    missing = _WHOLE - value.shape[1]
    if 0 < missing < _WHOLE - _BLOCK:
        law, value = F.pad(law, (0, missing)), F.pad(value, (0, 0, 0, missing))
    return torch.bmm(law, value)


def register() -> str:
    """Makes ``attention`` known to transformers and returns the name for ``attn_implementation``; may be repeated."""
    return attention_interface.register(NAME, _by_head)


def _by_head(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    mixed = attention(query, key, value, mask, scale, softcap)
    return mixed.view(*mixed.shape[:2], query.shape[1], -1)
