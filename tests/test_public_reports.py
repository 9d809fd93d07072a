"""Faults that users reported of attention kernels elsewhere, as tests under their ids.

Each states the input that went wrong and the answer that is due here. What only a GPU can show
stands in test_public_reports_gpu; the rest of it is listed at the end, and asks for its test as
soon as a backend computes there.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import portattn
from portattn import select
from portattn.machine import Machine

bf16 = ml_dtypes.bfloat16
INF = np.inf


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """In the layout of most reports: (B, H, S, D)."""
    return portattn.attention(q, k, v, **({"layout": "bhsd"} | options))


def rows(values: Any, dtype: Any = np.float32) -> np.ndarray:
    """One head of one sequence with head dim 1."""
    return np.asarray(values, dtype).reshape(1, 1, -1, 1)


def forward_backward(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Any:
    out, lse = attend(q, k, v, return_lse=True, **options)
    return portattn.attention_backward(q, k, v, out, lse, dout, **({"layout": "bhsd"} | options))


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got.astype(float) - want).max(initial=0))


@contextlib.contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """What Python and NumPy allocate inside, at the most."""
    peak = [0]
    gc.collect()
    tracemalloc.start()
    try:
        yield peak
        peak[0] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(params=["shipped tiles", "small tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tiles that are shipped, and small ones, so that short sequences cross many borders."""
    if request.param == "small tiles":
        from portattn.backends.numpy_tiled import config

        small = config.Config(
            block_q=32, short_q=32, block_k=32, edge_k=16, stream_k=32, chunk_k=64
        )
        monkeypatch.setattr(config, "choose", lambda problem: small)
    select.forget()
    yield
    monkeypatch.undo()
    select.forget()


# ---- tails and lengths ---------------------------------------------------------------------------
TAILS = [1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 191, 192, 193, 255, 257, 513]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", TAILS)
def test_bug_001_lengths_off_the_tile(tiles, inputs, oracle, length: int, causal: bool) -> None:
    arrays = inputs(100, Sq=length, Hq=8, D=16, dtype="bfloat16", layout="bhsd")
    out = attend(*arrays, causal=causal)
    assert error(out, oracle(*arrays, layout="bhsd", causal=causal)[0]) <= 2e-2


@pytest.mark.parametrize("length", [64, 128, 192, 256, 320])
def test_bug_002_backward_masks_the_pad_columns(tiles, length: int) -> None:
    shape = (1, 1, length, 64)
    q, k = np.full(shape, 4, bf16), np.full(shape, -4, bf16)  # every score is -128
    grads = forward_backward(
        q,
        k,
        normal(0, *shape, dtype=bf16),
        np.ones(shape, bf16),
        mask=np.ones((length, length), bool),
    )
    assert all(np.isfinite(g.astype(float)).all() for g in grads[:3])
    assert error(grads.dq, np.zeros(shape)) <= 1e-3
    assert error(grads.dv, np.ones(shape)) <= 1e-2


def test_bug_004_packed_with_empty_sequences_and_single_queries() -> None:
    q, k, v = (normal(i, n, h, 64, dtype=bf16) for i, (n, h) in enumerate(((2, 9), (8, 3), (8, 3))))
    options: dict[str, Any] = {"scale": 1.0, "causal": "bottom_right"}
    out = portattn.attention(
        q,
        k,
        v,
        layout="thd",
        cu_seqlens_q=np.array([0, 0, 1, 1, 2], np.int32),
        cu_seqlens_k=np.array([0, 0, 3, 3, 8], np.int32),
        **options,
    )
    assert out.shape == (2, 9, 64)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        alone = portattn.attention(q[None, row : row + 1], k[None, keys], v[None, keys], **options)
        np.testing.assert_array_equal(out[row], alone[0, 0])


@pytest.mark.parametrize("backend", ["auto", "numpy"])
@pytest.mark.parametrize("dtype", ["float16", bf16, "float32", "float64"])
def test_bug_005_zero_sized_arrays(backend: str, dtype: Any) -> None:
    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, dtype)

    for q, k in (((0, 2, 4, 8), (0, 2, 5, 8)), ((1, 0, 4, 8), None), ((1, 2, 0, 8), (1, 2, 5, 8))):
        if k is None:  # no heads: a head count that does not divide
            with pytest.raises(ValueError, match="q, k"):
                attend(ones(*q), ones(1, 2, 5, 8), ones(1, 2, 5, 8), backend=backend)
            continue
        out, lse = attend(ones(*q), ones(*k), ones(*k[:3], 6), return_lse=True, backend=backend)
        assert out.shape == (*q[:3], 6) and out.size == 0 and lse.shape == q[:3]
    none = ones(1, 2, 0, 8)
    out, lse = attend(ones(1, 2, 3, 8), none, none, return_lse=True, backend=backend)
    assert (out == 0).all() and (lse == -INF).all()
    with pytest.raises(ValueError, match="head dim 0"):
        attend(ones(1, 2, 3, 0), ones(1, 2, 5, 0), ones(1, 2, 5, 8), backend=backend)


# ---- causal --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "out"),
    [
        (2, 5, "bottom_right", [1.5, 2.0]),
        (5, 2, "bottom_right", [0, 0, 0, 0, 0.5]),
        (2, 5, "top_left", [0, 0.5]),
        (5, 2, "top_left", [0, 0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_bug_007_alignment_is_named(queries: int, keys: int, causal: str, out: list[float]) -> None:
    q, k, v = rows(np.zeros(queries)), rows(np.zeros(keys)), rows(np.arange(keys))
    got, lse = attend(q, k, v, causal=causal, return_lse=True)
    np.testing.assert_allclose(got.ravel(), out, atol=1e-6)
    if (queries, causal) == (5, "bottom_right"):
        np.testing.assert_allclose(lse.ravel(), [-INF, -INF, -INF, 0, math.log(2)], atol=1e-6)
    with pytest.raises(ValueError, match=r'"bottom_right".*"top_left"'):
        attend(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("start", [1, 2, 3, 5, 33])
def test_bug_009_no_row_sees_a_later_key(tiles, inputs, dtype: str, start: int) -> None:
    q, k, v = inputs(Sq=64, Hq=4, D=64, dtype=dtype, layout="bhsd")
    before = attend(q, k, v, causal=True)
    for x, seed in ((k, 7), (v, 8)):
        x[:, :, start:] = normal(seed, 1, 4, 64 - start, 64)
    after = attend(q, k, v, causal=True)
    np.testing.assert_array_equal(before[:, :, :start], after[:, :, :start])
    assert (before[:, :, start:] != after[:, :, start:]).any()


# ---- rows that see nothing, and values that are no masks -----------------------------------------
def test_bug_018_an_unused_empty_row_leaves_gradients_alone() -> None:
    q, k, v = (normal(i, 2, 1, 4, 8) for i in range(3))
    padding = np.array([[0, 0, 0, 0], [0, 0, 1, 1]], bool)  # True: no token there
    mask = ~padding[:, None, None, :]
    dout = np.zeros_like(q)
    dout[0] = 1
    options: dict[str, Any] = {"window": (1, 0)}
    grads = forward_backward(q, k, v, dout, mask=mask, **options)
    alone = forward_backward(q[:1], k[:1], v[:1], dout[:1], **options)
    out, lse = attend(q, k, v, mask=mask, return_lse=True, **options)
    assert (out[1, 0, 3] == 0).all() and lse[1, 0, 3] == -INF
    for both, one in zip(grads[:3], alone[:3], strict=True):
        assert np.isfinite(both).all()
        np.testing.assert_allclose(both[0], one[0], atol=1e-6)
        assert (both[1] == 0).all()


@pytest.mark.parametrize(
    "low", [np.finfo(np.float32).min, float(ml_dtypes.finfo(bf16).min), -1e30], ids=str
)
def test_bug_019_a_finite_bias_is_no_mask(low: float) -> None:
    q, k, v = np.zeros((1, 1, 3, 4), np.float32), normal(1, 1, 1, 3, 4), normal(2, 1, 1, 3, 4)
    bias = np.ones((3, 3), np.float32)
    bias[0] = low
    out = attend(q, k, v, bias=bias)
    np.testing.assert_allclose(out[0, 0], np.tile(v[0, 0].mean(0), (3, 1)), atol=1e-5)


@pytest.mark.parametrize("length", [511, 512, 513, 600, 2049])
def test_bug_020_whole_blocks_of_hidden_keys_before_the_first_visible(tiles, length: int) -> None:
    ones = np.ones((1, 1, length, 2), np.float32)
    i, j = np.ogrid[:length, :length]
    bias = np.where((j > i) | (j <= i - 10), -INF, 0).astype(np.float32)
    out = attend(ones, ones, ones, bias=bias)
    np.testing.assert_allclose(out, 1.0, atol=1e-6)


# ---- large scores --------------------------------------------------------------------------------
def test_bug_022_scores_below_any_finite_sentinel(tiles) -> None:
    shape = (1, 1, 64, 128)
    q, k = np.full(shape, 50, bf16), np.full(shape, -50, bf16)
    v = np.broadcast_to(np.arange(64)[:, None], shape).astype(bf16)
    out, lse = attend(q, k, v, return_lse=True)
    assert error(out, np.full(shape, 31.5)) <= 0.2
    np.testing.assert_allclose(lse, -28280.11, rtol=1e-4)


@pytest.mark.parametrize("order", ["as drawn", "ascending", "descending"])
@pytest.mark.parametrize("spread", [32, 64])
def test_bug_025_wide_scores_in_any_order(tiles, oracle, spread: int, order: str) -> None:
    q, v = normal(0, 1, 2, 1024, 128, dtype=bf16), normal(2, 1, 2, 1024, 128, dtype=bf16)
    k = (spread * normal(1, 1, 2, 1024, 128)).astype(bf16)
    if order != "as drawn":
        sign = 1 if order == "ascending" else -1
        for h in range(2):
            score = k[0, h].astype(np.float32) @ q[0, h, 0].astype(np.float32)
            ranked = np.argsort(sign * score)
            k[0, h], v[0, h] = k[0, h, ranked], v[0, h, ranked]
    out = attend(q, k, v)
    assert np.isfinite(out.astype(float)).all()
    assert error(out, oracle(q, k, v, layout="bhsd")[0]) <= 3e-2


# ---- poison where nobody looks -------------------------------------------------------------------
@pytest.mark.parametrize("poison", [np.nan, INF, -INF, 1e10])
@pytest.mark.parametrize("name", ["k", "v"])
def test_bug_026_poison_in_a_masked_key(name: str, poison: float) -> None:
    arrays = {n: np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4) for n in "qkv"}
    mask = np.array([[True, False], [True, False]])
    arrays[name][0, 0, 1, 0] = 0
    want = attend(**arrays, mask=mask)
    arrays[name][0, 0, 1, 0] = poison
    np.testing.assert_array_equal(attend(**arrays, mask=mask), want)


def test_bug_028_no_read_beyond_a_view(tiles) -> None:
    def poisoned(seed: int, length: int, room: int) -> tuple[np.ndarray, np.ndarray]:
        buffer = np.full((1, 2, room, 128), np.nan, np.float32)
        buffer[:, :, :length, :80] = normal(seed, 1, 2, length, 80)
        view = buffer[:, :, :length, :80]
        return view, view.copy()

    (q, q2), (k, k2), (v, v2) = poisoned(0, 5, 8), poisoned(1, 37, 64), poisoned(2, 37, 64)
    np.testing.assert_array_equal(attend(q, k, v), attend(q2, k2, v2))


# ---- strides -------------------------------------------------------------------------------------
@pytest.mark.parametrize("permuted", ["qkv", "q", "k", "v"])
def test_bug_029_permuted_arrays(permuted: str) -> None:
    arrays = {n: normal(i, 84, 3, 3, 64) for i, n in enumerate("qkv")}
    copies = {n: np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for n, x in arrays.items()}
    views = {n: x.transpose(0, 2, 1, 3) if n in permuted else copies[n] for n, x in arrays.items()}
    assert error(attend(**views), attend(**copies)) <= 1e-6


@pytest.mark.parametrize(
    "view",
    [lambda x: x.swapaxes(-1, -2), lambda x: x.swapaxes(-1, -2)[..., ::2], lambda x: x[..., ::-1]],
    ids=["inner stride", "every other", "negative"],
)
def test_bug_031_the_head_dim_has_a_stride(view: Callable[[np.ndarray], np.ndarray]) -> None:
    arrays = [view(normal(i, 2, 2, 16, 9)) for i in range(3)]
    assert arrays[0].strides[-1] != 4
    assert error(attend(*arrays), attend(*(x.copy() for x in arrays))) <= 1e-6


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("keys", [33, 65, 97])
def test_bug_032_stride_zero(queries: int, keys: int, axis: int) -> None:
    shape = [2, 8, keys, 64]
    q = normal(0, 2, 8, queries, 64, dtype=bf16)
    mask = np.random.default_rng(3).random((queries, keys)) < 0.7
    one = [n if i != axis else 1 for i, n in enumerate(shape)]
    k, v = (np.broadcast_to(normal(seed, *one, dtype=bf16), shape) for seed in (1, 2))
    assert k.strides[axis] == 0
    want = attend(q, k.copy(), v.copy(), mask=mask)
    np.testing.assert_array_equal(attend(q, k, v, mask=mask), want)


@pytest.mark.parametrize(("dtype", "offsets"), [("float32", (1, 2, 3)), ("float16", (1, 3, 5))])
def test_bug_035_arrays_that_start_anywhere(dtype: str, offsets: tuple[int, ...]) -> None:
    """In elements off the storage, and off the element itself."""
    shape = (6, 4, 64, 64)
    size = math.prod(shape)
    storage = normal(0, size + 8, dtype=dtype)
    views = [storage[o : o + size].reshape(shape) for o in offsets]
    want = attend(*(x.copy() for x in views))
    assert error(attend(*views), want) <= 1e-6
    raw = [np.frombuffer(b"\0" + x.tobytes(), dtype, offset=1).reshape(shape) for x in views]
    assert not raw[0].flags.aligned
    assert error(attend(*raw), want) <= 1e-6


def test_bug_037_reversed_keys_and_values() -> None:
    q, k, v = (normal(i, 1, 2, 4, 8) for i in range(3))
    assert error(attend(q, k[:, :, ::-1], v[:, :, ::-1]), attend(q, k, v)) <= 1e-6


# ---- offsets beyond 32 bits ----------------------------------------------------------------------
def test_bug_012_views_of_a_fused_projection_beyond_2_to_the_31() -> None:
    """The buffer is never touched but in its last rows, so its pages never exist."""
    try:
        qkv = np.empty((1, 99866, 3, 56, 128), np.float16)
    except MemoryError:
        pytest.skip("this machine gives out no 4.3 GB of address space")
    qkv[:, -64:] = normal(0, 1, 64, 3, 56, 128)
    q, k, v = (qkv[:, -64:, i] for i in range(3))
    whole = qkv[:, :, 1]
    assert (whole.shape[1] - 1) * whole.strides[1] // 2 > 2**31 - 1
    want = portattn.attention(q.copy(), k.copy(), v.copy())
    assert error(portattn.attention(q, k, v), want) <= 2e-3
    used = portattn.attention(
        q, whole[:, ::-1], qkv[:, ::-1, 2], seqused_k=np.array([64], np.int32)
    )
    assert error(used, want) <= 2e-3


def test_bug_013_a_broadcast_mask_stays_broadcast() -> None:
    q, k, v = (normal(i, 4, 8, 256, 16) for i in range(3))
    mask = np.random.default_rng(3).random((1, 1, 256, 256)) < 0.5
    wide = np.broadcast_to(mask, (4, 8, 256, 256))
    dout = np.ones_like(q)
    attend(q, k, v, mask=mask)
    with peak_bytes() as peak:
        small = attend(q, k, v, mask=mask)
    assert peak[0] < 2 * 4 * q.nbytes
    np.testing.assert_array_equal(small, attend(q, k, v, mask=wide))
    np.testing.assert_array_equal(small, attend(q, k, v, mask=wide.copy()))
    for a, b in zip(
        forward_backward(q, k, v, dout, mask=mask)[:3],
        forward_backward(q, k, v, dout, mask=wide.copy())[:3],
        strict=True,
    ):
        assert error(a, b) <= 1e-3


def test_bug_014_a_bias_whose_outer_stride_needs_64_bits() -> None:
    try:
        buffer = np.zeros((2, 1, 24000, 48000), np.float16)  # 2.1 GiB each batch item, untouched
    except MemoryError:
        pytest.skip("this machine gives out no 4.3 GiB of address space")
    bias = buffer[:, :, :16, :20]
    assert bias.strides[0] > 2**31
    bias[...] = normal(3, 2, 1, 16, 20)
    q, k, v = (normal(i, 2, 4, n, 8, dtype=np.float16) for i, n in enumerate((16, 20, 20)))
    np.testing.assert_array_equal(attend(q, k, v, bias=bias), attend(q, k, v, bias=bias.copy()))


# ---- head dims -----------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [49_152, 65_535, 65_536, 65_537, 101_376, 232_448])
@pytest.mark.parametrize("backward", [False, True])
def test_bug_039_a_plan_fits_the_limit_it_was_made_for(limit: int, backward: bool) -> None:
    decision = portattn.query(
        head_dim=256, dtype="float16", shared_memory=limit, backward=backward, seq_q=4096
    )
    for candidate in decision.candidates:
        assert candidate.accepted or candidate.reasons
        if candidate.plan is not None:
            assert 0 <= candidate.plan.shared_memory_bytes <= limit


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("dim", "length", "which"), [
    (256, 512, "bug_040"), (160, 97, "bug_041"), (192, 97, "bug_041"), (224, 97, "bug_041"),
    (256, 97, "bug_041"),
])  # fmt: skip
def test_wide_backward(
    oracle_backward, dim: int, length: int, which: str, dtype: str, causal: bool
) -> None:
    """bug_040 and bug_041: no gradient is worse than twice a plain implementation's."""
    kind = {"bfloat16": bf16}.get(dtype, dtype)
    fused = normal(0, 1, length, 3, 2, dim, dtype=kind)  # (B, S, 3, H, D), as the report packs it
    q, k, v = (fused[:, :, i] for i in range(3))
    dout = normal(1, 1, length, 2, dim, dtype=kind)
    out, lse = portattn.attention(q, k, v, causal=causal, return_lse=True)
    got = portattn.attention_backward(q, k, v, out, lse, dout, causal=causal)
    want = oracle_backward(q, k, v, dout, causal=causal)
    plain = plain_backward(q, k, v, dout, causal)
    for name, p in plain.items():
        mine = np.abs(getattr(got, name).astype(float) - want[name])
        theirs = np.abs(p.astype(kind).astype(float) - want[name])
        assert mine.max() <= 2 * theirs.max()
        assert mine.mean() <= 2 * theirs.mean()


def plain_backward(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> dict[str, np.ndarray]:
    """Untiled, in float32, from the same rounded inputs and the same rounded output."""
    kind = q.dtype
    q, k, v, dout = (x.astype(np.float32).swapaxes(1, 2) for x in (q, k, v, dout))
    score = q @ k.swapaxes(2, 3) / np.float32(math.sqrt(q.shape[-1]))
    if causal:
        score = np.where(np.tri(score.shape[-1], dtype=bool), score, np.float32(-INF))
    p = np.exp(score - score.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = (p @ v).astype(kind).astype(np.float32)
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(-1, keepdims=True))
    ds /= np.float32(math.sqrt(q.shape[-1]))
    grads = {"dq": ds @ k, "dk": ds.swapaxes(2, 3) @ q, "dv": p.swapaxes(2, 3) @ dout}
    return {name: g.swapaxes(1, 2) for name, g in grads.items()}


@pytest.mark.parametrize("dim", [1, 8, 24, 40, 63, 72, 80, 96, 100, 112, 160, 192, 224])
def test_bug_043_any_head_dim_is_right_or_refused(inputs, oracle, dim: int) -> None:
    arrays = inputs(Sq=128, Sk=256, Hq=8, D=dim, dtype="float16")
    out = portattn.attention(*arrays, causal="bottom_right")
    assert error(out, oracle(*arrays, causal="bottom_right")[0]) <= 5e-3


def test_bug_044_every_feature_counts() -> None:
    q, k = np.zeros((1, 1, 1, 128), np.float32), np.zeros((1, 1, 32, 128), np.float32)
    q[..., 64], k[0, 0, :, 64] = 10, np.arange(32)
    v = np.broadcast_to(np.arange(32, dtype=np.float32)[:, None], (1, 1, 32, 128))
    np.testing.assert_allclose(attend(q, k, v), 30.296, atol=1e-2)


# ---- grouped heads -------------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [1023, 1024, 1025])
def test_bug_047_grouped_decode(oracle, keys: int) -> None:
    q, k, v = (
        normal(i, 1, h, n, 128, dtype=bf16)
        for i, (h, n) in enumerate(((32, 1), (2, keys), (2, keys)))
    )
    first = attend(q, k, v)
    np.testing.assert_array_equal(first, attend(q, k, v))
    assert error(first, oracle(q, k, v, layout="bhsd")[0]) <= 1e-2
    v[:, 0], v[:, 1] = 0, 1
    out = attend(np.zeros_like(q), k, v)
    np.testing.assert_array_equal(out[0, :, 0, 0].astype(int), np.arange(32) // 16)


def test_bug_048_grouped_backward_does_not_expand_keys() -> None:
    """Peak beyond the results: float32 accumulators of the compact size, and the tiles."""
    group, keys, dim = 8, 12288, 256
    q = normal(0, 1, 2 * group, 16, dim, dtype=bf16)
    k, v = (normal(i, 1, 2, keys, dim, dtype=bf16) for i in (1, 2))
    out, lse = attend(q, k, v, return_lse=True)
    problem = portattn.explain(q, k, v, layout="bhsd").problem.as_backward()
    plan = select.decide(problem)["numpy"].plan
    assert plan is not None
    with peak_bytes() as peak:
        grads = portattn.attention_backward(q, k, v, out, lse, np.ones_like(q), layout="bhsd")
    results = sum(g.nbytes for g in grads[:3])
    compact = 4 * (k.size + v.size)  # one float32 accumulator for each element of dk and dv
    assert peak[0] <= 1.1 * (results + compact) + plan.workspace_bytes
    assert peak[0] < group * (k.nbytes + v.nbytes), "as much as expanded keys and values take"


# ---- dtypes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("wide", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["float16", bf16, "float32"])
def test_bug_050_mixed_dtypes_name_all_three(wide: str, dtype: Any) -> None:
    """All 27 combinations stand in test_api.test_mixed_dtypes_raise."""
    arrays = {n: np.ones((1, 1, 8, 16), dtype) for n in "qkv"}
    arrays[wide] = arrays[wide].astype("float64")
    with pytest.raises(TypeError) as caught:
        attend(**arrays)
    assert ", ".join(x.dtype.name for x in arrays.values()) in str(caught.value)


def test_bug_052_long_sums_of_bfloat16() -> None:
    q, k = np.zeros((1, 1, 1, 8), bf16), np.zeros((1, 1, 20000, 8), bf16)
    out, lse = attend(q, k, np.ones_like(k), return_lse=True)
    assert (out == 1.0).all()
    np.testing.assert_allclose(lse, math.log(20000), atol=1e-5)


@pytest.mark.parametrize(
    "convert",
    [
        lambda q, k, v: (q.astype("float64"), k, v),
        lambda q, k, v: tuple(x.astype("int32") for x in (q, k, v)),
        lambda q, k, v: tuple(x.astype("complex64") for x in (q, k, v)),
        lambda q, k, v: tuple(x.astype(">f4") for x in (q, k, v)),
    ],
    ids=["one float64", "int32", "complex64", "big-endian"],
)
def test_bug_099_arrays_of_other_numbers(convert: Callable[..., Any]) -> None:
    arrays = [normal(i, 1, 1, 4, 8) for i in range(3)]
    with pytest.raises(TypeError, match="got"):
        attend(*convert(*arrays))
    wide = attend(*(x.astype("float64") for x in arrays))
    assert wide.dtype == np.float64 and error(attend(*arrays), wide) <= 1e-6


# ---- softcap, window -----------------------------------------------------------------------------
def test_bug_054_softcap_comes_before_mask_and_bias() -> None:
    zero, v = rows([0, 0]), rows([1, 100])
    out = attend(zero, zero, v, mask=np.array([True, False]), softcap=1.0)
    assert (out == 1.0).all()  # 27.625: masked, then capped
    out = attend(zero, zero, v, bias=np.array([0, 3], np.float32), softcap=1.0)
    weights = np.exp([0, 3]) / np.exp([0, 3]).sum()
    np.testing.assert_allclose(out.ravel(), weights @ [1, 100], rtol=1e-6)


@pytest.mark.parametrize(
    ("window", "out"),
    [
        ((1, 0), [0, 0.5, 1.5, 2.5]),
        ((0, 1), [0.5, 1.5, 2.5, 3]),
        ((None, 0), [0, 0.5, 1, 1.5]),
        ((0, None), [1.5, 2, 2.5, 3]),
    ],
)
def test_bug_056_a_window_bounds_both_sides_without_causal(window: Any, out: list[float]) -> None:
    zero, v = rows(np.zeros(4)), rows(np.arange(4))
    np.testing.assert_allclose(attend(zero, zero, v, window=window).ravel(), out, atol=1e-6)
    grads = forward_backward(zero, zero, v, rows(np.eye(4)[0]), window=window)
    seen = grads.dv.ravel() > 0
    assert list(seen) == [window[1] is None or j <= window[1] for j in range(4)]


def test_bug_057_a_window_counts_without_a_mask(inputs) -> None:
    arrays = inputs(Sq=64, D=16, layout="bhsd")
    every = np.ones((64, 64), bool)
    results = {}
    for window in (None, (31, 0), (0, 0)):
        results[window] = attend(*arrays, window=window)
        np.testing.assert_array_equal(results[window], attend(*arrays, window=window, mask=every))
    for a, b in itertools.combinations(results.values(), 2):
        assert error(a, b) > 0.01


def test_bug_058_the_window_does_not_count_the_query_itself() -> None:
    zero, v = rows(np.zeros(8)), rows(np.arange(8))
    out = attend(zero, zero, v, causal=True, window=(2, 0))
    np.testing.assert_allclose(out.ravel(), [0, 0.5, 1, 2, 3, 4, 5, 6], atol=1e-6)


@pytest.mark.parametrize("window", [(-1, -3), (-2, 0), (2.5, 0), (-1, -1)])
def test_bug_060_only_none_is_unbounded(window: Any) -> None:
    x = normal(0, 1, 1, 4, 8)
    with pytest.raises((ValueError, TypeError), match=r"^window: got .*None for an unlimited side"):
        attend(x, x, x, window=window)
    np.testing.assert_array_equal(attend(x, x, x, window=(None, None)), attend(x, x, x))


def test_bug_061_no_hidden_dropout() -> None:
    x = normal(0, 1, 2, 8, 8)
    np.testing.assert_array_equal(attend(x, x, x), attend(x, x, x))
    for name in ("dropout", "dropout_p", "training"):
        with pytest.raises(TypeError, match=name):
            attend(x, x, x, **{name: 0.5})


def test_bug_061_the_faces_refuse_dropout() -> None:
    torch = pytest.importorskip("torch")
    sdpa = pytest.importorskip("portattn.compat.sdpa")
    x = torch.zeros(1, 2, 8, 8)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        sdpa.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


# ---- the log-sum-exp -----------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"scale": 0}])
@pytest.mark.parametrize("dtype", ["float16", bf16, "float32"])
def test_bug_063_natural_logarithms(dtype: Any, options: dict[str, Any]) -> None:
    x = np.zeros((1, 2, 8, 4), dtype) + (1 if options else 0)
    _, lse = attend(x.astype(dtype), x.astype(dtype), x.astype(dtype), return_lse=True, **options)
    assert (lse.dtype, lse.shape) == (np.float32, (1, 2, 8))
    np.testing.assert_allclose(lse, 2.0794415, atol=1e-6)


@pytest.mark.parametrize("cut", [0, 1, 12, 16])
def test_bug_064_split_and_merge(cut: int) -> None:
    q, k, v = (normal(i, 1, 2, n, 16) for i, n in enumerate((4, 16, 16)))
    parts = [
        attend(q, k[:, :, s], v[:, :, s], return_lse=True)
        for s in (slice(None, cut), slice(cut, None))
    ]
    outs, lses = zip(*parts, strict=True)
    out, lse = portattn.merge(outs, lses, layout="bhsd")
    want, want_lse = attend(q, k, v, return_lse=True)
    assert error(out, want) <= 1e-6 and error(lse, want_lse) <= 1e-6
    if cut in (0, 16):
        np.testing.assert_array_equal(out, want)


def test_bug_064_two_empty_parts_are_empty() -> None:
    q, none = normal(0, 1, 2, 4, 16), np.zeros((1, 2, 0, 16), np.float32)
    out, lse = attend(q, none, none, return_lse=True)
    both, both_lse = portattn.merge([out, out], [lse, lse], layout="bhsd")
    assert (both == 0).all() and (both_lse == -INF).all()


# ---- gradients -----------------------------------------------------------------------------------
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 8, 16, 16), (1, 1, 16, 16), (2, 1, 1, 16), (16, 16), (1, 8, 16, 1)]
)
def test_bug_069_the_gradient_of_a_broadcast_bias(
    oracle_backward, shape: tuple[int, ...], expanded: bool
) -> None:
    q, k, v = (normal(i, 2, 8, 16, 16) for i in range(3))
    if expanded:
        k, v = (np.broadcast_to(x[:, :1], x.shape) for x in (k, v))
    bias, dout = normal(3, *shape), normal(4, 2, 8, 16, 16)
    got = forward_backward(q, k, v, dout, bias=bias)
    full = np.broadcast_to(bias, (2, 8, 16, 16)).copy()
    want = oracle_backward(q, k, v, dout, layout="bhsd", bias=full)["dbias"]
    kept = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i in range(4) if kept[i] == 1)
    assert got.dbias.shape == shape
    np.testing.assert_allclose(
        got.dbias.reshape(kept), want.sum(axes, keepdims=True), atol=1e-5 * 16
    )


# ---- state between calls -------------------------------------------------------------------------
def test_bug_072_no_option_is_left_out_of_a_cache_key(oracle) -> None:
    """Every pair of calls that differ in one option, in both orders."""
    q = normal(0, 1, 2, 4, 8)
    calls: list[dict[str, Any]] = [
        {},
        {"scale": 2.0},
        {"softcap": 1.0},
        {"window": (1, 0)},
        {"window": (0, 1)},
        {"causal": True},
        {"bias": np.tri(4, dtype=np.float32)},
        {"bias": 3 * np.tri(4, dtype=np.float32)},
        {"mask": np.tri(4, dtype=bool)},
        {"sinks": np.array([1, 2], np.float32)},
        {"alibi_slopes": np.array([1, 2], np.float32)},
        {"seqused_k": np.array([2], np.int32)},
    ]
    want = [oracle(q, q, q, layout="bhsd", **options)[0] for options in calls]
    for a, b in itertools.permutations(range(len(calls)), 2):
        assert error(attend(q, q, q, **calls[a]), want[a]) <= 1e-6
        assert error(attend(q, q, q, **calls[b]), want[b]) <= 1e-6
    narrow = attend(q, q, q[..., :3])
    assert narrow.shape == (1, 2, 4, 3) and error(narrow, want[0][..., :3]) <= 1e-6


def test_bug_075_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    q, k, v = (
        normal(i, 6, h, n, 128, dtype=bf16)
        for i, (h, n) in enumerate(((8, 1), (1, 5000), (1, 5000)))
    )
    alone = attend(q[:1], k[:1], v[:1])
    np.testing.assert_array_equal(attend(q, k, v)[:1], alone)
    longer = [np.concatenate([x[:1], np.full((1, 1, 777, 128), np.nan, bf16)], 2) for x in (k, v)]
    used = attend(q[:1], *longer, seqused_k=np.array([5000], np.int32))
    np.testing.assert_array_equal(used, alone)


def test_bug_082_grouped_heads_with_a_mask_need_no_quadratic_memory() -> None:
    peaks = []
    for n in (1000, 2000):
        q, k, v = (normal(i, 1, h, n, 64) for i, h in enumerate((4, 2, 2)))
        mask = np.random.default_rng(3).random((n, n)) < 0.9
        assert portattn.explain(q, k, v, layout="bhsd", mask=mask).chosen == "numpy"
        attend(q, k, v, mask=mask)
        with peak_bytes() as peak:
            attend(q, k, v, mask=mask)
        peaks.append(peak[0])
    assert peaks[1] <= 2.2 * peaks[0]


def test_bug_085_nothing_keeps_inputs_alive() -> None:
    def call() -> list[weakref.ref[np.ndarray]]:
        arrays = [normal(i, 1, 1, 16, 16) for i in range(3)]
        out = attend(*arrays)
        return [weakref.ref(x) for x in (*arrays, out)]

    assert all(ref() is None for ref in call())
    for _ in range(50):
        call()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            call()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()


def test_bug_094_threads_that_start_together() -> None:
    """Eight threads meet a new shape at once, or eight new shapes; each turn has shapes of its
    own, so that nothing is remembered of an earlier one."""
    for turn, same in itertools.product(range(100), (True, False)):
        lengths = [3 + 9 * turn] * 8 if same else [4 + 9 * turn + i for i in range(8)]
        arrays = [normal(i, 1, 1, n % 97 + 1, 1 + n // 97) for i, n in enumerate(lengths)]
        results: list[Any] = [None] * 8
        barrier = threading.Barrier(8)

        def work(i: int, arrays=arrays, results=results, barrier=barrier) -> None:
            barrier.wait()
            try:
                results[i] = attend(arrays[i], arrays[i], arrays[i], causal=True)
            except Exception as failure:  # noqa: BLE001 - shown by the comparison below
                results[i] = failure

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for got, x in zip(results, arrays, strict=True):
            np.testing.assert_array_equal(got, attend(x, x, x, causal=True))


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float64(2), np.float32(2), np.int64(2), np.float16(2)],
    ids=lambda v: type(v).__name__,
)
def test_bug_098_a_number_is_a_number(value: Any) -> None:
    x = normal(0, 1, 1, 4, 8)
    np.testing.assert_array_equal(attend(x, x, x, scale=value), attend(x, x, x, scale=2.0))
    np.testing.assert_array_equal(attend(x, x, x, scale=True), attend(x, x, x, scale=1))
    if isinstance(value, int | np.integer):
        narrow = attend(x, x, x, window=(value, None))
        np.testing.assert_array_equal(narrow, attend(x, x, x, window=(2, None)))


# ---- the machine ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "device", ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_99"]
)
def test_bug_087_a_capability_is_answered_not_guessed(device: str) -> None:
    """An architecture that nobody knows yet included: a plan within its limit, or reasons."""
    decision = portattn.query(head_dim=128, dtype="float16", device=device)
    limit = Machine.pretend(device).cuda.devices[0].shared_memory
    for candidate in decision.candidates:
        if candidate.accepted:
            assert candidate.plan is not None
            assert candidate.plan.shared_memory_bytes <= limit
        else:
            assert all(r.code and r.field for r in candidate.reasons)
    numpy = decision["numpy"]
    assert not numpy.accepted and [r.field for r in numpy.reasons] == ["device"]


def test_bug_092_fork_after_a_call(fresh) -> None:
    """The pool of threads does not live on in the child; the child makes its own."""
    fresh(
        "import os, numpy as np, portattn\n"
        "x = np.ones((2, 300, 4, 16), 'float32')\n"
        "want = portattn.attention(x, x, x)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    same = (portattn.attention(x, x, x) == want).all()\n"
        "    ready = any(b.ready for b in portattn.list_backends())\n"
        "    os._exit(0 if same and ready else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "assert (portattn.attention(x, x, x) == want).all()",
        timeout=30,
    )


@pytest.mark.parametrize("home", ["missing", "unset", "a file", "read-only"])
def test_bug_095_no_folder_to_write_in(fresh, tmp_path: Path, home: str) -> None:
    place = tmp_path / "home"
    if home == "a file":
        place.write_text("")
    elif home == "read-only":
        place.mkdir(mode=0o500)
    fresh(
        "import numpy as np, portattn\n"
        "x = np.ones((1, 3, 1, 4), 'float32')\n"
        "assert (portattn.attention(x, x, x) == 1).all()\n"
        "assert portattn.list_backends()",
        HOME=None if home == "unset" else str(place),
        PORTATTN_DATA_DIR=None,
        XDG_DATA_HOME=None,
        XDG_CACHE_HOME=None,
    )
    if home == "read-only":
        place.chmod(0o700)
        assert not list(place.iterdir())


# ---- what only a GPU shows -----------------------------------------------------------------------
# test_public_reports_gpu has those that any backend can show; these ask for one that is not there.
ON_A_GPU = {
    "BUG-084": (("numba",), "memory that the driver reserves for local arrays"),
    "BUG-085": (("cupy", "numba"), "1,000 calls with staged host arrays (host variant above)"),
    "BUG-093": (("cupy",), "a toolkit without headers: what the probe compile reports"),
    "BUG-101": (("numba",), "-inf and NaN guards of kernels that are compiled with fastmath"),
}


def without_kernels(name: str) -> bool:
    (info,) = [i for i in portattn.list_backends() if i.name == name]
    return "no_kernel" in {r.code for r in info.reasons}


@pytest.mark.gpu
@pytest.mark.parametrize("bug", ON_A_GPU)
def test_on_a_gpu(bug: str) -> None:
    backends, what = ON_A_GPU[bug]
    computing = [n for n in backends if not without_kernels(n)]
    if not computing:
        pytest.skip(f"{' and '.join(backends)}: no kernels in this release")
    pytest.fail(f"{', '.join(computing)} computes on a GPU now; write {bug}: {what}")


# ---- the list is whole ---------------------------------------------------------------------------
REPORTS = [
    "001", "002", "004", "005", "007", "009", "012", "013", "014", "016", "018", "019",
    "020", "022", "025", "026", "028", "029", "031", "032", "035", "037", "039", "040",
    "041", "043", "044", "047", "048", "050", "052", "054", "056", "057", "058", "060",
    "061", "063", "064", "068", "069", "071", "072", "075", "077", "078", "079", "081",
    "082", "084", "085", "087", "089", "091", "092", "093", "094", "095", "096", "097",
    "098", "099", "101",
]  # fmt: skip
ELSEWHERE = {
    "test_torch.py": ("068", "071"),
    "test_machine.py": ("091",),
    "test_triton_interpreted.py": ("097",),
    "test_triton_ahead.py": ("039",),
    "test_triton_kernel_cache.py": ("094", "095"),
    "test_triton_planner.py": ("087",),
    "test_public_reports_gpu.py": (
        "012", "013", "014", "016", "035", "037", "040", "041", "068", "075", "077", "078", "079",
        "081", "085", "089", "092", "094", "095", "096", "098",
    ),
}  # fmt: skip
# What some reports ask of the suite itself (041: versions beside each failure; 097: no reference
# under an interpreter) stands with the tests of the suite.


def test_every_report_has_its_test() -> None:
    assert len(REPORTS) == len(set(REPORTS)) == 63
    here = {n for name in globals() for n in re.findall(r"test_bug_(\d{3})", name)} | {"040", "041"}
    listed = {bug.removeprefix("BUG-") for bug in ON_A_GPU}
    for file, numbers in ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text()
        assert [n for n in numbers if f"bug_{n}" not in text] == []
    assert here | listed | {n for numbers in ELSEWHERE.values() for n in numbers} == set(REPORTS)
