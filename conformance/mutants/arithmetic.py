"""Defects of the arithmetic: accumulators, storage, rounding, scale."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, State, Tiled

HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def tf32(x: Array) -> Array:
    """float32 rounded to ten bits of mantissa, ties to even."""
    if x.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), bits.astype(np.uint32).view(np.float32), x)


def truncated(x: Array, dtype: Any) -> Array:
    """``x`` in ``dtype``, rounded towards zero."""
    near = x.astype(dtype)
    away = np.abs(near.astype(x.dtype)) > np.abs(x)
    return np.where(away, np.nextafter(near, np.zeros_like(near)), near)


# ---- accumulators --------------------------------------------------------------------------------
@seeded(0, "F12 F01 F10")
class AccumulatorInStorage(Tiled):
    """The accumulator is kept in the input's dtype between tiles."""

    def fold(self, old: State, new: State) -> State:
        both = super().fold(old, new)
        return State(self.kept(both.acc), both.total, both.top)

    def kept(self, x: Array) -> Array:
        return self.stored(x, ml_dtypes.bfloat16) if x.dtype == np.float32 else x


@seeded(0, "P03 F10 F12")
class SumInStorage(Tiled):
    """The row sum is accumulated in the input's dtype (BUG-052)."""

    def row_sum(self, p: Array, dtype: Any) -> Array:
        return np.asarray(p.astype(dtype).cumsum(-1)[..., -1:].astype(p.dtype))


@seeded(0, "F01")
class ProductsInTf32(Tiled):
    """float32 operands are rounded to tf32."""

    def operand(self, x: Array) -> Array:
        return tf32(super().operand(x))


@seeded(0, "F01 F09")
class WeightsInTf32(Tiled):
    """float32 weights are rounded to tf32 for the second product alone."""

    def stored(self, p: Array, dtype: Any) -> Array:
        return tf32(super().stored(p, dtype))


@seeded(0, "F01")
class Float32InBfloat16(Tiled):
    """float32 operands are rounded to bfloat16."""

    def operand(self, x: Array) -> Array:
        wide = super().operand(x)
        return wide if x.dtype != np.float32 else wide.astype(ml_dtypes.bfloat16).astype(np.float32)


@seeded(0, "P04 F01")
class Float64InFloat32(Tiled):
    """float64 input is computed in float32."""

    def operand(self, x: Array) -> Array:
        return super().operand(x).astype(np.float32).astype(self.wide(x))


# ---- storage -------------------------------------------------------------------------------------
@seeded(0, "F01")
class OutputTruncated(Tiled):
    """The output is cut off instead of rounded."""

    def rounded(self, x: Array, dtype: Any) -> Array:
        return truncated(x, dtype) if dtype in HALF else super().rounded(x, dtype)


@seeded(0, "F09 F10 F12 F01")
class WeightsTruncated(Tiled):
    """P is cut off instead of rounded on its way to the second product."""

    def stored(self, p: Array, dtype: Any) -> Array:
        return truncated(p, dtype).astype(p.dtype) if dtype in HALF else super().stored(p, dtype)


@seeded(0, "F01 X01")
class WeightsOverflow(Tiled):
    """P is scaled by 2^16 for its storage, which float16 does not hold."""

    def stored(self, p: Array, dtype: Any) -> Array:
        return super().stored(p * 65536, dtype) / 65536


@seeded(0, "F03 F04 F01")
class ScoresInStorage(Tiled):
    """Scores are stored in the input's dtype before the softmax."""

    def product(self, head: Head, q: Array, k: Array) -> Array:
        return self.stored(super().product(head, q, k), head.q.dtype)


@seeded(0, "F03 F04 F01")
class ScaledQueriesInStorage(Tiled):
    """The scale is folded into q, which is rounded to its dtype again."""

    def product(self, head: Head, q: Array, k: Array) -> Array:
        scaled = self.stored(q * q.dtype.type(self.scale(head)), head.q.dtype)
        return scaled @ k.T


@seeded(0, "F01")
class OutputInFloat32(Tiled):
    """The output of half inputs comes back in float32."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, np.float32 if dtype in HALF else dtype)


# ---- scale ---------------------------------------------------------------------------------------
@seeded(0, "F16")
class ScaleOfTheValues(Tiled):
    """The default scale comes from the head dim of v."""

    def scale(self, head: Head) -> float:
        default = head.problem.head_dim**-0.5
        given = head.problem.scale
        return given if given != default else float(head.problem.head_dim_v**-0.5)


@seeded(0, "F15")
class ScaleIgnored(Tiled):
    """A given scale is ignored."""

    def scale(self, head: Head) -> float:
        return float(head.problem.head_dim**-0.5)


@seeded(0, "F15")
class ScaleZeroIsNone(Tiled):
    """scale=0 counts as not given."""

    def scale(self, head: Head) -> float:
        return head.problem.scale or float(head.problem.head_dim**-0.5)


@seeded(0, "F15")
class ScaleWithoutSign(Tiled):
    """A negative scale loses its sign."""

    def scale(self, head: Head) -> float:
        return abs(head.problem.scale)


@seeded(0, "F15 F16 H01")
class ScaleOf64(Tiled):
    """The default scale is that of head dim 64, whatever the head dim."""

    def scale(self, head: Head) -> float:
        given = head.problem.scale
        return 0.125 if given == head.problem.head_dim**-0.5 else given
