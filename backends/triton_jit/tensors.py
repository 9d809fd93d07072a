"""The arrays of a call as torch tensors, and how they lie.

The rule kept here: the caller's memory is viewed, never copied but for a few numbers a sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from portattn.arrays import Array
from portattn.contract import Call
from portattn.problem import Problem

_ZERO = (0, 0, 0, 0)
_GRADIENTS = ("dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks")


class Tensors:
    """The arrays of a call as torch tensors, and their strides with the heads second."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    bias: Any
    mask: Any
    dout: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any

    def __init__(self, problem: Problem, call: Call):
        self._layout = problem.layout
        self.paged = problem.paged
        self.packed_k = problem.packed and not problem.paged
        self.q, self.k, self.v = as_torch(call.q), as_torch(call.k), as_torch(call.v)
        self.out, self.lse = as_torch(call.out), as_torch(call.lse)
        self.bias, self.mask = as_torch(call.bias), as_torch(call.mask)
        self.slopes, self.sinks = _flat(call.alibi_slopes), _flat(call.sinks)
        self.cu_q, self.cu_k = _flat(call.cu_seqlens_q), _flat(call.cu_seqlens_k)
        self.used, self.table = _flat(call.seqused_k), _flat(call.block_table)
        if problem.backward:
            for name in _GRADIENTS:
                setattr(self, name, as_torch(getattr(call, name)))

    def strides(self, x: Any, *, key: bool = False) -> tuple[int, int, int, int]:
        """(batch or block, head, position, feature); packed rows have no batch."""
        s = x.stride()
        if key and self.paged:
            return s[0], s[2], s[1], s[3]
        if len(s) == 3:
            return 0, s[1], s[0], s[2]
        if self._layout == "bhsd":
            return s  # type: ignore[no-any-return]
        return s[0], s[2], s[1], s[3]

    def lies(self) -> tuple[Any, ...]:
        """How the arrays lie, as far as a launch depends on it beyond the problem."""
        large = (self.q, self.k, self.v, self.out)
        return (
            *(x.stride() for x in large),
            tuple([x.data_ptr() % 16 == 0 for x in large]),
            None if self.lse is None else self.lse.stride(),
            wide(self.bias),
            wide(self.mask),
            None if self.slopes is None else self.slopes.shape,
        )

    def lse_strides(self) -> tuple[int, int, int]:
        """Strides of the LSE with a batch axis."""
        if self.lse is None:
            return 0, 0, 0
        s = self.lse.stride()
        return (0, *s) if len(s) == 2 else s


def walkable(shape: Any, strides: Any, size: int) -> list[int] | None:
    """Strides that a tensor map takes, or None: multiples of 16 bytes, not negative, below 2**40;
    an axis of one element has whatever stride is convenient."""
    if 0 in shape or strides[-1] != 1:
        return None
    steps = [1] * len(shape)
    whole = -(-shape[-1] * size // 16) * 16 // size
    for axis in range(len(shape) - 2, -1, -1):
        step = strides[axis] if shape[axis] > 1 else whole
        if step < 0 or step * size % 16 or step * size >= 1 << 40:
            return None
        steps[axis] = step
        whole = max(whole, step * shape[axis])
    return steps


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Keys visible to the left and right of a query's own position: causal is none to the right."""
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def wide(x: Any) -> tuple[int, ...]:
    """Four strides of a mask or bias; 0 where it broadcasts."""
    if x is None:
        return _ZERO
    strides = [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return (*_ZERO[len(strides) :], *strides)


def _flat(array: Array | None) -> Any:
    """A small operand, contiguous; a strided one is copied (a few numbers for each sequence)."""
    x = as_torch(array)
    return x if x is None or x.is_contiguous() else x.contiguous()


def as_torch(array: Array | None) -> Any:
    """The torch tensor of an array, sharing its memory."""
    if array is None:
        return None
    x = array.source
    if array.family == "torch":
        return x.detach() if x.requires_grad else x
    if array.family == "dlpack":
        return torch.from_dlpack(x)
    if array.dtype == "bfloat16":  # no letter of the array interface stands for it
        return torch.as_tensor(x.view("int16"), device=array.device).view(torch.bfloat16)
    return torch.as_tensor(x, device=array.device)
