"""portattn as an attention implementation of transformers.

    import portattn.compat.transformers as face
    face.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="portattn")

The rule kept here: a model computes what it computes with ``sdpa``, and a mask costs memory linear
in the keys wherever its pattern is causal with padding. A causal pattern therefore crosses from the
mask interface to the attention in one of three forms, each complete in itself:

- None: causal, the last query at the last key (bottom-right), nothing hidden. Prefill, a chunk of
  a prefill behind a cache, and one decoded token all look like this.
- bool (B, L): causal, the last query at key L - 1; keys from L on are not written yet (a static
  cache), and a False marks padding.
- bool (B, 1, Sq, Sk): every pair said. Windows that reach the end of what they see, packed
  sequences, overlays, and everything that is traced by a compiler.

Written for the mask interface of transformers 5 (``q_length`` and ``q_offset``); `register` refuses
an older one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

from portattn.api import attention
from portattn.arguments import wrong
from portattn.contract import Unsupported

__all__ = ["attention_forward", "attention_mask", "register"]

# What a model may hand to the attention that would change the result and is not mapped below.
_REFUSED = {
    "block_table": "no paged cache of transformers",
    "cache": "no paged cache of transformers",
    "head_mask": "None",
    "block_indices": "no sparse attention (the model hands sdpa and eager a mask in its place)",
    "indices": "no sparse attention (the model hands sdpa and eager a mask in its place)",
}


def register(name: str = "portattn") -> None:
    """Make ``attn_implementation=name`` known to transformers, its attention and its masks.

    Raises `ImportError` where the installed transformers has another mask interface.
    """
    if not {"q_length", "q_offset"} <= set(inspect.signature(sdpa_mask).parameters):
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} has an older mask interface (no q_length and "
            "q_offset in sdpa_mask); update transformers"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask interface: None, bool (B, L) or bool (B, 1, Sq, Sk), as the module says.

    Args:
        q_length, kv_length: how many queries and keys the attention will see.
        q_offset, kv_offset: position of the first of each.
        attention_mask: bool (B, length), False = padding.
        local_size: of a sliding window or a chunk, in tokens.
        allow_is_causal_skip: the pattern is causal, but for padding and ``local_size``.
        allow_is_bidirectional_skip: the pattern is full, but for padding and ``local_size``.
    """
    if allow_is_causal_skip and not is_tracing(attention_mask) and not is_tracing(q_offset):
        # queries end at position `end`; their keys are the first `used` of those there are
        end = int(q_offset) + q_length
        used = end - kv_offset
        # a window or a chunk that holds everything so far hides nothing
        local = local_size is not None and (kv_offset > 0 or end > local_size)
        if not local and q_length <= used <= kv_length:
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            if padding is not None:
                padding = padding[:, kv_offset:end]
            whole = padding is None or bool(padding.all())
            if whole and used == kv_length:
                return None
            # generate() may pass the result in again as a padding mask, which counts from key 0
            if kv_offset == 0:
                if padding is None:
                    padding = torch.ones(
                        (batch_size, used), dtype=torch.bool, device=kwargs.get("device", "cpu")
                    )
                return padding
    mask: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )
    return mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface.

    Args:
        query: (B, Hq, Sq, D).
        key, value: (B, Hk, Sk, D) and (B, Hk, Sk, Dv); never expanded to Hq heads.
        attention_mask: what `attention_mask` made, or a (B, 1 or Hq, Sq, Sk) mask of the model's
            own: bool (True = attend) or float (added).
        dropout: 0; a module in training with dropout is `portattn.Unsupported`.
        is_causal: where there is no mask; None: the module's ``is_causal``, else True.
        sliding_window: tokens that a query sees, itself included, where there is no mask.
        softcap, s_aux, position_bias: soft cap, attention sinks (Hq,), additive bias.
        cu_seq_lens_q, cu_seq_lens_k: (N + 1,), sequences packed along the one row of a batch.

    Returns:
        ((B, Sq, Hq, Dv) contiguous, None): weights are never formed.
    """
    _refuse(dropout, kwargs)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    if s_aux is not None:
        options["sinks"] = _as_operand(s_aux, query)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    bias = position_bias
    mask = attention_mask
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
    if mask is None:
        options |= _without_mask(query, key, is_causal, sliding_window, packed)
    elif mask.dtype == torch.bool and mask.dim() == 2:
        key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
        if bias is not None:
            bias = bias[..., : mask.shape[1]]
        mask = mask[:, None, None]
        options["causal"] = "bottom_right"
    elif mask.dim() != 4:
        raise TypeError(
            wrong(
                "attention_mask",
                f"{mask.dtype} {tuple(mask.shape)}",
                "bool (B, keys) from this module's mask interface, or four axes",
            )
        )
    elif mask.is_floating_point():
        bias, mask = mask if bias is None else bias + mask, None
    if bias is not None:
        options["bias"] = _as_operand(bias, query)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if packed:
        if mask is None and bias is None:
            return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, options), None
        together = _same_sequence(cu_seq_lens_q, cu_seq_lens_k, q.shape[1], k.shape[1])
        mask = together if mask is None else mask & together
    out = attention(q, k, v, mask=mask, **options)
    return out, None


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout > 0.0:
        raise Unsupported(
            wrong("dropout", dropout, "0 (model.eval(), or attention_dropout=0 in the config)")
        )
    if kwargs.get("output_attentions"):
        raise Unsupported(
            wrong("output_attentions", True, "False: the weights are never formed; eager has them")
        )
    for name, want in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise Unsupported(wrong(name, "a value", want))


def _without_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool,
    sliding_window: int | None,
    packed: bool,
) -> dict[str, Any]:
    """Causality and window where the mask interface had nothing to add to them."""
    if is_causal and not packed and query.shape[2] > key.shape[2]:
        raise Unsupported(
            wrong(
                "is_causal",
                f"True for {query.shape[2]} queries and {key.shape[2]} keys",
                "at least as many keys, or is_causal=False (cross-attention)",
            )
        )
    options: dict[str, Any] = {"causal": "bottom_right" if is_causal else False}
    if sliding_window is not None:
        # the count of tokens includes the query's own; the right side is causal's business
        reach = sliding_window - 1
        options["window"] = (reach, None if is_causal else reach)
    return options


def _as_operand(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A bias or sinks of another float dtype in one that the contract takes: the query's."""
    if x.dtype in (query.dtype, torch.float32) or not x.is_floating_point():
        return x
    return x.to(query.dtype)


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, options: dict[str, Any]
) -> torch.Tensor:
    """Sequences behind one another in the only row of the batch."""
    if q.shape[0] != 1:
        raise Unsupported(wrong("cu_seq_lens_q", f"a batch of {q.shape[0]}", "a batch of 1"))
    out: torch.Tensor = attention(
        q[0],
        k[0],
        v[0],
        layout="thd",
        cu_seqlens_q=cu_q.to(torch.int32),
        cu_seqlens_k=cu_k.to(torch.int32),
        **options,
    )
    return out[None]


def _same_sequence(cu_q: Any, cu_k: Any, length_q: int, length_k: int) -> torch.Tensor:
    """bool (Sq, Sk): query and key lie in one packed sequence."""

    def sequence(cu: torch.Tensor, length: int) -> torch.Tensor:
        return torch.bucketize(torch.arange(length, device=cu.device), cu[1:], right=True)

    return sequence(cu_q, length_q)[:, None] == sequence(cu_k, length_k)[None]
