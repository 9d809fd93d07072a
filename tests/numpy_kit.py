"""What the tests of the NumPy backend share: its calls, the oracle's judgement, forced tiles, and
inputs that are packed or paged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import portattn
from portattn.backends.numpy_tiled import config, forward, launch

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 2e-14}

SMALL = config.Config(
    block_q=16, short_q=16, block_k=24, edge_k=8, stream_k=40, copy_k=20, chunk_k=32
)


def force_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows and keys in every call, and none of the thresholds of large ones."""
    real = launch.run
    monkeypatch.setattr(launch, "run", lambda problem, _, call: real(problem, SMALL, call))
    monkeypatch.setattr(forward, "FEW_ROWS", 3)
    monkeypatch.setattr(config, "FEW_ROWS", 3)
    monkeypatch.setattr(forward, "MANY_KEYS", 4)
    monkeypatch.setattr(forward, "STREAMED", 30)


def attend(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return portattn.attention(q, k, v, backend="numpy", return_lse=True, **options)


def gradients(
    q: Any, k: Any, v: Any, dout: Any, dlse: Any = None, **options: Any
) -> dict[str, np.ndarray]:
    out, lse = attend(q, k, v, **options)
    made = portattn.attention_backward(
        q, k, v, out, lse, dout, dlse=dlse, backend="numpy", **options
    )
    return {name: x for name, x in made._asdict().items() if x is not None}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error over the largest value (at least 1); inf where one is -inf or NaN and the
    other is not."""
    got = got.astype(np.float64)
    special = ~np.isfinite(want)
    if not np.array_equal(got[special], want[special], equal_nan=True):
        return np.inf
    if not np.isfinite(got[~special]).all():
        return np.inf
    size = max(1.0, np.abs(want[~special]).max(initial=0))
    return float(np.abs(got[~special] - want[~special]).max(initial=0) / size)


def agreement(
    oracle: Callable[..., Any], oracle_backward: Callable[..., Any]
) -> Callable[..., None]:
    """``agrees(q, k, v, **options)``: output, LSE and every gradient are those of the oracle."""

    def check(q: Any, k: Any, v: Any, slack: float = 1.0, **options: Any) -> None:
        rng = np.random.default_rng(7)
        out, lse = attend(q, k, v, **options)
        want_out, want_lse = oracle(q, k, v, **options)
        bound = TOLERANCE[q.dtype.name] * slack
        assert error(out, want_out) <= bound
        assert (
            error(lse, want_lse) <= max(bound if q.dtype.name == "float64" else 0, 2e-6 * slack) * 4
        )
        dout = rng.standard_normal(out.shape).astype(out.dtype)
        dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
        made = gradients(q, k, v, dout, dlse, **options)
        want = oracle_backward(q, k, v, dout, dlse, **options)
        assert made.keys() == want.keys()
        for name, x in made.items():
            # The oracle knows out exactly; the call was given it rounded.
            limit = max(bound, TOLERANCE[x.dtype.name]) * 8
            assert error(x, want[name]) <= limit, name

    return check


def packed(rng: Any, lens: list[int], heads: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *lens]).astype("i4")
    return rng.standard_normal((starts[-1], heads, dim)).astype("f4"), starts


def pages(seed: int = 9) -> dict[str, Any]:
    """Three sequences over shared pages, the rest of the pool and of the table poisoned."""
    rng = np.random.default_rng(seed)
    k = np.full((20, 8, 2, 6), np.nan, "f4")
    v = np.full((20, 8, 2, 5), np.inf, "f4")
    table = np.full((3, 7), -1, "i4")
    used = np.array([0, 45, 17], "i4")
    table[1, :6] = [4, 17, 2, 9, 0, 11]
    table[2, :3] = [4, 17, 13]  # shares a prefix with its neighbour
    for b, n in enumerate(used):
        for j in range(n):
            k[table[b, j // 8], j % 8] = rng.standard_normal((2, 6))
            v[table[b, j // 8], j % 8] = rng.standard_normal((2, 5))
    q = rng.standard_normal((3, 21, 4, 6)).astype("f4")
    return {"q": q, "k": k, "v": v, "block_table": table, "seqused_k": used}


def everything(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int, dtype: Any = "f4") -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    yield "causal", {
        "q": draw(2, 700, 4, 64), "k": draw(2, 700, 2, 64), "v": draw(2, 700, 2, 64),
        "causal": True,
    }  # fmt: skip
    yield "bias", {
        "q": draw(1, 300, 4, 32), "k": draw(1, 500, 4, 32), "v": draw(1, 500, 4, 32),
        "bias": draw(4, 300, 500), "sinks": draw(4), "softcap": 5.0,
    }  # fmt: skip
    yield (
        "decode",
        {"q": draw(1, 2, 8, 64), "k": draw(1, 20_000, 2, 64), "v": draw(1, 20_000, 2, 64)},
    )
    yield (
        "half",
        {
            "q": draw(1, 400, 4, 64, dtype=ml_dtypes.bfloat16),
            "k": draw(1, 400, 2, 64, dtype=ml_dtypes.bfloat16),
            "v": draw(1, 400, 2, 64, dtype=ml_dtypes.bfloat16),
        },
    )
