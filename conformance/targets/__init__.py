"""Targets: anything with ``manifest`` and ``forward`` (and ``backward``), by name or by import.

The rule kept here: a name is only a string until a child process loads it; no framework is
imported for a target that nobody asked for, and none in the parent.

A target (see ``Target``) is loaded from one of three kinds of specification: a name of `SHIPPED`;
``backend:NAME`` for any portattn backend, out-of-tree ones included; ``package.module:object``
for everything else, where a class is called without arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from portattn.machine import Machine

SHIPPED: Mapping[str, str] = {
    "numpy": "backend:numpy",
    "triton": "backend:triton",
    "cupy": "backend:cupy",
    "numba": "backend:numba",
    "torch-math": "portattn.conformance.targets.torch_sdpa:math",
    "torch-flash": "portattn.conformance.targets.torch_sdpa:flash",
    "torch-efficient": "portattn.conformance.targets.torch_sdpa:efficient",
    "torch-cudnn": "portattn.conformance.targets.torch_sdpa:cudnn",
    "flex": "portattn.conformance.targets.flex:Flex",
    "flash-attn": "portattn.conformance.targets.flash_attention:FlashAttn",
    "xformers": "portattn.conformance.targets.xformers_ops:Xformers",
    "jax": "portattn.conformance.targets.jax_nn:Jax",
    "naive": "portattn.conformance.targets.naive:Naive",
}


_GPU_ONLY = ("torch-efficient", "torch-cudnn", "flash-attn", "xformers")
_MODULES = {"torch": "torch", "flex": "torch", "flash": "flash_attn"}  # by the name's first word


class TargetError(Exception):
    """The target cannot be used at all (exit status 2); the message says why."""


class Target(Protocol):
    """What the suite calls. Arrays are of the kind, device and layout that the manifest names.

    Optional besides: ``meter() -> (bytes in use, peak bytes since the last call of meter)``,
    ``traffic() -> (bytes loaded, bytes stored since the last call of traffic)`` and a true
    attribute ``simulated`` where an interpreter or simulator stands in for the hardware; and
    ``states``, names of known departures from the contract that the target owns up to
    (`portattn.conformance.checks.helpers.states` lists them).
    """

    def manifest(self) -> Mapping[str, Any]:
        """What the target claims; see `portattn.conformance.manifest.Manifest`."""

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """``(out, lse)``; lse None only where ``return_lse`` is not claimed. ``options`` are the
        keywords of `portattn.attention` that differ from their defaults. A request outside the
        manifest raises NotImplementedError, ValueError or TypeError."""

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, **options: Any
    ) -> Any:
        """``(dq, dk, dv)``, or a mapping with ``dbias`` and ``dsinks`` as well."""


def load(spec: str) -> Target:
    """The target of a specification. Raises `TargetError`."""
    path = SHIPPED.get(spec, spec)
    kind, _, name = path.partition(":")
    if kind == "backend" and name:
        from portattn.conformance.targets.backend import BackendTarget

        return BackendTarget(name)
    if not kind or not name:
        raise TargetError(
            f"unknown target {spec!r}; wanted: one of {', '.join(SHIPPED)}, backend:NAME, or "
            "package.module:object"
        )
    found = _import(kind)
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"target {spec!r}: {kind} has no {name}")
        found = getattr(found, part)
    if isinstance(found, type) or (spec in SHIPPED and callable(found)):
        found = found()
    for member in ("manifest", "forward"):
        if not callable(getattr(found, member, None)):
            raise TargetError(
                f"target {spec!r} has no method {member}; a target has manifest() and "
                "forward(q, k, v, **options)"
            )
    target: Target = found
    return target


def why_not(name: str) -> str:
    """What keeps a target that ships from working here, as far as can be told without importing a
    framework; empty where nothing is known to."""
    kind, _, _ = SHIPPED[name].partition(":")
    if kind == "backend":
        try:
            load(name)
        except TargetError as error:
            return str(error)
        return ""
    if name == "naive":
        return ""
    first = name.partition("-")[0]
    for module in dict.fromkeys((_MODULES.get(first, name), *(["torch"] * (name in _GPU_ONLY)))):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if name in _GPU_ONLY and not Machine.here().cuda.devices:
        return "needs a CUDA device"
    return ""


def need(module: str, package: str) -> Any:
    """Import a peer's package, or raise `TargetError` naming what to install."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise TargetError(f"{package} is not installed (pip install {package})")
    return _import(module)


def _import(module: str) -> Any:
    if not module.startswith("portattn.") and "" not in sys.path:
        sys.path.insert(0, "")  # the caller's folder, as `python -m` has it
    try:
        return importlib.import_module(module)
    except TargetError:
        raise
    except Exception as error:  # someone else's module: whatever stops it makes it unusable
        raise TargetError(
            f"{module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
