"""H: head dimensions, 256 above all: in every dtype, forward and backward, masked, grouped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from portattn.conformance import judge
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import (
    call,
    case_of,
    head_dim,
    judged,
    judged_backward,
    one,
    sweep,
    two,
)
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast, generator, upstream
from portattn.conformance.manifest import Manifest

DIMS = (8, 16, 32, 40, 59, 64, 72, 80, 96, 104, 111, 128, 160, 192, 224, 256, 320, 512)
SMALL_DEVICE = 99 << 10  # shared memory of a block on consumer GPUs


def _dims(*dims: int, smoke: tuple[int, ...] = ()) -> dict[str, list[dict[str, int]]]:
    rows = {d: {"n": 65, "m": 113, "h": 2, "d": d} for d in dims}
    return {
        "smoke": [rows[d] for d in smoke],
        "cpu": [rows[d] for d in dims],
        "gpu": [dict(rows[d], n=1025, m=1025, b=2, h=4) for d in dims],
    }


@check(
    "H01",
    "head dims 8, 16, 32, 64, 128",
    level=0,
    cases=sweep("H01", _dims(8, 16, 32, 64, 128, smoke=(16, 128)), fit=False),
)
def powers_of_two(ctx: Context, case: Case) -> Outcome:
    """The usual ones."""
    return judged(ctx, ask(case), spread=True)


@check(
    "H02",
    "head dims 40, 72, 80, 96, 104, 160, 192, 224",
    level=0,
    cases=sweep("H02", _dims(40, 72, 80, 96, 104, 160, 192, 224, smoke=(80, 192)), fit=False),
)
def multiples_of_eight(ctx: Context, case: Case) -> Outcome:
    """Between the powers of two. A dim is right or refused, never cut to a multiple (BUG-043)."""
    return judged(ctx, ask(case), spread=True)


@check(
    "H03",
    "head dims 59, 111",
    level=0,
    cases=sweep("H03", _dims(59, 111, smoke=(59,)), fit=False),
)
def odd(ctx: Context, case: Case) -> Outcome:
    """Rows that no vector load fits."""
    return judged(ctx, ask(case), spread=True)


_256 = {"n": 129, "m": 203, "h": 2, "d": 256}


@check(
    "H04",
    "head dim 256 in every dtype",
    level=1,
    cases=sweep(
        "H04",
        {
            "smoke": [{**_256, "n": 65}],
            "cpu": [_256, {**_256, "data": "q8"}, {**_256, "n": 1, "m": 1023}],
            "gpu": [{**_256, "n": 8192, "m": 8192, "b": 2, "h": 8}],
        },
        must=True,
        fit=False,
    ),
)
def dim_256(ctx: Context, case: Case) -> Outcome:
    """The dim that needs another tile than 128 does."""
    return judged(ctx, ask(case), spread=True)


@check(
    "H05",
    "head dim 256, causal",
    level=1,
    cases=sweep(
        "H05",
        {
            "smoke": [{"n": 129, "d": 256, "causal": True}],
            "cpu": [
                {"n": 257, "d": 256, "causal": True},
                {"n": 65, "m": 203, "d": 256, "causal": "bottom_right"},
            ],
        },
        fit=False,
    ),
)
def dim_256_causal(ctx: Context, case: Case) -> Outcome:
    """Diagonal tiles of the smaller size."""
    return judged(ctx, ask(case), spread=True)


@check(
    "H06",
    "head dim 256, eight query heads to a key head",
    level=1,
    cases=sweep(
        "H06",
        {
            "smoke": [{"n": 33, "m": 129, "h": 8, "hk": 1, "d": 256}],
            "cpu": [
                {"n": 65, "m": 203, "h": 8, "hk": 1, "d": 256, "b": 2},
                {"n": 1, "m": 513, "h": 16, "hk": 2, "d": 256},
            ],
        },
        fit=False,
    ),
)
def dim_256_grouped(ctx: Context, case: Case) -> Outcome:
    """As Gemma has it."""
    return judged(ctx, ask(case), spread=True)


@check(
    "H07",
    "head dim 256, backward, batch of two",
    level=3,
    cases=sweep(
        "H07",
        {
            "smoke": [{"n": 65, "m": 113, "b": 2, "h": 1, "d": 256}],
            "cpu": [
                {"n": 129, "b": 2, "h": 2, "d": 256, "causal": True},
                {"n": 97, "b": 2, "h": 1, "d": 256},
                {"n": 129, "b": 2, "h": 4, "hk": 2, "d": 256},
            ],
            "gpu": [{"n": 1025, "b": 2, "h": 4, "d": 256, "causal": True}],
        },
        needs=["backward"],
        fit=False,
    ),
)
def dim_256_backward(ctx: Context, case: Case) -> Outcome:
    """Tiles taken from another kernel compile, run, and give wrong gradients (BUG-040)."""
    asked = ask(case)
    return judged_backward(ctx, asked, upstream(case, asked))


@check(
    "H08",
    "head dims 160 to 256 as views of a fused projection",
    level=1,
    cases=sweep(
        "H08",
        {
            "smoke": [{"n": 97, "h": 2, "d": 256}],
            "cpu": [
                {"n": 97, "b": 2, "h": 2, "d": d, "causal": c}
                for d in (160, 192, 224, 256)
                for c in (False, True)
            ],
        },
        dtypes=two,
        needs=["strides"],
        fit=False,
    ),
)
def fused(ctx: Context, case: Case) -> Outcome:
    """q, k, v of one (B, S, 3, H, D) buffer, length 97; gradients too where claimed (BUG-041)."""
    asked = ask(case)
    found = [judged(ctx, asked, views="fused")]
    if ctx.manifest.claims("backward"):
        found.append(judged_backward(ctx, asked, upstream(case, asked), views="fused"))
    return judge.all_of(found)


@check(
    "H09",
    "head dims 320 and 512",
    level=0,
    cases=sweep("H09", _dims(320, 512, smoke=(512,)), fit=False, dtypes=two),
)
def beyond_256(ctx: Context, case: Case) -> Outcome:
    """Beyond what most kernels take: right or refused."""
    return judged(ctx, ask(case), spread=True)


@check(
    "H10",
    "NaN in the padding behind each row",
    level=0,
    cases=sweep(
        "H10",
        {
            "smoke": [{"n": 5, "m": 37, "d": 80}],
            "cpu": [{"n": 5, "m": 37, "d": d} for d in (40, 64, 96, 111, 128, 256)],
        },
        needs=["strides"],
    ),
)
def padded(ctx: Context, case: Case) -> Outcome:
    """Rows and columns of a larger buffer full of NaN: what pads a head dim to the next tile must
    not be read, nor multiplied by 0 (BUG-028)."""
    return judged(ctx, ask(case), views="padded")


@check(
    "H11",
    "(D, Dv) = (192, 128), (128, 96), (256, 64)",
    level=0,
    cases=sweep(
        "H11",
        {
            "smoke": [{"n": 65, "m": 113, "d": 192, "dv": 128}],
            "cpu": [
                {"n": 129, "m": 203, "d": d, "dv": dv}
                for d, dv in ((192, 128), (128, 96), (256, 64))
            ],
        },
        fit=False,
    ),
)
def two_dims(ctx: Context, case: Case) -> Outcome:
    """As DeepSeek has it."""
    return judged(ctx, ask(case), spread=True)


def _outside(manifest: Manifest, tier: str) -> Iterator[Case]:
    del tier
    below = [d for d in DIMS if not manifest.takes_head_dim(d)]
    largest = max(manifest.head_dims or (manifest.max_head_dim or 0,))
    dims = dict.fromkeys([*below[:4], largest + 1, 2 * largest + 3])
    for dtype in one(manifest):
        for d in dims:
            row = {"n": 17, "m": 33, "h": 1, "d": d}
            yield case_of("H12", manifest, dtype, row, fit=False)


@check("H12", "head dims outside the manifest are refused", level=0, cases=_outside)
def refused(ctx: Context, case: Case) -> Outcome:
    """Refused before launch, or right (a claim too narrow); never wrong, and the next call works
    (BUG-043)."""
    asked, dim = ask(case), head_dim(ctx.manifest, 64)
    attempt = ctx.attempt(asked.q, asked.k, asked.v)
    params = {**case.params, "d": dim, "dv": dim}
    after = judged(ctx, ask(replace(case, params=params)))
    if attempt.refused:
        return after
    return judge.all_of([after, judged(ctx, asked)])


def _limited(manifest: Manifest, tier: str) -> Iterator[Case]:
    for case in sweep("H13", {"gpu": [_256]}, fit=False, dtypes=two)(manifest, tier):
        yield replace(case, optional=True)  # it rests on a method, of which no manifest speaks


@check(
    "H13",
    "head dim 256 within 99 KiB of shared memory",
    level=1,
    cases=_limited,
    tiers=("gpu",),
)
def small_device(ctx: Context, case: Case) -> Outcome:
    """Asked of targets that can be held to a limit: an optional method
    ``limit_shared_memory(bytes | None)``; forward, and backward where claimed (BUG-039)."""
    limit = getattr(ctx.target, "limit_shared_memory", None)
    if limit is None:
        return Outcome.not_supported("the target has no limit_shared_memory(bytes)")
    asked = ask(case)
    limit(SMALL_DEVICE)
    try:
        found = [judged(ctx, asked)]
        if ctx.manifest.claims("backward"):
            found.append(judged_backward(ctx, asked, upstream(case, asked)))
    finally:
        limit(None)
    return judge.all_of(found)


@check(
    "H14",
    "the last features decide",
    level=0,
    cases=sweep(
        "H14",
        {
            "smoke": [{"n": 5, "m": 32, "d": d} for d in (128, 80)],
            "cpu": [{"n": 5, "m": 32, "d": d} for d in (16, 96, 111, 192, 256, 512)],
        },
    ),
)
def last_feature(ctx: Context, case: Case) -> Outcome:
    """Scores live in one feature of q and k, of every sixteenth the last, and at the very end; a
    kernel that drops features gives the plain mean (BUG-044)."""
    asked, found = ask(case), []
    d, dtype = asked.q.shape[-1], case.params["dtype"]
    for feature in sorted({*range(15, d, 16), d - 1}):
        q, k = np.zeros(asked.q.shape), np.zeros(asked.k.shape)
        q[..., feature] = 10.0
        k[..., feature] = generator(case, feature).permutation(asked.k.shape[2])
        only = asked.having(q=cast(q, dtype), k=cast(k, dtype))
        found.append(judge.forward(only, call(ctx, only), ctx.manifest))
    return judge.all_of(found)
