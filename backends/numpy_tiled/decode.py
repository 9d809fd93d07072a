"""Few tiles over many keys: the keys are split into chunks, one job each, and joined.

The rule kept here: where the chunks lie follows from the sequence alone, not from the number of
threads or the batch, and the parts are joined in order whoever finished last; so the bits are the
same on any machine size. (Dao et al., Flash-Decoding, 2023.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np

from portattn.backends.numpy_tiled.config import JOBS, TURNS, Config, tile_count, together
from portattn.backends.numpy_tiled.forward import Partial, attend, write
from portattn.backends.numpy_tiled.masking import Array
from portattn.backends.numpy_tiled.pool import Job
from portattn.backends.numpy_tiled.tile import Rows, Scoring, Sequence
from portattn.backends.numpy_tiled.workspace import Workspace
from portattn.problem import Problem


def forward_jobs(
    scoring: Scoring, seq: Sequence, problem: Problem, config: Config, threads: int
) -> Iterator[Job]:
    """The jobs of one sequence: a row tile each, of several heads, or a chunk of one."""
    length = seq.q.shape[1]
    block_q = config.rows_for(problem.heads_k, seq.group, length)
    tiles = tile_count(problem.heads_k, seq.group, length, block_q)
    heads = 1
    if tiles and not _splits(tiles, seq.keys.length, config):
        of_head = min(block_q, seq.group * length)
        copied = not (seq.keys.k_direct and seq.keys.v_direct)
        keys = min(config.keys_for(of_head, copied=copied), seq.keys.length)
        heads = together(problem, of_head, keys, copied=copied)
        # No bit depends on who shares a tile, so the number of threads may count: each has some.
        heads = min(heads, max(1, problem.batch * tiles // (TURNS * threads)))
        heads = -(-problem.heads_k // -(-problem.heads_k // heads))
    for rows in seq.row_tiles(0, problem.heads_k, block_q, 0, length, heads):
        chunks = _chunks(seq, rows, tiles, config)
        if len(chunks) == 1:
            yield partial(_whole, scoring, seq, rows, config)
        else:
            parts = _Parts(scoring, seq, rows, chunks, config)
            yield from (partial(parts.run, n) for n in range(len(chunks)))


def _splits(tiles: int, keys: int, config: Config) -> bool:
    return JOBS // tiles > 1 and keys >= 2 * config.chunk_k


def _chunks(seq: Sequence, rows: Rows, tiles: int, config: Config) -> list[tuple[int, int]]:
    j0, j1 = seq.band.seen(rows.i0, rows.i1)
    count = min(JOBS // tiles, (j1 - j0) // config.chunk_k)
    if count <= 1:
        return [(j0, j1)]
    step = -(-(j1 - j0) // count)
    step += -step % config.block_k
    return [(j, min(j + step, j1)) for j in range(j0, j1, step)]


def _whole(scoring: Scoring, seq: Sequence, rows: Rows, config: Config, ws: Workspace) -> None:
    write(scoring, seq, rows, attend(scoring, seq, rows, 0, seq.keys.length, config, ws))


class _Parts:
    """One tile's chunks; the job that finishes last joins them and writes the result."""

    def __init__(
        self,
        scoring: Scoring,
        seq: Sequence,
        rows: Rows,
        chunks: list[tuple[int, int]],
        config: Config,
    ) -> None:
        self._scoring, self._seq, self._rows, self._config = scoring, seq, rows, config
        self._chunks = chunks
        self._parts: list[Partial | None] = [None] * len(chunks)
        self._left = len(chunks)
        self._lock = threading.Lock()

    def run(self, n: int, ws: Workspace) -> None:
        first, last = self._chunks[n]
        part = attend(self._scoring, self._seq, self._rows, first, last, self._config, ws)
        self._parts[n] = Partial(*(x.copy() for x in part))
        with self._lock:
            self._left -= 1
            done = self._left == 0
        if done:
            write(self._scoring, self._seq, self._rows, self._joined())

    def _joined(self) -> Partial:
        parts = [part for part in self._parts if part is not None]
        self._parts.clear()
        tops = [np.where(part.total == 0, -np.inf, part.top) for part in parts]
        top = np.maximum.reduce(tops)
        np.copyto(top, 0, where=top == -np.inf)  # rows that saw nothing in any part
        acc: Array = np.zeros_like(parts[0].acc)
        total: Array = np.zeros_like(parts[0].total)
        for part, own in zip(parts, tops, strict=True):
            weight = np.exp((own - top) * self._scoring.to_e).astype(acc.dtype)
            total += weight * part.total
            # A part that saw nothing has weight 0 and sums of 0.
            acc += weight[:, None] * part.acc
        return Partial(acc, top.astype(acc.dtype), total)
