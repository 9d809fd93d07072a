"""What both backward kernels on Hopper share: who owns which tile, loading rows, storing a tile.

The rule kept here: tensors are (B, H, S, D) and a tile lies inside one (batch, head), so that rows
and columns beyond its end read as zero, and never as another sequence.
"""

# Annotations stay real objects here (no `from __future__`): Triton reads them to type arguments.
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


# Triton 3.9 renamed the loader.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def tile_and_head(n_tiles, n_heads, heads_at_once):
    """Tile and head of this program: `heads_at_once` heads walk their tiles side by side.

    Their streamed operands share the L2 cache while the tiles with most work start first.
    """
    program = gl.program_id(0)
    section = program // (heads_at_once * n_tiles)
    first_head = section * heads_at_once
    rest = program - first_head * n_tiles
    heads = gl.minimum(heads_at_once, n_heads - first_head)
    return rest // heads, first_head + rest % heads


@gluon.jit
def store_tile(
    out_ptr, flag_ptr, acc, first_row, n_rows, n_cols, row_stride, col_stride,
    VECTOR: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Store the rows and columns that exist; with FLAGS, write 1 where one is NaN or infinite.

    VECTOR > 1: columns are adjacent, and `n_cols` and `row_stride` count that many elements.
    """
    layout: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.type.shape[0]
    COLS: gl.constexpr = acc.type.shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    inside = (rows < n_rows - first_row)[:, None] & (cols < n_cols * VECTOR)[None, :]
    row_ptrs = out_ptr + (rows + first_row).to(gl.int64) * (row_stride * VECTOR)
    if VECTOR > 1:
        ptrs = row_ptrs[:, None] + cols[None, :]
        # Whether a pointer is aligned is not known inside a warp-specialised function.
        ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [1, 2 * VECTOR]), [1, VECTOR])
    else:
        ptrs = row_ptrs[:, None] + (cols.to(gl.int64) * col_stride)[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    gl.store(ptrs, out, mask=inside)
    if FLAGS:
        # Rows write the same value to one address, which is why the order does not matter.
        stored = out.to(gl.float32)
        finite = (stored < float("inf")) & (stored > -float("inf"))
        bad_rows = gl.max(gl.where(inside & (finite == 0), 1, 0), 1)
        here = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, layout))
        gl.store(flag_ptr + here, bad_rows, mask=bad_rows != 0)


@gluon.jit
def load_rows(desc, batch, head, row, barrier, shared):
    mbarrier.expect(barrier, desc.block_type.nbytes)
    load_box(desc, [batch, head, row, 0], barrier, shared)
