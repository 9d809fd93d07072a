"""Joining partial results over disjoint key sets.

The rule kept here: an empty part (out 0, LSE -inf) is the identity, and two empty parts are empty;
no NaN arises from -inf minus -inf. Written in operations that NumPy, torch and CuPy share, so that
it runs where the arrays are, and torch's autograd follows it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from portattn.arguments import DTYPE_BYTES, check_layout, check_rank, check_result, wrong
from portattn.arrays import Array, as_numpy, finish, recognise


def merge(outs: Sequence[Any], lses: Sequence[Any], layout: str) -> tuple[Any, Any]:
    """See `portattn.merge`."""
    check_layout(layout)
    if not isinstance(outs, Sequence) or not isinstance(lses, Sequence):
        raise TypeError(wrong("outs, lses", "no sequences", "a list of arrays each"))
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            wrong("outs, lses", f"{len(outs)} and {len(lses)} parts", "as many of each, at least 1")
        )
    parts = [recognise(x, f"outs[{i}]") for i, x in enumerate(outs)]
    sums = [recognise(x, f"lses[{i}]") for i, x in enumerate(lses)]
    first = parts[0]
    if first.dtype not in DTYPE_BYTES:
        raise TypeError(
            wrong("outs[0]", f"dtype {first.dtype}", f"one of {', '.join(DTYPE_BYTES)}")
        )
    check_rank("outs[0]", first, 3 if layout == "thd" else 4, layout)
    rows = _lse_shape(first.shape, layout)
    for i, (part, lse) in enumerate(zip(parts, sums, strict=True)):
        check_result(f"outs[{i}]", part, first, first.shape, first.dtype)
        accumulator = "float64" if first.dtype == "float64" else "float32"
        check_result(f"lses[{i}]", lse, first, rows, accumulator)
    if first.family in ("torch", "cupy"):
        xp = sys.modules[first.family]
        return _join(xp, [p.source for p in parts], [s.source for s in sums], layout)
    if first.device != "cpu":
        raise TypeError(
            wrong("outs[0]", f"an array of {first.family} on {first.device}", "torch or CuPy there")
        )
    import numpy

    with numpy.errstate(all="ignore"):  # NaN and inf in a part are the caller's, not a fault here
        out, lse = _join(numpy, [as_numpy(p) for p in parts], [as_numpy(s) for s in sums], layout)
    return _handed_back(out, first), _handed_back(lse, first)


def _join(xp: Any, outs: list[Any], lses: list[Any], layout: str) -> tuple[Any, Any]:
    stacked = xp.stack(lses)
    # amax for torch: the gradient of the maximum cancels, but its ties must not pick one at random
    top = xp.amax(stacked.detach() if xp.__name__ == "torch" else stacked, 0)
    # A row that is empty in every part has no maximum to subtract. NaN stays NaN.
    base = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    weights = [xp.exp(lse - base) for lse in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    safe = xp.where(total == 0, xp.ones_like(total), total)
    joined = None
    for out, weight in zip(outs, weights, strict=True):
        share = _as_rows(xp, weight / safe, layout)
        term = xp.where(share == 0, xp.zeros_like(share), share * _wide(xp, out, share))
        joined = term if joined is None else joined + term
    lse = xp.where(total == 0, xp.full_like(total, -xp.inf), base + xp.log(safe))
    assert joined is not None
    dtype = outs[0].dtype
    return (joined.to(dtype) if xp.__name__ == "torch" else joined.astype(dtype)), lse


def _wide(xp: Any, out: Any, like: Any) -> Any:
    return out.to(like.dtype) if xp.__name__ == "torch" else out.astype(like.dtype)


def _as_rows(xp: Any, weight: Any, layout: str) -> Any:
    """(B, H, S) or (H, T) weights on the axes of ``out``, one for a row."""
    if layout == "bhsd":
        return weight[..., None]
    if layout == "thd":
        return weight.T[..., None]
    moved = weight.transpose(1, 2) if xp.__name__ == "torch" else weight.transpose(0, 2, 1)
    return moved[..., None]


def _lse_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    if layout == "thd":
        return (shape[1], shape[0])
    return shape[:3] if layout == "bhsd" else (shape[0], shape[2], shape[1])


def _handed_back(result: Any, like: Array) -> Any:
    return finish(recognise(result, "result"), like)
