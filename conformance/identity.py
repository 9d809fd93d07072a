"""Who was tested, by which suite, on what machine: the parts of a record that make it evidence.

The rule kept here: a record speaks for exactly these hashes and versions. The fingerprint of a
portattn backend is the one that `portattn.certificate` compares, so that a record can serve as a
certificate; other targets get the same machine part and their own sources and packages.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import portattn
from portattn import certificate
from portattn.conformance.isolate import Loaded
from portattn.conformance.targets import SHIPPED
from portattn.machine import Machine
from portattn.registry import find_backends

SUITE_PACKAGES = ("numpy", "ml_dtypes")


@functools.cache
def suite() -> Mapping[str, str]:
    """Version and hash of the suite: every Python file below ``conformance/``, by path."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return {"version": portattn.__version__, "hash": digest.hexdigest()[:16]}


def fingerprint(spec: str, loaded: Loaded) -> dict[str, Any]:
    """The machine, the versions and the sources that the record depends on; flat JSON values."""
    machine = Machine.here()
    kind, _, name = SHIPPED.get(spec, spec).partition(":")
    if kind == "backend":
        backend = find_backends()[name].backend
        assert backend is not None  # it has just been loaded in a child
        return certificate.fingerprint(backend, machine)
    parts = machine.fingerprint()
    if loaded.manifest.device == "cpu":
        parts = {key: value for key, value in parts.items() if key not in ("driver", "gpus")}
    parts["target"] = f"{loaded.manifest.name} {loaded.manifest.version}"
    parts["kernel_hash"] = loaded.source
    for package in dict.fromkeys((*loaded.packages, *SUITE_PACKAGES)):
        parts[package] = machine.version(package)
    return parts
