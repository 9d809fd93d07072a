"""dq on Hopper: a tile of query rows of one head is one program's, which writes it alone.

The rule kept here: each warpgroup owns 64 query rows and all three products for them; key blocks
arrive through TMA in one fixed order, from the last visible one down, so that only the blocks that
the diagonal or the end of the keys cuts, which come first, are masked.
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
    load_box,
    load_rows,
    place,
    store_tile,
    turns,
)


@gluon.jit
def query_tile(
    turn, seq_q, seq_k, heads_q, n_heads, causal_offset,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile, head of all, its batch, and how many key blocks the tile sees and masks."""
    n_q_blocks = gl.cdiv(seq_q, BLOCK_Q)
    tile, head = place(turn, n_q_blocks, n_heads, CAUSAL)
    if CAUSAL:
        # The last queries see the most keys: longest work first.
        tile = n_q_blocks - 1 - tile
    n_blocks = gl.cdiv(seq_k, BLOCK_K)
    n_masked = gl.minimum(n_blocks, 1)
    if CAUSAL:
        query_row = tile * BLOCK_Q
        seen = gl.minimum(gl.maximum(query_row + BLOCK_Q + causal_offset, 0), seq_k)
        seen_by_all = gl.minimum(gl.maximum(query_row + 1 + causal_offset, 0), seq_k)
        # A tile that sees no key still runs one block, all masked, which writes its zeros.
        n_blocks = gl.maximum(gl.cdiv(seen, BLOCK_K), 1)
        n_masked = gl.maximum(n_blocks - seen_by_all // BLOCK_K, 1)
    return tile, head, head // heads_q, n_blocks, n_masked


@gluon.jit
def dq_producer(descriptors, buffers, barriers, sizes, group, CAUSAL: gl.constexpr):
    """The warp that loads."""
    q_desc, k_desc, v_desc, do_desc = descriptors
    q_s, k_s, v_s, do_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    seq_q, seq_k, heads_q, n_heads, causal_offset = sizes
    K_STAGES: gl.constexpr = k_s.type.shape[0]
    V_STAGES: gl.constexpr = v_s.type.shape[0]
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[2]
    PANELS: gl.constexpr = q_s.type.shape[0]
    it = 0
    for turn in range(turns(gl.cdiv(seq_q, 64 * PANELS), n_heads, CAUSAL)):
        tile, every_head, batch, n_blocks, _ = query_tile(
            turn, seq_q, seq_k, heads_q, n_heads, causal_offset,
            64 * PANELS, BLOCK_K, CAUSAL,
        )  # fmt: skip
        head = every_head - batch * heads_q
        kv_head = head // group
        for i in gl.static_range(PANELS):
            row = (tile * PANELS + i) * 64
            mbarrier.wait(q_empty.index(i), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
            load_box(q_desc, [batch, head, row, 0], q_full.index(i), q_s.index(i))
            load_box(do_desc, [batch, head, row, 0], q_full.index(i), do_s.index(i))
        for block in range(n_blocks):
            row = (n_blocks - 1 - block) * BLOCK_K
            k_stage = it % K_STAGES
            mbarrier.wait(k_empty.index(k_stage), ((it // K_STAGES) & 1) ^ 1)
            load_rows(k_desc, batch, kv_head, row, k_full.index(k_stage), k_s.index(k_stage))
            v_stage = it % V_STAGES
            mbarrier.wait(v_empty.index(v_stage), ((it // V_STAGES) & 1) ^ 1)
            load_rows(v_desc, batch, kv_head, row, v_full.index(v_stage), v_s.index(v_stage))
            it += 1


@gluon.jit
def dq_step(
    q, do, lse, delta, ring, dq, ds_prev, it, query_row, key_row, seq_k, causal_offset, scale_log2,
    FIRST: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, EARLY_DP: gl.constexpr,
):  # fmt: skip
    """dS of one key block; dq gains the previous block's dS K.

    EARLY_DP puts dP in flight together with S, which hides it behind the exponentials at the
    price of its registers. Where there are stages for two blocks of keys alone, the previous
    block's product goes first: the next block's load waits for its stage.
    """
    k_s, v_s, k_full, k_empty, v_full, v_empty = ring
    K_STAGES: gl.constexpr = k_s.type.shape[0]
    OWED_FIRST: gl.constexpr = K_STAGES == 2
    V_STAGES: gl.constexpr = v_s.type.shape[0]
    BLOCK_K: gl.constexpr = k_s.type.shape[3]
    HEAD_DIM: gl.constexpr = k_s.type.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    dtype: gl.constexpr = k_s.dtype
    k_stage = it % K_STAGES
    v_stage = it % V_STAGES
    v_phase = (it // V_STAGES) & 1
    k = k_s.index(k_stage).reshape([BLOCK_K, HEAD_DIM])
    v = v_s.index(v_stage).reshape([BLOCK_K, HEAD_DIM])
    zero = gl.full([64, BLOCK_K], 0.0, gl.float32, S_LAYOUT)

    if not FIRST:
        prev = (it - 1) % K_STAGES
        k_prev = k_s.index(prev).reshape([BLOCK_K, HEAD_DIM])
        if OWED_FIRST:
            dq_async = warpgroup_mma(ds_prev, k_prev, dq, is_async=True)
    mbarrier.wait(k_full.index(k_stage), (it // K_STAGES) & 1)
    s_async = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not FIRST and not OWED_FIRST:
        dq_async = warpgroup_mma(ds_prev, k_prev, dq, is_async=True)
    if EARLY_DP:
        mbarrier.wait(v_full.index(v_stage), v_phase)
        dp_async = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not FIRST and OWED_FIRST:
        dq = warpgroup_mma_wait(1 + EARLY_DP, deps=(dq_async,))
        mbarrier.arrive(k_empty.index(prev), count=1)
    IN_FLIGHT: gl.constexpr = (0 if FIRST or OWED_FIRST else 1) + EARLY_DP
    s = warpgroup_mma_wait(IN_FLIGHT, deps=(s_async,))  # [64, BLOCK_K], queries as rows
    p = gl.exp2(s * scale_log2 - lse[:, None])
    if MASKED:
        keys = key_row + gl.arange(0, BLOCK_K, gl.SliceLayout(0, S_LAYOUT))
        last_key = gl.full([64], seq_k - 1, gl.int32, gl.SliceLayout(1, S_LAYOUT))
        if CAUSAL:
            queries = query_row + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
            last_key = gl.minimum(last_key, queries + causal_offset)
        visible = keys[None, :] <= last_key[:, None]
        p = gl.where(visible, p, 0.0)
    if not FIRST and not OWED_FIRST:
        dq = warpgroup_mma_wait(EARLY_DP, deps=(dq_async,))
        mbarrier.arrive(k_empty.index(prev), count=1)
    if not EARLY_DP:
        mbarrier.wait(v_full.index(v_stage), v_phase)
        dp_async = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=(dp_async,))  # [64, BLOCK_K]
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    ds = p * (dp - delta[:, None])
    return dq, gl.convert_layout(ds.to(dtype), A_LAYOUT)


@gluon.jit
def dq_consumer(
    panel: gl.constexpr, buffers, barriers, sizes, statistics, out, flag_ptr, head_dim,
    scale, scale_log2,
    EARLY_DP: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr,
    VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns the 64 query rows of `panel` of each tile."""
    q_s, k_s, v_s, do_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    seq_q, seq_k, heads_q, n_heads, causal_offset = sizes
    lse_ptr, delta_ptr = statistics
    ring = (k_s, v_s, k_full, k_empty, v_full, v_empty)
    K_STAGES: gl.constexpr = k_s.type.shape[0]
    BLOCK_K: gl.constexpr = k_s.type.shape[3]
    HEAD_DIM: gl.constexpr = k_s.type.shape[4]
    BLOCK_Q: gl.constexpr = 64 * q_s.type.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    done = 0
    for turn in range(turns(gl.cdiv(seq_q, BLOCK_Q), n_heads, CAUSAL)):
        tile, head, batch, n_blocks, n_masked = query_tile(
            turn, seq_q, seq_k, heads_q, n_heads, causal_offset,
            BLOCK_Q, BLOCK_K, CAUSAL,
        )  # fmt: skip
        first_row = tile * BLOCK_Q + 64 * panel
        rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        inside = rows < seq_q
        before = head.to(gl.int64) * seq_q
        lse = gl.load(lse_ptr + before + rows, mask=inside, other=float("inf"))
        delta = gl.load(delta_ptr + before + rows, mask=inside, other=0.0)
        # A row without keys has LSE -inf and no probabilities: exp2(x - inf) is zero.
        empty = lse == -float("inf")
        lse = gl.where(empty, float("inf"), lse * LOG2_E)
        delta = gl.where(empty, 0.0, delta)
        dq = gl.full([64, HEAD_DIM], 0.0, gl.float32, OUT_LAYOUT)
        mbarrier.wait(q_full.index(panel), turn & 1)
        q = q_s.index(panel).reshape([64, HEAD_DIM])
        do = do_s.index(panel).reshape([64, HEAD_DIM])
        if Q_IN_REGISTERS:
            q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            do = do.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        key_row = (n_blocks - 1) * BLOCK_K
        dq, ds = dq_step(
            q, do, lse, delta, ring, dq, None, done, first_row, key_row, seq_k,
            causal_offset, scale_log2,
            FIRST=True, MASKED=True, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
        )  # fmt: skip
        if Q_IN_REGISTERS:
            # Not behind the loads themselves: an arrival does not wait for their registers, and
            # the next tile's rows would overwrite some on their way. Both products have read them.
            mbarrier.arrive(q_empty.index(panel), count=1)
        if CAUSAL:
            for it in range(1, n_masked):
                dq, ds = dq_step(
                    q, do, lse, delta, ring, dq, ds, done + it, first_row, key_row - it * BLOCK_K,
                    seq_k, causal_offset, scale_log2,
                    FIRST=False, MASKED=True, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
                )  # fmt: skip
        for it in range(n_masked, n_blocks):
            dq, ds = dq_step(
                q, do, lse, delta, ring, dq, ds, done + it, first_row, key_row, seq_k,
                causal_offset, scale_log2,
                FIRST=False, MASKED=False, CAUSAL=CAUSAL, EARLY_DP=EARLY_DP,
            )  # fmt: skip
        if not Q_IN_REGISTERS:
            mbarrier.arrive(q_empty.index(panel), count=1)
        done += n_blocks
        last = (done - 1) % K_STAGES
        dq = warpgroup_mma(ds, k_s.index(last).reshape([BLOCK_K, HEAD_DIM]), dq, is_async=False)
        mbarrier.arrive(k_empty.index(last), count=1)
        flags = flag_ptr
        if FLAGS:
            flags += head.to(gl.int64) * gl.cdiv(seq_q, BLOCK_Q) + tile
        store_tile(
            out, flags, dq * scale, batch, head - batch * heads_q, first_row, seq_q, head_dim,
            VECTOR, FLAGS,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "heads_q", "group", "head_dim", "n_heads",
        "causal_offset", "scale", "scale_log2",
        "batch_stride", "head_stride", "row_stride", "col_stride",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "flag_ptr"],
)  # fmt: skip
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dq_ptr, flag_ptr,
    seq_q: gl.int32, seq_k: gl.int32, heads_q: gl.int32, group: gl.int32, head_dim: gl.int32,
    n_heads: gl.int32, causal_offset: gl.int32,
    scale: gl.float32, scale_log2: gl.float32,
    batch_stride: gl.int64, head_stride: gl.int64, row_stride: gl.int64, col_stride: gl.int64,
    WARPGROUPS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    EARLY_DP: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr,
    VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """dq of one query tile; `VECTOR` > 1: columns are adjacent, and `head_dim` and
    the other strides of the outputs count that many elements.

    `flag_ptr`: int32 (B * Hq, number of query tiles).
    """
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()

    q_s = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, 64, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, 64, HEAD_DIM], do_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [K_STAGES, 1, 1, BLOCK_K, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_K, HEAD_DIM], v_desc.layout)
    # Barriers come in pairs: 16 bytes leave no gap, and the planner can count.
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS + WARPGROUPS % 2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [WARPGROUPS + WARPGROUPS % 2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES + K_STAGES % 2, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES + K_STAGES % 2, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES + V_STAGES % 2, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES + V_STAGES % 2, 1], BARRIER)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARPGROUPS)
    fence_async_shared()

    # Tuples in variables hold values alone: a compile-time flag in one would become a value, so
    # that those, and a pointer that may be None, stand inline below.
    descriptors = (q_desc, k_desc, v_desc, do_desc)
    buffers = (q_s, k_s, v_s, do_s)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (seq_q, seq_k, heads_q, n_heads, causal_offset)
    statistics = (lse_ptr, delta_ptr)
    out = (dq_ptr, batch_stride, head_stride, row_stride, col_stride)
    # fmt: off
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (dq_consumer, (
                0, buffers, barriers, sizes, statistics, out, flag_ptr, head_dim,
                scale, scale_log2, EARLY_DP, Q_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
            (dq_consumer, (
                1, buffers, barriers, sizes, statistics, out, flag_ptr, head_dim,
                scale, scale_log2, EARLY_DP, Q_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
            (dq_producer, (descriptors, buffers, barriers, sizes, group, CAUSAL)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (dq_consumer, (
                0, buffers, barriers, sizes, statistics, out, flag_ptr, head_dim,
                scale, scale_log2, EARLY_DP, Q_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
            (dq_consumer, (
                1, buffers, barriers, sizes, statistics, out, flag_ptr, head_dim,
                scale, scale_log2, EARLY_DP, Q_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
            (dq_consumer, (
                2, buffers, barriers, sizes, statistics, out, flag_ptr, head_dim,
                scale, scale_log2, EARLY_DP, Q_IN_REGISTERS, CAUSAL, VECTOR, FLAGS)),
            (dq_producer, (descriptors, buffers, barriers, sizes, group, CAUSAL)),
        ], [4, 4, 1], [160, 160, 32])
    # fmt: on
