"""The portable Triton kernels against the float64 oracle, on the host, under Triton's interpreter.

The rule kept here: one fresh process runs every case (as a program, this file is that process) and
prints what it found as JSON, one line a case; each is a test of its own. What an interpreter shows
is no evidence, and the conformance suite calls it SIMULATED.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
INF, NAN = np.inf, np.nan
TOLERANCE = {"float16": 2e-3, "float32": 4e-6}
LOWEST = float(np.finfo(np.float32).min)

Draw = dict[str, Any]
CASES: dict[str, Callable[[], Draw]] = {}
CHECKS: dict[str, Callable[[], None]] = {}


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def dense(
    *,
    B: int = 1,
    Sq: int = 33,
    Sk: int | None = None,
    Hq: int = 2,
    Hk: int | None = None,
    D: int = 16,
    Dv: int | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Draw:
    """q, k, v in layout bshd and the options of the call."""
    Sk, Hk, Dv = Sq if Sk is None else Sk, Hk or Hq, Dv or D
    return {
        "q": normal(0, B, Sq, Hq, D, dtype=dtype),
        "k": normal(1, B, Sk, Hk, D, dtype=dtype),
        "v": normal(2, B, Sk, Hk, Dv, dtype=dtype),
    } | options


def case(name: str, made: Any = None, **options: Any) -> Any:
    """Name a case: options of `dense`, or a function that draws one."""
    if made is None:
        made = lambda: dense(**options)  # noqa: E731
    assert name not in CASES
    CASES[name] = made
    return made


def drawn(function: Callable[[], Draw]) -> Callable[[], Draw]:
    case(function.__name__.replace("_", " "), function)
    return function


def check(function: Callable[[], None]) -> Callable[[], None]:
    """What is not one comparison with the oracle."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


# ---- plain, causal, windows ----------------------------------------------------------------------
for dtype in ("float32", "float16"):
    case(f"plain {dtype}", dtype=dtype, D=64)
    case(f"causal {dtype}", dtype=dtype, Sq=70, causal=True)
    case(f"many tiles {dtype}", dtype=dtype, Sq=140, Sk=300, Hq=1, D=32, causal="bottom_right")
for dim in (1, 3, 8, 40, 63, 80, 100, 136, 256):
    case(f"head dim {dim}", D=dim, Hq=1, causal=True)
case("head dim 512 float16", D=512, Hq=1, Sq=17, dtype="float16")
for dims in ((24, 8), (8, 72), (64, 128)):
    case(f"head dims {dims}", D=dims[0], Dv=dims[1], Sq=20, Sk=37)
for lengths in ((1, 1), (33, 90), (90, 33), (1, 70), (70, 1)):
    for causal in ("bottom_right", "top_left"):
        case(f"{lengths} {causal}", Sq=lengths[0], Sk=lengths[1], Hq=1, causal=causal)
for window in ((0, 0), (3, 1), (9, None), (None, 20), (300, 300)):
    case(f"window {window}", Sq=40, Sk=75, Hq=1, window=window)
case("causal more heads than take turns", B=9, Sq=70, Hq=2, causal=True)
case("window and causal", Sq=150, Hq=1, window=(40, 5), causal=True)
case("window top left", Sq=40, Sk=75, Hq=1, window=(7, 2), causal="top_left")
case("window more queries than keys", Sq=75, Sk=40, Hq=1, window=(7, 2))
case("window of long sequences", Sq=140, Sk=400, Hq=1, window=(60, 60))

# ---- what changes scores -------------------------------------------------------------------------
case("softcap", softcap=1.5)
case("softcap causal float16", softcap=3.0, causal=True, dtype="float16", scale=2.0)
for scale in (-0.7, 0.0, 3.0):
    case(f"scale {scale}", scale=scale, causal=True)
case("negative scale and softcap", scale=-0.7, softcap=1.0)
for shape in ((2, 4, 20, 30), (20, 30), (4, 1, 1), (2, 1, 1, 30), (1,), (4, 20, 1)):
    case(
        f"bias {shape}",
        lambda shape=shape: dense(B=2, Sq=20, Sk=30, Hq=4, Hk=2, bias=normal(5, *shape)),
    )
    case(
        f"mask {shape}",
        lambda shape=shape: dense(B=2, Sq=20, Sk=30, Hq=4, Hk=2, mask=rng().random(shape) > 0.4),
    )


@drawn
def bias_in_float16() -> Draw:
    return dense(dtype="float16", bias=normal(5, 33, 33, dtype="float16"), softcap=2.0)


@drawn
def bias_of_minus_infinity() -> Draw:
    bias = np.where(rng().random((33, 33)) > 0.5, normal(5, 33, 33), -INF).astype("f4")
    bias[4] = -INF  # a row that sees nothing
    return dense(bias=bias, causal=True)


@drawn
def bias_of_the_lowest_number() -> Draw:
    bias = np.zeros((33, 33), "f4")
    bias[0], bias[1, :20], bias[2] = LOWEST, LOWEST, -1e30
    return dense(bias=bias, q=np.zeros((1, 33, 2, 16), "f4"))


@drawn
def masks_with_empty_rows() -> Draw:
    mask = rng().random((2, 1, 20, 150)) > 0.3
    mask[1, :, 3:9] = False
    return dense(B=2, Sq=20, Sk=150, mask=mask, bias=normal(5, 20, 150))


@drawn
def whole_blocks_hidden_first() -> Draw:
    i, j = np.ogrid[:200, :200]
    bias = np.where((j > i) | (j <= i - 10), -INF, 0).astype("f4")
    return dense(Sq=200, Hq=1, D=2, bias=bias)


case("alibi", alibi_slopes=np.array([0.5, 0.25], "f4"), causal=True)
case("alibi of a batch", B=2, Sq=20, Sk=31, alibi_slopes=normal(6, 2, 2))
case("sinks", sinks=np.array([1.0, -3.0], "f4"), causal=True)
case("sinks float16", sinks=np.array([1.0, -3.0], "f2"), dtype="float16")
case("sinks and empty rows", sinks=np.array([1.0, -3.0], "f4"), Sq=40, Sk=10, causal="bottom_right")
case(
    "everything at once",
    lambda: dense(
        B=2, Sq=30, Sk=50, Hq=4, Hk=2, D=24, Dv=40, scale=-0.4, softcap=2.0, causal="bottom_right",
        window=(20, None), bias=normal(5, 4, 30, 50), mask=rng().random((2, 1, 30, 50)) > 0.2,
        alibi_slopes=normal(6, 4), sinks=normal(7, 4), seqused_k=np.array([50, 21], "i4"),
    ),
)  # fmt: skip


@drawn
def wide_scores() -> Draw:
    made = dense(Sq=20, Sk=300, Hq=1, D=64)
    return made | {"k": 32 * made["k"]}


@drawn
def scores_below_any_finite_sentinel() -> Draw:
    made = dense(Sq=17, Sk=64, Hq=1, D=128)
    return made | {"q": np.full_like(made["q"], 50), "k": np.full_like(made["k"], -50)}


# ---- heads, layouts, lengths ---------------------------------------------------------------------
case("grouped", Hq=6, Hk=2, Sq=50, causal=True)
case("grouped few rows", Hq=6, Hk=2, Sq=5, Sk=90, causal="bottom_right")
case("one key head", Hq=8, Hk=1, Sq=3, Sk=40, B=2)
case("group of three", Hq=3, Hk=1, Sq=30, Sk=300, causal="bottom_right")
case("batch", B=3, Sq=20, Sk=33)
case("no keys", Sk=0, Sq=3)
case("no keys but sinks", Sk=0, Sq=3, sinks=np.array([1.0, 2.0], "f4"))
case("no queries", Sq=0, Sk=5)
case("no batch", B=0)


@drawn
def heads_before_positions() -> Draw:
    made = dense(B=2, Sq=20, Sk=37, Hq=4, Hk=2)
    return {n: np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in made.items()} | {"layout": "bhsd"}


@drawn
def used_lengths() -> Draw:
    made = dense(B=4, Sq=20, Sk=70, seqused_k=np.array([0, 5, 70, 41], "i4"), window=(9, 3))
    for b, n in enumerate(made["seqused_k"]):
        made["k"][b, n:], made["v"][b, n:] = NAN, INF
    return made | {"alibi_slopes": np.array([0.3, 0.1], "f4"), "causal": "bottom_right"}


def packed(lengths_q: list[int], lengths_k: list[int], **options: Any) -> Draw:
    shape = {"Hq": 2, "Hk": 2, "D": 16, "dtype": "float32"}
    shape |= {n: options.pop(n) for n in list(options) if n in shape}
    starts = [np.concatenate([[0], np.cumsum(n)]).astype("i4") for n in (lengths_q, lengths_k)]
    heads, dim, dtype = shape["Hk"], shape["D"], shape["dtype"]
    return {
        "q": normal(0, starts[0][-1], shape["Hq"], dim, dtype=dtype),
        "k": normal(1, starts[1][-1], heads, dim, dtype=dtype),
        "v": normal(2, starts[1][-1], heads, dim, dtype=dtype),
        "layout": "thd",
        "cu_seqlens_q": starts[0],
        "cu_seqlens_k": starts[1],
    } | options


case("packed", lambda: packed([5, 0, 40, 1], [9, 3, 40, 0], causal="bottom_right"))
case("packed top left", lambda: packed([5, 20], [9, 3], causal="top_left", Hq=4, dtype="float16"))
case("packed grouped windows", lambda: packed([30, 7], [30, 90], Hq=6, window=(5, 0), D=40))
case("packed single queries", lambda: packed([0, 1, 0, 1], [0, 3, 0, 5], Hq=9, Hk=3, D=64))
case("packed bias", lambda: packed([5, 20], [9, 30], bias=normal(5, 20, 30), softcap=2.0))
case("packed used", lambda: packed([5, 9], [9, 30], seqused_k=np.array([3, 0], "i4")))
case("packed long", lambda: packed([1, 2, 1], [600, 0, 40], Hq=4, Hk=1))


def paged(used: list[int], block: int, **options: Any) -> Draw:
    """Blocks in disorder; the entries beyond the used ones are -1, and what no key uses is NaN."""
    need = [-(-n // block) for n in used]
    count = max(1, *need) + 1
    table = np.full((len(used), count), -1, "i4")
    order = iter(rng().permutation(sum(need) + 2))
    made = dense(B=len(used), Sk=block, **({"Sq": 7, "Hq": 4, "Hk": 2} | options))
    shape = (sum(need) + 2, block, made["k"].shape[2])
    k = np.full((*shape, made["k"].shape[3]), NAN, made["k"].dtype)
    v = np.full((*shape, made["v"].shape[3]), NAN, made["v"].dtype)
    for b, n in enumerate(used):
        for at in range(need[b]):
            table[b, at] = page = next(order)
            rows = min(block, n - at * block)
            k[page, :rows] = normal(100 + page, rows, *k.shape[2:], dtype=k.dtype.name)
            v[page, :rows] = normal(200 + page, rows, *v.shape[2:], dtype=v.dtype.name)
    return made | {"k": k, "v": v, "block_table": table, "seqused_k": np.array(used, "i4")}


case("paged", lambda: paged([40, 0, 17], 16, causal="bottom_right"))
case("paged small blocks", lambda: paged([9, 31], 4, dtype="float16"))
case("paged odd blocks", lambda: paged([50, 24], 24, D=40, Dv=24, Sq=20, window=(12, 0)))
case("paged decode", lambda: paged([700, 3, 260], 16, Sq=1, Hq=8, Hk=2))
case("paged decode of one head", lambda: paged([530], 64, Sq=2, Hq=1, Hk=1, causal="bottom_right"))


@drawn
def paged_and_packed_queries() -> Draw:
    made = paged([40, 0, 17], 16)
    q = normal(0, 9, 4, 16)
    return made | {
        "q": q, "layout": "thd", "cu_seqlens_q": np.array([0, 5, 6, 9], "i4"),
        "causal": "bottom_right",
    }  # fmt: skip


# ---- decode: split and combine -------------------------------------------------------------------
case("decode", Sq=1, Sk=700, Hq=8, Hk=2, D=64)
case("decode float16", Sq=1, Sk=700, Hq=4, Hk=1, dtype="float16", B=2)
case("decode of own key heads", Sq=1, Sk=600, Hq=2, Dv=40)
case("decode of a few", Sq=5, Sk=700, Hq=4, Hk=1, causal="bottom_right", D=100)
case("decode with sinks", Sq=1, Sk=700, Hq=4, Hk=1, sinks=normal(7, 4))
case("decode in a window", Sq=3, Sk=900, Hq=4, Hk=1, window=(100, 0))
case("decode softcap", Sq=1, Sk=700, Hq=4, Hk=2, softcap=0.5, scale=-1.0)
case("decode bias", lambda: dense(Sq=1, Sk=700, Hq=4, Hk=1, bias=normal(5, 4, 1, 700)))


@drawn
def decode_of_used_lengths() -> Draw:
    used = np.array([0, 1, 129, 700], "i4")
    made = dense(B=4, Sq=1, Sk=700, Hq=4, Hk=1, seqused_k=used)
    for b, n in enumerate(used):
        made["k"][b, n:], made["v"][b, n:] = NAN, INF
    return made


@drawn
def decode_with_hidden_poison() -> Draw:
    mask = rng().random(700) > 0.3
    made = dense(Sq=1, Sk=700, Hq=4, Hk=1, mask=mask)
    made["k"][:, ~mask], made["v"][:, ~mask] = NAN, -INF
    return made


# ---- poison where nobody looks -------------------------------------------------------------------
@drawn
def poison_behind_a_mask() -> Draw:
    mask = rng().random(90) > 0.3
    made = dense(Sq=20, Sk=90, mask=mask)
    made["k"][:, ~mask], made["v"][:, ~mask] = NAN, INF
    return made


@drawn
def poison_behind_a_bias() -> Draw:
    mask = rng().random(90) > 0.3
    made = dense(Sq=20, Sk=90, bias=np.where(mask, 0, -INF).astype("f4"))
    made["k"][:, ~mask], made["v"][:, ~mask] = INF, NAN
    return made


@drawn
def poison_no_window_reaches() -> Draw:
    made = dense(Sq=20, Sk=90, window=(10, 0))
    made["k"][:, :50], made["v"][:, :50] = NAN, NAN
    return made


@drawn
def poison_in_the_future_of_every_row() -> Draw:
    made = dense(Sq=20, Sk=90, causal="top_left")
    made["k"][:, 20:], made["v"][:, 20:] = NAN, INF
    return made


# ---- strides -------------------------------------------------------------------------------------
@drawn
def views_of_a_fused_buffer() -> Draw:
    fused = normal(0, 2, 33, 3, 2, 24)
    return {n: fused[:, :, i] for i, n in enumerate("qkv")} | {"causal": True}


@drawn
def head_dim_with_a_stride() -> Draw:
    return {n: normal(i, 2, 16, 2, 9).swapaxes(1, 3) for i, n in enumerate("qkv")}


@drawn
def every_other_feature() -> Draw:
    return {n: normal(i, 1, 20, 2, 48)[..., ::2] for i, n in enumerate("qkv")}


@drawn
def expanded_keys() -> Draw:
    made = dense(B=2, Sq=9, Sk=33, Hq=4, Hk=4, mask=rng().random((9, 33)) > 0.3)
    return made | {n: np.broadcast_to(made[n][:, :, :1], made[n].shape) for n in "kv"}


@drawn
def expanded_positions_and_batch() -> Draw:
    made = dense(B=2, Sq=9, Sk=33)
    made["k"] = np.broadcast_to(made["k"][:, :1], made["k"].shape)
    made["v"] = np.broadcast_to(made["v"][:1], made["v"].shape)
    return made


@drawn
def arrays_that_start_anywhere() -> Draw:
    storage, size = normal(0, 20 * 2 * 16 + 8, dtype="float16"), 20 * 2 * 16
    return {
        n: storage[o : o + size].reshape(1, 20, 2, 16)
        for n, o in zip("qkv", (1, 3, 5), strict=True)
    }


@drawn
def a_mask_and_a_bias_with_strides() -> Draw:
    mask = (rng().random((33, 66)) > 0.4)[:, ::2]
    return dense(mask=mask.T, bias=normal(5, 33, 33).T)


# ---- more than one comparison --------------------------------------------------------------------
def attend(made: Draw, **more: Any) -> Any:
    import torch

    import portattn

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is expanded cannot be written to
            return torch.from_numpy(x)

    return portattn.attention(**{n: tensor(x) for n, x in made.items()}, backend="triton", **more)


@check
def out_is_filled_and_nothing_around_it() -> None:
    import torch

    made = dense(B=2, Sq=20, Sk=33, D=24)
    want = attend(made)
    for stride in (1, 2):
        room = torch.full((2, 22, 3, 30 * stride), float("nan"))
        view = room[:, 1:21, :2, 3 : 3 + 24 * stride : stride]
        assert attend(made, out=view) is view
        assert torch.equal(view, want)
        assert int((~room.isnan()).sum()) == want.numel()


@check
def the_lse_changes_no_bit_of_the_output() -> None:
    import torch

    for made in (dense(causal=True), dense(Sq=1, Sk=700, Hq=4, Hk=1)):
        assert torch.equal(attend(made), attend(made, return_lse=True)[0])
        assert torch.equal(attend(made), attend(made, deterministic=True))


@check
def a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    import torch

    for options in ({"Sq": 1, "Sk": 700, "Hq": 4, "Hk": 1}, {"Sq": 40}, {"Sq": 7, "Sk": 60}):
        made = dense(B=3, **options)
        alone = attend({n: x[1:2] for n, x in made.items()})
        assert torch.equal(attend(made)[1:2], alone)


@check
def a_visible_nan_stays_in_the_rows_that_see_it() -> None:
    import torch

    made = dense(Sq=40, Sk=40, Hq=2, causal=True)
    want = attend(made)
    for name, place in (("k", (0, 20, 0, 3)), ("v", (0, 20, 0, 3)), ("q", (0, 20, 0, 3))):
        bad = made | {name: made[name].copy()}
        bad[name][place] = NAN
        got = attend(bad)
        rows = slice(20, 21) if name == "q" else slice(20, None)
        assert got[0, rows, 0].isnan().any(-1).all(), name
        got[0, rows, 0] = want[0, rows, 0]
        assert torch.equal(got, want), name


@check
def bug_009_no_row_sees_a_later_key() -> None:
    import torch

    made = dense(Sq=64, Hq=2, D=64, dtype="float16", causal=True)
    before = attend(made)
    for start in (1, 2, 3, 5, 33):
        later = {n: x.copy() if n in "kv" else x for n, x in made.items()}
        for n in "kv":
            later[n][:, start:] = normal(9, 1, 64 - start, 2, 64)
        after = attend(later)
        assert torch.equal(before[:, :start], after[:, :start])


@check
def bug_007_small_answers() -> None:
    def rows(values: Any) -> np.ndarray:
        return np.asarray(values, np.float32).reshape(1, -1, 1, 1)

    for n_q, n_k, causal, want in (
        (2, 5, "bottom_right", [1.5, 2.0]),
        (5, 2, "bottom_right", [0, 0, 0, 0, 0.5]),
        (2, 5, "top_left", [0, 0.5]),
        (5, 2, "top_left", [0, 0.5, 0.5, 0.5, 0.5]),
    ):
        q, k, v = rows(np.zeros(n_q)), rows(np.zeros(n_k)), rows(np.arange(n_k))
        got = attend({"q": q, "k": k, "v": v}, causal=causal)
        np.testing.assert_allclose(got.numpy().ravel(), want, atol=1e-6)


@check
def bug_061_the_arrays_stay_as_they_were() -> None:
    made = dense(B=2, Sq=20, causal=True, scale=-1.0, bias=normal(5, 20, 20))
    copies = {n: x.copy() for n, x in made.items() if isinstance(x, np.ndarray)}
    attend(made)
    for n, x in copies.items():
        np.testing.assert_array_equal(made[n], x)


@check
def numpy_arrays_come_and_go_as_numpy_arrays() -> None:
    import portattn

    made = dense()
    got = portattn.attention(**made, backend="triton")
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, attend(made).numpy())


@check
def bug_097_bfloat16_and_float64_are_refused() -> None:
    import torch

    import portattn

    for dtype in (torch.bfloat16, torch.float64):
        x = torch.ones(1, 16, 1, 16, dtype=dtype)
        try:
            portattn.attention(x, x, x, backend="triton")
        except portattn.Unsupported as error:
            (reason,) = error.reasons["triton"]
            assert reason.code == "dtype" and "interpreter" in reason.hint
        else:
            raise AssertionError(f"{dtype} was taken")


@check
def a_tile_that_lies_under_two_flags_is_repaired_for_either() -> None:
    """Flags of 192 rows over tiles of 128: the second tile has rows of both."""
    import dataclasses

    import torch

    from portattn.arrays import recognise
    from portattn.backends.triton_jit import config, launch_backward, launch_portable, planner
    from portattn.backends.triton_jit.backward_plan import Tile as BackwardTile
    from portattn.backends.triton_jit.tensors import Tensors
    from portattn.contract import Call
    from portattn.machine import Machine
    from portattn.problem import Problem

    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 384, 16) for _ in range(4))
    described = {n: recognise(x, n) for n, x in (("q", q), ("k", k), ("v", v))}
    problem = Problem.from_arrays(**described, layout="bhsd")
    plan = planner.plan(problem, planner.target(problem, Machine.here()), None).config
    tile = config.Tile(128, 64, 4, 1, 0, 0)
    made = dataclasses.replace(plan, tile=tile, splits=1, pack=1)
    for flags, first, last in (([1, 0], 0, 256), ([0, 1], 128, 384)):
        out = torch.full_like(q, float("nan"))
        call = Call(out=recognise(out, "out"), **described)
        tensors = Tensors(problem, call)
        repair = launch_portable.Prepared(problem, made, tensors, 192)
        repair.start(tensors, torch.tensor(flags).int())
        done = torch.isfinite(out).all(-1)[0, 0]
        assert done[first:last].all() and int(done.sum()) == last - first, flags

    out, lse = attend_torch(q, k, v)
    for flags, first, last in (([1, 0], 0, 256), ([0, 1], 128, 384)):
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
        backward = launch_backward.Backward(
            q=q, k=k, v=v, out=out, dout=dout, lse=lse, scale=0.25, batch=1, seq_q=384, seq_k=384,
            dq=dq, dk=dk, dv=dv,
        )  # fmt: skip
        whole = BackwardTile(128, 128, 4, 1)
        tiles = launch_backward.BackwardTiles(whole, whole, whole, whole)
        common = launch_backward.rows_delta(backward, whole, poison=False)
        set_flags = torch.tensor([flags]).int()
        launch_backward.repair(backward, tiles, common, set_flags, set_flags, (192, 192))
        for gradient in (dq, dk, dv):
            done = torch.isfinite(gradient).all(-1)[0, 0]
            assert done[first:last].all() and int(done.sum()) == last - first, flags


@check
def a_repair_finds_hidden_nans_without_being_told() -> None:
    """hopper's delta does not read q, so that nothing has named the rows with a NaN: what repairs
    has the gradients of the call that was told."""
    import torch

    from portattn.backends.triton_jit import launch_backward
    from portattn.backends.triton_jit.backward_plan import Tile as BackwardTile

    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 48, 16) for _ in range(4))
    hidden = torch.ones(48, 48).triu(1).bool()
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(hidden, float("-inf"))
    lse, out = torch.logsumexp(scores, -1), torch.softmax(scores, -1) @ v
    q[0, 0, 5, 3], dout[0, 1, 9, 1] = float("nan"), float("inf")  # keys 6 and 10 on see no more
    tile = BackwardTile(16, 16, 4, 1)
    tiles = launch_backward.BackwardTiles(tile, tile, tile, tile)
    found = []
    for told in (True, False):
        dq, dk, dv = (torch.full_like(x, 7.0) for x in (q, k, v))
        call = launch_backward.Backward(
            q=q, k=k, v=v, out=out, dout=dout, lse=lse, scale=0.25, batch=1, seq_q=48, seq_k=48,
            right=0, dq=dq, dk=dk, dv=dv,
        )  # fmt: skip
        if told:
            launch_backward.run(call, tiles)
        else:
            common = launch_backward.rows_delta(call, tile, poison=False)
            flags = torch.ones(2, 3, dtype=torch.int32)
            launch_backward.repair(call, tiles, common, flags, flags, (16, 16))
        found.append((dq, dk, dv))
    for told_, untold in zip(*found, strict=True):
        assert torch.equal(torch.isnan(told_), torch.isnan(untold))
        assert torch.equal(told_.nan_to_num(0.0), untold.nan_to_num(0.0))
    dq, dk, dv = found[1]
    assert torch.isnan(dk[0, 0, :6]).all() and torch.isfinite(dk[0, 0, 6:]).all()
    assert torch.isnan(dv[0, 1, :10]).any() and torch.isfinite(dv[0, 1, 10:]).all()


@check
def keys_that_come_in_boxes_give_the_same_bits() -> None:
    """What a descriptor loads beyond an end is zero, and what a pointer loads is masked."""
    import dataclasses

    import torch

    from portattn.arrays import recognise
    from portattn.backends.triton_jit import launch_portable, planner
    from portattn.backends.triton_jit.tensors import Tensors
    from portattn.contract import Call
    from portattn.machine import Machine
    from portattn.problem import Problem

    for n_q, n_k, options in (
        (150, 150, {"causal": "bottom_right"}),
        (150, 90, {"causal": "bottom_right"}),  # rows that see nothing
        (90, 150, {"causal": "top_left"}),
        (150, 150, {"causal": "bottom_right", "window": (70, 3)}),
        (150, 200, {"window": (20, 40)}),
        (130, 130, {"causal": "bottom_right", "scale": -0.7}),
        (130, 130, {"causal": "bottom_right", "scale": 1e-30}),
        (130, 130, {"causal": "bottom_right", "scale": 0.0}),  # comes in no box
        (130, 190, {}),
    ):
        for dtype, poison in itertools.product(("float16", "float32"), (0.0, NAN, INF)):
            q, k, v = (
                torch.from_numpy(normal(i, 2, 1, n, 16, dtype=dtype))
                for i, n in enumerate((n_q, n_k, n_k))
            )
            v[1, 0, 77] += poison
            described = {n: recognise(x, n) for n, x in (("q", q), ("k", k), ("v", v))}
            problem = Problem.from_arrays(**described, layout="bhsd", **options)
            plan = planner.plan(problem, planner.target(problem, Machine.here()), None).config
            found = []
            for tma in (False, True):
                out, lse = torch.full_like(q, 7.0), torch.full((2, 1, n_q), 7.0)
                call = Call(out=recognise(out, "out"), lse=recognise(lse, "lse"), **described)
                tensors = Tensors(problem, call)
                made = dataclasses.replace(plan, tma=tma)
                prepared = launch_portable.Prepared(problem, made, tensors)
                assert prepared.boxed == (tma and options.get("scale") != 0.0)
                prepared.start(tensors, None)
                found += [out, lse]
            for a, b in zip(found[:2], found[2:], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            if options.get("causal") == "bottom_right" and "window" not in options and poison:
                seen = 77 + n_q - n_k  # the first row that sees the key
                assert found[2][1, 0, :seen].isfinite().all()
                assert not found[2][1, 0, seen:].isfinite().any(-1).any()


def attend_torch(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Out and LSE at a scale of 1/4."""
    import torch

    scores = q @ k.transpose(-1, -2) / 4
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


@check
def auto_takes_no_interpreter() -> None:
    """What is chosen by itself on the host is NumPy."""
    import portattn

    made = dense()
    assert portattn.explain(**made).chosen == "numpy"


# ---- the process that runs them ------------------------------------------------------------------
def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error over the largest value (at least 1); inf where one is -inf or NaN and the
    other is not."""
    got = got.astype(np.float64)
    special = ~np.isfinite(want)
    if not np.array_equal(got[special], want[special], equal_nan=True):
        return INF
    if not np.isfinite(got[~special]).all():
        return INF
    size = max(1.0, np.abs(want[~special]).max(initial=0))
    return float(np.abs(got[~special] - want[~special]).max(initial=0) / size)


def compare(made: Draw) -> dict[str, Any]:
    from portattn.conformance import reference

    out, lse = attend(made, return_lse=True)
    asked = dict(made)
    turned = asked.pop("layout", "bshd") == "bshd"
    for n in "qkv":
        if turned and (n == "q" or "block_table" not in asked):
            asked[n] = asked[n].swapaxes(1, 2)
    want_out, want_lse = reference.forward(reference.Attention(**asked))
    return {
        "out": error(out.numpy(), want_out.swapaxes(1, 2) if turned else want_out),
        "lse": error(lse.numpy(), want_lse),
        "dtypes": [str(out.dtype), str(lse.dtype)],
    }


def main() -> None:
    for name, made in CASES.items():
        try:
            found = compare(made())
        except Exception:  # noqa: BLE001 - the test of that name shows it
            found = {"failure": traceback.format_exc(limit=-6)}
        print(json.dumps({"name": name} | found), flush=True)
    for name, function in CHECKS.items():
        found = {}
        try:
            function()
        except Exception:  # noqa: BLE001
            found = {"failure": traceback.format_exc(limit=-6)}
        print(json.dumps({"name": name} | found), flush=True)


if __name__ == "__main__":
    main()
    sys.exit()


def triton_or_skip() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    if sys.platform != "linux":
        pytest.skip("Triton is there for Linux")
    pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    triton_or_skip()
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in lines}


@pytest.mark.xdist_group("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(found: dict[str, dict[str, Any]], name: str) -> None:
    answer = found[name]
    assert "failure" not in answer, answer["failure"]
    bound = TOLERANCE[answer["dtypes"][0].removeprefix("torch.")]
    assert answer["dtypes"][1] == "torch.float32"
    assert answer["out"] <= bound, answer
    assert answer["lse"] <= 4 * TOLERANCE["float32"], answer


@pytest.mark.xdist_group("interpreted")
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(found: dict[str, dict[str, Any]], name: str) -> None:
    assert "failure" not in found[name], found[name]["failure"]


def test_without_the_interpreter_the_host_is_refused(fresh: Callable[..., Any]) -> None:
    triton_or_skip()
    fresh(
        "import torch, portattn\n"
        "for dtype in (torch.float16, torch.bfloat16, torch.float32):\n"
        "    x = torch.ones(1, 8, 1, 16, dtype=dtype)\n"
        "    try:\n"
        "        portattn.attention(x, x, x, backend='triton')\n"
        "    except portattn.Unsupported as error:\n"
        "        assert 'device' in {r.field for r in error.reasons['triton']}, error\n"
        "    else:\n"
        "        raise SystemExit('taken')\n",
        TRITON_INTERPRET=None,
    )


@pytest.mark.xdist_group("interpreted")
def test_the_conformance_suite_calls_it_simulated(tmp_path: Path) -> None:
    triton_or_skip()
    done = subprocess.run(
        [
            sys.executable, "-m", "portattn", "conformance", "run", "--backend", "triton",
            "--tier", "smoke", "--checks", "F01,H04,K02", "--dtype", "float32",
            "--json", "--jobs", "1", "-o", str(tmp_path),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    verdicts = {name: c["verdict"] for name, c in made["checks"].items()}
    assert {n for n, v in verdicts.items() if v != "NOT_RUN"} == {"F01", "H04", "K02"}
    assert {verdicts[n] for n in ("F01", "H04", "K02")} == {"SIMULATED"}
    assert made["simulated"] and not made["failed"]
    assert all("a simulator stood in for the hardware" in why for why in made["levels"].values())
