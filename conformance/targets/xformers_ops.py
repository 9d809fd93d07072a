"""xformers.ops.memory_efficient_attention, whichever of its kernels it chooses.

The rule kept here: the package's own semantics. Layout (B, S, H, D); grouped heads as a fifth axis
over an expanded view; causal at either alignment and windows at the bottom right as mask objects;
a tensor bias in q's dtype; the LSE, from the ``_requires_grad`` form, is natural and float32.
Softcap, ALiBi and sinks do not exist. Gradients come from autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portattn import Unsupported
from portattn.conformance.targets import TargetError, common, need

_OPTIONS = ("scale", "causal", "window", "bias", "return_lse")


class Xformers:
    """The target."""

    packages = ("xformers", "torch")
    states = ("nan_spreads",)

    def __init__(self) -> None:
        self.torch = need("torch", "torch")
        if not self.torch.cuda.is_available():
            raise TargetError("xformers' attention needs a CUDA device; torch sees none")
        self.package = need("xformers", "xformers")
        self.ops = need("xformers.ops", "xformers")
        self.masks = need("xformers.ops.fmha.attn_bias", "xformers")

    def manifest(self) -> dict[str, Any]:
        """What its documentation claims."""
        return {
            "name": "xformers",
            "version": str(self.package.__version__),
            "array": "torch",
            "device": "cuda",
            "dtypes": ["float16", "bfloat16"],
            "acc": "fp32-rz",  # tensor cores cut sums
            "head_dims": list(range(8, 257, 8)),
            "features": ["scale", "causal", "window", "bias", "return_lse", "gqa", "strides",
                         "backward"],
            "layout": "bshd",
        }  # fmt: skip

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """(out, lse)."""
        with self.torch.no_grad():
            q5, k5, v5, given = self._arguments(q, k, v, options)
            if not options.get("return_lse"):
                out = self.ops.memory_efficient_attention_forward(q5, k5, v5, **given)
                return out.reshape(*q.shape[:3], v.shape[-1]), None
            out, lse = self.ops.memory_efficient_attention_forward_requires_grad(
                q5, k5, v5, **given
            )
            lse = lse.reshape(q.shape[0], q.shape[2], -1)[..., : q.shape[1]]
            lse = lse.masked_fill(lse == float("inf"), float("-inf"))
        return out.reshape(*q.shape[:3], v.shape[-1]), lse

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, **options: Any
    ) -> tuple[Any, Any, Any]:
        """Autograd's gradients of the forward call, which is repeated for them."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with self.torch.enable_grad():
            q5, k5, v5, given = self._arguments(leaves[0], leaves[1], leaves[2], options)
            again = self.ops.memory_efficient_attention(q5, k5, v5, **given)
            again = again.reshape(*q.shape[:3], v.shape[-1])
            dq, dk, dv = self.torch.autograd.grad(again, leaves, dout)
        return dq, dk, dv

    def _arguments(
        self, q: Any, k: Any, v: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        problem = common.understand("xformers", _OPTIONS, q, k, v, options, "bshd")
        if problem.dtype not in ("float16", "bfloat16"):
            raise Unsupported(f"xformers takes float16 and bfloat16, not {problem.dtype}")
        bias = self._bias(q, k, options)
        if q.shape[2] != k.shape[2]:
            batch, seq, heads, dim = q.shape
            group = heads // k.shape[2]
            q = q.reshape(batch, seq, k.shape[2], group, dim)
            k = k[:, :, :, None].expand(-1, -1, -1, group, -1)
            v = v[:, :, :, None].expand(-1, -1, -1, group, -1)
        return q, k, v, {"attn_bias": bias, "scale": options.get("scale")}

    def _bias(self, q: Any, k: Any, options: Mapping[str, Any]) -> Any:
        causal, window, bias = (options.get(name) for name in ("causal", "window", "bias"))
        same = q.shape[1] == k.shape[1]
        if bias is not None:
            if causal or window is not None or q.shape[2] != k.shape[2]:
                raise Unsupported("xformers takes a bias alone, without causal, window and GQA")
            if bias.dtype != q.dtype:
                raise Unsupported(f"xformers wants the bias in q's dtype; it is {bias.dtype}")
            return bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if window is not None:
            if causal == "top_left" and not same:
                raise Unsupported("xformers aligns windows at the bottom right")
            left, right = (1 << 30 if side is None else side for side in window)
            return self.masks.LocalAttentionFromBottomRightMask(
                window_left=left, window_right=0 if causal else right
            )
        if causal == "top_left" or (causal and same):
            return self.masks.LowerTriangularMask()
        return self.masks.LowerTriangularFromBottomRightMask() if causal else None
