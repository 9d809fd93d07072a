"""What a score is: the parts of the contract that stand between q·k and the softmax.

The rule kept here: forward and backward kernels make scores with the same functions, in the same
order (scale, softcap, bias, ALiBi, then what hides keys). Scores that are products and nothing else
are held in base 2, times log2(e), so that the softmax is one fused multiply-add and ``exp2``;
scores with a softcap, a bias or ALiBi are held in natural units.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
REPAIRED = tl.constexpr(32)
"""Tiles that one program looks after in a launch that repairs what flags mark: few are marked, and
starting a program takes longer than finding that it has nothing to do."""


@triton.jit
def lengths(
    b,
    cu_q,
    cu_k,
    used,
    seq_q,
    seq_k,
    PACKED_Q: tl.constexpr,
    PACKED_K: tl.constexpr,
    USED: tl.constexpr,
):
    """Where sequence ``b`` starts among packed rows, and its lengths: (q_start, q_len, k_start,
    k_len). Keys at and beyond k_len do not exist for any alignment."""
    q_start, q_len = 0, seq_q
    k_start, k_len = 0, seq_k
    if PACKED_Q:
        q_start = tl.load(cu_q + b)
        q_len = tl.load(cu_q + b + 1) - q_start
    if PACKED_K:
        k_start = tl.load(cu_k + b)
        k_len = tl.load(cu_k + b + 1) - k_start
    if USED:
        k_len = tl.load(used + b)
    return q_start, q_len, k_start, k_len


@triton.jit
def marked(
    flags, at, total, tiles, length, REVERSED: tl.constexpr, FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether a flag is set that speaks for some row of tile ``at`` out of ``total``, ``tiles`` for
    each head's ``length`` rows. A flag speaks for FLAGS rows, no fewer than half of the BLOCK of a
    tile, which so falls under two at most. ``REVERSED``: a head's last rows are its first tile."""
    tile = at % tiles
    if REVERSED:
        tile = tiles - 1 - tile
    count = (length + FLAGS - 1) // FLAGS
    there = at < total
    row = flags + at // tiles * count
    one = tl.load(row + tile * BLOCK // FLAGS, mask=there, other=0)
    last = tl.minimum((tile * BLOCK + BLOCK - 1) // FLAGS, count - 1)
    return (one | tl.load(row + last, mask=there, other=0)) != 0


@triton.jit
def key_rows(j, k_len, table_row, block_size, stride_block, stride_s, PAGED: tl.constexpr):
    """Offsets of the keys ``j`` of a sequence, in elements, 64 bits. No entry of the block table
    beyond the used keys is read."""
    if PAGED:
        block = tl.load(table_row + j // block_size, mask=j < k_len, other=0).to(tl.int64)
        rows = block * stride_block + (j % block_size).to(tl.int64) * stride_s
    else:
        rows = j.to(tl.int64) * stride_s
    return rows


@triton.jit
def hyperbolic_tangent(x):
    """tanh to float32's accuracy: the exponential cancels near 0, where five terms of the series
    suffice. The hardware's tanh.approx has 11 bits."""
    square = x * x
    series = x + x * square * (
        -0.33333333 + square * (0.13333334 + square * (-0.05396825 + square * 0.02186949))
    )
    whole = 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * LOG2E * tl.minimum(tl.abs(x), 20.0)))
    whole = tl.where(x < 0, -whole, whole)
    # a NaN would be lost in the minimum above
    whole = tl.where(x == x, whole, x)
    return tl.where(tl.abs(x) < 0.25, series, whole)


@triton.jit
def natural_scores(
    qk, i, j, b, head, scale, softcap, offset,
    bias, bias_sb, bias_sh, bias_si, bias_sj, slopes, slopes_sb, inside,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Scores out of products, and the softcap's tanh (the products where there is none). In natural
    units: in base 2 a bias of the lowest finite number would overflow and hide its key.

    ``i``, ``j`` and ``head`` broadcast to qk's shape, whichever way it lies; ``offset`` is k_len -
    q_len; ``inside`` says which places exist.
    """
    cap = qk
    if SOFTCAP:
        cap = hyperbolic_tangent(qk * (scale / softcap))
        scores = cap * softcap
    else:
        scores = qk * scale
    if BIAS:
        at = b.to(tl.int64) * bias_sb + head * bias_sh
        at += i.to(tl.int64) * bias_si + j.to(tl.int64) * bias_sj
        scores += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if ALIBI:
        slope = tl.load(slopes + b.to(tl.int64) * slopes_sb + head)
        scores -= slope * tl.abs((i + offset - j).to(tl.float32))
    return scores, cap


@triton.jit
def visible_places(
    i, j, b, head, shift, left, right, q_len, k_len,
    bias, bias_sb, bias_sh, bias_si, bias_sj, mask, mask_sb, mask_sh, mask_si, mask_sj,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Which keys ``j`` the queries ``i`` see: lengths, causal and window (``left`` and ``right``
    keys of the position i + shift), the mask, and a bias of -inf, which hides as a mask does."""
    seen = (i < q_len) & (j < k_len)
    if RIGHT:
        seen = seen & (j <= i + shift + right)
    if LEFT:
        seen = seen & (j >= i + shift - left)
    if MASK:
        at = (
            b.to(tl.int64) * mask_sb
            + head * mask_sh
            + i.to(tl.int64) * mask_si
            + j.to(tl.int64) * mask_sj
        )
        seen = seen & (tl.load(mask + at, mask=seen, other=0) != 0)
    if BIAS:
        at = (
            b.to(tl.int64) * bias_sb
            + head * bias_sh
            + i.to(tl.int64) * bias_si
            + j.to(tl.int64) * bias_sj
        )
        seen = seen & (tl.load(bias + at, mask=seen, other=0.0).to(tl.float32) != float("-inf"))
    return seen


@triton.jit
def key_range(
    first,
    last,
    shift,
    left,
    right,
    k_len,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The keys that queries ``first`` to ``last`` (both included) touch, in whole blocks: (low,
    full_low, full_high, high). Blocks of [full_low, full_high) are seen whole by every query; the
    others need a mask. ``WHOLE`` False: every block needs one."""
    low, high = 0, k_len
    full_low, full_high = 0, k_len
    if RIGHT:
        high = tl.minimum(high, last + shift + right + 1)
        full_high = tl.minimum(full_high, first + shift + right + 1)
    if LEFT:
        low = tl.maximum(low, first + shift - left)
        full_low = tl.maximum(full_low, last + shift - left)
    high = tl.maximum(high, 0)
    low = tl.minimum(low, high) // BLOCK_K * BLOCK_K
    full_low = (full_low + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    full_high = tl.maximum(full_high, 0) // BLOCK_K * BLOCK_K
    if not WHOLE:
        full_high = full_low
    full_low = tl.minimum(tl.maximum(full_low, low), high)
    full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high


@triton.jit
def without_poison(x):
    """``x`` with NaN and infinities as 0, and which rows had one: a hidden key's weight of 0 times
    its value must be 0."""
    good = x - x == 0
    return tl.where(good, x, 0.0), tl.max((good == 0).to(tl.int32), 1) > 0
