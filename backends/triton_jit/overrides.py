"""Tiles that were measured on this device, which stand before the shipped ones.

The rule kept here: they count only for the kernel sources and the Triton that they were measured
with, and only if each is a tile that the kernels take.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from portattn import tuning
from portattn.machine import Machine
from portattn.records import source_hash

SOURCES = ("forward.py", "launch_portable.py", "scoring.py")
"""What a measured tile hangs on, of this folder."""

WIDEST = 128
"""Query rows of a tile at most: one that repairs what hopper left looks at two flags, each of which
speaks for 128 rows or more."""


@functools.cache
def now() -> dict[str, Any]:
    """What measured tiles hang on, as it is."""
    folder = Path(__file__).parent
    return {
        "kernel_hash": source_hash(tuple(str(folder / name) for name in SOURCES)),
        "triton": Machine.here().version("triton"),
    }


def digest(device: str) -> str | None:
    """What the file of measured tiles holds, in short; None where there is none."""
    try:
        data = tuning.path("triton", device).read_bytes()
    except OSError:
        return None
    return hashlib.sha256(data).hexdigest()[:16]


def rows(device: str, key: str) -> list[list[int]] | None:
    """The tiles measured for ``key`` on the device of that name, the best first, or None."""
    if not device:
        return None
    found = tuning.lookup("triton", device, key, now)
    return found if found is not None and all(_sound(row) for row in found) else None


def _sound(row: list[int]) -> bool:
    if len(row) != 6:
        return False
    block_q, block_k, warps, stages, shared, masked = row
    powers = all(n > 0 and n & (n - 1) == 0 for n in (block_q, block_k, warps))
    return (
        powers and 16 <= block_q <= WIDEST and block_k >= 16 and warps <= 16 and 1 <= stages <= 8
    ) and 0 < shared <= masked
