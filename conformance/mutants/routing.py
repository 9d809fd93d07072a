"""Defects of where numbers are read from: heads, batch items, features, strides."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from portattn.conformance.mutants.arithmetic import AccumulatorInStorage
from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, State, Tiled
from portattn.problem import Problem


# ---- heads and batch items -----------------------------------------------------------------------
@seeded(4, "M09 X02")
class KeyHeadModulo(Tiled):
    """Query head h reads key head h % Hk."""

    def key_head(self, problem: Problem, h: int) -> int:
        return h % problem.heads_k


@seeded(0, "X03 X02")
class KeyHeadFirst(Tiled):
    """Every query head reads the first key head."""

    def key_head(self, problem: Problem, h: int) -> int:
        return 0


@seeded(4, "M09 X02")
class KeyHeadRoundedUp(Tiled):
    """The last query head of a group reads the next group's keys."""

    def key_head(self, problem: Problem, h: int) -> int:
        up = 1 if problem.group > 1 else 0
        return min((h + up) // problem.group, problem.heads_k - 1)


@seeded(0, "X03")
class ValuesOfTheFirstItem(Tiled):
    """Every batch item reads the first item's values."""

    def heads(self, problem: Problem, q: Array, k: Array, v: Array, options: Any) -> Iterator[Head]:
        for head in super().heads(problem, q, k, v, options):
            plain = not (problem.packed or problem.paged)
            yield replace(head, v=v[0, head.key_head]) if plain else head


@seeded(0, "X02 X03")
class KeysOfTheFirstItem(Tiled):
    """Every batch item reads the first item's keys."""

    def heads(self, problem: Problem, q: Array, k: Array, v: Array, options: Any) -> Iterator[Head]:
        for head in super().heads(problem, q, k, v, options):
            plain = not (problem.packed or problem.paged)
            yield replace(head, k=k[0, head.key_head]) if plain else head


@seeded(0, "X03 F01")
class ValuesReadAsBshd(Tiled):
    """(B, H, S, D) values are read as (B, S, H, D)."""

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array | None]:
        if options.get("layout", "bhsd") == "bhsd" and "block_table" not in options:
            b, h, s, d = v.shape
            v = v.reshape(b, s, h, d).swapaxes(1, 2)
        return super().forward(q, k, v, **options)


# ---- features ------------------------------------------------------------------------------------
class Features(Tiled):
    """The scores come from some features alone; not a mutant itself."""

    def features(self, d: int) -> int:
        return d

    def product(self, head: Head, q: Array, k: Array) -> Array:
        d = self.features(q.shape[-1])
        return super().product(head, q[..., :d], k[..., :d])


@seeded(0, "H14 H01")
class FeaturesBeyond64Dropped(Features):
    """A head dim of 64 is hard-coded in the scores (BUG-044)."""

    def features(self, d: int) -> int:
        return min(d, 64)


@seeded(1, "H04 H02 H14")
class FeaturesBeyond128Dropped(Features):
    """The second chunk of 128 features is dropped from the scores."""

    def features(self, d: int) -> int:
        return min(d, 128)


@seeded(0, "H02 H03 H14")
class FeaturesCutToSixteens(Features):
    """What a division by 16 leaves of the head dim is dropped (BUG-043)."""

    def features(self, d: int) -> int:
        return max(d // 16 * 16, 1)


@seeded(1, "H04 H14")
class LastFeatureDroppedAt256(Features):
    """A feature index of eight bits: at head dim 256 the last feature is dropped."""

    def features(self, d: int) -> int:
        return min(d, 255)


@seeded(1, "H04 H02")
class ValuesBeyond128Unwritten(Tiled):
    """Output columns from 128 on are not stored."""

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        super().finish(head, state, i0, out, lse)
        out[i0 : i0 + self.block_q, 128:] = 0


@seeded(0, "H02 H03")
class ScaleOfThePaddedHeadDim(Tiled):
    """The default scale comes from the head dim rounded up to a power of two."""

    def scale(self, head: Head) -> float:
        d, given = head.problem.head_dim, head.problem.scale
        return given if given != d**-0.5 else float((1 << (d - 1).bit_length()) ** -0.5)


def reread(x: Array, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> Array:
    """``shape`` elements, ``strides`` apart, from ``start`` elements behind the first of ``x`` in
    its own buffer; what lies outside the buffer reads as 0."""
    base: Any = x
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    flat = np.asarray(base).reshape(-1).view(np.uint8)
    first = x.__array_interface__["data"][0] - flat.__array_interface__["data"][0]
    at = np.zeros((1,) * len(shape), int) + first // x.itemsize + start
    for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        at = at + (np.arange(n) * stride).reshape((-1,) + (1,) * (len(shape) - axis - 1))
    flat = flat[: flat.size // x.itemsize * x.itemsize].view(x.dtype)
    inside = (at >= 0) & (at < flat.size)
    return np.where(inside, flat[np.where(inside, at, 0)], np.zeros((), x.dtype))


def strides_of(x: Array) -> list[int]:
    """In elements."""
    return [stride // x.itemsize for stride in x.strides]


class Reader(Tiled):
    """q, k and v are read by other strides than theirs; not a mutant itself."""

    def read(self, x: Array) -> Array:
        return x

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array | None]:
        self.validate(q, k, v, dict(options))
        q, k, v = (self.read(x) if x.size else x for x in (q, k, v))
        return super().forward(q, k, v, **options)


@seeded(0, "H03 H02 H10")
class PadColumnsRead(Tiled):
    """Head dims are rounded up to 16 and the pad columns of q and k read from memory."""

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array | None]:
        self.validate(q, k, v, dict(options))
        d = q.shape[-1]
        wide = -(-d // 16) * 16
        if wide != d and q.size and k.size:
            options.setdefault("scale", d**-0.5)
            q, k = (reread(x, (*x.shape[:-1], wide), strides_of(x)) for x in (q, k))
        return super().forward(q, k, v, **options)


@seeded(0, "H10")
class PadColumnsTimesZero(Tiled):
    """Head dims are rounded up to 32; pad columns of k meet zeros of q: 0 * NaN (BUG-028)."""

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array | None]:
        self.validate(q, k, v, dict(options))
        d = q.shape[-1]
        wide = -(-d // 32) * 32
        if wide != d and q.size and k.size:
            options.setdefault("scale", d**-0.5)
            k = reread(k, (*k.shape[:-1], wide), strides_of(k))
            q = np.concatenate([q, np.zeros((*q.shape[:-1], wide - d), q.dtype)], -1)
        return super().forward(q, k, v, **options)


# ---- head dim 256 --------------------------------------------------------------------------------
@seeded(1, "H04")
class Dim256Refused(Tiled):
    """Claims head dim 256 and refuses it."""

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        problem = super().validate(q, k, v, options)
        if problem.head_dim == 256:
            raise NotImplementedError("head_dim=256 needs more shared memory than there is")
        return problem


@seeded(1, "H04")
class Dim256HalfTiles(Tiled):
    """From head dim 192 on tiles hold 32 keys, and the loop still steps by 64."""

    def inside(self, head: Head, i: Array, j: Array) -> Array:
        seen = super().inside(head, i, j)
        return seen & (j - j[:, :1] < 32) if head.problem.head_dim > 192 else seen


@seeded(1, "H05")
class Dim256CausalReach(Tiled):
    """At head dim 256 causal tiles look as far as tiles of 16 rows must."""

    def reach(self, head: Head, i0: int) -> tuple[int, int]:
        low, high = super().reach(head, i0)
        short = head.problem.head_dim == 256 and head.problem.causal
        return low, min(high, i0 + 16 + self.diagonal(head)) if short else high


@seeded(1, "H06")
class Dim256KeyHeadModulo(Tiled):
    """At head dim 256 query head h reads key head h % Hk."""

    def key_head(self, problem: Problem, h: int) -> int:
        return h % problem.heads_k if problem.head_dim == 256 else super().key_head(problem, h)


@seeded(1, "H04")
class Dim256AccumulatorInStorage(AccumulatorInStorage):
    """At head dim 256 the accumulator is kept in the input's dtype between tiles."""

    def kept(self, x: Array) -> Array:
        return super().kept(x) if x.shape[-1] == 256 else x


# ---- strides -------------------------------------------------------------------------------------
@seeded(0, "E06")
class ContiguityAssumed(Reader):
    """Strides are not looked at (BUG-029)."""

    def read(self, x: Array) -> Array:
        dense = np.empty(x.shape, np.uint8).strides
        return reread(x, x.shape, dense)


@seeded(0, "E06")
class InnerStrideAssumed(Reader):
    """The head dim's stride counts as 1 (BUG-031)."""

    def read(self, x: Array) -> Array:
        return reread(x, x.shape, [*strides_of(x)[:-1], 1])


@seeded(0, "E06 E07 E09")
class BatchStrideAssumed(Reader):
    """The batch stride counts as the product of the other sizes."""

    def read(self, x: Array) -> Array:
        return reread(x, x.shape, [x[0].size, *strides_of(x)[1:]])


@seeded(0, "E06 E07")
class StridesOfQueriesForKeys(Reader):
    """k and v are read by the strides that q has, where the shapes are equal."""

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array | None]:
        if k.size and q.shape == k.shape == v.shape:
            k, v = (reread(x, x.shape, strides_of(q)) for x in (k, v))
        return Tiled.forward(self, q, k, v, **options)


@seeded(0, "E08")
class PointerAlignedDown(Reader):
    """Vector loads: addresses are rounded down to 16 bytes (BUG-035)."""

    def read(self, x: Array) -> Array:
        astray = x.__array_interface__["data"][0] % 16 // x.itemsize
        return reread(x, x.shape, strides_of(x), -astray)


@seeded(0, "F12")
class KeyIndexInSixteenBits(Tiled):
    """Key 32768 and those behind it wrap around."""

    def fetch(self, head: Head, x: Array, j0: int, j1: int) -> Array:
        if j1 <= 1 << 15 or head.table is not None:
            return super().fetch(head, x, j0, j1)
        return x[np.arange(j0, j1) & 0x7FFF]
