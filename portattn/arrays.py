"""Arrays of any framework, recognised without importing one.

The rule kept here: a framework is only ever looked up in ``sys.modules`` (an array of it cannot
exist otherwise), and what is looked at is never copied: shapes, strides and pointers are read from
the object, and `as_numpy` returns a view.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from portattn.arguments import wrong

if TYPE_CHECKING:
    import numpy as np

# NumPy's typestr letters of the array interfaces. bfloat16 has no letter of its own there; CuPy
# and others show it as a void of two bytes.
_TYPESTR = {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool", "V2": "bfloat16"}
_WANT = "a NumPy, torch, CuPy or Numba array, or one with __dlpack__ or __cuda_array_interface__"


class Array(NamedTuple):  # every call makes several, and a frozen dataclass takes its time
    """What portattn knows of an array: where it is and how it lies, not what is in it.

    ``strides`` are in elements. ``family`` is the caller's array type: ``numpy``, ``torch``,
    ``cupy``, ``numba``, ``cuda`` (``__cuda_array_interface__`` alone) or ``dlpack``.
    """

    source: Any
    family: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str

    def values(self) -> Any:
        """A NumPy view where the array is in host memory, else None (no hidden transfer)."""
        return as_numpy(self) if self.device == "cpu" else None


def recognise(x: Any, name: str) -> Array:
    """Describe ``x``, which the caller gave as argument ``name``; `TypeError` if it is no array."""
    modules = sys.modules
    numpy = modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        return _numpy(x, name)
    torch = modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch(x, name)
    if hasattr(x, "__cuda_array_interface__"):
        return _cuda_array_interface(x, name)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _dlpack(x, name)
    raise TypeError(wrong(name, f"a {type(x).__module__}.{type(x).__qualname__}", _WANT))


def as_numpy(array: Array) -> np.ndarray[Any, Any]:
    """A zero-copy NumPy view of a host array; bfloat16 has the dtype of ml_dtypes."""
    import numpy

    x = array.source
    if array.family == "numpy":
        return x  # type: ignore[no-any-return]
    if array.family == "torch":
        x = x.detach()
        if array.dtype == "bfloat16":
            from ml_dtypes import bfloat16

            torch = sys.modules["torch"]
            return x.view(torch.int16).numpy().view(bfloat16)  # type: ignore[no-any-return]
        return x.numpy()  # type: ignore[no-any-return]
    if array.family == "dlpack" and array.device == "cpu":
        return numpy.from_dlpack(x)
    raise TypeError(f"{array.family} array on {array.device} has no NumPy view")


def empty(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """A new array of the caller's type on the caller's device, its contents undefined.

    A producer of bare DLPack capsules, which cannot be asked for an array of its own type, gets a
    NumPy array (see `finish`).
    """
    if like.family == "torch":
        torch, x = sys.modules["torch"], like.source
        kind = x.dtype if dtype == like.dtype else getattr(torch, dtype)
        made = torch.empty(shape, dtype=kind, device=x.device)
        return Array(made, "torch", shape, made.stride(), dtype, like.device)
    if like.family == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(int(like.device.split(":")[1])):
            return _cuda_array_interface(cupy.empty(shape, dtype=numpy_dtype(dtype)), "out")
    if like.family == "numba":
        cuda = sys.modules["numba.cuda"]
        return _cuda_array_interface(cuda.device_array(shape, dtype=numpy_dtype(dtype)), "out")
    if like.family == "cuda":
        raise TypeError(
            "out: an array known only by __cuda_array_interface__ cannot be asked for a new one of "
            "its kind; give out="
        )
    import numpy

    return _numpy(numpy.empty(shape, dtype=numpy_dtype(dtype)), "out")


def finish(result: Array, like: Array) -> Any:
    """The object to hand to the caller: ``result`` in the array type of ``like``."""
    if like.family == "dlpack" and result.family == "numpy":
        namespace = getattr(like.source, "__array_namespace__", None)
        if namespace is not None:
            return namespace().from_dlpack(result.source)
    return result.source


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of a dtype name."""
    import numpy

    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return numpy.dtype(bfloat16)
    return numpy.dtype(name)


def _numpy(x: Any, name: str) -> Array:
    dtype = x.dtype
    if not dtype.isnative:
        raise TypeError(wrong(name, f"dtype {dtype} in foreign byte order", "native byte order"))
    if type(x).__name__ in ("MaskedArray", "matrix"):
        raise TypeError(
            wrong(name, f"a numpy {type(x).__name__}", "a plain array; masks go in as mask=")
        )
    size = dtype.itemsize or 1
    strides = x.strides
    if any(s % size for s in strides):  # a field of a structured array, say
        raise TypeError(wrong(name, f"byte strides {strides}", f"multiples of {size} bytes"))
    return Array(x, "numpy", x.shape, tuple([s // size for s in strides]), _name(dtype), "cpu")


@functools.lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    return str(dtype.name)  # NumPy builds this text anew each time


def _torch(x: Any, name: str) -> Array:
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(wrong(name, f"a {kind} tensor", "a dense (strided) tensor"))
    if x.is_neg() or x.is_conj():
        raise TypeError(wrong(name, "a tensor with a lazy negation", "x.resolve_neg()"))
    return Array(x, "torch", tuple(x.shape), x.stride(), _dtype_name(x.dtype), _place(x.device))


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def _place(device: Any) -> str:
    return str(device.type if device.index is None else f"{device.type}:{device.index}")


def _cuda_array_interface(x: Any, name: str) -> Array:
    interface = x.__cuda_array_interface__
    typestr = interface["typestr"]
    if typestr[0] == ">":
        raise TypeError(wrong(name, f"typestr {typestr!r}", "native byte order"))
    if interface.get("mask") is not None:
        raise TypeError(wrong(name, "a masked array", "a plain array; masks go in as mask="))
    family = type(x).__module__.split(".")[0]
    if family not in ("cupy", "numba"):
        family = "cuda"
    kind, size = typestr[1], int(typestr[2:])
    dtype = _TYPESTR.get(typestr[1:]) or f"{'uint' if kind == 'u' else 'int'}{8 * size}"
    if kind not in "fbViu":
        dtype = typestr
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and any(s % size for s in strides):
        raise TypeError(wrong(name, f"byte strides {strides}", f"multiples of {size} bytes"))
    return Array(
        x,
        family,
        shape,
        contiguous_strides(shape) if strides is None else tuple(s // size for s in strides),
        dtype,
        f"cuda:{_cuda_ordinal(x)}",
    )


def _cuda_ordinal(x: Any) -> int:
    # The interface itself does not say which device; CuPy and Numba objects do, and anything that
    # also speaks DLPack.
    device = getattr(x, "device", None)
    ordinal = getattr(device, "id", None)
    if isinstance(ordinal, int):
        return ordinal
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    return 0


def _dlpack(x: Any, name: str) -> Array:
    kind, ordinal = x.__dlpack_device__()
    kind = int(kind)
    if kind == 1:
        import numpy

        try:
            view = numpy.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(
                wrong(name, f"a DLPack array that NumPy cannot view ({error})", _WANT)
            ) from error
        described = _numpy(view, name)
        return Array(x, "dlpack", described.shape, described.strides, described.dtype, "cpu")
    shape = tuple(getattr(x, "shape", ()))
    device = f"cuda:{ordinal}" if kind == 2 else f"dlpack-device-{kind}:{ordinal}"
    dtype = str(getattr(x, "dtype", "unknown")).rpartition(".")[2]
    return Array(x, "dlpack", shape, contiguous_strides(shape), dtype, device)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
