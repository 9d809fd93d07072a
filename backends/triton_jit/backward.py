"""The portable mechanism, backward: a tile of scores recomputed and pulled back, and dq.

The rule kept here: no two programs write one element and no sum depends on who comes first, so
that gradients have the same bits in every run; scores are recomputed from the LSE, never stored.
dk and dv stand in `backward_keys`; dbias, dsinks and the rows' delta in `backward_sums`.

With P = exp(S - lse) and delta = rowsum(dout * out) - dlse: dS = P * (dout v^T - delta),
dv = P^T dout, dq = scale * dS k, dk = scale * dS^T q; a softcap multiplies dS by 1 - tanh^2, behind
the bias. (Dao et al., FlashAttention, 2022, appendix B.2.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from portattn.backends.triton_jit.scoring import (
    LOG2E,
    REPAIRED,
    key_range,
    key_rows,
    lengths,
    marked,
    natural_scores,
    visible_places,
    without_poison,
)


@triton.jit
def load_tile(
    base, rows, there, d, dim, stride_d,
    MASKED: tl.constexpr, EVEN: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The rows at the offsets ``rows`` from ``base``, [rows, d]; 0 where a row is not ``there``,
    which is asked under ``MASKED`` alone, and beyond ``dim``."""
    at = base + rows[:, None] + (d[None, :] if INNER else d[None, :].to(tl.int64) * stride_d)
    if MASKED and EVEN:
        tile = tl.load(at, mask=there[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=there[:, None] & (d < dim)[None, :], other=0.0)
    elif EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(d < dim)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(base, rows, there, d, dim, stride_d, tile, EVEN: tl.constexpr, INNER: tl.constexpr):
    """Store a float32 tile in the array's dtype at the rows and columns that exist."""
    at = base + rows[:, None] + (d[None, :] if INNER else d[None, :].to(tl.int64) * stride_d)
    tile = tile.to(base.dtype.element_ty)
    if EVEN:
        tl.store(at, tile, mask=there[:, None])
    else:
        tl.store(at, tile, mask=there[:, None] & (d < dim)[None, :])


@triton.jit
def load_lse(lse, at, there):
    """The rows' LSE, and +inf for a row that saw nothing: its weights are 0."""
    found = tl.load(lse + at, mask=there, other=float("inf"))
    return tl.where(found == float("-inf"), float("inf"), found)


@triton.jit
def pull(
    qk, dp, lse, delta, bad, i, j, b, head, scale, softcap, shift, left, right, q_len, k_len,
    bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
    slopes, slopes_sb,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Weights P, score gradients dS behind the softcap (the bias's) and before it (q's and k's).

    ``i``, ``j``, ``lse``, ``delta`` and ``bad`` broadcast to qk's shape, whichever way it
    lies. ``bad`` marks rows or keys with a NaN or infinity, which stand as 0 in an operand:
    every place that sees one becomes NaN, and so does whatever is summed over that place.
    """
    if SOFTCAP or BIAS or ALIBI:
        inside = (i < q_len) & (j < k_len)
        scores, cap = natural_scores(
            qk, i, j, b, head, scale, softcap, k_len - q_len,
            bias, bias_sb, bias_sh, bias_si, bias_sj, slopes, slopes_sb, inside,
            SOFTCAP, BIAS, ALIBI,
        )  # fmt: skip
        p = tl.exp2((scores - lse) * LOG2E)
    else:
        # No maximum is needed: the LSE bounds every score, and scale may have any sign.
        p = tl.exp2(tl.fma(qk, scale * LOG2E, -(lse * LOG2E)))
    if MASKED:
        seen = visible_places(
            i, j, b, head, shift, left, right, q_len, k_len,
            bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
            LEFT, RIGHT, BIAS, MASK,
        )  # fmt: skip
        p = tl.where(seen, tl.where(bad, float("nan"), p), 0.0)
    ds = p * (dp - delta)
    dx = ds
    if SOFTCAP:
        dx = ds * (1.0 - cap * cap)
    if MASKED:
        # 0 times a hidden NaN, of v, dout or a row's delta, would be one
        ds = tl.where(seen, ds, 0.0)
        dx = tl.where(seen, dx, 0.0)
    return p, ds, dx


@triton.jit
def _add_keys(
    acc, q_tile, dout_tile, lse, delta, start, end,
    k_base, v_base, table_row, block_size, k_sb, k_ss, k_sd, v_sb, v_ss, v_sd,
    head_dim, head_dim_v, i, b, head, scale, softcap, shift, left, right, q_len, k_len,
    bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
    slopes, slopes_sb, dbias_base, dbias_si, dbias_sj,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, ALIBI: tl.constexpr, DBIAS: tl.constexpr,
    PAGED: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dq, without the scale, of one tile of rows out of the keys of [start, end)."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # Masked blocks at the edges are few: stages for them would cost the others registers.
    EDGE: tl.constexpr = MASKED and not (BIAS or MASK)
    for j0 in tl.range(start, end, BLOCK_K, num_stages=1 if EDGE else None):
        j = j0 + tl.arange(0, BLOCK_K)
        there = j < k_len
        rows = key_rows(j, k_len, table_row, block_size, k_sb, k_ss, PAGED)
        k_tile = load_tile(k_base, rows, there, d, head_dim, k_sd, MASKED, EVEN_D, INNER)
        rows = key_rows(j, k_len, table_row, block_size, v_sb, v_ss, PAGED)
        v_tile = load_tile(v_base, rows, there, dv, head_dim_v, v_sd, MASKED, EVEN_DV, INNER)
        bad = there
        if MASKED:
            k_tile, bad_k = without_poison(k_tile)
            v_tile, bad_v = without_poison(v_tile)
            bad = bad_k | bad_v
        qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        dp = tl.dot(dout_tile, v_tile.T, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        _, ds, dx = pull(
            qk, dp, lse[:, None], delta[:, None], bad[None, :], i[:, None], j[None, :], b, head,
            scale, softcap, shift, left, right, q_len, k_len,
            bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
            slopes, slopes_sb, MASKED, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI,
        )  # fmt: skip
        if DBIAS:
            at = i.to(tl.int64)[:, None] * dbias_si + j.to(tl.int64)[None, :] * dbias_sj
            inside = (i < q_len)[:, None] & there[None, :]
            tl.store(dbias_base + at, ds.to(dbias_base.dtype.element_ty), mask=inside)
        acc = tl.dot(dx.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


_NUMBERS = (
    "heads_k group seq_q seq_k head_dim head_dim_v total tiles block_size left right bottom_right"
).split()
_STRIDES = (
    "q_sb q_sh q_ss q_sd k_sb k_sh k_ss k_sd v_sb v_sh v_ss v_sd "
    "dout_sb dout_sh dout_ss dout_sd dq_sb dq_sh dq_ss dq_sd "
    "lse_sb lse_sh lse_ss delta_sb delta_sh bias_sb bias_sh bias_si bias_sj "
    "mask_sb mask_sh mask_si mask_sj dbias_sb dbias_sh dbias_si dbias_sj slopes_sb table_sb"
).split()
_POINTERS = "q k v dout lse delta dq dbias bias mask slopes cu_q cu_k used table flags".split()


@triton.jit(
    do_not_specialize=[*_NUMBERS, *_STRIDES],
    do_not_specialize_on_alignment=[*_POINTERS, *_STRIDES, *_NUMBERS],
)
def dq_kernel(
    q, k, v, dout, lse, delta, dq, dbias, bias, mask, slopes, cu_q, cu_k, used, table, flags,
    scale: tl.float32, softcap: tl.float32,
    heads_k: tl.int32, group: tl.int32, seq_q: tl.int32, seq_k: tl.int32,
    head_dim: tl.int32, head_dim_v: tl.int32, total: tl.int32, tiles: tl.int32,
    block_size: tl.int32,
    left: tl.int32, right: tl.int32, bottom_right: tl.int32,
    q_sb: tl.int64, q_sh: tl.int64, q_ss: tl.int64, q_sd: tl.int64,
    k_sb: tl.int64, k_sh: tl.int64, k_ss: tl.int64, k_sd: tl.int64,
    v_sb: tl.int64, v_sh: tl.int64, v_ss: tl.int64, v_sd: tl.int64,
    dout_sb: tl.int64, dout_sh: tl.int64, dout_ss: tl.int64, dout_sd: tl.int64,
    dq_sb: tl.int64, dq_sh: tl.int64, dq_ss: tl.int64, dq_sd: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, lse_ss: tl.int64, delta_sb: tl.int64, delta_sh: tl.int64,
    bias_sb: tl.int64, bias_sh: tl.int64, bias_si: tl.int64, bias_sj: tl.int64,
    mask_sb: tl.int64, mask_sh: tl.int64, mask_si: tl.int64, mask_sj: tl.int64,
    dbias_sb: tl.int64, dbias_sh: tl.int64, dbias_si: tl.int64, dbias_sj: tl.int64,
    slopes_sb: tl.int64, table_sb: tl.int64,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, DBIAS: tl.constexpr, PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr, USED: tl.constexpr, PAGED: tl.constexpr, FLAGS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dq of one tile of rows of one query head; with ``DBIAS`` the score gradients as well, for a
    bias that was not broadcast: this program alone sees those places. ``FLAGS``: a tile does
    something only where a flag is set that speaks for FLAGS rows of which it has some, and a
    program looks after REPAIRED of the ``total`` tiles.

    Head dims and strides of q, k, v, dout and dq come in units of ``VEC`` elements, which tells
    the compiler that whole vectors are aligned and lie inside or outside as one.
    """
    head_dim, head_dim_v = head_dim * VEC, head_dim_v * VEC
    WHOLE: tl.constexpr = not (BIAS or MASK)
    STEPS: tl.constexpr = REPAIRED if FLAGS else 1
    # The whole grid in one axis: the others end at 65,535. Longest rows first under a diagonal.
    begin = tl.program_id(0) * STEPS
    steps = STEPS
    if FLAGS:
        some = marked(flags, begin + tl.arange(0, STEPS), total, tiles, seq_q, True, FLAGS, BLOCK_Q)
        steps = tl.where(tl.max(some.to(tl.int32), 0) > 0, STEPS, 0)
    for step in range(steps):
        tile = tiles - 1 - (begin + step) % tiles
        rest = (begin + step) // tiles
        head_k = (rest % (heads_k * group)) // group
        head = (rest % (heads_k * group)).to(tl.int64)
        b = rest // (heads_k * group)

        q_start, q_len, k_start, k_len = lengths(
            b, cu_q, cu_k, used, seq_q, seq_k, PACKED_Q, PACKED_K, USED
        )
        first = tile * BLOCK_Q
        if FLAGS:
            one = marked(flags, begin + step, total, tiles, seq_q, True, FLAGS, BLOCK_Q)
            first = tl.where(one, first, q_len)
        if first < q_len:
            last = tl.minimum(first + BLOCK_Q, q_len) - 1
            shift = (k_len - q_len) * bottom_right
            low, full_low, full_high, high = key_range(
                first, last, shift, left, right, k_len, LEFT, RIGHT, WHOLE, BLOCK_K
            )

            i = first + tl.arange(0, BLOCK_Q)
            there = i < q_len
            d = tl.arange(0, BLOCK_D)
            dv = tl.arange(0, BLOCK_DV)
            at_b = b.to(tl.int64)
            q_base = q + head * (q_sh * VEC)
            dout_base = dout + head * (dout_sh * VEC)
            dq_base = dq + head * (dq_sh * VEC)
            lse_base = lse + head * lse_sh
            delta_base = delta + head * delta_sh
            if PACKED_Q:
                q_base += q_start.to(tl.int64) * (q_ss * VEC)
                dout_base += q_start.to(tl.int64) * (dout_ss * VEC)
                dq_base += q_start.to(tl.int64) * (dq_ss * VEC)
                lse_base += q_start.to(tl.int64) * lse_ss
                delta_base += q_start
            else:
                q_base += at_b * (q_sb * VEC)
                dout_base += at_b * (dout_sb * VEC)
                dq_base += at_b * (dq_sb * VEC)
                lse_base += at_b * lse_sb
                delta_base += at_b * delta_sb
            k_base = k + head_k.to(tl.int64) * (k_sh * VEC)
            v_base = v + head_k.to(tl.int64) * (v_sh * VEC)
            table_row = table
            if PAGED:
                table_row = table + at_b * table_sb
            elif PACKED_K:
                k_base += k_start.to(tl.int64) * (k_ss * VEC)
                v_base += k_start.to(tl.int64) * (v_ss * VEC)
            else:
                k_base += at_b * (k_sb * VEC)
                v_base += at_b * (v_sb * VEC)
            if VEC > 1:
                q_base = tl.multiple_of(q_base, 16)
                dout_base = tl.multiple_of(dout_base, 16)
                dq_base = tl.multiple_of(dq_base, 16)
                k_base = tl.multiple_of(k_base, 16)
                v_base = tl.multiple_of(v_base, 16)
            dbias_base = dbias
            if DBIAS:
                dbias_base = dbias + at_b * dbias_sb + head * dbias_sh

            rows = i.to(tl.int64)
            q_tile = load_tile(
                q_base, rows * (q_ss * VEC), there, d, head_dim, q_sd, True, EVEN_D, INNER
            )
            dout_tile = load_tile(
                dout_base,
                rows * (dout_ss * VEC),
                there,
                dv,
                head_dim_v,
                dout_sd,
                True,
                EVEN_DV,
                INNER,
            )
            row_lse = load_lse(lse_base, rows * lse_ss, there)
            row_delta = tl.load(delta_base + rows, mask=there, other=0.0)

            acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            if LEFT:
                acc = _add_keys(
                    acc, q_tile, dout_tile, row_lse, row_delta, low, full_low,
                    k_base, v_base, table_row, block_size,
                    k_sb * VEC, k_ss * VEC, k_sd, v_sb * VEC, v_ss * VEC, v_sd,
                    head_dim, head_dim_v, i, b, head, scale, softcap, shift, left,
                    right, q_len, k_len,
                    bias, bias_sb, bias_sh, bias_si, bias_sj,
                    mask, mask_sb, mask_sh, mask_si, mask_sj,
                    slopes, slopes_sb, dbias_base, dbias_si, dbias_sj,
                    True, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, DBIAS, PAGED, INNER, PRECISION,
                    EVEN_D, EVEN_DV, BLOCK_K, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
            if WHOLE:
                acc = _add_keys(
                    acc, q_tile, dout_tile, row_lse, row_delta, full_low, full_high,
                    k_base, v_base, table_row, block_size,
                    k_sb * VEC, k_ss * VEC, k_sd, v_sb * VEC, v_ss * VEC, v_sd,
                    head_dim, head_dim_v, i, b, head, scale, softcap, shift, left,
                    right, q_len, k_len,
                    bias, bias_sb, bias_sh, bias_si, bias_sj,
                    mask, mask_sb, mask_sh, mask_si, mask_sj,
                    slopes, slopes_sb, dbias_base, dbias_si, dbias_sj,
                    False, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, DBIAS, PAGED, INNER, PRECISION,
                    EVEN_D, EVEN_DV, BLOCK_K, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
            acc = _add_keys(
                acc, q_tile, dout_tile, row_lse, row_delta, full_high, high,
                k_base, v_base, table_row, block_size,
                k_sb * VEC, k_ss * VEC, k_sd, v_sb * VEC, v_ss * VEC, v_sd,
                head_dim, head_dim_v, i, b, head, scale, softcap, shift, left, right, q_len, k_len,
                bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
                slopes, slopes_sb, dbias_base, dbias_si, dbias_sj,
                True, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, DBIAS, PAGED, INNER, PRECISION,
                EVEN_D, EVEN_DV, BLOCK_K, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
            store_tile(
                dq_base, rows * (dq_ss * VEC), there, d, head_dim, dq_sd, acc * scale, EVEN_D, INNER
            )
