"""Defects of the online softmax: maximum, rescale, sum, LSE, and the walk over the tiles."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, State, Tiled


# ---- maximum and rescale -------------------------------------------------------------------------
@seeded(0, "F05 F01")
class RescaleMissing(Tiled):
    """Earlier sums are not rescaled when the maximum grows."""

    def rescale(self, old: Array, new: Array) -> Array:
        return np.ones_like(old)


@seeded(0, "F05 F01")
class RescaleInverted(Tiled):
    """Earlier sums are multiplied by exp(new - old)."""

    def rescale(self, old: Array, new: Array) -> Array:
        return super().rescale(new, old)


@seeded(0, "F05 F01")
class RescaleOfSumAlone(Tiled):
    """The sum is rescaled, the accumulator is not."""

    def fold(self, old: State, new: State) -> State:
        folded = super().fold(old, new)
        return State(old.acc + new.acc, folded.total, folded.top)


@seeded(0, "F05 F01")
class RescaleOfAccumulatorAlone(Tiled):
    """The accumulator is rescaled, the sum is not."""

    def fold(self, old: State, new: State) -> State:
        folded = super().fold(old, new)
        return State(folded.acc, old.total + new.total, folded.top)


@seeded(0, "F05 F01")
class RescaleTwice(Tiled):
    """Earlier sums are rescaled twice."""

    def rescale(self, old: Array, new: Array) -> Array:
        return super().rescale(old, new) ** 2


@seeded(0, "F05 F01")
class RescaleLazily(Tiled):
    """A rescale is left out where the tile's mean growth is small, though some rows grow more."""

    def rescale(self, old: Array, new: Array) -> Array:
        by = super().rescale(old, new)
        return by if (by < 0.5).mean() > 0.5 else np.ones_like(by)


@seeded(0, "F05 F01")
class RescaleInBaseTwo(Tiled):
    """The weights are in base e, the rescale in base 2."""

    def rescale(self, old: Array, new: Array) -> Array:
        return np.exp2(old - self.finite(new))


@seeded(0, "F04 F06")
class MaximumOfTheTileAlone(Tiled):
    """The maximum of the tile replaces the running one, higher or not: falling scores overflow."""

    def update(self, head: Head, state: State, q: Array, i0: int, j0: int) -> State:
        forgetful = State(state.acc, state.total, np.full_like(state.top, -np.inf))
        new = super().update(head, State(state.acc * 0, state.total * 0, forgetful.top), q, i0, j0)
        by = self.exp(state.top - self.finite(new.top))
        return State(state.acc * by + new.acc, state.total * by + new.total, new.top)


@seeded(0, "F03 F04")
class MaximumOmitted(Tiled):
    """exp(s) without a maximum: P overflows in float16, the sums in float32."""

    def finite(self, top: Array) -> Array:
        return np.zeros_like(top)


@seeded(0, "F07")
class MaximumFromZero(Tiled):
    """The running maximum starts from 0: rows far below it are drowned."""

    def start(self, head: Head, sink: float | None = None) -> State:
        state = super().start(head, sink)
        return State(state.acc, state.total, np.maximum(state.top, 0))


@seeded(0, "F07")
class MaximumFromMinus50000(Tiled):
    """The running maximum starts from an unscaled -5e4 (BUG-022)."""

    def start(self, head: Head, sink: float | None = None) -> State:
        state = super().start(head, sink)
        low = -5e4 * self.scale(head)
        return State(state.acc, state.total, np.maximum(state.top, low).astype(state.top.dtype))


@seeded(0, "F07")
class HiddenIsMinus10000(Tiled):
    """Hidden keys score -1e4, which visible ones may lie below."""

    nothing = -1e4


@seeded(0, "E03")
class HiddenIsMinusLarge(Tiled):
    """Hidden keys score -1e30: a row without a key becomes the mean of v."""

    nothing = -1e30


@seeded(0, "E03 K16")
class MaximumUnguarded(Tiled):
    """-inf minus -inf where the tiles so far are hidden: NaN (BUG-020)."""

    def finite(self, top: Array) -> Array:
        return top


# ---- exponential and sum -------------------------------------------------------------------------
@seeded(0, "F01")
class ExponentialInBaseTwo(Tiled):
    """exp2 of scores that were not multiplied by log2(e)."""

    def exp(self, x: Array) -> Array:
        return np.exp2(x)


@seeded(0, "F01")
class ExponentialCoarse(Tiled):
    """An exp that is good to ten bits."""

    def exp(self, x: Array) -> Array:
        return super().exp(x) * (1 + np.sin(1e3 * self.finite(x)) * 2.0**-10)


@seeded(0, "F01")
class DivisionMissing(Tiled):
    """The output is not divided by the sum."""

    def divided(self, state: State) -> Array:
        return state.acc


@seeded(0, "E03 E02")
class DivisionByZero(Tiled):
    """A row without a key is 0/0."""

    def divided(self, state: State) -> Array:
        return state.acc / state.total


@seeded(0, "E03")
class EmptyRowsUnwritten(Tiled):
    """A row without a key keeps what stood in the output."""

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        super().finish(head, state, i0, out, lse)
        rows = out[i0 : i0 + self.block_q]
        rows[state.total[: len(rows), 0] == 0] = 7  # what the memory held before


# ---- LSE -----------------------------------------------------------------------------------------
@seeded(0, "F13 F01")
class LseInBaseTwo(Tiled):
    """The LSE is in base 2 (BUG-063)."""

    def logarithm(self, state: State) -> Array:
        return super().logarithm(state) / np.log(2)


@seeded(0, "F13 F01")
class LseWithoutMaximum(Tiled):
    """The LSE is log(sum), the maximum forgotten."""

    def logarithm(self, state: State) -> Array:
        return np.log(state.total)


@seeded(0, "E03 E02")
class LsePlusInfinity(Tiled):
    """The LSE of a row without a key is +inf, as flash-attention has it."""

    def logarithm(self, state: State) -> Array:
        lse = super().logarithm(state)
        return np.where(np.isneginf(lse), np.inf, lse)


@seeded(0, "F13 F01")
class LseInHalf(Tiled):
    """The LSE went through float16 before it became float32."""

    def logarithm(self, state: State) -> Array:
        return super().logarithm(state).astype(np.float16).astype(np.float32)


@seeded(0, "K14")
class LseWithoutSink(Tiled):
    """The LSE leaves the sink out."""

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        super().finish(head, state, i0, out, lse)
        if head.sink is not None:
            rows = lse[i0 : i0 + self.block_q]
            rows[...] = np.log(np.exp(rows) - np.exp(head.sink))


@seeded(0, "F13")
class LseInTheInputsDtype(Tiled):
    """The LSE comes back in the input's dtype."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, np.float16 if name == "lse" else dtype)


@seeded(0, "F13")
class LseByRow(Tiled):
    """The LSE comes back as (B, S, H)."""

    def forward(self, *arrays: Array, **options: Any) -> tuple[Array, Array | None]:
        out, lse = super().forward(*arrays, **options)
        return out, None if lse is None else lse.swapaxes(-1, -2)


# ---- tiles ---------------------------------------------------------------------------------------
@seeded(0, "F12 F17 X04")
class TileDropped(Tiled):
    """The third tile of keys is not visited."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        tiles = list(super().key_tiles(head, i0))
        return tiles[:2] + tiles[3:]


@seeded(0, "F01 F17 X04")
class TileDoubled(Tiled):
    """The second tile of keys is visited twice."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        tiles = list(super().key_tiles(head, i0))
        return tiles[:2] + tiles[1:]


@seeded(0, "X04 F17")
class FirstTileSkipped(Tiled):
    """The loop over the keys starts at the second tile where there is one."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        tiles = list(super().key_tiles(head, i0))
        return tiles[1:] or tiles


@seeded(0, "X04 F17")
class LastTileSkipped(Tiled):
    """The loop over the keys ends one tile early where there is more than one."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        tiles = list(super().key_tiles(head, i0))
        return tiles[:-1] or tiles


@seeded(0, "F17 X04")
class KeyTailDropped(Tiled):
    """Keys behind the last whole tile are not visited."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        return [j0 for j0 in super().key_tiles(head, i0) if j0 + self.block_k <= head.n_k]


@seeded(0, "F17 X04")
class KeyTailUnmasked(Tiled):
    """The zeros behind the last key score 0 and count in the sum (BUG-001)."""

    def inside(self, head: Head, i: Array, j: Array) -> Array:
        return (i < head.n_q) & (j >= 0)


@seeded(0, "F17 X04")
class QueryTailUnwritten(Tiled):
    """The last tile of rows is not stored where it is not whole."""

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        if i0 + self.block_q <= head.n_q:
            super().finish(head, state, i0, out, lse)
        else:
            out[i0:] = 0  # what fresh memory holds


@seeded(0, "F17 F01")
class RowsBehindTheFirstTileShifted(Tiled):
    """Every tile of rows but the first is stored one row too low."""

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        super().finish(head, state, i0, out, lse)
        if i0:
            out[i0 : i0 + self.block_q] = np.roll(out[i0 : i0 + self.block_q], 1, axis=0)
