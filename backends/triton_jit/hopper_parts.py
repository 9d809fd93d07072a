"""What all Hopper kernels share: storing rows, and values that stay where they are needed.

The rule kept here: nothing here knows attention.
"""

# Annotations stay real objects here (no `from __future__`): Triton reads them to type arguments.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 renamed the loader.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def per_tile(value):
    """The value itself, in a way that keeps what is computed from it inside the tile's epilogue.

    Addresses and masks hoisted out of the loop over tiles would live in registers through the
    loops over keys, which have none to spare.
    """
    if value.dtype == gl.int64:
        kept = gl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [value], dtype=gl.int64, is_pure=False, pack=1
        )
    else:
        kept = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
        )
    return kept


_TO_QUADS = gl.constexpr("""
{
.reg .pred odd, high;
.reg .b32 lane, x, y;
mov.u32 lane, %laneid;
and.b32 x, lane, 1;
setp.ne.b32 odd, x, 0;
and.b32 y, lane, 2;
setp.ne.b32 high, y, 0;
selp.b32 x, $4, $5, odd;
selp.b32 y, $6, $7, odd;
shfl.sync.bfly.b32 x, x, 1, 0x1f, 0xffffffff;
shfl.sync.bfly.b32 y, y, 1, 0x1f, 0xffffffff;
selp.b32 $0, x, $4, odd;
selp.b32 $1, $5, x, odd;
selp.b32 $2, y, $6, odd;
selp.b32 $3, $7, y, odd;
selp.b32 x, $0, $2, high;
selp.b32 y, $1, $3, high;
shfl.sync.bfly.b32 x, x, 2, 0x1f, 0xffffffff;
shfl.sync.bfly.b32 y, y, 2, 0x1f, 0xffffffff;
selp.b32 $0, x, $0, high;
selp.b32 $2, $2, x, high;
selp.b32 $1, y, $1, high;
selp.b32 $3, $3, y, high;
}
""")


@gluon.constexpr_function
def _word_layout(columns):
    """Of words [64, columns] a thread holds 4 neighbours, first of all in its registers; rows lie
    as in an accumulator."""
    groups = [[0, 1 << bit] for bit in range(4, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *groups, [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _vectors(values, dtype: gl.constexpr):
    """Float32 values [64, columns] in an accumulator's layout, rounded to 16 bits, as words
    [64, columns / 2] of which a thread holds 4 neighbours.

    A quad shares a row: of each 8 columns a thread has 2, one word. Four threads hand each other
    four words, through registers, so that one store takes what four would.
    """
    ROWS: gl.constexpr = values.shape[0]
    COLUMNS: gl.constexpr = values.shape[1]
    low, high = gl.split(values.reshape([ROWS, COLUMNS // 2, 2]))
    if dtype == gl.bfloat16:
        ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    words = gl.inline_asm_elementwise(
        ROUND, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )
    # Columns of words: 16 to a group, of which thread t of the quad has 4 i + t.
    parts = words.reshape([ROWS, COLUMNS // 32, 2, 2, 4]).permute((0, 1, 4, 2, 3))
    even, odd = gl.split(parts)
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        _TO_QUADS, "=&r,=&r,=&r,=&r,r,r,r,r", [w0, w1, w2, w3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape([ROWS, COLUMNS // 2])
    return gl.convert_layout(words, _word_layout(COLUMNS // 2))  # another order of registers


@gluon.jit
def store_rows(base, values, rows_left, columns, row_stride, col_stride, VECTOR: gl.constexpr):
    """Store the rows and columns that exist of float32 values [64, columns], from the first row's
    address on; 16 bits each.

    VECTOR 8: columns are adjacent, and `columns` and `row_stride` count that many elements.
    """
    if VECTOR == 8:
        words = _vectors(values, base.dtype.element_ty)
        layout: gl.constexpr = words.type.layout
        rows = gl.arange(0, words.shape[0], gl.SliceLayout(1, layout))
        cols = gl.arange(0, words.shape[1], gl.SliceLayout(0, layout))
        row_ptrs = base.to(gl.pointer_type(gl.int32)) + rows.to(gl.int64) * (
            per_tile(row_stride) * 4
        )
        ptrs = row_ptrs[:, None] + cols[None, :]
        # Whether a pointer is aligned is not known inside a warp-specialised function.
        ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [1, 16]), [1, 4])
        inside = (rows < rows_left)[:, None] & (cols < per_tile(columns) * 4)[None, :]
        gl.store(ptrs, words, mask=inside)
    else:
        layout: gl.constexpr = values.type.layout
        rows = gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
        cols = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
        row_ptrs = base + rows.to(gl.int64) * per_tile(row_stride)
        ptrs = row_ptrs[:, None] + (cols.to(gl.int64) * per_tile(col_stride))[None, :]
        inside = (rows < rows_left)[:, None] & (cols < per_tile(columns))[None, :]
        gl.store(ptrs, values.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def rows_with_nan(values, dtype: gl.constexpr):
    """Rows of float32 values [64, columns] that hold a NaN or infinity once they are rounded:
    int32 [64], 0 or 1. Float16 may overflow."""
    finite = gl.abs(values.to(dtype).to(gl.float32)) < float("inf")
    return gl.max(gl.where(finite, 0, 1), 1)
