"""Tiles of the portable backward kernels, and the shared memory they need.

The rule kept here: standard library alone, so that a plan can be made, shown and refused without
the framework; a tile is taken only where an upper bound of what the compiler reports fits.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 512
"""The widest padded head dim that has tiles."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's tile of queries and keys, and how a program runs it."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """A tile for each kernel of the backward pass."""

    delta: Tile
    dkdv: Tile
    dq: Tile
    dbias: Tile


# By element size and padded head dim, the fastest tiles first: dkdv, dq, dbias. Those of head dims
# up to 256 spill few registers or none on sm_80 and sm_90.
_TILES: dict[int, dict[int, tuple[tuple[Tile, Tile, Tile], ...]]] = {
    2: {
        32: (
            (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)),
        ),
        64: (
            (Tile(32, 128, 8, 2), Tile(64, 32, 4, 2), Tile(64, 64, 4, 1)),
            (Tile(32, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 64, 4, 1)),
        ),
        128: (
            (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 4, 1)),
            (Tile(32, 64, 8, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
            (Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        ),
        256: (
            (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
            (Tile(16, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
            (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        ),
        512: (
            (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),
        ),
    },
    4: {
        32: (
            (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        ),
        64: (
            (Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        ),
        128: (
            (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
            (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        ),
        256: (
            (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),
        ),
        512: (
            (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),
            (Tile(16, 8, 8, 1), Tile(8, 16, 8, 1), Tile(16, 8, 4, 1)),
        ),
    },
}  # fmt: skip


def candidates(block_d: int, block_dv: int, element_size: int) -> tuple[BackwardTiles, ...]:
    """Tiles for padded head dims, the ones to try first in front; none where a head dim is wider
    than `LARGEST`."""
    block = max(block_d, block_dv, 32)
    delta = Tile(max(4, 4096 // block), 1, 4, 1)
    return tuple(BackwardTiles(delta, *tiles) for tiles in _TILES[element_size].get(block, ()))


def shared_bytes(
    kernel: str,
    tile: Tile,
    block_d: int,
    block_dv: int,
    element_size: int,
    *,
    masked: bool = False,
    precision: str = "ieee",
) -> int:
    """An upper bound of the shared memory that the compiler reports for a kernel, "dkdv", "dq" or
    "dbias"; ``masked``: with a bias or a mask."""
    scores = 0
    if masked:  # a bias of float32 and a mask, staged with the blocks
        scores = 5 * tile.num_stages * tile.block_q * tile.block_k
    row = element_size * (block_d + block_dv)
    resident, streamed = tile.block_q, tile.block_k
    copies: float = max(1, tile.num_stages)
    if kernel == "dkdv":
        resident, streamed = tile.block_k, tile.block_q
        if element_size == 4 and precision == "ieee":
            scores += 8 * tile.block_q * tile.block_k  # P and dS, on their way to other threads
        else:
            copies = max(1.5, copies)  # what masked blocks turn around lies beside the stages
    # one number a row and stage (LSE, delta, poison), and what reductions exchange
    return int(row * (resident + copies * streamed)) + scores + 2048


def largest_shared(
    tiles: BackwardTiles,
    block_d: int,
    block_dv: int,
    element_size: int,
    *,
    masked: bool = False,
    precision: str = "ieee",
) -> int:
    """The bound of the kernel that needs most."""
    return max(
        shared_bytes(
            name, tile, block_d, block_dv, element_size, masked=masked, precision=precision
        )
        for name, tile in (("dkdv", tiles.dkdv), ("dq", tiles.dq), ("dbias", tiles.dbias))
    )
