"""The partitions of the Hopper forward kernel: the warp that loads, the warpgroups that attend.

The rule kept here: every partition walks the same tiles in the same order and counts the same
blocks, so that the rings between them need no message but the barriers' phases. A block of keys
is released by every consumer once per use, also where a consumer has no work in it.

Sources: Shah et al., FlashAttention-3 (2024), sections 3.1 and 3.2; Dao, FlashAttention-2 (2023),
section 3.1 (normalising once, at the end).
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portattn.backends.triton_jit.hopper_parts import load_box, per_tile, rows_with_nan, store_rows

WARPGROUP_ROWS = gl.constexpr(64)  # the M of one wgmma
LN2 = gl.constexpr(math.log(2.0))
# A name that changed after Triton 3.6.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _place(tile, row_tiles, heads_total, head_group):
    """Row tile and (batch, head) of a tile: longest rows first inside each group of heads."""
    group = tile // (head_group * row_tiles)
    within = tile - group * (head_group * row_tiles)
    members = gl.minimum(head_group, heads_total - group * head_group)
    step = within // members
    return row_tiles - 1 - step, group * head_group + (within - step * members)


@gluon.jit
def _block_count(
    first_row, last_row, seq_q, seq_k, causal_offset, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr
):
    """Blocks of keys that rows first_row..last_row need: at least one.

    Rows that see no key take one fully hidden block, which leaves them with a sum of zero.
    """
    visible = seq_k
    if CAUSAL:
        last = gl.minimum(last_row, seq_q - 1)
        visible = gl.minimum(gl.maximum(last + causal_offset + 1, 0), seq_k)
    if_rows = gl.where(first_row < seq_q, visible, 0)
    return gl.maximum((if_rows + (BLOCK_K - 1)) // BLOCK_K, 1)


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc, buffers, barriers, sizes, heads_per_kv, CAUSAL: gl.constexpr
):
    """The producer warp."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    n_tiles, row_tiles, head_group, heads_total, heads_q, seq_q, seq_k, causal_offset = sizes
    NUM_CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_Q: gl.constexpr = NUM_CONSUMERS * WARPGROUP_ROWS
    BLOCK_K: gl.constexpr = k_smem.shape[3]
    slot = 0
    phase = 1  # a fresh "empty" barrier lets the first round pass
    q_phase = 1
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        row_tile, batch_head = _place(tile, row_tiles, heads_total, head_group)
        batch = batch_head // heads_q
        head = batch_head - batch * heads_q
        head_k = head // heads_per_kv
        first_row = row_tile * BLOCK_Q
        n_blocks = _block_count(
            first_row, first_row + (BLOCK_Q - 1), seq_q, seq_k, causal_offset, BLOCK_K, CAUSAL
        )

        # The first block of keys goes between the query loads: warpgroup 0 can start on it.
        first_key = (n_blocks - 1) * BLOCK_K
        mbarrier.wait(q_empty.index(0), q_phase)
        mbarrier.expect(q_full.index(0), q_desc.block_type.nbytes)
        load_box(q_desc, [batch, head, first_row, 0], q_full.index(0), q_smem.index(0))
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        load_box(k_desc, [batch, head_k, first_key, 0], k_full.index(slot), k_smem.index(slot))
        for i in gl.static_range(1, NUM_CONSUMERS):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q_desc.block_type.nbytes)
            load_box(
                q_desc,
                [batch, head, first_row + i * WARPGROUP_ROWS, 0],
                q_full.index(i),
                q_smem.index(i),
            )
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        load_box(v_desc, [batch, head_k, first_key, 0], v_full.index(slot), v_smem.index(slot))
        slot, phase = _advance(slot, phase, STAGES)

        for _ in range(1, n_blocks):
            first_key -= BLOCK_K
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            load_box(k_desc, [batch, head_k, first_key, 0], k_full.index(slot), k_smem.index(slot))
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            load_box(v_desc, [batch, head_k, first_key, 0], v_full.index(slot), v_smem.index(slot))
            slot, phase = _advance(slot, phase, STAGES)
        q_phase ^= 1


@gluon.jit
def _softmax_block(
    scores, row_max, row_sum, scale_log2, NEGATIVE_SCALE: gl.constexpr, SOME_HIDDEN: gl.constexpr
):
    """One online-softmax step in base 2, on unscaled scores [64, BLOCK_K]: weights, the new maxima
    and sums, and what the earlier output shrinks by."""
    if NEGATIVE_SCALE:
        block_max = gl.min(scores, 1) * scale_log2  # [64]
    else:
        block_max = gl.max(scores, 1) * scale_log2  # [64]
    new_max = gl.maximum(row_max, block_max)
    shift = new_max
    if SOME_HIDDEN:
        # A row that has seen no key yet: -inf - -inf would be NaN. Whole blocks show each row one.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    rescale = gl.exp2(row_max - shift)
    row_sum = row_sum * rescale + gl.sum(weights, 1)
    return weights, new_max, row_sum, rescale


@gluon.jit
def _cut_blocks(
    q, ring, state, blocks, full_blocks, count, scale_log2, last_key,
    CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
):  # fmt: skip
    """The last ``count`` of ``blocks``, the only ones that the diagonal or the end of the keys may
    cut; ``full_blocks`` are whole. One after another: they are one or two, and the first has no
    product to overlap with.

    ``last_key`` is the last visible key: per row [64] where causal, else a scalar. ``state`` leaves
    as `_whole_blocks` takes it.
    """
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    acc, row_max, row_sum, slot, phase = state
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_K: gl.constexpr = k_smem.shape[3]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    acc_layout: gl.constexpr = acc.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    # What times the scale gives -inf: hidden keys keep their place in the one fused multiply-add.
    HIDDEN: gl.constexpr = float("inf") if NEGATIVE_SCALE else float("-inf")
    zeros = gl.full([WARPGROUP_ROWS, BLOCK_K], 0.0, gl.float32, scores_layout)
    weights = gl.full([WARPGROUP_ROWS, BLOCK_K], 0.0, k_smem.dtype, operand)
    # Not the slot's own value: a name that shares it would not count as carried by the loop.
    v_slot = 0
    v_phase = 0
    for i in range(count):
        mbarrier.wait(k_full.index(slot), phase)
        k = k_smem.index(slot).reshape([BLOCK_K, HEAD_DIM])
        scores_token = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores_token,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        block = blocks - 1 - i
        if block >= full_blocks:
            cols = gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores_layout))
            last = last_key - block * BLOCK_K
            if CAUSAL:
                visible = cols[None, :] <= last[:, None]  # [64, BLOCK_K]
            else:
                visible = (cols <= last)[None, :]  # [1, BLOCK_K]
            scores = gl.where(visible, scores, HIDDEN)
        p, row_max, row_sum, rescale = _softmax_block(
            scores, row_max, row_sum, scale_log2, NEGATIVE_SCALE, True
        )
        if i > 0:
            mbarrier.wait(v_full.index(v_slot), v_phase)
            v = v_smem.index(v_slot).reshape([BLOCK_K, HEAD_DIM])
            acc = warpgroup_mma(weights, v, acc, is_async=False)
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        weights = gl.convert_layout(p.to(k_smem.dtype), operand)
        v_slot = slot
        v_phase = phase
        slot, phase = _advance(slot, phase, STAGES)
    return weights, acc, row_max, row_sum, slot, phase, v_slot, v_phase


@gluon.jit
def _whole_blocks(q, ring, state, count, scale_log2, NEGATIVE_SCALE: gl.constexpr):
    """The next ``count`` blocks: the scores of each while the block before it meets its values.

    ``weights`` enters and leaves as the 16-bit left operand of the product that is still owed, with
    the values of ``v_slot``.
    """
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    weights, acc, row_max, row_sum, slot, phase, v_slot, v_phase = state
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_K: gl.constexpr = k_smem.shape[3]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    acc_layout: gl.constexpr = acc.type.layout
    zeros = gl.full([WARPGROUP_ROWS, BLOCK_K], 0.0, gl.float32, scores_layout)
    for _ in range(count):
        mbarrier.wait(k_full.index(slot), phase)
        k = k_smem.index(slot).reshape([BLOCK_K, HEAD_DIM])
        scores_token = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        v = v_smem.index(v_slot).reshape([BLOCK_K, HEAD_DIM])
        acc_token = warpgroup_mma(weights, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores_token,))  # [64, BLOCK_K]
        mbarrier.arrive(k_empty.index(slot), count=1)
        p, row_max, row_sum, rescale = _softmax_block(
            scores, row_max, row_sum, scale_log2, NEGATIVE_SCALE, False
        )
        # The old weights are registers that the product still reads: they are replaced only now.
        acc = warpgroup_mma_wait(0, deps=(acc_token,))  # [64, HEAD_DIM]
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        weights = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, acc_layout, 2))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        v_slot = slot
        v_phase = phase
        slot, phase = _advance(slot, phase, STAGES)
    return weights, acc, row_max, row_sum, slot, phase, v_slot, v_phase


@gluon.jit
def attend_partition(
    WARPGROUP: gl.constexpr,
    buffers,
    barriers,
    sizes,
    results,
    scale_log2,
    CAUSAL: gl.constexpr,
    NEGATIVE_SCALE: gl.constexpr,
    WITH_LSE: gl.constexpr,
    WITH_FLAGS: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """One consumer warpgroup: 64 query rows of each tile."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    n_tiles, row_tiles, head_group, heads_total, heads_q, seq_q, seq_k, causal_offset = sizes
    NUM_CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_Q: gl.constexpr = NUM_CONSUMERS * WARPGROUP_ROWS
    BLOCK_K: gl.constexpr = k_smem.shape[3]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    dtype: gl.constexpr = k_smem.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    q = q_smem.index(WARPGROUP).reshape([WARPGROUP_ROWS, HEAD_DIM])
    ring = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    slot = 0
    phase = 0
    q_phase = 0
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        row_tile, batch_head = _place(tile, row_tiles, heads_total, head_group)
        tile_row = row_tile * BLOCK_Q
        first_row = tile_row + WARPGROUP * WARPGROUP_ROWS
        n_blocks = _block_count(
            tile_row, tile_row + (BLOCK_Q - 1), seq_q, seq_k, causal_offset, BLOCK_K, CAUSAL
        )
        own_blocks = _block_count(
            first_row,
            first_row + (WARPGROUP_ROWS - 1),
            seq_q,
            seq_k,
            causal_offset,
            BLOCK_K,
            CAUSAL,
        )
        if CAUSAL:
            first_count = gl.minimum(gl.maximum(first_row + causal_offset + 1, 0), seq_k)
            full_blocks = gl.minimum(first_count // BLOCK_K, own_blocks)
            rows = first_row + gl.arange(0, WARPGROUP_ROWS, rows_layout)
            last_key = gl.minimum(rows + per_tile(causal_offset), per_tile(seq_k) - 1)  # [64]
        else:
            full_blocks = gl.minimum(seq_k // BLOCK_K, own_blocks)
            last_key = seq_k - 1

        # Blocks that only the warpgroups below need. Waiting for each keeps this release in the
        # phase of its own use.
        for _ in range(own_blocks, n_blocks):
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.arrive(k_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(slot), phase)
            mbarrier.arrive(v_empty.index(slot), count=1)
            slot, phase = _advance(slot, phase, STAGES)

        acc = gl.full([WARPGROUP_ROWS, HEAD_DIM], 0.0, gl.float32, acc_layout)
        row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, rows_layout)
        row_sum = gl.full([WARPGROUP_ROWS], 0.0, gl.float32, rows_layout)
        cut = gl.maximum(own_blocks - full_blocks, 1)
        mbarrier.wait(q_full.index(WARPGROUP), q_phase)
        state = _cut_blocks(
            q, ring, (acc, row_max, row_sum, slot, phase), own_blocks, full_blocks, cut,
            scale_log2, last_key, CAUSAL, NEGATIVE_SCALE,
        )  # fmt: skip
        state = _whole_blocks(q, ring, state, own_blocks - cut, scale_log2, NEGATIVE_SCALE)
        weights, acc, row_max, row_sum, slot, phase, v_slot, v_phase = state
        mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
        q_phase ^= 1

        mbarrier.wait(v_full.index(v_slot), v_phase)
        v = v_smem.index(v_slot).reshape([BLOCK_K, HEAD_DIM])
        acc = warpgroup_mma(weights, v, acc, is_async=False)
        mbarrier.arrive(v_empty.index(v_slot), count=1)

        _store_rows(
            WARPGROUP, acc, row_max, row_sum, results, row_tile, row_tiles, batch_head, first_row,
            heads_q, seq_q, dtype, NUM_CONSUMERS, WITH_LSE, WITH_FLAGS, VECTOR,
        )  # fmt: skip


@gluon.jit
def _store_rows(
    WARPGROUP: gl.constexpr, acc, row_max, row_sum, results, row_tile, row_tiles, batch_head,
    first_row, heads_q, seq_q, dtype: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    WITH_LSE: gl.constexpr, WITH_FLAGS: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Normalise and store 64 rows, their lse and their part of the tile's flag."""
    out_ptr, lse_ptr, flags_ptr, out_strides, lse_strides, columns = results
    out_stride_b, out_stride_h, out_stride_s, out_stride_d = out_strides
    lse_stride_b, lse_stride_h, lse_stride_s = lse_strides
    acc_layout: gl.constexpr = acc.type.layout
    batch = batch_head // heads_q
    head = (batch_head - batch * heads_q).to(gl.int64)
    batch = batch.to(gl.int64)
    out_stride_s = per_tile(out_stride_s)
    lse_stride_s = per_tile(lse_stride_s)
    rows_left = seq_q - first_row  # rows of this warpgroup that exist: may be 0 or less

    # A row without a key has sum 0 and accumulator 0: any finite divisor keeps the zero.
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc_layout))[:, None]

    if WITH_FLAGS:
        # Columns beyond the head dim hold zeros, or NaN where the row's weights do, so that they
        # need no mask.
        wrong = rows_with_nan(acc, dtype)
        own_rows = gl.arange(0, WARPGROUP_ROWS, wrong.type.layout)
        # Each warpgroup owns one byte of the tile's word, so that none waits for another: it
        # clears the byte, and the rows that hold NaN or inf set it.
        entry = batch_head.to(gl.int64) * row_tiles + row_tile
        word = flags_ptr.to(gl.pointer_type(gl.int8)) + entry * 4
        gl.store(word + WARPGROUP, 0)
        _barrier()
        gl.store(
            word + WARPGROUP + own_rows * 0,
            wrong.to(gl.int8),
            mask=(wrong != 0) & (own_rows < rows_left),
        )
        if WARPGROUP == 0:
            for i in gl.static_range(NUM_CONSUMERS, 4):
                gl.store(word + i, 0)

    # Strides come in units of VECTOR elements: the compiler sees that they are multiples.
    base = (
        out_ptr
        + batch * (out_stride_b * VECTOR)
        + head * (out_stride_h * VECTOR)
        + first_row.to(gl.int64) * (out_stride_s * VECTOR)
    )
    store_rows(base, acc, rows_left, columns, out_stride_s, out_stride_d, VECTOR)

    if WITH_LSE:
        lse_rows = gl.arange(0, WARPGROUP_ROWS, row_max.type.layout)
        lse_base = (
            lse_ptr
            + batch * lse_stride_b
            + head * lse_stride_h
            + first_row.to(gl.int64) * lse_stride_s
        )
        lse = (row_max + gl.log2(row_sum)) * LN2
        gl.store(lse_base + lse_rows.to(gl.int64) * lse_stride_s, lse, mask=lse_rows < rows_left)
