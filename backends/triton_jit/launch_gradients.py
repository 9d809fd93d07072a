"""The backward pass of a call: the mechanism that runs it, and its arrays as that wants them.

The rule kept here: views only; every gradient that was asked for is written whole.
"""

from __future__ import annotations

from typing import Any

from portattn.backends.triton_jit import launch_backward
from portattn.backends.triton_jit.config import Config
from portattn.backends.triton_jit.tensors import Tensors, band
from portattn.problem import Problem


def gradients(problem: Problem, made: Config, t: Tensors) -> None:
    """Fill dq, dk, dv, dbias and dsinks as far as they are there."""
    if problem.empty:
        for gradient in (t.dq, t.dk, t.dv, t.dbias, t.dsinks):
            if gradient is not None:
                gradient.zero_()
        return
    call = _call(problem, made, t)
    if made.hopper is not None:
        # Gluon is only there in the Triton releases that this mechanism speaks.
        from portattn.backends.triton_jit import launch_hopper

        if launch_hopper.readable(call.q, call.k, call.v, call.dout):
            launch_hopper.backward(problem, made, call)
            return
    launch_backward.run(call, made.backward)


def _call(problem: Problem, made: Config, t: Tensors) -> launch_backward.Backward:
    def rows(x: Any) -> Any:
        if x is None:
            return None
        if problem.packed:
            return x.transpose(0, 1).unsqueeze(0)
        return x if problem.layout == "bhsd" else x.transpose(1, 2)

    def keys(x: Any) -> Any:
        return x.transpose(1, 2) if x is not None and problem.paged else rows(x)

    def wide(x: Any) -> Any:
        return None if x is None else x[(None,) * (4 - x.ndim)]

    def sums(x: Any) -> Any:
        return x[None] if x is not None and problem.packed else x

    slopes = t.slopes
    if slopes is not None and slopes.ndim == 1:
        slopes = slopes[None]
    left, right = band(problem)
    return launch_backward.Backward(
        q=rows(t.q), k=keys(t.k), v=keys(t.v), out=rows(t.out), dout=rows(t.dout),
        lse=sums(t.lse), scale=problem.scale, batch=problem.batch, seq_q=problem.seq_q,
        seq_k=problem.seq_k, dlse=sums(t.dlse), dq=rows(t.dq), dk=keys(t.dk), dv=keys(t.dv),
        bias=wide(t.bias), dbias=wide(t.dbias), mask=wide(t.mask), slopes=slopes, sinks=t.sinks,
        dsinks=t.dsinks, cu_q=t.cu_q, cu_k=t.cu_k, used=t.used, table=t.table,
        softcap=problem.softcap, left=left, right=right,
        bottom_right=problem.alignment == "bottom_right", precision=problem.precision,
        memo=made.memo,
    )  # fmt: skip
