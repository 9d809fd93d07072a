"""B: gradients, held to bounds of the same kind as E1, and to what is exactly known of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from portattn.conformance import bounds, judge, reference
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import (
    Rows,
    call,
    differentiate,
    judged_backward,
    one,
    sweep,
    tails,
    two,
    unless_refused,
    where_defined,
)
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast, generator, upstream
from portattn.conformance.reference import F64, Array, Attention


@check(
    "B01",
    "dense",
    level=3,
    cases=sweep(
        "B01",
        {
            "smoke": [{"n": 65, "m": 113, "h": 2}],
            "cpu": [{"n": 129, "m": 203, "b": 2, "h": 2, "d": 128}, {"n": 257, "h": 1, "d": 32}],
            "gpu": [{"n": 2048, "b": 2, "h": 4, "d": 128}],
        },
        needs=["backward"],
        must=True,
    ),
)
def dense(ctx: Context, case: Case) -> Outcome:
    """dq, dk, dv."""
    asked = ask(case)
    return judged_backward(ctx, asked, upstream(case, asked))


_CAUSAL: Rows = {
    "smoke": [
        {"n": 65, "h": 1, "causal": True},
        {"n": 33, "m": 65, "h": 1, "causal": "bottom_right"},
        {"n": 65, "m": 33, "h": 1, "causal": "top_left"},
    ],
    "cpu": [
        {"n": 65, "m": 33, "h": 2, "causal": "bottom_right"},
        {"n": 33, "m": 65, "h": 2, "causal": "top_left"},
        {"n": 257, "h": 1, "causal": True},
        {"n": 129, "m": 203, "h": 2, "causal": "bottom_right", "d": 128},
    ],
}


@check(
    "B02",
    "causal, Sq and Sk both ways",
    level=3,
    cases=sweep("B02", _CAUSAL, needs=["backward"]),
)
def causal(ctx: Context, case: Case) -> Outcome:
    """Rows that see nothing give nothing; keys that nobody sees get nothing."""
    asked = ask(case)
    return judged_backward(ctx, asked, upstream(case, asked))


@check(
    "B03",
    "grouped heads: dk and dv are sums",
    level=3,
    cases=sweep(
        "B03",
        {
            "smoke": [{"n": 33, "m": 65, "h": 4, "hk": 2}],
            "cpu": [
                {"n": 65, "m": 113, "h": 8, "hk": 1, "b": 2},
                {"n": 65, "h": 4, "hk": 2, "causal": True},
            ],
        },
        needs=["backward"],
    ),
)
def grouped(ctx: Context, case: Case) -> Outcome:
    """Over the query heads of a group."""
    asked = ask(case)
    return judged_backward(ctx, asked, upstream(case, asked))


@check(
    "B04",
    "empty rows give zero gradients",
    level=3,
    cases=sweep(
        "B04",
        {"smoke": [{"n": 33, "b": 2, "h": 1}], "cpu": [{"n": 129, "m": 65, "b": 2, "h": 2}]},
        needs=["backward", "mask"],
    ),
)
def empty_rows(ctx: Context, case: Case) -> Outcome:
    """One row that sees nothing must not turn its batch's gradients into NaN (BUG-018); a batch
    item without dout has gradients of exactly 0."""
    asked = ask(case)
    n, m = asked.q.shape[2], asked.k.shape[2]
    shown = np.ones((2, 1, n, m), bool)
    shown[0, :, [0, n // 2]] = False
    shown[1, :, -1] = False
    asked = asked.having(mask=shown)
    dout = where_defined(ctx, asked, upstream(case, asked))
    dout[1] = 0
    found = [judged_backward(ctx, asked, dout)]
    gradients = differentiate(ctx, asked, dout)
    for name in ("dq", "dk", "dv"):
        got = getattr(gradients, name)
        found.append(judge.exact(got[1], np.zeros_like(got[1]), f"{name}_unused"))
    empty = gradients.dq[0][:, [0, n // 2]]
    return judge.all_of([*found, judge.exact(empty, np.zeros_like(empty), "dq_empty")])


@check(
    "B05",
    "gradient of the bias, broadcast",
    level=3,
    cases=sweep(
        "B05",
        {"smoke": [{"n": 16, "b": 2, "h": 4, "d": 16}], "cpu": [{"n": 65, "m": 113, "b": 2}]},
        needs=["backward", "bias", "backward_bias"],
    ),
)
def bias(ctx: Context, case: Case) -> Outcome:
    """Summed over every axis of size one or missing, in the bias's dtype (BUG-069)."""
    asked, found = ask(case), []
    h, n, m = asked.heads[0], asked.q.shape[2], asked.k.shape[2]
    dout = upstream(case, asked)
    for index, shape in enumerate([(2, h, n, m), (1, h, n, m), (1, 1, n, m), (2, 1, 1, m), (n, m)]):
        values = generator(case, index).standard_normal(shape)
        own, wide = (asked.having(bias=cast(values, x)) for x in (case.params["dtype"], "float32"))
        found.append(judged_backward(ctx, own, dout))
        found.append(_wide_bias(ctx, wide, dout))
    return judge.all_of(found)


def _wide_bias(ctx: Context, asked: Attention, dout: Array) -> Outcome:
    """The contract takes float32 with any dtype; peers often want the dtype of q."""
    return unless_refused(lambda: judged_backward(ctx, asked, dout), "float32_bias", gate="_warn")


@check(
    "B06",
    "finite differences",
    level=3,
    cases=sweep(
        "B06",
        {
            "smoke": [{"n": 9, "m": 13, "h": 1, "d": 16}],
            "cpu": [
                {"n": 9, "m": 13, "h": 2, "d": 16, "causal": "bottom_right"},
                {"n": 17, "m": 9, "h": 4, "hk": 2, "d": 16, "softcap": 2.0},
            ],
        },
        needs=["backward"],
    ),
)
def finite_differences(ctx: Context, case: Case) -> Outcome:
    """The target's gradient along random directions against differences of the oracle's forward
    pass in float64: no formula of a gradient takes part."""
    asked = ask(case)
    dout = upstream(case, asked)
    gradients = differentiate(ctx, asked, dout)
    precision = bounds.Precision.of(ctx.manifest, str(asked.q.dtype))
    limits = bounds.backward(asked, dout, None, precision, "prob")
    found = []
    for name in ("q", "k", "v"):
        at: F64 = getattr(asked, name).astype(np.float64)
        toward = generator(case, ord(name)).standard_normal(at.shape)
        step = 1e-4
        ends = [
            (reference.forward(asked.having(**{name: at + s * toward}))[0] * dout).sum()
            for s in (-2 * step, -step, step, 2 * step)
        ]
        # fourth order: the truncation is far below what float32 can show
        slope = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * step)
        got = (getattr(gradients, f"d{name}") * toward).sum()
        slack = (limits[f"d{name}"][1] * np.abs(toward)).sum() + 1e-8 * max(1.0, abs(slope))
        found.append(judge.within(np.asarray([got]), np.asarray([slope]), slack, f"d{name}"))
    return judge.all_of(found)


@check(
    "B07",
    "q times 8, outliers, large v",
    level=3,
    cases=sweep(
        "B07",
        {
            "smoke": [{"n": 65, "m": 113, "h": 1, "data": "q8"}],
            "cpu": [
                {"n": 129, "m": 203, "h": 2, "data": x}
                for x in ("q8", "outliers", "large-values", "duplicates", "descending", "negative")
            ],
        },
        needs=["backward"],
    ),
)
def stressed(ctx: Context, case: Case) -> Outcome:
    """Peaked rows: most of P is subnormal in float16, and P must be recomputed from the LSE."""
    asked = ask(case)
    return judged_backward(ctx, asked, upstream(case, asked))


@check(
    "B08",
    "dout = 0 gives exactly 0",
    level=3,
    cases=sweep("B08", {"smoke": [{"n": 65, "m": 33, "h": 2, "data": "q8"}]}, needs=["backward"]),
)
def zero(ctx: Context, case: Case) -> Outcome:
    """Nothing is left over from another call or from D."""
    asked = ask(case)
    gradients = differentiate(ctx, asked, np.zeros(asked.out_shape, asked.q.dtype))
    return judge.all_of(
        judge.exact(getattr(gradients, n), np.zeros_like(getattr(gradients, n)), n)
        for n in ("dq", "dk", "dv")
    )


@check(
    "B09",
    "dout times 2^k, bitwise",
    level=3,
    cases=sweep(
        "B09",
        {"smoke": [{"n": 65, "m": 33, "h": 2}], "cpu": [{"n": 129, "m": 203, "h": 2, "d": 128}]},
        needs=["backward"],
    ),
)
def scaled(ctx: Context, case: Case) -> Outcome:
    """Gradients are linear in dout, and a power of two rounds nothing; float16 has subnormals
    nearby and is held to the bounds."""
    asked = ask(case)
    dout, result = upstream(case, asked), call(ctx, asked)
    plain = differentiate(ctx, asked, dout, result=result)
    found = []
    for k in (-2, 3):
        factor = np.asarray(2.0**k, dout.dtype)
        if case.params["dtype"] == "float16":
            found.append(judged_backward(ctx, asked, dout * factor))
            continue
        larger = differentiate(ctx, asked, dout * factor, result=result)
        for name in ("dq", "dk", "dv"):
            want = plain.values[name] * factor
            found.append(judge.same(larger.values[name] + 0, want + 0, name))
    return judge.all_of(found)


_lengths = sweep("B10", tails(smoke=(33, 64), h=1, d=32), dtypes=two, needs=["backward"])


@check("B10", "lengths around tile edges", level=3, cases=_lengths)
def lengths(ctx: Context, case: Case) -> Outcome:
    """Columns that pad the last tile are hidden in backward too: scored 0 where all others lie at
    -128, they would weigh e^123 (BUG-002)."""
    asked = ask(case)
    dout = upstream(case, asked)
    dtype = case.params["dtype"]
    level = 16 / asked.q.shape[-1] ** 0.25 / 2**0.5
    low = asked.having(
        q=cast(np.full(asked.q.shape, 2 * level), dtype),
        k=cast(np.full(asked.k.shape, -level), dtype),
    )
    if ctx.manifest.claims("mask"):
        low = low.having(mask=np.ones((1, 1, asked.q.shape[2], asked.k.shape[2]), bool))
    across = ask(replace(case, params={**case.params, "m": 64}))
    return judge.all_of(
        judged_backward(ctx, x, upstream(case, x)) if x is across else judged_backward(ctx, x, dout)
        for x in (asked, low, across)
    )


@check(
    "B11",
    "gradients of the sinks",
    level=3,
    cases=sweep(
        "B11",
        {
            "smoke": [{"n": 33, "m": 65, "h": 4}],
            "cpu": [{"n": 65, "m": 33, "h": 4, "hk": 2, "b": 2, "causal": "bottom_right"}],
        },
        needs=["backward", "sinks", "backward_sinks"],
    ),
)
def sinks(ctx: Context, case: Case) -> Outcome:
    """A sink takes weight from all others; rows that see only it count as well."""
    asked = ask(case)
    values = cast(generator(case, 1).standard_normal(asked.heads[0]), "float32")
    asked = asked.having(sinks=values)
    return judged_backward(ctx, asked, upstream(case, asked))


@check(
    "B12",
    "gradients through softcap, window, ALiBi and Dv != D",
    level=3,
    cases=sweep(
        "B12",
        {
            "smoke": [{"n": 33, "m": 65, "softcap": 5.0, "data": "q8"}],
            "cpu": [
                {"n": 129, "softcap": 30.0, "causal": True, "data": "q8"},
                {"n": 129, "window": [31, 7]},
                {"n": 65, "m": 113, "window": [20, 0], "causal": "bottom_right"},
                {"n": 65, "m": 113, "d": 64, "dv": 32},
                {"n": 65, "m": 113, "scale": 0.3},
                {"n": 65, "m": 113, "softcap": 1.0},
            ],
        },
        needs=["backward"],
    ),
)
def options(ctx: Context, case: Case) -> Outcome:
    """Each changes the derivative, or which of it is there."""
    asked = ask(case)
    found = [judged_backward(ctx, asked, upstream(case, asked))]
    if ctx.manifest.claims("alibi_slopes"):
        slopes = (2.0 ** -np.arange(1, asked.heads[0] + 1)).astype(np.float32)
        sloped = asked.having(alibi_slopes=slopes)
        found.append(judged_backward(ctx, sloped, upstream(case, sloped)))
    return judge.all_of(found)


@check(
    "B13",
    "the LSE is differentiable",
    level=None,
    cases=sweep("B13", {"smoke": [{"n": 33, "m": 65}]}, dtypes=one, needs=["backward"]),
)
def through_lse(ctx: Context, case: Case) -> Outcome:
    """dlse joins D: what a merge of partial results needs. Informs only; few peers have it."""
    asked = ask(case)
    dlse = generator(case, 3).standard_normal(asked.lse_shape).astype(np.float32)
    dout = upstream(case, asked)
    return unless_refused(
        lambda: judged_backward(ctx, asked, dout, dlse=dlse), "dlse", gate="_warn"
    )


@check(
    "B14",
    "one sequence's gradients do not depend on the others",
    level=3,
    cases=sweep("B14", {"smoke": [{"n": 33, "b": 2, "h": 2}]}, dtypes=one, needs=["backward"]),
)
def independent(ctx: Context, case: Case) -> Outcome:
    """The gradients of a batch are those of its items (BUG-018)."""
    asked, found = ask(case), []
    dout = upstream(case, asked)
    whole = differentiate(ctx, asked, dout)
    for b in range(asked.batch):
        item = Attention(asked.q[b : b + 1], asked.k[b : b + 1], asked.v[b : b + 1])
        alone = differentiate(ctx, item, dout[b : b + 1])
        precision = bounds.Precision.of(ctx.manifest, str(asked.q.dtype))
        limits = bounds.backward(item, dout[b : b + 1], None, precision, "prob")
        for name in ("dq", "dk", "dv"):
            got, want = getattr(whole, name)[b : b + 1], getattr(alone, name)
            found.append(judge.within(got, want, 2 * limits[name][1], name))
    return judge.all_of(found)
