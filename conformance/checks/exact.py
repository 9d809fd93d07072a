"""X: probes whose answer is known to the last bit. They alone kill most routing, alignment and
tail defects, and no tolerance can hide anything from them (but see X01 on split rows).

They are exact on every machine: equal scores weigh exp(0) = 1, and a selected key has the score 0
while the others lie so far below that exp underflows to 0; power-of-two counts divide exactly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from portattn.conformance import judge
from portattn.conformance.bounds import Precision
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import (
    Rows,
    attended,
    call,
    equal_scores,
    judged,
    sweep,
)
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast, generator
from portattn.conformance.reference import Array, Attention, visibility

SPLIT = 1024  # keys from which on a kernel may split a row

_POWERS: Rows = {
    "smoke": [{"n": n, "m": m} for n, m in ((33, 1), (3, 64), (65, 256))],
    "cpu": [{"n": n, "m": m, "b": 2} for n, m in ((1, 2), (127, 128), (15, 512), (2, 2048))],
    "gpu": [{"n": 1000, "m": 8192, "b": 4, "h": 8}],
}


@check("X01", "q = 0, integer v, power-of-two counts", level=0, cases=sweep("X01", _POWERS))
def integers(ctx: Context, case: Case) -> Outcome:
    """The mean of integers over 2^k keys, exactly; sums stay below 2^8 for bfloat16.

    Long rows may be split and joined through exp and log, which are not exact: where such a
    kernel's parts cancel, a few roundings of the accumulator may be left, and no more.
    """
    asked = equal_scores(ask(case))
    rng = generator(case, 1)
    v = rng.integers(-1, 2, asked.v.shape)
    v[..., rng.permutation(v.shape[2])[128:], :] = 0
    asked = asked.having(v=cast(v, case.params["dtype"]))
    want = np.repeat(v.mean(2, keepdims=True), asked.heads[0] // asked.heads[1], 1)
    want = np.broadcast_to(want, asked.out_shape)
    got = call(ctx, asked).out
    if asked.k.shape[2] >= SPLIT:
        near = np.abs(got - want) <= 8 * Precision.of(ctx.manifest, case.params["dtype"]).u_acc
        got = np.where(near, want, got)
    return judge.exact(got, want)


def selecting(case: Case) -> tuple[Attention, Array]:
    """A call in which row i attends to key pi(i) alone, and pi (B, Hq, n).

    Keys carry +-1 codes and a constant 1; a query is 512 times its key's code, and the constant
    takes the match away again: the chosen score is 0, the others at most -1024 |scale|.
    """
    asked = ask(case)
    rng, d, dtype = generator(case, 2), asked.q.shape[-1], case.params["dtype"]
    bits = min(d - 1, 127)
    if bits <= 16:  # draw without repetition
        keys = slice(1 << bits)
        asked = asked.having(k=asked.k[:, :, keys], v=asked.v[:, :, keys])
        numbers = rng.permutation(1 << bits)[: asked.k.shape[2]]
        codes = 2.0 * (numbers[:, None] >> np.arange(bits) & 1) - 1.0
    else:
        codes = rng.choice([-1.0, 1.0], (asked.k.shape[2], bits))
    (b, hk, m), (hq, n) = asked.k.shape[:3], asked.q.shape[1:3]
    k, q = np.zeros(asked.k.shape), np.zeros(asked.q.shape)
    # every head of every item has the codes in an order of its own: another's keys choose wrongly
    order = rng.permuted(np.broadcast_to(np.arange(m), (b, hk, m)), axis=-1)
    k[..., :bits], k[..., bits] = codes[order], 1.0
    chosen = rng.integers(0, m, (b, hq, n))
    own = np.repeat(order, hq // hk, 1)
    q[..., :bits] = 512.0 * codes[np.take_along_axis(own, chosen, -1)]
    q[..., bits] = -512.0 * bits
    return asked.having(q=cast(q, dtype), k=cast(k, dtype)), chosen


_SELECT: Rows = {
    "smoke": [{"n": 65, "m": 113, "b": 2}, {"n": 129, "m": 1}],
    "cpu": [
        {"n": 257, "m": 203, "d": 128},
        {"n": 31, "m": 1025, "h": 4},
        {"n": 65, "m": 113, "d": 32},
        {"n": 65, "m": 113, "h": 4, "hk": 2, "b": 2},
    ],
    "gpu": [{"n": 4096, "m": 8191, "h": 8}],
}


@check("X02", "selectors: out_i = v of one key", level=0, cases=sweep("X02", _SELECT))
def selectors(ctx: Context, case: Case) -> Outcome:
    """Row i returns v of key pi(i), bit for bit."""
    asked, chosen = selecting(case)
    return judge.exact(call(ctx, asked).out, _picked(asked.v.astype(np.float64), chosen))


@check("X03", "v coded by batch, head and key", level=0, cases=sweep("X03", _SELECT))
def coded(ctx: Context, case: Case) -> Outcome:
    """What comes back says which element was read."""
    asked, chosen = selecting(case)
    b, h, j = np.indices(asked.v.shape[:3])
    code = np.stack([b + 1, h + 1, j % 128, j // 128], -1)
    v = np.tile(code, -(-asked.v.shape[-1] // 4))[..., : asked.v.shape[-1]].astype(np.float64)
    got = call(ctx, asked.having(v=cast(v, case.params["dtype"]))).out
    outcome = judge.exact(got, _picked(v, chosen))
    if outcome.worst is None:
        return outcome
    at = outcome.worst["index"]
    read = [float(x) for x in got[tuple(at[:3])][:4]]
    here = [at[0] + 1, at[1] + 1, int(chosen[tuple(at[:3])])]
    text = f"row {at[:3]} read (batch+1, head+1, key%128, key//128) = {read}, wanted {here}"
    return replace(outcome, message=text)


_ONE_HOT: Rows = {
    "smoke": [{"n": 65, "m": 113}, {"n": 33, "causal": True}],
    "cpu": [{"n": 129, "m": 203}, {"n": 129, "causal": True}, {"n": 65, "m": 257, "h": 4, "hk": 1}],
}


@check("X04", "one-hot v: the weights themselves", level=0, cases=sweep("X04", _ONE_HOT))
def one_hot(ctx: Context, case: Case) -> Outcome:
    """With equal scores a key weighs something exactly where it is visible, and 1/2^k exactly
    where 2^k keys are."""
    asked = equal_scores(ask(case))
    weight = attended(ctx, asked)
    n, m = asked.q.shape[2], asked.k.shape[2]
    seen = visibility(asked, 0, 0, np.arange(n), m)
    count = seen.sum(1)
    power = (count & (count - 1)) == 0
    want = np.where(seen, 1.0 / np.maximum(count, 1)[:, None], 0.0)
    shown = np.broadcast_to(seen, weight.shape)
    return judge.all_of(
        [
            judge.exact(weight > 0, shown, "visible"),
            judge.exact(weight[..., power, :], np.broadcast_to(want, weight.shape)[..., power, :]),
        ]
    )


@check(
    "X05",
    "one key: out = v",
    level=0,
    cases=sweep("X05", {"smoke": [{"n": 33, "m": 1}], "cpu": [{"n": 129, "m": 1, "b": 2, "h": 4}]}),
)
def one_key(ctx: Context, case: Case) -> Outcome:
    """A softmax over one key is 1: exactly where its score is 0, and within the bound else."""
    asked = ask(case)
    chosen = np.zeros(asked.q.shape[:3], int)
    got = call(ctx, equal_scores(asked)).out
    exactly = judge.exact(got, _picked(asked.v.astype(np.float64), chosen))
    return judge.all_of([exactly, judged(ctx, asked)])


def _picked(v: Array, chosen: Array) -> Array:
    """v[b, h // group, chosen[b, h, i]] (B, Hq, n, Dv)."""
    group = chosen.shape[1] // v.shape[1]
    b, h = np.indices(chosen.shape)[:2]
    return np.asarray(v[b, h // group, chosen])
