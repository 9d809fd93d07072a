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
from portattn.backends.triton_jit.dispatch import again, moved, remembered
from portattn.backends.triton_jit.forward import combine_kernel, forward_kernel
from portattn.backends.triton_jit.tensors import Tensors, band, walkable, wide
from portattn.problem import Problem

kernel_cache.one_at_a_time(forward_kernel, combine_kernel)


def portable_forward(
    problem: Problem, config: Config, t: Tensors, *, flags: Any = None, flag_rows: int = 0
) -> None:
    """The portable mechanism; with ``flags``, only those tiles of ``flag_rows`` rows."""
    ready = remembered(
        config.memo, t.lies(flag_rows), lambda: Prepared(problem, config, t, flag_rows)
    )
    ready.start(t, flags)


class Prepared:
    """The launches of one plan for arrays that lie in one way: everything but the addresses.

    The first launch goes through Triton, which compiles and caches; the later ones start what that
    returned, which saves the sorting of some eighty arguments.
    """

    __slots__ = (
        "boxes", "combine", "combine_started", "config", "constants", "numbers", "part_rows",
        "programs", "rows", "started",
    )  # fmt: skip

    def __init__(self, problem: Problem, config: Config, t: Tensors, flag_rows: int):
        tile, pack = config.tile, config.pack
        self.config = config
        self.started = self.combine_started = None
        q_s, k_s, v_s = t.strides(t.q), t.strides(t.k, key=True), t.strides(t.v, key=True)
        o_s = t.strides(t.out)
        vec = _vector(problem, (t.q, t.k, t.v, t.out), (q_s, k_s, v_s, o_s))
        self.boxes = None
        if config.tma and vec > 1 and not problem.paged:
            self.boxes = _boxes(problem, config, t, (k_s, v_s))
        inner = q_s[3] == k_s[3] == v_s[3] == o_s[3] == 1
        units = [n // vec if i < 3 else n for s in (q_s, k_s, v_s, o_s) for i, n in enumerate(s)]
        tiles = -(-problem.seq_q * pack // tile.block_q)
        self.programs = problem.batch * (problem.heads_q // pack) * config.splits * tiles
        left, right = band(problem)
        lse_s = t.lse_strides()
        dims = (problem.heads_k, problem.group, pack, problem.seq_q)
        self.numbers = (
            problem.scale, problem.softcap or 0.0, *dims, problem.seq_k,
            problem.head_dim // vec, problem.head_dim_v // vec, tiles, config.splits,
            config.split_keys, problem.block_size or 1, left or 0, right or 0,
            int(problem.alignment == "bottom_right"), *units, *lse_s, *wide(t.bias), *wide(t.mask),
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
            "TMA": self.boxes is not None, "INNER": inner, "VEC": vec,
            "PRECISION": problem.precision, "EVEN_D": problem.head_dim == config.block_d,
            "EVEN_DV": problem.head_dim_v == config.block_dv, "BLOCK_Q": tile.block_q,
            "BLOCK_K": tile.block_k, "BLOCK_D": config.block_d, "BLOCK_DV": config.block_dv,
        }  # fmt: skip
        self.part_rows = self.programs * tile.block_q if config.splits > 1 else 0
        self.rows = problem.batch * problem.heads_q * problem.seq_q
        self.combine = (
            (*dims, problem.head_dim_v, tiles, config.splits, *o_s, *lse_s),
            {
                "SINKS": t.sinks is not None, "PACKED_Q": problem.packed, "PACK": pack > 1,
                "LSE": t.lse is not None, "BLOCK_Q": tile.block_q, "BLOCK_DV": config.block_dv,
                "BLOCK_S": max(2, 4096 // config.block_dv),
            },
        )  # fmt: skip

    def start(self, t: Tensors, flags: Any) -> None:
        """Launch on these arrays."""
        part = part_lse = k_desc = v_desc = None
        if self.part_rows:
            new = torch.empty
            columns = self.config.block_dv
            part = new((self.part_rows, columns), dtype=torch.float32, device=t.q.device)
            part_lse = new(self.part_rows, dtype=torch.float32, device=t.q.device)
        if self.boxes is not None:
            k_desc, v_desc = moved(self.boxes[0], t.k), moved(self.boxes[1], t.v)
        self.started = again(
            self.started, forward_kernel, self.programs, self.config.tile,
            (
                t.q, t.k, t.v, k_desc, v_desc, t.out, t.lse, part, part_lse, t.bias, t.mask,
                t.slopes, t.sinks, t.cu_q, t.cu_k, t.used, t.table, flags, *self.numbers,
            ),
            self.constants,
        )  # fmt: skip
        if self.part_rows:
            numbers, constants = self.combine
            self.combine_started = again(
                self.combine_started, combine_kernel, self.rows, _COMBINE,
                (part, part_lse, t.out, t.lse, t.sinks, t.cu_q, *numbers), constants,
            )  # fmt: skip


_COMBINE = plans.Tile(1, 1, 4, 1, 0)


def _vector(problem: Problem, arrays: Any, strides: Any) -> int:
    """Elements of 16 bytes where every row starts and ends at a multiple of that, else 1."""
    vec = 16 // int(arrays[0].element_size())
    if problem.head_dim % vec or problem.head_dim_v % vec:
        return 1
    if any(s[3] != 1 or s[0] % vec or s[1] % vec or s[2] % vec for s in strides):
        return 1
    return 1 if any(x.data_ptr() % 16 for x in arrays) else vec


def _boxes(problem: Problem, config: Config, t: Tensors, strides: Any) -> Any:
    """Descriptors of k and v, (B, H, S, D), or None where the hardware cannot walk one. A box
    that passes an end reads zeros."""
    found = []
    for x, steps, columns in zip(
        (t.k, t.v), strides, (config.block_d, config.block_dv), strict=True
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
        box = TensorDescriptor(x, shape, taken, [1, 1, config.tile.block_k, columns])
        box.base = None  # a plan outlives the arrays
        found.append(box)
    return found
