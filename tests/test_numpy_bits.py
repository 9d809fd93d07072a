"""What the NumPy backend promises beside right numbers: bits that depend on nothing but what a row
sees, arrays read where they lie, and bounded memory.

The rule kept here: where bits are compared, they are compared as bits.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy_kit import TOLERANCE, attend, error, everything, gradients, packed, same_bits

import portattn
from portattn.arrays import Array, recognise
from portattn.backends.numpy_tiled import BACKEND, decode, workspace
from portattn.backends.numpy_tiled.config import SHORT
from portattn.contract import Call
from portattn.machine import Machine
from portattn.problem import Problem

# ---- same bits -----------------------------------------------------------------------------------


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


def test_a_short_sequence_beside_a_long_one_keeps_its_bits() -> None:
    """Their tiles have other sizes, which no neighbour changes."""
    rng = np.random.default_rng(68)
    lengths = [1500, SHORT + 300]
    (q, starts), (k, _), (v, _) = (packed(rng, lengths, 8, 64) for _ in "qkv")
    together = portattn.attention(
        q, k, v, layout="thd", cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right"
    )
    for a, b in itertools.pairwise(starts):
        alone = attend(*(x[None, a:b] for x in (q, k, v)), causal="bottom_right")[0]
        assert same_bits(together[a:b], alone[0])


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
