"""Triton's interpreter (``TRITON_INTERPRET=1``): the kernels run in NumPy on host tensors.

The rule kept here: it is a way to test the kernels where there is no GPU, never a backend that
`auto` would choose, and what it shows is SIMULATED. Its bfloat16 products are wrong, so that dtype
is refused (triton#11584).
"""

from __future__ import annotations

import os
import threading
from typing import Any

LOCK = threading.Lock()
"""The interpreter keeps the program id in one global place: one launch at a time."""

DTYPES = ("float16", "float32")


def on() -> bool:
    """Whether this process interprets its kernels; read when a kernel file is imported, so that
    the variable must stand before the first call."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def mend() -> None:
    """Triton before 3.9 turns a scalar's array of one element into an index, which NumPy 2.4 and
    newer refuse; loop bounds need it."""
    import triton
    from triton.runtime import interpreter

    if tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 9):
        return
    original = interpreter._patch_lang_tensor
    if getattr(original, "mended", False):
        return

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
