"""The portable mechanism, backward: dk and dv.

The rule kept here: one program owns a tile of keys of one key head and sums in registers over
everything that reads them: the query heads of the group, the blocks of queries, and, for paged
keys, every sequence that names the page. Nothing is expanded and nothing is added in memory.

Scores lie transposed, keys as rows, so that P^T and dS^T come out of one product as the left
operand of the next, and a hidden key's numbers stay in the row that is hers. A hidden query's
do not: rows of q and dout with NaN or infinities, which ``poison`` names (see `delta_kernel`),
are not loaded in blocks under a mask, so that these need no pass through registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from portattn.backends.triton_jit.backward import load_lse, load_tile, pull, store_tile
from portattn.backends.triton_jit.scoring import REPAIRED, lengths, marked, without_poison


@triton.jit
def query_range(
    first, last, whole, shift, left, right, q_len,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The queries that see the keys ``first`` to ``last`` (both included), in whole blocks: (low,
    full_low, full_high, high), as in `key_range`; ``whole`` False: every block needs a mask."""
    low, high = 0, q_len
    full_low, full_high = 0, q_len
    if RIGHT:
        low = tl.maximum(low, first - shift - right)
        full_low = tl.maximum(full_low, last - shift - right)
    if LEFT:
        high = tl.minimum(high, last - shift + left + 1)
        full_high = tl.minimum(full_high, first - shift + left + 1)
    high = tl.maximum(high, 0)
    low = tl.minimum(low, high) // BLOCK_Q * BLOCK_Q
    full_low = (full_low + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
    full_high = tl.maximum(full_high, 0) // BLOCK_Q * BLOCK_Q
    full_low = tl.minimum(tl.maximum(full_low, low), high)
    full_high = tl.where(whole, tl.maximum(full_high, full_low), full_low)
    return low, full_low, full_high, high


@triton.jit
def _add_queries(
    dk_acc, dv_acc, k_tile, v_tile, start, end,
    q_base, dout_base, lse_base, delta_base, poison_base, q_ss, q_sd, dout_ss, dout_sd, lse_ss,
    head_dim, head_dim_v, j, b, head, scale, softcap, shift, left, right, q_len, k_len,
    bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
    slopes, slopes_sb,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, ALIBI: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dk (without the scale) and dv of one tile of keys out of the queries of [start, end). Where
    ``poison_base`` is None, rows with a NaN or infinity are looked for here."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # Masked blocks at the edges are few: stages for them would cost the others registers.
    EDGE: tl.constexpr = MASKED and not (BIAS or MASK)
    for i0 in tl.range(start, end, BLOCK_Q, num_stages=1 if EDGE else None):
        i = i0 + tl.arange(0, BLOCK_Q)
        there = i < q_len
        rows = i.to(tl.int64)
        bad, good = there, there
        if MASKED and poison_base is not None:
            bad = tl.load(poison_base + rows, mask=there, other=1) != 0
            good = bad == 0
        q_tile = load_tile(q_base, rows * q_ss, good, d, head_dim, q_sd, MASKED, EVEN_D, INNER)
        dout_tile = load_tile(
            dout_base, rows * dout_ss, good, dv, head_dim_v, dout_sd, MASKED, EVEN_DV, INNER
        )
        if MASKED and poison_base is None:
            q_tile, bad_q = without_poison(q_tile)
            dout_tile, bad_dout = without_poison(dout_tile)
            bad = bad_q | bad_dout
        lse = load_lse(lse_base, rows * lse_ss, there)
        delta = tl.load(delta_base + rows, mask=there, other=0.0)
        qk = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q]
        dp = tl.dot(v_tile, dout_tile.T, input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q]
        p, _, dx = pull(
            qk, dp, lse[None, :], delta[None, :], bad[None, :], i[None, :], j[:, None], b, head,
            scale, softcap, shift, left, right, q_len, k_len,
            bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
            slopes, slopes_sb, MASKED, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI,
        )  # fmt: skip
        dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=PRECISION)
        dk_acc = tl.dot(dx.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc


@triton.jit
def _add_sequence(
    dk_acc, dv_acc, k_tile, v_tile, first, b, head_k,
    q, dout, lse, delta, poison, cu_q, q_len, k_len,
    q_sb, q_sh, q_ss, q_sd, dout_sb, dout_sh, dout_ss, dout_sd, lse_sb, lse_sh, lse_ss,
    delta_sb, delta_sh, group, head_dim, head_dim_v, scale, softcap, left, right, bottom_right,
    bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
    slopes, slopes_sb,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, PACKED_Q: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """What the queries of sequence ``b`` add to the keys that it counts from ``first`` on."""
    WHOLE: tl.constexpr = not (BIAS or MASK)
    j = first + tl.arange(0, BLOCK_K)
    last = tl.minimum(first + BLOCK_K, k_len) - 1
    shift = (k_len - q_len) * bottom_right
    # Keys that this sequence does not use may be another's: they must get exactly 0 from here.
    whole = first + BLOCK_K <= k_len
    if not WHOLE:
        whole = whole & False
    low, full_low, full_high, high = query_range(
        first, last, whole, shift, left, right, q_len, LEFT, RIGHT, BLOCK_Q
    )
    at_b = b.to(tl.int64)
    if first < k_len:
        for member in range(group):
            head = (head_k * group + member).to(tl.int64)
            q_base = q + head * (q_sh * VEC)
            dout_base = dout + head * (dout_sh * VEC)
            lse_base = lse + head * lse_sh
            delta_base = delta + head * delta_sh
            poison_base = poison
            if poison is not None:
                poison_base = poison + head * delta_sh
            if PACKED_Q:
                q_start = tl.load(cu_q + b).to(tl.int64)
                q_base += q_start * (q_ss * VEC)
                dout_base += q_start * (dout_ss * VEC)
                lse_base += q_start * lse_ss
                delta_base += q_start
                if poison is not None:
                    poison_base += q_start
            else:
                q_base += at_b * (q_sb * VEC)
                dout_base += at_b * (dout_sb * VEC)
                lse_base += at_b * lse_sb
                delta_base += at_b * delta_sb
                if poison is not None:
                    poison_base += at_b * delta_sb
            if VEC > 1:
                q_base = tl.multiple_of(q_base, 16)
                dout_base = tl.multiple_of(dout_base, 16)
            if RIGHT:
                dk_acc, dv_acc = _add_queries(
                    dk_acc, dv_acc, k_tile, v_tile, low, full_low,
                    q_base, dout_base, lse_base, delta_base, poison_base,
                    q_ss * VEC, q_sd, dout_ss * VEC, dout_sd, lse_ss,
                    head_dim, head_dim_v, j, b, head, scale, softcap, shift, left, right,
                    q_len, k_len, bias, bias_sb, bias_sh, bias_si, bias_sj,
                    mask, mask_sb, mask_sh, mask_si, mask_sj, slopes, slopes_sb,
                    True, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, INNER, PRECISION,
                    EVEN_D, EVEN_DV, BLOCK_Q, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
            if WHOLE:
                dk_acc, dv_acc = _add_queries(
                    dk_acc, dv_acc, k_tile, v_tile, full_low, full_high,
                    q_base, dout_base, lse_base, delta_base, poison_base,
                    q_ss * VEC, q_sd, dout_ss * VEC, dout_sd, lse_ss,
                    head_dim, head_dim_v, j, b, head, scale, softcap, shift, left, right,
                    q_len, k_len, bias, bias_sb, bias_sh, bias_si, bias_sj,
                    mask, mask_sb, mask_sh, mask_si, mask_sj, slopes, slopes_sb,
                    False, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, INNER, PRECISION,
                    EVEN_D, EVEN_DV, BLOCK_Q, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
            dk_acc, dv_acc = _add_queries(
                dk_acc, dv_acc, k_tile, v_tile, full_high, high,
                q_base, dout_base, lse_base, delta_base, poison_base,
                q_ss * VEC, q_sd, dout_ss * VEC, dout_sd, lse_ss,
                head_dim, head_dim_v, j, b, head, scale, softcap, shift, left, right,
                q_len, k_len, bias, bias_sb, bias_sh, bias_si, bias_sj,
                mask, mask_sb, mask_sh, mask_si, mask_sj, slopes, slopes_sb,
                True, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, INNER, PRECISION,
                EVEN_D, EVEN_DV, BLOCK_Q, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    return dk_acc, dv_acc


_NUMBERS = (
    "heads_k group seq_q seq_k head_dim head_dim_v total tiles block_size blocks_each "
    "left right bottom_right"
).split()
_STRIDES = (
    "q_sb q_sh q_ss q_sd k_sb k_sh k_ss k_sd v_sb v_sh v_ss v_sd "
    "dout_sb dout_sh dout_ss dout_sd dk_sb dk_sh dk_ss dk_sd dv_sb dv_sh dv_ss dv_sd "
    "lse_sb lse_sh lse_ss delta_sb delta_sh bias_sb bias_sh bias_si bias_sj "
    "mask_sb mask_sh mask_si mask_sj slopes_sb"
).split()
_POINTERS = (
    "q k v dout lse delta poison dk dv bias mask slopes cu_q cu_k used page_users page_starts flags"
).split()


@triton.jit(
    do_not_specialize=[*_NUMBERS, *_STRIDES],
    do_not_specialize_on_alignment=[*_POINTERS, *_STRIDES, *_NUMBERS],
)
def dkdv_kernel(
    q, k, v, dout, lse, delta, poison, dk, dv, bias, mask, slopes, cu_q, cu_k, used,
    page_users, page_starts, flags,
    scale: tl.float32, softcap: tl.float32,
    heads_k: tl.int32, group: tl.int32, seq_q: tl.int32, seq_k: tl.int32,
    head_dim: tl.int32, head_dim_v: tl.int32, total: tl.int32, tiles: tl.int32,
    block_size: tl.int32,
    blocks_each: tl.int32, left: tl.int32, right: tl.int32, bottom_right: tl.int32,
    q_sb: tl.int64, q_sh: tl.int64, q_ss: tl.int64, q_sd: tl.int64,
    k_sb: tl.int64, k_sh: tl.int64, k_ss: tl.int64, k_sd: tl.int64,
    v_sb: tl.int64, v_sh: tl.int64, v_ss: tl.int64, v_sd: tl.int64,
    dout_sb: tl.int64, dout_sh: tl.int64, dout_ss: tl.int64, dout_sd: tl.int64,
    dk_sb: tl.int64, dk_sh: tl.int64, dk_ss: tl.int64, dk_sd: tl.int64,
    dv_sb: tl.int64, dv_sh: tl.int64, dv_ss: tl.int64, dv_sd: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, lse_ss: tl.int64, delta_sb: tl.int64, delta_sh: tl.int64,
    bias_sb: tl.int64, bias_sh: tl.int64, bias_si: tl.int64, bias_sj: tl.int64,
    mask_sb: tl.int64, mask_sh: tl.int64, mask_si: tl.int64, mask_sj: tl.int64,
    slopes_sb: tl.int64,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr, USED: tl.constexpr, PAGED: tl.constexpr, FLAGS: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys; keys that nothing uses get 0.

    Head dims and strides come in units of ``VEC`` elements, as in `dq_kernel`. With ``PAGED`` a
    tile lies within one page; the places of that page in the flattened block table, which has
    ``blocks_each`` to a sequence, are ``page_users`` from ``page_starts[page]`` to the next start,
    and their order is that of the sums.
    ``FLAGS``: a tile does something only where a flag is set that speaks for FLAGS keys of which
    it has some, and a program looks after REPAIRED of the ``total`` tiles.
    """
    head_dim, head_dim_v = head_dim * VEC, head_dim_v * VEC
    STEPS: tl.constexpr = REPAIRED if FLAGS else 1
    # The whole grid in one axis: the others end at 65,535. Under a diagonal the first keys are
    # seen by most queries, and start first.
    begin = tl.program_id(0) * STEPS
    steps = STEPS
    if FLAGS:
        some = marked(
            flags, begin + tl.arange(0, STEPS), total, tiles, seq_k, False, FLAGS, BLOCK_K
        )
        steps = tl.where(tl.max(some.to(tl.int32), 0) > 0, STEPS, 0)
    for step in range(steps):
        tile = (begin + step) % tiles
        rest = (begin + step) // tiles
        head_k = rest % heads_k
        b = rest // heads_k  # the page, where keys are paged

        first = tile * BLOCK_K
        q_len, k_start, k_len = seq_q, 0, seq_k
        if PAGED:
            there_are = block_size
        else:
            _, q_len, k_start, k_len = lengths(
                b, cu_q, cu_k, used, seq_q, seq_k, PACKED_Q, PACKED_K, USED
            )
            there_are = seq_k
            if PACKED_K:
                there_are = tl.load(cu_k + b + 1) - k_start
        if FLAGS:
            one = marked(flags, begin + step, total, tiles, seq_k, False, FLAGS, BLOCK_K)
            first = tl.where(one, first, there_are)
        if first < there_are:
            own = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
            d = tl.arange(0, BLOCK_D)
            d_v = tl.arange(0, BLOCK_DV)
            at_b = b.to(tl.int64)
            at_head = head_k.to(tl.int64)
            k_base = k + at_head * (k_sh * VEC)
            v_base = v + at_head * (v_sh * VEC)
            dk_base = dk + at_head * (dk_sh * VEC)
            dv_base = dv + at_head * (dv_sh * VEC)
            if PACKED_K:
                k_base += k_start.to(tl.int64) * (k_ss * VEC)
                v_base += k_start.to(tl.int64) * (v_ss * VEC)
                dk_base += k_start.to(tl.int64) * (dk_ss * VEC)
                dv_base += k_start.to(tl.int64) * (dv_ss * VEC)
            else:
                k_base += at_b * (k_sb * VEC)
                v_base += at_b * (v_sb * VEC)
                dk_base += at_b * (dk_sb * VEC)
                dv_base += at_b * (dv_sb * VEC)
            if VEC > 1:
                k_base = tl.multiple_of(k_base, 16)
                v_base = tl.multiple_of(v_base, 16)
                dk_base = tl.multiple_of(dk_base, 16)
                dv_base = tl.multiple_of(dv_base, 16)
            there = own < there_are
            k_tile = load_tile(
                k_base, own * (k_ss * VEC), there, d, head_dim, k_sd, True, EVEN_D, INNER
            )
            v_tile = load_tile(
                v_base, own * (v_ss * VEC), there, d_v, head_dim_v, v_sd, True, EVEN_DV, INNER
            )

            dk_acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            dv_acc = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
            if PAGED:
                for at in range(tl.load(page_starts + b), tl.load(page_starts + b + 1)):
                    place = tl.load(page_users + at)
                    user = (place // blocks_each).to(tl.int32)
                    counted = (place % blocks_each).to(tl.int32) * block_size + first
                    _, q_len, _, k_len = lengths(
                        user, cu_q, cu_k, used, seq_q, seq_k, PACKED_Q, PACKED_K, USED
                    )
                    dk_acc, dv_acc = _add_sequence(
                        dk_acc, dv_acc, k_tile, v_tile, counted, user, head_k,
                        q, dout, lse, delta, poison, cu_q, q_len, k_len,
                        q_sb, q_sh, q_ss, q_sd, dout_sb, dout_sh, dout_ss, dout_sd,
                        lse_sb, lse_sh, lse_ss, delta_sb, delta_sh, group, head_dim, head_dim_v,
                        scale, softcap, left, right, bottom_right,
                        bias, bias_sb, bias_sh, bias_si, bias_sj,
                        mask, mask_sb, mask_sh, mask_si, mask_sj,
                        slopes, slopes_sb, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI,
                        PACKED_Q, INNER, VEC,
                        PRECISION, EVEN_D, EVEN_DV, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV,
                    )  # fmt: skip
            else:
                dk_acc, dv_acc = _add_sequence(
                    dk_acc, dv_acc, k_tile, v_tile, first, b, head_k,
                    q, dout, lse, delta, poison, cu_q, q_len, k_len,
                    q_sb, q_sh, q_ss, q_sd, dout_sb, dout_sh, dout_ss, dout_sd,
                    lse_sb, lse_sh, lse_ss, delta_sb, delta_sh, group, head_dim, head_dim_v,
                    scale, softcap, left, right, bottom_right,
                    bias, bias_sb, bias_sh, bias_si, bias_sj,
                    mask, mask_sb, mask_sh, mask_si, mask_sj,
                    slopes, slopes_sb, LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI,
                    PACKED_Q, INNER, VEC,
                    PRECISION, EVEN_D, EVEN_DV, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
            store_tile(
                dk_base,
                own * (dk_ss * VEC),
                there,
                d,
                head_dim,
                dk_sd,
                dk_acc * scale,
                EVEN_D,
                INNER,
            )
            store_tile(
                dv_base, own * (dv_ss * VEC), there, d_v, head_dim_v, dv_sd, dv_acc, EVEN_DV, INNER
            )
