"""Arrays are recognised as what they are, looked at in place, and never copied on the way."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from portattn.arrays import Array, as_numpy, contiguous_strides, empty, finish, recognise


class Exported:
    """An array that nothing is known of but the DLPack protocol."""

    def __init__(self, inner: Any, device: tuple[int, int] | None = None):
        self.inner, self.device_ = inner, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_ or self.inner.__dlpack_device__()


class OnDevice:
    """What CUDA libraries show of their arrays; there is nothing behind it."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", **more: Any):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (0, False),
            "version": 3,
            **more,
        }


def describe(x: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], str, str]:
    a = recognise(x, "x")
    return a.family, a.shape, a.strides, a.dtype, a.device


# ---- NumPy ---------------------------------------------------------------------------------------
base = np.zeros((4, 6, 8), np.float32)


@pytest.mark.parametrize(
    ("x", "strides"),
    [
        (base, (48, 8, 1)),
        (base.T, (1, 8, 48)),
        (base[:, ::-1, ::2], (48, -8, 2)),
        (np.broadcast_to(base[:1], (4, 6, 8)), (0, 8, 1)),
        (base[1:1], (48, 8, 1)),
        (np.float32(0) * base[0, 0, 0].reshape(()), ()),
    ],
)
def test_numpy_views_are_read_as_they_lie(x: Any, strides: tuple[int, ...]) -> None:
    x = np.asarray(x)
    a = recognise(x, "x")
    assert (a.family, a.shape, a.strides, a.dtype, a.device) == (
        "numpy", x.shape, strides, "float32", "cpu",
    )  # fmt: skip
    assert as_numpy(a) is x
    assert a.values() is x


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "bool", "int32", "int64", "complex64"]
)
def test_numpy_dtypes(dtype: str) -> None:
    assert recognise(np.zeros(3, dtype), "x").dtype == dtype


def test_bfloat16_is_that_of_ml_dtypes() -> None:
    assert recognise(np.zeros(3, ml_dtypes.bfloat16), "x").dtype == "bfloat16"


def test_a_memory_map_is_an_array(tmp_path) -> None:
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
    assert recognise(x, "x").family == "numpy"


# ---- what is no array, or cannot be read ---------------------------------------------------------
REFUSED = [
    ("list", [[1.0, 2.0]], "a builtins.list"),
    ("number", 3.0, "a builtins.float"),
    ("None", None, "a builtins.NoneType"),
    ("string", "x", "a builtins.str"),
    ("numpy scalar", np.float32(3), "a numpy.float32"),
    ("big-endian", np.zeros(3, ">f4"), "native byte order"),
    ("masked", np.ma.masked_array(np.zeros(3), [0, 1, 0]), "masks go in as mask="),
    ("field", np.zeros(3, [("a", "f4"), ("b", "u1")])["a"], "multiples of 4 bytes"),
    ("device big-endian", OnDevice((3,), ">f4"), "native byte order"),
    ("device masked", OnDevice((3,), mask=OnDevice((3,), "|b1")), "masks go in as mask="),
    ("device field", OnDevice((3,), strides=(5,)), "multiples of 4 bytes"),
    ("dlpack without device", type("X", (), {"__dlpack__": None})(), "want a NumPy, torch"),
]


@pytest.mark.parametrize(("x", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_is_refused_is_named(x: Any, words: str) -> None:
    with pytest.raises(TypeError, match=r"the_name: got .*; want ") as caught:
        recognise(x, "the_name")
    assert words in str(caught.value)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_matrix_is_refused() -> None:
    with pytest.raises(TypeError, match="x: got a numpy matrix"):
        recognise(np.matrix([[1.0]]), "x")


# ---- DLPack --------------------------------------------------------------------------------------
def test_dlpack_arrays_are_viewed_in_place() -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2]
    a = recognise(Exported(x), "x")
    assert (a.family, a.shape, a.strides, a.dtype, a.device) == (
        "dlpack", (4, 3), (6, 2), "float32", "cpu",
    )  # fmt: skip
    assert np.shares_memory(as_numpy(a), x)


def test_dlpack_arrays_on_a_device_are_not_touched() -> None:
    a = recognise(Exported(np.zeros(3), device=(2, 1)), "x")
    assert (a.family, a.device) == ("dlpack", "cuda:1")
    assert a.values() is None
    with pytest.raises(TypeError, match="no NumPy view"):
        as_numpy(a)
    assert recognise(Exported(np.zeros(3), device=(10, 0)), "x").device == "dlpack-device-10:0"


def test_a_bare_producer_gets_numpy_back() -> None:
    a = recognise(Exported(np.zeros((2, 3), np.float32)), "x")
    made = empty(a, (4,), "float32")
    assert type(finish(made, a)) is np.ndarray


def test_jax_arrays_come_back_as_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(6, dtype="float32").reshape(2, 3)
    a = recognise(x, "x")
    assert (a.family, a.shape, a.strides, a.dtype, a.device) == (
        "dlpack", (2, 3), (3, 1), "float32", "cpu",
    )  # fmt: skip
    made = empty(a, (2, 3), "float32")
    as_numpy(made)[...] = as_numpy(a)
    back = finish(made, a)
    assert isinstance(back, jax.Array)
    assert (np.asarray(back) == np.asarray(x)).all()


def test_what_numpy_cannot_view_is_refused_by_name() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="x: got a DLPack array that NumPy cannot view"):
        recognise(jax.numpy.zeros(3, "bfloat16"), "x")


# ---- __cuda_array_interface__ --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [
        ("<f2", "float16"),
        ("<f4", "float32"),
        ("<f8", "float64"),
        ("|b1", "bool"),
        ("|V2", "bfloat16"),
        ("<i4", "int32"),
        ("|u1", "uint8"),
        ("<c8", "<c8"),
    ],
)
def test_cuda_array_interface(typestr: str, dtype: str) -> None:
    assert describe(OnDevice((2, 3), typestr)) == ("cuda", (2, 3), (3, 1), dtype, "cuda:0")


def test_cuda_array_interface_strides_are_in_elements() -> None:
    assert recognise(OnDevice((2, 3), "<f2", strides=(2, 4)), "x").strides == (1, 2)
    assert recognise(OnDevice((2, 3), "<f4", strides=(-12, 4)), "x").strides == (-3, 1)


@pytest.mark.parametrize("library", ["cupy", "numba"])
def test_the_library_behind_the_interface_is_its_family(library: str) -> None:
    kind = type("ndarray", (OnDevice,), {"__module__": f"{library}.somewhere"})
    x = kind((2,))
    x.device = type("Device", (), {"id": 3})()
    assert describe(x) == (library, (2,), (1,), "float32", "cuda:3")


def test_the_device_can_come_from_dlpack() -> None:
    kind = type("Both", (OnDevice,), {"__dlpack_device__": lambda self: (2, 5)})
    assert recognise(kind((2,)), "x").device == "cuda:5"


def test_an_anonymous_device_array_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="give out="):
        empty(recognise(OnDevice((2,)), "x"), (2,), "float32")


# ---- torch ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool", "int32"])
def test_torch_tensors_share_their_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros((4, 6), dtype=getattr(torch, dtype)).T[:, ::2]
    a = recognise(x, "x")
    assert (a.family, a.shape, a.strides, a.dtype, a.device) == (
        "torch", (6, 2), (1, 12), dtype, "cpu",
    )  # fmt: skip
    view = as_numpy(a)
    assert view.dtype.name == dtype
    view[1, 1] = 1
    assert float(x[1, 1]) == 1


def test_a_torch_tensor_that_requires_grad_can_be_read() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, requires_grad=True)
    assert as_numpy(recognise(x, "x")).tolist() == [1, 1, 1]
    assert recognise(torch.nn.Parameter(x), "x").family == "torch"


def _torch_refused(torch: Any) -> list[tuple[Any, str]]:
    return [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch._neg_view(torch.ones(3)), "resolve_neg"),
        (torch.ones(3, dtype=torch.complex64).conj(), "lazy"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ]


@pytest.mark.filterwarnings("ignore")  # torch's own, about sparse and nested prototypes
@pytest.mark.parametrize("index", range(5))
def test_torch_tensors_that_lie_otherwise_are_refused(index: int) -> None:
    x, words = _torch_refused(pytest.importorskip("torch"))[index]
    with pytest.raises(TypeError, match=r"q: got .*; want ") as caught:
        recognise(x, "q")
    assert words in str(caught.value)


def test_a_meta_tensor_has_no_numbers() -> None:
    torch = pytest.importorskip("torch")
    a = recognise(torch.empty((2, 3), device="meta"), "x")
    assert (a.device, a.values()) == ("meta", None)


# ---- new arrays ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_new_arrays_are_of_the_callers_kind(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    for like, kind in ((np.zeros(1), np.ndarray), (torch.zeros(1), torch.Tensor)):
        made = empty(recognise(like, "x"), (2, 3), dtype)
        assert isinstance(made.source, kind)
        assert (made.shape, made.dtype, made.strides) == ((2, 3), dtype, (3, 1))


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)])
def test_row_major_strides(shape: tuple[int, ...]) -> None:
    made = np.empty(shape, np.float64)
    if 0 not in shape:
        assert contiguous_strides(shape) == tuple(s // 8 for s in made.strides)
    assert len(contiguous_strides(shape)) == len(shape)


def test_an_array_is_a_value() -> None:
    a = recognise(base, "x")
    assert isinstance(a, Array)
    with pytest.raises(AttributeError):
        a.dtype = "float16"  # type: ignore[misc]
