"""How transformers comes to call an attention of ours."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask


class Formulation(Protocol):
    """Attends from queries [B, H, q, D] to keys [B, Hkv, K, D] and values [B, Hkv, K, Dv]; returns [B, q, H, Dv].

    ``mask``: [B or 1, 1, q, K], boolean (True: attend) or to be added; ``softcap``: of the scores, None for none.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None
    ) -> Tensor: ...


def register(name: str, formulation: Formulation) -> str:
    """Makes ``formulation`` known to transformers and returns ``name``, for ``attn_implementation``.

    The first one of a name stays: a compiled model is compiled anew when the function it calls is another one. What
    transformers then calls refuses, with a ValueError, dropout while training and a position bias or sinks.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,  # transformers hands every attention function what any of them may want
    ) -> tuple[Tensor, None]:
        for unknown in ("position_bias", "s_aux"):
            if kwargs.get(unknown) is not None:
                raise ValueError(f"attention {name!r} has no {unknown}; use another attn_implementation")
        if dropout and module.training:
            raise ValueError(f"attention {name!r} is for inference, got dropout {dropout}")
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            attention_mask = _full_mask(query, key, causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return formulation(query, key, value, attention_mask[..., : key.shape[2]], scale, softcap), None

    if name not in AttentionInterface():
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _full_mask(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """The mask of a whole sequence, [1, 1, q, K]: the queries [B, H, q, D] are the last of the keys' positions."""
    count, slots = query.shape[2], key.shape[2]
    mask = torch.ones(1, 1, count, slots, dtype=torch.bool, device=query.device)
    return mask.tril(slots - count) if causal else mask
