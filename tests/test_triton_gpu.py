"""The Triton backend on a GPU: autograd, graphs, streams, arrays of others, exhausted memory.

The rule kept here: small sizes and few kernels, since each new one is compiled; what a report asks
for stands in test_public_reports_gpu.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import portattn  # noqa: E402
from portattn.backends.triton_jit import BACKEND, config  # noqa: E402

pytestmark = pytest.mark.gpu

F16, BF16, F32, F64, I32 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32
TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 1e-5}


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    BACKEND.force_mechanism(None)
    BACKEND.limit_shared_memory(None)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def normal(seed: int, *shape: int, dtype: Any = BF16, device: str = "cuda") -> Any:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=F32).to(dtype)


def drawn(
    length: int = 100, keys: int | None = None, *, dtype: Any = BF16,
    heads: tuple[int, int] = (4, 2), dim: int = 64, batch: int = 1,
) -> list[Any]:  # fmt: skip
    """q, k, v in layout bshd."""
    keys = length if keys is None else keys
    shapes = ((length, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [normal(i, batch, n, h, dim, dtype=dtype) for i, (n, h) in enumerate(shapes)]


def host(x: Any) -> Any:
    """The numbers on the host, for the oracle."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    return (x.to(F32) if x.is_floating_point() else x).cpu().numpy()


def near(got: Any, want: np.ndarray, bound: float, what: str = "") -> None:
    got = host(got).astype(np.float64)
    special = ~np.isfinite(want)
    np.testing.assert_array_equal(got[special], want[special], err_msg=what)
    size = max(1.0, float(np.abs(want[~special]).max(initial=0)))
    worst = float(np.abs(got[~special] - want[~special]).max(initial=0))
    assert worst <= bound * size, f"{what}: {worst} of {size}"  # a NaN is not at most anything


def attend(*arrays: Any, **options: Any) -> Any:
    return portattn.attention(*arrays, backend="triton", **options)


def backward(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Any:
    out, lse = attend(q, k, v, return_lse=True, **options)
    return portattn.attention_backward(q, k, v, out, lse, dout, backend="triton", **options)


def mechanism(*arrays: Any, **options: Any) -> str:
    plan = portattn.explain(*arrays, backend="triton", **options)["triton"].plan
    assert plan is not None
    return plan.mechanism


# ---- right numbers, in each of the mechanisms ----------------------------------------------------
@pytest.mark.parametrize(
    ("lengths", "causal", "dtype"),
    [
        ((100, 100), "bottom_right", BF16),
        ((300, 700), "bottom_right", BF16),
        ((300, 700), "top_left", BF16),
        ((300, 700), False, BF16),
        ((700, 300), "bottom_right", BF16),
        ((700, 300), "top_left", BF16),
        ((1, 900), "bottom_right", BF16),
        ((300, 700), "bottom_right", F16),
        ((100, 100), "bottom_right", F32),
        ((300, 700), "bottom_right", F32),
    ],
    ids=str,
)
def test_forward_and_backward(
    oracle: Any, oracle_backward: Any, lengths: tuple[int, int], causal: Any, dtype: Any
) -> None:
    q, k, v = drawn(*lengths, dtype=dtype)
    dout, dlse = normal(3, *q.shape, dtype=dtype), normal(4, 1, 4, lengths[0], dtype=F32)
    out, lse = attend(q, k, v, causal=causal, return_lse=True)
    numbers = [host(x) for x in (q, k, v)]
    want, want_lse = oracle(*numbers, causal=causal)
    near(out, want, TOLERANCE[dtype], "out")
    near(lse, want_lse, 1e-4, "lse")
    seen = torch.isfinite(lse)
    dlse = torch.where(seen, dlse, torch.zeros_like(dlse))
    grads = portattn.attention_backward(
        q, k, v, out, lse, dout, dlse=dlse, causal=causal, backend="triton"
    )
    exact = oracle_backward(*numbers, host(dout), host(dlse), causal=causal)
    for name in ("dq", "dk", "dv"):
        near(getattr(grads, name), exact[name], 2 * TOLERANCE[dtype], name)


@pytest.mark.parametrize("dim", [64, 72, 256])
def test_hopper_against_portable(dim: int) -> None:
    """One problem on both mechanisms of a Hopper device."""
    arrays = drawn(500, dim=dim)
    if mechanism(*arrays, causal=True) != "hopper":
        pytest.skip("hopper runs on sm_90 with Triton 3.6")
    dout = normal(3, *arrays[0].shape)
    results = []
    for name in ("hopper", "portable"):
        BACKEND.force_mechanism(name)
        assert mechanism(*arrays, causal=True) == name
        results.append((attend(*arrays, causal=True), *backward(*arrays, dout, causal=True)[:3]))
    for a, b in zip(*results, strict=True):
        near(a, host(b).astype(np.float64), 2 * TOLERANCE[BF16])
    # A NaN in what is hidden reaches nothing, although the fast path multiplies it by 0.
    BACKEND.force_mechanism("hopper")
    clean = attend(*arrays, causal=True)
    for x in arrays[1:]:
        x[:, 400:] = math.nan
    poisoned = attend(*arrays, causal=True)
    # What shares a tile with the rows that see it is computed again, by the other mechanism.
    apart = 256 if dim <= 64 else 384
    assert torch.equal(poisoned[:, :apart], clean[:, :apart])
    near(poisoned[:, apart:400], host(clean[:, apart:400]).astype(np.float64), TOLERANCE[BF16])
    assert bool(poisoned[:, 400:].isnan().all())
    q, k, v = arrays
    used = [x[:, :400].clone() for x in arrays]
    assert mechanism(*used, causal=True) == "hopper"
    want = backward(*used, dout[:, :400].clone(), causal=True)
    rows = torch.zeros_like(dout)
    rows[:, :400] = dout[:, :400]
    got = backward(q, k, v, rows, causal=True)
    near(got.dq[:, :400], host(want.dq).astype(np.float64), 2 * TOLERANCE[BF16], "dq")


def starting_anywhere(x: Any) -> Any:
    """A copy that starts one element into its storage, and so at no multiple of 16 bytes."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    made = storage[1:].view(x.shape)
    made.copy_(x)
    assert made.data_ptr() % 16
    return made


@pytest.mark.parametrize("lengths", [(300, 700), (1, 5000)], ids=str)
def test_a_sequence_that_is_loaded_otherwise_in_its_batch(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is loaded 16 bytes at a time and, on Hopper, through descriptors; the sequence
    starts where neither can. The bits are the same."""
    from portattn.backends.triton_jit import launch_portable

    made: list[dict[str, Any]] = []

    class Noted(launch_portable.Prepared):
        def __init__(self, *args: Any):
            super().__init__(*args)
            made.append(self.constants)

    monkeypatch.setattr(launch_portable, "Prepared", Noted)
    BACKEND.force_mechanism("portable")
    BACKEND.limit_shared_memory(10**9)  # no less than the device has, and a plan of its own
    arrays = drawn(*lengths, batch=3)
    alone = [starting_anywhere(x[:1]) for x in arrays]
    want = attend(*alone, causal="bottom_right", return_lse=True)
    for a, b in zip(attend(*arrays, causal="bottom_right", return_lse=True), want, strict=True):
        assert torch.equal(a[:1], b)
    boxes = config.family(torch.cuda.get_device_capability()) == "sm_90"
    assert [(c["VEC"], c["TMA"]) for c in made] == [(1, False), (8, boxes)]


@pytest.mark.parametrize("backward_too", [False, True], ids=["forward", "backward"])
def test_everything_at_once(oracle: Any, oracle_backward: Any, backward_too: bool) -> None:
    q, k, v = drawn(90, 150, batch=2, dtype=F16)
    options: dict[str, Any] = {
        "causal": "bottom_right",
        "window": (60, None),
        "softcap": 3.0,
        "scale": -0.2,
        "bias": normal(5, 4, 90, 150, dtype=F32),
        "mask": normal(6, 2, 1, 90, 150, dtype=F32) > -1,
        "alibi_slopes": normal(7, 4, dtype=F32).abs(),
        "sinks": normal(8, 4, dtype=F32),
        "seqused_k": torch.tensor([150, 77], dtype=I32, device="cuda"),
    }
    numbers = {n: host(x) for n, x in options.items()}
    arrays = [host(x) for x in (q, k, v)]
    if not backward_too:
        out, lse = attend(q, k, v, return_lse=True, **options)
        want, want_lse = oracle(*arrays, **numbers)
        near(out, want, TOLERANCE[F16], "out")
        near(lse, want_lse, 1e-3, "lse")
        return
    dout = normal(3, *q.shape, dtype=F16)
    grads = backward(q, k, v, dout, **options)
    exact = oracle_backward(*arrays, host(dout), **numbers)
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        near(getattr(grads, name), exact[name], 3 * TOLERANCE[F16], name)


def test_packed_and_paged(oracle: Any) -> None:
    starts = torch.tensor([0, 0, 5, 105], dtype=I32, device="cuda")
    keys = torch.tensor([0, 7, 40, 240], dtype=I32, device="cuda")
    q, k, v = normal(0, 105, 4, 64), normal(1, 240, 2, 64), normal(2, 240, 2, 64)
    options: dict[str, Any] = {"layout": "thd", "causal": "bottom_right", "cu_seqlens_q": starts}
    out = attend(q, k, v, cu_seqlens_k=keys, **options)
    numbers = {n: host(x) for n, x in options.items()} | {"cu_seqlens_k": host(keys)}
    near(out, oracle(host(q), host(k), host(v), **numbers)[0], TOLERANCE[BF16], "packed")
    table = torch.tensor([[3, -1, -1], [5, 0, -1], [1, 4, 2]], dtype=I32, device="cuda")
    used = torch.tensor([9, 17, 48], dtype=I32, device="cuda")
    k, v = normal(3, 7, 16, 2, 64), normal(4, 7, 16, 2, 64)
    k[6], v[6] = math.nan, math.nan
    q = normal(5, 3, 1, 4, 64)
    out = attend(q, k, v, block_table=table, seqused_k=used)
    want = oracle(host(q), host(k), host(v), block_table=host(table), seqused_k=host(used))[0]
    near(out, want, TOLERANCE[BF16], "paged")


# ---- autograd ------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [90, 400])
def test_autograd(oracle_backward: Any, length: int) -> None:
    q, k, v = drawn(length)
    bias, sinks = normal(5, 4, 1, length, dtype=F32), normal(6, 4, dtype=F32)
    extra = {"bias": bias, "sinks": sinks} if length == 90 else {}
    leaves = [x.requires_grad_() for x in (q, k, v, *extra.values())]
    out, lse = attend(q, k, v, causal=True, return_lse=True, **extra)
    w_out, w_lse = normal(7, *out.shape), normal(8, *lse.shape, dtype=F32)
    loss = (out.float() * w_out.float()).sum() + (lse * w_lse).sum()
    grads = torch.autograd.grad(loss, leaves)
    want = oracle_backward(
        *(host(x) for x in (q, k, v)), host(w_out), host(w_lse), causal=True,
        **{n: host(x) for n, x in extra.items()},
    )  # fmt: skip
    for name, got, leaf in zip(("dq", "dk", "dv", "dbias", "dsinks"), grads, leaves, strict=False):
        assert got.dtype == leaf.dtype and got.shape == leaf.shape
        near(got, want[name], 2 * TOLERANCE[BF16], name)


def test_a_directional_derivative() -> None:
    """float32, against differences of the forward pass itself."""
    arrays = [x.requires_grad_() for x in drawn(40, dtype=F32)]
    weight = normal(9, 1, 40, 4, 64, dtype=F32)

    def loss(*given: Any) -> Any:
        return (attend(*given, causal=True).to(F64) * weight.to(F64)).sum()

    grads = torch.autograd.grad(loss(*arrays), arrays)
    for at in range(3):
        way = normal(20 + at, *arrays[at].shape, dtype=F32)
        step = 1e-2
        with torch.no_grad():
            ends = [
                loss(*(x + s * way if i == at else x for i, x in enumerate(arrays)))
                for s in (step, -step)
            ]
        slope = float(ends[0] - ends[1]) / (2 * step)
        size = float(grads[at].norm() * way.norm()) / math.sqrt(way.numel())
        assert float((grads[at] * way).sum()) == pytest.approx(slope, abs=2e-2 * max(1.0, size))


# ---- graphs, streams, devices --------------------------------------------------------------------
@pytest.mark.parametrize("length", [90, 400])
def test_a_graph_of_forward_and_backward(length: int) -> None:
    arrays = [*drawn(length), normal(3, 1, length, 4, 64)]

    def call() -> tuple[Any, ...]:
        q, k, v, dout = arrays
        out, lse = attend(q, k, v, causal=True, return_lse=True)
        made = portattn.attention_backward(q, k, v, out, lse, dout, causal=True, backend="triton")
        return out, lse, *made[:3]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for turn in range(2):
        for i, x in enumerate(arrays):
            x.copy_(normal(40 + 10 * turn + i, *x.shape))
        for x in results:
            x.fill_(math.nan)
        graph.replay()
        for a, b in zip(results, call(), strict=True):
            assert torch.equal(a, b)


def test_a_graph_of_autograd() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(90))
    dout = normal(3, *q.shape)

    def call() -> tuple[Any, ...]:
        return torch.autograd.grad(attend(q, k, v, causal=True), (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = call()
    with torch.no_grad():
        q.copy_(normal(50, *q.shape))
    graph.replay()
    for a, b in zip(grads, call(), strict=True):
        assert torch.equal(a, b)


def test_another_stream_and_another_device() -> None:
    arrays = drawn(100)
    want = attend(*arrays)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        copies = [x.clone() for x in arrays]
        got = attend(*copies)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"the rest needs two CUDA devices; {count} is there")
    moved = [x.to("cuda:1") for x in arrays]
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream(1)):
        there = attend(*moved)
    torch.cuda.synchronize(1)
    near(there, host(want).astype(np.float64), TOLERANCE[BF16])
    assert torch.cuda.current_device() == 0
    near(attend(*moved), host(want).astype(np.float64), TOLERANCE[BF16])


# ---- what lies in memory before ------------------------------------------------------------------
@pytest.mark.parametrize("lengths", [(90, 90), (1, 900), (400, 400)], ids=str)
def test_nothing_is_read_that_was_not_written(lengths: tuple[int, int]) -> None:
    """Every new array and every workspace starts as NaN (torch fills them in this mode)."""
    arrays = drawn(*lengths)
    dout = normal(3, *arrays[0].shape)

    def call() -> tuple[Any, ...]:
        return attend(*arrays, causal="bottom_right"), *backward(
            *arrays, dout, causal="bottom_right"
        )[:3]

    want = call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert bool(torch.empty(4, device="cuda").isnan().all()), "torch fills no memory"
            got = call()
        finally:
            torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_out_is_filled_and_nothing_around_it() -> None:
    for length in (90, 400):
        arrays = drawn(length)
        want = attend(*arrays, causal=True)
        for shift in (0, 1):
            room = torch.full((1, length + 2, 5, 80), math.nan, dtype=BF16, device="cuda")
            view = room[:, 1 : length + 1, :4, 8 + shift : 72 + shift]
            assert attend(*arrays, causal=True, out=view) is view
            near(view, host(want).astype(np.float64), TOLERANCE[BF16])
            assert int((~room.isnan()).sum()) == want.numel()


def test_exhausted_memory_is_an_error_and_the_device_lives_on() -> None:
    """The allocator is held to what is there now; the output does not fit any more."""
    x = torch.ones((1, 8192, 64, 128), dtype=F16, device="cuda")  # 128 MiB, the output too
    small = drawn(100)
    want = attend(*small)
    attend(x[:, :64], x[:, :64], x[:, :64])
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            attend(x, x[:, :64], x[:, :64])
        with pytest.raises(torch.cuda.OutOfMemoryError):
            attend(x, x[:, :64], x[:, :64])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(attend(*small), want)
    assert bool((attend(x, x[:, :64], x[:, :64]) == 1).all())


# ---- arrays of others ----------------------------------------------------------------------------
def test_cupy_arrays_on_their_current_stream() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed", exc_type=ImportError)
    tensors = drawn(100, dtype=F16)
    want = host(attend(*tensors))
    arrays = [cupy.asarray(host(x)).astype("float16") for x in tensors]
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(20):
            q = cupy.zeros_like(arrays[0])
            q += arrays[0]
            out = attend(q, *arrays[1:])
            assert isinstance(out, cupy.ndarray) and out.dtype == np.float16
            np.testing.assert_array_equal(out.get(), want)
    out, lse = attend(*arrays, return_lse=True)
    grads = portattn.attention_backward(*arrays, out, lse, arrays[0], backend="triton")
    assert all(isinstance(g, cupy.ndarray) for g in grads[:3])
    exact = backward(*tensors, tensors[0])
    for a, b in zip(grads[:3], exact[:3], strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(a), host(b).astype(np.float16))


def test_numba_device_arrays() -> None:
    cuda = pytest.importorskip(
        "numba.cuda", reason="numba-cuda is not installed", exc_type=ImportError
    )
    tensors = drawn(100, dtype=F16)
    want = host(attend(*tensors))
    arrays = [cuda.to_device(host(x).astype(np.float16)) for x in tensors]
    out = attend(*arrays)
    assert type(out) is type(arrays[0])
    cuda.synchronize()
    np.testing.assert_array_equal(out.copy_to_host(), want)


def test_host_arrays_are_refused() -> None:
    x = np.ones((1, 8, 1, 16), np.float16)
    with pytest.raises(portattn.Unsupported) as refused:
        attend(x, x, x)
    assert [r.field for r in refused.value.reasons["triton"]] == ["device"]


# ---- limits --------------------------------------------------------------------------------------
def test_a_smaller_shared_memory_and_the_same_numbers(oracle: Any) -> None:
    """The tiles of a device with 101,376 bytes, forward and backward, at head dim 256."""
    q, k, v = drawn(200, dim=256)
    dout = normal(3, *q.shape)
    want = attend(q, k, v, causal=True), *backward(q, k, v, dout, causal=True)[:3]
    BACKEND.limit_shared_memory(101_376)
    got = attend(q, k, v, causal=True), *backward(q, k, v, dout, causal=True)[:3]
    for a, b in zip(got, want, strict=True):
        near(a, host(b).astype(np.float64), 2 * TOLERANCE[BF16])
    near(got[0], oracle(host(q), host(k), host(v), causal=True)[0], TOLERANCE[BF16])


@pytest.mark.parametrize("length", [90, 400])
def test_the_same_bits_every_time(length: int) -> None:
    arrays = [*drawn(length, batch=2), normal(3, 2, length, 4, 64)]

    def call() -> list[Any]:
        made = backward(*arrays, causal=True, deterministic=True)
        return [attend(*arrays[:3], causal=True), *made[:3]]

    first = call()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))


def test_the_plan_is_what_the_compiled_kernel_uses(capsys: Any) -> None:
    """Shared memory as planned against that of the kernels that were loaded."""
    import triton

    loaded: list[tuple[str, int]] = []
    triton.knobs.runtime.kernel_load_end_hook = lambda module, function, name, group, key: (
        loaded.append((name, _shared(group)))
    )
    try:
        for length in (330, 90):
            arrays = drawn(length, dim=192, dtype=F16)
            plan = portattn.explain(*arrays, backend="triton")["triton"].plan
            loaded.clear()
            attend(*arrays)
            assert plan is not None
            for name, size in loaded:
                assert size <= max(plan.shared_memory_bytes, plan.config.tile.shared_bytes), name
    finally:
        triton.knobs.runtime.kernel_load_end_hook = None


def _shared(group: dict[str, str]) -> int:
    import json
    from pathlib import Path

    (path,) = (p for n, p in group.items() if n.endswith(".json"))
    return int(json.loads(Path(path).read_text())["shared"])


def run_alone(fresh: Callable[..., Any], code: str, **environment: str) -> str:
    return fresh(code, timeout=150, **environment).stdout  # type: ignore[no-any-return]


def test_the_spread_for_the_sanitizer_is_right(fresh: Callable[..., Any]) -> None:
    told = run_alone(
        fresh, "import runpy; runpy.run_path('tests/sanitizer_spread.py', run_name='__main__')"
    )
    assert "all right" in told
