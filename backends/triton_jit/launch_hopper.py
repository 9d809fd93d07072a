"""Launching the hopper mechanism, and repairing what its fast path cannot know.

The rule kept here: the hopper kernels multiply hidden positions by a weight of 0, which a NaN there
survives; each tile says whether its result is finite, and the few that are not are computed again
by the portable kernel, which tells hidden from visible. No flag is read on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portattn.backends.triton_jit import hopper_forward, hopper_policy, kernel_cache
from portattn.backends.triton_jit.config import Config
from portattn.backends.triton_jit.dispatch import remembered
from portattn.backends.triton_jit.hopper_forward import hopper_forward_kernel
from portattn.backends.triton_jit.launch_portable import Prepared as Repair
from portattn.backends.triton_jit.tensors import Tensors, walkable
from portattn.problem import Problem

if TYPE_CHECKING:
    from portattn.backends.triton_jit.launch_backward import Backward

kernel_cache.one_at_a_time(hopper_forward_kernel)


def causal_offset(problem: Problem) -> int | None:
    """Query i sees key j where j <= i + offset; None: every key."""
    if problem.causal is None:
        return None
    return problem.seq_k - problem.seq_q if problem.causal == "bottom_right" else 0


def heads_second(problem: Problem, x: Any) -> Any:
    """A view (B, H, S, D)."""
    return x if problem.layout == "bhsd" else x.transpose(1, 2)


def forward(problem: Problem, made: Config, t: Tensors) -> bool:
    """The forward pass; False where the tensor memory accelerator cannot walk q, k or v as they
    lie, and nothing was done."""
    ready = remembered(made.memo, ("hopper", *t.lies()), lambda: _prepared(problem, made, t))
    if isinstance(ready, str):
        return False
    launch, count, repair = ready
    flags = torch.empty(count, dtype=torch.int32, device=t.q.device) if count else None
    launch.start(t.q, t.k, t.v, t.out, t.lse, flags)
    if repair is not None:
        repair.start(t, flags)
    return True


def _prepared(
    problem: Problem, made: Config, t: Tensors
) -> tuple[hopper_forward.Prepared, int, Any] | str:
    """The launch, its number of flags and what repairs; or what is in the way."""
    q, k, v, out = (heads_second(problem, x) for x in (t.q, t.k, t.v, t.out))
    if not readable(q, k, v):
        return "strides or addresses that are no multiples of 16 bytes"
    tile = made.hopper
    row_tiles = -(-problem.seq_q // tile.block_q)
    heads = problem.batch * problem.heads_q
    offset = causal_offset(problem)
    launch = hopper_forward.Prepared(
        q,
        k,
        v,
        out,
        t.lse,
        offset is not None,
        scale=problem.scale,
        causal_offset=offset,
        config=tile,
        grid_size=hopper_policy.grid(
            problem,
            row_tiles * heads,
            torch.cuda.get_device_properties(t.q.device).multi_processor_count,
        ),
        head_group=hopper_policy.head_group(problem),
    )
    if offset is None:
        return launch, 0, None
    repair = Repair(problem, made, t, tile.block_q)
    repair.compile_beside(t)
    return launch, row_tiles * heads, repair


def readable(*arrays: Any) -> bool:
    """Whether the tensor memory accelerator can walk arrays (B, H, S, D) as they lie."""
    return all(
        x.data_ptr() % 16 == 0 and walkable(x.shape, x.stride(), x.element_size()) is not None
        for x in arrays
    )


def backward(problem: Problem, made: Config, call: Backward) -> None:
    """The backward pass: delta by the portable kernel, the gradients by hopper's two."""
    from portattn.backends.triton_jit import hopper_backward, launch_backward

    tiles = made.hopper
    offset = causal_offset(problem)
    device = call.q.device
    common = launch_backward.rows_delta(call, made.backward.delta, poison=False)
    lse = call.lse if call.lse.is_contiguous() else call.lse.contiguous()
    flags_kv = flags_q = None
    if offset is not None:
        keys = -(-problem.seq_k // tiles.dkdv.block_k)
        rows = -(-problem.seq_q // tiles.dq.block_q)
        sizes = [problem.batch * problem.heads_k * keys, problem.batch * problem.heads_q * rows]
        both = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        flags_kv, flags_q = both.split(sizes)
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
        memo=made.memo,
    )
    if offset is not None:
        steps = (tiles.dkdv.block_k, tiles.dq.block_q)
        launch_backward.repair(call, made.backward, common, flags_kv, flags_q, steps)
