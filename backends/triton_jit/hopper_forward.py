"""Forward attention on Hopper: TMA, wgmma and warp specialization, written in Gluon.

The rule kept here: nothing about a call but its compile-time flags triggers a compilation: every
length, stride and offset is a run-time argument that never specializes.

One warp loads (TMA); each consumer warpgroup owns 64 query rows. The scores of block j overlap
with the product of block j-1 with its values. A launch with one program per tile is the ordinary
kernel; with fewer programs, each walks several tiles and the next tile's loads run under the
epilogue of the last one.
"""

import math
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from portattn.backends.triton_jit.dispatch import Launch
from portattn.backends.triton_jit.hopper_forward_tiles import (
    WARPGROUP_ROWS,
    attend_partition,
    load_partition,
)

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32


@gluon.jit(
    do_not_specialize=[
        "out_stride_b",
        "out_stride_h",
        "out_stride_s",
        "out_stride_d",
        "lse_stride_b",
        "lse_stride_h",
        "lse_stride_s",
        "n_tiles",
        "row_tiles",
        "head_group",
        "heads_total",
        "heads_q",
        "heads_per_kv",
        "seq_q",
        "seq_k",
        "columns",
        "causal_offset",
        "scale_log2",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "flags_ptr"],
)
def hopper_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    flags_ptr,
    out_stride_b: gl.int64,
    out_stride_h: gl.int64,
    out_stride_s: gl.int64,
    out_stride_d: gl.int64,
    lse_stride_b: gl.int64,
    lse_stride_h: gl.int64,
    lse_stride_s: gl.int64,
    n_tiles: gl.int32,
    row_tiles: gl.int32,
    head_group: gl.int32,
    heads_total: gl.int32,
    heads_q: gl.int32,
    heads_per_kv: gl.int32,
    seq_q: gl.int32,
    seq_k: gl.int32,
    columns: gl.int32,
    causal_offset: gl.int32,
    scale_log2: gl.float32,
    STAGES: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEGATIVE_SCALE: gl.constexpr,
    WITH_LSE: gl.constexpr,
    WITH_FLAGS: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """Exact attention forward over tiles of 64 * NUM_CONSUMERS query rows."""
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[3]
    q_smem = gl.allocate_shared_memory(
        q_desc.dtype, [NUM_CONSUMERS, 1, 1, WARPGROUP_ROWS, HEAD_DIM], q_desc.layout
    )
    k_smem = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], k_desc.layout
    )
    v_smem = gl.allocate_shared_memory(
        v_desc.dtype, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], v_desc.layout
    )
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [NUM_CONSUMERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [NUM_CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(NUM_CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NUM_CONSUMERS)
        mbarrier.init(v_empty.index(i), count=NUM_CONSUMERS)
    fence_async_shared()

    # Tuples in variables hold values alone: a compile-time flag in one would become a value, so
    # that those stand inline below.
    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (n_tiles, row_tiles, head_group, heads_total, heads_q, seq_q, seq_k, causal_offset)
    out_strides = (out_stride_b, out_stride_h, out_stride_s, out_stride_d)
    lse_strides = (lse_stride_b, lse_stride_h, lse_stride_s)
    results = (out_ptr, lse_ptr, flags_ptr, out_strides, lse_strides, columns)
    # Registers: the first partition takes what the others leave of maxnreg * threads.
    # fmt: off
    if NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (attend_partition, (
                0, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (attend_partition, (
                1, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (load_partition, (
                q_desc, k_desc, v_desc, buffers, barriers, sizes, heads_per_kv, CAUSAL)),
        ], [4, 1], [240, 24])
    elif NUM_CONSUMERS == 4:
        gl.warp_specialize([
            (attend_partition, (
                0, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (attend_partition, (
                1, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (attend_partition, (
                2, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (attend_partition, (
                3, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (load_partition, (
                q_desc, k_desc, v_desc, buffers, barriers, sizes, heads_per_kv, CAUSAL)),
        ], [4, 4, 4, 1], [112, 112, 112, 24])
    else:
        gl.static_assert(NUM_CONSUMERS == 3)
        gl.warp_specialize([
            (attend_partition, (
                0, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (attend_partition, (
                1, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (attend_partition, (
                2, buffers, barriers, sizes, results, scale_log2,
                CAUSAL, NEGATIVE_SCALE, WITH_LSE, WITH_FLAGS, VECTOR)),
            (load_partition, (
                q_desc, k_desc, v_desc, buffers, barriers, sizes, heads_per_kv, CAUSAL)),
        ], [4, 4, 1], [160, 160, 32])
    # fmt: on


_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


def _layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _block_shapes(config):
    """Boxes of q and of k and v over (B, H, S, D): what lies outside the tensor reads as zero."""
    return [1, 1, WARPGROUP_ROWS.value, config.head_dim_pad], [
        1,
        1,
        config.block_k,
        config.head_dim_pad,
    ]


def _num_consumers(config):
    return getattr(config, "num_consumers", 2)


def _descriptor(tensor, block_shape, layout):
    # A dimension of size 1 may carry any stride, also one that the hardware refuses.
    strides = [
        stride if size > 1 else block_shape[-1]
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block_shape, layout)


def _strides(tensor, dims):
    """Strides, 0 where the dimension has size 1 and its stride means nothing."""
    return [tensor.stride(d) if tensor.shape[d] > 1 else 0 for d in range(dims)]


def launch(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    flags: Any,
    *,
    scale: float,
    causal_offset: int | None,
    config: Any,
    grid_size: int,
    head_group: int,
) -> None:
    """Fill `out`, and `lse` and `flags` where given, on the current device and stream.

    q, k, v: (B, H, S, D), float16 or bfloat16, last stride 1, other strides and base multiples of
        16 bytes. out: (B, Hq, Sq, Dv), any strides.
    lse: (B, Hq, Sq), float32, natural logarithm; or None.
    flags: contiguous int32, (B * Hq, row tiles); or None. An entry is not 0 where a row of that
        tile holds NaN or inf: each consumer warpgroup owns one byte.
    causal_offset: key j is visible to query i where j <= i + causal_offset; None: all keys.
    grid_size: programs; fewer than tiles make each walk several. head_group: how many
        (batch, head) pairs share the order of tiles, longest rows first.
    """
    ready = Prepared(
        q, k, v, out, lse, flags is not None, scale=scale, causal_offset=causal_offset,
        config=config, grid_size=grid_size, head_group=head_group,
    )  # fmt: skip
    ready.start(q, k, v, out, lse, flags)


class Prepared:
    """A launch for arrays that lie in one way: everything but their addresses."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        with_flags: bool,
        *,
        scale: float,
        causal_offset: int | None,
        config: Any,
        grid_size: int,
        head_group: int,
    ) -> None:
        batch, heads_q, seq_q, _ = q.shape
        _, heads_k, seq_k, value_dim = v.shape
        num_consumers = _num_consumers(config)
        row_tiles = -(-seq_q // (WARPGROUP_ROWS.value * num_consumers))
        heads_total = batch * heads_q
        n_tiles = row_tiles * heads_total
        q_block, kv_block = _block_shapes(config)
        layout = _layout()
        boxes = [
            _descriptor(q, q_block, layout),
            _descriptor(k, kv_block, layout),
            _descriptor(v, kv_block, layout),
        ]
        out_strides = _strides(out, 4)
        vectors = (
            out_strides[3] == 1
            and out.data_ptr() % 16 == 0
            and value_dim % 8 == 0
            and all(stride % 8 == 0 for stride in out_strides[:3])
        )
        vector = 8 if vectors else 1
        out_strides[:3] = [stride // vector for stride in out_strides[:3]]
        scale_log2 = scale * LOG2_E
        if abs(scale_log2) < SMALLEST_SCALE:
            # A scale of zero would turn the -inf of hidden keys into NaN.
            scale_log2 = SMALLEST_SCALE
        programs = min(grid_size, n_tiles)
        numbers = (
            *out_strides,
            *([0, 0, 0] if lse is None else _strides(lse, 3)),
            n_tiles,
            row_tiles,
            min(head_group, heads_total),
            heads_total,
            heads_q,
            heads_q // heads_k,
            seq_q,
            seq_k,
            value_dim // vector,
            0 if causal_offset is None else causal_offset,
            scale_log2,
        )
        constants = {
            "STAGES": config.stages,
            "NUM_CONSUMERS": num_consumers,
            "CAUSAL": causal_offset is not None,
            "NEGATIVE_SCALE": scale_log2 < 0,
            "WITH_LSE": lse is not None,
            "WITH_FLAGS": with_flags,
            "VECTOR": vector,
        }
        options = {"num_warps": config.num_warps, "maxnreg": config.maxnreg}

        def first(*arrays: Any) -> Any:
            return hopper_forward_kernel[(programs,)](*arrays, *numbers, **constants, **options)

        rest = (*numbers, *constants.values())
        self._launch = Launch(first, programs, rest, dict(enumerate(boxes)))

    def start(self, q: Any, k: Any, v: Any, out: Any, lse: Any, flags: Any) -> None:
        """Launch on these arrays, of which only the addresses count now."""
        self._launch.start(
            (q, k, v, out, out if lse is None else lse, out if flags is None else flags)
        )


def compile_ahead(
    config, dtype, *, causal, with_lse, with_flags, vectors=True, negative_scale=False
):
    """The kernel compiled for sm_90a, as `launch` would have it; needs no GPU.

    dtype: "float16", "bfloat16" or the torch dtype of that name.
    """
    element = _DTYPES[str(dtype).removeprefix("torch.")]
    q_block, kv_block = _block_shapes(config)
    constants = {
        "STAGES": config.stages,
        "NUM_CONSUMERS": _num_consumers(config),
        "CAUSAL": causal,
        "NEGATIVE_SCALE": negative_scale,
        "WITH_LSE": with_lse,
        "WITH_FLAGS": with_flags,
        "VECTOR": 8 if vectors else 1,
    }

    def descriptor(block):
        return f"tensordesc<{element}{block},{_layout()!r}>"

    types = {
        "q_desc": descriptor(q_block),
        "k_desc": descriptor(kv_block),
        "v_desc": descriptor(kv_block),
        "out_ptr": f"*{element}",
        "lse_ptr": "*fp32" if with_lse else f"*{element}",
        "flags_ptr": "*i32" if with_flags else f"*{element}",
    }
    signature = {
        param.name: "constexpr"
        if param.is_constexpr
        else types.get(param.name) or param.annotation_type
        for param in hopper_forward_kernel.params
    }
    out_position = list(signature).index("out_ptr")
    attributes = {(out_position,): [["tt.divisibility", 16]]} if vectors else {}
    source = GluonASTSource(hopper_forward_kernel, signature, constants, attributes)
    options = {"num_warps": config.num_warps, "maxnreg": config.maxnreg}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
