"""The kernels of the hopper mechanism, launched as they are, against float64 on the GPU; and the
repair of what they cannot know.

The rule kept here: outputs start as NaN within larger buffers, so that what is not written shows,
and what is written beside them; cases share the few configurations that are compiled.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import portattn  # noqa: E402
from portattn.backends.triton_jit import (  # noqa: E402
    BACKEND,
    hopper_backward_plan,
    hopper_plan,
    hopper_policy,
    planner,
)

pytestmark = pytest.mark.gpu

F16, BF16, F32, F64, I32 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32
OUT, GRADIENT = {F16: 1.6e-3, BF16: 1.2e-2}, {F16: 4e-3, BF16: 2e-2}
LENGTHS = [(1, 1), (1, 2048), (63, 129), (129, 63), (1000, 1), (128, 128)]
LENGTHS += [(1000, 2048), (2048, 1000)]
DIAGONALS = ("full", "bottom_right", "top_left")


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    """The kernels are there for one architecture, in the Gluon of one Triton."""
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"hopper runs on sm_90; this is sm_{capability[0]}{capability[1]}")
    release = tuple(int(n) for n in triton.__version__.split(".")[:2])
    if not planner.GLUON[0] <= release < planner.GLUON[1]:
        pytest.skip(f"hopper does not speak the Gluon of Triton {triton.__version__}")


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    BACKEND.force_mechanism(None)
    gc.collect()
    torch.cuda.empty_cache()


def normal(batch: int, heads: int, length: int, dim: int, dtype: Any, layout: str) -> Any:
    """(B, H, S, D), as it lies in a call of that layout; "fused": between its neighbours of one
    projection; "wide": in the middle of longer rows; "shared": one for the whole batch."""
    if layout == "bhsd":
        return torch.randn(batch, heads, length, dim, device="cuda", dtype=dtype)
    if layout == "shared":
        one = torch.randn(1, heads, length, dim, device="cuda", dtype=dtype)
        return one.expand(batch, heads, length, dim)
    if layout == "fused":
        x = torch.randn(batch, length, 3, heads, dim, device="cuda", dtype=dtype)[:, :, 1]
    elif layout == "wide":
        x = torch.randn(batch, length, heads, dim + 16, device="cuda", dtype=dtype)[..., 8:-8]
    else:
        x = torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype)
    return x.transpose(1, 2)


def room(like: Any, layout: str) -> tuple[Any, Any]:
    """A buffer of NaN and a view in it, of the shape of ``like``."""
    b, h, s, d = like.shape
    made = {"device": "cuda", "dtype": like.dtype}
    if layout == "odd":  # nothing starts at 16 bytes
        buffer = torch.full((b, h, s + 3, d + 3), math.nan, **made)
        return buffer, buffer[:, :, 1 : s + 1, 1 : d + 1]
    if layout == "turned":
        buffer = torch.full((b, h, d + 3, s + 3), math.nan, **made)
        return buffer, buffer.transpose(2, 3)[:, :, :s, :d]
    if layout == "sparse":
        buffer = torch.full((b, s, h, 2 * d), math.nan, **made)
        return buffer, buffer.transpose(1, 2)[..., ::2]
    if layout == "bhsd":
        buffer = torch.full((b, h, s + 3, d + 8), math.nan, **made)
        return buffer, buffer[:, :, :s, :d]
    buffer = torch.full((b, s + 3, h, d + 8), math.nan, **made)
    return buffer, buffer.transpose(1, 2)[:, :, :s, :d]


def offset_of(diagonal: str | int, seq_q: int, seq_k: int) -> int | None:
    if isinstance(diagonal, int):
        return diagonal
    return {"full": None, "top_left": 0, "bottom_right": seq_k - seq_q}[diagonal]


def exact(q: Any, k: Any, v: Any, scale: float, offset: int | None) -> tuple[Any, Any, Any]:
    """float64 weights, output and LSE."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(F64), *(x.to(F64).repeat_interleave(group, 1) for x in (k, v))
    score = q @ k.mT * scale
    if offset is not None:
        seen = torch.ones(score.shape[-2:], dtype=torch.bool, device="cuda").tril(offset)
        score = score.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(score, -1)
    p = torch.exp(score - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return p, p @ v, lse


def exact_gradients(
    q: Any, k: Any, v: Any, dout: Any, scale: float, offset: int | None
) -> tuple[Any, ...]:
    """float64 LSE, delta, dq, dk and dv."""
    p, out, lse = exact(q, k, v, scale, offset)
    group, dout = q.shape[1] // k.shape[1], dout.to(F64)
    delta = (dout * out).sum(-1)
    ds = p * (dout @ v.to(F64).repeat_interleave(group, 1).mT - delta[..., None]) * scale

    def summed(x: Any) -> Any:
        return x.unflatten(1, (-1, group)).sum(2)

    dq = ds @ k.to(F64).repeat_interleave(group, 1)
    return lse, delta, dq, summed(ds.mT @ q.to(F64)), summed(p.mT @ dout)


def near(out: Any, lse: Any, want: tuple[Any, Any, Any]) -> None:
    bound = OUT[out.dtype] * max(1.0, float(want[1].abs().max()))
    assert float((out.to(F64) - want[1]).abs().max()) <= bound
    if lse is not None:
        torch.testing.assert_close(lse.to(F64), want[2], atol=1e-3, rtol=0)


# ---- forward -------------------------------------------------------------------------------------
def forward(
    heads: tuple[int, int], lengths: tuple[int, int], dim: int, diagonal: str | int, *,
    batch: int = 2, dim_v: int | None = None, dtype: Any = BF16, layout: str = "bshd",
    keys: str = "", into: str = "", at: int | None = None, grid: int = 0, group: int = 4,
    scale: float | None = None, alone: bool = False,
) -> None:  # fmt: skip
    """Launch once; ``at`` names the tile, None being that for so many keys; ``grid`` 0 is a program
    for each tile of rows, ``alone`` asks for no LSE and no flags."""
    from portattn.backends.triton_jit import hopper_forward

    dim_v = dim_v or dim
    q = normal(batch, heads[0], lengths[0], dim, dtype, layout)
    k = normal(batch, heads[1], lengths[1], dim, dtype, keys or layout)
    v = normal(batch, heads[1], lengths[1], dim_v, dtype, keys or layout)
    scale = dim**-0.5 if scale is None else scale
    pad = hopper_plan.head_dim_pad(dim, dim_v)
    if at is None:
        shape = hopper_plan.forward_shapes(pad, lengths[1], causal=diagonal != "full")[0]
    else:
        shape = hopper_plan.FORWARD_TILES[pad][at][0]
    tile = hopper_policy.ForwardTile(pad, *shape)
    like = torch.empty((*q.shape[:3], dim_v), device="meta", dtype=dtype)
    buffer, out = room(like, into or layout)
    lse = flags = None
    tiles = -(-lengths[0] // tile.block_q)
    if not alone:
        lse = torch.full(q.shape[:3], math.nan, device="cuda")
        flags = torch.full((batch * heads[0], tiles), -1, dtype=I32, device="cuda")
    offset = offset_of(diagonal, *lengths)
    hopper_forward.launch(
        q, k, v, out, lse, flags, scale=scale, causal_offset=offset, config=tile,
        grid_size=grid or tiles * batch * heads[0], head_group=group,
    )  # fmt: skip
    near(out, lse, exact(q, k, v, scale, offset))
    assert int((~buffer.isnan()).sum()) == out.numel()
    assert flags is None or not flags.any()


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    ("dim", "at"), [(64, 0), (64, 1), (80, 1), (128, 0), (128, 1), (192, 0), (256, 0)], ids=str
)
def test_forward(dim: int, at: int, lengths: tuple[int, int], diagonal: str) -> None:
    """More tiles than programs, as many, and more programs than tiles; heads in any order."""
    layout = "bhsd" if dim == 80 else "bshd"
    grid, group = (0, 7, 132)[lengths[0] % 3], (1, 5, 12)[lengths[1] % 3]
    forward((6, 2), lengths, dim, diagonal, at=at, layout=layout, grid=grid, group=group)


@pytest.mark.parametrize("diagonal", ["full", "top_left"])
@pytest.mark.parametrize("programs", ["tiles", "multiprocessors", "seven"])
@pytest.mark.parametrize(("dim", "at"), [(64, 0), (64, 1), (128, 0), (128, 1), (256, 0)], ids=str)
def test_forward_grids(dim: int, at: int, programs: str, diagonal: str) -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    grid = {"tiles": 0, "multiprocessors": count, "seven": 7}[programs]
    forward((4, 4), (2048, 2048), dim, diagonal, at=at, layout="bhsd", grid=grid)


FORWARD: dict[str, tuple[tuple[int, int], int, str | int, dict[str, Any]]] = {
    "narrower values": ((500, 700), 128, 200, {"dim_v": 72}),
    "wider values": ((500, 700), 72, 200, {"dim_v": 128}),
    "a fused projection": ((777, 777), 128, 0, {"layout": "fused"}),
    "every key is hidden": ((300, 200), 128, -500, {"grid": 1}),
    "some rows see nothing": ((300, 200), 128, -150, {"grid": 1}),
    "an offset to the right": ((300, 2000), 128, 300, {"grid": 2, "batch": 1}),
    "no LSE and no flags": ((777, 777), 128, 0, {"alone": True}),
    "one key for all batches": ((500, 500), 128, "full", {"keys": "shared", "batch": 3}),
    "one key for all, causal": ((500, 500), 128, 0, {"keys": "shared", "batch": 3}),
    "a negative scale": ((500, 600), 128, "full", {"scale": -0.1}),
    "a negative scale, causal": ((500, 600), 128, 100, {"scale": -0.1}),
    "scale 0": ((500, 600), 128, 100, {"scale": 0.0}),
    "out at odd places": ((300, 400), 128, 100, {"into": "odd"}),
    "out at odd places, 256": ((300, 400), 256, 100, {"into": "odd"}),
    "out turned": ((300, 400), 128, 100, {"into": "turned"}),
    "float16, 64": ((1000, 1300), 64, 300, {"dtype": F16}),
    "float16, 128": ((1000, 1300), 128, 300, {"dtype": F16}),
    "float16, 256": ((1000, 1300), 256, 300, {"dtype": F16}),
    "the third tile of 64": ((1000, 1000), 64, 0, {"at": 2, "grid": 7}),
    "the first tile of 128": ((1000, 1000), 128, 0, {"at": 0, "grid": 7}),
    "the third tile of 128": ((1000, 1000), 128, 0, {"at": 2, "grid": 7}),
    "the second tile of 256": ((1000, 1000), 256, 0, {"at": 1, "grid": 7}),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_of_other_calls(name: str) -> None:
    lengths, dim, diagonal, options = FORWARD[name]
    forward((4, 2), lengths, dim, diagonal, **({"layout": "bhsd"} | options))


@pytest.mark.parametrize("offset", [None, 0], ids=str)
def test_forward_flags_the_tiles_that_are_not_finite(offset: int | None) -> None:
    from portattn.backends.triton_jit import hopper_forward

    q, k, v = (normal(2, 4, 700, 128, BF16, "bhsd") for _ in range(3))
    v[1, 2, 300, 5], k[0, 1, 650] = math.nan, math.inf
    out = torch.full_like(q, math.nan)
    tile = hopper_policy.ForwardTile(128, *hopper_plan.FORWARD_TILES[128][1][0])
    tiles = -(-700 // tile.block_q)
    flags = torch.full((8, tiles), -1, dtype=I32, device="cuda")
    lse = torch.empty(q.shape[:3], device="cuda")
    hopper_forward.launch(
        q, k, v, out, lse, flags, scale=0.1, causal_offset=offset, config=tile, grid_size=7,
        head_group=4,
    )  # fmt: skip
    bad = (~out.isfinite()).any(-1).flatten(0, 1)
    want = torch.stack([x.any(-1) for x in bad.split(tile.block_q, 1)], 1)
    assert torch.equal(flags != 0, want)
    assert want.any() and not want.all()


# ---- backward ------------------------------------------------------------------------------------
def backward(
    heads: tuple[int, int], lengths: tuple[int, int], dim: int, diagonal: str | int, *,
    batch: int = 2, dtype: Any = BF16, layout: str = "bshd", keys: str = "", into: str = "",
    at: int = 0, scale: float | None = None, flags: bool = True,
) -> None:  # fmt: skip
    """Launch twice: right, and the same bits."""
    from portattn.backends.triton_jit import hopper_backward

    q, dout = (normal(batch, heads[0], lengths[0], dim, dtype, layout) for _ in range(2))
    k, v = (normal(batch, heads[1], lengths[1], dim, dtype, keys or layout) for _ in range(2))
    scale = dim**-0.5 if scale is None else scale
    tiles = hopper_backward_plan.BACKWARD_TILES[hopper_plan.head_dim_pad(dim, dim)][at]
    offset = offset_of(diagonal, *lengths)
    lse, delta, *want = exact_gradients(q, k, v, dout, scale, offset)
    marks = flags_of(tiles, q, k) if flags else {}
    runs = []
    for _ in range(2):
        rooms = [room(x, into or layout) for x in (q, k, v)]
        grads = [view for _, view in rooms]
        hopper_backward.launch(
            q, k, v, dout, lse.to(F32).contiguous(), delta.to(F32).contiguous(), *grads,
            scale=scale, causal_offset=offset, config=tiles, **marks,
        )  # fmt: skip
        assert all(int((~x.isnan()).sum()) == view.numel() for x, view in rooms)
        runs.append(grads)
    for name, got, right, again in zip(("dq", "dk", "dv"), runs[0], want, runs[1], strict=True):
        # Where one key is visible dq is zero, and what is left is rounding.
        size = max(float(right.norm()), 1e-2 * right.numel() ** 0.5)
        assert float((got.to(F64) - right).norm()) <= GRADIENT[dtype] * size, name
        assert torch.equal(got, again), name
    assert not any(bool(x.any()) for x in marks.values())


def flags_of(tiles: Any, q: Any, k: Any) -> dict[str, Any]:
    def marks(x: Any, block: int) -> Any:
        shape = (x.shape[0] * x.shape[1], -(-x.shape[2] // block))
        return torch.zeros(shape, device="cuda", dtype=I32)

    return {"flags_kv": marks(k, tiles.dkdv.block_k), "flags_q": marks(q, tiles.dq.block_q)}


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("lengths", [*LENGTHS, (2048, 2048)], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_backward(dim: int, lengths: tuple[int, int], diagonal: str) -> None:
    backward((4, 2), lengths, dim, diagonal)


@pytest.mark.parametrize("diagonal", ["full", "bottom_right"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_backward_of_the_second_tiles(dim: int, diagonal: str) -> None:
    backward((4, 2), (1000, 1000), dim, diagonal, at=1)


BACKWARD: dict[str, tuple[tuple[int, int], tuple[int, int], int, str | int, dict[str, Any]]] = {
    "many heads": ((16, 2), (513, 700), 128, "bottom_right", {"batch": 3}),
    "a fused projection": ((4, 4), (777, 777), 128, 0, {"layout": "fused"}),
    "rows of wider ones": ((4, 4), (1000, 129), 128, "full", {"layout": "wide"}),
    "every key is hidden": ((4, 2), (300, 200), 128, -500, {}),
    "some rows see nothing": ((4, 2), (300, 200), 128, -150, {}),
    "an offset to the right": ((4, 2), (300, 1000), 128, 300, {}),
    "one key for all batches": ((4, 2), (500, 500), 128, "full", {"keys": "shared", "batch": 3}),
    "a negative scale": ((2, 2), (300, 300), 128, "bottom_right", {"scale": -0.1}),
    "scale 0": ((2, 2), (300, 300), 128, "full", {"scale": 0.0}),
    "no flags": ((4, 2), (300, 300), 128, "bottom_right", {"flags": False}),
    "gradients at odd places": ((4, 2), (129, 1000), 128, "bottom_right", {"into": "odd"}),
    "sparse gradients, 256": ((4, 2), (129, 1000), 256, "bottom_right", {"into": "sparse"}),
    "float16, 64": ((4, 1), (1000, 1000), 64, "bottom_right", {"dtype": F16}),
    "float16, 128": ((4, 1), (1000, 1000), 128, "bottom_right", {"dtype": F16}),
    "float16, 256": ((4, 1), (1000, 1000), 256, "bottom_right", {"dtype": F16}),
    "float16, 128, full": ((4, 4), (1000, 129), 128, "full", {"dtype": F16, "layout": "wide"}),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_of_other_calls(name: str) -> None:
    heads, lengths, dim, diagonal, options = BACKWARD[name]
    backward(heads, lengths, dim, diagonal, **({"layout": "bhsd"} | options))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_backward_flags_the_tiles_that_are_not_finite(dim: int) -> None:
    """A row of NaN, and what it reaches."""
    from portattn.backends.triton_jit import hopper_backward

    q, k, v, dout = (normal(1, 2, 512, dim, BF16, "bhsd") for _ in range(4))
    q[0, 1, 300, 3] = math.nan
    tiles = hopper_backward_plan.BACKWARD_TILES[dim][0]
    lse, delta, *_ = exact_gradients(q, k, v, dout, dim**-0.5, 0)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    marks = flags_of(tiles, q, k)
    hopper_backward.launch(
        q, k, v, dout, lse.to(F32), delta.to(F32), dq, dk, dv, scale=dim**-0.5, causal_offset=0,
        config=tiles, **marks,
    )  # fmt: skip

    def bad(x: Any, block: int) -> Any:
        rows = (~x.isfinite()).any(-1).flatten(0, 1).split(block, 1)
        return torch.stack([part.any(-1) for part in rows], 1).to(I32)

    assert torch.equal(marks["flags_q"], bad(dq, tiles.dq.block_q))
    assert int(marks["flags_q"].sum()) == 1
    block = tiles.dkdv.block_k
    assert torch.equal(marks["flags_kv"], bad(dk, block) | bad(dv, block))


@pytest.mark.parametrize("mechanism", ["hopper", "portable"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_hundred_runs_have_the_same_bits(dim: int, causal: bool, mechanism: str) -> None:
    """More short tiles than programs: the next tile is loaded while this one is read, and a row
    that it overwrites too early is another one on each run."""
    BACKEND.force_mechanism(mechanism)
    options: dict[str, Any] = {"causal": causal, "layout": "bhsd", "backend": "triton"}
    q, k, v, dout = (normal(1, 56, 512, dim, BF16, "bshd") for _ in range(4))
    first: tuple[Any, ...] = ()
    for _ in range(100):
        out, lse = portattn.attention(q, k, v, return_lse=True, **options)
        grads = portattn.attention_backward(q, k, v, out, lse, dout, **options)
        results = out, lse, grads.dq, grads.dk, grads.dv
        first = first or results
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), results, first, strict=True):
            assert torch.equal(a, b), name


# ---- the whole of a call -------------------------------------------------------------------------
def call(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> tuple[Any, ...]:
    """Output, LSE and gradients of a call that hopper takes."""
    options |= {"layout": "bhsd", "backend": "triton"}
    plan = portattn.explain(q, k, v, **options)["triton"].plan
    assert plan is not None and plan.mechanism == "hopper"
    out, lse = portattn.attention(q, k, v, return_lse=True, **options)
    grads = portattn.attention_backward(q, k, v, out, lse, dout, **options)
    return out, lse, grads.dq, grads.dk, grads.dv


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_what_no_query_sees_reaches_nothing(dim: int, poison: float) -> None:
    """600 queries at the left end of 700 keys; the fast path multiplies the last ones by 0."""
    q, dout = (normal(2, 4, 600, dim, BF16, "bshd") for _ in range(2))
    k, v = (normal(2, 2, 700, dim, BF16, "bshd") for _ in range(2))
    for x in (k, v):
        x[:, :, 600:] = poison
    out, lse, dq, dk, dv = call(q, k, v, dout, causal="top_left")
    seen = k[:, :, :600], v[:, :, :600]
    near(out, lse, exact(q, *seen, dim**-0.5, 0))
    _, _, *right = exact_gradients(q, *seen, dout, dim**-0.5, 0)
    for got, x in zip((dq, dk[:, :, :600], dv[:, :, :600]), right, strict=True):
        assert float((got.to(F64) - x).norm()) <= GRADIENT[BF16] * float(x.norm())
    assert not dk[:, :, 600:].any() and not dv[:, :, 600:].any()


@pytest.mark.parametrize("dim", [64, 128])
def test_what_later_queries_see_does_not_reach_earlier_ones(dim: int) -> None:
    q, k, v, dout = (normal(1, 4, 600, dim, BF16, "bshd") for _ in range(4))
    k[:, :, 300], v[:, :, 310] = math.nan, math.inf
    out, lse, dq, *_ = call(q, k, v, dout, causal=True)
    q, k, v, dout = (x[:, :, :300] for x in (q, k, v, dout))
    near(out[:, :, :300], lse[:, :, :300], exact(q, k, v, dim**-0.5, 0))
    assert bool(out[:, :, 300:].isnan().all())
    right = exact_gradients(q, k, v, dout, dim**-0.5, 0)[2]
    assert float((dq[:, :, :300].to(F64) - right).norm()) <= GRADIENT[BF16] * float(right.norm())


def test_keys_that_the_batch_shares_have_the_bits_of_copies() -> None:
    q, dout = (normal(3, 4, 600, 128, BF16, "bshd") for _ in range(2))
    k, v = (normal(3, 2, 600, 128, BF16, "shared") for _ in range(2))
    results = [call(q, *keys, dout) for keys in ((k, v), (k.contiguous(), v.contiguous()))]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
