"""From a call's arrays to the mechanism that runs it, on their device and stream.

The rule kept here: the caller's arrays are read where they lie, on their device and current stream,
and nothing is read back to the host.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from portattn.arrays import Array
from portattn.backends.triton_jit.config import Config
from portattn.backends.triton_jit.launch_portable import portable_forward
from portattn.backends.triton_jit.tensors import Tensors
from portattn.contract import Call
from portattn.problem import Problem


def run(problem: Problem, config: Config, call: Call) -> None:
    """Fill ``call`` in place: ``out`` and ``lse``, or the gradients of a backward problem."""
    tensors = Tensors(problem, call)
    with _placed(call.q, tensors.q):
        if problem.backward:
            # The first call of a process waits for what is imported: only for its own pass.
            from portattn.backends.triton_jit.launch_gradients import gradients

            gradients(problem, config, tensors)
        else:
            forward(problem, config, tensors)


def forward(problem: Problem, config: Config, t: Tensors) -> None:
    """Launch the forward pass that ``config`` states."""
    if config.hopper is not None:
        # Gluon is only there in the Triton releases that this mechanism speaks.
        from portattn.backends.triton_jit import launch_hopper

        if launch_hopper.forward(problem, config, t):
            return
    portable_forward(problem, config, t)


@contextlib.contextmanager
def _on(device: Any, stream: int | None) -> Iterator[None]:
    """``device``, and a stream of it by its address; None: the one that is current there."""
    with torch.cuda.device(device):
        if stream is None:
            yield
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            yield


_HERE = contextlib.nullcontext()
_seen = threading.local()


def _placed(array: Array, q: Any) -> Any:
    """The device of the arrays, and the stream that their framework uses now."""
    if not q.is_cuda:
        return _HERE
    index = q.device.index
    if index not in _seen.__dict__:
        # What Triton asks of the driver is about the thread's context, and a new thread has none
        # until torch's runtime has something to do in it.
        with torch.cuda.device(index):
            torch.cuda.Event().record()
        _seen.__dict__[index] = True
    stream = None if array.family == "torch" else _stream_of(array)
    if stream is None and torch._C._cuda_getDevice() == index:
        return _HERE
    return _on(q.device, stream)


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
