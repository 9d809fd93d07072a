"""Tiles of the backward kernels on Hopper, and the shared memory that each of them takes.

The rule kept here: a tile is planned without Triton, and the bytes said here are those that the
compiler allocates, to the byte; a test compiles every tile and compares. Beside tiles and barriers
these are the arguments that warp specialisation passes to its functions (measured, with Triton
3.6) and its state.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP_ROWS = 64
HEAD_DIMS = (64, 128, 256)
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class DkdvTile:
    """The key tile of the dk and dv kernel, and how its warpgroups share the work.

    split: "keys", each warpgroup owns 64 keys; "products", two warpgroups share 64 keys, one with
    P and dv, the other with dS and dk. stages: query blocks in flight. p_stages: blocks of P
    between the two ("products" only). early_dp ("keys" only): dP is computed beside S instead of
    after it, at the price of its registers. k_in_registers ("keys" only): the keys and values of
    a warpgroup stay in its registers, which halves what the tensor cores read of shared memory
    for S and dP.
    """

    split: str
    block_q: int
    warpgroups: int
    stages: int
    p_stages: int = 0
    early_dp: bool = False
    k_in_registers: bool = False

    @property
    def block_k(self) -> int:
        return WARPGROUP_ROWS * (self.warpgroups if self.split == "keys" else 1)


@dataclass(frozen=True)
class DqTile:
    """The query tile of the dq kernel: 64 rows for each warpgroup.

    early_dp: dP is computed beside S instead of after it, at the price of its registers.
    q_in_registers: the queries and output gradients of a warpgroup stay in its registers.
    """

    block_k: int
    warpgroups: int
    k_stages: int
    v_stages: int
    early_dp: bool = False
    q_in_registers: bool = False

    @property
    def block_q(self) -> int:
        return WARPGROUP_ROWS * self.warpgroups


@dataclass(frozen=True)
class BackwardConfig:
    head_dim: int  # padded: 64, 128 or 256
    dkdv: DkdvTile
    dq: DqTile


def dkdv_shared_bytes(config: BackwardConfig, *, causal: bool, flags: bool = False) -> int:
    """Shared memory of the dk and dv kernel, aligned outputs; others take up to 16 bytes more."""
    tile = config.dkdv
    rows = 2 * tile.block_k + 2 * tile.stages * tile.block_q
    statistics = 2 * tile.stages * tile.block_q * 4
    exchange = tile.p_stages * tile.block_k * tile.block_q * _ELEMENT_BYTES
    panels = 2 * tile.block_k // WARPGROUP_ROWS
    barriers = _barrier_bytes(panels, panels, *4 * (tile.stages,))
    if tile.split == "keys":
        arguments = 384
    else:
        barriers += _barrier_bytes(tile.p_stages, tile.p_stages)
        arguments = 400
    return (
        rows * config.head_dim * _ELEMENT_BYTES
        + statistics
        + exchange
        + barriers
        + arguments
        + 16 * (causal or flags)
        + _state_bytes(tile.warpgroups)
    )


def dq_shared_bytes(config: BackwardConfig, *, causal: bool, flags: bool = False) -> int:
    """Shared memory of the dq kernel, aligned outputs; others take up to 16 bytes more."""
    tile = config.dq
    rows = 2 * tile.block_q + (tile.k_stages + tile.v_stages) * tile.block_k
    barriers = _barrier_bytes(*2 * (tile.warpgroups, tile.k_stages, tile.v_stages))
    arguments = 320 + 16 * (causal or flags)
    return (
        rows * config.head_dim * _ELEMENT_BYTES
        + barriers
        + arguments
        + _state_bytes(tile.warpgroups)
    )


def _barrier_bytes(*counts: int) -> int:
    return sum(8 * (count + count % 2) for count in counts)


def _state_bytes(warpgroups: int) -> int:
    """A byte for each warp beyond the first warpgroup; the loading warp counts as four."""
    return 4 * warpgroups


# Default first; the others are there to be measured against it.
BACKWARD_TILES: dict[int, tuple[BackwardConfig, ...]] = {
    64: (
        BackwardConfig(
            64,
            DkdvTile("keys", 64, warpgroups=3, stages=4),
            DqTile(64, warpgroups=3, k_stages=4, v_stages=4, early_dp=True),
        ),
        BackwardConfig(
            64,
            DkdvTile("keys", 64, warpgroups=2, stages=4, early_dp=True, k_in_registers=True),
            DqTile(128, warpgroups=2, k_stages=2, v_stages=2, early_dp=True),
        ),
    ),
    128: (
        BackwardConfig(
            128,
            DkdvTile("keys", 64, warpgroups=2, stages=4),
            DqTile(64, warpgroups=2, k_stages=4, v_stages=2, early_dp=True, q_in_registers=True),
        ),
        BackwardConfig(
            128,
            DkdvTile("keys", 64, warpgroups=2, stages=2, early_dp=True),
            DqTile(128, warpgroups=2, k_stages=2, v_stages=2),
        ),
    ),
    256: (
        BackwardConfig(
            256,
            DkdvTile("products", 64, warpgroups=2, stages=2, p_stages=2),
            DqTile(64, warpgroups=2, k_stages=2, v_stages=1),
        ),
        BackwardConfig(
            256,
            DkdvTile("products", 64, warpgroups=2, stages=2, p_stages=1),
            DqTile(32, warpgroups=2, k_stages=2, v_stages=2, early_dp=True),
        ),
    ),
}
