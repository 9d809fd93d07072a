"""What can be timed: portattn's backends and their peers, each as a function without arguments.

The rule kept here: every contender computes the same thing from the same numbers, with the same
number of threads, and its result is compared before its time counts; but for `YARDSTICKS`, which
say what the BLAS gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

import portattn
from portattn.bench.cells import Cell
from portattn.machine import cores

Run = Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """float32 arrays of one cell, (B, H, S, D), random normal."""

    q: np.ndarray[Any, Any]
    k: np.ndarray[Any, Any]
    v: np.ndarray[Any, Any]

    @classmethod
    def of(cls, cell: Cell, seed: int) -> Inputs:
        """The same numbers for the same cell and seed."""
        rng = np.random.default_rng(seed)

        def normal(heads: int, length: int) -> np.ndarray[Any, Any]:
            shape = (cell.batch, heads, length, cell.head_dim)
            return rng.standard_normal(shape, dtype=np.float32)

        return cls(
            normal(cell.heads_q, cell.seq_q),
            normal(cell.heads_k, cell.seq_k),
            normal(cell.heads_k, cell.seq_k),
        )


def build(name: str, cell: Cell, inputs: Inputs) -> Run:
    """The contender ``name`` on these inputs; `ValueError` for an unknown name."""
    if name in PEERS:
        return PEERS[name](cell, inputs)
    return _backend(name, cell, inputs)


def _backend(name: str, cell: Cell, inputs: Inputs) -> Run:
    causal = "bottom_right" if cell.causal else False
    out = np.empty(inputs.q.shape, np.float32)

    def run() -> Any:
        return portattn.attention(
            inputs.q, inputs.k, inputs.v, layout="bhsd", causal=causal, backend=name, out=out
        )

    def fresh() -> Any:
        # The host-overhead cell pays for its output, as a caller would.
        return portattn.attention(
            inputs.q, inputs.k, inputs.v, layout="bhsd", causal=causal, backend=name
        )

    return fresh if cell.kind == "overhead" else run


def _torch_sdpa(cell: Cell, inputs: Inputs) -> Run:
    import torch

    torch.set_num_threads(cores())
    q, k, v = (torch.from_numpy(x) for x in (inputs.q, inputs.k, inputs.v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    # is_causal is top-left in torch; for one query row against a cache nothing is hidden.
    causal = cell.causal and cell.seq_q == cell.seq_k
    gqa = cell.heads_q != cell.heads_k

    def run() -> Any:
        with torch.inference_mode():
            return sdpa(q, k, v, is_causal=causal, enable_gqa=gqa).numpy()

    return run


def _naive_numpy(cell: Cell, inputs: Inputs) -> Run:
    scale = np.float32(1 / math.sqrt(cell.head_dim))
    group = cell.heads_q // cell.heads_k

    def run() -> Any:
        k, v = (np.repeat(x, group, 1) if group > 1 else x for x in (inputs.k, inputs.v))
        scores = inputs.q @ k.swapaxes(-1, -2) * scale
        if cell.causal:
            hidden = np.triu(np.ones(scores.shape[-2:], bool), 1 + cell.seq_k - cell.seq_q)
            scores = np.where(hidden, np.float32(-np.inf), scores)
        scores -= scores.max(-1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(-1, keepdims=True)
        return weights @ v

    return run


def _sgemm(cell: Cell, inputs: Inputs) -> Run:
    # The ceiling: one float32 matrix product through NumPy's BLAS, all threads.
    del inputs
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((GEMM, GEMM), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    return lambda: np.matmul(a, b, out=out)


def _tile_products(cell: Cell, inputs: Inputs) -> Run:
    # The two products of a tiled pass and nothing else, on the tiles that it visits: what is left
    # for the softmax is the distance from here.
    heads, rows, keys = cell.heads_q, cell.seq_q, cell.seq_k
    group, offset = heads // cell.heads_k, keys - rows
    blas = ThreadpoolController().select(user_api="blas")
    threads = cores()
    pool = ThreadPoolExecutor(threads)
    scores = np.empty((threads, TILE_ROWS * TILE_KEYS), np.float32)
    out = np.empty((threads, TILE_ROWS, cell.head_dim), np.float32)

    def work(thread: int, tiles: Iterator[tuple[int, int, int]]) -> None:
        for b, h, i in tiles:
            q, n = inputs.q[b, h, i : i + TILE_ROWS], h // group
            seen = min(keys, i + TILE_ROWS + offset) if cell.causal else keys
            for j in range(0, seen, TILE_KEYS):
                k, v = (x[b, n, j : j + TILE_KEYS] for x in (inputs.k, inputs.v))
                s = scores[thread, : len(q) * len(k)].reshape(len(q), len(k))
                np.matmul(q, k.T, out=s)
                np.matmul(s, v, out=out[thread, : len(q)])

    def run() -> Any:
        # Long rows first. A list's iterator is shared: each tile goes to one thread.
        tiles = [
            (b, h, i)
            for i in reversed(range(0, rows, TILE_ROWS))
            for b in range(cell.batch)
            for h in range(heads)
        ]
        with blas.limit(limits=1):
            shared = iter(tiles)
            for done in [pool.submit(work, thread, shared) for thread in range(threads)]:
                done.result()

    return run


GEMM = 2048
TILE_ROWS, TILE_KEYS = 512, 384  # OpenBLAS is fast there, and a tile of scores stays in the cache
YARDSTICKS = ("sgemm", "tile-products")  # of prefill cells alone, and without a result
PEERS: dict[str, Callable[[Cell, Inputs], Run]] = {
    "torch-sdpa": _torch_sdpa,
    "naive-numpy": _naive_numpy,
    "sgemm": _sgemm,
    "tile-products": _tile_products,
}
