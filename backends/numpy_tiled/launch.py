"""From a call's arrays to jobs: views of each sequence with the heads first, then the pool.

The rule kept here: the caller's arrays are viewed, transposed and sliced, never copied; sequences
are made one at a time as the jobs are handed out, so that nothing grows with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from portattn.arrays import as_numpy
from portattn.backends.numpy_tiled import backward, config
from portattn.backends.numpy_tiled.config import Config
from portattn.backends.numpy_tiled.decode import forward_jobs
from portattn.backends.numpy_tiled.masking import Array, Band
from portattn.backends.numpy_tiled.pool import run_jobs
from portattn.backends.numpy_tiled.tile import Keys, Scoring, Sequence, blas_reads
from portattn.backends.numpy_tiled.workspace import Workspaces
from portattn.contract import Call
from portattn.machine import cores
from portattn.problem import Problem

# OpenBLAS, MKL and BLIS take one thread for products below these sizes, so that a small problem
# needs no limit on theirs to have the bits that it has under one.
SMALL_MATRIX = 1 << 13  # elements of each operand
SMALL_PRODUCT = 1 << 18  # multiplications
POOL_FLOPS = 1 << 23  # about 0.1 ms of one core: less than this is not worth waking another

_WORKSPACES = {dtype: Workspaces(dtype, cores()) for dtype in ("float32", "float64")}


def run(problem: Problem, tiles: Config, call: Call) -> None:
    """Fill ``call`` in place: ``out`` and ``lse``, or the gradients of a backward problem."""
    scoring = Scoring.of(problem)
    views = Views.of(problem, call)
    work = flops(problem)
    threads = config.thread_count() if work >= POOL_FLOPS else 1
    if problem.backward:
        jobs = backward.gradient_jobs(problem, scoring, views, tiles)
    else:
        jobs = chain.from_iterable(
            forward_jobs(scoring, views.sequence(b), problem, tiles, threads) for b in views.order()
        )
    workspace = _WORKSPACES[scoring.dtype].lend
    rows = max(1, min(tiles.block_q, problem.group * problem.seq_q))
    keys = min(max(tiles.block_k, tiles.keys_for(rows, copied=False)), problem.seq_k)
    wide = max(problem.head_dim, problem.head_dim_v)
    if (
        max(rows * keys, rows * wide, keys * wide) < SMALL_MATRIX
        and rows * keys * wide <= SMALL_PRODUCT
        and work < POOL_FLOPS
    ):
        run_jobs(jobs, workspace, 1, nullcontext())
    else:
        run_jobs(jobs, workspace, threads)


def release() -> None:
    """Free the buffers that are kept for the next call."""
    for workspaces in _WORKSPACES.values():
        workspaces.clear()


def flops(problem: Problem) -> float:
    """Multiplications and additions of the call, hidden tiles counted too."""
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    passes = 3.5 if problem.backward else 1.0
    return 2.0 * scores * (problem.head_dim + problem.head_dim_v) * passes


class Views(NamedTuple):
    """The arrays of a call in NumPy. Arrays like q are (B, Hq, Sq, D), packed (Hq, T, D); keys
    (B, Hk, Sk, D), packed (Hk, T, D), or pages as they came; LSEs (B, Hq, Sq), packed (Hq, T);
    mask and bias four-dimensional."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array | None
    bias: Array | None
    mask: Array | None
    slopes: Array | None
    sinks: Array | None
    starts_q: list[int] | None
    starts_k: list[int] | None
    used: list[int] | None
    table: Array | None
    dout: Array | None
    dlse: Array | None
    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbias: Array | None
    dsinks: Array | None
    k_direct: bool
    v_direct: bool

    @staticmethod
    def of(problem: Problem, call: Call) -> Views:
        """The views of a call; nothing is copied but lengths and block numbers."""
        dtype = np.dtype(problem.accumulator)
        axes = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "thd": (1, 0, 2)}[problem.layout]

        def view(array: Any) -> Any:
            return None if array is None else as_numpy(array)

        def heads_first(array: Any) -> Any:
            return None if array is None else as_numpy(array).transpose(axes)

        def like_keys(array: Any) -> Any:
            return view(array) if problem.paged else heads_first(array)

        def wide(array: Any) -> Any:
            return None if array is None else as_numpy(array)[(None,) * (4 - len(array.shape))]

        def numbers(array: Any) -> Any:
            return None if array is None else as_numpy(array).tolist()

        q, k, v = heads_first(call.q), like_keys(call.k), like_keys(call.v)
        return Views(
            problem,
            q, k, v, heads_first(call.out), view(call.lse),
            wide(call.bias), wide(call.mask), view(call.alibi_slopes), view(call.sinks),
            numbers(call.cu_seqlens_q), numbers(call.cu_seqlens_k),
            numbers(call.seqused_k), view(call.block_table),
            heads_first(call.dout), view(call.dlse), heads_first(call.dq),
            like_keys(call.dk), like_keys(call.dv), wide(call.dbias), view(call.dsinks),
            k_direct=not problem.paged and blas_reads(k, dtype),
            v_direct=not problem.paged and blas_reads(v, dtype),
        )  # fmt: skip

    def order(self) -> Iterator[int]:
        """The sequences, the long ones first: no thread is left alone with one at the end."""
        batch = range(self.problem.batch)
        if self.starts_q is None:
            return iter(batch)
        starts = self.starts_q
        return iter(sorted(batch, key=lambda b: starts[b] - starts[b + 1]))

    def sequence(self, b: int) -> Sequence:
        """Sequence ``b`` of the batch."""
        problem = self.problem
        at: Any = b
        if self.starts_q is not None:
            at = (slice(None), slice(self.starts_q[b], self.starts_q[b + 1]))
        q = self.q[at]
        keys = self.keys(b)
        slopes = self.slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b]
        return Sequence(
            q,
            keys,
            Band.of(q.shape[1], keys.length, problem.causal, problem.window),
            self.out[at],
            None if self.lse is None else self.lse[at],
            None if self.bias is None else self.bias[b if len(self.bias) > 1 else 0],
            None if self.mask is None else self.mask[b if len(self.mask) > 1 else 0],
            slopes,
            self.sinks,
            None if self.dout is None else self.dout[at],
            None if self.dlse is None else self.dlse[at],
            None if self.dq is None else self.dq[at],
        )

    def keys(self, b: int) -> Keys:
        """Keys and values of sequence ``b``."""
        used = None if self.used is None else self.used[b]
        if self.table is not None:
            return Keys(self.k, self.v, used or 0, False, False, {}, self.pages(b))
        k, v = self.key_part(self.k, b), self.key_part(self.v, b)
        length = k.shape[1] if used is None else used
        return Keys(k, v, length, self.k_direct, self.v_direct, {})

    def pages(self, b: int) -> tuple[int, ...]:
        """The blocks that sequence ``b`` uses; no other entry of the table is read."""
        assert self.table is not None and self.used is not None
        return tuple(self.table[b, : -(-self.used[b] // self.k.shape[1])].tolist())

    def key_part(self, x: Array, b: int) -> Array:
        """The (Hk, Sk, D) part of sequence ``b`` in an array like k that is not paged."""
        if self.starts_k is None:
            part: Array = x[b]
        else:
            part = x[:, self.starts_k[b] : self.starts_k[b + 1]]
        return part
