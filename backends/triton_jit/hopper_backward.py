"""The backward pass on Hopper: launching its two kernels, and compiling them without a GPU.

The rule kept here: dk and dv come from one kernel and dq from another, each element written by one
program that sums in one fixed order, without atomics: the same bits on every run. Scores are
recomputed from q, k and the LSE (seven products in place of five, which is the price of it).

With P = exp(S - lse) and dS = P * (dout v^T - delta): dv = P^T dout, dk = scale * dS^T q,
dq = scale * dS k, where delta = rowsum(dout * out) - dlse. (Dao et al., FlashAttention, 2022,
appendix B.2.)

Lengths, strides, the scale and the offset of the causal mask are run-time values of every kernel:
none of them makes Triton compile again.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from portattn.backends.triton_jit import kernel_cache
from portattn.backends.triton_jit.dispatch import Launch, remembered
from portattn.backends.triton_jit.hopper_backward_dkdv import dkdv_kernel
from portattn.backends.triton_jit.hopper_backward_dq import dq_kernel
from portattn.backends.triton_jit.hopper_backward_plan import WARPGROUP_ROWS, BackwardConfig

kernel_cache.one_at_a_time(dkdv_kernel, dq_kernel)

# 16 bytes of a 16-bit type: the widest store, and what strides are counted in when they allow it.
_VECTOR = 8
# The register file over the computing warpgroups and the loading one; shared out again inside.
_REGISTERS = {2: 168, 3: 128}


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    scale: float,
    causal_offset: int | None,
    config: BackwardConfig,
    flags_kv: torch.Tensor | None = None,
    flags_q: torch.Tensor | None = None,
    memo: dict[Any, Any] | None = None,
) -> None:
    """Fill dq, dk and dv, on the current device and stream.

    q, dout, dq: (B, Hq, Sq, D); k, v, dk, dv: (B, Hk, Sk, D), Hq a multiple of Hk. q, k, v and
    dout: base and all strides but the last multiples of 16 bytes, last stride 1. lse (natural
    logarithm) and delta: float32 (B, Hq, Sq), contiguous. Query i sees key j where
    j <= i + causal_offset; None: every key.

    flags_kv: int32 (B * Hk, ceil(Sk / config.dkdv.block_k)); flags_q: int32
    (B * Hq, ceil(Sq / config.dq.block_q)): 1 where a stored element of that tile of dk or dv, or
    of dq, is NaN or infinite; they are 0 before. NaN or infinity at a hidden position of q, k, v
    or dout can reach a gradient through 0 * NaN: the flags are how the caller sees it.

    memo: one plan's; it keeps what is the same for all arrays that lie in one way.
    """
    if 0 in (*q.shape[:3], k.shape[2]):
        # TMA knows no empty tensor, and a sum over nothing is zero.
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    big = (q, k, v, dout, dq, dk, dv)
    lies = (*(x.stride() for x in big), any(x.data_ptr() % 16 for x in big), flags_q is None)

    def prepare() -> tuple[Launch, Launch]:
        return _prepared(*big, scale, causal_offset, config, flags_q is not None)

    keys, queries = remembered({} if memo is None else memo, ("hopper backward", *lies), prepare)
    keys.start((q, k, v, dout, lse, delta, dk, dv, flags_kv))
    queries.start((q, k, v, dout, lse, delta, dq, flags_q))


def _prepared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor,
    dk: torch.Tensor, dv: torch.Tensor, scale: float, causal_offset: int | None,
    config: BackwardConfig, with_flags: bool,
) -> tuple[Launch, Launch]:  # fmt: skip
    """The launches for dk and dv, and for dq."""
    batch, heads_q, seq_q, head_dim = q.shape
    heads_k, seq_k = k.shape[1], k.shape[2]
    group = heads_q // heads_k
    causal = causal_offset is not None
    offset = causal_offset if causal_offset is not None else 0
    scale_log2 = float(scale) * log2(e)
    # One program for each multiprocessor; each takes several tiles.
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    dkdv, dq_tile, padded = config.dkdv, config.dq, config.head_dim

    dk_strides, dv_strides, vector = _out_strides(dk, dv)
    n_heads = batch * heads_k
    keys = _launch(
        dkdv_kernel,
        min(triton.cdiv(seq_k, dkdv.block_k) * n_heads, processors),
        (
            _descriptor(q, dkdv.block_q, padded),
            _descriptor(k, WARPGROUP_ROWS, padded),
            _descriptor(v, WARPGROUP_ROWS, padded),
            _descriptor(dout, dkdv.block_q, padded),
        ),
        (
            seq_q, seq_k, heads_q, heads_k, group, head_dim // vector,
            n_heads, offset, scale, scale_log2, *dk_strides, *dv_strides,
        ),
        _dkdv_constants(config, causal, with_flags, vector),
        _options(dkdv.warpgroups),
    )  # fmt: skip

    dq_strides, vector = _out_strides(dq)
    n_heads = batch * heads_q
    queries = _launch(
        dq_kernel,
        min(triton.cdiv(seq_q, dq_tile.block_q) * n_heads, processors),
        (
            _descriptor(q, WARPGROUP_ROWS, padded),
            _descriptor(k, dq_tile.block_k, padded),
            _descriptor(v, dq_tile.block_k, padded),
            _descriptor(dout, WARPGROUP_ROWS, padded),
        ),
        (
            seq_q, seq_k, heads_q, group, head_dim // vector,
            n_heads, offset, scale, scale_log2, *dq_strides,
        ),
        _dq_constants(config, causal, with_flags, vector),
        _options(dq_tile.warpgroups),
    )  # fmt: skip
    return keys, queries


def _launch(
    kernel: Any,
    programs: int,
    boxes: tuple[Any, ...],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> Launch:
    order = [p.name for p in kernel.params if p.name in constants]

    def first(*arrays: Any) -> Any:
        return kernel[(programs,)](*arrays, *numbers, **constants, **options)

    rest = (*numbers, *(constants[name] for name in order))
    return Launch(first, programs, rest, dict(enumerate(boxes)))


def compile_ahead(
    config: BackwardConfig, dtype: str, *, causal: bool, flags: bool = False
) -> tuple[Any, Any]:
    """The compiled (dk and dv, dq) kernels for sm_90a, on a machine with or without a GPU.

    dtype: "float16" or "bfloat16". Triton's cache then holds what `launch` asks for when the
    outputs are aligned.
    """
    element = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    dkdv_rows = {"q_desc": config.dkdv.block_q, "do_desc": config.dkdv.block_q}
    dq_rows = {"k_desc": config.dq.block_k, "v_desc": config.dq.block_k}
    return (
        _compile(
            dkdv_kernel, element, config.head_dim, dkdv_rows, config.dkdv.warpgroups,
            _dkdv_constants(config, causal, flags, _VECTOR),
        ),
        _compile(
            dq_kernel, element, config.head_dim, dq_rows, config.dq.warpgroups,
            _dq_constants(config, causal, flags, _VECTOR),
        ),
    )  # fmt: skip


def _compile(
    kernel: Any, element: str, head_dim: int, rows: dict[str, int], warpgroups: int,
    constants: dict[str, Any],
) -> Any:  # fmt: skip
    from triton.backends.compiler import GPUTarget

    signature: dict[str, str] = {}
    # Written as the runtime writes them, so that both find the same entry of the cache.
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    constants = dict(constants)
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_desc"):
            block = f"1, 1, {rows.get(name, WARPGROUP_ROWS)}, {head_dim}"
            signature[name] = f"tensordesc<{element}[{block}],{_layout()!r}>"
        elif name == "flag_ptr":
            signature[name] = "*i32" if constants["FLAGS"] else "constexpr"
            if constants["FLAGS"]:
                attributes[(index,)] = []
            else:
                constants[name] = None
        elif name in ("lse_ptr", "delta_ptr"):
            signature[name] = "*fp32"
            attributes[(index,)] = []
        elif name.endswith("_ptr"):
            signature[name] = f"*{element}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation
    return triton.compile(
        GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 90, 32),
        options=_options(warpgroups),
    )


def _dkdv_constants(
    config: BackwardConfig, causal: bool, flags: bool, vector: int
) -> dict[str, Any]:
    tile = config.dkdv
    return {
        "WARPGROUPS": tile.warpgroups,
        "STAGES": tile.stages,
        "P_STAGES": tile.p_stages,
        "SPLIT_KEYS": tile.split == "keys",
        "EARLY_DP": tile.early_dp,
        "K_IN_REGISTERS": tile.k_in_registers,
        "CAUSAL": causal,
        "FLAGS": flags,
        "VECTOR": vector,
    }


def _dq_constants(config: BackwardConfig, causal: bool, flags: bool, vector: int) -> dict[str, Any]:
    tile = config.dq
    return {
        "WARPGROUPS": tile.warpgroups,
        "K_STAGES": tile.k_stages,
        "V_STAGES": tile.v_stages,
        "EARLY_DP": tile.early_dp,
        "Q_IN_REGISTERS": tile.q_in_registers,
        "CAUSAL": causal,
        "FLAGS": flags,
        "VECTOR": vector,
    }


def _options(warpgroups: int) -> dict[str, Any]:
    # Fused multiply-add is said aloud: from Triton 3.10 on it is off unless asked for.
    return {"num_warps": 4, "maxnreg": _REGISTERS[warpgroups], "enable_fp_fusion": True}


def _layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _descriptor(tensor: torch.Tensor, rows: int, head_dim: int) -> Any:
    """Boxes of (1, 1, rows, head_dim) over (B, H, S, D); what lies outside reads as zero."""
    shape = list(tensor.shape)
    # The stride of a dimension of size 1 may be anything, and TMA looks at it all the same.
    strides = [
        stride if size > 1 else _VECTOR
        for size, stride in zip(shape[:3], tensor.stride()[:3], strict=True)
    ]
    return TensorDescriptor(tensor, shape, [*strides, 1], [1, 1, rows, head_dim], _layout())


def _out_strides(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """The four strides of each tensor, then the unit that all but the last are counted in."""
    wide = all(
        t.stride(3) == 1
        and t.shape[3] % _VECTOR == 0
        and t.data_ptr() % 16 == 0
        and all(stride % _VECTOR == 0 for stride in t.stride()[:3])
        for t in tensors
    )
    if not wide:
        return *(t.stride() for t in tensors), 1
    return *((*(s // _VECTOR for s in t.stride()[:3]), 1) for t in tensors), _VECTOR
