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


PRESENTATION = ("cli.py", "index.py", "junit.py", "show.py", "report/")
"""Files and folders that show records and have no say in what stands in one."""


@functools.cache
def suite() -> Mapping[str, str]:
    """Version and hash of the suite."""
    return {"version": portattn.__version__, "hash": hash_of(Path(__file__).parent)}


def hash_of(root: Path) -> str:
    """The hash of every Python file below ``root``, by path, but for `PRESENTATION`: another
    colour of a report makes no record stale."""
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(files):
        if name in PRESENTATION or name.startswith(PRESENTATION[-1]):
            continue
        digest.update(name.encode() + b"\0")
        digest.update(files[name].read_bytes() + b"\0")
    return digest.hexdigest()[:16]


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
