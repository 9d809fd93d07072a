"""The portable mechanism, forward: from a plan and the way that arrays lie to launches.

The rule kept here: nothing of a call is kept but how its arrays lay, and nothing about its lengths
leads to a compilation.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from portattn.backends.triton_jit import config as plans
from portattn.backends.triton_jit import kernel_cache
from portattn.backends.triton_jit.config import Config
from portattn.backends.triton_jit.dispatch import Launch, dispatch, remembered
from portattn.backends.triton_jit.forward import combine_kernel, forward_kernel
from portattn.backends.triton_jit.scoring import REPAIRED
from portattn.backends.triton_jit.tensors import Tensors, band, walkable, wide
from portattn.problem import Problem

kernel_cache.one_at_a_time(forward_kernel, combine_kernel)

SMALLEST = 2.0**-126
"""The smallest normal float32; less may be 0 to the device."""


def portable_forward(problem: Problem, config: Config, t: Tensors) -> None:
    """The portable mechanism."""
    remembered(config.memo, t.lies(), lambda: Prepared(problem, config, t)).start(t, None)


class Prepared:
    """The launches of one plan for arrays that lie in one way; with ``flag_rows``, what repairs the
    tiles of so many rows whose flag is set."""

    __slots__ = ("boxed", "combine", "constants", "forward", "part_columns", "part_rows")

    def __init__(self, problem: Problem, config: Config, t: Tensors, flag_rows: int = 0):
        tile, pack = config.tile, config.pack
        q_s, k_s, v_s = t.strides(t.q), t.strides(t.k, key=True), t.strides(t.v, key=True)
        o_s = t.strides(t.out)
        vec = _vector(problem, (t.q, t.k, t.v, t.out), (q_s, k_s, v_s, o_s))
        boxes = None
        # Keys in boxes are hidden by a product of -inf, which a scale of 0 makes NaN.
        scaled = abs(problem.scale) >= SMALLEST
        if config.tma and vec > 1 and scaled and not problem.paged and not flag_rows:
            boxes = _boxes(problem, config, t, (k_s, v_s))
        inner = q_s[3] == k_s[3] == v_s[3] == o_s[3] == 1
        units = [n // vec if i < 3 else n for s in (q_s, k_s, v_s, o_s) for i, n in enumerate(s)]
        tiles = -(-problem.seq_q * pack // tile.block_q)
        total = problem.batch * (problem.heads_q // pack) * config.splits * tiles
        left, right = band(problem)
        lse_s = t.lse_strides()
        dims = (problem.heads_k, problem.group, pack, problem.seq_q)
        numbers = (
            problem.scale, problem.softcap or 0.0, *dims, problem.seq_k,
            problem.head_dim // vec, problem.head_dim_v // vec, total, tiles,
            plans.head_group(problem), config.splits, config.split_keys, problem.block_size or 1,
            left or 0, right or 0, int(problem.alignment == "bottom_right"),
            *units, *lse_s, *wide(t.bias), *wide(t.mask),
            t.slopes.stride(0) if t.slopes is not None and t.slopes.ndim == 2 else 0,
            0 if t.table is None else t.table.stride(0),
        )  # fmt: skip
        self.constants = {
            "LEFT": left is not None, "RIGHT": right is not None,
            "SOFTCAP": problem.softcap is not None, "BIAS": t.bias is not None,
            "MASK": t.mask is not None, "ALIBI": t.slopes is not None,
            "SINKS": t.sinks is not None, "PACKED_Q": problem.packed, "PACKED_K": t.packed_k,
            "USED": t.used is not None, "PAGED": problem.paged, "PACK": pack > 1,
            "SPLIT": config.splits > 1, "LSE": t.lse is not None, "FLAGS": flag_rows,
            "EARLY": config.tma, "TMA": boxes is not None, "INNER": inner, "VEC": vec,
            "PRECISION": problem.precision, "NEGATIVE": problem.scale < 0,
            "EVEN_D": problem.head_dim == config.block_d,
            "EVEN_DV": problem.head_dim_v == config.block_dv, "BLOCK_Q": tile.block_q,
            "BLOCK_K": tile.block_k, "BLOCK_D": config.block_d, "BLOCK_DV": config.block_dv,
        }  # fmt: skip
        programs = -(-total // REPAIRED.value) if flag_rows else total
        self.forward = _launch(forward_kernel, programs, tile, numbers, self.constants, boxes)
        self.boxed = boxes is not None
        self.combine = None
        self.part_columns = config.block_dv
        self.part_rows = total * tile.block_q if config.splits > 1 else 0
        if self.part_rows:
            self.combine = _launch(
                combine_kernel, problem.batch * problem.heads_q * problem.seq_q, _COMBINE,
                (*dims, problem.head_dim_v, tiles, config.splits, *o_s, *lse_s),
                {
                    "SINKS": t.sinks is not None, "PACKED_Q": problem.packed, "PACK": pack > 1,
                    "LSE": t.lse is not None, "EARLY": config.tma, "BLOCK_Q": tile.block_q,
                    "BLOCK_DV": config.block_dv, "BLOCK_S": max(2, 4096 // config.block_dv),
                },
                early=config.tma,
            )  # fmt: skip

    def compile_beside(self, t: Tensors) -> None:
        """Compile what repairs in a thread of its own (see `Launch.compile_beside`), if no launch
        has yet asked for it."""
        what = (t.q.device, t.q.dtype, *self.constants.values())
        if what in _begun or torch.cuda.is_current_stream_capturing():
            return
        _begun.add(what)
        flags = torch.empty(1, dtype=torch.int32, device=t.q.device)
        self.forward.compile_beside(_arrays(t, flags=flags), t.q.device)

    def start(self, t: Tensors, flags: Any) -> None:
        """Launch on these arrays."""
        part = part_lse = None
        if self.part_rows:
            shape = (self.part_rows, self.part_columns)
            part = torch.empty(shape, dtype=torch.float32, device=t.q.device)
            part_lse = torch.empty(self.part_rows, dtype=torch.float32, device=t.q.device)
        boxes = (t.k, t.v) if self.boxed else (None, None)
        self.forward.start(_arrays(t, boxes, (part, part_lse), flags))
        if self.combine is not None:
            self.combine.start((part, part_lse, t.out, t.lse, t.sinks, t.cu_q))


def _arrays(
    t: Tensors, boxes: Any = (None, None), parts: Any = (None, None), flags: Any = None
) -> tuple[Any, ...]:
    """The kernel's arrays, in its order."""
    return (
        t.q, t.k, t.v, *boxes, t.out, t.lse, *parts, t.bias, t.mask, t.slopes, t.sinks,
        t.cu_q, t.cu_k, t.used, t.table, flags,
    )  # fmt: skip


def _launch(
    kernel: Any,
    programs: int,
    tile: Any,
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    boxes: Any = None,
    *,
    early: bool = False,
) -> Launch:
    """``constants`` are the last parameters of the kernel, in its order."""

    def first(*arrays: Any, only_compile: bool = False) -> Any:
        how = {"early": early, "only_compile": only_compile}
        return dispatch(kernel, programs, tile, *arrays, *numbers, **how, **constants)

    return Launch(first, programs, (*numbers, *constants.values()), boxes)


_COMBINE = plans.Tile(1, 1, 1, 1, 0, 0)
_begun: set[Any] = set()


def _vector(problem: Problem, arrays: Any, strides: Any) -> int:
    """Elements of 16 bytes where every row starts and ends at a multiple of that, else 1."""
    vec = 16 // int(arrays[0].element_size())
    if problem.head_dim % vec or problem.head_dim_v % vec:
        return 1
    if any(s[3] != 1 or s[0] % vec or s[1] % vec or s[2] % vec for s in strides):
        return 1
    return 1 if any(x.data_ptr() % 16 for x in arrays) else vec


_K_BOX, _V_BOX = 3, 4
"""Where the descriptors stand among the arrays."""


def _boxes(problem: Problem, config: Config, t: Tensors, strides: Any) -> Any:
    """Descriptors of k and v, (B, H, S, D), or None where the hardware cannot walk one. A box
    that passes an end reads zeros."""
    found = {}
    for at, x, steps, columns in (
        (_K_BOX, t.k, strides[0], config.block_d),
        (_V_BOX, t.v, strides[1], config.block_dv),
    ):
        if problem.packed:
            shape = [1, x.shape[1], x.shape[0], x.shape[2]]
        elif problem.layout == "bhsd":
            shape = list(x.shape)
        else:
            shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
        taken = walkable(shape, steps, x.element_size())
        if taken is None:
            return None
        found[at] = TensorDescriptor(x, shape, taken, [1, 1, config.tile.block_k, columns])
    return found
