"""Certificates: conformance records as evidence about a backend on this machine.

The rule kept here: a certificate speaks only for the fingerprint it was taken with. Anything that
changed since (driver, GPU, library version, kernel source) makes it stale, and the change is named.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portattn.arguments import check_flag
from portattn.contract import Backend
from portattn.machine import Machine
from portattn.records import ENV_DATA_DIR as ENV_DATA_DIR
from portattn.records import data_path
from portattn.records import source_hash as source_hash

ENV_REQUIRE = "PORTATTN_REQUIRE_CERTIFIED"

# Parts of a fingerprint that tell two records of one machine apart but do not age a certificate:
# a shorter affinity mask computes the same thing.
_NOT_COMPARED = frozenset({"cores"})

# What is read of a record; one that has it otherwise is no record.
_READ = {"level": str | None, "created": str, "failed": list, "fingerprint": dict}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a conformance record says of a backend: the level granted (``L3``; None if not even
    L0), when, which checks failed, and which parts of the fingerprint changed since (``stale``)."""

    backend: str
    level: str | None
    date: str
    failed: tuple[str, ...]
    stale: tuple[str, ...]
    path: str

    @property
    def certifies(self) -> bool:
        """A level is granted and nothing changed since."""
        return self.level is not None and not self.stale and not self.failed

    @property
    def quarantines(self) -> bool:
        """The backend failed here, as it is now."""
        return bool(self.failed) and not self.stale

    def __str__(self) -> str:
        text = f"{self.level or 'no level'} on {self.date[:10]}"
        if self.failed:
            text += f", failed {', '.join(self.failed[:3])}"
        if self.stale:
            text += f" (stale: {', '.join(self.stale)} changed)"
        return text

    def to_json(self) -> dict[str, Any]:
        """The evidence as JSON values."""
        return {
            "level": self.level,
            "date": self.date,
            "failed": list(self.failed),
            "stale": list(self.stale),
            "path": self.path,
        }


def data_dir() -> Path:
    """The user's data folder for portattn; the environment variable PORTATTN_DATA_DIR overrides."""
    return Path(data_path())


def evidence_dir() -> Path:
    """Where records are kept: one file a backend, ``<name>.json``."""
    return Path(evidence_path())


def evidence_path() -> str:
    """`evidence_dir` as text, for the call that looks there each time."""
    return data_path() + os.sep + "evidence"


def fingerprint(backend: Backend, machine: Machine) -> dict[str, Any]:
    """What a certificate of ``backend`` depends on: the machine, the versions of its packages, the
    hash of its kernel sources, and what this process holds it to, where it can be held to anything
    (``backend.held()``). A CPU backend does not age with the GPU driver."""
    parts = machine.fingerprint()
    if "cuda" not in backend.device_kinds:
        parts = {k: v for k, v in parts.items() if k not in ("driver", "gpus")}
    parts["kernel_hash"] = source_hash(backend.kernel_files())
    for package in backend.packages:
        parts[package] = machine.version(package)
    if hasattr(backend, "held"):
        parts |= backend.held()
    return parts


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the parts that differ, each with what it was and what it is."""
    keys = [k for k in now if k not in _NOT_COMPARED and then.get(k) != now[k]]
    return tuple(f"{k} ({then.get(k)} -> {now[k]})" for k in keys)


def find_evidence(backend: Backend, machine: Machine) -> Evidence | None:
    """The newest record of this backend in the user's data folder, held against this machine."""
    path = evidence_dir() / f"{backend.name}.json"
    record = _read(str(path), _stamp(path))
    if record is None:
        return None
    return Evidence(
        backend=backend.name,
        level=record["level"],
        date=record["created"],
        failed=tuple(record["failed"]),
        stale=changed(record["fingerprint"], fingerprint(backend, machine)),
        path=str(path),
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=64)
def _read(path: str, stamp: tuple[int, int] | None) -> dict[str, Any] | None:
    if stamp is None:
        return None
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None  # unreadable evidence is no evidence; `conformance verify` says what is wrong
    sound = isinstance(record, dict) and all(
        isinstance(record.get(key), kind) for key, kind in _READ.items()
    )
    return record if sound else None


def required(flag: bool | None) -> bool:
    """Whether only certified backends may be chosen: the argument, else the environment."""
    if flag is not None:
        return check_flag("require_certified", flag)
    return os.environ.get(ENV_REQUIRE, "") not in ("", "0", "false")
