"""dk and dv on Hopper where each warpgroup owns 64 keys, and computes all four products for them.

The rule kept here: what a step waits for was asked for a step before; the products of a block run
beside the exponentials of the next one.
"""

# Annotations stay real objects here (no `from __future__`): Triton reads them to type arguments.
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portattn.backends.triton_jit.hopper_backward_tiles import (
    key_tile,
    store_tile,
    turns,
    visible_pairs,
)


@gluon.jit
def keys_step(
    k, v, ring, dk, dv, ds_prev, it, row, key_row, seq_q, causal_offset, scale_log2,
    FIRST: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, EARLY_DP: gl.constexpr,
):  # fmt: skip
    """One query block: dv gains P^T dO, dk gains the previous block's dS^T Q.

    The previous block's dk product, and with EARLY_DP dP too, is in flight together with S, so
    that the exponentials run beside the tensor cores; the price of dP is its registers.
    """
    q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty = ring
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dtype: gl.constexpr = q_s.dtype
    stage = it % STAGES
    phase = (it // STAGES) & 1
    q = q_s.index(stage).reshape([BLOCK_Q, HEAD_DIM])
    do = do_s.index(stage).reshape([BLOCK_Q, HEAD_DIM])
    zero = gl.full([64, BLOCK_Q], 0.0, gl.float32, S_LAYOUT)

    mbarrier.wait(q_full.index(stage), phase)
    s_async = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not FIRST:
        prev = (it - 1) % STAGES
        q_prev = q_s.index(prev).reshape([BLOCK_Q, HEAD_DIM])
        dk_async = warpgroup_mma(ds_prev, q_prev, dk, is_async=True)
    if EARLY_DP:
        mbarrier.wait(do_full.index(stage), phase)
        dp_async = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)

    IN_FLIGHT: gl.constexpr = (0 if FIRST else 1) + (1 if EARLY_DP else 0)
    s = warpgroup_mma_wait(IN_FLIGHT, deps=(s_async,))  # [64, BLOCK_Q], keys as rows
    # The statistics are read this late because registers are short while products are in flight.
    lse = lse_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))  # [BLOCK_Q]
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        visible = visible_pairs(row, key_row, seq_q, causal_offset, S_LAYOUT, BLOCK_Q, CAUSAL)
        p = gl.where(visible, p, 0.0)
    if not EARLY_DP:
        mbarrier.wait(do_full.index(stage), phase)
        dp_async = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    p_operand = gl.convert_layout(p.to(dtype), A_LAYOUT)
    if not FIRST:
        dk = warpgroup_mma_wait(1, deps=(dk_async,))
        mbarrier.arrive(q_empty.index(prev), count=1)
    dv_async = warpgroup_mma(p_operand, do, dv, is_async=True)

    dp = warpgroup_mma_wait(1, deps=(dp_async,))  # [64, BLOCK_Q]
    delta = delta_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))  # [BLOCK_Q]
    ds = p * (dp - delta[None, :])
    dv = warpgroup_mma_wait(0, deps=(dv_async,))
    mbarrier.arrive(do_empty.index(stage), count=1)
    return dk, dv, gl.convert_layout(ds.to(dtype), A_LAYOUT)


@gluon.jit
def keys_consumer(
    panel: gl.constexpr, buffers, barriers, sizes, dk_out, dv_out, flag_ptr, head_dim,
    scale, scale_log2, EARLY_DP: gl.constexpr, K_IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr,
    VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns the 64 keys of `panel` of each tile."""
    q_s, k_s, v_s, do_s, lse_s, delta_s = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    seq_q, seq_k, heads_k, group, n_heads, causal_offset = sizes
    ring = (q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty)
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    BLOCK_K: gl.constexpr = 64 * k_s.type.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    base = 0
    for turn in range(turns(gl.cdiv(seq_k, BLOCK_K), n_heads, CAUSAL)):
        tile, head, batch, n_blocks, n_unmasked = key_tile(
            turn, seq_q, seq_k, heads_k, n_heads, causal_offset,
            BLOCK_Q, BLOCK_K, CAUSAL,
        )  # fmt: skip
        first_key = tile * BLOCK_K + 64 * panel
        dk = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
        dv = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
        mbarrier.wait(kv_full.index(2 * panel), turn & 1)
        mbarrier.wait(kv_full.index(2 * panel + 1), turn & 1)
        k = k_s.index(panel).reshape([64, HEAD_DIM])
        v = v_s.index(panel).reshape([64, HEAD_DIM])
        if K_IN_REGISTERS:
            k = k.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            v = v.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        row = (gl.cdiv(seq_q, BLOCK_Q) - 1) * BLOCK_Q
        for g in range(group):
            dk, dv, ds = keys_step(
                k, v, ring, dk, dv, None, base, row, first_key, seq_q, causal_offset, scale_log2,
                FIRST=True, MASKED=True, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
            )  # fmt: skip
            for t in range(1, n_unmasked):
                dk, dv, ds = keys_step(
                    k, v, ring, dk, dv, ds, base + t, row, first_key, seq_q, causal_offset,
                    scale_log2,
                    FIRST=False, MASKED=False, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
                )  # fmt: skip
            if CAUSAL:
                for t in range(n_unmasked, n_blocks):
                    dk, dv, ds = keys_step(
                        k, v, ring, dk, dv, ds, base + t, row - t * BLOCK_Q, first_key, seq_q,
                        causal_offset, scale_log2,
                        FIRST=False, MASKED=True, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
                    )  # fmt: skip
            base += n_blocks
            if g == group - 1:
                mbarrier.arrive(kv_empty.index(2 * panel), count=1)
                mbarrier.arrive(kv_empty.index(2 * panel + 1), count=1)
            last = (base - 1) % STAGES
            dk = warpgroup_mma(ds, q_s.index(last).reshape([BLOCK_Q, HEAD_DIM]), dk, is_async=False)
            mbarrier.arrive(q_empty.index(last), count=1)
        kv_head = head - batch * heads_k
        flags = flag_ptr
        if FLAGS:
            flags += head.to(gl.int64) * gl.cdiv(seq_k, BLOCK_K) + tile
        store_tile(dv_out, flags, dv, batch, kv_head, first_key, seq_k, head_dim, VECTOR, FLAGS)
        store_tile(
            dk_out, flags, dk * scale, batch, kv_head, first_key, seq_k, head_dim, VECTOR, FLAGS
        )
