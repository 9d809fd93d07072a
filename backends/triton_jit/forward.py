"""The portable mechanism, forward: one kernel for prefill, decode, packed and paged keys.

The rule kept here: a row's bits depend on its own keys and on ``block_k``, not on its neighbours:
blocks of keys start at multiples of ``block_k``, and a block under a mask does the arithmetic of a
block without one. Nothing about a call's lengths or strides is compiled in.

Algorithm: online softmax over tiles (Dao, FlashAttention-2, 2023, section 3.1); rows of one key
head packed into a tile and keys split over programs for few queries (Dao et al., Flash-Decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from portattn.backends.triton_jit.scoring import (
    LN2,
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
def _attend(
    acc, m, row_sum, poisoned, q_tile, start, end, full_low, full_high,
    k_base, v_base, k_desc, v_desc, b, head_k, k_start, table_row, block_size,
    k_sb, k_ss, k_sd, v_sb, v_ss, v_sd, head_dim, head_dim_v,
    i, head, scale, softcap, shift, left, right, q_len, k_len, offset,
    bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
    slopes, slopes_sb, column,
    MASKED: tl.constexpr, CUT: tl.constexpr, POISON: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    ALIBI: tl.constexpr, PAGED: tl.constexpr, PACKED_K: tl.constexpr, TMA: tl.constexpr,
    INNER: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The keys of [start, end) for one tile of rows: the running maximum, sum and output.

    ``MASKED``: every block is looked through for hidden keys. ``CUT``: those outside of [full_low,
    full_high) alone, as the loop comes to them. Hidden keys have a weight of 0, which a NaN or
    infinity among their values survives: with ``POISON`` the values are looked through first. That
    takes them through registers, which a loop that is to be fast has none to spare for.
    """
    PLAIN: tl.constexpr = not (SOFTCAP or BIAS or ALIBI)
    UNIT: tl.constexpr = 1.0 if PLAIN else LOG2E  # of m in base 2
    d = tl.arange(0, BLOCK_D)
    dv = column + tl.arange(0, BLOCK_DV)
    # Looking through values that tensor cores multiply is for few tiles, and not worth stages.
    RARE: tl.constexpr = POISON and q_tile.dtype.primitive_bitwidth < 32
    for j0 in tl.range(start, end, BLOCK_K, num_stages=1 if RARE else None):
        j = j0 + tl.arange(0, BLOCK_K)
        if TMA:
            at_b = 0 if PACKED_K else b
            k_tile = k_desc.load([at_b, head_k, k_start + j0, 0]).reshape([BLOCK_K, BLOCK_D])
            qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        else:
            rows = key_rows(j, k_len, table_row, block_size, k_sb * VEC, k_ss * VEC, PAGED)
            k_at = (
                k_base + rows[None, :] + (d[:, None] if INNER else d[:, None].to(tl.int64) * k_sd)
            )
            if MASKED and EVEN_D:
                k_tile = tl.load(k_at, mask=(j < k_len)[None, :], other=0.0)
            elif MASKED:
                k_tile = tl.load(
                    k_at, mask=(j < k_len)[None, :] & (d < head_dim)[:, None], other=0.0
                )
            elif EVEN_D:
                k_tile = tl.load(k_at)
            else:
                k_tile = tl.load(k_at, mask=(d < head_dim)[:, None], other=0.0)
            qk = tl.dot(q_tile, k_tile, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]

        if MASKED:
            seen = visible_places(
                i[:, None], j[None, :], b, head[:, None], shift, left, right, q_len, k_len,
                bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
                LEFT, RIGHT, BIAS, MASK,
            )  # fmt: skip
        if CUT:  # noqa: SIM102 (one question is the compiler's, the other the program's)
            if (j0 < full_low) | (j0 >= full_high):
                seen = visible_places(
                    i[:, None], j[None, :], b, head[:, None], shift, left, right, q_len, k_len,
                    bias, bias_sb, bias_sh, bias_si, bias_sj,
                    mask, mask_sb, mask_sh, mask_si, mask_sj, LEFT, RIGHT, BIAS, MASK,
                )  # fmt: skip
                qk = tl.where(seen, qk, float("-inf"))
        if PLAIN:
            # The product is rounded the same way whether the maximum is taken before or after it,
            # since scale is not negative here.
            if MASKED:
                top = tl.max(tl.where(seen, qk * (scale * LOG2E), float("-inf")), 1)
            else:
                top = tl.max(qk, 1) * (scale * LOG2E)
        else:
            inside = (i < q_len)[:, None] & (j < k_len)[None, :]
            scores, _ = natural_scores(
                qk, i[:, None], j[None, :], b, head[:, None], scale, softcap, offset,
                bias, bias_sb, bias_sh, bias_si, bias_sj, slopes, slopes_sb, inside,
                SOFTCAP, BIAS, ALIBI,
            )  # fmt: skip
            if MASKED:
                scores = tl.where(seen, scores, float("-inf"))
            top = tl.max(scores, 1)
        m_new = tl.maximum(m, top)
        # A row that has seen nothing has a maximum of -inf; -inf less -inf would be NaN.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        if PLAIN:
            powers = tl.fma(qk, scale * LOG2E, -base[:, None])
            if MASKED:
                powers = tl.where(seen, powers, float("-inf"))
        else:
            powers = (scores - base[:, None]) * UNIT
        p = tl.exp2(powers)  # [BLOCK_Q, BLOCK_K]
        alpha = tl.exp2((m - base) * UNIT)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]

        if TMA and not POISON:
            v_tile = v_desc.load([at_b, head_k, k_start + j0, 0]).reshape([BLOCK_K, BLOCK_DV])
        else:
            rows = key_rows(j, k_len, table_row, block_size, v_sb * VEC, v_ss * VEC, PAGED)
            v_at = (
                v_base + rows[:, None] + (dv[None, :] if INNER else dv[None, :].to(tl.int64) * v_sd)
            )
            if MASKED and EVEN_DV:
                v_tile = tl.load(v_at, mask=(j < k_len)[:, None], other=0.0)
            elif MASKED:
                v_tile = tl.load(
                    v_at, mask=(j < k_len)[:, None] & (dv < head_dim_v)[None, :], other=0.0
                )
            elif EVEN_DV:
                v_tile = tl.load(v_at)
            else:
                v_tile = tl.load(v_at, mask=(dv < head_dim_v)[None, :], other=0.0)
        if POISON:
            v_tile, bad = without_poison(v_tile)
            poisoned = poisoned | (tl.max((seen & bad[None, :]).to(tl.int32), 1) > 0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        m = m_new
    return acc, m, row_sum, poisoned


@triton.jit
def _store(
    acc, m, row_sum, at, i, head, b, q_start, q_len, sinks, out, lse, part, part_lse,
    o_sb, o_sh, o_ss, o_sd, lse_sb, lse_sh, lse_ss, head_dim_v, column,
    PLAIN: tl.constexpr, SINKS: tl.constexpr, PACKED_Q: tl.constexpr, SPLIT: tl.constexpr,
    LSE: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, EVEN_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """What a tile found, from ``column`` on: normalised, or as one part of several. The LSE says
    which product is fused with the sum: left to the compiler, its last bit hangs on other code."""
    if PLAIN:
        m = m * LN2  # natural from here on, as the others are
    dv = column + tl.arange(0, COLUMNS)
    if SPLIT:
        place = at.to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        # A part that saw nothing has row_sum = 0: its output is 0 and its LSE -inf.
        safe = tl.where(row_sum == 0, 1.0, row_sum)
        tl.store(part + place[:, None] * BLOCK_DV + dv[None, :], acc / safe[:, None])
        tl.store(part_lse + place, tl.fma(tl.log2(row_sum), LN2, m))
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=i < q_len, other=0.0).to(tl.float32)
            m_new = tl.maximum(m, sink)
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2((m - base) * LOG2E)
            row_sum = row_sum * alpha + tl.exp2((sink - base) * LOG2E)
            acc = acc * alpha[:, None]
            m = m_new
        safe = tl.where(row_sum == 0, 1.0, row_sum)
        result = (acc / safe[:, None]).to(out.dtype.element_ty)
        there = i < q_len
        o_rows = head * (o_sh * VEC) + (q_start + i).to(tl.int64) * (o_ss * VEC)
        o_at = out + (0 if PACKED_Q else b.to(tl.int64) * (o_sb * VEC)) + o_rows[:, None]
        o_at += dv[None, :] if INNER else dv[None, :].to(tl.int64) * o_sd
        if VEC > 1:
            o_at = tl.multiple_of(o_at, (1, 16))
        if EVEN_DV:
            tl.store(o_at, result, mask=there[:, None])
        else:
            tl.store(o_at, result, mask=there[:, None] & (dv < head_dim_v)[None, :])
        if LSE:
            at = (
                (0 if PACKED_Q else b.to(tl.int64) * lse_sb)
                + head * lse_sh
                + (q_start + i).to(tl.int64) * lse_ss
            )
            tl.store(lse + at, tl.fma(tl.log2(row_sum), LN2, m), mask=there)


@triton.jit
def _place(turn, total, tiles, head_group):
    """Which tile is the launch's number ``turn``. Tiles are counted head by head, longest rows
    first; they run so over ``head_group`` heads together, whose short ones then come last. (The
    hopper kernel has the same in Gluon, which cannot call this.)"""
    group = turn // (head_group * tiles)
    within = turn - group * (head_group * tiles)
    members = tl.minimum(head_group, total // tiles - group * head_group)
    return (group * head_group + within % members) * tiles + within // members


_NUMBERS = (
    "heads_k group pack seq_q seq_k head_dim head_dim_v total tiles head_group splits split_keys "
    "block_size left right bottom_right"
).split()
_STRIDES = (
    "q_sb q_sh q_ss q_sd k_sb k_sh k_ss k_sd v_sb v_sh v_ss v_sd o_sb o_sh o_ss o_sd "
    "lse_sb lse_sh lse_ss bias_sb bias_sh bias_si bias_sj mask_sb mask_sh mask_si mask_sj "
    "slopes_sb table_sb"
).split()
_POINTERS = (
    "q k v out lse part part_lse bias mask slopes sinks cu_q cu_k used table flags"
).split()


@triton.jit(
    do_not_specialize=[*_NUMBERS, *_STRIDES],
    do_not_specialize_on_alignment=[*_POINTERS, *_STRIDES, *_NUMBERS],
)
def forward_kernel(
    q, k, v, k_desc, v_desc, out, lse, part, part_lse,
    bias, mask, slopes, sinks, cu_q, cu_k, used, table, flags,
    scale: tl.float32, softcap: tl.float32,
    heads_k: tl.int32, group: tl.int32, pack: tl.int32,
    seq_q: tl.int32, seq_k: tl.int32, head_dim: tl.int32, head_dim_v: tl.int32,
    total: tl.int32, tiles: tl.int32, head_group: tl.int32, splits: tl.int32,
    split_keys: tl.int32, block_size: tl.int32, left: tl.int32, right: tl.int32,
    bottom_right: tl.int32,
    q_sb: tl.int64, q_sh: tl.int64, q_ss: tl.int64, q_sd: tl.int64,
    k_sb: tl.int64, k_sh: tl.int64, k_ss: tl.int64, k_sd: tl.int64,
    v_sb: tl.int64, v_sh: tl.int64, v_ss: tl.int64, v_sd: tl.int64,
    o_sb: tl.int64, o_sh: tl.int64, o_ss: tl.int64, o_sd: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, lse_ss: tl.int64,
    bias_sb: tl.int64, bias_sh: tl.int64, bias_si: tl.int64, bias_sj: tl.int64,
    mask_sb: tl.int64, mask_sh: tl.int64, mask_si: tl.int64, mask_sj: tl.int64,
    slopes_sb: tl.int64, table_sb: tl.int64,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr, USED: tl.constexpr, PAGED: tl.constexpr, PACK: tl.constexpr,
    SPLIT: tl.constexpr, LSE: tl.constexpr, FLAGS: tl.constexpr, EARLY: tl.constexpr,
    TMA: tl.constexpr, INNER: tl.constexpr, VEC: tl.constexpr, PRECISION: tl.constexpr,
    NEGATIVE: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One tile of query rows against the keys of one split.

    Strides and head dims come in units of ``VEC`` elements, which tells the compiler that whole
    vectors are aligned and lie inside or outside as one. With ``PACK`` the rows of a key head's
    ``pack`` query heads share a tile, position by position; without it a tile holds rows of one
    query head. ``SPLIT``: partial results in float32 go to ``part`` and ``part_lse``, to be joined
    by `combine_kernel`. ``FLAGS``: a tile does something only where a flag is set that speaks for
    FLAGS rows of which it has some; flags are rarely set, so a program looks after REPAIRED of the
    ``total`` tiles.
    """
    if EARLY and SPLIT:
        gdc_launch_dependents()
    head_dim, head_dim_v = head_dim * VEC, head_dim_v * VEC
    WHOLE: tl.constexpr = not (BIAS or MASK)
    PLAIN: tl.constexpr = not (SOFTCAP or BIAS or ALIBI)
    CHUNK: tl.constexpr = min(BLOCK_DV, 64)
    # float32 has its values in registers anyway: masked blocks look through them at once.
    LOOK: tl.constexpr = q.dtype.element_ty.primitive_bitwidth == 32
    # Where loads need no mask one loop takes all blocks: a second one would start from nothing.
    CUT: tl.constexpr = TMA and WHOLE and PLAIN and not (LOOK or SPLIT or PACK)
    STEPS: tl.constexpr = REPAIRED if FLAGS else 1
    # A negative scale changes q's sign, exactly: the maximum of products is that of scores then.
    if NEGATIVE:
        scale = -scale
    # The whole grid in one axis: the others end at 65,535.
    begin = tl.program_id(0) * STEPS
    steps = STEPS
    if FLAGS:
        some = marked(flags, begin + tl.arange(0, STEPS), total, tiles, seq_q, True, FLAGS, BLOCK_Q)
        steps = tl.where(tl.max(some.to(tl.int32), 0) > 0, STEPS, 0)
    for step in range(steps):
        at = begin + step
        if RIGHT and not (FLAGS or SPLIT):
            at = _place(at, total, tiles, head_group)
        tile = tiles - 1 - at % tiles
        rest = at // tiles
        split = rest % splits
        rest = rest // splits
        heads = heads_k if PACK else heads_k * group
        head0 = rest % heads
        b = rest // heads
        head_k = head0 if PACK else head0 // group

        q_start, q_len, k_start, k_len = lengths(
            b, cu_q, cu_k, used, seq_q, seq_k, PACKED_Q, PACKED_K, USED
        )
        rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
        if PACK:
            i = rows // pack
            head = (head0 * pack + rows % pack).to(tl.int64)
            first, last = tile * BLOCK_Q // pack, (tile * BLOCK_Q + BLOCK_Q - 1) // pack
        else:
            i = rows
            head = (head0 + tl.zeros_like(rows)).to(tl.int64)
            first, last = tile * BLOCK_Q, tile * BLOCK_Q + BLOCK_Q - 1
        if FLAGS:
            one = marked(flags, at, total, tiles, seq_q, True, FLAGS, BLOCK_Q)
            first = tl.where(one, first, q_len)
        if first < q_len:  # else nothing of it is read, of a split either
            last = tl.minimum(last, q_len - 1)
            offset = k_len - q_len
            shift = offset * bottom_right

            low, full_low, full_high, high = key_range(
                first, last, shift, left, right, k_len, LEFT, RIGHT, WHOLE, BLOCK_K
            )
            if SPLIT:
                end = (split + 1) * split_keys
                low, high = tl.maximum(low, split * split_keys), tl.minimum(high, end)
                full_low = tl.minimum(tl.maximum(full_low, low), high)
                full_high = tl.maximum(tl.minimum(full_high, end), full_low)

            d = tl.arange(0, BLOCK_D)
            at_q = q + (0 if PACKED_Q else b.to(tl.int64) * (q_sb * VEC))
            q_rows = head * (q_sh * VEC) + (q_start + i).to(tl.int64) * (q_ss * VEC)
            q_at = (
                at_q + q_rows[:, None] + (d[None, :] if INNER else d[None, :].to(tl.int64) * q_sd)
            )
            if VEC > 1:
                q_at = tl.multiple_of(q_at, (1, 16))
            if EVEN_D:
                q_tile = tl.load(q_at, mask=(i < q_len)[:, None], other=0.0)
            else:
                q_tile = tl.load(
                    q_at, mask=(i < q_len)[:, None] & (d < head_dim)[None, :], other=0.0
                )
            if NEGATIVE:
                q_tile = -q_tile

            k_base = k + head_k.to(tl.int64) * (k_sh * VEC)
            v_base = v + head_k.to(tl.int64) * (v_sh * VEC)
            table_row = table
            if PAGED:
                table_row = table + b.to(tl.int64) * table_sb
            elif PACKED_K:
                k_base += k_start.to(tl.int64) * (k_ss * VEC)
                v_base += k_start.to(tl.int64) * (v_ss * VEC)
            else:
                k_base += b.to(tl.int64) * (k_sb * VEC)
                v_base += b.to(tl.int64) * (v_sb * VEC)
            if VEC > 1:
                k_base = tl.multiple_of(k_base, 16)
                v_base = tl.multiple_of(v_base, 16)

            # Whether a NaN or infinity is in the way; a tile that is repaired has one.
            careful = True
            if not FLAGS:
                acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
                m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
                row_sum = tl.zeros([BLOCK_Q], tl.float32)
                poisoned = tl.zeros([BLOCK_Q], tl.int32) > 0
                # Before, in and behind the blocks that one loop takes as they are.
                inner, outer = (low, high) if CUT else (full_low, full_high)
                for run in tl.static_range(3):
                    start = low if run == 0 else inner if run == 1 else outer
                    end = inner if run == 0 else outer if run == 1 else high
                    if WHOLE if run == 1 else not CUT and (LEFT or run == 2):
                        acc, m, row_sum, poisoned = _attend(
                            acc, m, row_sum, poisoned, q_tile, start, end, full_low, full_high,
                            k_base, v_base, k_desc, v_desc, b, head_k, k_start, table_row,
                            block_size, k_sb, k_ss, k_sd, v_sb, v_ss, v_sd, head_dim, head_dim_v,
                            i, head, scale, softcap, shift, left, right, q_len, k_len, offset,
                            bias, bias_sb, bias_sh, bias_si, bias_sj,
                            mask, mask_sb, mask_sh, mask_si, mask_sj,
                            slopes, slopes_sb, 0, run != 1, CUT, LOOK and run != 1,
                            LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, PAGED, PACKED_K, TMA, INNER,
                            VEC, PRECISION, EVEN_D, EVEN_DV, BLOCK_K, BLOCK_D, BLOCK_DV,
                        )  # fmt: skip
                careful = False
                if LOOK:
                    acc = tl.where(poisoned[:, None], float("nan"), acc)
                else:
                    careful = tl.max(tl.max((acc - acc != 0).to(tl.int32), 1), 0) > 0
                if not careful:
                    _store(
                        acc, m, row_sum, at, i, head, b, q_start, q_len, sinks, out,
                        lse, part, part_lse,
                        o_sb, o_sh, o_ss, o_sd, lse_sb, lse_sh, lse_ss, head_dim_v, 0,
                        PLAIN, SINKS, PACKED_Q, SPLIT, LSE, INNER, VEC, EVEN_DV, BLOCK_Q, BLOCK_DV,
                        BLOCK_DV,
                    )  # fmt: skip
            if careful:
                # Few columns of the values at a time: looked through, all of them fill the
                # registers, and the compiler then runs every product of the kernel one by one.
                for column in tl.range(0, BLOCK_DV, CHUNK, num_stages=1):
                    few = tl.zeros([BLOCK_Q, CHUNK], tl.float32)
                    few_m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
                    few_sum = tl.zeros([BLOCK_Q], tl.float32)
                    bad = tl.zeros([BLOCK_Q], tl.int32) > 0
                    few, few_m, few_sum, bad = _attend(
                        few, few_m, few_sum, bad, q_tile, low, high, full_low, full_high,
                        k_base, v_base, k_desc, v_desc, b, head_k, k_start, table_row, block_size,
                        k_sb, k_ss, k_sd, v_sb, v_ss, v_sd, head_dim, head_dim_v,
                        i, head, scale, softcap, shift, left, right, q_len, k_len, offset,
                        bias, bias_sb, bias_sh, bias_si, bias_sj,
                        mask, mask_sb, mask_sh, mask_si, mask_sj,
                        slopes, slopes_sb, column, True, False, True,
                        LEFT, RIGHT, SOFTCAP, BIAS, MASK, ALIBI, PAGED, PACKED_K, TMA, INNER, VEC,
                        PRECISION, EVEN_D, EVEN_DV, BLOCK_K, BLOCK_D, CHUNK,
                    )  # fmt: skip
                    few = tl.where(bad[:, None], float("nan"), few)
                    _store(
                        few, few_m, few_sum, at, i, head, b, q_start, q_len, sinks, out,
                        lse, part, part_lse,
                        o_sb, o_sh, o_ss, o_sd, lse_sb, lse_sh, lse_ss, head_dim_v, column,
                        PLAIN, SINKS, PACKED_Q, SPLIT, LSE, INNER, VEC, EVEN_DV, BLOCK_Q, CHUNK,
                        BLOCK_DV,
                    )  # fmt: skip


@triton.jit(
    do_not_specialize=["heads_k", "group", "pack", "seq_q", "head_dim_v", "tiles", "splits",
                       "o_sb", "o_sh", "o_ss", "o_sd", "lse_sb", "lse_sh", "lse_ss"],
    do_not_specialize_on_alignment=["part", "part_lse", "out", "lse", "sinks", "cu_q"],
)  # fmt: skip
def combine_kernel(
    part, part_lse, out, lse, sinks, cu_q,
    heads_k: tl.int32, group: tl.int32, pack: tl.int32, seq_q: tl.int32, head_dim_v: tl.int32,
    tiles: tl.int32, splits: tl.int32,
    o_sb: tl.int64, o_sh: tl.int64, o_ss: tl.int64, o_sd: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, lse_ss: tl.int64,
    SINKS: tl.constexpr, PACKED_Q: tl.constexpr, PACK: tl.constexpr, LSE: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Join the splits of one query row: weights exp(part_lse - maximum), summed in split order.
    ``EARLY``: it is started while `forward_kernel` runs, and waits for it."""
    if EARLY:
        gdc_wait()
    rows_of_head = seq_q * pack if PACK else seq_q
    pid = tl.program_id(0)
    row = pid % rows_of_head
    rest = pid // rows_of_head
    heads = heads_k if PACK else heads_k * group
    head0 = rest % heads
    b = (rest // heads).to(tl.int64)
    i, head = row, head0
    if PACK:
        i = row // pack
        head = head0 * pack + row % pack
    q_start, q_len = 0, seq_q
    if PACKED_Q:
        q_start = tl.load(cu_q + b)
        q_len = tl.load(cu_q + b + 1) - q_start
    if i >= q_len:
        return
    # `forward_kernel` counts its tiles from the last one.
    tile = tiles - 1 - row // BLOCK_Q
    first = rest.to(tl.int64) * splits * tiles + tile
    s = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_DV)
    m = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for s0 in range(0, splits, BLOCK_S):
        place = (first + (s0 + s).to(tl.int64) * tiles) * BLOCK_Q + row % BLOCK_Q
        there = s0 + s < splits
        part_m = tl.load(part_lse + place, mask=there, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(part_m, 0))
        # a NaN must stay one, and the maximum of numbers and NaN is a number
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2((part_m - base) * LOG2E)
        alpha = tl.exp2((m - base) * LOG2E)
        values = tl.load(
            part + place[:, None] * BLOCK_DV + dv[None, :], mask=there[:, None], other=0.0
        )
        # A part that saw nothing holds zeros; its weight is 0.
        acc = acc * alpha + tl.sum(values * weights[:, None], 0)
        row_sum = row_sum * alpha + tl.sum(weights, 0)
        m = m_new
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        m_new = tl.maximum(m, sink)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m - base) * LOG2E)
        row_sum = row_sum * alpha + tl.exp2((sink - base) * LOG2E)
        acc = acc * alpha
        m = m_new
    safe = tl.where(row_sum == 0, 1.0, row_sum)
    at = (
        (0 if PACKED_Q else b * o_sb) + head.to(tl.int64) * o_sh + (q_start + i).to(tl.int64) * o_ss
    )
    value = (acc / safe).to(out.dtype.element_ty)
    tl.store(out + at + dv.to(tl.int64) * o_sd, value, mask=dv < head_dim_v)
    if LSE:
        at = (
            (0 if PACKED_Q else b * lse_sb)
            + head.to(tl.int64) * lse_sh
            + (q_start + i).to(tl.int64) * lse_ss
        )
        tl.store(lse + at, tl.fma(tl.log2(row_sum), LN2, m))
