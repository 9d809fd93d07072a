"""From a call's arrays to the mechanism that runs it: device, stream, and what can be walked.

The rule kept here: the caller's arrays are read where they lie, on their device and current stream,
and nothing is read back to the host.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from portattn.arrays import Array
from portattn.backends.triton_jit.config import Config
from portattn.backends.triton_jit.launch_gradients import gradients
from portattn.backends.triton_jit.launch_portable import portable_forward
from portattn.backends.triton_jit.tensors import Tensors, walkable
from portattn.contract import Call
from portattn.problem import Problem


def run(problem: Problem, config: Config, call: Call) -> None:
    """Fill ``call`` in place: ``out`` and ``lse``, or the gradients of a backward problem."""
    tensors = Tensors(problem, call)
    with _placed(call.q, tensors.q):
        if problem.backward:
            gradients(problem, config, tensors)
        else:
            forward(problem, config, tensors)


def forward(problem: Problem, config: Config, t: Tensors) -> None:
    """Launch the forward pass that ``config`` states."""
    if config.hopper is not None and _hopper_reads(problem, t):
        # Gluon is only there in the Triton releases that this mechanism speaks.
        from portattn.backends.triton_jit.launch_hopper import forward as hopper_forward

        hopper_forward(problem, config, t)
        return
    portable_forward(problem, config, t)


def _hopper_reads(problem: Problem, t: Tensors) -> bool:
    """Whether the tensor memory accelerator can walk q, k and v as they lie."""
    size = t.q.element_size()
    for x in (t.q, t.k, t.v):
        strides = t.strides(x)
        shape = x.shape if problem.layout == "bhsd" else [x.shape[i] for i in (0, 2, 1, 3)]
        if x.data_ptr() % 16 or walkable(shape, strides, size) is None:
            return False
    return True


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
