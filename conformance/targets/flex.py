"""torch's FlexAttention: masks and score changes as functions that are compiled into the kernel.

The rule kept here: everything that a ``mask_mod`` or ``score_mod`` can say is claimed, since that
is the library's own claim. On a GPU the call is compiled, once for all lengths (``dynamic=True``),
and what cannot be compiled is an error: an eager form that steps in would be another kernel. On a
CPU it runs in its eager form, which stores the scores.

A new compilation costs many seconds. Hence every number of a call that the functions use (lengths,
window, cap) is a tensor: the compiler treats a Python number in a closure as a constant.

Semantics: layout (B, H, S, D); a row that sees nothing gives 0 and an LSE of -inf; the LSE is
natural, float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from portattn import Unsupported
from portattn.conformance.targets import common, need

_OPTIONS = (
    "scale", "causal", "window", "softcap", "bias", "mask", "alibi_slopes", "return_lse",
)  # fmt: skip
_COMPILATIONS = 4096  # the default of 8 would send later kinds of calls to eager mode
_WHOLE_MASK = 1 << 24  # elements up to which a block mask is built eagerly, by way of a whole one


class Flex:
    """The target."""

    packages = ("torch", "triton")
    states = ("nan_spreads",)

    def __init__(self, *, compiled: bool | None = None) -> None:
        self.torch = need("torch", "torch")
        self.flex = need("torch.nn.attention.flex_attention", "torch")
        self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
        self._call = self.flex.flex_attention
        self._large_mask = self.flex.create_block_mask
        if self.device == "cuda" if compiled is None else compiled:
            config = need("torch._dynamo", "torch").config
            config.recompile_limit = config.accumulated_recompile_limit = _COMPILATIONS
            config.specialize_float = True  # the scale is a constant of the kernel
            # Else lengths that happen to be equal once are taken to be equal for good.
            need("torch.fx.experimental._config", "torch").use_duck_shape = False
            self._call = self.torch.compile(self._call, dynamic=True, fullgraph=True)
            self._large_mask = self.torch.compile(self._large_mask, dynamic=True, fullgraph=True)

    def manifest(self) -> dict[str, Any]:
        """Claims of the documentation; compiled kernels want head dims of at least 16."""
        gpu = self.device == "cuda"
        features = [
            "scale", "causal", "window", "softcap", "bias", "mask", "alibi_slopes", "return_lse",
            "gqa", "value_head_dim", "strides",
        ]  # fmt: skip
        return {
            "name": "flex",
            "version": str(self.torch.__version__),
            "array": "torch",
            "device": self.device,
            "dtypes": ["float16", "bfloat16", "float32", *([] if gpu else ["float64"])],
            "head_dims": list(range(16, 257, 8)) if gpu else list(range(8, 513, 8)),
            **({"acc": "fp32-rz"} if gpu else {}),  # tensor cores cut sums
            "min_sizes": [1, 1, 1],
            "features": features + (["backward"] if gpu else []),
            # few rows over many keys keep a float32 output for each part of the keys;
            # the eager form of a CPU stores the scores
            "kappa": 2.0 if gpu else None,
        }

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """(out, lse)."""
        with self.torch.no_grad():
            return self._run(q, k, v, options, lse=bool(options.get("return_lse")))

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, **options: Any
    ) -> tuple[Any, Any, Any]:
        """Autograd's gradients of the forward call, which is repeated for them."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with self.torch.enable_grad():
            again, _ = self._run(leaves[0], leaves[1], leaves[2], options, lse=False)
            dq, dk, dv = self.torch.autograd.grad(again, leaves, dout)
        return dq, dk, dv

    def _run(
        self, q: Any, k: Any, v: Any, options: Mapping[str, Any], *, lse: bool
    ) -> tuple[Any, Any]:
        common.understand("flex", _OPTIONS, q, k, v, options, "bhsd")
        if 0 in q.shape or 0 in k.shape:
            raise Unsupported("flex takes no empty tensors")
        if self._call is not self.flex.flex_attention:
            for x in (q, k, v):  # the kernel wants its head dims as constants
                self.torch._dynamo.mark_static(x, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the eager form: that it is slow
            try:
                found = self._call(
                    q, k, v,
                    score_mod=self._score(q, k, options),
                    block_mask=self._block_mask(q, k, options),
                    scale=options.get("scale"),
                    enable_gqa=q.shape[1] != k.shape[1],
                    return_lse=lse,
                )  # fmt: skip
            except RuntimeError as error:
                # The compiler's own errors come before any launch.
                if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                    raise Unsupported(f"flex does not compile this: {error}") from error
                raise
        return (found[0], found[1]) if lse else (found, None)

    def _score(self, q: Any, k: Any, options: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Softcap, bias and ALiBi."""
        cap, bias, slopes = (options.get(x) for x in ("softcap", "bias", "alibi_slopes"))
        if cap is None and bias is None and slopes is None:
            return None
        (b, h, n, _), m = q.shape, k.shape[2]
        return _score_mod(
            None if cap is None else self._number(float(cap)),
            None if bias is None else bias.expand(b, h, n, m),
            None if slopes is None else slopes.expand(b, h),
            self._number(m - n),
        )

    def _block_mask(self, q: Any, k: Any, options: Mapping[str, Any]) -> Any:
        """Causal, window and mask as one ``mask_mod``; None where all is visible."""
        causal, window, mask = (options.get(name) for name in ("causal", "window", "mask"))
        if not causal and window is None and mask is None:
            return None
        (b, h, n, _), m = q.shape, k.shape[2]
        shift = 0 if causal == "top_left" else m - n
        left, right = window if window is not None else (None, None)
        if causal:
            right = 0 if right is None else min(right, 0)
        batch = heads = None
        if mask is not None:
            full = (1,) * (4 - mask.ndim) + tuple(mask.shape)
            batch, heads = b if full[0] > 1 else None, h if full[1] > 1 else None
            mask = mask.expand(b, h, n, m)
        mod = _mask_mod(
            None if left is None else self._number(shift - left),
            None if right is None else self._number(shift + right),
            mask,
        )
        whole = (batch or 1) * (heads or 1) * n * m
        make = self.flex.create_block_mask if whole <= _WHOLE_MASK else self._large_mask
        return make(mod, batch, heads, n, m, device=self.device)

    def _number(self, value: float) -> Any:
        return self.torch.tensor(value, device=self.device)


def _score_mod(cap: Any, bias: Any, slopes: Any, shift: Any) -> Callable[..., Any]:
    """In the contract's order; tensors or None, ``shift`` is Sk - Sq."""

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap is not None:
            score = cap * (score / cap).tanh()
        if bias is not None:
            score = score + bias[b, h, i, j]
        if slopes is not None:
            score = score - slopes[b, h] * (i + shift - j).abs()
        return score

    return score_mod


def _mask_mod(first: Any, last: Any, mask: Any) -> Callable[..., Any]:
    """Row i sees keys from ``i + first`` to ``i + last`` that ``mask`` shows; tensors or None."""

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = j >= 0
        if first is not None:
            seen = seen & (j >= i + first)
        if last is not None:
            seen = seen & (j <= i + last)
        if mask is not None:
            seen = seen & mask[b, h, i, j]
        return seen

    return mask_mod
