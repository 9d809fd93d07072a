"""M: relations between answers that hold whatever the answers are; most need no oracle.

Where rounding may differ, two answers agree within the sum of their bounds; where nothing rounds,
bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from portattn.conformance import judge
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import (
    Rows,
    call,
    compared,
    judged,
    judged_backward,
    sweep,
    two,
    unscaled,
)
from portattn.conformance.context import Context, Result
from portattn.conformance.generators import (
    ask,
    cast,
    cumulative,
    generator,
    lengths_mask,
    pack,
    paged,
    upstream,
)
from portattn.conformance.reference import F64, Array, Attention

_PLAIN: Rows = {
    "smoke": [{"n": 33, "m": 113, "h": 2}],
    "cpu": [{"n": 129, "m": 203, "h": 2, "d": 128}, {"n": 65, "m": 257, "h": 4, "hk": 2}],
}


@check("M01", "keys in another order", level=0, cases=sweep("M01", _PLAIN))
def permuted(ctx: Context, case: Case) -> Outcome:
    """Attention does not know the order of its keys."""
    asked = ask(case)
    order = generator(case, 1).permutation(asked.k.shape[2])
    other = asked.having(k=asked.k[:, :, order], v=asked.v[:, :, order])
    return compared(ctx, call(ctx, other), call(ctx, asked), other, asked)


@check(
    "M02", "q times 4, scale over 4: bitwise", level=0, cases=sweep("M02", _PLAIN, needs=["scale"])
)
def rescaled(ctx: Context, case: Case) -> Outcome:
    """Powers of two round nothing."""
    asked = ask(case)
    four = np.asarray(4.0, asked.q.dtype)
    plain = call(ctx, asked.having(scale=asked.factor))
    other = call(ctx, asked.having(q=asked.q * four, scale=asked.factor / 4))
    return judge.same(other.raw.values, plain.raw.values)


@check("M03", "v times 2^k: bitwise", level=0, cases=sweep("M03", _PLAIN, dtypes=unscaled))
def scaled_values(ctx: Context, case: Case) -> Outcome:
    """In float32 and bfloat16; float16 has subnormals nearby."""
    asked = ask(case)
    plain = call(ctx, asked).raw.values
    found = []
    for k in (-3, 5):
        factor = np.asarray(2.0**k, asked.v.dtype)
        other = call(ctx, asked.having(v=asked.v * factor)).raw.values
        found.append(judge.same(other + 0, plain * factor + 0))
    return judge.all_of(found)


@check("M04", "linear in v", level=0, cases=sweep("M04", _PLAIN))
def linear(ctx: Context, case: Case) -> Outcome:
    """out(v1 + v2) = out(v1) + out(v2), with quarters, whose sums every dtype holds."""
    asked = ask(case)
    parts = generator(case, 1).integers(-16, 17, (2, *asked.v.shape)) / 4
    three = [asked.having(v=cast(v, case.params["dtype"])) for v in (*parts, parts[0] + parts[1])]
    out = [call(ctx, x).out for x in three]
    bound = sum(judge.limits(x, ctx.manifest)[0] for x in three)
    return judge.within(out[0] + out[1], out[2], bound)


@check("M05", "v = 1 gives 1", level=0, cases=sweep("M05", _PLAIN))
def ones(ctx: Context, case: Case) -> Outcome:
    """The weights sum to 1."""
    asked = replace(ask(case), v=np.ones_like(ask(case).v))
    out = call(ctx, asked).out
    return judge.within(out, np.ones_like(out), judge.limits(asked, ctx.manifest)[0])


@check("M06", "all keys shifted by one vector", level=0, cases=sweep("M06", _PLAIN))
def shifted(ctx: Context, case: Case) -> Outcome:
    """Softmax cancels what is common to a row."""
    asked, rng = ask(case), generator(case, 1)
    k = rng.integers(-8, 9, asked.k.shape) / 4
    shift = rng.integers(-4, 5, asked.k.shape[-1:])
    here, there = (asked.having(k=cast(x, case.params["dtype"])) for x in (k, k + shift))
    a, b = call(ctx, here)._replace(lse=None), call(ctx, there)._replace(lse=None)
    return compared(ctx, a, b, here, there)


@check(
    "M07", "every key twice: LSE + ln 2", level=0, cases=sweep("M07", _PLAIN, needs=["return_lse"])
)
def doubled(ctx: Context, case: Case) -> Outcome:
    """The output stays, the sum doubles."""
    asked = ask(case)
    twice = asked.having(k=np.concatenate([asked.k] * 2, 2), v=np.concatenate([asked.v] * 2, 2))
    a, b = call(ctx, asked, return_lse=True), call(ctx, twice, return_lse=True)
    assert a.lse is not None
    return compared(ctx, a._replace(lse=a.lse + np.log(2.0)), b, asked, twice)


@check("M08", "masked padding is inert", level=0, cases=sweep("M08", _PLAIN, needs=["mask"]))
def inert(ctx: Context, case: Case) -> Outcome:
    """Keys behind the end, hidden by a mask, and by seqused_k where claimed."""
    asked = ask(case)
    m = asked.k.shape[2]
    more = [
        np.concatenate(
            [
                x,
                cast(
                    generator(case, 1).standard_normal((*x.shape[:2], 40, x.shape[3])),
                    case.params["dtype"],
                ),
            ],
            2,
        )
        for x in (asked.k, asked.v)
    ]
    longer = asked.having(k=more[0], v=more[1])
    plain = call(ctx, asked)
    ways = [replace(longer, mask=lengths_mask([m] * asked.batch, m + 40))]
    if ctx.manifest.claims("seqused_k"):
        ways.append(replace(longer, seqused_k=np.full(asked.batch, m, np.int32)))
    return judge.all_of(compared(ctx, call(ctx, x), plain, x, asked) for x in ways)


_GROUPED: Rows = {
    "smoke": [{"n": 33, "m": 113, "h": 4, "hk": 2}, {"n": 1, "m": 129, "h": 8, "hk": 1}],
    "cpu": [
        {"n": 129, "m": 203, "h": 8, "hk": 2, "causal": "bottom_right"},
        {"n": 1, "m": 1023, "h": 32, "hk": 2, "d": 128},
    ],
}


@check("M09", "grouped heads = repeated heads", level=4, cases=sweep("M09", _GROUPED, must=True))
def grouped(ctx: Context, case: Case) -> Outcome:
    """Query head h reads key head h // group (BUG-047)."""
    asked = ask(case)
    group = asked.heads[0] // asked.heads[1]
    full = asked.having(k=np.repeat(asked.k, group, 1), v=np.repeat(asked.v, group, 1))
    own = judged(ctx, asked)
    return judge.all_of([own, compared(ctx, call(ctx, asked), call(ctx, full), asked, full)])


@check(
    "M10",
    "split over the keys and merged",
    level=4,
    cases=sweep(
        "M10",
        {"smoke": [{"n": 4, "m": 16, "d": 16}], "cpu": [{"n": 33, "m": 257}, {"n": 1, "m": 2049}]},
        needs=["return_lse"],
        must=True,
    ),
)
def split(ctx: Context, case: Case) -> Outcome:
    """Partial results weighed by e^LSE, natural base (BUG-064), are the whole; an empty part, and
    a part of one key, among them."""
    asked, found = ask(case), []
    whole, m = call(ctx, asked, return_lse=True), asked.k.shape[2]
    for cut in (m * 3 // 4, 1, m):
        parts = [
            asked.having(k=asked.k[:, :, s], v=asked.v[:, :, s])
            for s in (slice(cut), slice(cut, None))
        ]
        results = [call(ctx, x, return_lse=True) for x in parts]
        merged = _merge(results)
        limits = [judge.limits(x, ctx.manifest) for x in (*parts, asked)]
        size = np.abs(whole.out) + np.max([np.abs(r.out) for r in results], 0)
        assert whole.lse is not None
        slip = np.where(np.isfinite(whole.lse), sum(x[1] for x in limits), 0)[..., None]
        found.append(judge.within(merged[0], whole.out, sum(x[0] for x in limits) + slip * size))
        found.append(judge.within(merged[1], whole.lse, sum(x[1] for x in limits), "lse"))
    return judge.all_of(found)


def _merge(parts: list[Result]) -> tuple[F64, F64]:
    """Two disjoint parts by their LSE, in float64."""
    lse = np.stack([np.asarray(p.lse) for p in parts])
    top = lse.max(0)
    weight = np.exp(lse - np.where(np.isneginf(top), 0, top))
    total = weight.sum(0)
    share = weight / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return (share[..., None] * [p.out for p in parts]).sum(0), np.log(total) + top


@check(
    "M11",
    "a row of the prefill = its decode step",
    level=4,
    cases=sweep(
        "M11",
        {
            "smoke": [{"n": 33, "h": 2, "causal": True}],
            "cpu": [{"n": 129, "h": 4, "hk": 2, "causal": True}],
        },
        dtypes=two,
    ),
)
def decode(ctx: Context, case: Case) -> Outcome:
    """One query against its prefix; bit for bit where batch invariance is claimed."""
    asked, found = ask(case), []
    whole, n = call(ctx, asked), asked.q.shape[2]
    bound, lse_bound = judge.limits(asked, ctx.manifest)
    for i in dict.fromkeys((0, 1, 15, 16, n // 2, n - 1)):
        if i >= n:
            continue
        at = slice(i, i + 1)
        step = asked.having(
            causal=False,
            q=asked.q[:, :, at],
            k=asked.k[:, :, : i + 1],
            v=asked.v[:, :, : i + 1],
        )
        got = call(ctx, step)
        if ctx.manifest.claims("batch_invariant"):
            found.append(judge.same(got.raw.values, whole.raw.values[:, :, at], "row"))
        found.append(judge.within(got.out, whole.out[:, :, at], 2 * bound[:, :, at], "row"))
        if got.lse is not None and whole.lse is not None:
            slack = 2 * lse_bound[:, :, at]
            found.append(judge.within(got.lse, whole.lse[:, :, at], slack, "lse"))
    return judge.all_of(found)


def _packed_cases(lengths: list[list[int]], **more: object) -> dict[str, object]:
    return {
        "n": max(lengths[0]),
        "m": max(lengths[1]),
        "b": len(lengths[0]),
        "lengths": lengths,
        **more,
    }


_PACKED: Rows = {
    "smoke": [
        _packed_cases([[0, 1, 0, 1], [0, 3, 0, 5]], h=9, hk=3, causal="bottom_right"),
        _packed_cases([[33, 5, 65], [33, 5, 65]], h=2, causal="bottom_right"),
    ],
    "cpu": [
        _packed_cases([[129, 1, 64, 31], [203, 17, 64, 0]], h=4, hk=2),
        _packed_cases([[5, 113, 1], [9, 33, 129]], h=2, causal="bottom_right"),
        _packed_cases([[5, 113, 1], [9, 33, 129]], h=2, window=[16, 4]),
    ],
}


@check(
    "M12",
    "packed = separate",
    level=4,
    cases=sweep("M12", _PACKED, needs=["packed"], must=True, dtypes=two),
)
def packed(ctx: Context, case: Case) -> Outcome:
    """Sequences behind one another, alignment per sequence; lengths 0 and 1 too (BUG-004)."""
    asked = ask(case)
    lens_q, lens_k = case.params["lengths"]
    cut = [
        [x[b, :, :length] for b, length in enumerate(lengths)]
        for x, lengths in ((asked.q, lens_q), (asked.k, lens_k), (asked.v, lens_k))
    ]
    together = asked.having(
        q=pack(cut[0]),
        k=pack(cut[1]),
        v=pack(cut[2]),
        cu_seqlens_q=cumulative(lens_q),
        cu_seqlens_k=cumulative(lens_k),
    )
    whole = call(ctx, together)
    found = [judge.forward(together, whole, ctx.manifest)]
    for b, length in enumerate(lens_q):
        if not length:
            continue
        alone = asked.having(q=cut[0][b][None], k=cut[1][b][None], v=cut[2][b][None])
        got = call(ctx, alone)
        rows = together.queries(whole.out, b)[None]
        if ctx.manifest.claims("batch_invariant"):
            bits = together.queries(whole.raw.values, b)[None]
            found.append(judge.same(bits, got.raw.values, "row"))
        found.append(judge.within(rows, got.out, 2 * judge.limits(alone, ctx.manifest)[0], "row"))
    if ctx.manifest.claims("backward"):
        found.append(_packed_backward(ctx, case, together))
    shape = (asked.batch, 1, max(lens_q), max(lens_k))
    if ctx.manifest.claims("mask"):  # sequence b uses the leading part of its own
        shown = generator(case, 2).random(shape) < 0.7
        found.append(judged(ctx, together.having(mask=shown)))
    if ctx.manifest.claims("bias"):
        added = cast(generator(case, 3).standard_normal(shape), case.params["dtype"])
        found.append(judged(ctx, together.having(bias=added)))
    return judge.all_of(found)


def _packed_backward(ctx: Context, case: Case, asked: Attention) -> Outcome:
    return judged_backward(ctx, asked, upstream(case, asked))


_PAGED: Rows = {
    "smoke": [{"n": 3, "m": 65, "b": 2, "h": 4, "hk": 2, "block": 16, "used": [65, 33]}],
    "cpu": [
        {"n": 1, "m": 257, "b": 2, "h": 8, "hk": 2, "block": 16, "used": [257, 0], "d": 128},
        {
            "n": 33,
            "m": 113,
            "b": 2,
            "h": 2,
            "block": 64,
            "used": [33, 113],
            "causal": "bottom_right",
        },
    ],
}


@check(
    "M13",
    "paged = contiguous",
    level=4,
    cases=sweep("M13", _PAGED, needs=["paged"], must=True, dtypes=two),
)
def pages(ctx: Context, case: Case) -> Outcome:
    """Shuffled blocks; unused table entries are -1 or name a page of NaN, and neither is read."""
    asked = ask(case)
    used = case.params["used"]
    k, v, table = paged(generator(case, 1), asked.k, asked.v, used, case.params["block"])
    in_pages = asked.having(k=k, v=v, block_table=table, seqused_k=np.asarray(used, np.int32))
    got = call(ctx, in_pages)
    found = [judge.forward(in_pages, got, ctx.manifest)]
    for b, length in enumerate(used):
        alone = asked.having(
            q=asked.q[b : b + 1],
            k=asked.k[b : b + 1, :, :length],
            v=asked.v[b : b + 1, :, :length],
        )
        want, at = call(ctx, alone), slice(b, b + 1)
        slack = 2 * judge.limits(alone, ctx.manifest)[0]
        found.append(judge.within(got.out[at], want.out, slack, "item"))
    if ctx.manifest.claims("packed"):
        found.append(judged(ctx, _as_packed(in_pages)))
    return judge.all_of(found)


def _as_packed(asked: Attention) -> Attention:
    """The same paged call with its queries packed."""
    batch, _, n, _ = asked.q.shape
    q: Array = pack(list(asked.q))
    return asked.having(q=q, cu_seqlens_q=cumulative([n] * batch))
