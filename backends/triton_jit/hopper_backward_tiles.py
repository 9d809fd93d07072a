"""What the backward kernels on Hopper share: who owns which tile, loading rows, storing a tile.

The rule kept here: tensors are (B, H, S, D) and a tile lies inside one (batch, head), so that rows
and columns beyond its end read as zero, and never as another sequence.
"""

# Annotations stay real objects here (no `from __future__`): Triton reads them to type arguments.
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portattn.backends.triton_jit.hopper_parts import load_box, rows_with_nan, store_rows

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def turns(n_tiles, n_heads, CAUSAL: gl.constexpr):
    """How many tiles this program takes, one after another (see `place`)."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    total = n_tiles * n_heads
    if CAUSAL:
        pairs = n_heads // 2 * n_tiles + n_heads % 2 * gl.cdiv(n_tiles, 2)
        own = (pairs - program + programs - 1) // programs
        return gl.where(total > programs, 2 * own, 1)
    else:
        return (total - program + programs - 1) // programs


@gluon.jit
def place(turn, n_tiles, n_heads, CAUSAL: gl.constexpr):
    """Tile and head of this program's next turn, heads one after another, so that what a head's
    tiles stream stays in the L2 cache. Under a causal mask tiles shrink from the first to the last:
    a program takes one of a head, and as far from the end the next head's, which make as much work
    together as any other pair. An odd last head makes pairs of its own, and does the middle tile of
    an odd number twice."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    index = turn * programs + program
    head = index // n_tiles
    tile = index - head * n_tiles
    if CAUSAL:  # noqa: SIM102 (one question is the compiler's, the other the program's)
        if n_tiles * n_heads > programs:
            pair = turn // 2 * programs + program
            two = pair // n_tiles
            head = gl.minimum(2 * two + turn % 2, n_heads - 1)
            tile = pair - two * n_tiles
            if turn % 2 == 1:
                tile = n_tiles - 1 - tile
    return tile, head


@gluon.jit
def key_tile(
    turn, seq_q, seq_k, heads_k, n_heads, causal_offset,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tile, head of all, its batch, and how many query blocks see the tile, and see it whole."""
    n_q_blocks = gl.cdiv(seq_q, BLOCK_Q)
    # Under a causal mask the first keys are seen by most queries: tile 0 has the most work.
    tile, head = place(turn, gl.cdiv(seq_k, BLOCK_K), n_heads, CAUSAL)
    n_blocks = n_q_blocks
    n_unmasked = n_q_blocks
    if CAUSAL:
        key_row = tile * BLOCK_K
        first = gl.maximum(key_row - causal_offset, 0) // BLOCK_Q
        first_whole = gl.cdiv(gl.maximum(key_row + (BLOCK_K - 1) - causal_offset, 0), BLOCK_Q)
        # A tile that no query sees still runs one block, all masked, which writes its zeros.
        n_blocks = n_q_blocks - gl.minimum(first, n_q_blocks - 1)
        n_unmasked = gl.minimum(gl.maximum(n_q_blocks - first_whole, 1), n_blocks)
    return tile, head, head // heads_k, n_blocks, n_unmasked


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
def store_tile(
    out, flag_ptr, acc, batch, head, first_row, n_rows, n_cols,
    VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Store the rows and columns that exist of one head's tile; with FLAGS, write 1 where one is
    NaN or infinite.

    ``out``: an address and its four strides. VECTOR > 1: columns are adjacent, and `n_cols` and the
    other strides count that many elements.
    """
    out_ptr, batch_stride, head_stride, row_stride, col_stride = out
    rows_left = n_rows - first_row
    if FLAGS:
        # Columns beyond the head dim hold zeros, or NaN where the row's other columns do. Rows
        # write the same value to one address, which is why the order does not matter.
        wrong = rows_with_nan(acc, out_ptr.dtype.element_ty)
        rows = gl.arange(0, acc.shape[0], wrong.type.layout)
        gl.store(flag_ptr + rows * 0, wrong, mask=(wrong != 0) & (rows < rows_left))
    base = out_ptr + (batch * batch_stride + head * head_stride) * VECTOR
    base += first_row.to(gl.int64) * (row_stride * VECTOR)
    store_rows(base, acc, rows_left, n_cols, row_stride, col_stride, VECTOR)


@gluon.jit
def load_rows(desc, batch, head, row, barrier, shared):
    mbarrier.expect(barrier, desc.block_type.nbytes)
    load_box(desc, [batch, head, row, 0], barrier, shared)
