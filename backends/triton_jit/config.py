"""Tiles: which ones there are, what shared memory each takes, and which one a problem gets.

The rule kept here: a tile is chosen from the problem, the device's limits and a table (the shipped
one, or what `portattn tune` left for the device), without compiling or timing anything, and never
from a value that differs from call to call of one model (a sequence length counts by its bucket;
the batch does not count at all, so that a sequence has the same bits alone and in a batch).
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portattn.backends.triton_jit import overrides

if TYPE_CHECKING:
    from portattn.problem import Problem

ONE_TILE_KEYS = 256
"""Up to so many keys few rows run the tile of a prefill, in one part: a row has the same bits in
its prefill and in its decode step."""

PACKED_ROWS = 128
"""Up to so many query rows of one key head share a tile."""

SPLIT_KEYS = 8
"""Keys that a split has at least, for each row of the tile: its partial output is small then beside
the keys and values that it read."""

LONG_KEYS = 16_384
"""From more keys than this on, few rows read them in larger steps."""

CACHED_BYTES = 1 << 25
"""Keys and values of heads that take turns: the second-level cache of a large GPU holds them."""

DEFAULT_SMS = 108
"""Multiprocessors assumed where a device is only pretended."""

ITEM = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Tile:
    """One portable tile. ``shared_bytes`` is the most that the compiler reported for it on that
    architecture, ``masked_bytes`` the same with a bias and a mask, whose blocks are loaded ahead
    as the keys are."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    shared_bytes: int
    masked_bytes: int

    def needs(self, masked: bool) -> int:
        """Bytes of shared memory of a block, with a bias or a mask or without."""
        return self.masked_bytes if masked else self.shared_bytes


@dataclass(frozen=True, slots=True)
class Config:
    """How one call runs. ``splits`` parts of ``split_keys`` keys; ``pack`` query heads share a
    tile; ``tma``: keys and values come by the tensor memory accelerator where they are aligned, and
    what joins the splits starts early; ``hopper`` holds that mechanism's own tile, and ``tile`` is
    then what does what it leaves; ``memo`` is the launcher's, and no copy's: another tile is
    another launch."""

    tile: Tile
    block_d: int
    block_dv: int
    pack: int = 1
    splits: int = 1
    split_keys: int = 0
    tma: bool = False
    hopper: Any = None
    backward: Any = None
    limits: Limits = field(default_factory=lambda: Limits())
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def mechanism(self) -> str:
        """The one that runs what it can."""
        return "portable" if self.hopper is None else "hopper"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller holds the planner to: a mechanism, and bytes of shared memory."""

    mechanism: str | None = None
    shared_memory: int | None = None


MECHANISMS = ("portable", "hopper")
_limits = Limits()


def limits() -> Limits:
    """The limits in force: those set by `hold`, else the environment's
    PORTATTN_TRITON_MECHANISM."""
    if _limits.mechanism is None:
        name = os.environ.get("PORTATTN_TRITON_MECHANISM") or None
        if name is not None:
            _check_mechanism(name, "PORTATTN_TRITON_MECHANISM")
            return replace(_limits, mechanism=name)
    return _limits


def hold(**changes: Any) -> None:
    """Change the limits of this process: ``mechanism`` or ``shared_memory``; None lifts one."""
    global _limits
    if changes.get("mechanism") is not None:
        _check_mechanism(changes["mechanism"], "mechanism")
    _limits = replace(_limits, **changes)


def _check_mechanism(name: str, what: str) -> None:
    if name not in MECHANISMS:
        raise ValueError(f"{what}: got {name!r}; want one of {', '.join(MECHANISMS)}")


def padded(head_dim: int) -> int:
    """A head dim as tiles hold it: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def family(capability: tuple[int, int]) -> str:
    """The architecture whose table a device reads. Hopper and data-centre Blackwell have warp-group
    products and the tensor memory accelerator; the others, consumer Blackwell too, compile to what
    Ampere compiles to."""
    return "sm_90" if capability[0] in (9, 10, 11) else "sm_80"


@functools.cache
def table() -> dict[str, dict[str, list[Tile]]]:
    """The shipped tiles: architecture, then ``kind/item/head dim``; the best first."""
    text = (Path(__file__).parent / "tuned" / "portable.json").read_text()
    return {
        arch: {key: [Tile(*row) for row in rows] for key, rows in kinds.items()}
        for arch, kinds in json.loads(text)["tiles"].items()
    }


def key_of(problem: Problem, *, few: bool) -> str:
    """Where a problem's tiles stand in the table."""
    wide = max(padded(problem.head_dim), padded(problem.head_dim_v))
    kind = "prefill" if not few else "rows" if problem.seq_k <= LONG_KEYS else "long"
    return f"{kind}/{ITEM.get(problem.dtype, 4)}/{wide}"


def candidates(
    problem: Problem, capability: tuple[int, int], *, few: bool, device: str = ""
) -> list[Tile]:
    """The tiles for a problem's forward pass, the best first: those that `portattn tune` measured
    on the device of that name, else those of the table."""
    key = key_of(problem, few=few)
    measured = overrides.rows(device, key)
    if measured is not None:
        return [Tile(*row) for row in measured]
    return table()[family(capability)].get(key, [])


def packs(problem: Problem) -> bool:
    """Whether the query heads of a key head share a tile: few rows, and reading keys is all. Of
    packed sequences only the sum of all rows is known, which says nothing of one."""
    rows = problem.group * problem.seq_q
    return problem.group > 1 and rows <= PACKED_ROWS and not problem.packed


def few_rows(problem: Problem) -> bool:
    """Whether a call is bound by reading keys: its rows fit one tile, or two."""
    if problem.packed or problem.seq_k <= ONE_TILE_KEYS:
        return False
    return problem.seq_q * (problem.group if packs(problem) else 1) <= PACKED_ROWS


def head_group(problem: Problem) -> int:
    """How many heads' tiles take turns on portable. Under a diagonal the longest go first and the
    launch ends with short ones, which the multiprocessors share out evenly. No bit hangs on it.
    (A program of hopper walks several tiles, whose lengths even out with fewer heads.)"""
    if problem.causal is None:
        return 1
    size = problem.seq_k * (problem.head_dim + problem.head_dim_v) * ITEM.get(problem.dtype, 4)
    return min(16, max(1, CACHED_BYTES * problem.group // max(1, size)))


def is_masked(problem: Problem) -> bool:
    """Whether a tile loads blocks of a bias or a mask."""
    return problem.bias is not None or problem.mask is not None


def rows_tile(tiles: list[Tile], rows: int, limit: int, *, masked: bool = False) -> Tile | None:
    """The first tile within ``limit`` bytes that holds all rows, else the first of those that hold
    most; tiles are ordered by rows, ascending."""
    fitting = [t for t in tiles if t.needs(masked) <= limit]
    enough = [t for t in fitting if t.block_q >= rows]
    return enough[0] if enough else max(fitting, key=lambda t: t.block_q, default=None)


def split(problem: Problem, tile: Tile, multiprocessors: int) -> tuple[int, int]:
    """(splits, keys of each): enough programs of one sequence to fill the device. The capacity of
    the keys counts, not what a sequence uses of it: a captured graph stays right when it grows."""
    if problem.seq_k <= 2 * ONE_TILE_KEYS or not few_rows(problem):
        return 1, problem.seq_k
    heads = problem.heads_k if packs(problem) else problem.heads_q
    rows = problem.seq_q * (problem.group if packs(problem) else 1)
    programs = heads * -(-rows // tile.block_q)
    wanted = max(1, (multiprocessors or DEFAULT_SMS) // programs)
    least = max(2 * tile.block_k, SPLIT_KEYS * tile.block_q)
    keys = max(least, -(-problem.seq_k // wanted))
    keys = -(-keys // tile.block_k) * tile.block_k
    splits = -(-problem.seq_k // keys)
    return (splits, keys) if splits > 1 else (1, problem.seq_k)


def split_workspace(problem: Problem, config: Config) -> int:
    """Bytes of the partial results: float32 outputs and LSEs of every split."""
    if config.splits == 1:
        return 0
    heads = problem.heads_q // config.pack
    tiles = -(-problem.seq_q * config.pack // config.tile.block_q)
    rows = problem.batch * heads * tiles * config.splits * config.tile.block_q
    return 4 * rows * (config.block_dv + 1)
