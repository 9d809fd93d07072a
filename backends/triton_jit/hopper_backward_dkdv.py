"""dk and dv on Hopper: one program owns one tile of keys of one key head, and writes it alone.

The rule kept here: everything is computed transposed, with keys as rows, so that the products of
the recomputed scores stay in registers as the left operand of the next product; the sum over
query blocks and over the heads of the group runs in one fixed order in registers.

One warp feeds shared memory through TMA; the warpgroups share the work in one of two ways.
SPLIT_KEYS: each warpgroup owns 64 keys and computes all four products for them. Otherwise (head
dim 256, where dk and dv of 64 keys fill the registers of one warpgroup each) the first computes
S^T, P^T and dv, the second dP^T, dS^T and dk, and P^T goes across through shared memory.

Query blocks run from the last one down: the block that ends the sequence is the first and the
blocks on the diagonal are the last, and only these are masked.
"""

# Annotations stay real objects here (no `from __future__`): Triton reads them to type arguments.
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portattn.backends.triton_jit.hopper_backward_tiles import (
    LOG2_E,
    load_rows,
    store_tile,
    tile_and_head,
)


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
def dkdv_producer(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr,
    q_s, k_s, v_s, do_s, lse_s, delta_s,
    kv_full, q_full, q_empty, do_full, do_empty,
    batch, kv_head, group, key_row, seq_q, n_blocks, n_q_blocks,
):  # fmt: skip
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[2]
    PANELS: gl.constexpr = k_s.type.shape[0]
    for i in gl.static_range(PANELS):
        load_rows(k_desc, batch, kv_head, key_row + 64 * i, kv_full.index(2 * i), k_s.index(i))
        load_rows(v_desc, batch, kv_head, key_row + 64 * i, kv_full.index(2 * i + 1), v_s.index(i))
    for it in range(group * n_blocks):
        g = it // n_blocks
        q_head = kv_head * group + g
        row = (n_q_blocks - 1 - (it - g * n_blocks)) * BLOCK_Q
        offset = g.to(gl.int64) * seq_q
        # Issued before the wait, so that their latency passes while the stage drains.
        lse, delta = load_statistics(lse_ptr + offset, delta_ptr + offset, row, seq_q, BLOCK_Q)
        stage = it % STAGES
        free = ((it // STAGES) & 1) ^ 1
        mbarrier.wait(q_empty.index(stage), free)
        load_rows(q_desc, batch, q_head, row, q_full.index(stage), q_s.index(stage))
        lse_s.index(stage).store(lse)
        mbarrier.arrive(q_full.index(stage), count=1)
        mbarrier.wait(do_empty.index(stage), free)
        load_rows(do_desc, batch, q_head, row, do_full.index(stage), do_s.index(stage))
        delta_s.index(stage).store(delta)
        mbarrier.arrive(do_full.index(stage), count=1)


@gluon.jit
def visible_pairs(
    row, key_row, seq_q, causal_offset, S_LAYOUT: gl.constexpr, BLOCK_Q: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """[64, BLOCK_Q]: which queries (columns) exist and see which keys (rows)."""
    queries = row + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, S_LAYOUT))
    keys = key_row + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    if CAUSAL:
        # A column that does not exist sees no key: its bound lies below every key.
        last_key = gl.where(queries < seq_q, queries + causal_offset, -1)
        return keys[:, None] <= last_key[None, :]
    else:
        return (queries < seq_q)[None, :] & (keys >= 0)[:, None]


@gluon.jit
def keys_step(
    k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty,
    dk, dv, ds_prev, it, row, key_row, seq_q, causal_offset, scale_log2,
    FIRST: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, EARLY_DP: gl.constexpr,
):  # fmt: skip
    """One query block: dv gains P^T dO, dk gains the previous block's dS^T Q.

    The previous block's dk product, and with EARLY_DP dP too, is in flight together with S, so
    that the exponentials run beside the tensor cores; the price of dP is its registers.
    """
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
    panel: gl.constexpr, dk_ptr, dv_ptr, flag_ptr,
    q_s, k_s, v_s, do_s, lse_s, delta_s, kv_full, q_full, q_empty, do_full, do_empty,
    group, key_row, seq_q, seq_k, n_blocks, n_unmasked, n_q_blocks, causal_offset,
    dk_row_stride, dk_col_stride, dv_row_stride, dv_col_stride, head_dim, scale, scale_log2,
    EARLY_DP: gl.constexpr, K_IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr,
    VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns the 64 keys of `panel`."""
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    first_key = key_row + 64 * panel
    dk = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
    dv = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
    mbarrier.wait(kv_full.index(2 * panel), 0)
    mbarrier.wait(kv_full.index(2 * panel + 1), 0)
    k = k_s.index(panel).reshape([64, HEAD_DIM])
    v = v_s.index(panel).reshape([64, HEAD_DIM])
    if K_IN_REGISTERS:
        k = k.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        v = v.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    for g in range(group):
        base = g * n_blocks
        row = (n_q_blocks - 1) * BLOCK_Q
        dk, dv, ds = keys_step(
            k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty,
            dk, dv, None, base, row, first_key, seq_q, causal_offset, scale_log2,
            FIRST=True, MASKED=True, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
        )  # fmt: skip
        for t in range(1, n_unmasked):
            dk, dv, ds = keys_step(
                k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty,
                dk, dv, ds, base + t, row, first_key, seq_q, causal_offset, scale_log2,
                FIRST=False, MASKED=False, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
            )  # fmt: skip
        if CAUSAL:
            for t in range(n_unmasked, n_blocks):
                dk, dv, ds = keys_step(
                    k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty,
                    dk, dv, ds, base + t, row - t * BLOCK_Q, first_key, seq_q, causal_offset,
                    scale_log2, FIRST=False, MASKED=True, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
                )  # fmt: skip
        last = (base + n_blocks - 1) % STAGES
        dk = warpgroup_mma(ds, q_s.index(last).reshape([BLOCK_Q, HEAD_DIM]), dk, is_async=False)
        mbarrier.arrive(q_empty.index(last), count=1)
    store_tile(
        dv_ptr, flag_ptr, dv, first_key, seq_k, head_dim, dv_row_stride, dv_col_stride,
        VECTOR, FLAGS,
    )  # fmt: skip
    store_tile(
        dk_ptr, flag_ptr, dk * scale, first_key, seq_k, head_dim, dk_row_stride, dk_col_stride,
        VECTOR, FLAGS,
    )  # fmt: skip


@gluon.jit
def probabilities_step(
    k, q_s, do_s, p_s, lse_s, q_full, q_empty, do_full, do_empty, p_full, p_empty,
    dv, p_prev, it, row, key_row, seq_q, causal_offset, scale_log2,
    FIRST: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """P^T of one query block, handed across; dv gains the previous block's P^T dO."""
    STAGES: gl.constexpr = q_s.type.shape[0]
    P_STAGES: gl.constexpr = p_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    stage = it % STAGES
    q = q_s.index(stage).reshape([BLOCK_Q, HEAD_DIM])
    zero = gl.full([64, BLOCK_Q], 0.0, gl.float32, S_LAYOUT)

    mbarrier.wait(q_full.index(stage), (it // STAGES) & 1)
    s_async = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = lse_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))  # [BLOCK_Q]
    if FIRST:
        s = warpgroup_mma_wait(0, deps=(s_async,))
    else:
        prev = (it - 1) % STAGES
        mbarrier.wait(do_full.index(prev), ((it - 1) // STAGES) & 1)
        do_prev = do_s.index(prev).reshape([BLOCK_Q, HEAD_DIM])
        dv_async = warpgroup_mma(p_prev, do_prev, dv, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s_async,))  # [64, BLOCK_Q], keys as rows
    mbarrier.arrive(q_empty.index(stage), count=1)
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        visible = visible_pairs(row, key_row, seq_q, causal_offset, S_LAYOUT, BLOCK_Q, CAUSAL)
        p = gl.where(visible, p, 0.0)
    if not FIRST:
        dv = warpgroup_mma_wait(0, deps=(dv_async,))
        mbarrier.arrive(do_empty.index(prev), count=1)
    p = p.to(q_s.dtype)
    p_stage = it % P_STAGES
    mbarrier.wait(p_empty.index(p_stage), ((it // P_STAGES) & 1) ^ 1)
    p_s.index(p_stage).store(p)
    mbarrier.arrive(p_full.index(p_stage), count=1)
    return dv, gl.convert_layout(p, A_LAYOUT)


@gluon.jit
def probabilities_consumer(
    dv_ptr, flag_ptr,
    q_s, k_s, do_s, p_s, lse_s, kv_full, q_full, q_empty, do_full, do_empty, p_full, p_empty,
    group, key_row, seq_q, seq_k, n_blocks, n_unmasked, n_q_blocks, causal_offset,
    dv_row_stride, dv_col_stride, head_dim, scale_log2,
    CAUSAL: gl.constexpr, VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns P^T and dv of all keys of the tile."""
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dv = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
    mbarrier.wait(kv_full.index(0), 0)
    k = k_s.index(0).reshape([64, HEAD_DIM])
    for g in range(group):
        base = g * n_blocks
        row = (n_q_blocks - 1) * BLOCK_Q
        dv, p = probabilities_step(
            k, q_s, do_s, p_s, lse_s, q_full, q_empty, do_full, do_empty, p_full, p_empty,
            dv, None, base, row, key_row, seq_q, causal_offset, scale_log2,
            FIRST=True, MASKED=True, CAUSAL=CAUSAL,
        )  # fmt: skip
        for t in range(1, n_unmasked):
            dv, p = probabilities_step(
                k, q_s, do_s, p_s, lse_s, q_full, q_empty, do_full, do_empty, p_full, p_empty,
                dv, p, base + t, row, key_row, seq_q, causal_offset, scale_log2,
                FIRST=False, MASKED=False, CAUSAL=CAUSAL,
            )  # fmt: skip
        if CAUSAL:
            for t in range(n_unmasked, n_blocks):
                dv, p = probabilities_step(
                    k, q_s, do_s, p_s, lse_s, q_full, q_empty, do_full, do_empty, p_full, p_empty,
                    dv, p, base + t, row - t * BLOCK_Q, key_row, seq_q, causal_offset, scale_log2,
                    FIRST=False, MASKED=True, CAUSAL=CAUSAL,
                )  # fmt: skip
        last = (base + n_blocks - 1) % STAGES
        mbarrier.wait(do_full.index(last), ((base + n_blocks - 1) // STAGES) & 1)
        dv = warpgroup_mma(p, do_s.index(last).reshape([BLOCK_Q, HEAD_DIM]), dv, is_async=False)
        mbarrier.arrive(do_empty.index(last), count=1)
    store_tile(
        dv_ptr, flag_ptr, dv, key_row, seq_k, head_dim, dv_row_stride, dv_col_stride,
        VECTOR, FLAGS,
    )  # fmt: skip


@gluon.jit
def score_gradients_step(
    v, q_s, do_s, p_s, delta_s, q_full, q_empty, do_full, do_empty, p_full, p_empty,
    dk, ds_prev, it, FIRST: gl.constexpr,
):  # fmt: skip
    """dS^T of one query block from the P^T handed across; dk gains the previous block's dS^T Q.

    P^T is zero at hidden pairs, which is why no mask is needed here.
    """
    STAGES: gl.constexpr = q_s.type.shape[0]
    P_STAGES: gl.constexpr = p_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    stage = it % STAGES
    do = do_s.index(stage).reshape([BLOCK_Q, HEAD_DIM])
    zero = gl.full([64, BLOCK_Q], 0.0, gl.float32, S_LAYOUT)

    mbarrier.wait(do_full.index(stage), (it // STAGES) & 1)
    dp_async = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    delta = delta_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))  # [BLOCK_Q]
    if FIRST:
        dp = warpgroup_mma_wait(0, deps=(dp_async,))
    else:
        prev = (it - 1) % STAGES
        mbarrier.wait(q_full.index(prev), ((it - 1) // STAGES) & 1)
        q_prev = q_s.index(prev).reshape([BLOCK_Q, HEAD_DIM])
        dk_async = warpgroup_mma(ds_prev, q_prev, dk, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp_async,))  # [64, BLOCK_Q], keys as rows
    mbarrier.arrive(do_empty.index(stage), count=1)
    p_stage = it % P_STAGES
    mbarrier.wait(p_full.index(p_stage), (it // P_STAGES) & 1)
    p = p_s.index(p_stage).load(S_LAYOUT)
    mbarrier.arrive(p_empty.index(p_stage), count=1)
    ds = p.to(gl.float32) * (dp - delta[None, :])
    if not FIRST:
        dk = warpgroup_mma_wait(0, deps=(dk_async,))
        mbarrier.arrive(q_empty.index(prev), count=1)
    return dk, gl.convert_layout(ds.to(q_s.dtype), A_LAYOUT)


@gluon.jit
def score_gradients_consumer(
    dk_ptr, flag_ptr,
    q_s, v_s, do_s, p_s, delta_s, kv_full, q_full, q_empty, do_full, do_empty, p_full, p_empty,
    group, key_row, seq_k, n_blocks, dk_row_stride, dk_col_stride, head_dim, scale,
    VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns dS^T and dk of all keys of the tile."""
    STAGES: gl.constexpr = q_s.type.shape[0]
    BLOCK_Q: gl.constexpr = q_s.type.shape[3]
    HEAD_DIM: gl.constexpr = q_s.type.shape[4]
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dk = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
    mbarrier.wait(kv_full.index(1), 0)
    v = v_s.index(0).reshape([64, HEAD_DIM])
    for g in range(group):
        base = g * n_blocks
        dk, ds = score_gradients_step(
            v, q_s, do_s, p_s, delta_s, q_full, q_empty, do_full, do_empty, p_full, p_empty,
            dk, None, base, FIRST=True,
        )  # fmt: skip
        for t in range(1, n_blocks):
            dk, ds = score_gradients_step(
                v, q_s, do_s, p_s, delta_s, q_full, q_empty, do_full, do_empty, p_full, p_empty,
                dk, ds, base + t, FIRST=False,
            )  # fmt: skip
        last = (base + n_blocks - 1) % STAGES
        mbarrier.wait(q_full.index(last), ((base + n_blocks - 1) // STAGES) & 1)
        dk = warpgroup_mma(ds, q_s.index(last).reshape([BLOCK_Q, HEAD_DIM]), dk, is_async=False)
        mbarrier.arrive(q_empty.index(last), count=1)
    store_tile(
        dk_ptr, flag_ptr, dk * scale, key_row, seq_k, head_dim, dk_row_stride, dk_col_stride,
        VECTOR, FLAGS,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "heads_q", "heads_k", "group", "head_dim", "n_heads", "heads_at_once",
        "causal_offset", "scale", "scale_log2",
        "dk_batch_stride", "dk_head_stride", "dk_row_stride", "dk_col_stride",
        "dv_batch_stride", "dv_head_stride", "dv_row_stride", "dv_col_stride",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "flag_ptr"],
)  # fmt: skip
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, flag_ptr,
    seq_q: gl.int32, seq_k: gl.int32, heads_q: gl.int32, heads_k: gl.int32, group: gl.int32,
    head_dim: gl.int32, n_heads: gl.int32, heads_at_once: gl.int32, causal_offset: gl.int32,
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

    n_k_blocks = gl.cdiv(seq_k, BLOCK_K)
    n_q_blocks = gl.cdiv(seq_q, BLOCK_Q)
    # Under a causal mask the first keys are seen by most queries: tile 0 has the most work.
    tile, head = tile_and_head(n_k_blocks, n_heads, heads_at_once)
    batch = head // heads_k
    kv_head = head - batch * heads_k
    key_row = tile * BLOCK_K
    n_blocks = n_q_blocks
    n_unmasked = n_q_blocks
    if CAUSAL:
        first = gl.maximum(key_row - causal_offset, 0) // BLOCK_Q
        first_whole = gl.cdiv(gl.maximum(key_row + (BLOCK_K - 1) - causal_offset, 0), BLOCK_Q)
        # A tile that no query sees still runs one block, all masked, which writes its zeros.
        n_blocks = n_q_blocks - gl.minimum(first, n_q_blocks - 1)
        n_unmasked = gl.minimum(gl.maximum(n_q_blocks - first_whole, 1), n_blocks)

    rows = (batch.to(gl.int64) * heads_q + kv_head * group) * seq_q
    lse_ptr += rows
    delta_ptr += rows
    dk_ptr += (batch * dk_batch_stride + kv_head * dk_head_stride) * VECTOR
    dv_ptr += (batch * dv_batch_stride + kv_head * dv_head_stride) * VECTOR
    if FLAGS:
        flag_ptr += head.to(gl.int64) * n_k_blocks + tile

    k_s = gl.allocate_shared_memory(dtype, [PANELS, 1, 1, 64, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [PANELS, 1, 1, 64, HEAD_DIM], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, HEAD_DIM], do_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], FLAT)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], FLAT)
    # Barriers come in pairs: 16 bytes leave no gap, and the planner can count.
    kv_full = gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES + STAGES % 2, 1], BARRIER)
    for i in gl.static_range(2 * PANELS):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        # TMA's arrival and that of the row statistics, which the producer stores itself.
        mbarrier.init(q_full.index(i), count=2)
        mbarrier.init(do_full.index(i), count=2)
        mbarrier.init(q_empty.index(i), count=WARPGROUPS)
        mbarrier.init(do_empty.index(i), count=WARPGROUPS)

    if SPLIT_KEYS:
        fence_async_shared()
        if WARPGROUPS == 2:
            gl.warp_specialize([
                (keys_consumer, (
                    0, dk_ptr, dv_ptr, flag_ptr, q_s, k_s, v_s, do_s, lse_s, delta_s,
                    kv_full, q_full, q_empty, do_full, do_empty, group, key_row, seq_q, seq_k,
                    n_blocks, n_unmasked, n_q_blocks, causal_offset, dk_row_stride, dk_col_stride,
                    dv_row_stride, dv_col_stride, head_dim, scale, scale_log2, EARLY_DP,
                    K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (keys_consumer, (
                    1, dk_ptr, dv_ptr, flag_ptr, q_s, k_s, v_s, do_s, lse_s, delta_s,
                    kv_full, q_full, q_empty, do_full, do_empty, group, key_row, seq_q, seq_k,
                    n_blocks, n_unmasked, n_q_blocks, causal_offset, dk_row_stride, dk_col_stride,
                    dv_row_stride, dv_col_stride, head_dim, scale, scale_log2, EARLY_DP,
                    K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (dkdv_producer, (
                    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, q_s, k_s, v_s, do_s, lse_s,
                    delta_s, kv_full, q_full, q_empty, do_full, do_empty, batch, kv_head, group,
                    key_row, seq_q, n_blocks, n_q_blocks)),
            ], [4, 1], [240, 24])  # fmt: skip
        else:
            gl.warp_specialize([
                (keys_consumer, (
                    0, dk_ptr, dv_ptr, flag_ptr, q_s, k_s, v_s, do_s, lse_s, delta_s,
                    kv_full, q_full, q_empty, do_full, do_empty, group, key_row, seq_q, seq_k,
                    n_blocks, n_unmasked, n_q_blocks, causal_offset, dk_row_stride, dk_col_stride,
                    dv_row_stride, dv_col_stride, head_dim, scale, scale_log2, EARLY_DP,
                    K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (keys_consumer, (
                    1, dk_ptr, dv_ptr, flag_ptr, q_s, k_s, v_s, do_s, lse_s, delta_s,
                    kv_full, q_full, q_empty, do_full, do_empty, group, key_row, seq_q, seq_k,
                    n_blocks, n_unmasked, n_q_blocks, causal_offset, dk_row_stride, dk_col_stride,
                    dv_row_stride, dv_col_stride, head_dim, scale, scale_log2, EARLY_DP,
                    K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (keys_consumer, (
                    2, dk_ptr, dv_ptr, flag_ptr, q_s, k_s, v_s, do_s, lse_s, delta_s,
                    kv_full, q_full, q_empty, do_full, do_empty, group, key_row, seq_q, seq_k,
                    n_blocks, n_unmasked, n_q_blocks, causal_offset, dk_row_stride, dk_col_stride,
                    dv_row_stride, dv_col_stride, head_dim, scale, scale_log2, EARLY_DP,
                    K_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
                (dkdv_producer, (
                    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, q_s, k_s, v_s, do_s, lse_s,
                    delta_s, kv_full, q_full, q_empty, do_full, do_empty, batch, kv_head, group,
                    key_row, seq_q, n_blocks, n_q_blocks)),
            ], [4, 4, 1], [160, 160, 32])  # fmt: skip
    else:
        P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
        p_s = gl.allocate_shared_memory(dtype, [P_STAGES, BLOCK_K, BLOCK_Q], P_LAYOUT)
        p_full = gl.allocate_shared_memory(gl.int64, [P_STAGES + P_STAGES % 2, 1], BARRIER)
        p_empty = gl.allocate_shared_memory(gl.int64, [P_STAGES + P_STAGES % 2, 1], BARRIER)
        for i in gl.static_range(P_STAGES):
            mbarrier.init(p_full.index(i), count=1)
            mbarrier.init(p_empty.index(i), count=1)
        fence_async_shared()
        gl.warp_specialize([
            (probabilities_consumer, (
                dv_ptr, flag_ptr, q_s, k_s, do_s, p_s, lse_s,
                kv_full, q_full, q_empty, do_full, do_empty, p_full, p_empty,
                group, key_row, seq_q, seq_k, n_blocks, n_unmasked, n_q_blocks, causal_offset,
                dv_row_stride, dv_col_stride, head_dim, scale_log2, CAUSAL, VECTOR, FLAGS)),
            (score_gradients_consumer, (
                dk_ptr, flag_ptr, q_s, v_s, do_s, p_s, delta_s,
                kv_full, q_full, q_empty, do_full, do_empty, p_full, p_empty,
                group, key_row, seq_k, n_blocks, dk_row_stride, dk_col_stride, head_dim, scale,
                VECTOR, FLAGS)),
            (dkdv_producer, (
                q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, q_s, k_s, v_s, do_s, lse_s,
                    delta_s, kv_full, q_full, q_empty, do_full, do_empty, batch, kv_head, group,
                    key_row, seq_q, n_blocks, n_q_blocks)),
        ], [4, 1], [240, 24])  # fmt: skip
