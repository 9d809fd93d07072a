"""The torch face: `portattn.attention` as a custom operator, with autograd and torch.compile.

The rule kept here: importing this package imports torch, and nothing else in portattn does. A call
whose tensors carry no gradient and belong to no trace never comes through the operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from portattn.arguments import (
    check_flag,
    check_layout,
    check_precision,
    check_scale,
    check_softcap,
    check_window,
    wrong,
)
from portattn.torch import ops

__all__ = ["attention_with_grad"]


def attention_with_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    deterministic: bool = False,
    precision: str = "ieee",
    backend: str | Sequence[str] = "auto",
    require_certified: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`portattn.attention` as the operator ``portattn::attention_forward``; same arguments.

    Returns:
        ``(out, lse)``, both differentiable with respect to q, k, v, bias and sinks. Between
        forward and backward only the inputs, ``out`` and ``lse`` are kept.

    Raises:
        TypeError, ValueError, portattn.Unsupported: as `portattn.attention`; a second derivative
            is `portattn.Unsupported`.
    """
    operands = {
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k,
        "block_table": block_table,
    }
    for name, x in {"q": q, "k": k, "v": v, **operands}.items():
        if not isinstance(x, torch.Tensor) and not (x is None and name in operands):
            raise TypeError(wrong(name, f"a {type(x).__qualname__}", "a torch tensor, as q is"))
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            wrong(
                "alibi_slopes",
                "a tensor that requires grad",
                "one that does not; slopes to be learned go in as bias=",
            )
        )
    # A schema holds plain numbers and strings: what it cannot say is refused here by name, with
    # the checks that every call goes through.
    check_layout(layout)
    check_precision(precision, "float32")
    left, right = check_window(window) or (None, None)
    values = (
        *operands.values(),
        layout,
        None if scale is None else check_scale(scale, 1),
        ops.encode_causal(causal),
        left,
        right,
        check_softcap(softcap),
        check_flag("deterministic", deterministic),
        precision,
        ops.encode_backend(backend),
        None if require_certified is None else check_flag("require_certified", require_certified),
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (q, k, v, bias, sinks)),
    )
    out, lse = ops.attention_forward(q, k, v, *values)
    return out, lse
