"""Tiled attention, correct, in one readable class: what the seeded defects are seeded into.

The rule kept here: each decision an attention kernel can get wrong is one attribute or one short
method, so that a defect is an override of a line or two and nothing else changes. Tiles are whole,
as on a GPU: what lies beyond a tail is zeros that a mask must hide, and every product has the same
shape wherever a row stands, which makes the result batch-invariant to the bit.

Arrays are (B, H, S, D), packed (T, H, D), pages (num_blocks, block_size, Hk, D). Tiles: q
(block_q, D), k (block_k, D), scores (block_q, block_k). P and dS are stored in the input's dtype
before the second product, sums are float32 (float64 for float64), as tensor cores have it.

Source: FlashAttention-2 (Dao 2023), algorithms 1 and 2; parts of the keys are merged as in
Flash-Decoding.
"""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from portattn.arrays import recognise
from portattn.conformance.manifest import FEATURES
from portattn.problem import Problem

Array = NDArray[Any]
Options = Mapping[str, Any]
ARRAYS = (
    "bias", "mask", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
    "block_table",
)  # fmt: skip


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def one_thread() -> AbstractContextManager[Any]:
    """Products of single tiles are too small to be shared between threads."""
    limit: AbstractContextManager[Any] = _libraries().limit(limits=1, user_api="blas")
    return limit


@dataclass(eq=False)
class Head:
    """One query head of one sequence: views of the caller's arrays and the numbers beside them."""

    problem: Problem
    b: int
    h: int
    key_head: int
    q: Array  # (n_q, D)
    k: Array  # (>= n_k, D), or the pages (num_blocks, block_size, D)
    v: Array
    n_q: int
    n_k: int
    table: Array | None  # (max_blocks,)
    bias: Array | None  # (1 or n_q, 1 or n_k)
    mask: Array | None
    slope: float | None
    sink: float | None


@dataclass(eq=False)
class State:
    """The online softmax of some rows: ``acc`` and ``total`` are relative to exp(``top``)."""

    acc: Array  # (block_q, Dv)
    total: Array  # (block_q, 1)
    top: Array  # (block_q, 1)


class Tiled:
    """A target of the suite."""

    block_q, block_k = 64, 64
    split = 512  # keys of one part; parts are merged
    max_head_dim = 512
    nothing = -np.inf  # the score of a hidden key, the maximum of no key
    seed: ClassVar[tuple[int | None, tuple[str, ...]]]  # of a subclass that is a mutant: `seeds`

    # ---- protocol ------------------------------------------------------------------------------
    def manifest(self) -> dict[str, Any]:
        return {
            "name": type(self).__name__.lower(),
            "version": "1",
            "array": "numpy",
            "device": "cpu",
            "dtypes": ["float16", "bfloat16", "float32", "float64"],
            "max_head_dim": self.max_head_dim,
            "features": list(FEATURES),
            "tile": [self.block_q, self.block_k],
        }

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        return_lse: bool = False,
        out: Array | None = None,
        **options: Any,
    ) -> tuple[Array, Array | None]:
        problem = self.validate(q, k, v, options)
        if out is None:
            out = self.allocate("out", problem.out_shape, q.dtype)
        lse = self.allocate("lse", problem.lse_shape, self.wide(q))
        with one_thread(), np.errstate(all="ignore"):  # NaN and inf in the input are the caller's
            for head in self.heads(problem, q, k, v, options):
                rows, numbers = self.rows(out, head, options), self.numbers(lse, head, options)
                for i0 in self.query_tiles(head):
                    self.finish(head, self.attend(head, i0), i0, rows, numbers)
        return out, lse if return_lse else None

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dout: Array,
        *,
        dlse: Array | None = None,
        **options: Any,
    ) -> Mapping[str, Array]:
        problem = self.validate(q, k, v, options)
        kinds = {"dq": q, "dk": k, "dv": v}
        kinds |= {f"d{n}": options[n] for n in ("bias", "sinks") if options.get(n) is not None}
        grads = {name: np.zeros(x.shape, self.wide(q)) for name, x in kinds.items()}
        with one_thread(), np.errstate(all="ignore"):
            for head in self.heads(problem, q, k, v, options):
                given = [self.rows(x, head, options) for x in (out, dout)]
                marks = [None if x is None else self.numbers(x, head, options) for x in (lse, dlse)]
                self.pull(head, grads, options, *given, *marks)
        return {name: self.rounded(x, kinds[name].dtype) for name, x in grads.items()}

    # ---- the call and its heads ----------------------------------------------------------------
    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        """Refuse what is malformed, and what is not claimed, before any work."""
        if options.get("precision", "ieee") != "ieee":
            raise NotImplementedError("precision: got 'tf32'; want 'ieee'")
        options.setdefault("layout", "bhsd")
        given = {
            name: recognise(x, name) if name in ARRAYS and x is not None else x
            for name, x in options.items()
        }
        problem = Problem.from_arrays(
            recognise(q, "q"), recognise(k, "k"), recognise(v, "v"), **given
        )
        if max(problem.head_dim, problem.head_dim_v) > self.max_head_dim:
            raise NotImplementedError(f"head_dim: got {problem.head_dim}; want at most 512")
        return problem

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def heads(
        self, problem: Problem, q: Array, k: Array, v: Array, options: Options
    ) -> Iterator[Head]:
        cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
        table, used = options.get("block_table"), options.get("seqused_k")
        for b in range(problem.batch):
            rows = self.cut(q, b, cu_q)
            if problem.paged:
                keys, values = k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3)
            else:
                keys, values = self.cut(k, b, cu_k), self.cut(v, b, cu_k)
            for h in range(problem.heads_q):
                key_head = self.key_head(problem, h)
                yield Head(
                    problem,
                    b,
                    h,
                    key_head,
                    rows[h],
                    keys[key_head],
                    values[key_head],
                    n_q=rows.shape[1],
                    n_k=keys.shape[1] if used is None else int(used[b]),
                    table=None if table is None else table[b],
                    bias=self.piece(options.get("bias"), b, h),
                    mask=self.piece(options.get("mask"), b, h),
                    slope=self.number(options.get("alibi_slopes"), b, h),
                    sink=self.number(options.get("sinks"), b, h),
                )

    def key_head(self, problem: Problem, h: int) -> int:
        return h // problem.group

    def cut(self, x: Array, b: int, cu: Array | None) -> Array:
        """(H, n, D): sequence ``b`` of q, k, v, out or dout."""
        return x[b] if cu is None else x[cu[b] : cu[b + 1]].swapaxes(0, 1)

    def rows(self, x: Array, head: Head, options: Options) -> Array:
        """(n, D): the head's part of q, out or dout."""
        return self.cut(x, head.b, options.get("cu_seqlens_q"))[head.h]

    def numbers(self, x: Array, head: Head, options: Options) -> Array:
        """(n,): the head's part of an LSE."""
        cu, b = options.get("cu_seqlens_q"), head.b
        return x[b, head.h] if cu is None else x[head.h, cu[b] : cu[b + 1]]

    def piece(self, x: Array | None, b: int, h: int) -> Array | None:
        """The head's part of a bias or mask, its broadcast axes kept at one."""
        if x is None:
            return None
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        return x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]

    def number(self, x: Array | None, b: int, h: int) -> float | None:
        """The head's slope or sink."""
        if x is None:
            return None
        return float(x[b, h] if x.ndim == 2 else x[h])

    # ---- tiles ---------------------------------------------------------------------------------
    def wide(self, x: Array) -> Any:
        """The accumulator's dtype."""
        return np.float64 if x.dtype == np.float64 else np.float32

    def operand(self, x: Array) -> Array:
        """What the multiplier is fed with."""
        return x.astype(self.wide(x))

    def stored(self, p: Array, dtype: Any) -> Array:
        """P or dS as the second product reads it."""
        return p.astype(dtype).astype(p.dtype)

    def padded(self, x: Array, size: int) -> Array:
        """(n, D) as (size, D), zeros behind the end."""
        if len(x) == size:
            return self.operand(x)
        tile = np.zeros((size, x.shape[1]), self.wide(x))
        tile[: len(x)] = self.operand(x)
        return tile

    def queries(self, x: Array, i0: int) -> Array:
        return self.padded(x[i0 : i0 + self.block_q], self.block_q)

    def keys(self, head: Head, x: Array, j0: int) -> Array:
        """A tile of k or v."""
        return self.padded(self.fetch(head, x, j0, min(j0 + self.block_k, head.n_k)), self.block_k)

    def fetch(self, head: Head, x: Array, j0: int, j1: int) -> Array:
        """Keys or values [j0, j1) as they lie."""
        return x[j0:j1] if head.table is None else x[self.slots(head, x, j0, j1)]

    def slots(self, head: Head, x: Array, j0: int, j1: int) -> tuple[Array, Array]:
        """Page and place in it of each key."""
        assert head.table is not None
        page, place = np.divmod(np.arange(j0, j1), x.shape[1])
        return head.table[page], place

    def query_tiles(self, head: Head) -> Iterable[int]:
        return range(0, head.n_q, self.block_q)

    def diagonal(self, head: Head) -> int:
        """Row i stands at key i + diagonal, for causal and window."""
        return 0 if head.problem.alignment == "top_left" else head.n_k - head.n_q

    def reach(self, head: Head, i0: int) -> tuple[int, int]:
        """Keys [low, high) that causal and window leave to the tile's rows."""
        first = i0 + self.diagonal(head)
        last = min(i0 + self.block_q, head.n_q) - 1 + self.diagonal(head)
        left, right = head.problem.window or (None, None)
        low = 0 if left is None else max(0, first - left)
        high = head.n_k if right is None else min(head.n_k, last + right + 1)
        return low, min(high, last + 1) if head.problem.causal else high

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        low, high = self.reach(head, i0)
        return range(low // self.block_k * self.block_k, high, self.block_k)

    # ---- scores --------------------------------------------------------------------------------
    def scale(self, head: Head) -> float:
        return head.problem.scale

    def product(self, head: Head, q: Array, k: Array) -> Array:
        return (q @ k.T) * q.dtype.type(self.scale(head))

    def capped(self, head: Head, x: Array) -> Array:
        cap = head.problem.softcap
        return x if cap is None else x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap))

    def added(self, head: Head, s: Array, i0: int, j0: int) -> Array:
        """Bias and ALiBi."""
        if head.bias is not None:
            s = s + self.patch(head.bias, i0, j0).astype(s.dtype)
        if head.slope is not None:
            s = s - s.dtype.type(head.slope) * self.distance(head, i0, j0).astype(s.dtype)
        return s

    def distance(self, head: Head, i0: int, j0: int) -> Array:
        i, j = self.places(i0, j0)
        return np.abs(i + head.n_k - head.n_q - j)

    def scores(self, head: Head, x: Array, seen: Array, i0: int, j0: int) -> Array:
        """Softcap, then bias and ALiBi, then the masks."""
        return np.where(seen, self.added(head, self.capped(head, x), i0, j0), self.nothing)

    def places(self, i0: int, j0: int) -> tuple[Array, Array]:
        """Row numbers (block_q, 1) and key numbers (1, block_k)."""
        return i0 + np.arange(self.block_q)[:, None], j0 + np.arange(self.block_k)[None, :]

    def inside(self, head: Head, i: Array, j: Array) -> Array:
        """Rows and keys that exist."""
        return (i < head.n_q) & (j < head.n_k)

    def causal(self, head: Head, i: Array, j: Array) -> Array:
        return j <= i + self.diagonal(head)

    def window(self, head: Head, i: Array, j: Array) -> Array:
        left, right = head.problem.window or (None, None)
        own = i + self.diagonal(head)
        seen = np.ones((len(i), j.shape[1]), bool)
        if left is not None:
            seen &= j >= own - left
        if right is not None:
            seen &= j <= own + right
        return seen

    def visible(self, head: Head, i0: int, j0: int) -> Array:
        """(block_q, block_k); a bias of -inf hides as a mask does."""
        i, j = self.places(i0, j0)
        seen = self.inside(head, i, j)
        if head.problem.window:
            seen &= self.window(head, i, j)
        if head.problem.causal:
            seen &= self.causal(head, i, j)
        if head.mask is not None:
            seen &= self.patch(head.mask, i0, j0)
        if head.bias is not None:
            seen &= ~np.isneginf(self.patch(head.bias, i0, j0))
        return seen

    def patch(self, x: Array, i0: int, j0: int) -> Array:
        """A tile of a bias or mask, zeros behind its ends, broadcast axes kept at one."""
        rows = self.block_q if x.shape[0] > 1 else 1
        columns = self.block_k if x.shape[1] > 1 else 1
        x = x[i0 if rows > 1 else 0 :][:rows, j0 if columns > 1 else 0 :][:, :columns]
        tile = np.zeros((rows, columns), x.dtype)
        tile[: x.shape[0], : x.shape[1]] = x
        return tile

    # ---- online softmax ------------------------------------------------------------------------
    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def finite(self, top: Array) -> Array:
        """A maximum to subtract: that of a row without a key is 0, not -inf."""
        return np.where(np.isneginf(top), 0, top)

    def start(self, head: Head, sink: float | None = None) -> State:
        """No key yet; a sink counts as one that has no value."""
        wide = self.wide(head.q)
        acc = np.zeros((self.block_q, head.v.shape[-1]), wide)
        top = np.full((self.block_q, 1), self.nothing if sink is None else sink, wide)
        total = np.zeros_like(top) if sink is None else self.exp(top - self.finite(top))
        return State(acc, total, top)

    def attend(self, head: Head, i0: int) -> State:
        """All keys of one tile of rows, part by part."""
        q, whole = self.queries(head.q, i0), self.start(head, head.sink)
        for _, tiles in groupby(self.key_tiles(head, i0), lambda j0: j0 // self.split):
            part = self.start(head)
            for j0 in tiles:
                part = self.update(head, part, q, i0, j0)
            whole = self.merge(whole, part)
        return whole

    def update(self, head: Head, state: State, q: Array, i0: int, j0: int) -> State:
        k, v = self.keys(head, head.k, j0), self.keys(head, head.v, j0)
        seen = self.visible(head, i0, j0)
        s = self.scores(head, self.product(head, q, k), seen, i0, j0)
        top = np.maximum(state.top, s.max(-1, keepdims=True))
        p = self.exp(s - self.finite(top))
        weight = self.weigh(self.stored(p, head.q.dtype), v, seen)
        return self.fold(state, State(weight, self.row_sum(p, head.q.dtype), top))

    def row_sum(self, p: Array, dtype: Any) -> Array:
        return p.sum(-1, keepdims=True)

    def fold(self, old: State, new: State) -> State:
        """Add what a tile gives, relative to its maximum, which no earlier one exceeds."""
        by = self.rescale(old.top, new.top)
        return State(old.acc * by + new.acc, old.total * by + new.total, new.top)

    def rescale(self, old: Array, new: Array) -> Array:
        """What sums relative to ``old`` are worth relative to ``new``."""
        return self.exp(old - self.finite(new))

    def merge(self, a: State, b: State) -> State:
        """The sums of two disjoint key sets."""
        top = np.maximum(a.top, b.top)
        x, y = self.rescale(a.top, top), self.rescale(b.top, top)
        return State(a.acc * x + b.acc * y, a.total * x + b.total * y, top)

    def weigh(self, p: Array, x: Array, seen: Array) -> Array:
        """p x, where a NaN or inf in x_j makes NaN of the rows that see j and reaches no other."""
        finite = np.isfinite(x)
        if finite.all():
            return p @ x
        good = np.asarray(finite.all(-1))
        tainted = (seen & ~good).any(-1, keepdims=True)
        return np.where(tainted, np.nan, p @ np.where(good[:, None], x, 0))

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        n = min(self.block_q, head.n_q - i0)
        out[i0 : i0 + n] = self.rounded(self.divided(state)[:n], out.dtype)
        lse[i0 : i0 + n] = self.logarithm(state)[:n, 0]

    def divided(self, state: State) -> Array:
        return state.acc / np.where(state.total == 0, 1, state.total)

    def rounded(self, x: Array, dtype: Any) -> Array:
        """To nearest even."""
        return x.astype(dtype, copy=False)

    def logarithm(self, state: State) -> Array:
        """Natural log-sum-exp; -inf for an empty row."""
        return state.top + np.log(state.total)

    # ---- backward ------------------------------------------------------------------------------
    def pull(
        self,
        head: Head,
        grads: Mapping[str, Array],
        options: Options,
        out: Array,
        dout: Array,
        lse: Array,
        dlse: Array | None,
    ) -> None:
        """Gradients of one head: key tiles outside, query tiles inside, scores recomputed."""
        dq = self.rows(grads["dq"], head, options)
        dbias = self.piece(grads.get("dbias"), head.b, head.h)
        delta = np.empty(head.n_q, self.wide(head.q))
        for i0 in range(0, head.n_q, self.block_q):
            rows = slice(i0, i0 + self.block_q)
            delta[rows] = self.delta(out[rows], dout[rows], None if dlse is None else dlse[rows])
        for j0 in range(0, head.n_k, self.block_k):
            k, v = self.keys(head, head.k, j0), self.keys(head, head.v, j0)
            dk, dv = np.zeros_like(k), np.zeros_like(v)
            for i0 in self.query_tiles(head):
                if not self.meets(head, i0, j0):
                    continue
                q, do = self.queries(head.q, i0), self.queries(dout, i0)
                seen = self.visible_again(head, i0, j0)
                x = self.product(head, q, k)
                s = self.scores(head, x, seen, i0, j0)
                p = self.probabilities(s, self.column(lse, i0), seen)
                ds = self.score_gradient(p, do @ v.T, self.column(delta, i0), seen)
                if dbias is not None:
                    self.reduce(dbias, ds, head, i0, j0)
                ds = self.through_cap(head, ds, x)
                p, ds = self.stored(p, head.q.dtype), self.stored(ds, head.q.dtype)
                self.accumulate(dv, self.spread(p.T, do, seen.T))
                part = self.spread(ds.T, q, seen.T) * k.dtype.type(self.scale_of_keys(head))
                self.accumulate(dk, part)
                part = self.spread(ds, k, seen) * q.dtype.type(self.scale_of_queries(head))
                self.accumulate(dq[i0 : i0 + self.block_q], part[: head.n_q - i0])
            self.scatter(head, grads["dk"], options, dk, j0)
            self.scatter(head, grads["dv"], options, dv, j0)
        if "dsinks" in grads:
            grads["dsinks"][head.h] += self.sink_gradient(head, lse, delta)

    def meets(self, head: Head, i0: int, j0: int) -> bool:
        """Does some row of the tile at i0 see a key of the tile at j0?"""
        return j0 in self.key_tiles(head, i0)

    def visible_again(self, head: Head, i0: int, j0: int) -> Array:
        return self.visible(head, i0, j0)

    def spread(self, p: Array, x: Array, seen: Array) -> Array:
        return self.weigh(p, x, seen)

    def accumulate(self, into: Array, part: Array) -> None:
        into += part

    def scale_of_queries(self, head: Head) -> float:
        return self.scale(head)

    def scale_of_keys(self, head: Head) -> float:
        return self.scale(head)

    def delta(self, out: Array, dout: Array, dlse: Array | None) -> Array:
        """sum(dout * out) (n,), and what the LSE's own gradient takes from it."""
        delta = (self.operand(dout) * self.operand(out)).sum(-1)
        return delta if dlse is None else delta - dlse.astype(delta.dtype)

    def column(self, x: Array, i0: int) -> Array:
        """A tile (block_q, 1) of numbers per row."""
        return self.padded(x[i0 : i0 + self.block_q, None], self.block_q)

    def probabilities(self, s: Array, lse: Array, seen: Array) -> Array:
        """exp(s - lse), already normalised; an empty row has an LSE of -inf and no weights."""
        return np.where(seen, self.exp(s - self.finite(lse)), 0)

    def score_gradient(self, p: Array, dp: Array, delta: Array, seen: Array) -> Array:
        return np.where(seen, p * (dp - delta), 0)

    def through_cap(self, head: Head, ds: Array, x: Array) -> Array:
        cap = head.problem.softcap
        return ds if cap is None else ds * (1 - np.tanh(x / x.dtype.type(cap)) ** 2)

    def reduce(self, dbias: Array, ds: Array, head: Head, i0: int, j0: int) -> None:
        """Add dS into the bias's gradient, summed over the axes that the bias was broadcast on."""
        ds = ds[: head.n_q - i0, : head.n_k - j0]
        into = dbias
        if dbias.shape[0] == 1:
            ds = ds.sum(0, keepdims=True)
        else:
            into = into[i0 : i0 + len(ds)]
        if dbias.shape[1] == 1:
            ds = ds.sum(1, keepdims=True)
        else:
            into = into[:, j0 : j0 + ds.shape[1]]
        into += ds

    def scatter(self, head: Head, into: Array, options: Options, tile: Array, j0: int) -> None:
        """Add a tile of dk or dv where its keys lie: heads of a group share them, sequences may
        share pages."""
        j1 = min(j0 + self.block_k, head.n_k)
        if head.table is not None:
            pages = into[:, :, head.key_head]
            pages[self.slots(head, pages, j0, j1)] += tile[: j1 - j0]
        else:
            cu = options.get("cu_seqlens_k")
            self.gather(head, self.cut(into, head.b, cu)[head.key_head, j0:j1], tile[: j1 - j0])

    def gather(self, head: Head, into: Array, part: Array) -> None:
        into += part

    def sink_gradient(self, head: Head, lse: Array, delta: Array) -> Array:
        weight = self.exp(lse.dtype.type(head.sink) - self.finite(lse))
        return -np.where(np.isneginf(lse), 0, weight * delta).sum()
