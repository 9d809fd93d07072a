"""One launch of one kernel, on a device or in the interpreter.

The rule kept here: every launch of the portable mechanism goes through here, and no launch of any
comes before the kernels' cache was seen to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portattn.backends.triton_jit import interpreted, kernel_cache

if interpreted.on():
    interpreted.mend()
else:
    kernel_cache.usable()


def dispatch(kernel: Any, programs: int, tile: Any, *args: Any, **named: Any) -> Any:
    """Run ``programs`` programs of ``kernel``, with ``tile.num_warps`` and ``tile.num_stages``.
    Returns what was compiled for it."""
    if programs == 0:
        return None
    if interpreted.on():
        # log2(0) is -inf and meant, in NumPy as on a GPU.
        with interpreted.LOCK, np.errstate(all="ignore"):
            kernel[(programs,)](*args, **named)
        return None
    return kernel[(programs,)](
        *args,
        **named,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,  # Triton 3.10 changes the default, and with it the bits
    )


def again(
    started: Any,
    kernel: Any,
    programs: int,
    tile: Any,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> Any:
    """As `dispatch`; ``started`` is what it returned for arguments of the same types, and is
    started directly. ``constants`` are the last parameters of the kernel, in its order."""
    if started is None:
        return dispatch(kernel, programs, tile, *args, **constants)
    started[(programs, 1, 1)](*args, *constants.values())
    return started


def moved(box: Any, x: Any) -> Any:
    """A descriptor of ``x``, which lies as the tensor of ``box`` did, without a second check."""
    new = object.__new__(type(box))
    new.__dict__.update(box.__dict__)
    new.base = x
    return new


MEMO = 64
"""Launches that a plan remembers: ways for its arrays to lie, and kernels compiled for them."""


def remembered(memo: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What ``memo`` has for ``key``, made if there is nothing. Several threads may ask: one that
    comes second makes it again, and either will do."""
    found = memo.get(key)
    if found is None:
        if len(memo) >= MEMO:
            memo.clear()
        found = memo[key] = make()
    return found
