"""D: determinism. The forward pass gives the same bits every time, whatever else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from portattn.conformance import judge
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import (
    Rows,
    call,
    differentiate,
    judged,
    one,
    sweep,
    two,
)
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, upstream
from portattn.conformance.placement import NDArray

_COUNT = "nondeterministic"
_SHAPES: Rows = {
    "smoke": [{"n": 65, "m": 129, "h": 2}, {"n": 1, "m": 2049, "h": 8}],
    "cpu": [{"n": 257, "h": 4, "b": 2, "causal": True}, {"n": 4, "m": 8193, "h": 2, "d": 128}],
    "gpu": [{"n": 4096, "h": 16, "d": 128, "b": 2}, {"n": 1, "m": 131072, "h": 8, "d": 128}],
}


def _same(got: NDArray, want: NDArray, what: str) -> Outcome:
    return judge.same(got, want, what, number=_COUNT)


@check("D01", "20 repeats", level=0, cases=sweep("D01", _SHAPES, dtypes=two), alone=True)
def repeats(ctx: Context, case: Case) -> Outcome:
    """Bitwise equal; and gradients where deterministic=True is claimed."""
    asked = ask(case)
    first = call(ctx, asked)
    found = [judge.forward(asked, first, ctx.manifest)]
    for _ in range(19):
        again = call(ctx, asked)
        found.append(_same(again.raw.values, first.raw.values, "out"))
        if again.raw.lse_values is not None and first.raw.lse_values is not None:
            found.append(_same(again.raw.lse_values, first.raw.lse_values, "lse"))
    if ctx.manifest.claims("backward", "deterministic"):
        dout = upstream(case, asked)
        want = differentiate(ctx, asked, dout, result=first, deterministic=True).values
        for _ in range(4):
            got = differentiate(ctx, asked, dout, result=first, deterministic=True).values
            found += [_same(got[name], want[name], name) for name in want]
    return judge.all_of(found)


_BATCHED: Rows = {
    "smoke": [{"n": 1, "m": 1025, "b": 5, "h": 4}, {"n": 65, "b": 3, "h": 2}],
    "cpu": [{"n": 1, "m": 5000, "b": 16, "h": 2, "d": 128}, {"n": 129, "m": 203, "b": 4}],
    "gpu": [{"n": 1, "m": 5000, "b": 64, "h": 8, "hk": 1, "d": 128}],
}


@check(
    "D02",
    "batch invariance",
    level=4,
    cases=sweep("D02", _BATCHED, dtypes=two),
)
def batch_invariance(ctx: Context, case: Case) -> Outcome:
    """A sequence has the same bits alone and in a batch (BUG-075: the split over the keys hangs
    on what else is in it)."""
    if not ctx.manifest.claims("batch_invariant"):
        return Outcome.not_supported("feature batch_invariant is not claimed")
    asked = ask(case)
    whole = call(ctx, asked)
    found = [judge.forward(asked, whole, ctx.manifest)]
    for b in (0, asked.batch - 1):
        at = slice(b, b + 1)
        alone = asked.having(q=asked.q[at], k=asked.k[at], v=asked.v[at])
        found.append(_same(call(ctx, alone).raw.values, whole.raw.values[at], "alone"))
    twice = asked.having(**{x: np.concatenate([getattr(asked, x)] * 2) for x in "qkv"})
    found.append(_same(call(ctx, twice).raw.values[: asked.batch], whole.raw.values, "twice"))
    return judge.all_of(found)


@check(
    "D03",
    "threads and streams",
    level=0,
    cases=sweep("D03", {"smoke": [{"n": 129, "m": 257, "h": 2}]}, dtypes=one),
    alone=True,
)
def threads(ctx: Context, case: Case) -> Outcome:
    """Eight threads call at once, each with inputs of its own; on a GPU each on a stream of its
    own (BUG-094, BUG-078)."""
    asked = [ask(replace(case, seed=case.seed + i)) for i in range(8)]
    want = [call(ctx, x).raw.values for x in asked]

    def work(index: int) -> list[Any]:
        x = asked[index]
        with _own_stream(ctx):
            return [ctx.attempt(x.q, x.k, x.v, **x.options) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        attempts = list(pool.map(work, range(8)))
    found = []
    for expected, tries in zip(want, attempts, strict=True):
        for attempt in tries:
            if attempt.error is not None:
                error = attempt.error
                return Outcome.failed(f"in a thread: {type(error).__name__}: {error}")
            values = ctx.kind.values(attempt.result[0])
            if ctx.manifest.layout == "bshd":
                values = np.swapaxes(values, 1, 2)
            found.append(_same(values, expected, "out"))
    return judge.all_of(found)


@contextmanager
def _own_stream(ctx: Context) -> Iterator[None]:
    if ctx.manifest.device != "cuda":
        yield
    elif ctx.manifest.array == "torch":
        import torch

        stream: Any = torch.cuda.Stream
        with torch.cuda.stream(stream()):
            yield
            torch.cuda.current_stream().synchronize()
    else:
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as own:
            yield
            own.synchronize()


@check("D04", "dirtied memory", level=0, cases=sweep("D04", _SHAPES, dtypes=one))
def dirtied(ctx: Context, case: Case) -> Outcome:
    """Between calls freed memory is full of NaN, and another call has other shapes: what is read
    before it is written, or kept from another call, shows."""
    asked = ask(case)
    first = call(ctx, asked)
    found = [judge.forward(asked, first, ctx.manifest)]
    for index, size in enumerate((1 << 12, 1 << 16, 1 << 20, 1 << 22)):
        # many sizes, so that every free list has poison in it
        poison = [np.full(size // (1 << i), np.nan, np.float32) for i in range(8)]
        held = [ctx.kind.make(_flat(x)) for x in poison]
        del held, poison
        if index == 2:
            params = {**case.params, "n": case.params["n"] + 7, "m": case.params["m"] + 9}
            if not case.params.get("causal"):
                found.append(judged(ctx, ask(replace(case, params=params))))
        found.append(_same(call(ctx, asked).raw.values, first.raw.values, "out"))
    return judge.all_of(found)


def _flat(x: NDArray) -> Any:
    from portattn.conformance.placement import lay

    return lay(x, "contiguous")


@check(
    "D05",
    "fresh process",
    level=0,
    cases=sweep("D05", {"smoke": [{"n": 129, "m": 203, "h": 2}]}, dtypes=two),
)
def fresh_process(ctx: Context, case: Case) -> Outcome:
    """Another process gives the same bits: nothing hangs on what ran before, or on addresses."""
    asked = ask(case)
    outcome = judged(ctx, asked)
    if case.params.get("fresh"):
        return outcome
    other = ctx.fresh_process(replace(case, params={**case.params, "fresh": True}))
    if other.cause:
        return replace(outcome, cause=other.cause, message=f"fresh process: {other.message}")
    differs = other.digests.get("output") != ctx.digests["output"]
    message = "a fresh process gave other bits" if differs else outcome.message
    return replace(outcome, numbers={**outcome.numbers, _COUNT: int(differs)}, message=message)
