"""Shared memory and tiles of the Hopper forward kernel, without Triton.

The rule kept here: the planner decides from these numbers alone, so `forward_shared_bytes` returns
what the compiler reports for the same configuration, and every tile listed fits.
"""

from __future__ import annotations

WARPGROUP_ROWS = 64  # query rows of one consumer warpgroup: the M of one wgmma
SHARED_LIMIT = 232_448  # bytes that one block may have on sm_90
_BARRIER_ALIGNMENT = 16
_ARGUMENTS = 320  # bytes that warp specialization passes to its functions, with Triton 3.6

ANY = 2**31
# Per padded head dim: (block_k, stages, consumer warpgroups), and up to how many keys, without and
# under a diagonal. At head dim 64 the softmax takes as long as the products, and more warpgroups
# hide more of it: three over long rows, and over short ones four, whose smaller blocks waste less
# at a tile's ends. At 128 a diagonal over few keys cuts most blocks: small ones waste less of them,
# and compile faster.
FORWARD_TILES: dict[int, tuple[tuple[tuple[int, int, int], tuple[int, int]], ...]] = {
    64: (
        ((64, 4, 4), (2048, 2048)),
        ((128, 2, 3), (ANY, ANY)),
        ((128, 2, 2), (ANY, ANY)),
        ((64, 2, 2), (ANY, ANY)),
    ),
    128: (
        ((64, 3, 2), (0, 512)),
        ((128, 2, 2), (ANY, ANY)),
        ((64, 2, 2), (ANY, ANY)),
    ),
    256: (
        ((64, 2, 2), (ANY, ANY)),
        ((32, 3, 2), (ANY, ANY)),
    ),
}
MAX_REGISTERS = {
    2: 168,
    3: 128,
    4: 96,
}  # maxnreg at launch, by consumers: threads * maxnreg <= 65536


def head_dim_pad(head_dim: int, value_dim: int) -> int:
    """The power of two that both head dims are padded to by the loads, at least 64."""
    return max(64, 1 << (max(head_dim, value_dim) - 1).bit_length())


def forward_shapes(pad: int, keys: int, *, causal: bool) -> list[tuple[int, int, int]]:
    """The tiles for so many keys, the best first."""
    return [shape for shape, most in FORWARD_TILES[pad] if keys <= most[causal]]


def forward_block_q(num_consumers: int = 2) -> int:
    """Query rows of one tile."""
    return WARPGROUP_ROWS * num_consumers


def forward_shared_bytes(
    head_dim_pad: int,
    block_k: int,
    stages: int,
    element_bytes: int = 2,
    num_consumers: int = 2,
) -> int:
    """Bytes of shared memory of one block, as the compiler lays them out."""
    rows = WARPGROUP_ROWS * num_consumers + 2 * stages * block_k  # of q; of k and v
    size = rows * head_dim_pad * element_bytes + _ARGUMENTS
    # Barrier arrays, the larger first: two of q, four of k and v.
    for entries in sorted([num_consumers] * 2 + [stages] * 4, reverse=True):
        size = -(-size // _BARRIER_ALIGNMENT) * _BARRIER_ALIGNMENT + 8 * entries
    # One byte per warp of the other partitions, counted in whole warpgroups.
    return size + 4 * num_consumers
