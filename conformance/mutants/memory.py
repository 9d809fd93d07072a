"""Defects of memory: right answers that cost what tiles are there to save."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, Options, State, Tiled
from portattn.problem import Problem


class Large(Tiled):
    """Larger tiles, which make long calls short; correct, not a mutant itself."""

    block_q, block_k = 128, 128


class Holding(Large):
    """Holds something while a call is worked on; not a mutant itself."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Any:
        return None

    def heads(
        self, problem: Problem, q: Array, k: Array, v: Array, options: Options
    ) -> Iterator[Head]:
        holds = self.held(problem, k, v, options)
        yield from super().heads(problem, q, k, v, options)
        del holds


def rows_of(p: Problem) -> int:
    """Rows of the output, over all heads."""
    return p.heads_q * (p.total_q or p.batch * p.seq_q)


# ---- tables --------------------------------------------------------------------------------------
@seeded(2, "R04 R01")
class ScoresWhole(Holding):
    """The scores of all heads are held."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.empty((rows_of(p), p.seq_k), np.float32)


@seeded(2, "R03 R01")
class ScoresWholeOfOneHead(Holding):
    """The scores of one head are held, in half precision."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.empty((p.seq_q, p.seq_k), np.float16)


@seeded(2, "R03 R01")
class MaskDense(Holding):
    """A dense mask is built for every call, asked for or not."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.ones((p.seq_q, p.seq_k), bool)


@seeded(2, "R09")
class MaskExpanded(Holding):
    """A broadcast mask is expanded to all rows and heads (BUG-013)."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array | None:
        mask = options.get("mask")
        shape = (p.batch, p.heads_q, p.seq_q, p.seq_k)
        return None if mask is None else np.broadcast_to(mask, shape).copy()


@seeded(2, "R09")
class BiasExpanded(Holding):
    """A broadcast bias is expanded to all rows and heads."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array | None:
        bias = options.get("bias")
        shape = (p.batch, p.heads_q, p.seq_q, p.seq_k)
        return None if bias is None else np.broadcast_to(bias, shape).copy()


@seeded(2, "R01")
class TableOfTilePairs(Holding):
    """A list of all pairs of tiles is made, one number for each."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.zeros((rows_of(p) // 16 + 1, p.seq_k // 16 + 1), np.int64)


# ---- shares of the IO ----------------------------------------------------------------------------
@seeded(2, "R02")
class RowStrips(Holding):
    """Scores and weights of a strip of rows are held for all heads at once."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.empty((2, p.batch, p.heads_q, self.block_q, p.seq_k), np.float32)


@seeded(2, "R03 R02")
class PartialsOfAllTiles(Holding):
    """Partial results of all rows are kept for every part of 64 keys, and merged at the end."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.empty((-(-p.seq_k // 64), rows_of(p), p.head_dim_v), np.float32)


@seeded(2, "R02")
class PartialsOfFixedParts(Holding):
    """Partial results of all rows are kept for eight parts, however many rows there are."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.empty((8, rows_of(p), p.head_dim_v), np.float32)


@seeded(2, "R02")
class AccumulatorWhole(Holding):
    """The float32 accumulator of all rows is held, and rounded at the end."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array:
        return np.empty((rows_of(p), p.head_dim_v + 2), np.float32)


@seeded(2, "R02")
class KeysUpcast(Holding):
    """k and v are copied to float32 as a whole."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> list[Array]:
        return [x.astype(np.float32) for x in (k, v)]


@seeded(2, "R02")
class KeysCopied(Holding):
    """k and v are copied, contiguous or not."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> list[Array]:
        return [k.copy(), v.copy()]


@seeded(2, "R08")
class KeysExpanded(Holding):
    """k and v are expanded to the query heads (BUG-082)."""

    block_q = 16  # few rows

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> list[Array] | None:
        if p.group == 1 or p.paged:
            return None
        return [np.repeat(x, p.group, 1) for x in (k, v)]


@seeded(2, "R10")
class DecodePartialsByKeys(Holding):
    """Few rows: one part for every 16 keys, whose partial results outweigh the keys."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> Array | None:
        if p.seq_q > 64:
            return None
        return np.empty((-(-p.seq_k // 16), 16, p.heads_q, p.head_dim_v), np.float32)


@seeded(4, "R11")
class PagesGathered(Holding):
    """The pages of all sequences are gathered before they are read."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> list[Array] | None:
        if not p.paged:
            return None
        return [x[options["block_table"]].copy() for x in (k, v)]


@seeded(4, "R11")
class PackedPadded(Holding):
    """Packed sequences are unpacked to their longest length."""

    def held(self, p: Problem, k: Array, v: Array, options: Options) -> list[Array] | None:
        if not p.packed:
            return None
        shape = (p.batch, p.heads_q, max(p.seq_q, p.seq_k), p.head_dim)
        return [np.empty(shape, k.dtype) for _ in range(3)]


# ---- growth --------------------------------------------------------------------------------------
@seeded(2, "R07 R06")
class OutputsKept(Tiled):
    """Every output is kept for ever."""

    kept: ClassVar[list[Array]] = []

    def forward(self, *arrays: Array, **options: Any) -> tuple[Array, Array | None]:
        out, lse = super().forward(*arrays, **options)
        self.kept.append(out.copy())
        return out, lse


@seeded(2, "R07 R06")
class TilesKept(Tiled):
    """The last tile of every call is kept, as an ever-growing cache does."""

    kept: ClassVar[list[State]] = []

    def attend(self, head: Head, i0: int) -> State:
        state = super().attend(head, i0)
        if i0 + self.block_q >= head.n_q:
            self.kept.append(state)
        return state


@seeded(2, "R06")
class WeightsKeptForBackward(Large):
    """The rows' maxima and sums are kept beside the LSE, and a float32 output, for backward."""

    def forward(self, *arrays: Array, **options: Any) -> tuple[Array, Array | None]:
        out, lse = super().forward(*arrays, **options)
        self.kept = out.astype(np.float32)
        return out, lse


# ---- backward ------------------------------------------------------------------------------------
@seeded(3, "R05")
class BackwardScoresWhole(Large):
    """The backward pass holds P of one head as a whole."""

    def pull(self, head: Head, *rest: Any) -> None:
        whole = np.empty((head.n_q, head.n_k), head.q.dtype)
        super().pull(head, *rest)
        del whole


@seeded(3, "R08")
class BackwardExpanded(Large):
    """dk and dv are held for every query head and summed over the groups at the end (BUG-048)."""

    block_q = 16

    def backward(
        self, q: Array, k: Array, v: Array, *rest: Any, **options: Any
    ) -> Mapping[str, Array]:
        group = self.validate(q, k, v, dict(options)).group
        whole = [np.empty((group, *x.shape), np.float32) for x in (k, v)]
        grads = super().backward(q, k, v, *rest, **options)
        del whole
        return grads


@seeded(3, "R05")
class BackwardUpcast(Large):
    """The backward pass copies all its inputs to float64."""

    def backward(self, *arrays: Array, **options: Any) -> Mapping[str, Array]:
        wide = [x.astype(np.float64) for x in arrays]
        grads = super().backward(*arrays, **options)
        del wide
        return grads
