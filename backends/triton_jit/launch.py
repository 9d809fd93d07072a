"""From a call's arrays to launches: strides, descriptors, workspace, stream and device.

The rule kept here: the caller's arrays are read where they lie, on their device and current stream;
nothing of a call is kept, nothing is read back to the host, and nothing about its lengths leads to
a compilation.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from portattn.arrays import Array
from portattn.backends.triton_jit import config as plans
from portattn.backends.triton_jit import kernel_cache
from portattn.backends.triton_jit.config import Config
from portattn.backends.triton_jit.dispatch import again, moved, remembered
from portattn.backends.triton_jit.forward import combine_kernel, forward_kernel
from portattn.contract import Call
from portattn.problem import Problem

kernel_cache.one_at_a_time(forward_kernel, combine_kernel)

_ZERO = (0, 0, 0, 0)
_GRADIENTS = ("dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks")


def run(problem: Problem, config: Config, call: Call) -> None:
    """Fill ``call`` in place: ``out`` and ``lse``, or the gradients of a backward problem."""
    tensors = Tensors(problem, call)
    with _placed(call.q, tensors.q):
        if problem.backward:
            from portattn.backends.triton_jit.launch_gradients import gradients

            gradients(problem, config, tensors)
        else:
            forward(problem, config, tensors)


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

    def lies(self, flag_rows: int) -> tuple[Any, ...]:
        """How the arrays lie, as far as a launch depends on it beyond the problem."""
        large = (self.q, self.k, self.v, self.out)
        return (
            flag_rows,
            *(x.stride() for x in large),
            any(x.data_ptr() % 16 for x in large),
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


def forward(problem: Problem, config: Config, t: Tensors) -> None:
    """Launch the forward pass that ``config`` states."""
    if config.hopper is not None and _hopper_reads(problem, t):
        from portattn.backends.triton_jit.launch_hopper import forward as hopper_forward

        hopper_forward(problem, config, t)
        return
    portable_forward(problem, config, t)


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


def band(problem: Problem) -> tuple[int | None, int | None]:
    """Keys visible to the left and right of a query's own position: causal is none to the right."""
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


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


def _hopper_reads(problem: Problem, t: Tensors) -> bool:
    """Whether the tensor memory accelerator can walk q, k and v as they lie."""
    size = t.q.element_size()
    for x in (t.q, t.k, t.v):
        strides = t.strides(x)
        shape = x.shape if problem.layout == "bhsd" else [x.shape[i] for i in (0, 2, 1, 3)]
        if x.data_ptr() % 16 or walkable(shape, strides, size) is None:
            return False
    return True


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


@contextlib.contextmanager
def _placed(array: Array, q: Any) -> Any:
    """The device of the arrays, and the stream that their framework uses now."""
    if not q.is_cuda:
        yield
        return
    with torch.cuda.device(q.device):
        stream = _stream_of(array)
        if stream is None:
            yield
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=q.device)):
                yield


def _stream_of(array: Array) -> int | None:
    """The stream of an array that is not torch's, or None for torch's own current one."""
    if array.family == "cupy":
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    if array.family in ("numba", "cuda"):
        # 1 and 2 are the interface's names for the legacy and the per-thread default stream
        stream = array.source.__cuda_array_interface__.get("stream")
        return None if stream is None else {1: 0}.get(int(stream), int(stream))
    return None
