"""Tile sizes, and the memory that they cost.

The rule kept here: tile borders follow from the sequence itself, its heads, head dims, dtype and
masks. Neither the number of threads nor the batch moves one, so that a sequence has the same bits
alone, in a batch, packed, and on any number of cores.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portattn.machine import cores

if TYPE_CHECKING:
    from portattn.problem import Problem

FEW_ROWS = 64
"""Up to here a tile's time goes into reading keys and values, not into multiplying."""

FEW_SCORES = 1 << 17
"""Scores of a tile of few rows."""

SCORES = 2 * 384 * 384
"""Scores of the heads that share a tile: with what else it needs they fit a second-level cache of
2 MiB."""

VALUES = 1 << 16
"""Numbers of a tile's rows of q or of out, and of its keys where they are copied, likewise."""

FEW_RESULTS = 512
"""Below so many results (500, as of NumPy 2) matmul keeps the GIL, however long it takes."""

LONG_PRODUCT = 1 << 18
"""Multiplications from which on that is worth some calls more."""

SHORT = 2048
"""Queries up to which tiles that an edge cuts are a good part of all: they have fewer rows then."""

KEPT = 8 << 20
"""Bytes of a thread's buffers above which they are not kept for the next call."""

TURNS = 4
"""Jobs that each thread has at least where heads may share a tile."""

JOBS = 16
"""Jobs that a sequence gives at least where it can: smaller tiles, then a split along the keys."""


@dataclass(frozen=True, slots=True)
class Config:
    """Rows and keys of one tile.

    ``block_q`` query rows of a key head at most, of several heads of its group where a sequence is
    short, and of `together` key heads; ``short_q`` of a sequence of at most `SHORT` queries;
    ``block_k`` keys; ``edge_k`` keys where the edge of a causal mask or window cuts through the
    tile; under at most `FEW_ROWS` rows, ``stream_k`` keys at most where BLAS reads the caller's
    array and ``copy_k`` where it needs a copy; ``chunk_k`` keys at least in each part of a tile
    that is split along the keys.
    """

    block_q: int
    short_q: int
    block_k: int
    edge_k: int
    stream_k: int
    chunk_k: int
    copy_k: int = 2048

    def rows_for(self, heads_k: int, group: int, queries: int) -> int:
        """Rows of a tile of a sequence, halved where they would give few jobs."""
        block_q = self.short_q if queries <= SHORT else self.block_q
        while block_q >= 256 and tile_count(heads_k, group, queries, block_q) < JOBS:
            block_q //= 2
        return block_q

    def keys_for(self, rows: int, *, copied: bool) -> int:
        """Keys of a tile of that many rows. Few rows take many keys at a time: nothing is read
        twice then, and each call to BLAS is long enough for other threads to get their turn."""
        if rows > FEW_ROWS:
            return self.block_k
        return self.copy_k if copied else min(self.stream_k, FEW_SCORES // rows)


def together(problem: Problem, rows: int, keys: int, *, copied: bool) -> int:
    """How many key heads' tiles of ``rows`` rows and ``keys`` keys may make one: each call to NumPy
    does them all, and there are the fewer calls."""
    if rows == 0 or keys == 0:
        return 1
    # Numbers of float64 are twice as wide; beside inputs of 16 bits, tiles count for twice as much.
    item = 1 if problem.dtype == "float32" else 2
    scores = FEW_SCORES // 2 if rows <= FEW_ROWS else SCORES
    wide = max(rows, keys if copied else 0) * max(problem.head_dim, problem.head_dim_v)
    most = min(scores // (rows * keys * item), VALUES // max(wide * item, 1))
    return min(max(most, 1), problem.heads_k)


def tile_count(heads_k: int, group: int, queries: int, block_q: int) -> int:
    """Row tiles of a sequence: heads of one group share a tile as far as they fit."""
    if queries == 0:
        return 0
    together = min(group, max(1, block_q // queries))
    return heads_k * -(-group // together) * -(-queries // block_q)


def choose(problem: Problem) -> Config:
    """The tiles for a problem: scores, and copies of keys and values where the dtype needs them,
    stay in a core's second-level cache."""
    copy_k = 2048
    while copy_k > 128 and copy_k * max(problem.head_dim, problem.head_dim_v) > 1 << 18:
        copy_k //= 2
    # Numbers of float64 take twice the room, inputs of 16 bits a copy beside them, and gradients
    # three tiles of scores.
    roomy = problem.dtype == "float32" and not problem.backward
    block_q, block_k = (512, 384) if roomy else (256, 256)
    edges = problem.causal is not None or problem.window is not None
    # Of narrow heads with keys of their own several share a tile of few rows (`together`): less is
    # hidden then for no more calls. Wide ones and those of a group take one each, and are slower.
    shared = problem.group == 1 and max(problem.head_dim, problem.head_dim_v) <= 64
    short_q = 256 if edges and shared else block_q
    return Config(
        block_q=short_q if problem.seq_q <= SHORT else block_q,
        short_q=short_q,
        block_k=block_k,
        edge_k=block_k,
        stream_k=1 << 15,
        chunk_k=4096,
        copy_k=copy_k,
    )


def thread_count() -> int:
    """Threads of a call: PORTATTN_NUM_THREADS, or the cores that this process may use.

    Raises `ValueError` where the variable is no integer of at least 1.
    """
    text = os.environ.get("PORTATTN_NUM_THREADS")
    if not text:
        return cores()
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"PORTATTN_NUM_THREADS: got {text!r}; want an integer of at least 1")
    return int(text)


def workspace_bytes(config: Config, problem: Problem, threads: int) -> int:
    """The most that a call allocates beyond its inputs and outputs: tile buffers of each thread,
    and the partial results of tiles that are split along the keys. No sequence length is in it
    but to make it smaller."""
    d, dv = problem.head_dim, problem.head_dim_v
    rows = min(config.block_q, problem.group * problem.seq_q)
    keys = min(max(config.block_k, config.copy_k), problem.seq_k)
    many = score = rows * min(config.block_k, problem.seq_k)
    if not problem.backward:  # heads share a tile
        few = min(rows, FEW_ROWS) * problem.seq_k
        score = max(many, 2 * min(problem.heads_k * few, FEW_SCORES))
        score = max(score, min(problem.heads_k * many, SCORES))
        values = VALUES // max(d, dv, 1)
        rows = max(rows, min(problem.heads_k * rows, values))
        keys = max(keys, min(problem.heads_k * keys, values))
    tiles = score * (3 if problem.backward else 2)
    if problem.bias is not None:
        tiles += score
    if problem.softcap is not None and problem.backward:
        tiles += score
    per_row = 3 * d + 5 * dv + 16
    per_key = 2 * (d + dv)
    if problem.backward:
        per_row, per_key = per_row + 2 * d + 2 * dv, per_key + 3 * (d + dv)
    item = 8 if problem.accumulator == "float64" else 4
    bytes_of_thread = item * (tiles + per_row * rows + per_key * keys)
    bytes_of_thread += item * min(max(config.block_k, config.stream_k), problem.seq_k)  # ones
    # Long products in parts: of a head fewer than three times `FEW_RESULTS` numbers, and of so many
    # keys no more heads than these share a tile.
    heads = FEW_SCORES // 2 * FEW_RESULTS // LONG_PRODUCT
    heads = 1 if problem.backward else min(problem.heads_k, heads)
    bytes_of_thread += item * 3 * FEW_RESULTS * heads
    # masks of one byte an element: cut-out, its inverse, combinations
    bytes_of_thread += 6 * score + 4 * score * (problem.bias is not None)
    if problem.bias is not None and problem.backward:
        bytes_of_thread += 8 * score
    partials = 0
    if not problem.backward and problem.seq_k >= 2 * config.chunk_k:
        partials = (threads + 1) * JOBS * item * rows * (dv + 2)
    return threads * bytes_of_thread + partials + (1 << 16)
