"""Defects of what a row may see, and of what changes its scores: alignment, window, mask, softcap,
bias, ALiBi, sinks, poison."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, State, Tiled
from portattn.problem import Problem


# ---- causal --------------------------------------------------------------------------------------
@seeded(0, "K03 X04")
class CausalWithoutTheDiagonal(Tiled):
    """A row does not see its own key."""

    def causal(self, head: Head, i: Array, j: Array) -> Array:
        return super().causal(head, i, j + 1)


@seeded(0, "K03 X04")
class CausalOneTooFar(Tiled):
    """A row sees the key after its own."""

    def causal(self, head: Head, i: Array, j: Array) -> Array:
        return super().causal(head, i, j - 1)

    def reach(self, head: Head, i0: int) -> tuple[int, int]:
        low, high = super().reach(head, i0)
        return low, min(high + 1, head.n_k)


@seeded(0, "K03 X04")
class CausalByFourRows(Tiled):
    """The causal limit is applied once for four rows (BUG-009)."""

    def causal(self, head: Head, i: Array, j: Array) -> Array:
        return super().causal(head, i // 4 * 4 + 3, j)


@seeded(0, "K03 X04")
class CausalIgnored(Tiled):
    """causal= has no effect on the scores."""

    def causal(self, head: Head, i: Array, j: Array) -> Array:
        return np.ones((len(i), j.shape[1]), bool)


@seeded(0, "K02")
class AlwaysTopLeft(Tiled):
    """The alignment is top-left whatever was asked for (BUG-007)."""

    def diagonal(self, head: Head) -> int:
        return 0


@seeded(0, "K01")
class AlwaysBottomRight(Tiled):
    """The alignment is bottom-right whatever was asked for (BUG-007)."""

    def diagonal(self, head: Head) -> int:
        return head.n_k - head.n_q


@seeded(0, "K02")
class BottomRightOffByOne(Tiled):
    """The bottom-right diagonal lies one key too far left."""

    def diagonal(self, head: Head) -> int:
        aligned = super().diagonal(head)
        return aligned - 1 if aligned else 0


@seeded(0, "X04 K03 F17")
class DiagonalTileSkipped(Tiled):
    """Causal rows stop before the tile that the diagonal cuts."""

    def reach(self, head: Head, i0: int) -> tuple[int, int]:
        low, high = super().reach(head, i0)
        return low, high // self.block_k * self.block_k if head.problem.causal and i0 else high


@seeded(0, "K02 K03")
class CausalReachOfTheFirstRow(Tiled):
    """How far a tile must look is computed for its first row, not its last."""

    def reach(self, head: Head, i0: int) -> tuple[int, int]:
        low, high = super().reach(head, i0)
        return low, min(high, i0 + 1 + self.diagonal(head)) if head.problem.causal else high


# ---- window --------------------------------------------------------------------------------------
class WindowSides(Tiled):
    """Another (left, right) than was asked for; not a mutant itself."""

    def sides(self, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        return left, right

    def heads(self, problem: Problem, *given: Any) -> Iterator[Head]:
        if problem.window is not None:
            problem = replace(problem, window=self.sides(*problem.window))
        return super().heads(problem, *given)


@seeded(0, "K04")
class WindowLeftExclusive(WindowSides):
    """The window's left edge is not part of it (BUG-058)."""

    def sides(self, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        return left and left - 1, right


@seeded(0, "K04")
class WindowRightExclusive(WindowSides):
    """The window's right edge is not part of it."""

    def sides(self, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        return left, right and right - 1


@seeded(0, "K04")
class WindowOneTooWide(WindowSides):
    """The window's left edge lies one key too far out (BUG-058)."""

    def sides(self, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        return None if left is None else left + 1, right


@seeded(0, "K04")
class WindowLeftIgnored(WindowSides):
    """The window's left side is ignored."""

    def sides(self, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        return None, right


@seeded(0, "K04")
class WindowRightIgnored(WindowSides):
    """The window's right side is ignored: without causal every row sees its future (BUG-056)."""

    def sides(self, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        return left, None


@seeded(0, "K04")
class WindowZeroUnlimited(WindowSides):
    """A side of 0 counts as not given."""

    def sides(self, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        return left or None, right or None


@seeded(0, "K05")
class WindowWithoutMaskIgnored(Tiled):
    """The window counts only where a mask is given as well (BUG-057)."""

    def window(self, head: Head, i: Array, j: Array) -> Array:
        seen = super().window(head, i, j)
        return seen if head.mask is not None else np.ones_like(seen)

    def reach(self, head: Head, i0: int) -> tuple[int, int]:
        return super().reach(head, i0) if head.mask is not None else (0, head.n_k)


@seeded(0, "K04")
class WindowOnTheTopLeft(Tiled):
    """The window is measured from the top-left, the causal limit as asked for."""

    def window(self, head: Head, i: Array, j: Array) -> Array:
        return super().window(head, i - self.diagonal(head), j)


@seeded(0, "K04")
class WindowFirstTileSkipped(Tiled):
    """The tile that the window's left edge cuts is not visited."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        low, _ = self.reach(head, i0)
        return [j0 for j0 in super().key_tiles(head, i0) if j0 >= low]


# ---- mask ----------------------------------------------------------------------------------------
class OtherMask(Tiled):
    """Another mask than was given; not a mutant itself."""

    def other(self, mask: Array) -> Array:
        return mask

    def visible(self, head: Head, i0: int, j0: int) -> Array:
        if head.mask is not None:
            head = replace(head, mask=self.other(head.mask))
        return super().visible(head, i0, j0)


@seeded(0, "K06")
class MaskIgnored(OtherMask):
    """mask= has no effect."""

    def other(self, mask: Array) -> Array:
        return np.ones_like(mask)


@seeded(0, "K06")
class MaskInverted(OtherMask):
    """True hides."""

    def other(self, mask: Array) -> Array:
        return ~mask


@seeded(0, "K06")
class MaskOfTheFirstHead(Tiled):
    """Every head takes the first head's mask and bias."""

    def piece(self, x: Array | None, b: int, h: int) -> Array | None:
        return super().piece(x, b, 0)


@seeded(0, "K06 K12")
class MaskOfTheFirstItem(Tiled):
    """Every batch item takes the first item's mask and bias."""

    def piece(self, x: Array | None, b: int, h: int) -> Array | None:
        return super().piece(x, 0, h)


@seeded(0, "K12 K07")
class MaskBroadcastOverTheWrongAxis(Tiled):
    """A mask or bias that has one head for each item is read as one item for each head."""

    def piece(self, x: Array | None, b: int, h: int) -> Array | None:
        if x is not None and x.ndim == 4 and x.shape[0] > 1 and x.shape[1] == 1:
            return super().piece(x, h % len(x), 0)
        return super().piece(x, b, h)


@seeded(0, "K06")
class MaskOfTheFirstRow(OtherMask):
    """Every row of a mask takes its first row."""

    def other(self, mask: Array) -> Array:
        return mask[:1]


@seeded(0, "K12")
class MaskColumnReadAsRow(OtherMask):
    """A mask of one column is read as one of one row, as far as it goes."""

    def other(self, mask: Array) -> Array:
        return mask.T if mask.shape[1] == 1 else mask


@seeded(0, "K09")
class MaskBeforeSoftcap(Tiled):
    """Hidden scores are set before the softcap, which makes -cap of them (BUG-054)."""

    def scores(self, head: Head, x: Array, seen: Array, i0: int, j0: int) -> Array:
        i, j = self.places(i0, j0)
        capped = self.capped(head, np.where(seen, x, self.nothing))
        return np.where(self.inside(head, i, j), self.added(head, capped, i0, j0), self.nothing)


# ---- softcap -------------------------------------------------------------------------------------
@seeded(0, "K09")
class SoftcapIgnored(Tiled):
    """softcap= has no effect."""

    def capped(self, head: Head, x: Array) -> Array:
        return x


@seeded(0, "K09")
class SoftcapOfTheBias(Tiled):
    """The bias is added before the softcap."""

    def scores(self, head: Head, x: Array, seen: Array, i0: int, j0: int) -> Array:
        return np.where(seen, self.capped(head, self.added(head, x, i0, j0)), self.nothing)


@seeded(0, "K09")
class SoftcapBeforeScale(Tiled):
    """The softcap is applied to q k^T, the scale afterwards."""

    def capped(self, head: Head, x: Array) -> Array:
        scale = x.dtype.type(self.scale(head))
        return super().capped(head, x / scale) * scale if head.problem.softcap else x


@seeded(0, "K09")
class SoftcapNotDivided(Tiled):
    """cap * tanh(x), without the division by cap."""

    def capped(self, head: Head, x: Array) -> Array:
        cap = head.problem.softcap
        return x if cap is None else x.dtype.type(cap) * np.tanh(x)


# ---- bias ----------------------------------------------------------------------------------------
class OtherBias(Tiled):
    """Another bias than was given; not a mutant itself."""

    def other(self, bias: Array, head: Head) -> Array:
        return bias

    def added(self, head: Head, s: Array, i0: int, j0: int) -> Array:
        if head.bias is not None:
            head = replace(head, bias=self.other(head.bias, head))
        return super().added(head, s, i0, j0)


@seeded(0, "K07")
class BiasIgnored(OtherBias):
    """bias= hides where it is -inf and has no other effect."""

    def other(self, bias: Array, head: Head) -> Array:
        return np.zeros_like(bias)


@seeded(0, "K07")
class BiasScaled(OtherBias):
    """The bias is multiplied by the scale."""

    def other(self, bias: Array, head: Head) -> Array:
        return bias * bias.dtype.type(self.scale(head))


@seeded(0, "K07 K12")
class BiasOfTheFirstRow(OtherBias):
    """Every row takes the bias's first row."""

    def other(self, bias: Array, head: Head) -> Array:
        return bias[:1]


@seeded(0, "K07")
class BiasInHalf(OtherBias):
    """A float32 bias is rounded to the dtype of q."""

    def other(self, bias: Array, head: Head) -> Array:
        return bias.astype(head.q.dtype)


@seeded(0, "K07")
class BiasMinusInfinityFinite(Tiled):
    """A bias of -inf becomes the most negative float: rows of it alone become the mean of v."""

    def piece(self, x: Array | None, b: int, h: int) -> Array | None:
        x = super().piece(x, b, h)
        if x is None or x.dtype == bool:
            return x
        return np.maximum(x.astype(np.float32), np.float32(np.finfo(np.float32).min))


@seeded(0, "K08")
class BiasFiniteHides(Tiled):
    """A bias of -1e4 and below hides its key, as a mask does (BUG-019)."""

    def piece(self, x: Array | None, b: int, h: int) -> Array | None:
        x = super().piece(x, b, h)
        return x if x is None or x.dtype == bool else np.where(x <= -9000, -np.inf, x)


# ---- ALiBi ---------------------------------------------------------------------------------------
@seeded(0, "K15")
class AlibiWithoutSign(Tiled):
    """ALiBi raises the scores of far keys."""

    def distance(self, head: Head, i0: int, j0: int) -> Array:
        return -super().distance(head, i0, j0)


@seeded(0, "K15")
class AlibiOnTheTopLeft(Tiled):
    """ALiBi measures |i - j|, the lengths' difference forgotten."""

    def distance(self, head: Head, i0: int, j0: int) -> Array:
        i, j = self.places(i0, j0)
        return np.abs(i - j)


@seeded(0, "K15")
class AlibiSigned(Tiled):
    """ALiBi measures i - j without its absolute value: the future is favoured."""

    def distance(self, head: Head, i0: int, j0: int) -> Array:
        i, j = self.places(i0, j0)
        return i + head.n_k - head.n_q - j


@seeded(0, "K15")
class AlibiOfTheFirstItem(Tiled):
    """Slopes by batch and head are read for the first item alone."""

    def number(self, x: Array | None, b: int, h: int) -> float | None:
        return super().number(x, 0, h)


@seeded(0, "K15")
class AlibiOfTheKeyHead(Tiled):
    """Slopes are read by the key head's number."""

    def added(self, head: Head, s: Array, i0: int, j0: int) -> Array:
        if head.slope is not None:
            head = replace(head, slope=head.slope * 2.0 ** (head.h - head.key_head))
        return super().added(head, s, i0, j0)


# ---- sinks ---------------------------------------------------------------------------------------
class OtherSink(Tiled):
    """Another sink than was given; not a mutant itself."""

    def other(self, sink: float, head: Head) -> float | None:
        return sink

    def start(self, head: Head, sink: float | None = None) -> State:
        return super().start(head, None if sink is None else self.other(sink, head))


@seeded(0, "K14")
class SinkIgnored(OtherSink):
    """sinks= has no effect."""

    def other(self, sink: float, head: Head) -> float | None:
        return None


@seeded(0, "K14")
class SinkScaled(OtherSink):
    """The sink is multiplied by the scale."""

    def other(self, sink: float, head: Head) -> float | None:
        return sink * self.scale(head)


@seeded(0, "K14")
class SinkAboveZeroAlone(OtherSink):
    """A sink below 0 counts as 0, as in a softmax plus one."""

    def other(self, sink: float, head: Head) -> float | None:
        return max(sink, 0.0)


@seeded(0, "K14")
class SinkOfTheFirstHead(Tiled):
    """Every head takes the first head's sink."""

    def number(self, x: Array | None, b: int, h: int) -> float | None:
        return super().number(x, b, 0 if x is not None and x.ndim == 1 else h)


@seeded(0, "K14")
class SinkWithValue(Tiled):
    """A sink carries the value of the first key."""

    def start(self, head: Head, sink: float | None = None) -> State:
        state = super().start(head, sink)
        if sink is None or not head.n_k:
            return state
        first = self.keys(head, head.v, 0)[:1]
        return State(state.total * first, state.total, state.top)


@seeded(0, "K14")
class SinkInEveryPart(Tiled):
    """Every part of the keys counts the sink again."""

    split = 64

    def start(self, head: Head, sink: float | None = None) -> State:
        return super().start(head, head.sink)


# ---- poison --------------------------------------------------------------------------------------
@seeded(0, "E10")
class HiddenValuesLeak(Tiled):
    """0 * NaN: a NaN in a hidden value reaches the rows of its tile (BUG-026)."""

    def weigh(self, p: Array, x: Array, seen: Array) -> Array:
        return p @ x


@seeded(0, "E10")
class HiddenKeysLeak(Tiled):
    """Masks are added: NaN in a hidden key plus -inf is NaN (BUG-026)."""

    def scores(self, head: Head, x: Array, seen: Array, i0: int, j0: int) -> Array:
        s = self.added(head, self.capped(head, x), i0, j0)
        return s + np.where(seen, 0, self.nothing).astype(s.dtype)


@seeded(0, "E11")
class NanSwallowed(Tiled):
    """A NaN in a visible value counts as 0."""

    def weigh(self, p: Array, x: Array, seen: Array) -> Array:
        return p @ np.where(np.isfinite(x), x, 0)


@seeded(0, "E11")
class NanMaximumIgnored(Tiled):
    """fmax: a NaN score is dropped from the maximum, and from the sum as well."""

    def scores(self, head: Head, x: Array, seen: Array, i0: int, j0: int) -> Array:
        s = super().scores(head, x, seen, i0, j0)
        return np.where(np.isnan(s), self.nothing, s)
