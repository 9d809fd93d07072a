"""What the hopper mechanism covers, and the tiles, grid and order that it runs with.

The rule kept here: what it leaves to portable is said in words; a choice hangs on the problem's
shape alone, the batch only through the order of tiles, which changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portattn.backends.triton_jit import config, hopper_backward_plan, hopper_plan
from portattn.backends.triton_jit.hopper_backward_plan import BackwardConfig

if TYPE_CHECKING:
    from portattn.problem import Problem

WIDEST = 256
SHORT = 2048
"""Up to so many rows a tile's beginning and end weigh as much as its middle."""


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """The tile of the forward kernel, as `hopper_forward.launch` takes it."""

    head_dim_pad: int
    block_k: int
    stages: int
    num_consumers: int = 2
    num_warps: int = 4

    @property
    def maxnreg(self) -> int:
        """Registers of a thread at launch; the warpgroups share them out again."""
        return hopper_plan.MAX_REGISTERS[self.num_consumers]

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return hopper_plan.forward_block_q(self.num_consumers)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return hopper_plan.forward_shared_bytes(
            self.head_dim_pad, self.block_k, self.stages, 2, self.num_consumers
        )


def why_portable(problem: Problem, *, forced: bool = False) -> str:
    """Why a problem runs on portable on a Hopper device; empty where hopper takes it."""
    if problem.dtype not in ("float16", "bfloat16"):
        return f"hopper takes float16 and bfloat16, not {problem.dtype}"
    parts = {
        "packed sequences": problem.packed,
        "paged keys": problem.paged,
        "seqused_k": problem.seqused_k,
        "a window": problem.window not in (None, (None, None)),
        "softcap": problem.softcap is not None,
        "a bias": problem.bias is not None,
        "a mask": problem.mask is not None,
        "ALiBi": problem.alibi is not None,
        "sinks": problem.sinks is not None,
        "strided features": problem.inner_strided,
    }
    uses = [name for name, on in parts.items() if on]
    if uses:
        return "hopper does not cover " + ", ".join(uses)
    dims = (problem.head_dim, problem.head_dim_v)
    if max(dims) > WIDEST or any(d % 8 for d in dims):
        return f"hopper takes head dims that are multiples of 8 up to {WIDEST}"
    if problem.backward and config.padded(dims[0]) != config.padded(dims[1]):
        return "hopper's backward pass takes equal head dims of keys and values"
    if problem.seq_k == 0 or problem.seq_q == 0:
        return "there are no keys"
    if not problem.backward and problem.seq_k <= config.ONE_TILE_KEYS:
        # Packed sequences and few rows run portable, and short ones have their bits.
        return f"up to {config.ONE_TILE_KEYS} keys every call runs portable's tile"
    if forced:
        return ""
    if max(dims) <= 32:
        return "hopper pads head dims to 64"
    if not problem.backward and config.few_rows(problem):
        return "few query rows: the keys are split"
    return ""


def forward_tile(problem: Problem, limit: int) -> ForwardTile | None:
    """The first tile for so many keys that fits ``limit`` bytes of shared memory."""
    pad = hopper_plan.head_dim_pad(problem.head_dim, problem.head_dim_v)
    causal = problem.causal is not None
    for shape in hopper_plan.forward_shapes(pad, problem.seq_k, causal=causal):
        tile = ForwardTile(pad, *shape)
        if tile.shared_bytes <= limit:
            return tile
    return None


def backward_tile(problem: Problem, limit: int) -> BackwardConfig | None:
    """The first tiles of which both kernels fit ``limit`` bytes of shared memory."""
    pad = hopper_plan.head_dim_pad(problem.head_dim, problem.head_dim_v)
    for tiles in hopper_backward_plan.BACKWARD_TILES[pad]:
        if backward_bytes(tiles, problem) <= limit:
            return tiles
    return None


def backward_bytes(tiles: BackwardConfig, problem: Problem) -> int:
    """Bytes of shared memory of the kernel that needs more."""
    causal = problem.causal is not None
    return max(
        hopper_backward_plan.dkdv_shared_bytes(tiles, causal=causal, flags=causal),
        hopper_backward_plan.dq_shared_bytes(tiles, causal=causal, flags=causal),
    )


def head_group(problem: Problem) -> int:
    """How many heads' tiles are interleaved, longest rows first. Under a diagonal four: the end of
    the launch is even, and their keys share the second-level cache."""
    return 4 if problem.causal else 1


def grid(problem: Problem, tiles: int, multiprocessors: int) -> int:
    """Programs of a launch. One for each multiprocessor, which walk the tiles and load the next
    one's keys under the last one's epilogue; under a diagonal of many tiles their lengths differ
    too much for that, and each tile is a program."""
    if problem.causal and problem.seq_q > SHORT:
        return tiles
    return min(tiles, multiprocessors)
