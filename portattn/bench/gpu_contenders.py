"""What the GPU suite can time: a backend through the public call, the same backend held to its
portable mechanism, and the fused kernels of others.

The rule kept here: every contender computes the same thing from the same tensors, (B, H, S, D)
bfloat16. Who is not here, or takes no such problem, says why.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import portattn
from portattn import select
from portattn.arrays import recognise
from portattn.bench.gpu_cells import AGAINST_COPY, MEMORY_BOUND, GpuCell
from portattn.bench.gpu_timing import Device, Run
from portattn.contract import Backend, Call, Unsupported
from portattn.machine import Machine
from portattn.problem import Problem

FLASH, CUDNN, FLASH_4, COPY = "torch-flash", "torch-cudnn", "flash-attn-4", "copy"
PORTABLE = "portable"  # the mechanism, and the end of that contender's name
FLASH_4_MODULE = "flash_attn.cute"


class Absent(Exception):
    """The contender is not on this machine; the text says why."""


@dataclass(frozen=True)
class Inputs:
    """Tensors of one cell, random normal: copies of (q, k, v), as many as it takes for one pass
    over all of them to leave nothing of use in the cache, and dout for a backward cell."""

    copies: tuple[tuple[Any, Any, Any], ...]
    dout: Any = None

    @classmethod
    def of(cls, cell: GpuCell, device: Device) -> Inputs:
        """The same numbers for the same cell on the same device, made there."""
        import torch

        generator = torch.Generator(device.name).manual_seed(cell.head_dim + cell.seq_k)

        def normal(heads: int, length: int) -> Any:
            return torch.randn(
                (cell.batch, heads, length, cell.head_dim),
                dtype=torch.bfloat16,
                device=device.name,
                generator=generator,
            )

        copies = tuple(
            (
                normal(cell.heads_q, cell.seq_q),
                normal(cell.heads_k, cell.seq_k),
                normal(cell.heads_k, cell.seq_k),
            )
            for _ in range(copies_of(cell, device))
        )
        dout = normal(cell.heads_q, cell.seq_q) if cell.kind == "backward" else None
        return cls(copies, dout)


def copies_of(cell: GpuCell, device: Device) -> int:
    """Enough for four times the cache where K and V are what is read, else one."""
    if cell.kind not in MEMORY_BOUND:
        return 1
    return max(1, math.ceil(4 * device.cache_bytes / cell.kv_bytes))


def needed_bytes(cell: GpuCell, device: Device) -> int:
    """What the inputs, the results of five contenders and the copy's arrays take."""
    inputs = copies_of(cell, device) * (cell.kv_bytes + 2 * cell.q_bytes)
    results = 5 * (cell.q_bytes + (cell.kv_bytes if cell.kind == "backward" else 0))
    return inputs + results + device.copy_bytes


def contenders(
    cell: GpuCell, backend: Backend, device: Device
) -> Mapping[str, Callable[[GpuCell, Inputs], Run]]:
    """Who runs in a cell, the backend first; each is built when its turn comes, and may raise
    `Absent` or whatever its kernel raises."""
    sdpa = {FLASH: _sdpa("FLASH_ATTENTION"), CUDNN: _sdpa("CUDNN_ATTENTION")}
    ours = {backend.name: _public(backend.name)}
    if cell.kind == "forward":
        return {
            **ours,
            f"{backend.name}-{PORTABLE}": _forced(backend, PORTABLE),
            **sdpa,
            FLASH_4: _flash_4,
        }
    if cell.kind == "backward":
        return {**ours, **sdpa, FLASH_4: _flash_4}
    if cell.kind == "long":
        return {**ours, CUDNN: sdpa[CUDNN]}
    if cell.kind in AGAINST_COPY:
        return {**ours, **sdpa, COPY: _copy(device)}
    return {**ours, **sdpa}


def mechanism(cell: GpuCell, backend: str, inputs: Inputs) -> str:
    """What the backend would run of itself."""
    q, k, v = inputs.copies[0]
    options: dict[str, Any] = {"layout": "bhsd", "causal": cell.causal}
    problem = Problem.from_arrays(
        q=recognise(q, "q"), k=recognise(k, "k"), v=recognise(v, "v"), **options
    )
    if cell.kind == "backward":
        problem = problem.as_backward()
    return select.choose(problem, backend)[1].mechanism


# ---- the backend ---------------------------------------------------------------------------------
def _public(name: str) -> Callable[[GpuCell, Inputs], Run]:
    def build(cell: GpuCell, inputs: Inputs) -> Run:
        options: dict[str, Any] = {"layout": "bhsd", "causal": cell.causal, "backend": name}
        if cell.kind == "backward":
            q, k, v = inputs.copies[0]
            out, lse = portattn.attention(q, k, v, return_lse=True, **options)
            dout = inputs.dout
            return lambda: portattn.attention_backward(q, k, v, out, lse, dout, **options)[:3]
        if cell.kind == "host":  # it pays for its output, as a caller would
            q, k, v = inputs.copies[0]
            return lambda: portattn.attention(q, k, v, **options)
        outs = _outs(inputs)

        def run() -> Any:
            for (q, k, v), out in zip(inputs.copies, outs, strict=True):
                portattn.attention(q, k, v, out=out, **options)
            return outs[0]

        return run

    return build


def _forced(backend: Backend, wanted: str) -> Callable[[GpuCell, Inputs], Run]:
    """The mechanism is forced while the plan is made, once, and while a call runs it: a backend
    does not run a plan that was made under another force. What the public call remembers is left
    alone."""

    def build(cell: GpuCell, inputs: Inputs) -> Run:
        force = getattr(backend, "force_mechanism", None)
        if force is None:
            raise Absent(f"backend {backend.name!r} cannot be held to one mechanism")
        (q, k, v), out = inputs.copies[0], _outs(inputs)[0]
        arrays = {"q": recognise(q, "q"), "k": recognise(k, "k"), "v": recognise(v, "v")}
        options: dict[str, Any] = {"layout": "bhsd", "causal": cell.causal}
        problem = Problem.from_arrays(**arrays, **options)
        machine = Machine.here()
        force(wanted)
        try:
            reasons = backend.why_not(problem, machine)
            if reasons:
                raise Unsupported(problem.describe(), {backend.name: reasons})
            plan = backend.plan(problem, machine)
        finally:
            force(None)
        if wanted not in plan.mechanism:
            raise Absent(f"forced to {wanted!r}, the plan says {plan.mechanism!r}")
        call = Call(out=recognise(out, "out"), **arrays)

        def run() -> Any:
            force(wanted)
            try:
                backend.run(problem, plan, call)
            finally:
                force(None)
            return out

        return run

    return build


def _outs(inputs: Inputs) -> list[Any]:
    """Results to fill; a row that is left out stays NaN and is seen."""
    import torch

    return [torch.full_like(q, math.nan) for q, _, _ in inputs.copies]


# ---- peers ---------------------------------------------------------------------------------------
def _sdpa(kernel: str) -> Callable[[GpuCell, Inputs], Run]:
    def build(cell: GpuCell, inputs: Inputs) -> Run:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if cell.causal and cell.seq_q != cell.seq_k:
            raise Absent("is_causal is top-left in torch: equal lengths only")
        chosen = getattr(SDPBackend, kernel)
        gqa = cell.heads_q != cell.heads_k

        def forward(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=cell.causal, enable_gqa=gqa
                )

        if cell.kind == "backward":
            return _gradient(forward, inputs)

        def run() -> Any:
            with torch.no_grad():
                results = [forward(*copy) for copy in inputs.copies]
            return results[0]

        return run

    return build


def _flash_4(cell: GpuCell, inputs: Inputs) -> Run:
    try:
        interface = importlib.import_module(f"{FLASH_4_MODULE}.interface")
    except ImportError as error:
        raise Absent(f"not installed ({error})") from None
    import torch

    # Its layout is (B, S, H, D); the tensors are laid out so, once, before any time is taken.
    def turned(x: Any) -> Any:
        return x.transpose(1, 2).contiguous()

    def forward(q: Any, k: Any, v: Any) -> Any:
        result = interface.flash_attn_func(q, k, v, causal=cell.causal)
        return result[0] if isinstance(result, tuple) else result

    q, k, v = (turned(x) for x in inputs.copies[0])
    if cell.kind == "backward":
        gradient = _gradient(forward, Inputs(((q, k, v),), turned(inputs.dout)))
        return lambda: tuple(x.transpose(1, 2) for x in gradient())

    def run() -> Any:
        with torch.no_grad():
            return forward(q, k, v).transpose(1, 2)

    return run


def _gradient(forward: Callable[[Any, Any, Any], Any], inputs: Inputs) -> Run:
    """The backward pass alone, over a graph that is kept."""
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs.copies[0]]
    with torch.enable_grad():
        out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def _copy(device: Device) -> Callable[[GpuCell, Inputs], Run]:
    """The ceiling: one array copied to another."""

    def build(cell: GpuCell, inputs: Inputs) -> Run:
        import torch

        del cell, inputs
        source = torch.randn(device.copy_bytes // 8, device=device.name)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return build
