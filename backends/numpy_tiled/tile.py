"""What a tile works on: views of one sequence, and the scores.

The rule kept here: the caller's arrays are read through views; what BLAS cannot read as it lies
(half precision, odd strides, pages) is copied a tile at a time. Nothing that a row may not see
reaches it: hidden scores are set to -inf, never added to, and a NaN or inf behind a weight of zero
is kept out of the product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from portattn.backends.numpy_tiled.config import FEW_RESULTS, LONG_PRODUCT
from portattn.backends.numpy_tiled.masking import Array, Band, Bools, Edge, diagonals, toeplitz
from portattn.backends.numpy_tiled.workspace import Workspace
from portattn.problem import Problem


class Rows(NamedTuple):
    """Query rows of one tile: queries [i0, i1) of the heads [h0, h1), which read the key heads
    [k0, k1): a part of one head's group, or the whole groups of several."""

    k0: int
    k1: int
    h0: int
    h1: int
    i0: int
    i1: int

    @property
    def shape(self) -> tuple[int, int]:
        """(heads, queries)."""
        return self.h1 - self.h0, self.i1 - self.i0

    @property
    def size(self) -> int:
        """Rows in all."""
        return (self.h1 - self.h0) * (self.i1 - self.i0)

    @property
    def heads_k(self) -> int:
        """Key heads."""
        return self.k1 - self.k0

    @property
    def group(self) -> int:
        """Query heads of each key head."""
        return (self.h1 - self.h0) // (self.k1 - self.k0)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores become weights: ``weigh`` of scores in units of ``to_e`` nats.

    That is exp2 in the forward pass where NumPy has it vectorised: twice as fast as exp, and
    closer. It is exp where numbers are added to the scores (a bias of finfo.min times log2(e) would
    become -inf), in float64, and in the backward pass, where weights may underflow.
    """

    dtype: str
    scale: float
    softcap: float | None
    weigh: Callable[..., Any]
    to_e: Any
    factor: Any  # what q is multiplied by
    cap: Any  # what tanh is multiplied by

    @staticmethod
    def of(problem: Problem) -> Scoring:
        """The scoring of a problem."""
        natural = problem.bias is not None or problem.alibi is not None or problem.backward
        return _scoring(problem.accumulator, problem.scale, problem.softcap, natural)


@functools.lru_cache(maxsize=64)
def _scoring(dtype: str, scale: float, softcap: float | None, natural: bool) -> Scoring:
    binary = dtype == "float32" and not natural and _exp2_is_vectorised()
    to_e = math.log(2.0) if binary else 1.0
    number = np.dtype(dtype).type
    with np.errstate(all="ignore"):
        return Scoring(
            dtype,
            scale,
            softcap,
            np.exp2 if binary else np.exp,
            number(to_e),
            number(scale / to_e if softcap is None else scale / softcap),
            number(1 / to_e if softcap is None else softcap / to_e),
        )


@functools.cache
def _exp2_is_vectorised() -> bool:
    introspect = getattr(np.lib, "introspect", None)  # NumPy 2.1 on
    if introspect is None:
        return False
    loops = introspect.opt_func_info(func_name="^exp2$").get("exp2", {})
    return "baseline" not in loops.get("ff", {"current": "baseline"})["current"]


def blas_reads(x: Array, dtype: Any) -> bool:
    """Whether each 2-D slice over the last two axes goes into BLAS as it lies."""
    if x.dtype != dtype or not x.flags.aligned:
        return False
    size, (rows, columns) = x.itemsize, x.strides[-2:]
    return columns == size and rows >= size * x.shape[-1] and rows % size == 0


class Keys(NamedTuple):
    """Keys and values of one sequence: (Hk, S, D) views, or with ``table`` the pages
    (num_blocks, block_size, Hk, D). ``length`` keys are in use; no other is read. ``norms2``
    remembers the largest norms of a head and of its tiles (see `forward`)."""

    k: Array
    v: Array
    length: int
    k_direct: bool
    v_direct: bool
    norms2: dict[Any, Any]
    table: tuple[int, ...] | None = None

    @property
    def heads(self) -> int:
        """Hk."""
        heads: int = self.k.shape[0 if self.table is None else 2]
        return heads

    def key_tile(self, head: int, j0: int, j1: int, ws: Workspace) -> Array:
        """(j1 - j0, D) keys in the accumulator's dtype, readable by BLAS."""
        if self.k_direct:
            return self.k[head, j0:j1]
        return self._copied(self.k, head, j0, j1, ws.array("k", j1 - j0, self.k.shape[-1]))

    def value_tile(self, head: int, j0: int, j1: int, ws: Workspace) -> Array:
        """(j1 - j0, Dv) values likewise."""
        if self.v_direct:
            return self.v[head, j0:j1]
        return self._copied(self.v, head, j0, j1, ws.array("v", j1 - j0, self.v.shape[-1]))

    def keys_of(self, rows: Rows, j0: int, j1: int, ws: Workspace) -> Array:
        """(heads, j1 - j0, D) keys that the rows read."""
        return self._of(self.k, self.k_direct, rows, j0, j1, ws)

    def values_of(self, rows: Rows, j0: int, j1: int, ws: Workspace) -> Array:
        """(heads, j1 - j0, Dv) values, perhaps in the place of the keys."""
        return self._of(self.v, self.v_direct, rows, j0, j1, ws)

    def _of(self, x: Array, direct: bool, rows: Rows, j0: int, j1: int, ws: Workspace) -> Array:
        if direct:
            return x[rows.k0 : rows.k1, j0:j1]
        into = ws.array("k", rows.heads_k, j1 - j0, x.shape[-1])
        for head, tile in enumerate(into, rows.k0):
            self._copied(x, head, j0, j1, tile)
        return into

    def _copied(self, x: Array, head: int, j0: int, j1: int, into: Array) -> Array:
        if self.table is None:
            return load(x[head, j0:j1], into)
        size = x.shape[1]
        for page in range(j0 // size, -(-j1 // size)):
            start = page * size
            a, b = max(j0, start), min(j1, start + size)
            load(x[self.table[page], a - start : b - start, head], into[a - j0 : b - j0])
        return into


def load_scaled_queries(seq: Sequence, rows: Rows, scoring: Scoring, ws: Workspace) -> Array:
    """(m, D) queries times the factor, in the accumulator's dtype; several heads' rows one after
    another."""
    dim = seq.q.shape[-1]
    given, q = seq.q[rows.h0 : rows.h1, rows.i0 : rows.i1], ws.array("q", *rows.shape, dim)
    if given.dtype != q.dtype:
        given = load(given, q)
    np.multiply(given, scoring.factor, out=q)
    return q.reshape(rows.size, dim)


def load(x: Array, into: Array) -> Array:
    """``into``, filled with ``x`` in its own dtype."""
    np.copyto(into, x, casting="unsafe")  # only ever from a narrower float to a wider one
    return into


class Sequence(NamedTuple):
    """One sequence of the batch: views with the heads first. ``bias`` and ``mask`` are
    (Hq or 1, Sq or 1, Sk or 1); ``slopes`` and ``sinks`` (Hq,)."""

    q: Array
    keys: Keys
    band: Band
    out: Array
    lse: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    slopes: Array | None = None
    sinks: Array | None = None
    # backward
    dout: Array | None = None
    dlse: Array | None = None
    dq: Array | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return len(self.q) // self.keys.heads

    def rows_of(self, head: int, i0: int, i1: int) -> Rows:
        """The tile of queries [i0, i1) of one head."""
        head_k = head // self.group
        return Rows(head_k, head_k + 1, head, head + 1, i0, i1)

    def row_tiles(
        self, k0: int, k1: int, block_q: int, i0: int, i1: int, together: int = 1
    ) -> Iterator[Rows]:
        """Tiles over the queries [i0, i1) of the heads that read the key heads [k0, k1), the last
        queries first (under a causal mask they see the most keys). Heads of a short sequence share
        a tile, so that keys are read once for all of them; where a group does, so do the groups of
        ``together`` key heads."""
        group, length = self.group, i1 - i0
        heads = min(group, max(1, block_q // max(length, 1)))
        last = i0 + (length - 1) // block_q * block_q
        if heads < group:
            together = 1
        for k in range(k0, k1, together):
            ends = min(k + together, k1)
            for a in range(last, i0 - 1, -block_q):
                for h in range(k * group, ends * group, heads * together):
                    h1 = min(h + heads * together, ends * group)
                    yield Rows(k, ends, h, h1, a, min(a + block_q, i1))


def trimmed(seq: Sequence, rows: Rows, j0: int, j1: int) -> tuple[Rows, slice]:
    """The tile's rows without those at the band's edge that see no key of [j0, j1), and where
    they lie among the tile's rows. Rows of several heads stay together."""
    if rows.h1 - rows.h0 > 1 or seq.band.covers(rows.i0, rows.i1, j0, j1):
        return rows, slice(0, rows.size)
    i0, i1 = seq.band.seeing(j0, j1)
    i0, i1 = max(i0, rows.i0), min(i1, rows.i1)
    return rows._replace(i0=i0, i1=i1), slice(i0 - rows.i0, i1 - rows.i0)


class Cut(NamedTuple):
    """What hides keys of a tile: bools that broadcast to (heads, queries, keys), True = hidden;
    None where every row sees every key. ``edge``: where nothing but the band hides any. ``bias``
    is the tile's bias in the accumulator's dtype."""

    hidden: Bools | None
    edge: Edge | None
    bias: Array | None


def cut(seq: Sequence, rows: Rows, j0: int, j1: int, ws: Workspace) -> Cut | None:
    """Band, mask and biases of -inf of a tile together; None where no row sees any key."""
    hidden: Any = None
    edge = bias = None
    if not seq.band.covers(rows.i0, rows.i1, j0, j1):
        edge = ws.edge(seq.band, rows.i0, rows.i1, j0, j1)
        hidden = edge.hidden[None]
    if seq.mask is not None:
        seen = of_tile(seq.mask, rows, j0, j1)
        if not seen.all():
            edge = None
            hidden = ~seen if hidden is None else hidden | ~seen
    if seq.bias is not None:
        given = of_tile(seq.bias, rows, j0, j1)
        bias = load(given, ws.array("bias", *given.shape))
        minus = bias == -np.inf
        if minus.any():
            edge = None
            hidden = minus if hidden is None else hidden | minus
    if hidden is not None and edge is None and hidden.all():
        return None
    return Cut(hidden, edge, bias)


def of_tile(x: Array, rows: Rows, j0: int, j1: int) -> Array:
    """The part of a (Hq or 1, Sq or 1, Sk or 1) array that a tile sees; axes of 1 stay."""
    heads, queries, keys = x.shape
    return x[
        rows.h0 if heads > 1 else 0 : rows.h1 if heads > 1 else 1,
        rows.i0 if queries > 1 else 0 : rows.i1 if queries > 1 else 1,
        j0 if keys > 1 else 0 : j1 if keys > 1 else 1,
    ]


def complete_scores(
    scores: Array,
    scoring: Scoring,
    seq: Sequence,
    rows: Rows,
    j0: int,
    j1: int,
    part: Cut,
    tanh: Array | None = None,
) -> None:
    """Turn ``factor * q k^T`` (heads, queries, keys) into scores in place: softcap, bias, ALiBi.
    ``tanh`` receives the softcap's tanh. What is hidden is up to the caller."""
    if scoring.softcap is not None:
        np.tanh(scores, out=scores)
        if tanh is not None:
            np.copyto(tanh, scores)
        np.multiply(scores, scoring.cap, out=scores)
    if part.bias is not None:
        np.add(scores, part.bias, out=scores)
    if seq.slopes is not None:
        # |i + Sk - Sq - j|, whatever the mask's alignment
        offset = seq.band.keys - seq.band.rows
        distance = np.abs(diagonals(rows.i0, rows.i1, j0, j1) - offset).astype(scores.dtype)
        for h, slope in enumerate(seq.slopes[rows.h0 : rows.h1]):
            np.subtract(scores[h], toeplitz(slope * distance, *scores.shape[1:]), out=scores[h])


def flat(hidden: Bools, shape: tuple[int, int, int]) -> Bools:
    """``hidden`` broadcast to (heads, queries, keys), as (heads * queries, keys)."""
    return np.broadcast_to(hidden, shape).reshape(-1, shape[2])


def multiply(a: Array, b: Array, out: Array, ws: Workspace) -> None:
    """out (heads, m, d) = a (heads, m, n) @ b (heads, n, d), with other threads running meanwhile:
    a long product with few results is made in parts that have enough of them together. How many
    hangs on one head, so that it has the same bits beside others."""
    heads, m, n = a.shape
    dim = b.shape[2]
    pieces = -(-FEW_RESULTS // max(m * dim, 1))
    if pieces == 1 or n * m * dim < LONG_PRODUCT:
        np.matmul(a, b, out=out)
        return
    length = n // pieces
    whole = pieces * length
    parts = ws.array("parts", pieces, heads, m, dim)
    np.matmul(
        a[:, :, :whole].reshape(heads, m, pieces, length).transpose(2, 0, 1, 3),
        b[:, :whole].reshape(heads, pieces, length, dim).transpose(1, 0, 2, 3),
        out=parts,
    )
    np.add.reduce(parts, axis=0, out=out)
    if whole < n:
        rest = ws.array("rest", heads, m, dim)
        np.matmul(a[:, :, whole:], b[:, whole:], out=rest)
        np.add(out, rest, out=out)


def product(
    weights: Array, values: Array, hidden: Callable[[], Bools] | None, out: Array, ws: Workspace
) -> None:
    """out (m, d) = weights (m, n) @ values (n, d), where row i takes nothing from value j if
    ``hidden()[i, j]``, a NaN or inf included (the weight is 0 there, but 0 * NaN is NaN). The bits
    are those of the product with zeros in its place."""
    if hidden is None or np.isfinite(values).all():
        multiply(weights[None], values[None], out[None], ws)
        return
    finite = np.isfinite(values).all(axis=1)
    clean = load(values, ws.array("clean", *values.shape))
    clean[~finite] = 0
    multiply(weights[None], clean[None], out[None], ws)
    seen = ~hidden()
    for j in np.flatnonzero(~finite & seen.any(axis=0)):
        rows = seen[:, j]
        out[rows] += weights[rows, j, None] * values[j]
