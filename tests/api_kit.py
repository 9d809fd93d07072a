"""Small valid calls of every layout, shared by the tests of the public calls."""

from __future__ import annotations

from typing import Any

import numpy as np

import portattn

TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-12}


def int32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Both layouts fit a square shape: 4 tokens, 4 heads.
DENSE = {"q": normal(0, 2, 4, 4, 8), "k": normal(1, 2, 4, 4, 8), "v": normal(2, 2, 4, 4, 8)}
PACKED = {
    "q": normal(0, 7, 4, 8),
    "k": normal(1, 9, 2, 8),
    "v": normal(2, 9, 2, 6),
    "layout": "thd",
    "cu_seqlens_q": int32(0, 3, 3, 7),
    "cu_seqlens_k": int32(0, 4, 5, 9),
}
PAGED = {
    "q": normal(0, 2, 3, 4, 8),
    "k": normal(1, 5, 4, 2, 8),
    "v": normal(2, 5, 4, 2, 6),
    "seqused_k": int32(6, 3),
    "block_table": int32([4, 0], [2, -1]),
}


def attend(arguments: dict[str, Any], **more: Any) -> Any:
    arguments = arguments | more
    return portattn.attention(
        arguments["q"],
        arguments["k"],
        arguments["v"],
        **{name: x for name, x in arguments.items() if name not in ("q", "k", "v")},
    )
