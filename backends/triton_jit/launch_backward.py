"""The portable mechanism, backward: workspace, arguments and launches.

The rule kept here: tensors arrive validated and viewed with heads second; nothing is copied, no
number is read back from the device, and every element of every gradient is written.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from portattn.backends.triton_jit import kernel_cache
from portattn.backends.triton_jit.backward import dq_kernel
from portattn.backends.triton_jit.backward_keys import dkdv_kernel
from portattn.backends.triton_jit.backward_plan import BackwardTiles, Tile
from portattn.backends.triton_jit.backward_sums import dbias_kernel, delta_kernel, sums_kernel
from portattn.backends.triton_jit.config import padded
from portattn.backends.triton_jit.dispatch import Straight, dispatch, remembered
from portattn.backends.triton_jit.scoring import REPAIRED

kernel_cache.one_at_a_time(dkdv_kernel, dq_kernel, dbias_kernel, delta_kernel, sums_kernel)

PROGRAMS = 512
"""How many programs share the sum of a bias without one of its long axes: enough to fill a large
GPU, and the same number everywhere, so that the bits do not depend on the device."""


@dataclass(frozen=True, eq=False)
class Backward:
    """One backward call. A gradient that is None is not computed; dk and dv go together.

    q, dq (B, Hq, Sq, D); out, dout (B, Hq, Sq, Dv); k, dk (B, Hk, Sk, D); v, dv (B, Hk, Sk, Dv);
    lse, dlse (B, Hq, Sq). Packed: B is 1 and S the packed rows. Paged: k, v, dk and dv are
    (num_blocks, Hk, block_size, D or Dv). bias, mask and dbias are 4-D, of size 1 where they
    broadcast; slopes (B or 1, Hq); sinks, dsinks (Hq,). ``left`` and ``right`` None: unlimited;
    causal is a ``right`` of 0. ``seq_q`` and ``seq_k`` are the longest sequence, or the block
    table's capacity. ``memo`` is the plan's and holds what was compiled.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    scale: float
    batch: int
    seq_q: int
    seq_k: int
    dlse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    bias: Tensor | None = None
    dbias: Tensor | None = None
    mask: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    dsinks: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used: Tensor | None = None
    table: Tensor | None = None
    softcap: float | None = None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = True
    precision: str = "ieee"
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def heads_q(self) -> int:
        """Query heads."""
        return int(self.q.shape[1])

    @property
    def heads_k(self) -> int:
        """Key heads."""
        return int(self.k.shape[1])

    @property
    def whole_bias(self) -> bool:
        """Every place of the scores has its own element of the bias."""
        assert self.bias is not None
        return tuple(self.bias.shape) == (self.batch, self.heads_q, self.seq_q, self.seq_k)


def run(call: Backward, tiles: BackwardTiles) -> None:
    """Fill the gradients of ``call``, on the current device and its current stream.

    Workspace: eight bytes a row, and partial sums in float32 of dsinks and of a dbias that lacks a
    long axis; paged, the block table sorted by page.
    """
    common = rows_delta(call, tiles.delta, poison=call.dk is not None)
    if call.cu_q is not None:
        # rows in front of the first sequence and behind the last one belong to nobody
        for gradient in (call.dq, None if call.cu_k is None else call.dk, call.dv):
            if gradient is not None:
                gradient.zero_()
    if call.dk is not None:
        _run_keys(call, common, tiles.dkdv)
    direct = call.dbias is not None and call.dq is not None and call.whole_bias
    if call.dbias is not None and direct:
        call.dbias.zero_()  # hidden blocks are skipped
    if call.dq is not None:
        _run_queries(call, common, tiles.dq, call.dbias if direct else None)
    if call.dbias is not None and not direct:
        _run_bias(call, common, tiles.dbias, call.dbias)


def rows_delta(call: Backward, tile: Tile, *, poison: bool) -> _Common:
    """The arguments of a call, and its rows' delta, (B, Hq, Sq) float32, and dsinks made; with
    ``poison`` also which rows hold a NaN or infinity, for which q is read."""
    common = _Common(call)
    delta = torch.empty(call.lse.shape, dtype=torch.float32, device=call.q.device)
    common.add("delta", delta, "sb", "sh")
    common.values["poison"] = torch.empty_like(delta, dtype=torch.int32) if poison else None
    _run_delta(call, common, tile)
    return common


def repair(
    call: Backward, tiles: BackwardTiles, common: _Common, flags_kv: Any, flags_q: Any, steps: Any
) -> None:
    """Compute again the tiles whose flag is set: of ``steps[0]`` keys and ``steps[1]`` rows."""
    common.values |= {"flags": flags_kv, "FLAGS": steps[0]}
    _run_keys(call, common, tiles.dkdv)
    common.values |= {"flags": flags_q, "FLAGS": steps[1]}
    _run_queries(call, common, tiles.dq, None)


class _Common:
    """The arguments that the kernels share, by name."""

    def __init__(self, call: Backward) -> None:
        self.call = call
        big = {
            name: tensor
            for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
            if (tensor := getattr(call, name)) is not None
        }
        self.inner = all(x.shape[3] == 1 or x.stride(3) == 1 for x in big.values())
        self.vec = _vector(big.values()) if self.inner else 1
        self.values: dict[str, Any] = {}
        for name, tensor in big.items():
            self.add(name, tensor, "sb", "sh", "ss", "sd", unit=self.vec)
        self.add("lse", call.lse, "sb", "sh", "ss")
        self.add("dlse", call.dlse, "sb", "sh", "ss")
        for name in ("bias", "mask", "dbias"):
            self.add(name, getattr(call, name), "sb", "sh", "si", "sj")
        self.add("slopes", call.slopes, "sb")
        self.add("table", call.table, "sb")
        far = call.seq_q + call.seq_k  # no key is farther than that: the sum stays in 32 bits
        head_dim, head_dim_v = int(call.q.shape[3]), int(call.v.shape[3])
        block_d, block_dv = padded(head_dim), padded(head_dim_v)
        self.values |= {
            "flags": None, "FLAGS": 0, "sinks": call.sinks, "cu_q": call.cu_q,
            "cu_k": call.cu_k, "used": call.used,
            "scale": call.scale, "softcap": call.softcap or 0.0, "batch": call.batch,
            "heads_k": call.heads_k, "group": call.heads_q // call.heads_k,
            "seq_q": call.seq_q, "seq_k": call.seq_k,
            "head_dim": head_dim // self.vec, "head_dim_v": head_dim_v // self.vec,
            "block_size": int(call.k.shape[2]) if call.table is not None else 1,
            "left": min(call.left or 0, far), "right": min(call.right or 0, far),
            "bottom_right": int(call.bottom_right),
            "LEFT": call.left is not None, "RIGHT": call.right is not None,
            "SOFTCAP": call.softcap is not None, "BIAS": call.bias is not None,
            "MASK": call.mask is not None, "ALIBI": call.slopes is not None,
            "DLSE": call.dlse is not None, "PACKED_Q": call.cu_q is not None,
            "PACKED_K": call.cu_k is not None, "USED": call.used is not None,
            "PAGED": call.table is not None, "INNER": self.inner, "VEC": self.vec,
            "PRECISION": call.precision, "EVEN_D": head_dim == block_d,
            "EVEN_DV": head_dim_v == block_dv, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
        }  # fmt: skip

    def add(self, name: str, tensor: Tensor | None, *axes: str, unit: int = 1) -> None:
        """A tensor and its strides, in units; those of size-1 axes are 0: any number may stand
        there, and a broadcast reads one element. The last axes of a tensor may have no name."""
        self.values[name] = tensor
        for n, axis in enumerate(axes):
            stride = 0
            if tensor is not None and tensor.shape[n] != 1:
                stride = tensor.stride(n) if axis == "sd" else tensor.stride(n) // unit
            self.values[f"{name}_{axis}"] = stride

    def programs(self, tiles: int) -> int:
        """Programs for so many tiles."""
        return _blocks(tiles, REPAIRED.value) if self.values["FLAGS"] else tiles

    def launch(self, kernel: Any, programs: int, tile: Tile, **more: Any) -> None:
        """Launch with those of the arguments that the kernel takes."""
        if programs == 0:
            return
        values = self.values | {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k} | more
        args = tuple([values[name] for name in kernel.arg_names])
        # What was compiled hangs on the constants, on what is there, and on the plan's dtypes.
        constants = tuple([args[n] for n in _constants(kernel)])
        key = (id(kernel), tile, constants, tuple([x is None for x in args]))
        memo = self.call.memo
        straight = memo.get(key)
        if straight is not None and straight.usable():
            straight.start(programs, args)
        else:
            compiled = dispatch(kernel, programs, tile, *args)
            remembered(memo, key, lambda: Straight.of(compiled))


@functools.cache
def _constants(kernel: Any) -> tuple[int, ...]:
    """Where the compile-time parameters of a kernel stand."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    return tuple(n for n, p in enumerate(parameters) if "constexpr" in str(p.annotation))


def _vector(tensors: Any) -> int:
    """How many elements make 16 bytes, if all rows start and end at multiples of 16 bytes; or 1."""
    unit = 1
    for x in tensors:
        unit = 16 // x.element_size()
        strides = [x.stride(n) for n in range(3) if x.shape[n] != 1]
        if x.data_ptr() % 16 or any(n % unit for n in (x.shape[3], *strides)):
            return 1
    return unit


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _run_delta(call: Backward, common: _Common, tile: Tile) -> None:
    """The rows' delta, and dsinks out of them."""
    batch, heads, rows = call.lse.shape
    tiles = _blocks(rows, tile.block_q)
    part = None
    if call.dsinks is not None:
        part = torch.empty((batch * tiles, heads), dtype=torch.float32, device=call.q.device)
    common.launch(
        delta_kernel, batch * heads * tiles, tile,
        heads=heads, seq_q=rows, tiles=tiles, part=part, SINKS=part is not None,
    )  # fmt: skip
    if call.dsinks is not None and part is not None:
        _add_up(part, call.dsinks.reshape(1, 1, 1, heads))


def _add_up(part: Tensor, into: Tensor) -> None:
    """Sum ``part`` over its first axis into a 4-D view of the rest."""
    block = 32
    if into.numel() == 0:
        return
    dispatch(
        sums_kernel, _blocks(into.numel(), block), Tile(1, 1, 4, 1),
        part, into, len(part), into.numel(), *into.shape[1:], *into.stride(),
        BLOCK_N=64, BLOCK_C=block,
    )  # fmt: skip


def _run_keys(call: Backward, common: _Common, tile: Tile) -> None:
    assert call.dk is not None and call.dv is not None
    owners, length, users, starts, each = call.batch, call.seq_k, None, None, 1
    if call.table is not None:
        owners, length = int(call.k.shape[0]), int(call.k.shape[2])
        users, starts = _page_users(call)
        each = max(1, int(call.table.shape[1]))
        # a tile lies within one page
        tile = replace(tile, block_k=min(tile.block_k, padded(length)), num_stages=1)
    tiles = _blocks(length, tile.block_k)
    total = tiles * call.heads_k * owners
    common.launch(
        dkdv_kernel, common.programs(total), tile,
        total=total, tiles=tiles, page_users=users, page_starts=starts, blocks_each=each,
    )  # fmt: skip


def _page_users(call: Backward) -> tuple[Tensor, Tensor]:
    """Which places of the flattened block table name each page: they lie behind one another, those
    of page n from starts[n] to starts[n + 1]. Entries behind the used keys name none."""
    assert call.table is not None and call.used is not None
    pages, size = int(call.k.shape[0]), int(call.k.shape[2])
    first = torch.arange(call.table.shape[1], device=call.q.device) * size
    named = torch.where(first[None, :] < call.used[:, None], call.table, pages)
    named, users = torch.sort(named.flatten(), stable=True)
    asked = torch.arange(pages + 1, dtype=named.dtype, device=call.q.device)
    return users, torch.searchsorted(named, asked, out_int32=True)


def _run_queries(call: Backward, common: _Common, tile: Tile, dbias: Tensor | None) -> None:
    tiles = _blocks(call.seq_q, tile.block_q)
    total = tiles * call.heads_q * call.batch
    common.launch(
        dq_kernel, common.programs(total), tile,
        total=total, tiles=tiles, dbias=dbias, DBIAS=dbias is not None,
    )  # fmt: skip


def _run_bias(call: Backward, common: _Common, tile: Tile, dbias: Tensor) -> None:
    """A bias that was broadcast: each of its tiles sums over all who read it."""
    n_b, n_h, rows, columns = dbias.shape
    blocks_q, blocks_k = _blocks(call.seq_q, tile.block_q), _blocks(call.seq_k, tile.block_k)
    sum_q, sum_k = rows == 1, columns == 1
    sum_b = call.batch if n_b == 1 else 1
    sum_h = call.heads_q if n_h == 1 else 1
    n_i, sum_i = (1, blocks_q) if sum_q else (blocks_q, 1)
    n_j, sum_j = (1, blocks_k) if sum_k else (blocks_k, 1)
    steps, owned = sum_b * sum_h * sum_i * sum_j, n_b * n_h * n_i * n_j
    parts = 1
    if (sum_q or sum_k) and owned:
        parts = max(1, min(steps, _blocks(PROGRAMS, owned)))
    into, strides = dbias, [0, *dbias.stride()]  # a size-1 axis has the index 0
    if parts > 1:
        into = torch.empty((parts, *dbias.shape), dtype=torch.float32, device=dbias.device)
        strides = list(into.stride())
    common.launch(
        dbias_kernel, owned * parts, tile,
        into=into, n_b=n_b, n_h=n_h, n_i=n_i, n_j=n_j, sum_h=sum_h, sum_i=max(1, sum_i),
        sum_j=max(1, sum_j), steps=steps, part_steps=_blocks(steps, parts),
        SUM_Q=sum_q, SUM_K=sum_k,
        **dict(zip(("into_sp", "into_sb", "into_sh", "into_si", "into_sj"), strides, strict=True)),
    )  # fmt: skip
    if parts > 1:
        _add_up(into, dbias)
