"""torch's ``scaled_dot_product_attention``, by signature and meaning, through portattn.

The rule kept here: a call that torch documents gives the same numbers here, or `Unsupported`
(dropout). ``is_causal`` is top-left aligned, as in torch, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from portattn.api import attention
from portattn.arguments import wrong
from portattn.contract import Unsupported

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | Sequence[str] = "auto",
) -> torch.Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (N, ..., Hq, L, E); any number of leading axes, which broadcast, also none.
        key: (N, ..., H, S, E).
        value: (N, ..., H, S, Ev).
        attn_mask: bool (True = attend) or float (added to the scores), broadcastable to
            (N, ..., Hq, L, S); also torch's `CausalBias` objects. Not together with ``is_causal``.
        dropout_p: 0; anything above is `portattn.Unsupported`.
        is_causal: query i sees keys 0..i.
        scale: None: 1/sqrt(E).
        enable_gqa: lets Hq be a multiple of H; without it H is Hq or 1. Keys and values are never
            expanded.
        backend: as in `portattn.attention`.

    Returns:
        (N, ..., Hq, L, Ev), differentiable. A row that may attend to nothing is 0.

    Raises:
        ValueError, TypeError, portattn.Unsupported: as `portattn.attention`.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(wrong("dropout_p", dropout_p, "a probability"))
    if dropout_p > 0.0:
        raise Unsupported(wrong("dropout_p", dropout_p, "0: no backend drops weights"))
    if attn_mask is not None and is_causal:
        raise ValueError(wrong("attn_mask", "a mask with is_causal=True", "one of the two"))
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four_axes(x, lead) for x in (query, key, value))
    if q.shape[1] != k.shape[1] and k.shape[1] != 1 and not enable_gqa:
        raise ValueError(
            wrong("key", f"{k.shape[1]} heads for {q.shape[1]} query heads", "enable_gqa=True")
        )
    options: dict[str, Any] = {"causal": "top_left" if is_causal else False}
    if isinstance(attn_mask, CausalBias):
        options["causal"] = _alignment(attn_mask, q.shape[2], k.shape[2])
    elif attn_mask is not None:
        scores = (*lead, q.shape[1], q.shape[2], k.shape[2])
        name = "mask" if attn_mask.dtype == torch.bool else "bias"
        options[name] = _broadcastable(attn_mask, scores)
    out = attention(q, k, v, layout="bhsd", scale=scale, backend=backend, **options)
    heads = q.shape[1:2] if query.dim() > 2 or key.dim() > 2 else ()
    result: torch.Tensor = out.reshape(*lead, *heads, q.shape[2], v.shape[3])
    return result


def _four_axes(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """``x`` as (B, H, S, D): leading axes broadcast and flattened, missing ones added."""
    if x.dim() < 2:
        raise ValueError(wrong("query, key, value", f"shape {tuple(x.shape)}", "two axes or more"))
    if x.dim() == 2:
        x = x[None]
    x = x.expand(*lead, *x.shape[-3:])
    return x if len(lead) == 1 else x.reshape(lead.numel(), *x.shape[-3:])


def _broadcastable(mask: torch.Tensor, scores: tuple[int, ...]) -> torch.Tensor:
    """``mask`` with at most four axes; it is expanded only where leading axes are flattened."""
    if mask.dim() > len(scores):
        raise ValueError(wrong("attn_mask", f"shape {tuple(mask.shape)}", f"one within {scores}"))
    lead = scores[:-3]
    if len(lead) < 2 or mask.dim() < 4:
        return mask
    outer = mask.dim() - 3
    mask = mask.expand(*lead[:-outer], *lead[-outer:], *mask.shape[-3:])
    return mask.reshape(-1, *mask.shape[-3:])


def _alignment(bias: Any, length_q: int, length_k: int) -> str:
    if (bias.seq_len_q, bias.seq_len_kv) != (length_q, length_k):
        raise ValueError(
            wrong(
                "attn_mask",
                f"a causal bias for {bias.seq_len_q} queries and {bias.seq_len_kv} keys",
                f"one for {length_q} and {length_k}",
            )
        )
    return "top_left" if bias.variant == CausalVariant.UPPER_LEFT else "bottom_right"
