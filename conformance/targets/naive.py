"""The textbook formula in NumPy: whole score matrix, no tile, no online softmax.

The rule kept here: correct, plain and quadratic. Products accumulate in float32 (float64 for
float64 input) and P and dS are rounded to the input's dtype before the second product, as fused
kernels do; so it passes what asks for numbers and fails what asks for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from portattn.conformance.placement import NDArray
from portattn.conformance.targets import common

_OPTIONS = (
    "scale", "causal", "window", "softcap", "bias", "mask", "alibi_slopes", "sinks", "return_lse",
    "deterministic",
)  # fmt: skip


class Naive:
    """The target; layout (B, H, S, D). A value that some rows see is multiplied by 0 for others."""

    packages = ("numpy", "ml_dtypes")
    states = ("nan_spreads",)

    def manifest(self) -> dict[str, Any]:
        """Everything dense."""
        return {
            "name": "naive",
            "version": np.__version__,
            "array": "numpy",
            "device": "cpu",
            "dtypes": ["float16", "bfloat16", "float32", "float64"],
            "max_head_dim": 1024,
            "features": [
                *_OPTIONS, "gqa", "value_head_dim", "strides", "backward", "backward_bias",
                "backward_sinks",
            ],
            "kappa": None,
            "kappa_backward": None,
        }  # fmt: skip

    def forward(self, q: NDArray, k: NDArray, v: NDArray, **options: Any) -> tuple[Any, Any]:
        """(out, lse)."""
        common.understand("naive", _OPTIONS, q, k, v, options, "bhsd")
        with np.errstate(all="ignore"):
            p, lse, _ = _weights(q, k, options)
            out = _stored(p, q) @ _heads(_clean(v, p), q).astype(p.dtype)
        return out.astype(q.dtype), lse

    def backward(
        self,
        q: NDArray,
        k: NDArray,
        v: NDArray,
        out: NDArray,
        lse: NDArray,
        dout: NDArray,
        **options: Any,
    ) -> dict[str, NDArray]:
        """The softmax's derivative, written out; P is computed again from q and k."""
        options = dict(options)
        dlse = options.pop("dlse", None)
        common.understand("naive", _OPTIONS, q, k, v, options, "bhsd")
        with np.errstate(all="ignore"):
            p, _, slope = _weights(q, k, options)
            wide = p.dtype
            scale = _scale(q, options)
            big = dout.astype(wide)
            dp = big @ np.swapaxes(_heads(_clean(v, p), q).astype(wide), -1, -2)
            delta = (big * out.astype(wide)).sum(-1, keepdims=True)
            if dlse is not None:
                delta = delta - dlse.astype(wide)[..., None]
            # 0 * NaN must not be: what is hidden has no gradient.
            dbias = np.where(p > 0, p * (dp - delta), 0)
            ds = _stored(dbias * slope, q)
            grads = {
                "dq": scale * (ds @ _heads(_clean(k, p), q).astype(wide)),
                "dk": scale * _group(np.swapaxes(ds, -1, -2) @ _rows(q, p).astype(wide), k),
                "dv": _group(np.swapaxes(_stored(p, q), -1, -2) @ big, v),
            }
            found = {name: x.astype(q.dtype) for name, x in grads.items()}
            if options.get("bias") is not None:
                found["dbias"] = _summed(dbias, options["bias"])
            if options.get("sinks") is not None:
                sinks = options["sinks"]
                rest = _sink_weight(sinks, lse, wide)
                found["dsinks"] = -(rest * delta[..., 0]).sum((0, 2)).astype(sinks.dtype)
        return found


def _weights(
    q: NDArray, k: NDArray, options: Mapping[str, Any]
) -> tuple[NDArray, NDArray, NDArray | float]:
    """P (B, Hq, Sq, Sk), LSE, and the softcap's derivative."""
    wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    seq_q, seq_k = q.shape[2], k.shape[2]
    s = _scale(q, options) * (q.astype(wide) @ np.swapaxes(_heads(k, q).astype(wide), -1, -2))
    slope: NDArray | float = 1.0
    cap = options.get("softcap")
    if cap is not None:
        bent = np.tanh(s / wide.type(cap))
        s, slope = wide.type(cap) * bent, 1 - bent * bent
    if options.get("bias") is not None:
        s = s + options["bias"].astype(wide)
    i, j = np.arange(seq_q)[:, None], np.arange(seq_k)[None, :]
    if options.get("alibi_slopes") is not None:
        slopes = options["alibi_slopes"].astype(wide)
        slopes = slopes.reshape(-1, q.shape[1], 1, 1)
        s = s - slopes * np.abs(i + seq_k - seq_q - j).astype(wide)
    s = np.where(_visible(i, j, seq_q, seq_k, options), s, -np.inf).astype(wide)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        sink = sinks.astype(wide)[None, :, None, None]
        m = np.maximum(m, sink)
    safe = np.where(np.isneginf(m), 0, m)
    e = np.exp(s - safe)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - safe)
    lse = (np.log(total) + safe)[..., 0].astype(wide)
    return e / np.where(total == 0, 1, total), lse, slope


def _visible(i: NDArray, j: NDArray, seq_q: int, seq_k: int, options: Mapping[str, Any]) -> NDArray:
    causal, window, mask = (options.get(name) for name in ("causal", "window", "mask"))
    own = i if causal == "top_left" else i + seq_k - seq_q
    seen = np.ones((seq_q, seq_k), bool)
    if causal:
        seen &= j <= own
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= own - left
        if right is not None:
            seen &= j <= own + right
    if mask is not None:
        return np.asarray(seen & mask)
    return seen


def _scale(q: NDArray, options: Mapping[str, Any]) -> Any:
    scale = options.get("scale")
    wide = np.float64 if q.dtype == np.float64 else np.float32
    return wide(q.shape[-1] ** -0.5 if scale is None else scale)


def _heads(x: NDArray, q: NDArray) -> NDArray:
    """Key heads repeated for the query heads that read them."""
    return np.repeat(x, q.shape[1] // x.shape[1], axis=1)


def _group(x: NDArray, like: NDArray) -> NDArray:
    """Gradients of query heads summed over the key head that they read."""
    batch, heads, seq, dim = x.shape
    grouped = x.reshape(batch, like.shape[1], heads // like.shape[1], seq, dim)
    return np.asarray(grouped.sum(2))


def _stored(p: NDArray, q: NDArray) -> NDArray:
    return np.asarray(p.astype(q.dtype), p.dtype)


def _clean(x: NDArray, p: NDArray) -> NDArray:
    """Keys or values that no query of theirs sees, zeroed, so that NaN in them stays out."""
    batch, heads, rows, seq = p.shape
    seen = (p.reshape(batch, x.shape[1], heads // x.shape[1], rows, seq) != 0).any((2, 3))
    return np.where(seen[..., None], x, 0).astype(x.dtype)


def _rows(q: NDArray, p: NDArray) -> NDArray:
    """Queries that see nothing, zeroed."""
    return np.where((p != 0).any(-1)[..., None], q, 0).astype(q.dtype)


def _sink_weight(sinks: NDArray, lse: NDArray, wide: np.dtype[Any]) -> NDArray:
    return np.asarray(np.exp(sinks.astype(wide)[None, :, None] - lse))


def _summed(grad: NDArray, like: NDArray) -> NDArray:
    """A gradient summed over the axes that ``like`` was broadcast along."""
    shape = (1,) * (4 - like.ndim) + like.shape
    axes = tuple(axis for axis in range(4) if shape[axis] == 1 and grad.shape[axis] != 1)
    summed = grad.sum(axes, keepdims=True)
    return np.asarray(summed.reshape(like.shape), like.dtype)
