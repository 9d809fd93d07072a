"""jax.nn.dot_product_attention (its XLA implementation) on NumPy arrays.

The rule kept here: JAX's own semantics, as they are. Layout (B, S, H, D); ``is_causal`` and
``local_window_size`` are aligned at the top left; masked scores become a large negative number, so
that a row which sees nothing gives the mean of v, and hidden values are multiplied by 0; softcap,
ALiBi and sinks do not exist. The public call's residual is in the input's dtype, which is no LSE.
Gradients come from ``jax.vjp``. float64 needs JAX's global x64 switch and is not claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from portattn import Unsupported
from portattn.conformance.targets import common, need

_OPTIONS = ("scale", "causal", "window", "bias", "mask", "seqused_k")


class Jax:
    """The target. Compiled once for every shape and choice of options."""

    packages = ("jax", "jaxlib")
    states = ("nan_spreads",)

    def __init__(self) -> None:
        self.jax = need("jax", "jax")
        need("jax.nn", "jax")
        self._compiled = {
            function: self.jax.jit(
                function, static_argnames=("scale", "is_causal", "local_window_size")
            )
            for function in (self.jax.nn.dot_product_attention, self._pull)
        }

    def manifest(self) -> dict[str, Any]:
        """JAX's claims. It takes any head dim; the number is only where trying ended."""
        return {
            "name": "jax",
            "version": str(self.jax.__version__),
            "array": "numpy",
            "device": "cpu",
            "dtypes": ["float16", "bfloat16", "float32"],
            "max_head_dim": 1024,
            "features": [
                "scale", "causal", "window", "bias", "mask", "seqused_k", "gqa", "strides",
                "backward", "backward_bias",
            ],
            "causal_alignments": ["top_left"],
            "empty_rows": "mean",
            "layout": "bshd",
            # the composition of matmul and softmax holds the scores of all heads at once
            "kappa": None,
            "kappa_backward": None,
        }  # fmt: skip

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, None]:
        """(out, None)."""
        given = self._arguments(q, k, v, options)
        function = self._best(self.jax.nn.dot_product_attention, q)
        return np.array(function(*map(self._take, (q, k, v)), **given)), None

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, **options: Any
    ) -> dict[str, Any]:
        """The gradients of ``jax.vjp``; the forward call is repeated for them."""
        given = self._arguments(q, k, v, options)
        found = self._best(self._pull, q)(*map(self._take, (q, k, v, dout)), **given)
        names = ("dq", "dk", "dv", "dbias")
        grads = {n: np.array(x) for n, x in zip(names, found, strict=True) if x is not None}
        if "dbias" in grads:
            grads["dbias"] = grads["dbias"].reshape(options["bias"].shape)
        return grads

    def _best(self, function: Any, q: Any) -> Any:
        """Compiled, except for float16: on a CPU XLA lacks the product that JAX asks for there, and
        JAX's own way around it works only where it runs operation by operation."""
        return function if str(q.dtype) == "float16" else self._compiled[function]

    def _pull(self, q: Any, k: Any, v: Any, dout: Any, bias: Any = None, **given: Any) -> Any:
        def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return self.jax.nn.dot_product_attention(q, k, v, bias=bias, **given)

        return self.jax.vjp(attention, q, k, v, bias)[1](dout)

    def _take(self, x: Any) -> Any:
        return None if x is None else self.jax.numpy.asarray(np.ascontiguousarray(x))

    def _arguments(self, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        problem = common.understand("jax", _OPTIONS, q, k, v, options, "bshd")
        if problem.dtype == "float64":
            raise Unsupported("jax takes no float64 without its global x64 switch")
        causal = common.causal_at("jax", "top_left", problem)
        window = problem.window
        if window is not None:
            if not causal and (problem.seq_q != problem.seq_k or problem.seqused_k):
                raise Unsupported("jax aligns a window at the top left")
            # JAX has no unlimited side; one as long as the keys and queries is the same.
            far = problem.seq_q + problem.seq_k
            window = tuple(far if side is None else side for side in window)  # type: ignore[assignment]
        return {
            "bias": self._take(common.four_axes(options.get("bias"))),
            "mask": self._take(common.four_axes(options.get("mask"))),
            "scale": options.get("scale"),
            "is_causal": causal,
            "key_value_seq_lengths": self._take(options.get("seqused_k")),
            "local_window_size": window,
        }
