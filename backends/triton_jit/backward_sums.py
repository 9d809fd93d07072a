"""The portable mechanism, backward: the rows' delta, and gradients that are sums over many tiles.

The rule kept here: sums run in float32 in an order that the shapes alone decide. What many
programs share goes through partial sums that `sums_kernel` adds up, never through atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portattn.backends.triton_jit.backward import load_lse, load_tile, pull
from portattn.backends.triton_jit.scoring import LOG2E, key_rows, lengths, without_poison

_DELTA_NUMBERS = (
    "batch heads seq_q head_dim head_dim_v tiles q_sb q_sh q_ss q_sd out_sb out_sh out_ss out_sd "
    "dout_sb dout_sh dout_ss dout_sd lse_sb lse_sh lse_ss dlse_sb dlse_sh dlse_ss "
    "delta_sb delta_sh"
).split()


@triton.jit(
    do_not_specialize=_DELTA_NUMBERS,
    do_not_specialize_on_alignment=[
        *"q out dout lse dlse delta poison sinks part cu_q".split(),
        *_DELTA_NUMBERS,
    ],
)
def delta_kernel(
    q, out, dout, lse, dlse, delta, poison, sinks, part, cu_q,
    batch: tl.int32, heads: tl.int32, seq_q: tl.int32, head_dim: tl.int32, head_dim_v: tl.int32,
    tiles: tl.int32,
    q_sb: tl.int64, q_sh: tl.int64, q_ss: tl.int64, q_sd: tl.int64,
    out_sb: tl.int64, out_sh: tl.int64, out_ss: tl.int64, out_sd: tl.int64,
    dout_sb: tl.int64, dout_sh: tl.int64, dout_ss: tl.int64, dout_sd: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, lse_ss: tl.int64,
    dlse_sb: tl.int64, dlse_sh: tl.int64, dlse_ss: tl.int64,
    delta_sb: tl.int64, delta_sh: tl.int64,
    DLSE: tl.constexpr, SINKS: tl.constexpr, PACKED_Q: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse of one tile of rows; packed rows are one long sequence.

    ``poison``, if there is one, gets 1 where a row of q or dout has a NaN or infinity, else 0.
    ``SINKS``: also the tile's share of the sink's gradient, -sum of exp(sink - lse) * delta (the
    sink has a weight and carries no value), to ``part`` [b, tile, head].
    """
    head_dim, head_dim_v = head_dim * VEC, head_dim_v * VEC
    pid = tl.program_id(0)
    tile = pid % tiles
    rest = pid // tiles
    head = (rest % heads).to(tl.int64)
    b = (rest // heads).to(tl.int64)
    i = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    there = i < seq_q
    rows = i.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_base = q + b * (q_sb * VEC) + head * (q_sh * VEC)
    out_base = out + b * (out_sb * VEC) + head * (out_sh * VEC)
    dout_base = dout + b * (dout_sb * VEC) + head * (dout_sh * VEC)
    if VEC > 1:
        q_base = tl.multiple_of(q_base, 16)
        out_base = tl.multiple_of(out_base, 16)
        dout_base = tl.multiple_of(dout_base, 16)
    o = load_tile(
        out_base, rows * (out_ss * VEC), there, dv, head_dim_v, out_sd, True, EVEN_DV, INNER
    )
    do = load_tile(
        dout_base, rows * (dout_ss * VEC), there, dv, head_dim_v, dout_sd, True, EVEN_DV, INNER
    )
    if poison is not None:
        q_tile = load_tile(
            q_base, rows * (q_ss * VEC), there, d, head_dim, q_sd, True, EVEN_D, INNER
        )
        _, bad_q = without_poison(q_tile)
        _, bad_dout = without_poison(do)
        bad = (bad_q | bad_dout).to(tl.int32)
        tl.store(poison + b * delta_sb + head * delta_sh + rows, bad, mask=there)
    found = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        found -= tl.load(
            dlse + b * dlse_sb + head * dlse_sh + rows * dlse_ss, mask=there, other=0.0
        )
    tl.store(delta + b * delta_sb + head * delta_sh + rows, found, mask=there)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        if PACKED_Q:
            # rows in front of the first sequence and behind the last one belong to nobody
            there = there & (i >= tl.load(cu_q)) & (i < tl.load(cu_q + batch))
        row_lse = load_lse(lse, b * lse_sb + head * lse_sh + rows * lse_ss, there)
        share = tl.where(row_lse == float("inf"), 0.0, tl.exp2((sink - row_lse) * LOG2E) * found)
        tl.store(part + (b * tiles + tile) * heads + head, -tl.sum(share, 0))


@triton.jit(
    do_not_specialize=["parts", "columns", "n_h", "n_i", "n_j",
                       "into_sb", "into_sh", "into_si", "into_sj"],
    do_not_specialize_on_alignment=["part", "into", "parts", "columns", "n_h", "n_i", "n_j"],
)  # fmt: skip
def sums_kernel(
    part, into, parts: tl.int32, columns: tl.int64, n_h: tl.int32, n_i: tl.int32, n_j: tl.int32,
    into_sb: tl.int64, into_sh: tl.int64, into_si: tl.int64, into_sj: tl.int64,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum ``part`` [parts, columns] over its first axis into an array (any, n_h, n_i, n_j)."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = column < columns
    acc = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for n0 in range(0, parts, BLOCK_N):
        n = (n0 + tl.arange(0, BLOCK_N)).to(tl.int64)
        at = n[:, None] * columns + column[None, :]
        acc += tl.load(part + at, mask=(n < parts)[:, None] & there[None, :], other=0.0)
    j = column % n_j
    i = column // n_j % n_i
    h = column // n_j // n_i % n_h
    b = column // n_j // n_i // n_h
    at = b * into_sb + h * into_sh + i * into_si + j * into_sj
    tl.store(into + at, tl.sum(acc, 0).to(into.dtype.element_ty), mask=there)


_NUMBERS = (
    "batch heads_q group seq_q seq_k head_dim head_dim_v block_size left right bottom_right "
    "n_b n_h n_i n_j sum_h sum_i sum_j steps part_steps parts"
).split()
_STRIDES = (
    "q_sb q_sh q_ss q_sd k_sb k_sh k_ss k_sd v_sb v_sh v_ss v_sd dout_sb dout_sh dout_ss dout_sd "
    "lse_sb lse_sh lse_ss delta_sb delta_sh bias_sb bias_sh bias_si bias_sj "
    "mask_sb mask_sh mask_si mask_sj into_sp into_sb into_sh into_si into_sj slopes_sb table_sb"
).split()
_POINTERS = "q k v dout lse delta into bias mask slopes cu_q cu_k used table".split()


@triton.jit(
    do_not_specialize=[*_NUMBERS, *_STRIDES],
    do_not_specialize_on_alignment=[*_POINTERS, *_STRIDES, *_NUMBERS],
)
def dbias_kernel(
    q, k, v, dout, lse, delta, into, bias, mask, slopes, cu_q, cu_k, used, table,
    scale: tl.float32, softcap: tl.float32,
    group: tl.int32, seq_q: tl.int32, seq_k: tl.int32, head_dim: tl.int32, head_dim_v: tl.int32,
    block_size: tl.int32, left: tl.int32, right: tl.int32, bottom_right: tl.int32,
    n_b: tl.int32, n_h: tl.int32, n_i: tl.int32, n_j: tl.int32,
    sum_h: tl.int32, sum_i: tl.int32, sum_j: tl.int32,
    steps: tl.int64, part_steps: tl.int64,
    q_sb: tl.int64, q_sh: tl.int64, q_ss: tl.int64, q_sd: tl.int64,
    k_sb: tl.int64, k_sh: tl.int64, k_ss: tl.int64, k_sd: tl.int64,
    v_sb: tl.int64, v_sh: tl.int64, v_ss: tl.int64, v_sd: tl.int64,
    dout_sb: tl.int64, dout_sh: tl.int64, dout_ss: tl.int64, dout_sd: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, lse_ss: tl.int64, delta_sb: tl.int64, delta_sh: tl.int64,
    bias_sb: tl.int64, bias_sh: tl.int64, bias_si: tl.int64, bias_sj: tl.int64,
    mask_sb: tl.int64, mask_sh: tl.int64, mask_si: tl.int64, mask_sj: tl.int64,
    into_sp: tl.int64, into_sb: tl.int64, into_sh: tl.int64, into_si: tl.int64, into_sj: tl.int64,
    slopes_sb: tl.int64, table_sb: tl.int64,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    ALIBI: tl.constexpr, SUM_Q: tl.constexpr, SUM_K: tl.constexpr, PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr, USED: tl.constexpr, PAGED: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One tile of a bias that was broadcast, or one part of the sum that it is.

    ``n_b``, ``n_h``, ``n_i`` and ``n_j`` count the bias's batches, heads and tiles of rows and
    columns; ``sum_h``, ``sum_i`` and ``sum_j`` the heads and tiles that share an element (1 where
    the bias has that axis). A part adds up ``part_steps`` of all the ``steps``.
    """
    head_dim, head_dim_v = head_dim * VEC, head_dim_v * VEC
    pid = tl.program_id(0)
    tile_j = pid % n_j
    rest = pid // n_j
    tile_i = rest % n_i
    rest = rest // n_i
    own_h = rest % n_h
    rest = rest // n_h
    own_b = rest % n_b
    part = rest // n_b

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    begin = part.to(tl.int64) * part_steps
    for step in range(begin, tl.minimum(begin + part_steps, steps)):
        # an axis is either the tile's own or summed: one of the two terms is 0
        j0 = (tile_j + (step % sum_j).to(tl.int32)) * BLOCK_K
        left_over = step // sum_j
        i0 = (tile_i + (left_over % sum_i).to(tl.int32)) * BLOCK_Q
        left_over = left_over // sum_i
        head = own_h.to(tl.int64) + left_over % sum_h
        b = own_b + (left_over // sum_h).to(tl.int32)
        q_start, q_len, k_start, k_len = lengths(
            b, cu_q, cu_k, used, seq_q, seq_k, PACKED_Q, PACKED_K, USED
        )
        shift = (k_len - q_len) * bottom_right
        needed = (i0 < q_len) & (j0 < k_len)
        if RIGHT:
            needed = needed & (j0 <= tl.minimum(i0 + BLOCK_Q, q_len) - 1 + shift + right)
        if LEFT:
            needed = needed & (tl.minimum(j0 + BLOCK_K, k_len) - 1 >= i0 + shift - left)
        if needed:
            i = i0 + tl.arange(0, BLOCK_Q)
            j = j0 + tl.arange(0, BLOCK_K)
            at_b = b.to(tl.int64)
            at_k = head // group
            q_base = q + head * (q_sh * VEC)
            dout_base = dout + head * (dout_sh * VEC)
            lse_base = lse + head * lse_sh
            delta_base = delta + head * delta_sh
            if PACKED_Q:
                q_base += q_start.to(tl.int64) * (q_ss * VEC)
                dout_base += q_start.to(tl.int64) * (dout_ss * VEC)
                lse_base += q_start.to(tl.int64) * lse_ss
                delta_base += q_start
            else:
                q_base += at_b * (q_sb * VEC)
                dout_base += at_b * (dout_sb * VEC)
                lse_base += at_b * lse_sb
                delta_base += at_b * delta_sb
            k_base = k + at_k * (k_sh * VEC)
            v_base = v + at_k * (v_sh * VEC)
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
                k_base = tl.multiple_of(k_base, 16)
                v_base = tl.multiple_of(v_base, 16)
            rows = i.to(tl.int64)
            there = i < q_len
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
            rows = key_rows(j, k_len, table_row, block_size, k_sb * VEC, k_ss * VEC, PAGED)
            k_tile = load_tile(k_base, rows, j < k_len, d, head_dim, k_sd, True, EVEN_D, INNER)
            rows = key_rows(j, k_len, table_row, block_size, v_sb * VEC, v_ss * VEC, PAGED)
            v_tile = load_tile(v_base, rows, j < k_len, dv, head_dim_v, v_sd, True, EVEN_DV, INNER)
            # Nothing is summed over here but places that are seen: no NaN needs cleaning.
            qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
            dp = tl.dot(dout_tile, v_tile.T, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
            bad = (i < 0)[:, None]
            _, ds, _ = pull(
                qk, dp, row_lse[:, None], row_delta[:, None], bad, i[:, None], j[None, :], b, head,
                scale, softcap, shift, left, right, q_len, k_len,
                bias, bias_sb, bias_sh, bias_si, bias_sj,
                mask, mask_sb, mask_sh, mask_si, mask_sj, slopes, slopes_sb,
                True, LEFT, RIGHT, SOFTCAP, True, MASK, ALIBI,
            )  # fmt: skip
            acc += ds

    base = (
        into
        + part.to(tl.int64) * into_sp
        + own_b.to(tl.int64) * into_sb
        + own_h.to(tl.int64) * into_sh
    )
    if SUM_Q:
        acc = tl.sum(acc, 0, keep_dims=True)
        i = tl.arange(0, 1)
        there_i = i < 1
    else:
        i = tile_i * BLOCK_Q + tl.arange(0, BLOCK_Q)
        there_i = i < seq_q
    if SUM_K:
        acc = tl.sum(acc, 1, keep_dims=True)
        j = tl.arange(0, 1)
        there_j = j < 1
    else:
        j = tile_j * BLOCK_K + tl.arange(0, BLOCK_K)
        there_j = j < seq_k
    at = i.to(tl.int64)[:, None] * into_si + j.to(tl.int64)[None, :] * into_sj
    tl.store(base + at, acc.to(into.dtype.element_ty), mask=there_i[:, None] & there_j[None, :])
