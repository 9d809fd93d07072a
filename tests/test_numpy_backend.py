"""The NumPy backend against the float64 oracle, and what it promises beyond right numbers: bits
that depend on nothing but what a row sees, bounded memory, threads that get along.

The rule kept here: tiles are forced small where a test is about tiles, so that every path is taken
in milliseconds; where bits are compared, they are compared as bits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import portattn
from portattn.arrays import Array, recognise
from portattn.backends.numpy_tiled import BACKEND, config, decode, forward, launch, pool, workspace
from portattn.backends.numpy_tiled.masking import Band, key_tiles
from portattn.contract import Call
from portattn.machine import Machine
from portattn.problem import Problem

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 2e-14}
SMALL = config.Config(block_q=16, block_k=24, edge_k=8, stream_k=40, copy_k=20, chunk_k=32)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows and keys in every call, and none of the thresholds of large ones."""
    real = launch.run
    monkeypatch.setattr(launch, "run", lambda problem, _, call: real(problem, SMALL, call))
    monkeypatch.setattr(forward, "FEW_ROWS", 3)
    monkeypatch.setattr(config, "FEW_ROWS", 3)
    monkeypatch.setattr(forward, "MANY_KEYS", 4)
    monkeypatch.setattr(forward, "STREAMED", 30)


def attend(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return portattn.attention(q, k, v, backend="numpy", return_lse=True, **options)


def gradients(
    q: Any, k: Any, v: Any, dout: Any, dlse: Any = None, **options: Any
) -> dict[str, np.ndarray]:
    out, lse = attend(q, k, v, **options)
    made = portattn.attention_backward(
        q, k, v, out, lse, dout, dlse=dlse, backend="numpy", **options
    )
    return {name: x for name, x in made._asdict().items() if x is not None}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error over the largest value (at least 1); inf where one is -inf or NaN and the
    other is not."""
    got = got.astype(np.float64)
    special = ~np.isfinite(want)
    if not np.array_equal(got[special], want[special], equal_nan=True):
        return np.inf
    if not np.isfinite(got[~special]).all():
        return np.inf
    size = max(1.0, np.abs(want[~special]).max(initial=0))
    return float(np.abs(got[~special] - want[~special]).max(initial=0) / size)


@pytest.fixture
def agrees(oracle: Callable[..., Any], oracle_backward: Callable[..., Any]) -> Callable[..., None]:
    """``agrees(q, k, v, **options)``: output, LSE and every gradient are those of the oracle."""

    def check(q: Any, k: Any, v: Any, slack: float = 1.0, **options: Any) -> None:
        rng = np.random.default_rng(7)
        out, lse = attend(q, k, v, **options)
        want_out, want_lse = oracle(q, k, v, **options)
        bound = TOLERANCE[q.dtype.name] * slack
        assert error(out, want_out) <= bound
        assert (
            error(lse, want_lse) <= max(bound if q.dtype.name == "float64" else 0, 2e-6 * slack) * 4
        )
        dout = rng.standard_normal(out.shape).astype(out.dtype)
        dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
        made = gradients(q, k, v, dout, dlse, **options)
        want = oracle_backward(q, k, v, dout, dlse, **options)
        assert made.keys() == want.keys()
        for name, x in made.items():
            # The oracle knows out exactly; the call was given it rounded.
            limit = max(bound, TOLERANCE[x.dtype.name]) * 8
            assert error(x, want[name]) <= limit, name

    return check


# ---- right numbers -------------------------------------------------------------------------------
LENGTHS = [(1, 1), (7, 7), (40, 40), (33, 90), (90, 33), (1, 70), (70, 1), (5, 131)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [None, (0, 0), (1, 3), (9, None), (None, 20), (30, 30)])
def test_bands(
    inputs: Any, agrees: Any, lengths: tuple[int, int], causal: Any, window: Any
) -> None:
    q, k, v = inputs(1, B=2, Sq=lengths[0], Sk=lengths[1], Hq=4, Hk=2, D=5, Dv=3)
    agrees(q, k, v, causal=causal, window=window, slack=4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 30, 50), (1, 4, 30, 50), (2, 1, 30, 50), (30, 50), (50,), (1,), (2, 1, 1, 50),
        (4, 1, 1), (2, 4, 30, 1), (30, 1), (1, 1, 1, 1),
    ],
)  # fmt: skip
def test_masks_and_biases_broadcast(inputs: Any, agrees: Any, shape: tuple[int, ...]) -> None:
    q, k, v = inputs(2, B=2, Sq=30, Sk=50, Hq=4, Hk=2, D=6)
    rng = np.random.default_rng(3)
    mask = rng.random(shape) > 0.4
    bias = rng.standard_normal(shape).astype("f4")
    agrees(q, k, v, mask=mask, slack=4)
    agrees(q, k, v, bias=bias, slack=4)
    agrees(q, k, v, bias=np.where(mask, bias, -np.inf).astype("f4"), slack=4)
    agrees(q, k, v, mask=mask[..., ::-1], bias=bias, softcap=1.5, causal="top_left", slack=4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.0},
        {"softcap": 30.0, "causal": "bottom_right"},
        {"softcap": 200.0, "window": (20, 5)},
        {"alibi_slopes": np.array([0.5, 0.0, -0.1, 0.05], "f4")},
        {"alibi_slopes": np.linspace(0, 0.3, 8, dtype="f4").reshape(2, 4), "causal": "top_left"},
        {"sinks": np.array([0.5, -2.0, 30.0, -np.inf], "f4"), "causal": "bottom_right"},
        {"seqused_k": np.array([0, 29], "i4"), "causal": "bottom_right"},
        {"seqused_k": np.array([50, 1], "i4"), "window": (6, 2), "sinks": np.zeros(4, "f4")},
        {"scale": 0.0},
        {"scale": -0.7},
    ],
)
def test_options(inputs: Any, agrees: Any, options: dict[str, Any]) -> None:
    agrees(*inputs(4, B=2, Sq=60, Sk=50, Hq=4, Hk=2, D=8), slack=8, **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtypes(inputs: Any, agrees: Any, dtype: str, layout: str) -> None:
    q, k, v = inputs(5, B=2, Sq=37, Sk=61, Hq=6, Hk=2, D=7, Dv=9, dtype=dtype, layout=layout)
    rng = np.random.default_rng(6)
    agrees(q, k, v, layout=layout, slack=4)
    agrees(
        q, k, v, layout=layout, causal="bottom_right", softcap=2.0, slack=4,
        bias=rng.standard_normal((6, 37, 61)).astype(q.dtype),
        sinks=rng.standard_normal(6).astype(q.dtype),
    )  # fmt: skip


def packed(rng: Any, lens: list[int], heads: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *lens]).astype("i4")
    return rng.standard_normal((starts[-1], heads, dim)).astype("f4"), starts


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right"},
        {"causal": "top_left", "window": (9, 2)},
        {"bias": (4, 4, 30, 70)},
        {"bias": (70,)},
        {"bias": (4, 1, 30, 1), "softcap": 1.0},
        {"mask": (4, 1, 30, 70), "sinks": np.ones(4, "f4")},
        {"seqused_k": np.array([2, 0, 33, 70], "i4"), "causal": "bottom_right"},
    ],
)
def test_packed(agrees: Any, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(8)
    q, starts_q = packed(rng, [0, 3, 30, 1], 4, 8)
    k, starts_k = packed(rng, [5, 0, 40, 70], 2, 8)
    v = packed(rng, [5, 0, 40, 70], 2, 6)[0]
    options = dict(options)
    if "bias" in options:
        options["bias"] = rng.standard_normal(options["bias"]).astype("f4")
    if "mask" in options:
        options["mask"] = rng.random(options["mask"]) > 0.5
    agrees(q, k, v, layout="thd", cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, slack=4, **options)


def pages(seed: int = 9) -> dict[str, Any]:
    """Three sequences over shared pages, the rest of the pool and of the table poisoned."""
    rng = np.random.default_rng(seed)
    k = np.full((20, 8, 2, 6), np.nan, "f4")
    v = np.full((20, 8, 2, 5), np.inf, "f4")
    table = np.full((3, 7), -1, "i4")
    used = np.array([0, 45, 17], "i4")
    table[1, :6] = [4, 17, 2, 9, 0, 11]
    table[2, :3] = [4, 17, 13]  # shares a prefix with its neighbour
    for b, n in enumerate(used):
        for j in range(n):
            k[table[b, j // 8], j % 8] = rng.standard_normal((2, 6))
            v[table[b, j // 8], j % 8] = rng.standard_normal((2, 5))
    q = rng.standard_normal((3, 21, 4, 6)).astype("f4")
    return {"q": q, "k": k, "v": v, "block_table": table, "seqused_k": used}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_paged(agrees: Any, causal: Any) -> None:
    agrees(**pages(), causal=causal, slack=4)


@pytest.mark.usefixtures("small_tiles")
def test_paged_and_packed(agrees: Any) -> None:
    made = pages()
    made["q"] = made["q"].reshape(-1, 4, 6)[:30]
    starts = np.array([0, 4, 25, 30], "i4")
    agrees(**made, layout="thd", cu_seqlens_q=starts, window=(11, 4), slack=4)


def test_paged_is_the_gathered_call() -> None:
    made = pages()
    out, lse = attend(**made, causal="bottom_right")
    for b in (1, 2):
        n = int(made["seqused_k"][b])
        rows = made["block_table"][b, : -(-n // 8)]
        k, v = (made[x][rows].reshape(1, -1, 2, made[x].shape[-1])[:, :n] for x in "kv")
        one = attend(made["q"][b : b + 1], k, v, causal="bottom_right")
        assert same_bits(out[b : b + 1], one[0])
        assert same_bits(lse[b : b + 1], one[1])
    unused = sorted(set(range(20)) - {4, 17, 2, 9, 0, 11, 13})
    dout = np.ones_like(out)
    made_gradients = gradients(**made, dout=dout)
    for name in ("dk", "dv"):
        assert not made_gradients[name][unused].any()
        assert np.isfinite(made_gradients[name]).all()


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("queries", [1, 5])
def test_split_over_keys(inputs: Any, agrees: Any, heads: tuple[int, int], queries: int) -> None:
    q, k, v = inputs(10, B=1, Sq=queries, Sk=9001, Hq=heads[0], Hk=heads[1], D=16)
    agrees(q, k, v, causal="bottom_right", slack=4)
    mask = np.zeros((queries, 9001), bool)
    mask[:, -3:] = mask[-1:, :5] = True  # whole parts see nothing
    agrees(q, k, v, mask=mask, slack=4)


def test_real_tiles(inputs: Any, agrees: Any) -> None:
    q, k, v = inputs(11, B=1, Sq=1100, Sk=1300, Hq=2, Hk=1, D=64)
    for options in ({}, {"causal": "bottom_right"}, {"window": (200, 100)}, {"softcap": 20.0}):
        agrees(q, k, v, slack=4, **options)
    q, k, v = inputs(11, B=1, Sq=600, Sk=700, Hq=1, D=256, dtype="bfloat16")
    agrees(q, k, v, causal="top_left")


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    B, Sq, Sk = draw(st.integers(1, 3)), draw(st.integers(1, 45)), draw(st.integers(0, 60))
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    D, Dv = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(["f4", "f8"]))
    spread = draw(st.sampled_from([0.3, 1.0, 6.0, 30.0]))
    options: dict[str, Any] = {
        "q": (rng.standard_normal((B, Sq, Hk * group, D)) * spread).astype(dtype),
        "k": rng.standard_normal((B, Sk, Hk, D)).astype(dtype),
        "v": rng.standard_normal((B, Sk, Hk, Dv)).astype(dtype),
        "causal": draw(st.sampled_from([False, "top_left", "bottom_right"])),
        "window": draw(st.none() | st.tuples(*[st.none() | st.integers(0, 30)] * 2)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 5.0, 80.0])),
    }
    shape = tuple(n if draw(st.booleans()) else 1 for n in (B, Hk * group, Sq, Sk))
    if draw(st.booleans()):
        options["mask"] = rng.random(shape) > draw(st.sampled_from([0.1, 0.5, 0.95]))
    if draw(st.booleans()):
        bias = rng.standard_normal(shape).astype(dtype)
        options["bias"] = np.where(rng.random(shape) > 0.8, -np.inf, bias).astype(dtype)
    if draw(st.booleans()):
        options["alibi_slopes"] = rng.random((B, Hk * group)).astype("f4")
    if draw(st.booleans()):
        options["sinks"] = rng.standard_normal(Hk * group).astype(dtype)
    if draw(st.booleans()):
        options["seqused_k"] = rng.integers(0, Sk + 1, B).astype("i4")
    return options


@pytest.mark.usefixtures("small_tiles")
def test_everything_at_once(agrees: Any) -> None:
    @given(calls())
    def check(options: dict[str, Any]) -> None:
        agrees(**options, slack=40)

    check()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "sinks": np.array([0.3, -0.2])},
        {"softcap": 1.3, "bias": np.linspace(-1, 1, 7 * 9).reshape(7, 9)},
        {
            "bias": np.linspace(-1, 1, 9),
            "window": (3, 1),
            "alibi_slopes": np.array([0.1, 0.2], "f4"),
        },
    ],
)
def test_gradients_are_finite_differences(inputs: Any, options: dict[str, Any]) -> None:
    q, k, v = inputs(12, B=2, Sq=7, Sk=9, Hq=2, Hk=1, D=4, Dv=3, dtype="float64")
    rng = np.random.default_rng(13)
    dout, dlse = rng.standard_normal((2, 7, 2, 3)), rng.standard_normal((2, 2, 7))
    arrays = {"q": q, "k": k, "v": v}
    arrays |= {n: x for n, x in options.items() if n in ("bias", "sinks")}
    rest = {n: x for n, x in options.items() if n not in arrays}

    def value(given_arrays: dict[str, Any]) -> float:
        out, lse = attend(**given_arrays, **rest)
        return float((out * dout).sum() + np.where(np.isinf(lse), 0, lse * dlse).sum())

    made = gradients(**arrays, dout=dout, dlse=dlse, **rest)
    for name, x in arrays.items():
        for at in {tuple(int(rng.integers(n)) for n in x.shape) for _ in range(6)}:
            moved = []
            for step in (1e-6, -1e-6):
                other = x.copy()
                other[at] += step
                moved.append(value({**arrays, name: other}))
            assert made[f"d{name}"][at] == pytest.approx(
                (moved[0] - moved[1]) / 2e-6, rel=1e-6, abs=1e-7
            )


# ---- rows that see nothing, or one key -----------------------------------------------------------
def test_empty_rows(inputs: Any) -> None:
    q, k, v = inputs(14, Sq=5, Sk=2)
    out, lse = attend(q, k, v, causal="bottom_right")
    assert not out[:, :3].any()
    assert (lse[..., :3] == -np.inf).all()
    dout = np.ones_like(out)
    dout[:, :3] = np.nan  # of rows that are 0 whatever the inputs
    made = gradients(q, k, v, dout, causal="bottom_right")
    assert not made["dq"][:, :3].any()
    assert all(np.isfinite(x).all() for x in made.values())
    out, lse = attend(q, k, v, causal="bottom_right", sinks=np.array([1.75], "f4"))
    assert not out[:, :3].any()
    assert (lse[..., :3] == np.float32(1.75)).all()
    out, lse = attend(q, k[:, :0], v[:, :0])
    assert not out.any()
    assert (lse == -np.inf).all()


def test_empty_dimensions(inputs: Any) -> None:
    q, k, _ = inputs(14, B=2, Sq=5, Sk=4)
    for a, b in ((q[:0], k[:0]), (q[:, :0], k), (q, k[:, :0])):
        out, lse = attend(a, b, b)
        assert out.shape == a.shape
        made = gradients(a, b, b, np.ones_like(out), np.ones_like(lse))
        assert made["dq"].shape == a.shape
        assert made["dk"].shape == made["dv"].shape == b.shape
        assert not any(x.any() for x in made.values())


@pytest.mark.parametrize("value", [-np.inf, np.finfo("f4").min, -1e30])
def test_a_finite_bias_is_no_mask(inputs: Any, value: float) -> None:
    q, k, v = inputs(15, Sq=3)
    bias = np.ones((3, 3), "f4")
    bias[0] = value
    out, lse = attend(np.zeros_like(q), k, v, bias=bias)
    if value == -np.inf:
        assert not out[0, 0].any()
        assert lse[0, 0, 0] == -np.inf
    else:
        np.testing.assert_allclose(out[0, 0, 0], v[0, :, 0].mean(0), atol=1e-6)
        assert lse[0, 0, 0] == np.float32(value)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_visible_key_is_copied(inputs: Any, dtype: str) -> None:
    q, k, v = inputs(16, B=1, Sq=300, Sk=300, Hq=2, D=64, dtype=dtype)
    out, _ = attend(q, k, v, window=(0, 0))
    assert same_bits(out, v)
    out, _ = attend(q, k[:, :1], v[:, :1])
    assert same_bits(out, np.repeat(v[:, :1], 300, axis=1))
    out, _ = attend(q, k, v, causal=True)
    assert same_bits(out[:, :1], v[:, :1])


def test_large_scores(inputs: Any) -> None:
    q, k = np.full((1, 64, 1, 128), 50, "f4"), np.full((1, 64, 1, 128), -50, "f4")
    v = np.broadcast_to(np.arange(64, dtype="f4")[None, :, None, None], q.shape)
    out, lse = attend(q, k, v)
    np.testing.assert_allclose(out, 31.5, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(64) - 2500 * np.sqrt(128), rtol=1e-6)
    q, k, v = inputs(17, B=1, Sq=700, D=64)
    for order in (np.argsort(k[0, :, 0, 0]), np.argsort(-k[0, :, 0, 0])):
        out, _ = attend(q, 64 * k[:, order], v[:, order], causal=True)
        assert np.isfinite(out).all()


def test_values_beyond_the_bound(inputs: Any, oracle: Any) -> None:
    """Without a running maximum weights reach e^20: such rows are done again where that is too
    much for float32."""
    q, k, v = inputs(18, B=1, Sq=300, D=64)
    assert np.sqrt((q**2).sum(-1).max() * (k**2).sum(-1).max()) / 8 < forward.BOUND
    for power in (2.0**100, 2.0**-120):
        huge = (v * np.float32(power)).astype("f4")
        out, lse = attend(5 * q, k, huge)
        want, want_lse = oracle(5 * q, k, huge)
        assert np.abs(out - want).max() <= 4e-6 * np.abs(want).max()
        assert error(lse, want_lse) < 1e-6
    one, _ = attend(q, k, v)
    for power in (2.0**40, 2.0**-40):
        assert same_bits(attend(q, k, v * np.float32(power))[0], one * np.float32(power))


@pytest.mark.parametrize("large", [None, 1.0, 40.0, np.nan])
@pytest.mark.parametrize("causal", [False, True])
def test_the_short_way_has_the_bits_of_the_general_one(
    inputs: Any, monkeypatch: pytest.MonkeyPatch, causal: bool, large: float | None
) -> None:
    """A mask that hides nothing sends every tile the general way. One row that needs its maximum,
    or is NaN, moves its tile there and no other row's bits."""
    short = []
    plain = forward._RowTile._plain
    monkeypatch.setattr(
        forward._RowTile, "_plain", lambda self, *at: short.append(at) or plain(self, *at)
    )
    q, k, v = inputs(19, B=1, Sq=1300, Hq=4, Hk=2, D=64)
    q[0, 900, 2] *= 1 if large is None else large
    out, lse = attend(q, k, v, causal=causal)
    assert short
    short.clear()
    masked, masked_lse = attend(q, k, v, causal=causal, mask=np.ones((1300, 1300), bool))
    assert not short
    assert same_bits(out, masked) and same_bits(lse, masked_lse)
    if large is not None:
        q[0, 900, 2] = 0.5
        other, other_lse = attend(q, k, v, causal=causal)
        others = np.ones(q.shape[:3], bool)
        others[0, 900, 2] = False
        assert same_bits(out[others], other[others])
        assert same_bits(lse.swapaxes(1, 2)[others], other_lse.swapaxes(1, 2)[others])


# ---- what is hidden stays hidden -----------------------------------------------------------------
HIDING: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "causal": lambda i, j: {"causal": "bottom_right"},
    "window": lambda i, j: {"window": (0, 7)},
    "mask": lambda i, j: {"mask": np.arange(j) != 20},
    "mask-rows": lambda i, j: {"mask": (np.arange(j) != 20) | (np.arange(i)[:, None] > i - 5)},
    "bias": lambda i, j: {"bias": np.where(np.arange(j) == 20, -np.inf, 0.5).astype("f4")},
    "seqused": lambda i, j: {"seqused_k": np.array([20], "i4")},
}


def poisoned(i: int, j: int, kind: str) -> tuple[np.ndarray, dict[str, Any]]:
    """(Sq, Sk) bools, True where the row sees the key, and the options that say so."""
    options = HIDING[kind](i, j)
    rows, keys = np.arange(i)[:, None], np.arange(j)[None, :]
    seen = {
        "causal": keys <= rows + j - i,
        "window": (keys >= rows + j - i) & (keys <= rows + j - i + 7),
        "mask": np.broadcast_to(keys != 20, (i, j)),
        "mask-rows": (keys != 20) | (rows > i - 5),
        "bias": np.broadcast_to(keys != 20, (i, j)),
        "seqused": np.broadcast_to(keys < 20, (i, j)),
    }
    return np.ascontiguousarray(seen[kind]), options


@pytest.mark.parametrize("tiles", ["small", "real"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("kind", HIDING)
def test_poison_stays_out(
    request: pytest.FixtureRequest, inputs: Any, tiles: str, poison: float, kind: str
) -> None:
    """The bits of rows that do not see a key are those of the call with zeros there."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    i, j = (41, 61) if tiles == "small" else (330, 400)
    q, k, v = inputs(19, B=1, Sq=i, Sk=j, Hq=2, Hk=1, D=16)
    seen, options = poisoned(i, j, kind)
    bad_key = j - 1 if kind in ("causal", "window") else 20
    blind = ~seen[:, bad_key]
    assert blind.any()
    results = []
    for value in (0.0, poison):
        k[:, bad_key] = v[:, bad_key] = value
        results.append(attend(q, k, v, **options))
    (clean, clean_lse), (got, got_lse) = results
    assert same_bits(got[:, blind], clean[:, blind])
    assert same_bits(got_lse[..., blind], clean_lse[..., blind])
    if not np.isfinite(poison) and not blind.all():
        assert np.isnan(got[:, ~blind]).all()

    # gradients: rows that do not see the key, and keys that no poisoned row sees
    dout = np.random.default_rng(20).standard_normal(clean.shape).astype("f4")
    grads = []
    for value in (0.0, poison):
        k[:, bad_key] = v[:, bad_key] = value
        grads.append(gradients(q, k, v, dout, **options))
    assert same_bits(grads[0]["dq"][:, blind], grads[1]["dq"][:, blind])
    untouched = ~seen[~blind].any(axis=0)
    for name in ("dk", "dv"):
        assert same_bits(grads[0][name][:, untouched], grads[1][name][:, untouched])
        if blind.all():
            assert not grads[1][name][:, bad_key].any()


@pytest.mark.parametrize("tiles", ["small", "real"])
@pytest.mark.parametrize("where", ["q", "dout", "dlse"])
@pytest.mark.parametrize("kind", HIDING)
def test_a_bad_row_stays_a_row(
    request: pytest.FixtureRequest, inputs: Any, tiles: str, where: str, kind: str
) -> None:
    """A NaN in one query, or its gradient, reaches that row and the keys that it sees."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    i, j = (41, 61) if tiles == "small" else (330, 400)
    q, k, v = inputs(21, B=1, Sq=i, Sk=j, Hq=2, Hk=1, D=16)
    seen, options = poisoned(i, j, kind)
    bad, others = i // 3, np.arange(i) != i // 3
    rng = np.random.default_rng(22)
    arrays = {
        "q": q,
        "dout": rng.standard_normal(q.shape).astype("f4"),
        "dlse": rng.standard_normal((1, 2, i)).astype("f4"),
    }
    grads, outs = [], []
    for value in (0.0, np.nan):
        (arrays[where].swapaxes(1, 2) if where == "dlse" else arrays[where])[:, bad] = value
        outs.append(attend(arrays["q"], k, v, **options))
        grads.append(gradients(k=k, v=v, **arrays, **options))
    assert same_bits(outs[0][0][:, others], outs[1][0][:, others])
    assert same_bits(outs[0][1][..., others], outs[1][1][..., others])
    assert same_bits(grads[0]["dq"][:, others], grads[1]["dq"][:, others])
    assert np.isnan(grads[1]["dq"][:, bad]).all()
    for name in ("dk", "dv"):
        assert same_bits(grads[0][name][:, ~seen[bad]], grads[1][name][:, ~seen[bad]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout_heads", [(1, 1), (8, 2)])
def test_the_future_does_not_leak(inputs: Any, dtype: str, layout_heads: tuple[int, int]) -> None:
    """Other keys behind t, huge ones too, leave the rows before t with their bits, although the
    norms of these keys decide how later rows are computed."""
    for length, cuts in ((9, (1, 3)), (1100, (1, 33, 300, 513, 1000))):
        q, k, v = inputs(
            23, B=1, Sq=length, Hq=layout_heads[0], Hk=layout_heads[1], D=64, dtype=dtype
        )
        before = attend(q, k, v, causal=True)
        for t in cuts:
            other = k.copy(), v.copy()
            other[0][:, t:] *= 100
            other[1][:, t:] = -3
            after = attend(q, *other, causal=True)
            assert same_bits(before[0][:, :t], after[0][:, :t])
            assert same_bits(before[1][..., :t], after[1][..., :t])


def test_an_unbounded_row_leaves_its_neighbours(inputs: Any, oracle: Any) -> None:
    q, k, v = inputs(24, B=1, Sq=512, Sk=1500, D=64)
    before = attend(q, k, v)
    for rows in (slice(100, 101), slice(0, 300)):  # few: by index; many: all at once
        other = q.copy()
        other[:, rows] *= 40
        after = attend(other, k, v)
        keep = np.ones(512, bool)
        keep[rows] = False
        assert same_bits(before[0][:, keep], after[0][:, keep])
        assert same_bits(before[1][..., keep], after[1][..., keep])
        want, want_lse = oracle(other, k, v)
        assert error(after[0], want) < 2e-5
        assert error(after[1], want_lse) < 1e-6


# ---- same bits -----------------------------------------------------------------------------------
def everything(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int, dtype: Any = "f4") -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    yield "causal", {
        "q": draw(2, 700, 4, 64), "k": draw(2, 700, 2, 64), "v": draw(2, 700, 2, 64),
        "causal": True,
    }  # fmt: skip
    yield "bias", {
        "q": draw(1, 300, 4, 32), "k": draw(1, 500, 4, 32), "v": draw(1, 500, 4, 32),
        "bias": draw(4, 300, 500), "sinks": draw(4), "softcap": 5.0,
    }  # fmt: skip
    yield (
        "decode",
        {"q": draw(1, 2, 8, 64), "k": draw(1, 20_000, 2, 64), "v": draw(1, 20_000, 2, 64)},
    )
    yield (
        "half",
        {
            "q": draw(1, 400, 4, 64, dtype=ml_dtypes.bfloat16),
            "k": draw(1, 400, 2, 64, dtype=ml_dtypes.bfloat16),
            "v": draw(1, 400, 2, 64, dtype=ml_dtypes.bfloat16),
        },
    )


@pytest.mark.parametrize("name", ["causal", "bias", "decode", "half"])
def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call = dict(everything(25))[name]
    seen = []
    for threads in (1, 2, 5, 2):
        monkeypatch.setenv("PORTATTN_NUM_THREADS", str(threads))
        out, lse = attend(**call)
        made = gradients(**call, dout=np.ones_like(out))
        seen.append([out, lse, *made.values()])
    for other in seen[1:]:
        assert all(same_bits(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("lengths", [(300, 300), (7, 90), (1, 600)])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("heads", [(6, 6), (8, 4)])
def test_heads_that_share_a_tile_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], causal: Any, heads: tuple[int, int]
) -> None:
    """Each head alone, and all together; one has scores that need a maximum, one a NaN, and one
    an infinite value that is hidden from most of its rows."""
    rng = np.random.default_rng(61)
    q = rng.standard_normal((1, lengths[0], heads[0], 64)).astype("f4")
    k, v = (rng.standard_normal((1, lengths[1], heads[1], 64)).astype("f4") for _ in "kv")
    k[:, :, 1] *= 40
    q[:, 0, 0] = np.nan
    v[:, -1, 2] = np.inf
    shared: list[int] = []
    real = decode.together

    def together(*args: Any, **how: Any) -> int:
        shared.append(real(*args, **how))
        return shared[-1]

    monkeypatch.setenv("PORTATTN_NUM_THREADS", "1")
    monkeypatch.setattr(decode, "together", together)
    monkeypatch.setattr(decode, "TURNS", 1)
    whole = attend(q, k, v, causal=causal or False)
    assert max(shared) > 1
    monkeypatch.setattr(decode, "together", lambda *_, **__: 1)
    alone = attend(q, k, v, causal=causal or False)
    assert same_bits(whole[0], alone[0]) and same_bits(whole[1], alone[1])


def test_buffers_are_kept_and_can_be_freed(monkeypatch: pytest.MonkeyPatch, inputs: Any) -> None:
    spare = workspace.Workspaces("float32", 2)
    with spare.lend() as first, spare.lend() as second, spare.lend() as third:
        assert len({id(first), id(second), id(third)}) == 3
        first.array("scores", 100)
    with spare.lend() as again, spare.lend() as other:
        assert {id(again), id(other)} <= {id(first), id(second), id(third)}  # two of them
        again.array("scores", workspace.KEPT // 4 + 1)
    with pytest.raises(ZeroDivisionError), spare.lend() as broken:
        raise ZeroDivisionError
    with spare.lend() as last:
        assert last not in (again, broken)  # too large, and left in an unknown state
    spare.clear()
    with spare.lend() as new:
        assert new is not last

    monkeypatch.setenv("PORTATTN_NUM_THREADS", "1")
    q, k, v = inputs(62, B=1, Sq=300, Hq=2, D=64)
    tracemalloc.start()
    try:
        BACKEND.release()
        before = tracemalloc.get_traced_memory()[0]
        attend(q, k, v)
        kept = tracemalloc.get_traced_memory()[0] - before
        attend(q, k, v)
        assert tracemalloc.get_traced_memory()[0] - before <= kept + (64 << 10)
        BACKEND.release()
        assert tracemalloc.get_traced_memory()[0] - before < 128 << 10 < kept
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["causal", "decode"])
def test_the_batch_does_not_change_bits(name: str) -> None:
    call = dict(everything(26))[name]
    one = {n: x[:1] if n in "qkv" else x for n, x in call.items()}
    many = {
        n: np.concatenate([x[:1], 2 * x[:1], x[:1]]) if n in "qkv" else x for n, x in call.items()
    }
    padded = dict(one)
    used = one["k"].shape[1]
    for n in "kv":
        padded[n] = np.pad(one[n], ((0, 0), (0, 500), (0, 0), (0, 0)), constant_values=np.nan)
    for n in ("causal",):
        if n in padded:
            padded[n] = "bottom_right"
    out, lse = attend(**one)
    for other, other_lse in (attend(**many), attend(**padded, seqused_k=np.array([used], "i4"))):
        assert same_bits(out[0], other[0])
        assert same_bits(lse[0], other_lse[0])
    assert same_bits(attend(**many)[0][0], attend(**many)[0][2])


def test_packed_has_the_bits_of_separate_calls() -> None:
    rng = np.random.default_rng(27)
    lens_q, lens_k = [7, 300, 1, 130], [7, 300, 5000, 900]
    (q, starts_q), (k, starts_k) = packed(rng, lens_q, 4, 32), packed(rng, lens_k, 2, 32)
    v = packed(rng, lens_k, 2, 32)[0]
    out, lse = attend(
        q, k, v, layout="thd", cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, causal="bottom_right"
    )
    for b in range(4):
        at_q, at_k = (slice(s[b], s[b + 1]) for s in (starts_q, starts_k))
        one, one_lse = attend(q[None, at_q], k[None, at_k], v[None, at_k], causal="bottom_right")
        assert same_bits(out[at_q], one[0])
        assert same_bits(lse[:, at_q], one_lse[0])


# ---- the caller's arrays -------------------------------------------------------------------------
def views(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """``x`` as it may lie in a caller's memory."""
    yield "fortran", np.asfortranarray(x)
    yield "reversed", np.ascontiguousarray(x[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    yield "every other", wide[..., ::2]
    fused = np.zeros((*x.shape[:2], 3, *x.shape[2:]), x.dtype)
    fused[:, :, 1] = x
    yield "fused", fused[:, :, 1]
    raw = np.zeros(x.nbytes + 1, np.uint8)
    odd = raw[1:].view(x.dtype).reshape(x.shape)
    odd[...] = x
    assert not odd.flags.aligned
    yield "unaligned", odd
    frozen = x.copy()
    frozen.flags.writeable = False
    yield "read-only", frozen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("length", [9, 150])
def test_any_strides(inputs: Any, dtype: str, length: int) -> None:
    q, k, v = inputs(28, B=2, Sq=length, Hq=2, D=16, dtype=dtype)
    dout = q[..., ::-1].copy()
    want, want_lse = attend(q, k, v, causal=True)
    want_grads = gradients(q, k, v, dout, causal=True)
    for (name, a), (_, b), (_, c), (_, d) in zip(*map(views, (q, k, v, dout)), strict=True):
        before = [x.copy() for x in (a, b, c)]
        out, lse = attend(a, b, c, causal=True)
        bound = TOLERANCE[dtype]
        assert error(out, want.astype("f8")) <= bound, name
        assert error(lse, want_lse.astype("f8")) <= bound, name
        for n, x in gradients(a, b, c, d, causal=True).items():
            assert error(x, want_grads[n].astype("f8")) <= 4 * bound, name
        assert all(same_bits(x, y) for x, y in zip(before, (a, b, c), strict=True)), name


def test_expanded_inputs(inputs: Any) -> None:
    """Stride 0 along heads, batch and sequence."""
    q, k, v = inputs(29, B=2, Sq=70, Sk=65, Hq=4, Hk=4, D=32, dtype="bfloat16")
    mask = np.random.default_rng(30).random((70, 65)) > 0.3
    for shape in ((2, 65, 1, 32), (1, 65, 4, 32), (2, 1, 4, 32)):
        a, b = (np.broadcast_to(x[tuple(slice(n) for n in shape)], k.shape) for x in (k, v))
        got = attend(q, a, b, mask=mask)
        want = attend(q, a.copy(), b.copy(), mask=mask)
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


def test_results_in_any_strides(inputs: Any) -> None:
    q, k, v = inputs(31, B=2, Sq=150, Hq=2, D=16)
    want, _ = attend(q, k, v)
    for name, out in views(np.zeros_like(q)):
        if out.flags.writeable:
            assert portattn.attention(q, k, v, out=out, backend="numpy") is out
            assert error(out, want.astype("f8")) < 1e-6, name


# ---- memory --------------------------------------------------------------------------------------
def peak(call: dict[str, Any], *, backward: bool) -> tuple[int, int]:
    """Bytes that `run` allocates at most, and what the plan says."""
    names = {"q", "k", "v", "bias", "mask", "sinks", "alibi_slopes"}
    described = {n: recognise(x, n) for n, x in call.items() if n in names}
    options = {n: x for n, x in call.items() if n not in names}
    problem = Problem.from_arrays(**described, **options)

    def empty(shape: tuple[int, ...], dtype: str) -> Array:
        return recognise(np.zeros(shape, dtype), "out")

    filled = Call(
        **described,
        out=recognise(np.zeros(problem.out_shape, call["q"].dtype), "out"),
        lse=empty(problem.lse_shape, problem.accumulator),
    )
    if backward:
        problem = problem.as_backward()
        filled.dout = filled.out
        for n in ("q", "k", "v", "bias", "sinks"):
            if n in described:
                setattr(filled, f"d{n}", recognise(np.zeros_like(call[n]), n))
    plan = BACKEND.plan(problem, Machine.here())
    BACKEND.run(problem, plan, filled)  # threads, caches and the BLAS controller exist now
    BACKEND.release()
    tracemalloc.start()
    try:
        BACKEND.run(problem, plan, filled)
        return tracemalloc.get_traced_memory()[1], plan.workspace_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("kind", ["full", "causal", "bias", "mask", "gqa", "softcap"])
def test_the_plan_covers_the_workspace(dtype: str, kind: str, backward: bool) -> None:
    rng = np.random.default_rng(32)
    heads = (4, 1) if kind == "gqa" else (2, 2)
    q = rng.standard_normal((1, 600, heads[0], 64)).astype(dtype)
    k = rng.standard_normal((1, 1200, heads[1], 64)).astype(dtype)
    call: dict[str, Any] = {"q": q, "k": k, "v": k}
    call |= {
        "causal": {"causal": "bottom_right"},
        "bias": {"bias": rng.standard_normal((2, 600, 1200)).astype(dtype)},
        "mask": {"mask": rng.random((600, 1200)) > 0.5},
        "softcap": {"softcap": 3.0, "sinks": np.zeros(2, dtype)},
    }.get(kind, {})
    used, planned = peak(call, backward=backward)
    assert used <= planned <= 64 << 20


GROWTH = 40 << 10  # a number for each further row or key would be 48 KiB and more


@pytest.mark.parametrize("backward", [False, True])
def test_the_workspace_does_not_grow(monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    # One thread: which of several gets the largest tile is the system's choice.
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "1")
    rng = np.random.default_rng(33)

    def most(call: dict[str, Any]) -> int:
        return peak(call, backward=backward)[0]

    used = []
    for n in (8192, 32768):
        q, k = (rng.standard_normal((1, m, 1, 16)).astype("f4") for m in (n, n))
        used.append(most({"q": q, "k": k, "v": k, "window": (64, 0)}))
    assert used[1] <= used[0] + GROWTH
    used = []
    for n in (1 << 17, 3 << 17):  # tiles of as many keys as there ever are
        q, k = (rng.standard_normal((1, m, 4, 4)).astype("f4") for m in (1, n))
        used.append(most({"q": q, "k": k, "v": k}))
    assert used[1] <= used[0] + GROWTH


def test_a_long_call_fits_in_a_gibibyte(fresh: Any) -> None:
    """65,536 queries and keys under a limit of the address space, 1 GiB above the inputs."""
    fresh(
        "import numpy as np, resource, portattn\n"
        "x = np.random.default_rng(0).standard_normal((1, 65536, 1, 64), 'f4')\n"
        "portattn.attention(x[:, :600], x[:, :600], x[:, :600], backend='numpy')\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)\n"
        "out = portattn.attention(x, x, x, window=(2000, 0), backend='numpy')\n"
        "few = portattn.attention(x[:, -300:], x, x, backend='numpy')\n"
        "assert np.isfinite(out).all() and np.isfinite(few).all()\n",
        timeout=240,
    )


# ---- threads, processes, errors ------------------------------------------------------------------
def blas_threads() -> list[int]:
    from threadpoolctl import threadpool_info

    return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]


def test_eight_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "3")
    limit = blas_threads()
    call = dict(everything(34))["causal"]
    want = attend(**call)
    barrier, got, failures = threading.Barrier(8), {}, []

    def work(n: int) -> None:
        try:
            barrier.wait()
            for _ in range(3):
                got[n] = attend(**call)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert len(got) == 8
    assert all(same_bits(want[0], out) and same_bits(want[1], lse) for out, lse in got.values())
    assert blas_threads() == limit


def test_the_limit_on_blas_is_counted() -> None:
    limit = blas_threads()
    with pool.BLAS:
        assert set(blas_threads()) <= {1}
        with pool.BLAS:
            assert set(blas_threads()) <= {1}
        assert set(blas_threads()) <= {1}
    assert blas_threads() == limit


def test_the_limit_holds_whoever_set_one_before(inputs: Any) -> None:
    """threadpoolctl lets only the thread that was first set a limit: not so for ours."""
    from threadpoolctl import threadpool_limits

    q, k, v = inputs(37, B=1, Sq=600, Hq=4, D=64)
    want, limit, inside = attend(q, k, v), blas_threads(), []

    def elsewhere() -> None:
        with pool.BLAS:
            inside.append(blas_threads())
        inside.append(attend(q, k, v)[0])

    with threadpool_limits(limits=2, user_api="blas"):
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        assert set(blas_threads()) <= {2}
    assert set(inside[0]) <= {1}
    assert same_bits(inside[1], want[0])
    assert blas_threads() == limit


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timer")
def test_control_c(monkeypatch: pytest.MonkeyPatch, inputs: Any) -> None:
    """The call ends with its helpers idle, and the next one works."""
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "3")
    q, k, v = inputs(38, B=1, Sq=4000, Hq=8, D=64)
    small = [x[:, :300] for x in (q, k, v)]
    want, limit = attend(*small), blas_threads()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            for _ in range(100):
                attend(q, k, v)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert blas_threads() == limit
    assert same_bits(attend(*small)[0], want[0])


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_failing_job_ends_the_call(error: type[BaseException], threads: int) -> None:
    done, lock, raised = [], threading.Lock(), threading.Event()

    def job(n: int, _: object) -> None:
        if n == 5:
            raised.set()
            raise error("job 5")
        if n > 5 and not done_before:
            raised.wait(30)
            time.sleep(0.002)  # the failing thread needs a moment to say so
        with lock:
            done.append(n)

    done_before = False
    with pytest.raises(error, match="job 5"):
        pool.run_jobs((lambda w, n=n: job(n, w) for n in range(10_000)), nullcontext, threads)
    assert len(done) < 9_999
    done_before = True
    done.clear()
    pool.run_jobs((lambda w, n=n: job(n + 6, w) for n in range(100)), nullcontext, threads)
    assert sorted(done) == list(range(6, 106))


def test_a_failure_leaves_blas_and_pool_usable(
    monkeypatch: pytest.MonkeyPatch, inputs: Any
) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "2")
    q, k, v = inputs(35, B=1, Sq=900, Hq=4, D=64)
    want, limit = attend(q, k, v), blas_threads()

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(forward._RowTile, "run", broken)
        with pytest.raises(MemoryError, match="no room"):
            attend(q, k, v)
    assert blas_threads() == limit
    assert same_bits(attend(q, k, v)[0], want[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes(fresh: Any) -> None:
    done = fresh(
        "import os, threading, numpy as np, portattn\n"
        "from portattn.backends.numpy_tiled import pool\n"
        "from threadpoolctl import threadpool_info\n"
        "x = np.random.default_rng(0).standard_normal((1, 900, 4, 64), 'f4')\n"
        "want = portattn.attention(x, x, x, backend='numpy')\n"
        "before = [i['num_threads'] for i in threadpool_info() if i['user_api'] == 'blas']\n"
        "inside, leave = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with pool.BLAS:\n"
        "        inside.set(); leave.wait()\n"
        "holder = threading.Thread(target=hold); holder.start(); inside.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    after = [i['num_threads'] for i in threadpool_info() if i['user_api'] == 'blas']\n"
        "    got = portattn.attention(x, x, x, backend='numpy')\n"
        "    os._exit(0 if after == before and got.tobytes() == want.tobytes() else 1)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "leave.set(); holder.join()\n"
        "print('status', status)\n",
        PORTATTN_NUM_THREADS="3",
    )
    assert done.stdout.strip() == "status 0"


def test_a_process_ends(fresh: Any) -> None:
    """With idle helpers, and after a call at exit, when no new thread may start."""
    fresh(
        "import atexit, numpy as np, portattn\n"
        "x = np.ones((1, 900, 4, 64), 'f4')\n"
        "def last():\n"
        "    assert (portattn.attention(x, x, x, backend='numpy') == 1).all()\n"
        "atexit.register(last)\n"
        "portattn.attention(x, x, x, backend='numpy')\n",
        PORTATTN_NUM_THREADS="3",
    )


@pytest.mark.parametrize("text", ["0", "-2", "two", "1.5"])
def test_a_bad_number_of_threads(monkeypatch: pytest.MonkeyPatch, inputs: Any, text: str) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", text)
    with pytest.raises(ValueError, match="PORTATTN_NUM_THREADS"):
        config.thread_count()


def test_floating_point_traps_of_the_caller_stay_out(inputs: Any) -> None:
    q, k, v = inputs(36, B=1, Sq=400, Sk=300, Hq=2)
    with np.errstate(all="raise"):
        out, lse = attend(q, 100 * k, v, causal="bottom_right")
        gradients(q, 100 * k, v, out, causal="bottom_right")
    assert np.isfinite(out).all()
    assert (lse[..., :100] == -np.inf).all()


# ---- the backend's own answers -------------------------------------------------------------------
def test_why_not() -> None:
    here = Machine.here()
    problem = Problem.from_numbers(head_dim=256, dtype="bfloat16", seq_q=1 << 18, causal=True)
    assert BACKEND.why_not(None, here) == ()
    assert BACKEND.why_not(problem, here) == ()
    assert BACKEND.why_not(replace(problem, device="cpu"), here) == ()
    (reason,) = BACKEND.why_not(replace(problem, device="cuda:1"), here)
    assert (reason.code, reason.got) == ("device", "cuda:1")
    fast = Problem.from_numbers(head_dim=64, precision="tf32")
    (reason,) = BACKEND.why_not(fast, here)
    assert (reason.code, reason.got, reason.limit) == ("precision", "tf32", "ieee")
    assert len(BACKEND.why_not(replace(fast, device="cuda:0"), here)) == 2


def test_the_plan_is_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTATTN_NUM_THREADS", "2")
    plans = [
        BACKEND.plan(Problem.from_numbers(head_dim=64, seq_q=n), Machine.here())
        for n in (1 << 12, 1 << 18)
    ]
    assert plans[0].tile == plans[1].tile == (("block_q", 512), ("block_k", 384))
    assert plans[0].workspace_bytes <= plans[1].workspace_bytes <= 64 << 20
    assert plans[0].config == config.choose(Problem.from_numbers(head_dim=64))


def test_importing_the_backend_imports_no_numpy(fresh: Any) -> None:
    done = fresh(
        "import sys\n"
        "from portattn.backends.numpy_tiled import BACKEND\n"
        "from portattn.problem import Problem\n"
        "from portattn.machine import Machine\n"
        "p = Problem.from_numbers(head_dim=64)\n"
        "assert BACKEND.why_not(p, Machine.here()) == ()\n"
        "BACKEND.plan(p, Machine.here())\n"
        "print([m for m in ('numpy', 'threadpoolctl', 'ml_dtypes') if m in sys.modules])\n"
        "print(len(BACKEND.kernel_files()))\n"
    )
    assert done.stdout.split("\n")[0] == "[]"
    assert int(done.stdout.split("\n")[1]) >= 8


# ---- bands ---------------------------------------------------------------------------------------
@given(
    st.integers(1, 12), st.integers(0, 12), st.sampled_from([None, "top_left", "bottom_right"]),
    st.none() | st.tuples(*[st.none() | st.integers(0, 30)] * 2), st.data(),
)  # fmt: skip
def test_bands_are_what_they_say(
    rows: int, keys: int, causal: str | None, window: Any, data: st.DataObject
) -> None:
    band = Band.of(rows, keys, causal, window)
    i0 = data.draw(st.integers(0, rows - 1))
    i1 = data.draw(st.integers(i0 + 1, rows))
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    at = i + (0 if causal == "top_left" else keys - rows)
    seen = np.ones((rows, keys), bool)
    left, right = window or (None, None)
    if causal:
        seen &= j <= at
    if left is not None:
        seen &= j >= at - left
    if right is not None:
        seen &= j <= at + right
    part = seen[i0:i1]
    assert np.array_equal(band.counts(i0, i1), part.sum(1))
    assert np.array_equal(~band.hidden(i0, i1, 0, keys), part) or keys == 0
    j0, j1 = band.seen(i0, i1)
    assert not part[:, :j0].any()
    assert not part[:, j1:].any()
    a, b = band.shared(i0, i1)
    assert part[:, a:b].all()
    assert band.covers(i0, i1, 0, keys) == part.all() or keys == 0
    tiles = list(key_tiles(band, i0, i1, 0, keys, 5, 2))
    covered = [n for a, b in tiles for n in range(a, b)]
    assert covered == list(range(j0, j1))
    for a, b in tiles:
        first, last = band.seeing(a, b)
        assert not seen[:first, a:b].any()
        assert not seen[last:, a:b].any()
