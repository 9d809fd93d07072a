"""F: the forward pass on inputs that stress the softmax, held to E1, E2 and E3."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from portattn.conformance import judge
from portattn.conformance.case import Case, Cases, Outcome, check
from portattn.conformance.checks.helpers import (
    Rows,
    call,
    equal_scores,
    judged,
    measured,
    sweep,
    tails,
)
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast


def _on(check_id: str, data: str) -> Cases:
    """One kind of data on a few shapes."""
    return sweep(
        check_id,
        {
            "smoke": [{"n": 129, "m": 203, "h": 2, "data": data}],
            "cpu": [
                {"n": 65, "m": 257, "h": 2, "d": 128, "data": data},
                {"n": 257, "m": 1025, "h": 1, "d": 64, "data": data},
            ],
            "gpu": [{"n": 4096, "b": 2, "h": 8, "d": 128, "data": data}],
        },
    )


_stressed = measured(naive=True, spread=True)

normal = check("F01", "normal input", level=0, cases=_on("F01", "normal"))(_stressed)
outliers = check("F02", "outliers", level=0, cases=_on("F02", "outliers"))(_stressed)
times_8 = check("F03", "q times 8", level=0, cases=_on("F03", "q8"))(_stressed)
# BUG-025: a rescale skipped for a whole tile goes wrong as soon as the scores spread.
times_64 = check("F04", "q times 64", level=0, cases=_on("F04", "q64"))(_stressed)
ascending = check("F05", "ascending maximum", level=0, cases=_on("F05", "ascending"))(_stressed)
descending = check("F06", "descending scores", level=0, cases=_on("F06", "descending"))(_stressed)
common_offset = check("F08", "common offset", level=0, cases=_on("F08", "offset"))(_stressed)
large_v = check("F09", "v = 1000 +- 1000", level=0, cases=_on("F09", "large-values"))(_stressed)
duplicates = check("F11", "duplicate keys, v < 0", level=0, cases=_on("F11", "duplicates"))(
    _stressed
)
low_rank = check("F14", "low-rank q and k", level=0, cases=_on("F14", "low-rank"))(_stressed)


@check("F07", "scores near -100, and far below", level=0, cases=_on("F07", "negative"))
def negative(ctx: Context, case: Case) -> Outcome:
    """A maximum that starts from a finite number drowns rows that lie below it (BUG-022: -5e4).
    Far below, one feature makes all scores -2^20 scale, equal in any order of summation, so the
    weights are those of q = 0."""
    asked, dtype = ask(case), case.params["dtype"]
    q, k = np.zeros(asked.q.shape), np.zeros(asked.k.shape)
    q[..., 0], k[..., 0] = 1024.0, -1024.0
    result = call(ctx, asked.having(q=cast(q, dtype), k=cast(k, dtype)))
    flat = judge.forward(equal_scores(asked), result._replace(lse=None), ctx.manifest)
    found = [judged(ctx, asked, naive=True, spread=True), flat]
    if result.lse is not None:
        want = np.log(asked.k.shape[2]) - 2.0**20 * asked.factor
        found.append(judge.within(result.lse, np.full(asked.lse_shape, want), -1e-5 * want, "far"))
    return judge.all_of(found)


@check("F10", "uniform weights", level=0, cases=_on("F10", "uniform"))
def uniform(ctx: Context, case: Case) -> Outcome:
    """Sums of N equal terms: the longest that rounding gets (BUG-052)."""
    return judged(ctx, ask(case), naive=True)


_LONG: Rows = {
    "smoke": [{"n": 3, "m": 8193, "h": 1}],
    "cpu": [
        {"n": 2048, "h": 1},
        {"n": 5, "m": 32769, "h": 1, "d": 128},
        {"n": 2, "m": 20000, "h": 1, "data": "uniform"},
    ],
    "gpu": [
        {"n": 8192, "b": 1, "h": 32, "d": 128},
        {"n": 32768, "h": 4, "d": 128},
        {"n": 131072, "h": 1, "d": 128},
        {"n": 262144, "h": 1, "d": 256},
    ],
}


@check("F12", "long sequences", level=0, cases=sweep("F12", _LONG))
def long(ctx: Context, case: Case) -> Outcome:
    """Up to 262,144 keys; query rows are sampled where there are many."""
    return judged(ctx, ask(case), spread=case.params["data"] == "normal")


_LSE: Rows = {
    "smoke": [{"n": 65, "m": 129}],
    "cpu": [{"n": 33, "m": 1023, "d": 128}, {"n": 129, "data": "q64"}],
}


@check("F13", "LSE: natural log", level=0, cases=sweep("F13", _LSE, needs=["return_lse"]))
def lse(ctx: Context, case: Case) -> Outcome:
    """ln m where all scores are equal (base 2 elsewhere: BUG-063), and within E1 otherwise."""
    asked = ask(case)
    result = call(ctx, asked, return_lse=True)
    flat = call(ctx, equal_scores(asked), return_lse=True).lse
    want = np.full(asked.lse_shape, np.log(asked.k.shape[2]))
    return judge.all_of(
        [
            judge.forward(asked, result, ctx.manifest),
            judge.within(flat, want, 1e-5 * max(1.0, want.max()), "equal_lse"),
        ]
    )


_SCALES: Rows = {
    "smoke": [{"n": 65, "m": 113, "scale": s} for s in (0.01, -0.125)],
    "cpu": [{"n": 65, "m": 113, "scale": s} for s in (0.0, 1 / 64, 0.3, -1.0)]
    + [{"n": 65, "m": 113, "d": d} for d in (32, 80, 128)],
}


@check("F15", "scale: None, 0.01, 1/d, 0, negative", level=0, cases=sweep("F15", _SCALES))
def scales(ctx: Context, case: Case) -> Outcome:
    """Scale 0 makes all weights equal; a negative one turns the order of the keys around."""
    return judged(ctx, ask(case))


_VALUE_DIMS: Rows = {
    "smoke": [{"n": 65, "m": 113, "d": 64, "dv": 128}, {"n": 65, "m": 113, "d": 128, "dv": 64}],
    "cpu": [{"n": 129, "d": 64, "dv": 32}, {"n": 129, "d": 80, "dv": 96}],
}


@check("F16", "Dv differs from D", level=0, cases=sweep("F16", _VALUE_DIMS))
def value_dims(ctx: Context, case: Case) -> Outcome:
    """The scale comes from D, the shape of the output from Dv."""
    return judged(ctx, ask(case), spread=True)


_lengths = sweep("F17", tails(h=2, d=32))


@check("F17", "lengths around tile edges", level=0, cases=_lengths)
def lengths(ctx: Context, case: Case) -> Outcome:
    """Right for multiples of the tile and wrong between them is the classic (BUG-001): the keys'
    tail, the queries' tail, and both."""
    asked = ask(case)
    fixed = ask(replace(case, params={**case.params, "n": 64}))
    across = ask(replace(case, params={**case.params, "m": 64}))
    return judge.all_of(judged(ctx, x, spread=True) for x in (asked, fixed, across))
