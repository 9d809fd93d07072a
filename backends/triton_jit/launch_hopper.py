"""Launching the hopper mechanism, and repairing what its fast path cannot know.

The rule kept here: the hopper kernels multiply hidden positions by a weight of 0, which a NaN there
survives; each tile says whether its result is finite, and the few that are not are computed again
by the portable kernel, which tells hidden from visible. No flag is read on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from portattn.backends.triton_jit import (
    hopper_backward,
    hopper_forward,
    hopper_policy,
    kernel_cache,
    launch_backward,
)
from portattn.backends.triton_jit.config import Config
from portattn.backends.triton_jit.dispatch import remembered
from portattn.backends.triton_jit.hopper_backward_dkdv import dkdv_kernel
from portattn.backends.triton_jit.hopper_backward_dq import dq_kernel
from portattn.backends.triton_jit.hopper_forward import hopper_forward_kernel
from portattn.backends.triton_jit.launch_portable import portable_forward
from portattn.backends.triton_jit.tensors import Tensors
from portattn.problem import Problem

kernel_cache.one_at_a_time(hopper_forward_kernel, dkdv_kernel, dq_kernel)


def causal_offset(problem: Problem) -> int | None:
    """Query i sees key j where j <= i + offset; None: every key."""
    if problem.causal is None:
        return None
    return problem.seq_k - problem.seq_q if problem.causal == "bottom_right" else 0


def heads_second(problem: Problem, x: Any) -> Any:
    """A view (B, H, S, D)."""
    return x if problem.layout == "bhsd" else x.transpose(1, 2)


def forward(problem: Problem, made: Config, t: Tensors) -> None:
    """The forward pass."""
    tile = made.hopper
    q, k, v, out = (heads_second(problem, x) for x in (t.q, t.k, t.v, t.out))
    lies = ("hopper", *t.lies(0))
    row_tiles = -(-problem.seq_q // tile.block_q)
    heads = problem.batch * problem.heads_q
    offset = causal_offset(problem)
    flags = None
    if offset is not None:
        flags = torch.empty(heads * row_tiles, dtype=torch.int32, device=t.q.device)

    def prepare() -> hopper_forward.Prepared:
        count = torch.cuda.get_device_properties(t.q.device).multi_processor_count
        return hopper_forward.Prepared(
            q,
            k,
            v,
            out,
            t.lse,
            flags is not None,
            scale=problem.scale,
            causal_offset=offset,
            config=tile,
            grid_size=hopper_policy.grid(problem, row_tiles * heads, count),
            head_group=hopper_policy.head_group(problem),
        )

    ready = remembered(made.memo, lies, prepare)
    ready.start(q, k, v, out, t.lse, flags)
    if flags is not None:
        portable_forward(problem, made, t, flags=flags, flag_rows=tile.block_q)


def backward(problem: Problem, made: Config, call: launch_backward.Backward) -> None:
    """The backward pass: delta by the portable kernel, the gradients by hopper's two."""
    tiles = made.hopper
    offset = causal_offset(problem)
    device = call.q.device
    common = launch_backward.rows_delta(call, made.backward.delta)
    lse = call.lse if call.lse.is_contiguous() else call.lse.contiguous()
    flags_kv = flags_q = None
    if offset is not None:
        keys = -(-problem.seq_k // tiles.dkdv.block_k)
        rows = -(-problem.seq_q // tiles.dq.block_q)
        flags_kv = torch.empty(
            (problem.batch * problem.heads_k, keys), dtype=torch.int32, device=device
        )
        flags_q = torch.empty(
            (problem.batch * problem.heads_q, rows), dtype=torch.int32, device=device
        )
    hopper_backward.launch(
        call.q,
        call.k,
        call.v,
        call.dout,
        lse,
        common.values["delta"],
        call.dq,
        call.dk,
        call.dv,
        scale=problem.scale,
        causal_offset=offset,
        config=tiles,
        flags_kv=flags_kv,
        flags_q=flags_q,
    )
    if offset is not None:
        steps = (tiles.dkdv.block_k, tiles.dq.block_q)
        launch_backward.repair(call, made.backward, common, flags_kv, flags_q, steps)
