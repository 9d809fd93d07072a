"""Inputs: from the JSON values of a case and its seed to the arrays of a call.

The rule kept here: everything comes from the seed, in float64, and is rounded once to the dtype
under test; the oracle sees the rounded values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portattn.conformance.case import Case
from portattn.conformance.placement import DTYPES
from portattn.conformance.reference import F64, Array, Attention

Rng = np.random.Generator
Shape = tuple[int, ...]
Triple = tuple[F64, F64, F64]

# Lengths that straddle every usual tile: 1, 16, 32, 64, 112, 128, 256, 1024.
LENGTHS = (1, 2, 3, 15, 31, 33, 63, 65, 113, 127, 129, 203, 257, 1023, 1025)


def normal(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """N(0, 1) throughout."""
    return rng.standard_normal(q), rng.standard_normal(k), rng.standard_normal(v)


def outliers(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """N(0, 1) + N(0, 100) with probability 0.001, as activations of language models have."""

    def draw(shape: Shape) -> F64:
        rare = rng.random(shape) < 1e-3
        return rng.standard_normal(shape) + 10.0 * rng.standard_normal(shape) * rare

    return draw(q), draw(k), draw(v)


def times(factor: float) -> Callable[[Rng, Shape, Shape, Shape], Triple]:
    """N(0, 1) with q scaled up: peaked rows, wide spread of scores."""

    def draw(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
        a, b, c = normal(rng, q, k, v)
        return a * factor, b, c

    return draw


def ramp(sign: float) -> Callable[[Rng, Shape, Shape, Shape], Triple]:
    """Scores rise (or fall) steadily along the keys: every tile (or none) moves the maximum."""

    def draw(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
        a, b, c = normal(rng, q, k, v)
        a[..., 0] = q[-1] ** 0.5
        b *= 0.5
        b[..., 0] = sign * np.linspace(-12.0, 12.0, k[-2])
        return a, b, c

    return draw


def negative(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """Every score near -100 (at the default scale): a maximum that starts from 0 drowns them."""
    a, b, c = normal(rng, q, k, v)
    a[..., 0], b[..., 0] = q[-1] ** 0.25 * 10.0, -(q[-1] ** 0.25) * 10.0
    return a, b, c


def offset(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """A large vector common to all keys, which softmax must cancel."""
    a, b, c = normal(rng, q, k, v)
    return a, b + 8.0 * rng.standard_normal((1,) * (len(k) - 1) + k[-1:]), c


def large_values(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """v = 1000 +- 1000: the error of the weights shows on top of a large mean."""
    a, b, c = normal(rng, q, k, v)
    return a, b, 1e3 + 1e3 * c


def uniform(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """All keys equal, so that every weight is 1/N and sums are as long as they get."""
    a, b, c = normal(rng, q, k, v)
    return a, np.broadcast_to(b[..., :1, :], k).copy(), c


def duplicates(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """Every key seven times over, v negative: ties of the maximum, sums of one sign."""
    a, b, c = normal(rng, q, k, v)
    return a, b[..., np.arange(k[-2]) // 7, :], -np.abs(c)


def low_rank(rng: Rng, q: Shape, k: Shape, v: Shape) -> Triple:
    """q and k of rank 2: scores of large magnitude that agree over heads."""
    basis = rng.standard_normal((2, q[-1]))
    a = rng.standard_normal((*q[:-1], 2)) @ basis
    b = rng.standard_normal((*k[:-1], 2)) @ basis
    return a, b, rng.standard_normal(v)


DATA: dict[str, Callable[[Rng, Shape, Shape, Shape], Triple]] = {
    "normal": normal,
    "outliers": outliers,
    "q8": times(8.0),
    "q64": times(64.0),
    "ascending": ramp(1.0),
    "descending": ramp(-1.0),
    "negative": negative,
    "offset": offset,
    "large-values": large_values,
    "uniform": uniform,
    "duplicates": duplicates,
    "low-rank": low_rank,
}


def shape(
    dtype: str = "float32",
    *,
    b: int = 1,
    h: int = 2,
    hk: int | None = None,
    n: int = 129,
    m: int | None = None,
    d: int = 64,
    dv: int | None = None,
    data: str = "normal",
    **more: Any,
) -> dict[str, Any]:
    """The params of a case: batch, query and key heads, n query rows, m keys, head dims, the
    generator's name; ``more`` are scalar options of the call or what the check itself reads."""
    full = {"b": b, "h": h, "hk": hk or h, "n": n, "m": n if m is None else m, "d": d}
    return {"dtype": dtype, **full, "dv": dv or d, "data": data, **more}


SCALARS = ("scale", "causal", "window", "softcap")


def ask(case: Case) -> Attention:
    """The call that a case made of `shape` describes."""
    p = case.params
    q, k = (p["b"], p["h"], p["n"], p["d"]), (p["b"], p["hk"], p["m"], p["d"])
    drawn = DATA[p["data"]](generator(case), q, k, (*k[:3], p["dv"]))
    arrays = [cast(x, p["dtype"]) for x in drawn]
    scalars: dict[str, Any] = {name: p[name] for name in SCALARS if name in p}
    if scalars.get("window") is not None:
        scalars["window"] = tuple(scalars["window"])
    return Attention(arrays[0], arrays[1], arrays[2], **scalars)


def generator(case: Case, stream: int = 0) -> Rng:
    """The case's random numbers; another ``stream`` for what is drawn beside q, k and v."""
    return np.random.default_rng([case.seed, stream])


def cast(x: Any, dtype: str) -> Array:
    """``x`` rounded to ``dtype``."""
    return np.asarray(x).astype(DTYPES[dtype])


def upstream(case: Case, asked: Attention, stream: int = 7) -> Array:
    """dout: N(0, 1) in the dtype and shape of the output."""
    return cast(generator(case, stream).standard_normal(asked.out_shape), case.params["dtype"])


def lengths_mask(lengths: Sequence[int], m: int) -> Array:
    """(B, 1, 1, m): the first ``lengths[b]`` keys of sequence b are real."""
    return np.asarray(np.arange(m) < np.asarray(lengths)[:, None])[:, None, None, :]


def cumulative(lengths: Sequence[int]) -> Array:
    """int32 (B + 1,): where each packed sequence begins."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def pack(parts: Sequence[Array]) -> Array:
    """(T, H, D) of sequences given as (H, L, D)."""
    return np.ascontiguousarray(np.concatenate([x.swapaxes(0, 1) for x in parts]))


def paged(
    rng: Rng, k: Array, v: Array, used: Sequence[int], block: int
) -> tuple[Array, Array, Array]:
    """k, v (B, Hk, Sk, D) as shuffled pages (num_blocks, block, Hk, D) and their block table.

    One spare page and every slot beyond ``used`` hold NaN; table entries beyond the used blocks
    are -1 or name the spare page: neither may be read.
    """
    batch, heads, _, _ = k.shape
    counts = [-(-n // block) for n in used]
    spare, width = sum(counts), max([*counts, 0]) + 2
    numbers = rng.permutation(spare + 1)
    table = np.full((batch, width), -1, np.int32)
    pages = [np.full((spare + 1, block, heads, x.shape[-1]), np.nan, x.dtype) for x in (k, v)]
    at = 0
    for b, count in enumerate(counts):
        table[b, :count] = numbers[at : at + count]
        table[b, -1] = numbers[spare]
        at += count
        for page, x in zip(pages, (k, v), strict=True):
            rows = np.full((count * block, heads, x.shape[-1]), np.nan, x.dtype)
            rows[: used[b]] = x[b, :, : used[b]].swapaxes(0, 1)
            page[table[b, :count]] = rows.reshape(count, block, heads, x.shape[-1])
    return pages[0], pages[1], table
