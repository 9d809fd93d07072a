"""E: edges: nothing, one of something, odd memory, poison, and more than 2^31 elements."""

from __future__ import annotations

import importlib

import numpy as np

from portattn.conformance import judge, placement
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import (
    Rows,
    call,
    differentiate,
    half,
    judged,
    judged_backward,
    states,
    sweep,
    two,
    unless_refused,
)
from portattn.conformance.checks.masks import both
from portattn.conformance.context import Context, Decided, cause_of
from portattn.conformance.generators import ask, generator, upstream
from portattn.conformance.reference import Array, Attention

_EMPTY = [{"b": b, "n": n, "m": 5, "h": 2, "d": 32} for b, n in ((0, 4), (1, 0), (0, 0))]


@check(
    "E01",
    "B = 0 or Sq = 0",
    level=0,
    cases=sweep("E01", {"smoke": _EMPTY}, dtypes=two, must=True),
)
def empty_queries(ctx: Context, case: Case) -> Outcome:
    """An empty output of the right shape, no launch, no division by zero (BUG-005)."""
    return judged(ctx, ask(case))


@check(
    "E02",
    "Sk = 0",
    level=0,
    cases=sweep(
        "E02",
        {"smoke": [{"n": 3, "m": 0}], "cpu": [{"n": 129, "m": 0, "b": 2}]},
        dtypes=two,
        must=True,
    ),
)
def empty_keys(ctx: Context, case: Case) -> Outcome:
    """Zeros, and an LSE of -inf (BUG-005)."""
    asked = ask(case)
    result = call(ctx, asked)
    found = [judge.exact(result.out, np.zeros(asked.out_shape))]
    if result.lse is not None:
        found.append(judge.exact(result.lse, np.full(asked.lse_shape, -np.inf), "lse"))
    return judge.all_of(found)


_ROWS: Rows = {
    "smoke": [{"n": 193, "h": 1, "d": 32}],
    "cpu": [{"n": 193, "m": 257, "h": 2}, {"n": 513, "h": 1}],
}


@check(
    "E03",
    "rows that see nothing, in a leading, middle and trailing tile",
    level=0,
    cases=sweep("E03", _ROWS, needs=["mask"]),
)
def empty_rows(ctx: Context, case: Case) -> Outcome:
    """Output 0 and LSE -inf, never NaN, and no effect on the rows beside them; single rows and
    whole tiles of them (BUG-018)."""
    asked, found = ask(case), []
    n = asked.q.shape[2]
    for rows in (slice(0, 3), slice(70, 71), slice(n - 2, n), slice(0, 128), slice(64, 192)):
        shown = np.ones((1, 1, n, asked.k.shape[2]), bool)
        shown[:, :, rows] = False
        found.append(both(ctx, asked.having(mask=shown)))
    return judge.all_of(found)


_DECODE: Rows = {
    "smoke": [{"n": 1, "m": m, "h": 4} for m in (1, 129, 1023)],
    "cpu": [
        {"n": n, "m": m, "h": 4, "d": 128, "causal": "bottom_right"}
        for n, m in ((1, 1024), (1, 1025), (2, 4097), (7, 513), (16, 2049))
    ],
    "gpu": [{"n": n, "m": 32769, "h": 32, "hk": 8, "d": 128, "b": 4} for n in (1, 4)],
}


@check("E04", "one and few query rows", level=0, cases=sweep("E04", _DECODE))
def decode(ctx: Context, case: Case) -> Outcome:
    """The shape that takes another path: split over the keys and merged."""
    return judged(ctx, ask(case))


@check(
    "E05",
    "one key",
    level=0,
    cases=sweep(
        "E05",
        {
            "smoke": [{"n": n, "m": 1, "causal": c} for n, c in ((1, True), (65, "top_left"))],
            "cpu": [{"n": 65, "m": 1, "causal": "bottom_right"}, {"n": 1, "m": 1, "h": 8}],
        },
    ),
)
def one_key(ctx: Context, case: Case) -> Outcome:
    """A softmax over at most one key."""
    return both(ctx, ask(case))


@check(
    "E06",
    "transposed, padded and strided views",
    level=0,
    cases=sweep(
        "E06",
        {
            "smoke": [{"n": 17, "m": 33, "h": 3, "b": 2, "d": 64}],
            "cpu": [
                {"n": 3, "h": 3, "b": 84, "d": 64},
                {"n": 129, "m": 65, "h": 2, "d": 80},
                {"n": 9, "h": 2, "b": 2, "d": 16},
            ],
        },
        dtypes=two,
        needs=["strides"],
    ),
)
def views(ctx: Context, case: Case) -> Outcome:
    """(B, S, H, D) seen as (B, H, S, D) (BUG-029); the head dim two apart, which may be refused
    (BUG-031: garbage); all, and each of q, k, v alone."""
    asked, found = ask(case), []
    for view in ("transposed", "padded"):
        found.append(judged(ctx, asked, views=view))
        found += [judged(ctx, asked, views={name: view}) for name in "qkv"]
    for name in ("qkv", "q", "k", "v"):
        found.append(_taken_or_refused(ctx, asked, name, "strided"))
    return judge.all_of(found)


def _taken_or_refused(ctx: Context, asked: Attention, names: str, view: str) -> Outcome:
    views = dict.fromkeys(names, view)
    return unless_refused(lambda: judged(ctx, asked, views=views), view)


@check(
    "E07",
    "views of a fused buffer",
    level=0,
    cases=sweep(
        "E07",
        {
            "smoke": [{"n": 65, "b": 2, "h": 2}],
            "cpu": [{"n": 129, "b": 2, "h": 4, "hk": 2, "d": 128}],
        },
        dtypes=two,
        needs=["strides"],
    ),
)
def fused(ctx: Context, case: Case) -> Outcome:
    """q, k, v beside each other in each row, as one projection writes them."""
    return judged(ctx, ask(case), views="fused")


@check(
    "E08",
    "pointers off by one element",
    level=0,
    cases=sweep(
        "E08",
        {"smoke": [{"n": 65, "h": 2}], "cpu": [{"n": 129, "m": 203, "b": 2, "h": 2, "d": 128}]},
        needs=["strides"],
    ),
)
def misaligned(ctx: Context, case: Case) -> Outcome:
    """No 16-byte load fits; the strides look as if one did (BUG-035). May be refused."""
    asked = ask(case)
    names = ("qkv", "q", "k", "v")
    return judge.all_of(_taken_or_refused(ctx, asked, x, "misaligned") for x in names)


@check(
    "E09",
    "stride 0",
    level=0,
    cases=sweep(
        "E09",
        {
            "smoke": [{"n": 4, "m": 33, "b": 2, "h": 2}],
            "cpu": [{"n": n, "m": m, "b": 3, "h": 2} for n in (1, 4) for m in (33, 65, 97)],
        },
        dtypes=two,
        needs=["strides"],
    ),
)
def stride_zero(ctx: Context, case: Case) -> Outcome:
    """k and v expanded over the batch: bit for bit as if they were there (BUG-032)."""
    asked = ask(case)
    k, v = (np.broadcast_to(x[:1], x.shape).copy() for x in (asked.k, asked.v))
    asked = asked.having(k=k, v=v)
    whole = call(ctx, asked)
    expanded = call(ctx, asked, views={"k": "broadcast", "v": "broadcast"})
    return judge.all_of(
        [
            judge.forward(asked, whole, ctx.manifest),
            judge.same(expanded.raw.values, whole.raw.values),
        ]
    )


_STATED = Outcome.not_supported("the target states that NaN in hidden keys and values spreads")

_POISON: Rows = {
    "smoke": [{"n": 33, "m": 65, "h": 2}],
    "cpu": [{"n": 129, "m": 203, "h": 2, "b": 2}],
}


@check(
    "E10",
    "NaN in masked keys and values stays out",
    level=0,
    cases=sweep("E10", _POISON, needs=["mask"]),
)
def hidden_poison(ctx: Context, case: Case) -> Outcome:
    """NaN, +inf, -inf and a huge number in keys that no row, or only some rows, may see (BUG-026);
    not through 0 * NaN either, and not through a tile that is skipped or padded (BUG-028)."""
    if states(ctx, "nan_spreads"):
        return _STATED
    asked, found = ask(case), []
    n, m = asked.q.shape[2], asked.k.shape[2]
    all_hidden = np.ones((1, 1, 1, m), bool)
    all_hidden[..., 5::7] = False
    all_hidden[..., m - 3 :] = False
    some_hidden = np.ones((1, 1, n, m), bool)
    some_hidden[..., : n // 2, 11] = False
    for value in (np.nan, np.inf, -np.inf, 6e4):
        for shown, keys in ((all_hidden, ~all_hidden[0, 0, 0]), (some_hidden, np.arange(m) == 11)):
            for name in ("k", "v"):
                poisoned = np.array(getattr(asked, name))
                poisoned[:, :, keys] = value
                bad = asked.having(mask=shown, **{name: poisoned})
                found.append(judged(ctx, bad))
    return judge.all_of(found)


@check(
    "E11",
    "NaN in a visible key reaches its rows, and only them",
    level=0,
    cases=sweep(
        "E11",
        {
            "smoke": [{"n": 65, "h": 2, "causal": True}],
            "cpu": [{"n": 129, "h": 2, "b": 2, "causal": True}],
        },
    ),
)
def visible_poison(ctx: Context, case: Case) -> Outcome:
    """Swallowing a NaN hides a fault of the model; spreading it hides where it was."""
    if states(ctx, "nan_spreads"):
        return _STATED
    asked, found = ask(case), []
    n = asked.q.shape[2]
    for name, value in (("k", np.nan), ("v", np.nan), ("v", np.inf), ("q", np.nan)):
        poisoned = np.array(getattr(asked, name))
        poisoned[0, 0, n - 20, 3] = value
        found.append(judged(ctx, asked.having(**{name: poisoned})))
    return judge.all_of(found)


@check(
    "E12",
    "offsets beyond 2^31 elements",
    level=0,
    cases=sweep(
        "E12",
        {"gpu": [{"n": 64, "b": 1, "h": 56, "d": 128}]},
        dtypes=half,
        needs=["strides"],
    ),
    tiers=("gpu",),
)
def far_offsets(ctx: Context, case: Case) -> Outcome:
    """The last 64 rows of a fused buffer of more than 2^31 elements: index times stride passes it
    (BUG-012). The buffer is made on the device."""
    asked = ask(case)
    row = 3 * asked.heads[0] * asked.q.shape[-1]
    out = _at_the_end_of_a_large_buffer(ctx, asked, rows=2**31 // row + asked.q.shape[2])
    if isinstance(out, Outcome):
        return out
    bound, _ = judge.limits(asked, ctx.manifest)
    return judge.within(out, call(ctx, asked).out, 2 * bound)


@check(
    "E13",
    "more heads than a grid axis holds",
    level=0,
    cases=sweep(
        "E13",
        {
            "gpu": [
                {"b": 65536, "h": 2, "n": 4, "d": 64},
                {"b": 1, "h": 65536, "n": 10, "d": 16},
                {"b": 10923, "h": 6, "n": 4, "d": 64},
            ]
        },
        dtypes=half,
    ),
    tiers=("gpu",),
)
def grid_limit(ctx: Context, case: Case) -> Outcome:
    """2^16 batch items or heads (BUG-016), compared at a few of them."""
    asked = ask(case)
    result = call(ctx, asked)
    picks = generator(case, 1).integers(0, [asked.batch, asked.heads[0]], (6, 2))
    picks[0] = asked.batch - 1, asked.heads[0] - 1
    found = []
    for b, h in picks:
        at = (slice(b, b + 1), slice(h, h + 1))
        small = Attention(asked.q[at], asked.k[at], asked.v[at])
        lse = None if result.lse is None else result.lse[at]
        part = result._replace(out=result.out[at], lse=lse)
        found.append(judge.forward(small, part, ctx.manifest))
    return judge.all_of(found)


@check(
    "E14",
    "out= is filled, all of it",
    level=0,
    cases=sweep(
        "E14",
        {"smoke": [{"n": 65, "m": 33, "h": 2}], "cpu": [{"n": 129, "m": 203, "b": 2}]},
        dtypes=two,
        needs=["out"],
    ),
)
def given_out(ctx: Context, case: Case) -> Outcome:
    """An array of NaN comes back as the same object without one."""
    return judged(ctx, ask(case), out=True)


@check(
    "E15",
    "poison and empty rows in gradients",
    level=3,
    cases=sweep("E15", _POISON, dtypes=two, needs=["backward", "mask"]),
)
def hidden_poison_backward(ctx: Context, case: Case) -> Outcome:
    """Gradients at hidden keys are 0, and no NaN in them, or in dout of an empty row, gets out."""
    if states(ctx, "nan_spreads"):
        return _STATED
    asked, found = ask(case), []
    n, m = asked.q.shape[2], asked.k.shape[2]
    shown = np.ones((1, 1, n, m), bool)
    shown[..., 5::7] = False
    shown[:, :, 3] = False
    hidden = ~shown[0, 0].any(0)
    dout = upstream(case, asked)
    for value in (np.nan, np.inf):
        k, v = asked.k.copy(), asked.v.copy()
        k[:, :, hidden], v[:, :, hidden] = value, value
        bad = asked.having(k=k, v=v, mask=shown)
        found.append(judged_backward(ctx, bad, dout))
        gradients = differentiate(ctx, bad, dout)
        zeros = np.zeros_like(gradients.dk[:, :, hidden])
        found.append(judge.exact(gradients.dk[:, :, hidden], zeros, "hidden_dk"))
        found.append(judge.exact(gradients.dq[:, :, 3], np.zeros_like(gradients.dq[:, :, 3]), "dq"))
    return judge.all_of(found)


def _at_the_end_of_a_large_buffer(ctx: Context, asked: Attention, rows: int) -> Array | Outcome:
    """The output for ``asked`` as the last rows of a (1, rows, 3, H, D) buffer on the device."""
    if ctx.manifest.device != "cuda":
        return Outcome.not_run("needs a CUDA device")
    library = importlib.import_module(ctx.manifest.array)
    b, h, n, d = asked.q.shape
    like = ctx.kind.make(placement.lay(asked.q, "contiguous"))
    given = {"device": like.device} if ctx.manifest.array == "torch" else {}
    try:
        buffer = library.empty((b, rows, 3, h, d), dtype=like.dtype, **given)
    except Exception as error:  # each library has its own for this
        if cause_of(error) != "oom":
            raise
        return Outcome.not_run(f"the buffer does not fit the device: {error}")
    views = []
    for index, x in enumerate((asked.q, asked.k, asked.v)):
        view = buffer[:, rows - n :, index]
        view[...] = ctx.kind.make(placement.lay(x.swapaxes(1, 2), "contiguous"))
        views.append(view if ctx.manifest.layout == "bshd" else view.swapaxes(1, 2))
    attempt = ctx.attempt(*views)
    if attempt.refused:
        claimed = ctx.manifest.claims("strides")
        raise Decided("claimed_but_refused" if claimed else "rejected", str(attempt.error))
    if attempt.error is not None:
        raise Decided(cause_of(attempt.error), f"{type(attempt.error).__name__}: {attempt.error}")
    values: Array = ctx.kind.values(attempt.result[0]).astype(np.float64)
    return values if ctx.manifest.layout == "bhsd" else values.swapaxes(1, 2)
