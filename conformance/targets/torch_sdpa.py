"""torch's scaled_dot_product_attention, one target a backend of it, through its public call.

The rule kept here: what a backend of torch takes is tried on the device at hand with tiny tensors,
since it changes with the release and the GPU. Its own "no available kernel" is its refusal.

Semantics (torch's documentation): ``is_causal`` is aligned at the top left; the mask is boolean
(True attends) or float (added, in q's dtype); a row that sees nothing gives 0; there is no LSE in
the public call. ``bottom_right`` with unequal lengths, window, softcap, ALiBi and sinks do not
exist. GQA is ``enable_gqa``. Gradients come from autograd.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from portattn import Unsupported
from portattn.conformance.targets import TargetError, common, need

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_REFUSALS = (  # what torch and cuDNN raise for "not this one" before a launch, by a RuntimeError
    "no available kernel", "no viable backend", "no execution plan", "no valid execution plan",
    "not correctly aligned", "must be contiguous", "invalid dtype for bias",
)  # fmt: skip
_OPTIONS = ("scale", "causal", "mask", "bias")
_DIMS = (*range(8, 257, 8), 320, 512)
_ODD_DIMS = (1, 2, 3, 4, 59, 111, 193)


class Sdpa:
    """One of torch's kernels, forced by ``torch.nn.attention.sdpa_kernel``."""

    packages = ("torch",)

    def __init__(
        self,
        name: str,
        backend: str,
        *,
        gpu_only: bool = False,
        claims: Mapping[str, Any] | None = None,
        states: tuple[str, ...] = ("nan_spreads",),
        whole_rows: bool = False,
    ):
        self.torch = need("torch", "torch")
        attention = need("torch.nn.attention", "torch")
        self.name = name
        self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
        if gpu_only and self.device == "cpu":
            raise TargetError(f"{name} needs a CUDA device; torch sees none")
        self.states = states
        self._claims = dict(claims or {})
        self._whole_rows = whole_rows  # a mask broadcast along the keys must be written out
        self._wide_bias: dict[str, bool] = {}
        self._one = getattr(attention.SDPBackend, backend)
        self._kernel = attention.sdpa_kernel

    def manifest(self) -> dict[str, Any]:
        """What torch takes here, tried."""
        dtypes = [dtype for dtype in _DTYPES if self._takes(dtype)]
        if not dtypes:
            raise TargetError(f"{self.name}: torch {self.torch.__version__} has no such kernel "
                              f"on {self.device}")  # fmt: skip
        features = ["scale", "causal"]
        tries: Mapping[str, Mapping[str, Any]] = {
            "mask": {"mask": "bool"},
            "bias": {"mask": "own"},
            "gqa": {"gqa": True},
            "value_head_dim": {"dim_v": 32},
            "strides": {"strided": True},
            "backward": {"backward": True},
        }
        for feature, options in tries.items():
            if all(self._takes(dtype, **options) for dtype in dtypes):
                features.append(feature)
        backward = "backward" in features
        if backward and "bias" in features and self._bias_gradient:
            features.append("backward_bias")
        dims = [
            dim
            for dim in sorted((*_DIMS, *_ODD_DIMS))
            if all(self._takes(dtype, dim, backward=backward) for dtype in dtypes)
        ]
        every = set(_ODD_DIMS) <= set(dims) and dims == sorted((*_DIMS, *_ODD_DIMS))[: len(dims)]
        return {
            "name": self.name,
            "version": str(self.torch.__version__),
            "array": "torch",
            "device": self.device,
            "dtypes": dtypes,
            "features": features,
            # Where equal lengths alone are taken, the list is empty.
            "causal_alignments": ["top_left"]
            * all(
                self._takes(dtype, rows=rows, keys=keys, causal=True)
                for dtype in dtypes
                for rows, keys in ((16, 32), (32, 16))
            ),
            "min_sizes": self._smallest(dtypes),
            **({"acc": "fp32-rz"} if self.device == "cuda" else {}),  # tensor cores cut sums
            **({"max_head_dim": dims[-1]} if every else {"head_dims": dims}),
            **self._claims,
        }

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, None]:
        """(out, None): the public call gives no LSE."""
        with self.torch.no_grad():
            return self._call(q, k, v, options), None

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, **options: Any
    ) -> dict[str, Any]:
        """Autograd's gradients of the forward call, which is repeated for them."""
        inputs = {"dq": q, "dk": k, "dv": v}
        if options.get("bias") is not None and self._bias_gradient:
            inputs["dbias"] = options["bias"]
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        if "dbias" in leaves:
            options = {**options, "bias": leaves["dbias"]}
        with self.torch.enable_grad():
            again = self._call(leaves["dq"], leaves["dk"], leaves["dv"], options)
            found = self.torch.autograd.grad(again, list(leaves.values()), dout)
        return dict(zip(leaves, found, strict=True))

    def _call(self, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Any:
        problem = common.understand(self.name, _OPTIONS, q, k, v, options, "bhsd")
        causal = common.causal_at(self.name, "top_left", problem)
        mask, bias = (common.four_axes(options.get(name)) for name in ("mask", "bias"))
        if causal and (mask is not None or bias is not None):
            raise Unsupported(f"{self.name} takes no mask or bias together with causal")
        if bias is not None and bias.dtype != q.dtype and not self._takes_wide_bias(problem.dtype):
            raise Unsupported(f"{self.name} wants the bias in q's dtype; it is {bias.dtype}")
        if bias is not None and problem.dtype == "float64":
            bias = bias.double()  # exact; torch's flash kernel takes a float32 one and misreads it
        if mask is not None and bias is not None:
            mask = bias.masked_fill(~mask, float("-inf"))
        elif bias is not None:
            mask = bias
        if self._whole_rows and mask is not None and mask.shape[-1] == 1 < k.shape[2]:
            mask = mask.expand(*mask.shape[:-1], k.shape[2]).contiguous()
        try:
            with warnings.catch_warnings(), self._kernel(self._one):
                warnings.simplefilter("ignore")  # torch warns of each kernel that it rules out
                out = self.torch.nn.functional.scaled_dot_product_attention(
                    q, k, v,
                    attn_mask=mask,
                    is_causal=causal,
                    scale=options.get("scale"),
                    enable_gqa=q.shape[1] != k.shape[1],
                )  # fmt: skip
        except RuntimeError as error:
            if any(sign in str(error).lower() for sign in _REFUSALS):
                raise Unsupported(f"{self.name}: {error}") from error
            raise
        if out is None:  # cuDNN's, of an empty batch
            raise Unsupported(f"{self.name} gave no tensor")
        return out

    def _smallest(self, dtypes: list[str]) -> list[int]:
        """The smallest batch, and the fewest rows and keys, that every dtype is answered for."""

        def least(takes: Callable[[str, int], bool]) -> int:
            return next(
                n for n in (0, 1, 2, 16) if n == 16 or all(takes(dtype, n) for dtype in dtypes)
            )

        return [
            least(lambda dtype, n: self._takes(dtype, batch=n)),
            least(lambda dtype, n: self._takes(dtype, rows=n)),
            least(lambda dtype, n: self._takes(dtype, keys=n)),
        ]

    def _takes_wide_bias(self, dtype: str) -> bool:
        """Does a float32 bias go with ``dtype``? Tried once; the trial itself is let through."""
        if dtype not in self._wide_bias:
            self._wide_bias[dtype] = True
            self._wide_bias[dtype] = self._takes(dtype, mask="float32")
        return self._wide_bias[dtype]

    @functools.cached_property
    def _bias_gradient(self) -> bool:
        """Does the kernel run where the bias wants a gradient as well? (Flash does not.)"""
        self.__dict__["_bias_gradient"] = True  # while it is tried
        return any(self._takes(dtype, mask="own", backward=True) for dtype in _DTYPES)

    def _takes(
        self,
        dtype: str,
        dim: int = 64,
        *,
        dim_v: int | None = None,
        gqa: bool = False,
        mask: str = "",
        strided: bool = False,
        backward: bool = False,
        batch: int = 1,
        rows: int = 16,
        keys: int = 16,
        causal: bool = False,
    ) -> bool:
        """Does torch run a tiny call of this kind?"""
        kind = getattr(self.torch, dtype)

        def zeros(heads: int, length: int, width: int) -> Any:
            shape = (batch, length, heads, width) if strided else (batch, heads, length, width)
            made = self.torch.zeros(shape, dtype=kind, device=self.device)
            return made.transpose(1, 2) if strided else made

        group = 2 if gqa else 4
        q, k = zeros(4, rows, dim), zeros(group, keys, dim)
        v = zeros(group, keys, dim_v or dim)
        options: dict[str, Any] = {"causal": "top_left"} if causal else {}
        if mask == "bool":
            options["mask"] = self.torch.ones(rows, keys, dtype=self.torch.bool, device=self.device)
        elif mask:
            its = kind if mask == "own" else self.torch.float32
            options["bias"] = self.torch.zeros(rows, keys, dtype=its, device=self.device)
        try:
            if backward:
                self.backward(q, k, v, None, None, zeros(4, rows, dim_v or dim), **options)
            else:
                self.forward(q, k, v, **options)
        except (Unsupported, RuntimeError):
            return False  # torch refuses some kinds late and by a RuntimeError of their own
        return True


def _cuda() -> bool:
    return bool(need("torch", "torch").cuda.is_available())


def math() -> Sdpa:
    """The unfused composition of matmul and softmax; scores stored whole."""
    return Sdpa("torch-math", "MATH", claims={"kappa": None, "kappa_backward": None})


def flash() -> Sdpa:
    """FlashAttention-2 on a GPU, torch's own tiled kernel on a CPU. The latter keeps a float32 tile
    of scores and of the output for each thread, and sums dk and dv in their own dtype. The former
    splits the keys over multiprocessors that would idle and keeps a float32 output for each part,
    which with few heads is more than the IO."""
    return Sdpa(
        "torch-flash",
        "FLASH_ATTENTION",
        claims={"kappa": 2.0 if _cuda() else 1.0},
        states=("nan_spreads", "sums_in_dtype"),
    )


def efficient() -> Sdpa:
    """The kernel that came from xformers (CUTLASS); CUDA only. A mask's rows must be contiguous."""
    return Sdpa("torch-efficient", "EFFICIENT_ATTENTION", gpu_only=True, whole_rows=True)


def cudnn() -> Sdpa:
    """cuDNN's graph; CUDA only."""
    return Sdpa("torch-cudnn", "CUDNN_ATTENTION", gpu_only=True)
