"""dk and dv on Hopper where two warpgroups share 64 keys: one has P and dv, the other dS and dk.

The rule kept here: P crosses through shared memory once, and each block of q and dout is given back
as soon as the second warpgroup has met it: with stages for two blocks alone, the next load waits
for that.
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
def probabilities_step(
    k, ring, dv, p_prev, it, row, key_row, seq_q, causal_offset, scale_log2,
    FIRST: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """P^T of one query block, handed across; dv gains the previous block's P^T dO."""
    q_s, do_s, p_s, lse_s, q_full, q_empty, do_full, do_empty, p_full, p_empty = ring
    STAGES: gl.constexpr = q_s.type.shape[0]
    P_STAGES: gl.constexpr = p_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    stage = it % STAGES
    q = q_s.index(stage).reshape([BLOCK_Q, HEAD_DIM])
    zero = gl.full([64, BLOCK_Q], 0.0, gl.float32, S_LAYOUT)

    # The product that is owed goes first: its block of dout is free for the next load the earlier,
    # and the other warpgroup's products fill the time of the exponentials.
    if not FIRST:
        prev = (it - 1) % STAGES
        mbarrier.wait(do_full.index(prev), ((it - 1) // STAGES) & 1)
        do_prev = do_s.index(prev).reshape([BLOCK_Q, HEAD_DIM])
        dv_async = warpgroup_mma(p_prev, do_prev, dv, is_async=True)
    mbarrier.wait(q_full.index(stage), (it // STAGES) & 1)
    s_async = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = lse_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))  # [BLOCK_Q]
    if not FIRST:
        dv = warpgroup_mma_wait(1, deps=(dv_async,))
        mbarrier.arrive(do_empty.index(prev), count=1)
    s = warpgroup_mma_wait(0, deps=(s_async,))  # [64, BLOCK_Q], keys as rows
    mbarrier.arrive(q_empty.index(stage), count=1)
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        visible = visible_pairs(row, key_row, seq_q, causal_offset, S_LAYOUT, BLOCK_Q, CAUSAL)
        p = gl.where(visible, p, 0.0)
    p = p.to(q_s.dtype)
    p_stage = it % P_STAGES
    mbarrier.wait(p_empty.index(p_stage), ((it // P_STAGES) & 1) ^ 1)
    p_s.index(p_stage).store(p)
    mbarrier.arrive(p_full.index(p_stage), count=1)
    return dv, gl.convert_layout(p, A_LAYOUT)


@gluon.jit
def probabilities_consumer(
    buffers, exchange, barriers, sizes, out, flag_ptr, head_dim, scale_log2,
    CAUSAL: gl.constexpr, VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns P^T and dv of all keys of each tile."""
    q_s, k_s, _v_s, do_s, lse_s, _delta_s = buffers
    p_s, p_full, p_empty = exchange
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    seq_q, seq_k, heads_k, group, n_heads, causal_offset = sizes
    ring = (q_s, do_s, p_s, lse_s, q_full, q_empty, do_full, do_empty, p_full, p_empty)
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    k = k_s.index(0).reshape([64, HEAD_DIM])
    base = 0
    for turn in range(turns(gl.cdiv(seq_k, 64), n_heads, CAUSAL)):
        tile, head, batch, n_blocks, n_unmasked = key_tile(
            turn, seq_q, seq_k, heads_k, n_heads, causal_offset,
            BLOCK_Q, 64, CAUSAL,
        )  # fmt: skip
        key_row = tile * 64
        dv = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
        mbarrier.wait(kv_full.index(0), turn & 1)
        row = (gl.cdiv(seq_q, BLOCK_Q) - 1) * BLOCK_Q
        for g in range(group):
            dv, p = probabilities_step(
                k, ring, dv, None, base, row, key_row, seq_q, causal_offset, scale_log2,
                FIRST=True, MASKED=True, CAUSAL=CAUSAL,
            )  # fmt: skip
            for t in range(1, n_unmasked):
                dv, p = probabilities_step(
                    k, ring, dv, p, base + t, row, key_row, seq_q, causal_offset, scale_log2,
                    FIRST=False, MASKED=False, CAUSAL=CAUSAL,
                )  # fmt: skip
            if CAUSAL:
                for t in range(n_unmasked, n_blocks):
                    dv, p = probabilities_step(
                        k, ring, dv, p, base + t, row - t * BLOCK_Q, key_row, seq_q, causal_offset,
                        scale_log2, FIRST=False, MASKED=True, CAUSAL=CAUSAL,
                    )  # fmt: skip
            base += n_blocks
            if g == group - 1:
                mbarrier.arrive(kv_empty.index(0), count=1)
            last = (base - 1) % STAGES
            mbarrier.wait(do_full.index(last), ((base - 1) // STAGES) & 1)
            dv = warpgroup_mma(p, do_s.index(last).reshape([BLOCK_Q, HEAD_DIM]), dv, is_async=False)
            mbarrier.arrive(do_empty.index(last), count=1)
        flags = flag_ptr
        if FLAGS:
            flags += head.to(gl.int64) * gl.cdiv(seq_k, 64) + tile
        kv_head = head - batch * heads_k
        store_tile(out, flags, dv, batch, kv_head, key_row, seq_k, head_dim, VECTOR, FLAGS)


@gluon.jit
def score_gradients_step(v, ring, dk, ds_prev, it, FIRST: gl.constexpr):
    """dS^T of one query block from the P^T handed across; dk gains the previous block's dS^T Q.

    P^T is zero at hidden pairs, which is why no mask is needed here.
    """
    q_s, do_s, p_s, delta_s, q_full, q_empty, do_full, do_empty, p_full, p_empty = ring
    STAGES: gl.constexpr = q_s.type.shape[0]
    P_STAGES: gl.constexpr = p_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    stage = it % STAGES
    do = do_s.index(stage).reshape([BLOCK_Q, HEAD_DIM])
    zero = gl.full([64, BLOCK_Q], 0.0, gl.float32, S_LAYOUT)

    if not FIRST:
        prev = (it - 1) % STAGES
        mbarrier.wait(q_full.index(prev), ((it - 1) // STAGES) & 1)
        q_prev = q_s.index(prev).reshape([BLOCK_Q, HEAD_DIM])
        dk_async = warpgroup_mma(ds_prev, q_prev, dk, is_async=True)
    mbarrier.wait(do_full.index(stage), (it // STAGES) & 1)
    dp_async = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    delta = delta_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))  # [BLOCK_Q]
    if not FIRST:
        dk = warpgroup_mma_wait(1, deps=(dk_async,))
        mbarrier.arrive(q_empty.index(prev), count=1)
    dp = warpgroup_mma_wait(0, deps=(dp_async,))  # [64, BLOCK_Q], keys as rows
    mbarrier.arrive(do_empty.index(stage), count=1)
    p_stage = it % P_STAGES
    mbarrier.wait(p_full.index(p_stage), (it // P_STAGES) & 1)
    p = p_s.index(p_stage).load(S_LAYOUT)
    mbarrier.arrive(p_empty.index(p_stage), count=1)
    ds = p.to(gl.float32) * (dp - delta[None, :])
    return dk, gl.convert_layout(ds.to(q_s.dtype), A_LAYOUT)


@gluon.jit
def score_gradients_consumer(
    buffers, exchange, barriers, sizes, out, flag_ptr, head_dim, scale,
    CAUSAL: gl.constexpr, VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns dS^T and dk of all keys of each tile."""
    q_s, _k_s, v_s, do_s, _lse_s, delta_s = buffers
    p_s, p_full, p_empty = exchange
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = barriers
    seq_q, seq_k, heads_k, group, n_heads, causal_offset = sizes
    ring = (q_s, do_s, p_s, delta_s, q_full, q_empty, do_full, do_empty, p_full, p_empty)
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    v = v_s.index(0).reshape([64, HEAD_DIM])
    base = 0
    for turn in range(turns(gl.cdiv(seq_k, 64), n_heads, CAUSAL)):
        tile, head, batch, n_blocks, _ = key_tile(
            turn, seq_q, seq_k, heads_k, n_heads, causal_offset,
            BLOCK_Q, 64, CAUSAL,
        )  # fmt: skip
        dk = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
        mbarrier.wait(kv_full.index(1), turn & 1)
        for g in range(group):
            dk, ds = score_gradients_step(v, ring, dk, None, base, FIRST=True)
            for t in range(1, n_blocks):
                dk, ds = score_gradients_step(v, ring, dk, ds, base + t, FIRST=False)
            base += n_blocks
            if g == group - 1:
                mbarrier.arrive(kv_empty.index(1), count=1)
            last = (base - 1) % STAGES
            mbarrier.wait(q_full.index(last), ((base - 1) // STAGES) & 1)
            dk = warpgroup_mma(ds, q_s.index(last).reshape([BLOCK_Q, HEAD_DIM]), dk, is_async=False)
            mbarrier.arrive(q_empty.index(last), count=1)
        flags = flag_ptr
        if FLAGS:
            flags += head.to(gl.int64) * gl.cdiv(seq_k, 64) + tile
        kv_head = head - batch * heads_k
        store_tile(
            out, flags, dk * scale, batch, kv_head, tile * 64, seq_k, head_dim, VECTOR, FLAGS
        )
