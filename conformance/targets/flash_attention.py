"""flash-attn (FlashAttention-2), through its public functions.

The rule kept here: the package's own semantics. Layout (B, S, H, D); causal and window are aligned
at the bottom right; -1 is an unlimited side; the LSE is natural, float32, and +inf where a row sees
nothing, which the contract writes -inf (the one thing that is translated). Head dim up to 256,
float16 and bfloat16 only, no mask, bias or sinks. Gradients come from autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portattn import Unsupported
from portattn.conformance.targets import TargetError, common, need

_OPTIONS = (
    "scale", "causal", "window", "softcap", "alibi_slopes", "return_lse", "deterministic",
    "layout", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip


class FlashAttn:
    """The target."""

    packages = ("flash-attn", "torch")
    states = ("nan_spreads",)

    def __init__(self) -> None:
        self.torch = need("torch", "torch")
        if not self.torch.cuda.is_available():
            raise TargetError("flash-attn needs a CUDA device; torch sees none")
        self.package = need("flash_attn", "flash-attn")

    def manifest(self) -> dict[str, Any]:
        """What the package's documentation claims."""
        return {
            "name": "flash-attn",
            "version": str(self.package.__version__),
            "array": "torch",
            "device": "cuda",
            "dtypes": ["float16", "bfloat16"],
            "acc": "fp32-rz",  # tensor cores cut sums
            "max_head_dim": 256,
            "features": [
                "scale", "causal", "window", "softcap", "alibi_slopes", "return_lse", "gqa",
                "deterministic", "packed", "strides", "backward",
            ],
            "causal_alignments": ["bottom_right"],
            "layout": "bshd",
        }  # fmt: skip

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """(out, lse)."""
        with self.torch.no_grad():
            out, lse, _ = self._call(q, k, v, options)
        lse = lse.masked_fill(lse == float("inf"), float("-inf"))
        return out, lse if options.get("return_lse") else None

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, **options: Any
    ) -> tuple[Any, Any, Any]:
        """Autograd's gradients of the forward call, which is repeated for them."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with self.torch.enable_grad():
            again, _, _ = self._call(leaves[0], leaves[1], leaves[2], options)
            dq, dk, dv = self.torch.autograd.grad(again, leaves, dout)
        return dq, dk, dv

    def _call(self, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Any:
        problem = common.understand("flash-attn", _OPTIONS, q, k, v, options, "bshd")
        if problem.dtype not in ("float16", "bfloat16"):
            raise Unsupported(f"flash-attn takes float16 and bfloat16, not {problem.dtype}")
        if problem.head_dim != problem.head_dim_v:
            raise Unsupported("flash-attn wants v of q's head dim")
        causal = common.causal_at("flash-attn", "bottom_right", problem)
        window = problem.window or (None, None)
        given = {
            "softmax_scale": options.get("scale"),
            "causal": causal,
            "window_size": tuple(-1 if side is None else side for side in window),
            "softcap": options.get("softcap") or 0.0,
            "alibi_slopes": options.get("alibi_slopes"),
            "deterministic": bool(options.get("deterministic")),
            "return_attn_probs": True,
        }
        if not problem.packed:
            return self.package.flash_attn_func(q, k, v, **given)
        cu_q, cu_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
        return self.package.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k,
            int((cu_q[1:] - cu_q[:-1]).max()),
            int((cu_k[1:] - cu_k[:-1]).max()),
            **given,
        )  # fmt: skip
