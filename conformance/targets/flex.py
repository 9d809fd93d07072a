"""torch's FlexAttention: masks and score changes as functions that are compiled into the kernel.

The rule kept here: everything that a ``mask_mod`` or ``score_mod`` can say is claimed, since that
is the library's own claim. On a GPU the call is compiled; on a CPU only the forward is, and without
a compiler torch falls back to its eager form, which stores the scores.

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


class Flex:
    """The target."""

    packages = ("torch", "triton")
    states = ("nan_spreads",)

    def __init__(self) -> None:
        self.torch = need("torch", "torch")
        self.flex = need("torch.nn.attention.flex_attention", "torch")
        self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
        self._call = self.flex.flex_attention
        if self.device == "cuda":
            # One graph a shape and mask; the default limit would send later ones to eager mode.
            need("torch._dynamo", "torch").config.cache_size_limit = 4096
            self._call = self.torch.compile(self.flex.flex_attention, dynamic=False)

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
            "head_dims": [16, 32, 64, 128, 256] if gpu else list(range(8, 513, 8)),
            "features": features + (["backward"] if gpu else []),
            # the eager form of a CPU stores the scores
            **({} if gpu else {"kappa": None}),
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the eager form: that it is slow
            found = self._call(
                q, k, v,
                score_mod=self._score(options, k.shape[2] - q.shape[2]),
                block_mask=self._block_mask(q, k, options),
                scale=options.get("scale"),
                enable_gqa=q.shape[1] != k.shape[1],
                return_lse=lse,
            )  # fmt: skip
        if not lse:
            return found, None
        out, sums = found
        return out, sums

    def _score(self, options: Mapping[str, Any], shift: int) -> Callable[..., Any] | None:
        """Softcap, bias and ALiBi, in the contract's order; ``shift`` is Sk - Sq."""
        torch = self.torch
        cap, bias, slopes = (options.get(x) for x in ("softcap", "bias", "alibi_slopes"))
        if cap is None and bias is None and slopes is None:
            return None
        pick = None if bias is None else _picker(bias)

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            if pick is not None:
                score = score + pick(b, h, i, j)
            if slopes is not None:
                slope = slopes[b, h] if slopes.ndim == 2 else slopes[h]
                score = score - slope * torch.abs(i + shift - j)
            return score

        return score_mod

    def _block_mask(self, q: Any, k: Any, options: Mapping[str, Any]) -> Any:
        """Causal, window and mask as one ``mask_mod``; None where all is visible."""
        causal, window, mask = (options.get(name) for name in ("causal", "window", "mask"))
        if not causal and window is None and mask is None:
            return None
        shift = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        left, right = window if window is not None else (None, None)
        pick = None if mask is None else _picker(mask)

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = j >= 0
            if causal:
                seen = seen & (j <= i + shift)
            if left is not None:
                seen = seen & (j >= i + shift - left)
            if right is not None:
                seen = seen & (j <= i + shift + right)
            return seen if pick is None else seen & pick(b, h, i, j)

        batch = heads = None
        if mask is not None:
            full = (1,) * (4 - mask.ndim) + tuple(mask.shape)
            batch = q.shape[0] if full[0] > 1 else None
            heads = q.shape[1] if full[1] > 1 else None
        return self.flex.create_block_mask(
            mask_mod, batch, heads, q.shape[2], k.shape[2], device=self.device
        )


def _picker(x: Any) -> Callable[[Any, Any, Any, Any], Any]:
    """Element (b, h, i, j) of a tensor that broadcasts to four axes."""
    full = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    one = [size == 1 for size in full.shape]

    def pick(b: Any, h: Any, i: Any, j: Any) -> Any:
        index = [x * 0 if single else x for x, single in zip((b, h, i, j), one, strict=True)]
        return full[tuple(index)]

    return pick
