"""P: dtypes: what each promises of range and precision, and that none is a different one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from portattn.conformance import judge
from portattn.conformance.bounds import LARGEST
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import call, case_of, equal_scores, judged, one, sweep
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast, generator
from portattn.conformance.manifest import DTYPES, Manifest


@check(
    "P01",
    "large scores and values in range",
    level=0,
    cases=sweep("P01", {"smoke": [{"n": 33, "m": 65, "h": 2}], "cpu": [{"n": 129, "d": 128}]}),
)
def range_of_values(ctx: Context, case: Case) -> Outcome:
    """q k^T beyond 65,504 in float16 is no overflow, for sums are float32; v near the largest
    number gives outputs near it, not infinity."""
    asked = ask(case)
    dtype = case.params["dtype"]
    big = np.asarray(60.0, asked.q.dtype)
    loud = asked.having(q=asked.q * big, k=asked.k * big)
    top = min(LARGEST[dtype], 1e30) / 4
    high = cast(top * (1 + generator(case, 1).random(asked.v.shape)), dtype)
    return judge.all_of([judged(ctx, loud), judged(ctx, asked.having(v=high))])


@check(
    "P02",
    "small and subnormal values",
    level=0,
    cases=sweep("P02", {"smoke": [{"n": 33, "m": 65, "h": 2}], "cpu": [{"n": 129, "d": 128}]}),
)
def small_values(ctx: Context, case: Case) -> Outcome:
    """v of 2^-20 in float16 is subnormal and counts; q and k of 2^-10 give nearly equal weights."""
    asked = ask(case)
    low = cast(asked.v.astype(np.float64) * 2.0**-18, case.params["dtype"])
    near = [cast(x.astype(np.float64) * 2.0**-10, case.params["dtype"]) for x in (asked.q, asked.k)]
    return judge.all_of(
        [judged(ctx, asked.having(v=low)), judged(ctx, asked.having(q=near[0], k=near[1]))]
    )


@check(
    "P03",
    "sums are wider than the dtype",
    level=0,
    cases=sweep("P03", {"smoke": [{"n": 2, "m": 20000, "h": 1, "d": 16}]}),
)
def long_sums(ctx: Context, case: Case) -> Outcome:
    """20,000 equal scores and v = 1: bfloat16 sums stop growing at 256 (BUG-052)."""
    asked = equal_scores(ask(case))
    asked = asked.having(v=np.ones_like(asked.v))
    result = call(ctx, asked)
    found = [judge.forward(asked, result, ctx.manifest)]
    # equal terms round the same way: a sequential float32 sum may be off by 20,000 u
    slack = 20000 * 2.0**-24
    found.append(judge.within(result.out, np.ones(asked.out_shape), slack, "one"))
    if result.lse is not None:
        want = np.full(asked.lse_shape, np.log(20000.0))
        found.append(judge.within(result.lse, want, slack, "lse"))
    return judge.all_of(found)


@check(
    "P04",
    "float32 products are float32",
    level=0,
    cases=sweep(
        "P04",
        {"smoke": [{"n": 33, "m": 64, "h": 2}], "cpu": [{"n": 129, "m": 256, "d": 128}]},
        dtypes=lambda manifest: [x for x in ("float32", "float64") if x in manifest.dtypes],
    ),
)
def true_products(ctx: Context, case: Case) -> Outcome:
    """Keys that differ beyond the eleventh bit only, and values that need more than eleven: tf32
    or bfloat16 inside takes them for equal. A declared ``qk_operand: tf32`` widens the bound."""
    asked = ask(case)
    fine = 1.0 + 2.0**-13 * generator(case, 1).integers(0, 2, asked.k.shape)
    sharp = asked.having(
        q=cast(np.full(asked.q.shape, 8.0), case.params["dtype"]),
        k=cast(fine, case.params["dtype"]),
    )
    values = 1.0 + 2.0**-14 * generator(case, 2).integers(0, 4096, asked.v.shape)
    exact = equal_scores(asked.having(v=cast(values, case.params["dtype"])))
    found = [judged(ctx, sharp), judged(ctx, exact)]
    got = call(ctx, exact).out
    m = asked.k.shape[2]
    want = np.repeat(values.mean(2, keepdims=True), asked.heads[0] // asked.heads[1], 1)
    slack = 4 * (m**0.5) * 2.0**-24
    found.append(judge.within(got, np.broadcast_to(want, got.shape), slack, "mean"))
    return judge.all_of(found)


def _unclaimed(manifest: Manifest, tier: str) -> Iterator[Case]:
    del tier
    for dtype in one(manifest):
        yield case_of("P05", manifest, dtype, {"n": 33, "m": 65})
    for dtype in DTYPES:
        if dtype not in (*manifest.dtypes, *manifest.unasked_dtypes):
            yield case_of("P05", manifest, dtype, {"n": 33, "m": 65})


@check("P05", "dtypes outside the manifest are refused", level=0, cases=_unclaimed)
def unclaimed(ctx: Context, case: Case) -> Outcome:
    """Refused, or right to its own precision (a claim too narrow): never read as another."""
    return judged(ctx, ask(case))
