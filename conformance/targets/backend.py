"""Any portattn backend as a target, through the public call.

The rule kept here: the manifest is asked of the backend, never listed. Each claim is a problem that
``why_not`` takes, so that a backend and its manifest cannot come to disagree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import portattn
from portattn import certificate
from portattn.arguments import DTYPE_BYTES
from portattn.conformance.targets import TargetError
from portattn.contract import Backend
from portattn.machine import Machine
from portattn.problem import Problem
from portattn.registry import find_backends

# Every dim a model could have, then those of a sweep; a gap shows as a list in the manifest.
HEAD_DIMS = (*range(1, 257), 288, 320, 384, 448, 512, 576, 640, 768, 1024)
_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "scale": {"scale": 0.5},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (16, 16)},
    "softcap": {"softcap": 30.0},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "alibi_slopes": {"alibi": True},
    "sinks": {"sinks": True},
    "seqused_k": {"seqused_k": True},
    "gqa": {"heads_q": 4, "heads_k": 2},
    "return_lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "packed": {"layout": "thd"},
    "paged": {"block_size": 16},
    "backward": {"backward": True},
    "backward_bias": {"backward": True, "bias": True},
    "backward_sinks": {"backward": True, "sinks": True},
}


class BackendTarget:
    """``backend:NAME``. ``backend.claims``, where a backend has it, is a mapping of manifest keys
    that no problem can ask about (``tile``, ``kappa``, ``acc``, ``batch_invariant``: True)."""

    def __init__(self, name: str):
        found = find_backends()
        if name not in found:
            raise TargetError(f"unknown backend {name!r}; there are: {', '.join(found)}")
        backend = found[name].backend
        if backend is None:
            raise TargetError(f"backend {name!r} is broken: {found[name].broken}")
        reasons = backend.why_not(None, Machine.here())
        if reasons:
            raise TargetError(
                f"backend {name!r} does not run here: " + "; ".join(map(str, reasons))
            )
        self.name = name
        self.backend: Backend = backend
        self.packages = backend.packages
        claims = dict(getattr(backend, "claims", {}))
        self.simulated = bool(claims.pop("simulated", False))
        self._batch_invariant = bool(claims.pop("batch_invariant", False))
        self._claims = claims
        # what the backend has of the instruments that a target may bring
        for instrument in ("meter", "traffic", "release", "limit_shared_memory"):
            if hasattr(backend, instrument):
                setattr(self, instrument, getattr(backend, instrument))

    def source_hash(self) -> str:
        """The hash that a certificate carries."""
        return certificate.source_hash(self.backend.kernel_files())

    def manifest(self) -> dict[str, Any]:
        """Asked of the backend, one problem a claim."""
        dtypes = [dtype for dtype in DTYPE_BYTES if self._takes(dtype)]
        if not dtypes:
            raise TargetError(f"backend {self.name!r} takes no dtype at head dim 64")
        features = [
            name
            for name, options in _FEATURES.items()
            if all(self._takes(dtype, **options) for dtype in dtypes)
        ]
        if all(self._takes(dtype, head_dim_v=32) for dtype in dtypes):
            features.append("value_head_dim")
        if all(self._takes(dtype, inner_strided=True) for dtype in dtypes):
            features.append("strides")
        features.append("out")  # the public call's own work, for every backend
        if self._batch_invariant:
            features.append("batch_invariant")
        backward = "backward" in features
        dims = [
            dim
            for dim in HEAD_DIMS
            if all(
                self._takes(dtype, dim, backward=there)
                for dtype in dtypes
                for there in ({False, backward})
            )
        ]
        alignments = [
            name
            for name in ("top_left", "bottom_right")
            if self._takes(dtypes[0], causal=name, seq_q=64, seq_k=128)
        ]
        gapless = dims and dims == list(HEAD_DIMS[: len(dims)])
        array, device = self._where()
        return {
            "name": self.name,
            "version": portattn.__version__,
            "array": array,
            "device": device,
            "dtypes": dtypes,
            "features": features,
            "causal_alignments": alignments,
            **({"max_head_dim": dims[-1]} if gapless else {"head_dims": dims}),
            **self._claims,
        }

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """`portattn.attention` with this backend alone."""
        result = portattn.attention(q, k, v, **_layout(options), backend=self.name)
        return result if options.get("return_lse") else (result, None)

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, **options: Any
    ) -> dict[str, Any]:
        """`portattn.attention_backward` with this backend alone."""
        gradients = portattn.attention_backward(
            q, k, v, out, lse, dout, **_layout(options), backend=self.name
        )
        return gradients._asdict()

    def _takes(
        self, dtype: str, head_dim: int = 64, *, inner_strided: bool = False, **options: Any
    ) -> bool:
        problem = Problem.from_numbers(head_dim=head_dim, dtype=dtype, **options)
        if inner_strided:
            problem = replace(problem, inner_strided=True)
        return not self.backend.why_not(problem, Machine.here())

    def _where(self) -> tuple[str, str]:
        """The array kind and the device that the backend is called with here."""
        here = Machine.here().cuda.devices
        device = "cuda" if "cuda" in self.backend.device_kinds and here else "cpu"
        if device == "cuda":
            torch_there = importlib.util.find_spec("torch") is not None
            return ("cupy" if self.packages[0] == "cupy" or not torch_there else "torch"), device
        return ("torch" if "torch" in self.packages else "numpy"), device


def _layout(options: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's layout where the call names none (packed calls name theirs)."""
    return {"layout": "bhsd", **options}
