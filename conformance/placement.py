"""Where numbers lie: strided views described without a framework, and the three array kinds.

The rule kept here: a view is a flat buffer, a shape, strides and an offset; only the last step,
making the target's array of them, knows NumPy, torch or CuPy. Everything in the buffer that the
view does not show is poison (NaN, True, or a huge index), so that a read beyond a row is seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

NDArray = np.ndarray[Any, np.dtype[Any]]
VIEWS = ("contiguous", "transposed", "padded", "strided", "misaligned", "broadcast", "fused")
DTYPES: Mapping[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bool": np.dtype(np.bool_),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


@dataclass(frozen=True, slots=True)
class Laid:
    """``shape`` elements of ``buffer`` (flat), from ``offset`` on, ``strides`` apart (elements)."""

    buffer: NDArray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def poison(dtype: np.dtype[Any]) -> Any:
    """What stands between the elements of a view: a value that shows if it is read."""
    if dtype == np.bool_:
        return True
    return np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.nan


def lay(x: NDArray, view: str) -> Laid:
    """Lay ``x`` out as ``view``: "contiguous"; "transposed" (axes 1 and 2 swapped in memory; of
    three axes 0 and 1); "padded" (a slice of longer rows and lines); "strided" (last axis two
    apart); "misaligned" (one element behind an aligned address); "broadcast" (stride 0 on axis 0,
    along which ``x`` must be constant). "fused" needs q, k and v together: `lay_fused`.
    """
    if view not in VIEWS or view == "fused":
        raise ValueError(f"view={view!r}; wanted: one of {', '.join(VIEWS)} (fused for q, k, v)")
    shape = x.shape
    if x.ndim == 0 or x.size == 0 or view == "contiguous":
        # A copy even where none is needed: what a target writes must not reach the original.
        return Laid(np.array(x, order="C").reshape(-1), shape, _dense(shape))
    if view == "broadcast":
        if x.shape[0] > 1 and not _same_bits(x[1:], np.broadcast_to(x[:1], x[1:].shape)):
            raise ValueError("view='broadcast' wants data that is constant along axis 0")
        return Laid(np.array(x[0], order="C").reshape(-1), shape, (0, *_dense(shape[1:])))
    big, axes = list(shape), list(range(x.ndim))
    offset, step = 0, 1
    if view == "transposed" and x.ndim >= 3:
        first = x.ndim - 3
        axes[first], axes[first + 1] = axes[first + 1], axes[first]
    elif view == "padded":
        big[-1] += 8
        if x.ndim >= 2:
            big[-2] += 3
    elif view == "strided":
        step = 2
        big[-1] *= 2
    elif view == "misaligned":
        offset = 1
    memory = _dense([big[axis] for axis in axes])
    strides = [0] * x.ndim
    for place, axis in enumerate(axes):
        strides[axis] = memory[place]
    strides[-1] *= step
    buffer = np.full(math.prod(big) + offset, poison(x.dtype), x.dtype)
    laid = Laid(buffer, shape, tuple(strides), offset)
    as_numpy(laid)[...] = x
    return laid


def lay_fused(q: NDArray, k: NDArray, v: NDArray, layout: str) -> tuple[Laid, Laid, Laid]:
    """q, k and v as views of one buffer of rows [q heads | k heads | v heads], as a fused
    projection writes them. ``layout`` is that of the arrays: "bhsd", "bshd" or "thd"."""
    parts = [np.swapaxes(x, 1, 2) if layout == "bhsd" else x for x in (q, k, v)]
    lead = parts[0].shape[:-2]
    if any(part.shape[:-2] != lead for part in parts):
        raise ValueError("view='fused' wants q, k and v of equal batch and length")
    widths = [part.shape[-2] * part.shape[-1] for part in parts]
    rows = np.concatenate([p.reshape(*lead, w) for p, w in zip(parts, widths, strict=True)], -1)
    buffer = np.ascontiguousarray(rows).reshape(-1)
    outer = [stride * sum(widths) for stride in _dense(lead)]
    laid = []
    for index, part in enumerate(parts):
        shape = part.shape
        strides = (*outer, shape[-1], 1)
        if layout == "bhsd":
            shape = (shape[0], shape[2], shape[1], shape[3])
            strides = (strides[0], strides[2], strides[1], strides[3])
        laid.append(Laid(buffer, shape, strides, sum(widths[:index])))
    return laid[0], laid[1], laid[2]


def as_numpy(laid: Laid) -> NDArray:
    """The view as a NumPy array over the same memory."""
    size = laid.buffer.itemsize
    return np.ndarray(
        laid.shape,
        laid.buffer.dtype,
        buffer=laid.buffer.data.cast("B") if laid.buffer.dtype.kind != "V" else laid.buffer,
        offset=laid.offset * size,
        strides=tuple(stride * size for stride in laid.strides),
    )


def same_bits(a: NDArray, b: NDArray) -> bool:
    """Equal shape, dtype and bits (NaN equals itself, 0 and -0 differ)."""
    return a.shape == b.shape and a.dtype == b.dtype and _same_bits(a, b)


def _same_bits(a: NDArray, b: NDArray) -> bool:
    kind = f"u{a.dtype.itemsize}"
    return bool((np.ascontiguousarray(a).view(kind) == np.ascontiguousarray(b).view(kind)).all())


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


class Kind(Protocol):
    """How the engine handles the arrays of one framework."""

    name: str

    def make(self, laid: Laid) -> Any:
        """The target's array over (a device copy of) the buffer."""

    def values(self, array: Any) -> NDArray:
        """A NumPy array of the same dtype and shape, a copy where the device is not the host."""

    def owns(self, value: Any) -> bool:
        """Is ``value`` an array of this framework?"""

    def dtype(self, array: Any) -> str:
        """Its dtype by our names."""

    def device(self, array: Any) -> str:
        """Where it lives: "cpu" or "cuda"."""

    def synchronize(self) -> None:
        """Wait until the device has done what was asked."""


class NumpyKind:
    """NumPy arrays on the host; bfloat16 through ml_dtypes."""

    name = "numpy"

    def make(self, laid: Laid) -> NDArray:
        return as_numpy(laid)

    def values(self, array: NDArray) -> NDArray:
        return array

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def dtype(self, array: NDArray) -> str:
        return str(array.dtype)

    def device(self, array: NDArray) -> str:
        return "cpu"

    def synchronize(self) -> None:
        return None


class TorchKind:
    """torch tensors on the CPU or on the current CUDA device."""

    name = "torch"

    def __init__(self, device: str):
        import torch

        self.torch = torch
        self.where = torch.device(device)

    def make(self, laid: Laid) -> Any:
        buffer = laid.buffer
        if buffer.dtype == DTYPES["bfloat16"]:
            flat = self.torch.from_numpy(buffer.view(np.int16)).view(self.torch.bfloat16)
        else:
            flat = self.torch.from_numpy(buffer)
        # NumPy memory on the CPU; a device copy of the whole buffer, gaps included, elsewhere.
        return self.torch.as_strided(flat.to(self.where), laid.shape, laid.strides, laid.offset)

    def values(self, array: Any) -> NDArray:
        host = array.detach().cpu()
        if host.dtype == self.torch.bfloat16:
            return np.asarray(host.view(self.torch.int16).numpy()).view(DTYPES["bfloat16"])
        return np.asarray(host.numpy())

    def owns(self, value: Any) -> bool:
        return isinstance(value, self.torch.Tensor)

    def dtype(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def device(self, array: Any) -> str:
        return str(array.device.type)

    def synchronize(self) -> None:
        if self.where.type == "cuda":
            self.torch.cuda.synchronize()


class CupyKind:
    """CuPy arrays on the current CUDA device."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    def make(self, laid: Laid) -> Any:
        flat = self.cupy.asarray(laid.buffer)
        size = laid.buffer.itemsize
        return self.cupy.ndarray(
            laid.shape,
            flat.dtype,
            memptr=flat.data + laid.offset * size,
            strides=tuple(stride * size for stride in laid.strides),
        )

    def values(self, array: Any) -> NDArray:
        return np.asarray(self.cupy.asnumpy(array))

    def owns(self, value: Any) -> bool:
        return isinstance(value, self.cupy.ndarray)

    def dtype(self, array: Any) -> str:
        return str(array.dtype)

    def device(self, array: Any) -> str:
        return "cuda"

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()


def kind_of(array: str, device: str) -> Kind:
    """The array kind that a manifest names; imports its framework."""
    if array == "torch":
        return TorchKind(device)
    return CupyKind() if array == "cupy" else NumpyKind()
