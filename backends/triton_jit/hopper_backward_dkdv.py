"""dk and dv on Hopper: a tile of keys of one key head is one program's, which writes it alone.

The rule kept here: everything is computed transposed, with keys as rows, so that the products of
the recomputed scores stay in registers as the left operand of the next product; the sum over
query blocks and over the heads of the group runs in one fixed order in registers.

A program takes several tiles, one after another, and loads the next one's keys under the stores of
the last. One warp feeds shared memory through TMA; the warpgroups share the work in one of two
ways. SPLIT_KEYS (`hopper_backward_keys`): each warpgroup owns 64 keys and computes all four
products for them. Otherwise (`hopper_backward_products`; head dim 256, where dk and dv of 64 keys
fill the registers of one warpgroup each) the first computes S^T, P^T and dv, the second dP^T, dS^T
and dk, and P^T goes across through shared memory.

Query blocks run from the last one down: the block that ends the sequence is the first and the
blocks on the diagonal are the last, and only these are masked.
"""

# Annotations stay real objects here (no `from __future__`): Triton reads them to type arguments.
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from portattn.backends.triton_jit.hopper_backward_keys import keys_consumer
from portattn.backends.triton_jit.hopper_backward_products import (
    probabilities_consumer,
    score_gradients_consumer,
)
from portattn.backends.triton_jit.hopper_backward_tiles import LOG2_E, key_tile, load_rows, turns


@gluon.jit
def load_statistics(lse_ptr, delta_ptr, row, seq_q, BLOCK_Q: gl.constexpr):
    """Base-2 LSE and delta of one query block; rows that hold no probability get LSE +inf."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    rows = row + gl.arange(0, BLOCK_Q, layout)
    inside = rows < seq_q
    lse = gl.load(lse_ptr + rows, mask=inside, other=float("inf"))
    delta = gl.load(delta_ptr + rows, mask=inside, other=0.0)
    empty = lse == -float("inf")
    return gl.where(empty, float("inf"), lse * LOG2_E), gl.where(empty, 0.0, delta)


@gluon.jit
def dkdv_producer(descriptors, statistics, buffers, barriers, sizes, CAUSAL: gl.constexpr):
    """The warp that loads."""
    q_desc, k_desc, v_desc, do_desc = descriptors
    lse_ptr, delta_ptr = statistics
    q_s, k_s, v_s, do_s, lse_s, delta_s = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    seq_q, seq_k, heads_k, group, n_heads, causal_offset = sizes
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[2]
    PANELS: gl.constexpr = k_s.type.shape[0]
    it = 0
    for turn in range(turns(gl.cdiv(seq_k, 64 * PANELS), n_heads, CAUSAL)):
        tile, head, batch, n_blocks, _ = key_tile(
            turn, seq_q, seq_k, heads_k, n_heads, causal_offset,
            BLOCK_Q, 64 * PANELS, CAUSAL,
        )  # fmt: skip
        kv_head = head - batch * heads_k
        for i in gl.static_range(PANELS):
            row = (tile * PANELS + i) * 64
            mbarrier.wait(kv_empty.index(2 * i), (turn & 1) ^ 1)
            load_rows(k_desc, batch, kv_head, row, kv_full.index(2 * i), k_s.index(i))
            mbarrier.wait(kv_empty.index(2 * i + 1), (turn & 1) ^ 1)
            load_rows(v_desc, batch, kv_head, row, kv_full.index(2 * i + 1), v_s.index(i))
        for g in range(group):
            offset = (head.to(gl.int64) * group + g) * seq_q
            row = (gl.cdiv(seq_q, BLOCK_Q) - 1) * BLOCK_Q
            for _ in range(n_blocks):
                # Issued before the wait, so that their latency passes while the stage drains.
                lse, delta = load_statistics(
                    lse_ptr + offset, delta_ptr + offset, row, seq_q, BLOCK_Q
                )
                stage = it % STAGES
                free = ((it // STAGES) & 1) ^ 1
                q_head = kv_head * group + g
                mbarrier.wait(q_empty.index(stage), free)
                load_rows(q_desc, batch, q_head, row, q_full.index(stage), q_s.index(stage))
                lse_s.index(stage).store(lse)
                mbarrier.arrive(q_full.index(stage), count=1)
                mbarrier.wait(do_empty.index(stage), free)
                load_rows(do_desc, batch, q_head, row, do_full.index(stage), do_s.index(stage))
                delta_s.index(stage).store(delta)
                mbarrier.arrive(do_full.index(stage), count=1)
                row -= BLOCK_Q
                it += 1


@gluon.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "heads_q", "heads_k", "group", "head_dim", "n_heads",
        "causal_offset", "scale", "scale_log2",
        "dk_batch_stride", "dk_head_stride", "dk_row_stride", "dk_col_stride",
        "dv_batch_stride", "dv_head_stride", "dv_row_stride", "dv_col_stride",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "flag_ptr"],
)  # fmt: skip
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, flag_ptr,
    seq_q: gl.int32, seq_k: gl.int32, heads_q: gl.int32, heads_k: gl.int32, group: gl.int32,
    head_dim: gl.int32, n_heads: gl.int32, causal_offset: gl.int32,
    scale: gl.float32, scale_log2: gl.float32,
    dk_batch_stride: gl.int64, dk_head_stride: gl.int64, dk_row_stride: gl.int64,
    dk_col_stride: gl.int64, dv_batch_stride: gl.int64, dv_head_stride: gl.int64,
    dv_row_stride: gl.int64, dv_col_stride: gl.int64,
    WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr,
    SPLIT_KEYS: gl.constexpr, EARLY_DP: gl.constexpr, K_IN_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """dk, dv of one key tile; `VECTOR` > 1: columns are adjacent, and `head_dim` and
    the other strides of the outputs count that many elements.

    `flag_ptr`: int32 (B * Hk, number of key tiles).
    """
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[3]
    PANELS: gl.constexpr = WARPGROUPS if SPLIT_KEYS else 1
    BLOCK_K: gl.constexpr = 64 * PANELS
    dtype: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    k_s = gl.allocate_shared_memory(dtype, [PANELS, 1, 1, 64, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [PANELS, 1, 1, 64, HEAD_DIM], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, HEAD_DIM], do_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], FLAT)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], FLAT)
    # Barriers come in pairs: 16 bytes leave no gap, and the planner can count.
    kv_full = gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    for i in gl.static_range(2 * PANELS):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        # TMA's arrival and that of the row statistics, which the producer stores itself.
        mbarrier.init(q_full.index(i), count=2)
        mbarrier.init(do_full.index(i), count=2)
        mbarrier.init(q_empty.index(i), count=WARPGROUPS)
        mbarrier.init(do_empty.index(i), count=WARPGROUPS)

    # Tuples in variables hold values alone: a compile-time flag in one would become a value, so
    # that those, and a pointer that may be None, stand inline below.
    descriptors = (q_desc, k_desc, v_desc, do_desc)
    statistics = (lse_ptr, delta_ptr)
    buffers = (q_s, k_s, v_s, do_s, lse_s, delta_s)
    barriers = (kv_full, kv_empty, q_full, q_empty, do_full, do_empty)
    sizes = (seq_q, seq_k, heads_k, group, n_heads, causal_offset)
    dk_out = (dk_ptr, dk_batch_stride, dk_head_stride, dk_row_stride, dk_col_stride)
    dv_out = (dv_ptr, dv_batch_stride, dv_head_stride, dv_row_stride, dv_col_stride)
    # fmt: off
    if SPLIT_KEYS:
        fence_async_shared()
        if WARPGROUPS == 2:
            gl.warp_specialize([
                (keys_consumer, (
                    0, buffers, barriers, sizes, dk_out, dv_out, flag_ptr, head_dim,
                    scale, scale_log2, EARLY_DP, K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (keys_consumer, (
                    1, buffers, barriers, sizes, dk_out, dv_out, flag_ptr, head_dim,
                    scale, scale_log2, EARLY_DP, K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (dkdv_producer, (descriptors, statistics, buffers, barriers, sizes, CAUSAL)),
            ], [4, 1], [240, 24])
        else:
            gl.warp_specialize([
                (keys_consumer, (
                    0, buffers, barriers, sizes, dk_out, dv_out, flag_ptr, head_dim,
                    scale, scale_log2, EARLY_DP, K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (keys_consumer, (
                    1, buffers, barriers, sizes, dk_out, dv_out, flag_ptr, head_dim,
                    scale, scale_log2, EARLY_DP, K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (keys_consumer, (
                    2, buffers, barriers, sizes, dk_out, dv_out, flag_ptr, head_dim,
                    scale, scale_log2, EARLY_DP, K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (dkdv_producer, (descriptors, statistics, buffers, barriers, sizes, CAUSAL)),
            ], [4, 4, 1], [160, 160, 32])
    else:
        P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
        p_s = gl.allocate_shared_memory(dtype, [P_STAGES, BLOCK_K, BLOCK_Q], P_LAYOUT)
        p_full = gl.allocate_shared_memory(gl.int64, [P_STAGES + P_STAGES % 2, 1], BARRIER)
        p_empty = gl.allocate_shared_memory(gl.int64, [P_STAGES + P_STAGES % 2, 1], BARRIER)
        for i in gl.static_range(P_STAGES):
            mbarrier.init(p_full.index(i), count=1)
            mbarrier.init(p_empty.index(i), count=1)
        fence_async_shared()
        exchange = (p_s, p_full, p_empty)
        gl.warp_specialize([
            (probabilities_consumer, (
                buffers, exchange, barriers, sizes, dv_out, flag_ptr, head_dim, scale_log2,
                CAUSAL, VECTOR, FLAGS)),
            (score_gradients_consumer, (
                buffers, exchange, barriers, sizes, dk_out, flag_ptr, head_dim, scale,
                CAUSAL, VECTOR, FLAGS)),
            (dkdv_producer, (descriptors, statistics, buffers, barriers, sizes, CAUSAL)),
        ], [4, 1], [240, 24])
    # fmt: on
