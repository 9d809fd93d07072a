"""K: masks, and what else changes the scores: alignment, window, softcap, bias, ALiBi, sinks.

Beside E1 most are asked for the exact set of keys that a row sees (`attended`), which no tolerance
can blur.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from portattn.conformance import judge
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import (
    Rows,
    attended,
    call,
    equal_scores,
    judged,
    one,
    sweep,
    two,
    unless_refused,
)
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast, generator, lengths_mask
from portattn.conformance.reference import Array, Attention, visibility


def sees_exactly(ctx: Context, asked: Attention) -> Outcome:
    """With equal scores, a key weighs more than nothing exactly where the contract shows it."""
    flat = equal_scores(asked)
    weight = attended(ctx, flat)
    want = np.zeros(weight.shape, bool)
    for b in range(asked.batch):
        keys = asked.keys(asked.k, b).shape[1]
        for h in range(asked.heads[0]):
            want[b, h, :, :keys] = visibility(asked, b, h, np.arange(asked.q.shape[2]), keys)
    empty = ~want.any(-1, keepdims=True) & (ctx.manifest.empty_rows != "zero")
    return judge.exact((weight > 0) & ~empty, want, "visible")


def both(ctx: Context, asked: Attention) -> Outcome:
    """E1 on the numbers, and the exact set."""
    return judge.all_of([judged(ctx, asked), sees_exactly(ctx, asked)])


def _causal(alignment: str) -> dict[str, list[dict[str, object]]]:
    pairs = [(33, 65), (65, 33), (2, 5), (5, 2)]
    more = [(129, 203), (203, 129), (63, 64), (1, 127), (113, 31), (127, 257)]
    return {
        "smoke": [{"n": n, "m": m, "h": 1, "d": 32, "causal": alignment} for n, m in pairs],
        "cpu": [{"n": n, "m": m, "h": 1, "causal": alignment} for n, m in more],
        "gpu": [{"n": 1025, "m": 4097, "h": 4, "causal": alignment}],
    }


@check("K01", "causal, top-left", level=0, cases=sweep("K01", _causal("top_left")))
def top_left(ctx: Context, case: Case) -> Outcome:
    """Row i sees keys up to i, whatever the lengths (BUG-007)."""
    return both(ctx, ask(case))


@check("K02", "causal, bottom-right", level=0, cases=sweep("K02", _causal("bottom_right")))
def bottom_right(ctx: Context, case: Case) -> Outcome:
    """The last row sees the last key; more rows than keys leave the first rows empty (BUG-007)."""
    return both(ctx, ask(case))


@check(
    "K03",
    "causal, equal lengths: the future stays out",
    level=0,
    cases=sweep(
        "K03",
        {
            "smoke": [{"n": 64, "h": 2, "causal": True}, {"n": 129, "h": 1, "causal": True}],
            "cpu": [{"n": n, "h": 2, "causal": True} for n in (15, 31, 63, 113, 257)],
        },
    ),
)
def leak(ctx: Context, case: Case) -> Outcome:
    """Other keys and values from t on change no bit of the rows before t (BUG-009: the limit was
    applied once for four rows)."""
    asked = ask(case)
    first, n = call(ctx, asked), asked.q.shape[2]
    found = [judge.forward(asked, first, ctx.manifest)]
    for t in (1, 2, 3, 5, 33):
        if t < n:
            other = generator(case, t).standard_normal((2, *asked.k.shape[:2], n - t, 1))
            k, v = asked.k.copy(), asked.v.copy()
            k[:, :, t:], v[:, :, t:] = cast(other[0], str(k.dtype)), cast(other[1], str(v.dtype))
            again = call(ctx, asked.having(k=k, v=v)).raw.values
            found.append(judge.same(again[:, :, :t], first.raw.values[:, :, :t], "before"))
    return judge.all_of(found)


_WINDOWS = [[0, 0], [1, 0], [0, 1], [2, None], [None, 0], [7, 3]]


@check(
    "K04",
    "windows, 0 and 1 among them",
    level=0,
    cases=sweep(
        "K04",
        {
            "smoke": [{"n": 33, "h": 1, "d": 32, "window": w} for w in _WINDOWS],
            "cpu": [
                {"n": n, "m": m, "h": 1, "d": 32, "window": w, "causal": c}
                for n, m, w, c in (
                    (129, 129, [31, 0], True),
                    (129, 129, [64, 64], False),
                    (65, 203, [40, 0], "bottom_right"),
                    (65, 203, [40, 5], "top_left"),
                    (65, 203, [3, 3], False),
                    (203, 65, [16, None], False),
                    (257, 257, [127, 0], True),
                    (129, 129, [1000, 1000], False),
                )
            ],
            "gpu": [{"n": 2049, "h": 2, "window": [512, 0], "causal": True}],
        },
    ),
)
def windows(ctx: Context, case: Case) -> Outcome:
    """Both edges inclusive, the row's own key not counted; a left bound alone leaves the future in
    (BUG-056), and its edge is i - left itself (BUG-058)."""
    return both(ctx, ask(case))


@check(
    "K05",
    "a window needs no mask to count",
    level=0,
    cases=sweep(
        "K05",
        {
            "smoke": [{"n": 64, "d": 16, "window": [31, 0]}],
            "cpu": [{"n": 129, "window": [0, 0]}, {"n": 113, "window": [5, 5]}],
        },
        dtypes=two,
        needs=["mask"],
    ),
)
def window_alone(ctx: Context, case: Case) -> Outcome:
    """The same window with and without an all-true mask; another window, another answer
    (BUG-057)."""
    asked = ask(case)
    shown = np.ones((1, 1, asked.q.shape[2], asked.k.shape[2]), bool)
    none = judged(ctx, asked.having(window=None))
    return judge.all_of([both(ctx, asked), both(ctx, asked.having(mask=shown)), none])


@check(
    "K06",
    "bool mask",
    level=0,
    cases=sweep(
        "K06",
        {
            "smoke": [{"n": 33, "m": 65, "h": 2}],
            "cpu": [{"n": 129, "m": 203, "b": 2}, {"n": 65, "m": 257, "h": 4, "hk": 2}],
            "gpu": [{"n": 1025, "m": 2049, "b": 2, "h": 4}],
        },
        needs=["mask"],
    ),
)
def bool_mask(ctx: Context, case: Case) -> Outcome:
    """True attends; every head its own mask."""
    asked = ask(case)
    return both(ctx, asked.having(mask=_random_mask(case, (asked.batch, asked.heads[0]), asked)))


@check(
    "K07",
    "bias, -inf in it hides",
    level=0,
    cases=sweep(
        "K07",
        {
            "smoke": [{"n": 33, "m": 65, "h": 2}],
            "cpu": [{"n": 129, "m": 203, "b": 2}, {"n": 65, "m": 257, "h": 4, "hk": 2}],
        },
        needs=["bias"],
    ),
)
def bias(ctx: Context, case: Case) -> Outcome:
    """Added after the scale; -inf hides its key, and a row of -inf alone is empty."""
    asked = ask(case)
    values = 2 * generator(case, 1).standard_normal((asked.batch, *_square(asked)))
    plain = asked.having(bias=cast(values, case.params["dtype"]))
    hidden = np.where(_random_mask(case, (asked.batch, asked.heads[0]), asked), values, -np.inf)
    if ctx.manifest.empty_rows == "zero":  # else a row of -inf is what the target makes of it
        hidden[:, :, 7] = -np.inf
    return judge.all_of(
        [
            judged(ctx, plain),
            unless_refused(
                lambda: judged(ctx, asked.having(bias=cast(values, "float32"))),
                "float32_bias",
                gate="_warn",
            ),
            judged(ctx, asked.having(bias=cast(hidden, case.params["dtype"]))),
            sees_exactly(
                ctx,
                asked.having(
                    bias=cast(np.where(hidden > -np.inf, 0, hidden), case.params["dtype"])
                ),
            ),
        ]
    )


@check(
    "K08",
    "finite biases are not masks",
    level=0,
    cases=sweep(
        "K08", {"smoke": [{"n": 3, "m": 33}], "cpu": [{"n": 65, "m": 129}]}, needs=["bias"]
    ),
)
def finite_bias(ctx: Context, case: Case) -> Outcome:
    """A row whose bias is -10^4, -10^30 or the most negative float throughout is the mean of v,
    neither 0 nor NaN (BUG-019: finfo.min times log2(e) overflows)."""
    asked = equal_scores(ask(case))
    dtype = case.params["dtype"]
    # -1e4 in one row among others, as models write masks
    found = []
    lowest = {"float16": -65504.0, "bfloat16": -3.3895e38}.get(dtype, -3.4028234e38)
    mean = asked.v.astype(np.float64).mean(2)
    size = np.abs(asked.v.astype(np.float64)).mean(2)
    slack = np.repeat(size, asked.heads[0] // asked.heads[1], 1)
    for value in (-1e4, -1e30, lowest):
        values = np.ones((1, 1, *_square(asked)[1:]))
        values[..., 0, :] = max(value, lowest)
        got = call(ctx, asked.having(bias=cast(values, dtype))).out[:, :, 0]
        bound = slack * (1e-5 if dtype in ("float32", "float64") else 1e-2)
        found.append(judge.within(got, mean, bound, "low_row"))
    values = np.where(_random_mask(case, (1, 1), asked), 0.0, -1e4)
    found.append(judged(ctx, replace(ask(case), bias=cast(values, dtype))))
    return judge.all_of(found)


_CAPS: Rows = {
    "smoke": [{"n": 33, "m": 65, "softcap": c, "data": "q8"} for c in (1.0, 30.0)],
    "cpu": [
        {"n": 129, "m": 203, "softcap": 30.0, "causal": "bottom_right"},
        {"n": 129, "m": 203, "softcap": 1.0},
        {"n": 65, "m": 113, "softcap": 50.0, "data": "q64", "d": 128},
    ],
}


@check("K09", "softcap, and what comes after it", level=0, cases=sweep("K09", _CAPS))
def softcap(ctx: Context, case: Case) -> Outcome:
    """scale -> softcap -> bias -> mask: masked keys weigh nothing (a cap after the mask gives them
    exp(-cap), BUG-054), and a bias is not capped."""
    asked = ask(case)
    found = [judged(ctx, asked)]
    if ctx.manifest.claims("mask"):
        found.append(both(ctx, asked.having(mask=_random_mask(case, (1, 1), asked))))
    if ctx.manifest.claims("bias"):
        values = 3.0 * generator(case, 5).integers(-1, 2, (1, 1, *_square(asked)[1:]))
        found.append(judged(ctx, asked.having(bias=cast(values, case.params["dtype"]))))
    return judge.all_of(found)


_PADDED: Rows = {
    "smoke": [{"n": 33, "m": 65, "b": 2}],
    "cpu": [{"n": 65, "m": 257, "b": 2}, {"n": 1, "m": 203, "b": 2, "h": 4}],
}


@check("K10", "padding lengths as a mask", level=0, cases=sweep("K10", _PADDED, needs=["mask"]))
def padding(ctx: Context, case: Case) -> Outcome:
    """A key mask (B, 1, 1, Sk), as batches of unequal texts have it; one length is 0."""
    asked = ask(case)
    m = asked.k.shape[2]
    masks = (lengths_mask(x, m) for x in ((m, m // 2), (1, m - 1), (0, 33)))
    return judge.all_of(both(ctx, asked.having(mask=x)) for x in masks)


@check("K11", "seqused_k", level=0, cases=sweep("K11", _PADDED, needs=["seqused_k"]))
def used_lengths(ctx: Context, case: Case) -> Outcome:
    """Keys beyond it are invisible, and every alignment is measured on it in place of Sk."""
    asked = ask(case)
    m, found = asked.k.shape[2], []
    for lengths in ((m, m // 2), (1, m - 1), (0, 33)):
        used = asked.having(seqused_k=np.asarray(lengths, np.int32))
        found.append(both(ctx, used))
        if ctx.manifest.claims("causal") and "bottom_right" in ctx.manifest.causal_alignments:
            found.append(both(ctx, replace(used, causal="bottom_right")))
        if ctx.manifest.claims("window"):
            found.append(both(ctx, replace(used, window=(5, 2))))
    return judge.all_of(found)


@check(
    "K12",
    "masks and biases broadcast",
    level=0,
    cases=sweep(
        "K12",
        {"smoke": [{"n": 17, "m": 33, "b": 2, "h": 4}], "cpu": [{"n": 65, "m": 129, "b": 2}]},
        dtypes=two,
        needs=["mask"],
    ),
)
def broadcasts(ctx: Context, case: Case) -> Outcome:
    """Every axis of size one, and fewer axes than four."""
    asked = ask(case)
    h, n, m = _square(asked)
    shapes = [(2, 1, 1, m), (1, h, n, m), (1, 1, n, m), (2, h, 1, m), (2, 1, n, 1), (n, m), (m,)]
    found = []
    for index, shape in enumerate(shapes):
        shown = generator(case, index).random(shape) < 0.7
        found.append(both(ctx, asked.having(mask=shown)))
        if ctx.manifest.claims("bias"):
            added = generator(case, 50 + index).standard_normal(shape)
            found.append(judged(ctx, asked.having(bias=cast(added, case.params["dtype"]))))
    return judge.all_of(found)


_COMBINED: Rows = {
    "smoke": [{"n": 65, "m": 65, "causal": True, "window": [16, 4]}],
    "cpu": [
        {"n": 129, "m": 203, "causal": "bottom_right", "window": [31, 9], "h": 4, "hk": 2},
        {"n": 203, "m": 129, "causal": "top_left", "window": [31, 0]},
        {"n": 257, "causal": True, "window": [65, 0], "softcap": 20.0},
    ],
}


@check(
    "K13",
    "causal and window and mask together",
    level=0,
    cases=sweep("K13", _COMBINED, needs=["mask"]),
)
def together(ctx: Context, case: Case) -> Outcome:
    """A key is visible where all of them show it; a bias on top where claimed."""
    asked = ask(case)
    asked = asked.having(mask=_random_mask(case, (asked.batch, 1), asked))
    found = [both(ctx, asked)]
    if ctx.manifest.claims("bias"):
        added = generator(case, 9).standard_normal((1, *_square(asked)))
        found.append(judged(ctx, asked.having(bias=cast(added, case.params["dtype"]))))
    return judge.all_of(found)


@check(
    "K14",
    "sinks",
    level=0,
    cases=sweep(
        "K14",
        {
            "smoke": [{"n": 33, "m": 65, "h": 4}],
            "cpu": [
                {"n": 65, "m": 113, "h": 4, "hk": 2, "causal": "bottom_right"},
                {"n": 113, "m": 65, "h": 2, "causal": "bottom_right"},
                {"n": 1, "m": 513, "h": 8, "hk": 2},
            ],
        },
        needs=["sinks"],
    ),
)
def sinks(ctx: Context, case: Case) -> Outcome:
    """An extra logit in the denominator and in the LSE; a row that sees only its sink is 0 and
    its LSE the sink."""
    asked, found = ask(case), []
    for index, kind in enumerate(("float32", case.params["dtype"])):
        values = 3 * generator(case, index).standard_normal(asked.heads[0])
        found.append(judged(ctx, asked.having(sinks=cast(values, kind))))
    high = asked.having(sinks=cast(np.full(asked.heads[0], 40.0), "float32"))
    return judge.all_of([*found, judged(ctx, high)])


@check(
    "K15",
    "ALiBi",
    level=0,
    cases=sweep(
        "K15",
        {
            "smoke": [{"n": 33, "m": 65, "h": 4, "b": 2}],
            "cpu": [
                {"n": 129, "h": 4, "causal": True},
                {"n": 113, "m": 65, "h": 4, "hk": 2, "b": 2},
                {"n": 1, "m": 513, "h": 8},
            ],
        },
        needs=["alibi_slopes"],
    ),
)
def alibi(ctx: Context, case: Case) -> Outcome:
    """-slope |i + Sk - Sq - j|, slopes by head or by batch and head."""
    asked = ask(case)
    heads = asked.heads[0]
    by_head = (2.0 ** -np.linspace(1, 8, heads)).astype(np.float32)
    by_item = (np.arange(1, asked.batch + 1)[:, None] * by_head).astype(np.float32)
    return judge.all_of(judged(ctx, asked.having(alibi_slopes=x)) for x in (by_head, by_item))


@check(
    "K16",
    "whole tiles hidden before the first visible key",
    level=0,
    cases=sweep(
        "K16",
        {
            "smoke": [{"n": 513, "h": 1, "d": 16}],
            "cpu": [{"n": n, "h": 1, "d": 16} for n in (600, 2049)],
        },
        dtypes=one,
        needs=["bias"],
    ),
)
def late_start(ctx: Context, case: Case) -> Outcome:
    """Tiles of -inf come first, so the running maximum is -inf when they are rescaled (BUG-020);
    as a bias, as a mask and as a window."""
    asked = ask(case)
    n = asked.q.shape[2]
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    shown = (j <= i) & (j > i - 10)
    added = cast(np.where(shown, 0.0, -np.inf), case.params["dtype"])
    found = [judged(ctx, asked.having(bias=added))]
    if ctx.manifest.claims("mask"):
        found.append(judged(ctx, asked.having(mask=shown)))
    if ctx.manifest.claims("window"):
        found.append(judged(ctx, asked.having(window=(9, 0))))
    return judge.all_of(found)


def _square(asked: Attention) -> tuple[int, int, int]:
    return asked.heads[0], asked.q.shape[2], asked.k.shape[2]


def _random_mask(case: Case, lead: tuple[int, int], asked: Attention) -> Array:
    """Seven keys in ten, and in every row at least one."""
    shape = (*lead, *_square(asked)[1:])
    shown = generator(case, 11).random(shape) < 0.7
    shown[..., 0] |= ~shown.any(-1)
    return np.asarray(shown)
