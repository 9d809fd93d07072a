"""flash-attention 2's functions, by signature and meaning, through portattn.

The rule kept here: what flash-attention's documentation promises holds here, or the call is
refused with `Unsupported` (dropout, rotary embedding inside the call, a backward pass through a
cache). One number differs on purpose: the log-sum-exp of a row that sees no key is -inf here, as
everywhere in portattn, and +inf there.

Causal masks and windows are bottom-right aligned, in flash-attention and here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import attention
from portattn.arguments import wrong
from portattn.contract import Unsupported

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_Backend = str | Sequence[str]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: _Backend = "auto",
) -> Any:
    """Drop-in for ``flash_attn.flash_attn_func``.

    Args:
        q: (B, Sq, Hq, D).
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv); Hq a multiple of Hk.
        dropout_p: 0; anything above is `portattn.Unsupported`.
        softmax_scale: None: 1/sqrt(D).
        causal: bottom-right aligned where Sq and Sk differ.
        window_size: (left, right) keys; -1: unlimited.
        softcap: 0: none.
        alibi_slopes: float32, (Hq,) or (B, Hq).
        deterministic: a backward pass that repeats bitwise.
        return_attn_probs: also return the log-sum-exp.
        backend: as in `portattn.attention`.

    Returns:
        out (B, Sq, Hq, Dv), differentiable; with ``return_attn_probs`` (out, lse, None): lse is
        (B, Hq, Sq), and the dropout pattern, which flash-attention gives third, does not exist.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    out, lse = attention(
        q,
        k,
        v,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=True,
        backend=backend,
        **options,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    backend: _Backend = "auto",
) -> Any:
    """Drop-in for ``flash_attn.flash_attn_varlen_func``.

    Args:
        q: (Tq, Hq, D), all sequences behind one another.
        k, v: (Tk, Hk, D), or with ``block_table`` (num_blocks, block_size, Hk, D).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), where each sequence starts; with
            ``block_table`` the latter tells the lengths alone.
        max_seqlen_q, max_seqlen_k: the longest lengths, or more. They steer flash-attention's
            launch; here they are checked where the lengths lie in host memory.
        block_table: int32 (B, max_blocks).

    The other arguments and the result are those of `flash_attn_func`, with out (Tq, Hq, Dv) and
    lse (Hq, Tq).
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    for name, cu, longest in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        if cu.device.type == "cpu" and cu.numel() > 1 and int(cu.diff().max()) > longest:
            want = f"at least {int(cu.diff().max())}, the longest"
            raise ValueError(wrong(f"max_seqlen_{name}", longest, want))
    if block_table is None:
        options["cu_seqlens_k"] = cu_seqlens_k
    else:
        options["block_table"] = block_table
        options["seqused_k"] = cu_seqlens_k.diff().to(torch.int32)
    out, lse = attention(
        q,
        k,
        v,
        layout="thd",
        cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=True,
        backend=backend,
        **options,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    backend: _Backend = "auto",
) -> Any:
    """Drop-in for ``flash_attn.flash_attn_with_kvcache``.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (B_cache, S_cache, Hk, D), or with ``block_table`` (num_blocks,
            block_size, Hk, D).
        k, v: (B, S_new, Hk, D), written into the cache in place at ``cache_seqlens`` before the
            attention; both or neither.
        rotary_cos, rotary_sin: refused with `portattn.Unsupported`; rotate q and k beforehand.
        cache_seqlens: keys in the cache of each sequence before this call, an int or int32 (B,);
            None: all of S_cache.
        cache_batch_idx: int (B,), the cache row of each sequence, no copy is made of it.
        cache_leftpad: int (B,), how many keys at the start of each row are padding.
        block_table: int32 (B, max_blocks).
        num_splits: 0 or more; a hint about flash-attention's schedule, which has no meaning for
            the result: each backend plans its own.
        rotary_interleaved: has no meaning without rotary_cos.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out (B, Sq, Hq, Dv), or (out, lse) with lse (B, Hq, Sq). Not differentiable: a call that
        autograd would record is refused.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise Unsupported(wrong("rotary_cos", "a tensor", "None; rotate q and k before the call"))
    if num_splits < 0:
        raise ValueError(wrong("num_splits", num_splits, "0 or more"))
    tensors = (q, k_cache, v_cache, k, v)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise Unsupported(
            wrong("q", "a call that autograd records", "torch.no_grad(): a cache has no gradient")
        )
    options = _options(0.0, softmax_scale, causal, window_size, softcap)
    batch = q.shape[0]
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(wrong("cache_batch_idx", "a tensor with block_table", "one of the two"))
    if cache_leftpad is not None:
        if block_table is not None:
            raise Unsupported(wrong("cache_leftpad", "a tensor with block_table", "one of the two"))
        position = torch.arange(k_cache.shape[1], device=q.device)
        options["mask"] = (position >= cache_leftpad[:, None])[:, None, None]
    if cache_batch_idx is not None:
        # a row of the cache is a block as long as the cache: the indirection without a copy
        block_table = cache_batch_idx.to(torch.int32)[:, None]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    used = _lengths(cache_seqlens, batch, capacity, q.device)
    if k is not None or v is not None:
        if k is None or v is None:
            raise ValueError(wrong("k" if k is None else "v", None, "both k and v, or neither"))
        if cache_seqlens is None:
            raise ValueError(wrong("cache_seqlens", None, "where k and v go in the cache"))
        used = _append(k_cache, v_cache, k, v, used, block_table, capacity)
    out, lse = attention(
        q,
        k_cache,
        v_cache,
        alibi_slopes=alibi_slopes,
        seqused_k=used,
        block_table=block_table,
        return_lse=True,
        backend=backend,
        **options,
    )
    return (out, lse) if return_softmax_lse else out


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> dict[str, Any]:
    """The keywords of `portattn.attention` that all three functions share."""
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(wrong("dropout_p", dropout_p, "a probability"))
    if dropout_p > 0.0:
        raise Unsupported(wrong("dropout_p", dropout_p, "0: no backend drops weights"))
    if len(window_size) != 2 or any(side < -1 for side in window_size):
        raise ValueError(wrong("window_size", window_size, "(left, right), -1 for unlimited"))
    left, right = (None if side == -1 else side for side in window_size)
    return {
        "scale": softmax_scale,
        "causal": "bottom_right" if causal else False,
        "window": (left, right),
        "softcap": None if softcap == 0.0 else softcap,
    }


def _lengths(
    seqlens: int | torch.Tensor | None, batch: int, capacity: int, device: torch.device
) -> torch.Tensor:
    if isinstance(seqlens, torch.Tensor):
        return seqlens.to(torch.int32)
    length = capacity if seqlens is None else seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def _append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    used: torch.Tensor,
    block_table: torch.Tensor | None,
    capacity: int,
) -> torch.Tensor:
    """Write k and v behind the ``used`` keys of each sequence; the lengths afterwards."""
    after = used + k.shape[1]
    if used.device.type == "cpu" and used.numel() and int(after.max()) > capacity:
        got = f"{k.shape[1]} keys for a cache of {capacity}"
        raise ValueError(wrong("k", got, "keys that fit behind those in use"))
    position = used[:, None].long() + torch.arange(k.shape[1], device=k.device)
    if block_table is None:
        row = torch.arange(k.shape[0], device=k.device)[:, None]
    else:
        size = k_cache.shape[1]
        row = block_table.long().gather(1, position // size)
        position = position % size
    k_cache[row, position] = k
    v_cache[row, position] = v
    return after
