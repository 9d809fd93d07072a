"""The caller's arrays: NumPy's, torch's, JAX's and whatever speaks DLPack or shows where it lies on
a device are read in place, however they lie, never written, and come back in their own kind."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from api_kit import DENSE, PACKED, PAGED, TOLERANCE, attend, int32, normal

import portattn
from portattn import api, select
from portattn.arrays import as_numpy
from portattn.contract import Call, Plan
from portattn.problem import Problem


# ---- other arrays --------------------------------------------------------------------------------
class Exported:
    """An array that nothing is known of but the DLPack protocol."""

    def __init__(self, inner: np.ndarray):
        self.inner = inner

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()


class OnDevice:
    """What CUDA libraries show of their arrays; there is nothing behind it."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", device: int = 0):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (0, False), "version": 3, "strides": None,
        }  # fmt: skip
        self.device = type("Device", (), {"id": device})()


def test_dlpack_arrays() -> None:
    want = attend(DENSE)
    out = portattn.attention(*(Exported(x) for x in DENSE.values()))
    assert type(out) is np.ndarray  # a bare producer cannot be asked for one of its own
    np.testing.assert_array_equal(out, want)
    target = np.empty_like(want)
    given = Exported(target)
    assert portattn.attention(*(Exported(x) for x in DENSE.values()), out=given) is given
    np.testing.assert_array_equal(target, want)


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(x) for x in DENSE.values()]
    out, lse = portattn.attention(*arrays, return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), attend(DENSE))
    grads = portattn.attention_backward(*arrays, out, lse, jax.numpy.ones_like(out))
    assert all(isinstance(g, jax.Array) for g in grads[:3])
    with pytest.raises(ValueError, match="out: got a read-only array"):
        portattn.attention(*arrays, out=out)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_torch_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x).to(getattr(torch, dtype)) for x in DENSE.values()]
    out, lse = portattn.attention(*arrays, return_lse=True)
    assert (out.dtype, tuple(out.shape)) == (arrays[0].dtype, (2, 4, 4, 8))
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    want = attend({n: as_numpy(api.recognise(x, n)) for n, x in zip("qkv", arrays, strict=True)})
    assert (as_numpy(api.recognise(out, "out")) == want).all()
    target = torch.empty_like(out)
    assert portattn.attention(*arrays, out=target) is target
    assert torch.equal(target, out)


def test_torch_views_of_a_fused_projection(oracle) -> None:
    torch = pytest.importorskip("torch")
    qkv = torch.tensor(normal(5, 2, 6, 3, 4, 8))
    q, k, v = qkv.unbind(2)
    assert not q.is_contiguous()
    out = portattn.attention(q, k, v)
    want, _ = oracle(q.numpy(), k.numpy(), v.numpy())
    np.testing.assert_allclose(out.numpy(), want, atol=2e-6)


def test_torch_gradients_come_through_the_same_call(oracle_backward) -> None:
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(x, requires_grad=True) for x in DENSE.values()]
    portattn.attention(*arrays, causal=True).sum().backward()
    want = oracle_backward(**DENSE, dout=np.ones_like(DENSE["q"]), causal=True)
    for name, x in zip(("dq", "dk", "dv"), arrays, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), want[name], atol=1e-5)
    with pytest.raises(ValueError, match=r"^out: got"):
        portattn.attention(*arrays, out=torch.empty(2, 4, 4, 8))
    with torch.no_grad():
        target = torch.empty(2, 4, 4, 8)
        assert portattn.attention(*arrays, out=target) is target
    detached = [x.detach() for x in arrays]
    with pytest.raises(ValueError, match=r"^out: got a tensor that requires grad"):
        portattn.attention(*detached, out=torch.empty(2, 4, 4, 8, requires_grad=True))


@pytest.mark.filterwarnings("ignore")  # torch's own, about sparse and nested prototypes
@pytest.mark.parametrize(
    "make",
    [
        lambda torch, x: x.to_sparse(),
        lambda torch, x: torch._neg_view(x),
        lambda torch, x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        lambda torch, x: x.to(torch.complex64).conj(),
    ],
    ids=["sparse", "negative bit", "nested", "conjugate bit"],
)
def test_torch_tensors_that_lie_otherwise(make: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    arrays = [make(torch, torch.tensor(x)) for x in DENSE.values()]
    with pytest.raises(TypeError, match=r"^q: got .*; want "):
        portattn.attention(*arrays)


def test_meta_tensors_are_refused_or_shaped() -> None:
    """A meta tensor has no numbers: the result is one too, or no backend takes it."""
    torch = pytest.importorskip("torch")
    x = torch.empty((2, 4, 4, 8), device="meta")
    try:
        out = portattn.attention(x, x, x)
    except portattn.Unsupported as error:
        assert all(any(r.field == "device" for r in why) for why in error.reasons.values())
    else:
        assert out.device.type == "meta" and out.shape == x.shape
    with pytest.raises(ValueError, match=r"^k: got an array on cpu; want all arrays on meta"):
        portattn.attention(x, torch.zeros(2, 4, 4, 8), x)


@pytest.mark.parametrize("backend", ["auto", "numpy", "triton", "cupy", "numba"])
def test_device_arrays_without_a_device(backend: str) -> None:
    """Refused with the reasons of every backend asked, before anything is touched."""
    if portattn.machine.Machine.here().cuda.devices:
        pytest.skip("a device is here, and the pointers of these arrays are not real")
    x = OnDevice((1, 2, 1, 8))
    with pytest.raises(portattn.Unsupported) as caught:
        portattn.attention(x, x, x, backend=backend)
    reasons = caught.value.reasons
    assert set(reasons) == (
        {"numpy", "triton", "cupy", "numba"} if backend == "auto" else {backend}
    )
    if "numpy" in reasons:
        (reason,) = [r for r in reasons["numpy"] if r.field == "device"]
        assert (reason.got, reason.limit) == ("cuda:0", "cpu")
    for name in set(reasons) - {"numpy"}:
        assert "device" not in {r.field for r in reasons[name]}, "the arrays are not the obstacle"
        assert {r.code for r in reasons[name]} & {"driver_missing", "driver_error", "no_device",
                                                  "devices_hidden", "no_kernel"}  # fmt: skip


def test_arrays_on_two_devices() -> None:
    near, far = OnDevice((1, 2, 1, 8)), OnDevice((1, 2, 1, 8), device=1)
    with pytest.raises(ValueError, match=r"^v: got an array on cuda:1; want all arrays on cuda:0"):
        portattn.attention(near, near, far)
    with pytest.raises(ValueError, match=r"^k: got an array on cuda:0; want all arrays on cpu"):
        portattn.attention(DENSE["q"], OnDevice((2, 4, 4, 8)), DENSE["v"])


def test_arrays_of_two_kinds() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^k: got an array of torch; want an array of numpy"):
        attend(DENSE, k=torch.tensor(DENSE["k"]))
    with pytest.raises(TypeError, match=r"^mask: got an array of numpy; want an array of torch"):
        attend({n: torch.tensor(x) for n, x in DENSE.items()}, mask=np.eye(4, dtype=bool))
    with pytest.raises(TypeError, match=r"^out: got an array of torch"):
        attend(DENSE, out=torch.empty(2, 4, 4, 8))


# ---- strides -------------------------------------------------------------------------------------
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "fortran": np.asfortranarray,
    "inner stride": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "reversed tokens": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "wide rows": lambda x: np.pad(x, ((0, 0), (0, 3), (0, 0), (5, 2)))[:, :-3, :, 5:-2],
    "read-only": lambda x: np.broadcast_to(x, x.shape),
    "misaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
}


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_are_read_as_they_are(view: str, which: str) -> None:
    changed = {n: VIEWS[view](DENSE[n]) for n in (DENSE if which == "all" else which)}
    for name, x in changed.items():
        assert (x == DENSE[name]).all()
    np.testing.assert_allclose(attend(DENSE | changed), attend(DENSE), atol=1e-6)


def test_stride_zero_is_a_broadcast() -> None:
    one = normal(4, 1, 4, 1, 8)
    wide = np.broadcast_to(one, (2, 4, 4, 8))
    assert wide.strides[0] == wide.strides[2] == 0
    same = {"k": np.ascontiguousarray(wide), "v": np.ascontiguousarray(wide)}
    np.testing.assert_array_equal(attend(DENSE, k=wide, v=wide), attend(DENSE, **same))


# ---- nothing is copied on entry ------------------------------------------------------------------
class Spy:
    """Stands in for a backend and keeps the call that it was given."""

    def __init__(self) -> None:
        self.call: Call | None = None

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        self.call = call
        for x in (call.out, call.lse, call.dq, call.dk, call.dv, call.dbias, call.dsinks):
            if x is not None:
                as_numpy(x)[...] = 0


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    made = Spy()
    monkeypatch.setattr(select, "choose", lambda *arguments, **options: (made, Plan("spy")))
    return made


@pytest.mark.parametrize("family", ["numpy", "torch", "torch bfloat16", "dlpack"])
@pytest.mark.parametrize("view", ["plain", "transposed", "inner stride"])
def test_backends_get_the_callers_memory(spy: Spy, family: str, view: str) -> None:
    host = [x if view == "plain" else VIEWS[view](x) for x in DENSE.values()]
    if family == "dlpack":
        given: list[Any] = [Exported(x) for x in host]
    elif family == "numpy":
        given = host
    else:
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in host]
        if family.endswith("bfloat16"):
            given = [x.bfloat16() for x in given]
            host = [as_numpy(api.recognise(x, "x")) for x in given]
    portattn.attention(*given)
    assert spy.call is not None
    for x, name in zip(host, "qkv", strict=True):
        seen = as_numpy(getattr(spy.call, name))
        assert np.shares_memory(seen, x)
        assert seen.strides == x.strides


def test_a_call_allocates_the_result_and_nothing_that_grows(spy: Spy) -> None:
    k = np.zeros((1, 1 << 16, 1, 64), np.float32)  # 16 MiB
    q = k[:, :1]
    portattn.attention(q, k, k)
    tracemalloc.start()
    try:
        portattn.attention(q, k, k, return_lse=True, seqused_k=int32(5))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_inputs_are_never_written() -> None:
    for base in (DENSE, PACKED, PAGED):
        before = {n: x.copy() for n, x in base.items() if isinstance(x, np.ndarray)}
        for x in before:
            base[x].flags.writeable = False
        try:
            attend(base, return_lse=True)
        finally:
            for x in before:
                base[x].flags.writeable = True
        assert all((base[n] == x).all() for n, x in before.items())
