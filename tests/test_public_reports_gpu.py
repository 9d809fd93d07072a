"""Faults that users reported of attention kernels elsewhere: those that only a GPU shows, under
their ids, for every backend of this release that computes there.

The rule kept here: the report's own input and its own answer; what needs two GPUs says so.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import portattn  # noqa: E402
from portattn.machine import Machine  # noqa: E402
from portattn.registry import find_backends  # noqa: E402

F16, BF16, F32, F64, I32 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32


def computing() -> list[str]:
    """The backends of this release that have GPU kernels; the driver is not asked."""
    found, machine = find_backends(), Machine.pretend("sm_90")
    return [
        name
        for name in ("triton", "cupy", "numba")
        if (entry := found.get(name)) is not None
        and entry.backend is not None
        and "no_kernel" not in {r.code for r in entry.backend.why_not(None, machine)}
    ]


pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("backend", computing())]


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """Gigabytes of one test are not there in the next."""
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def normal(seed: int, *shape: int, dtype: Any = F16, device: str = "cuda") -> Any:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=F32).to(dtype)


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """In the layout of most reports: (B, H, S, D)."""
    return portattn.attention(q, k, v, **({"layout": "bhsd"} | options))


def forward_backward(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Any:
    options = {"layout": "bhsd"} | options
    out, lse = portattn.attention(q, k, v, return_lse=True, **options)
    return out, portattn.attention_backward(q, k, v, out, lse, dout, **options)


def host(x: Any) -> np.ndarray:
    """The numbers on the host, for the oracle, which widens them."""
    return x.detach().to(F32).cpu().numpy()  # type: ignore[no-any-return]


def error(got: Any, want: Any) -> float:
    if isinstance(want, np.ndarray):
        want = torch.from_numpy(want).to(got.device)
    if not bool(torch.isfinite(got).all()):
        return math.inf
    return float((got.to(F64) - want.to(F64)).abs().max()) if got.numel() else 0.0


def plain(q: Any, k: Any, v: Any, dout: Any, causal: bool, *, exact: bool) -> tuple[Any, ...]:
    """Output and gradients, untiled, one head at a time; (B, H, S, D).

    ``exact``: in float64. Else what an implementation without a kernel of its own computes from
    16-bit inputs: products are summed in float32 and the softmax is float32, and what stands
    between two matrix products (P, dP, dS) is stored in the 16-bit dtype, since those products take
    nothing else; so are the results. FlashAttention's tests measure against the same, with the
    scores rounded too. Float32 up to the end would leave the last rounding as the only error, and
    no kernel whose matrix products take 16 bits has twice that.
    """
    assert torch.get_float32_matmul_precision() == "highest"  # no TF32
    made: list[list[Any]] = [[], [], [], []]
    kind, scale = q.dtype, q.shape[-1] ** -0.5

    def stored(x: Any) -> Any:
        return x if exact else x.to(kind).to(F32)

    for h in range(q.shape[1]):
        q_h, k_h, v_h, dout_h = (x[:, h].to(F64 if exact else F32) for x in (q, k, v, dout))
        score = q_h @ k_h.mT * scale
        if causal:
            hidden = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            score = score.masked_fill(hidden, -math.inf)
        p = stored(torch.softmax(score, -1))
        out, dp = stored(p @ v_h), stored(dout_h @ v_h.mT)
        ds = stored(p * (dp - (dout_h * out).sum(-1, keepdim=True)) * scale)
        results = out, ds @ k_h, ds.mT @ q_h, p.mT @ dout_h
        for into, x in zip(made, results, strict=True):
            into.append(stored(x))
    return tuple(torch.stack(x, 1) for x in made)


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """An operation of torch's that waits for the device is an error inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def need_memory(size: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < size:
        pytest.skip(f"needs {size / 1e9:.0f} GB of device memory; {free / 1e9:.1f} GB are free")


def two_devices() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA devices; {count} is there")


# ---- offsets beyond 32 bits ----------------------------------------------------------------------
@pytest.mark.parametrize("rows", [64, 512])
def test_bug_012_views_of_a_fused_projection(backend: str, rows: int) -> None:
    need_memory(9 * 10**9)
    qkv = torch.zeros((1, 99866, 3, 56, 128), dtype=F16, device="cuda")
    qkv[:, -2 * rows :] = normal(0, 1, 2 * rows, 3, 56, 128)
    q, k, v = (qkv[:, -rows:, i] for i in range(3))
    assert (qkv.shape[1] - 1) * qkv.stride(1) > 2**31 - 1
    copies = [x.contiguous() for x in (q, k, v)]
    want = portattn.attention(*copies, causal=True, backend=backend)
    assert error(portattn.attention(q, k, v, causal=True, backend=backend), want) <= 2e-3
    # the whole of the keys, from a row far beyond 2**31 on: the rest is hidden by the window
    band: dict[str, Any] = {"causal": "bottom_right", "window": (rows - 1, 0), "backend": backend}
    near = [qkv[:, -2 * rows :, i].contiguous() for i in (1, 2)]
    want = portattn.attention(copies[0], *near, **band)
    assert error(portattn.attention(q, qkv[:, :, 1], qkv[:, :, 2], **band), want) <= 2e-3
    dout = normal(1, 1, rows, 56, 128)
    (_, got), (_, want) = (
        forward_backward(*x, dout, layout="bshd", causal=True, backend=backend)
        for x in ((q, k, v), copies)
    )
    for a, b in zip(got[:3], want[:3], strict=True):
        assert error(a, b) <= 2e-3 * max(1.0, float(b.abs().max()))


def test_bug_013_a_dense_mask_of_2_to_the_32(backend: str) -> None:
    need_memory(12 * 10**9)
    q, k, v, dout = (normal(i, 64, 16, 2048, 64) for i in range(4))
    mask = (torch.rand((2048, 2048), device="cuda") < 0.5)[None, None]
    attend(q, k, v, mask=mask, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(q, k, v, mask=mask, backend=backend)
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * q.nbytes
    del out
    small, grads = forward_backward(q, k, v, dout, mask=mask, backend=backend)
    dense = mask.expand(64, 16, 2048, 2048).contiguous()
    assert dense.numel() == 2**32
    wide, wide_grads = forward_backward(q, k, v, dout, mask=dense, backend=backend)
    assert error(small, wide) <= 1e-3
    for a, b in zip(grads[:3], wide_grads[:3], strict=True):
        assert error(a, b) <= 1e-3


def test_bug_014_a_bias_whose_outer_stride_needs_64_bits(backend: str) -> None:
    need_memory(15 * 10**9)
    n = 12180
    q, k, v = (normal(i, 2, 16, n, 64) for i in range(3))
    buffer = torch.empty((2, 16, n, 12184), dtype=F16, device="cuda").normal_()
    bias = buffer[..., :n]
    assert bias.stride(0) > 2**31
    out = attend(q, k, v, bias=bias, backend=backend)
    for b, h in ((0, 0), (1, 0), (1, 15)):
        rows = torch.tensor([0, 1, 6000, n - 1], device="cuda")
        score = q[b, h, rows].to(F64) @ k[b, h].to(F64).T / 8 + bias[b, h, rows].to(F64)
        want = torch.softmax(score, -1) @ v[b, h].to(F64)
        assert error(out[b, h, rows], want) <= 2e-3


# ---- limits of the grid --------------------------------------------------------------------------
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((65536, 8, 4, 64), F16),
        ((1, 65536, 10, 16), F32),
        ((10923 * 6, 1, 5, 32), F16),
        ((1, 10923 * 6, 5, 32), F16),
    ],
    ids=str,
)
def test_bug_016_beyond_65535(
    backend: str, shape: tuple[int, ...], dtype: Any, backward: bool
) -> None:
    q, k, v, dout = (normal(i, *shape, dtype=dtype) for i in range(4))
    got = [attend(q, k, v, backend=backend)]
    if backward:
        _, grads = forward_backward(q, k, v, dout, backend=backend)
        got = list(grads[:3])
    batch, heads = shape[:2]
    for b, h in ((0, 0), (batch - 1, heads - 1), (batch // 2, heads // 3), (batch // 7, heads - 1)):
        one = [x[b : b + 1, h : h + 1].cpu().numpy() for x in (q, k, v, dout)]
        want = [attend(*one[:3], backend="numpy")]
        if backward:
            want = list(forward_backward(*one, backend="numpy")[1][:3])
        for a, w in zip(got, want, strict=True):
            bound = (4e-3 if dtype == F16 else 2e-5) * max(1.0, float(np.abs(w).max()))
            assert error(a[b, h].cpu(), w[0, 0]) <= bound


# ---- where arrays start --------------------------------------------------------------------------
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize(("dtype", "offsets"), [(F32, (1, 2, 3)), (F16, (1, 3, 5))], ids=str)
def test_bug_035_arrays_that_start_anywhere(
    backend: str, dtype: Any, offsets: tuple[int, ...], length: int
) -> None:
    """Plain here; `tests/sanitizer_spread.py` is what compute-sanitizer runs."""
    shape = (6, 4, length, 64)
    size = math.prod(shape)
    storage = normal(0, size + 8, dtype=dtype)
    views = [storage[o : o + size].view(shape) for o in offsets]
    dout = storage[7 : 7 + size].view(shape)
    assert all(x.data_ptr() % 16 for x in views)
    want, want_grads = forward_backward(*(x.clone() for x in views), dout.clone(), backend=backend)
    out, grads = forward_backward(*views, dout, backend=backend)
    assert error(out, want) <= (2e-3 if dtype == F16 else 4e-6)
    for a, b in zip(grads[:3], want_grads[:3], strict=True):
        scale = max(1.0, float(b.abs().max()))
        assert error(a, b) <= (8e-3 if dtype == F16 else 2e-5) * scale


def same_or_refused(backend: str, arrays: list[Any], to_host: Callable[[Any], np.ndarray]) -> None:
    q, k, v = arrays
    want = to_host(attend(q, k, v, backend=backend))
    try:
        got = attend(q, k[:, :, ::-1], v[:, :, ::-1], backend=backend)
    except (TypeError, ValueError, portattn.Unsupported):
        return
    assert got.shape == (1, 2, 4, 8)
    np.testing.assert_allclose(to_host(got), want, atol=1e-6)


def test_bug_037_reversed_arrays_of_cupy(backend: str) -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed", exc_type=ImportError)
    arrays = [cupy.asarray(host(normal(i, 1, 2, 4, 8))) for i in range(3)]
    same_or_refused(backend, arrays, cupy.asnumpy)


def test_bug_037_reversed_arrays_of_numba(backend: str) -> None:
    cuda = pytest.importorskip(
        "numba.cuda", reason="numba-cuda is not installed", exc_type=ImportError
    )
    arrays = [cuda.to_device(host(normal(i, 1, 2, 4, 8))) for i in range(3)]
    try:
        _ = arrays[1][:, :, ::-1]
    except (NotImplementedError, ValueError, TypeError, IndexError) as refusal:
        pytest.skip(f"Numba makes no reversed device array: {refusal}")
    same_or_refused(backend, arrays, lambda x: x.copy_to_host())


# ---- head dims -----------------------------------------------------------------------------------
def within_twice_plain(
    backend: str, arrays: list[Any], causal: bool, heads: list[int] | None = None
) -> None:
    """Each gradient's error, maximum and mean, is at most twice that of a plain implementation in
    the same dtype (see `plain`); in these ``heads``, or in all."""
    _, grads = forward_backward(*arrays, causal=causal, backend=backend)
    some = slice(None) if heads is None else heads
    few = [x[:, some] for x in arrays]
    want, theirs = plain(*few, causal, exact=True)[1:], plain(*few, causal, exact=False)[1:]
    versions = (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}"
    )
    for name, got, exact, other in zip("qkv", grads[:3], want, theirs, strict=True):
        mine = (got[:, some].to(F64) - exact).abs()
        bound = (other.to(F64) - exact).abs()
        assert bool(torch.isfinite(got).all()), f"d{name}; {versions}"
        assert float(mine.max()) <= 2 * float(bound.max()), f"d{name}; {versions}"
        assert float(mine.mean()) <= 2 * float(bound.mean()), f"d{name}; {versions}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads", "length"), [(2, 512), (36, 8192)])
def test_bug_040_head_dim_256_backward(backend: str, heads: int, length: int, causal: bool) -> None:
    need_memory(20 * 10**9)
    arrays = [normal(i, 1, heads, length, 256, dtype=BF16) for i in range(4)]
    # heads are alike, and a head in float64 has half a gigabyte of scores
    within_twice_plain(backend, arrays, causal, [0, 17, 35] if heads == 36 else None)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [160, 192, 224, 256])
def test_bug_041_wide_heads_backward(backend: str, dim: int, dtype: Any, causal: bool) -> None:
    fused = normal(0, 1, 97, 3, 4, dim, dtype=dtype)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    within_twice_plain(backend, [q, k, v, normal(1, 1, 4, 97, dim, dtype=dtype)], causal)


# ---- gradients through torch ---------------------------------------------------------------------
@pytest.mark.parametrize("alone", ["q", "k", "v", "bias"])
def test_bug_068_one_input_alone_requires_grad(
    backend: str, alone: str, oracle_backward: Any
) -> None:
    made = {n: normal(i, 1, 1, 64, 16, dtype=F32) for i, n in enumerate("qkv")}
    made["bias"] = normal(3, 1, 1, 64, 64, dtype=F32)
    made[alone].requires_grad_()
    out = attend(**made, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), made[alone])
    numbers = {n: host(x) for n, x in made.items()}
    q, k, v = (numbers.pop(n) for n in "qkv")
    want = oracle_backward(q, k, v, np.ones_like(q), layout="bhsd", **numbers)
    assert error(grad, want[f"d{alone}"]) <= 1e-4


# ---- the same bits -------------------------------------------------------------------------------
def test_bug_075_decode_alone_and_in_a_batch_of_64(backend: str) -> None:
    q, k, v = (
        normal(i, 64, h, n, 128, dtype=BF16)
        for i, (h, n) in enumerate(((8, 1), (1, 5000), (1, 5000)))
    )
    alone = attend(q[:1], k[:1], v[:1], backend=backend)
    assert torch.equal(attend(q, k, v, backend=backend)[:1], alone)
    assert torch.equal(attend(q[:1], k[:1], v[:1], backend=backend), alone)
    nan = torch.full((1, 1, 120, 128), math.nan, dtype=BF16, device="cuda")
    longer = [torch.cat([x[:1], nan], 2) for x in (k, v)]
    used = torch.tensor([5000], dtype=I32, device="cuda")
    padded = attend(q[:1], *longer, seqused_k=used, backend=backend)
    # another capacity may be split otherwise: one unit in the last place of bfloat16
    assert error(padded, alone) <= 2**-7 * max(1.0, float(alone.abs().max()))


# ---- graphs and streams --------------------------------------------------------------------------
def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """``call`` in a CUDA graph, after a warm-up on a stream of its own; the graph and what the call
    returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_bug_077_a_graph_at_other_key_lengths(backend: str, layout: str) -> None:
    capacity, block = 4097, 16
    q = normal(0, 2, 1, 8, 128, dtype=BF16)
    used = torch.tensor([129, 129], dtype=I32, device="cuda")
    options: dict[str, Any] = {"seqused_k": used, "return_lse": True, "backend": backend}
    if layout == "dense":
        k, v = (normal(i, 2, capacity, 2, 128, dtype=BF16) for i in (1, 2))
    else:
        blocks = -(-capacity // block)
        k, v = (normal(i, 2 * blocks, block, 2, 128, dtype=BF16) for i in (1, 2))
        order = torch.randperm(2 * blocks, device="cuda").to(I32)
        options["block_table"] = order.view(2, blocks).contiguous()
    graph, (out, lse) = captured(lambda: portattn.attention(q, k, v, **options))
    for length in (1, 4096, 4097, 0, 129):
        used.copy_(torch.tensor([length, max(0, length - 7)], dtype=I32))
        q.copy_(normal(length + 3, 2, 1, 8, 128, dtype=BF16))
        out.fill_(math.nan)
        graph.replay()
        want, want_lse = portattn.attention(q, k, v, **options)
        assert torch.equal(out, want) and torch.equal(lse, want_lse), length


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bug_077_a_graph_of_prefill_and_backward(backend: str, causal: bool) -> None:
    arrays = [normal(i, 1, 4, 600, 128, dtype=BF16) for i in range(4)]

    def call() -> Any:
        return forward_backward(*arrays, causal=causal, backend=backend)

    graph, (out, grads) = captured(call)
    for turn in range(3):
        for i, x in enumerate(arrays):
            x.copy_(normal(10 * turn + i + 5, *x.shape, dtype=BF16))
        for x in (out, *grads[:3]):
            x.fill_(math.nan)
        graph.replay()
        want, want_grads = call()
        assert torch.equal(out, want)
        for a, b in zip(grads[:3], want_grads[:3], strict=True):
            assert torch.equal(a, b)


def behind_a_sleep(backend: str, stream: Any, turns: int, length: int) -> None:
    """On ``stream``: a long kernel, then q is filled, then attention, then its output is used."""
    q, k, v = (torch.zeros((1, length, 2, 64), dtype=F16, device="cuda") for _ in range(3))
    v += torch.arange(length, device="cuda", dtype=F16)[None, :, None, None] / length
    k[:, :, :, 0] = torch.linspace(-1, 1, length, device="cuda", dtype=F16)[None, :, None]
    fills = [normal(i, 1, length, 2, 64) for i in range(2)]
    want = [portattn.attention(x, k, v, backend=backend) + 1 for x in fills]
    assert not torch.equal(*want)
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(stream), no_synchronisation():
        for turn in range(turns):
            q.zero_()
            torch.cuda._sleep(400_000)
            q.copy_(fills[turn % 2])
            results.append(portattn.attention(q, k, v, backend=backend) + 1)
    torch.cuda.synchronize()
    assert all(torch.equal(x, want[turn % 2]) for turn, x in enumerate(results))


@pytest.mark.parametrize("length", [100, 400])
def test_bug_078_the_current_stream_200_times(backend: str, length: int) -> None:
    behind_a_sleep(backend, torch.cuda.Stream(), 200, length)


def test_bug_078_handle_0_as_an_external_stream(backend: str) -> None:
    behind_a_sleep(backend, torch.cuda.ExternalStream(0), 20, 100)


# ---- two devices ---------------------------------------------------------------------------------
def test_bug_079_arrays_on_the_device_that_is_not_current(backend: str) -> None:
    two_devices()
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            qkv = torch.ones((4, 16, 3, 32, 64), dtype=F16, device=f"cuda:{other}")
            q, k, v = (qkv[:, :, i] for i in range(3))
            out = portattn.attention(q, k, v, scale=1, backend=backend)
            assert torch.cuda.current_device() == current
            assert out.device == qkv.device
            assert float(out.abs().float().sum()) == 131072
            with pytest.raises(ValueError, match=f"cuda:{current}"):
                portattn.attention(q, k.to(f"cuda:{current}"), v, backend=backend)


def test_bug_081_one_kernel_on_devices_0_1_0(backend: str) -> None:
    two_devices()
    for length in (100, 600):
        want = None
        for index in (0, 1, 0):
            with torch.cuda.device(index):
                arrays = [normal(i, 1, 4, length, 64, device="cuda:0") for i in range(4)]
                moved = [x.to(f"cuda:{index}") for x in arrays]
                out, grads = forward_backward(*moved, causal=True, backend=backend)
            got = [x.cpu() for x in (out, *grads[:3])]
            want = want or got
            capabilities = {torch.cuda.get_device_capability(i) for i in range(2)}
            for a, b in zip(got, want, strict=True):
                if len(capabilities) == 1:
                    assert torch.equal(a, b)
                assert error(a, b) <= 4e-3 * max(1.0, float(b.abs().max()))


# ---- state between calls -------------------------------------------------------------------------
def test_bug_085_nothing_is_kept_of_1000_calls(backend: str) -> None:
    def call() -> list[Any]:
        arrays = [normal(i, 1, 2, 64, 64) for i in range(4)]
        out, grads = forward_backward(*arrays, backend=backend)
        return [weakref.ref(x) for x in (*arrays, out, *grads[:3])]

    assert all(ref() is None for ref in call())
    for _ in range(20):
        call()
    gc.collect()
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(1000):
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert free - torch.cuda.mem_get_info()[0] < 1 << 20


def test_bug_089_a_probe_launch_whose_numbers_are_wrong(backend: str) -> None:
    entry = find_backends()[backend].backend
    if not hasattr(entry, "self_test"):
        pytest.skip(f"backend {backend} launches no probe of its own; `portattn conformance` does")
    pytest.fail("the backend has a self test now: make its numbers wrong, ask why_not")


FORK = {
    "before": """
import os, traceback
import portattn
portattn.list_backends()
pid = os.fork()
if pid == 0:
    try:
        import torch
        x = torch.ones(1, 64, 2, 64, device="cuda", dtype=torch.float16)
        right = bool((portattn.attention(x, x, x, backend={backend!r}) == 1).all())
        os._exit(0 if right else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
    "after": """
import os, traceback
import numpy as np, torch
import portattn
x = torch.ones(1, 64, 2, 64, device="cuda", dtype=torch.float16)
assert bool((portattn.attention(x, x, x, backend={backend!r}) == 1).all())
pid = os.fork()
if pid == 0:
    try:
        y = np.ones((2, 300, 4, 16), np.float32)
        right = bool(np.abs(portattn.attention(y, y, y) - 1).max() < 1e-5)
        found = {{b.name: b for b in portattn.list_backends()}}
        codes = [r.code for r in found[{backend!r}].reasons]
        right = right and "cuda_lost_in_fork" in codes and found["numpy"].ready
        os._exit(0 if right else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert bool((portattn.attention(x, x, x, backend={backend!r}) == 1).all())
""",
}


@pytest.mark.parametrize("when", FORK)
def test_bug_092_fork(backend: str, fresh: Callable[..., Any], when: str) -> None:
    fresh(FORK[when].format(backend=backend), timeout=150, PYTHONWARNINGS="ignore")


# ---- compiled kernels ----------------------------------------------------------------------------
THREADS = """
import collections, json, threading
import torch, triton
import portattn

compiled = collections.Counter()
def note(*, key, fn, **_):
    compiled[f"{fn.name} {key}"] += 1
triton.knobs.runtime.jit_post_compile_hook = note

def draw(seed, length, dim):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn((1, length, 2, dim), generator=generator, device="cuda").half()

def turn(shapes):
    arrays = [draw(i, *shape) for i, shape in enumerate(shapes)]
    torch.cuda.synchronize()
    results, barrier = [None] * 8, threading.Barrier(8)
    def work(i):
        barrier.wait()
        try:
            results[i] = portattn.attention(*[arrays[i]] * 3, causal=True, backend="triton")
            torch.cuda.synchronize()
        except Exception as failure:
            results[i] = failure
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for x, got in zip(arrays, results):
        if isinstance(got, Exception):
            raise got
        assert torch.equal(got, portattn.attention(x, x, x, causal=True, backend="triton"))

turn([(100, 32)] * 8)
turn([(60 + i, (16, 64)[i % 2]) for i in range(8)])
for n in range(18):
    turn([(61 + 9 * n + i, (16, 32, 64)[i % 3]) for i in range(8)] if n % 2 else [(70 + n, 64)] * 8)
print(json.dumps(sorted(compiled.values())))
assert set(compiled.values()) == {1}, "a kernel was compiled by more than one thread"
"""


def test_bug_094_eight_threads_and_a_cold_cache(
    backend: str, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    if backend != "triton":
        pytest.skip(f"written for Triton's cache; {backend} has its own")
    fresh(THREADS, timeout=200, TRITON_CACHE_DIR=str(tmp_path / "cold"))


CACHED = """
import json, warnings
import torch, triton
hits = []
triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
import portattn
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.ones(1, 64, 2, 32, device="cuda", dtype=torch.float16)
    for _ in range(2):
        assert bool((portattn.attention(x, x, x, backend="triton") == 1).all())
told = [str(w.message) for w in caught if "cache folder" in str(w.message)]
print(json.dumps({"hits": hits, "told": told}))
"""


def test_bug_095_cache_folders_that_are_torn_or_cannot_be_written(
    backend: str, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    if backend != "triton":
        pytest.skip(f"written for Triton's cache; {backend} has its own")

    def run(folder: Path) -> dict[str, Any]:
        done = fresh(CACHED, timeout=120, TRITON_CACHE_DIR=str(folder))
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    good = tmp_path / "good"
    first, second = run(good), run(good)
    assert first["hits"] and not any(first["hits"]) and all(second["hits"])
    assert not first["told"] and not second["told"]
    for pattern in ("forward_kernel.cubin", "__grp__forward_kernel.json", "forward_kernel.json"):
        (path,) = good.rglob(pattern)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        torn = run(good)
        assert torn["hits"] == [False], pattern
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    blocked = run(in_the_way)
    assert not any(blocked["hits"]) and len(blocked["told"]) == 1


@pytest.mark.parametrize("mechanism", [None, "portable"], ids=str)
def test_bug_096_201_lengths_and_no_new_compilation(backend: str, mechanism: str | None) -> None:
    if backend != "triton":
        pytest.skip(f"written for Triton's hooks; {backend} has its own")
    triton = pytest.importorskip("triton")
    compiled: list[str] = []
    options: dict[str, Any] = {"causal": "bottom_right", "backend": backend}

    def calls(n: int) -> None:
        q, k, v, dout = (normal(i, 1, n, 2, 64) for i in range(4))
        forward_backward(q, k, v, dout, layout="bshd", **options)
        portattn.attention(q[:, :1], k, v, **options)
        cu = torch.tensor([0, n // 3, n], dtype=I32, device="cuda")
        portattn.attention(
            q[0], k[0], v[0], layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, **options
        )

    entry = find_backends()[backend].backend
    entry.force_mechanism(mechanism)  # type: ignore[union-attr]
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    try:
        calls(1000)
        calls(1001)  # no multiple of 16 bytes in some of its strides
        known = len(compiled)
        for n in range(1002, 1201):
            calls(n)
        assert compiled[known:] == []
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        entry.force_mechanism(None)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float64(2), np.float32(2), np.int64(2), np.float16(2)],
    ids=lambda v: type(v).__name__,
)
def test_bug_098_a_number_is_a_number(backend: str, value: Any) -> None:
    x = normal(0, 1, 1, 40, 64)
    for length in (40, 600):
        x = normal(0, 1, 1, length, 64)
        want = attend(x, x, x, scale=2.0, backend=backend)
        assert torch.equal(attend(x, x, x, scale=value, backend=backend), want)
        one = attend(x, x, x, scale=1, backend=backend)
        assert torch.equal(attend(x, x, x, scale=True, backend=backend), one)
        if isinstance(value, int | np.integer):
            narrow = attend(x, x, x, window=(value, None), backend=backend)
            assert torch.equal(narrow, attend(x, x, x, window=(2, None), backend=backend))
