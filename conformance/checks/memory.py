"""R: memory. What a call needs beyond its inputs and outputs must not grow with N^2, must stay a
share of what it reads and writes, and must be given back.

A log-log slope alone misses row strips, copies of K and V, upcasts and split partials; hence a
quadratic coefficient, a share kappa of the IO, a hard limit, and single allocations.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import numpy as np

from portattn.conformance import judge
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import Rows, call, differentiate, one, sweep, two
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast, cumulative, generator, pack, paged, upstream
from portattn.conformance.meters import Memory
from portattn.conformance.reference import Attention

QUADRATIC = 2.0**-10
"""Bytes per N^2: above it lies any table with an entry for a pair of tiles."""

NOISE = 8 << 10
"""Bytes by which a workspace differs from call to call: threads that meet or do not."""

KEPT = 64 << 10
"""Bytes that a call, or a hundred, may leave behind: objects, not arrays."""

REPEATS = 2

Body = Callable[[Context, Case], Outcome]


def claiming(kappa: str) -> Callable[[Body], Body]:
    """Only for targets whose ``kappa`` (or ``kappa_backward``) is a number: null says that scores
    are stored whole, and claims nothing of memory."""

    def decorate(body: Body) -> Body:
        @wraps(body)
        def run(ctx: Context, case: Case) -> Outcome:
            if math.isinf(getattr(ctx.manifest, kappa)):
                return Outcome.not_supported(f"{kappa} is null: no claim on memory")
            return body(ctx, case)

        return run

    return decorate


def io_bytes(asked: Attention) -> int:
    """q, k, v, out, LSE, mask and bias as stored."""
    width = 8 if str(asked.q.dtype) == "float64" else 4
    given = (asked.q, asked.k, asked.v, asked.mask, asked.bias)
    stored = sum(x.nbytes for x in given if x is not None)
    rows = int(np.prod(asked.lse_shape, dtype=np.int64))
    return int(stored + rows * (asked.v.shape[-1] * asked.q.itemsize + width))


def forward_memory(ctx: Context, asked: Attention, repeats: int = REPEATS) -> Memory:
    """The least of a few measurements of a call that is warm."""
    call(ctx, asked)
    taken = [call(ctx, asked, measure=True).raw.memory for _ in range(repeats)]
    return min((x for x in taken if x is not None), key=lambda x: x.workspace)


def backward_memory(ctx: Context, asked: Attention, case: Case) -> Memory:
    """Likewise of the backward pass."""
    result, dout = call(ctx, asked), upstream(case, asked)
    differentiate(ctx, asked, dout, result=result)
    taken = [
        differentiate(ctx, asked, dout, result=result, measure=True).memory for _ in range(REPEATS)
    ]
    return min((x for x in taken if x is not None), key=lambda x: x.workspace)


def series(ctx: Context, case: Case, *, backward: bool = False) -> dict[int, int]:
    """Workspace by length, over the lengths that double up to the case's own."""
    found = {}
    for n in (case.params["n"] >> shift for shift in (3, 2, 1, 0)):
        asked = ask(replace(case, params={**case.params, "n": n, "m": n}))
        memory = backward_memory(ctx, asked, case) if backward else forward_memory(ctx, asked)
        found[n] = memory.workspace
    return found


def quadratic(found: dict[int, int]) -> Outcome:
    """c of a + bN + cN^2 from the second difference over N, 2N and 4N.

    The smaller of two such triples counts: a quadratic term shows in both, while a buffer that
    outgrows another one, which is linear still, bends the curve in one of them only.
    """
    (n, *_), sizes = found, list(found.values())
    triples = ((n, sizes[:3]), (2 * n, sizes[1:]))
    c = min((z - 3 * y + 2 * x - NOISE) / (6 * at * at) for at, (x, y, z) in triples)
    numbers = {f"workspace_{length}": float(size) for length, size in found.items()}
    message = f"workspace grows by {c:.3g} N^2 bytes; limit {QUADRATIC:.3g}"
    over = max(c, 0.0) / QUADRATIC
    return Outcome({**numbers, "quadratic_over": over}, message=message if over > 1 else "")


def share(memory: Memory, asked: Attention, kappa: float, extra: int = 0) -> Outcome:
    """Workspace over IO, in units of kappa."""
    io = io_bytes(asked) + extra
    over = memory.workspace / (kappa * io) if kappa else float(memory.workspace > KEPT) * 2
    message = ""
    if over > 1:
        message = f"workspace {memory.workspace} B beside {io} B of IO; kappa {kappa}"
    return Outcome({"share_over": over, "peak_bytes": memory.peak}, message=message)


_SERIES: Rows = {
    "smoke": [{"n": 8192, "h": 1, "d": 16}],
    "cpu": [{"n": 8192, "h": 1, "d": 64}, {"n": 8192, "h": 1, "d": 64, "causal": True}],
    "gpu": [{"n": 32768, "h": 2, "d": 128}, {"n": 32768, "h": 2, "d": 128, "causal": True}],
}


@check("R01", "no quadratic term", level=2, cases=sweep("R01", _SERIES, dtypes=one), alone=True)
@claiming("kappa")
def no_quadratic_term(ctx: Context, case: Case) -> Outcome:
    """The coefficient of N^2 over three doublings of the length."""
    return quadratic(series(ctx, case))


# B <= 2, H <= 4 on a CPU: from N = 1024 on there is IO enough for kappa to mean something
_SHARE: Rows = {
    "smoke": [{"n": 1024, "b": 2, "h": 4, "d": 128}],
    "cpu": [
        {"n": 2048, "b": 2, "h": 4, "d": 64},
        {"n": 1024, "b": 2, "h": 4, "d": 256},
        {"n": 1024, "b": 2, "h": 4, "d": 128, "causal": True},
    ],
    "gpu": [{"n": n, "b": 2, "h": 16, "d": 128} for n in (1024, 8192)],
}


@check("R02", "workspace over IO", level=2, cases=sweep("R02", _SHARE, dtypes=two), alone=True)
@claiming("kappa")
def workspace_share(ctx: Context, case: Case) -> Outcome:
    """At most kappa of q, k, v, out and LSE: a copy of K and V, an upcast, a strip of scores per
    row lie above it."""
    asked = ask(case)
    return share(forward_memory(ctx, asked), asked, ctx.manifest.kappa)


@check(
    "R03",
    "no single allocation of N^2/8",
    level=2,
    cases=sweep("R03", _SERIES, dtypes=two),
    alone=True,
)
@claiming("kappa")
def single_allocation(ctx: Context, case: Case) -> Outcome:
    """Not even one bit for each pair. Where the meter cannot tell single allocations, all of the
    workspace must stay below it."""
    asked = ask(case)
    memory = forward_memory(ctx, asked, repeats=1)
    outputs = asked.q.nbytes // asked.q.shape[-1] * asked.v.shape[-1]
    limit = case.params["n"] ** 2 / 8
    largest = memory.workspace
    if memory.largest is not None and memory.largest != outputs:
        largest = min(largest, memory.largest)
    over = largest / limit
    message = f"{largest} B at once; limit {limit:.0f} B" if over > 1 else ""
    return Outcome({"allocation_over": over}, message=message)


_LIMITED: Rows = {
    "smoke": [{"n": 8192, "h": 1, "d": 16}],
    "cpu": [{"n": 8192, "h": 1, "d": 64, "causal": True}],
    "gpu": [{"n": 32768, "h": 1, "d": 128}],
}


@check(
    "R04",
    "runs in less than N^2 bytes",
    level=2,
    cases=sweep("R04", _LIMITED, dtypes=one),
    alone=True,
)
@claiming("kappa")
def hard_limit(ctx: Context, case: Case) -> Outcome:
    """Under a limit on address space (a pool's size on a GPU): beyond it the case ends as OOM."""
    asked = ask(case)
    warm = ask(replace(case, params={**case.params, "n": 512, "m": 512}))
    call(ctx, warm)
    call(ctx, asked, headroom=case.params["n"] ** 2 - 1)
    return Outcome({"limit_bytes": float(case.params["n"] ** 2 - 1)})


_BACKWARD: Rows = {
    "smoke": [{"n": 8192, "h": 1, "d": 16}],
    "cpu": [{"n": 8192, "h": 1, "d": 64}],
    "gpu": [{"n": 16384, "h": 2, "d": 128}],
}


@check(
    "R05",
    "backward: no quadratic term, a share of IO",
    level=3,
    cases=sweep("R05", _BACKWARD, dtypes=one, needs=["backward"]),
    alone=True,
)
@claiming("kappa_backward")
def backward_workspace(ctx: Context, case: Case) -> Outcome:
    """IO here is that of the forward pass, dout, dq, dk and dv. Scores are recomputed."""
    found = [quadratic(series(ctx, case, backward=True))]
    params = {**case.params, "n": 1024, "m": 1024, "b": 2, "h": 4, "hk": 4}
    asked = ask(replace(case, params=params))
    memory = backward_memory(ctx, asked, replace(case, params=params))
    extra = 2 * asked.q.nbytes + asked.k.nbytes + asked.v.nbytes
    found.append(share(memory, asked, ctx.manifest.kappa_backward, extra))
    return judge.all_of(found)


@check(
    "R06",
    "only out and LSE are kept for backward",
    level=2,
    cases=sweep(
        "R06",
        {"smoke": [{"n": 1024, "h": 2, "d": 64}], "gpu": [{"n": 8192, "h": 8, "d": 128}]},
        dtypes=two,
    ),
    alone=True,
)
def kept(ctx: Context, case: Case) -> Outcome:
    """What is still in use after the forward pass, beyond what it returned."""
    asked = ask(case)
    call(ctx, asked)
    left = []
    for _ in range(REPEATS):
        raw = call(ctx, asked, measure=True).raw
        outputs = raw.values.nbytes + (0 if raw.lse_values is None else raw.lse_values.nbytes)
        left.append(raw.memory.left - outputs if raw.memory is not None else 0)
    over = max(min(left), 0) / KEPT
    message = f"{min(left)} B are left beside out and LSE" if over > 1 else ""
    return Outcome({"kept_over": over}, message=message)


@check(
    "R07",
    "nothing grows over 100 calls",
    level=2,
    cases=sweep("R07", {"smoke": [{"n": 33, "m": 65, "h": 2, "d": 32}]}, dtypes=one),
    alone=True,
)
def leaks(ctx: Context, case: Case) -> Outcome:
    """A hundred calls in turn over five shapes, results dropped (BUG-085)."""
    asked = [
        ask(replace(case, params={**case.params, "n": 33 + i, "m": 65 + 2 * i})) for i in range(5)
    ]
    backward = ctx.manifest.claims("backward")
    results = [call(ctx, x) for x in asked]
    douts = [upstream(case, x) for x in asked]

    def rounds(count: int) -> None:
        for _ in range(count):
            for x, result, dout in zip(asked, results, douts, strict=True):
                attempt = ctx.attempt(x.q, x.k, x.v, **x.options)
                if attempt.error is not None:
                    raise attempt.error
                if backward:
                    differentiate(ctx, x, dout, result=result)
        gc.collect()  # cycles that wait for their collection are not yet a leak

    left = []
    for count in (4, 4, 24):
        with ctx.meter.watch() as watched:
            rounds(count)
        assert watched.memory is not None
        left.append(watched.memory.left)
    # the context keeps a few outputs to look at again: both of the last two saw them come
    growth = left[2] - left[1]
    message = f"{growth} B more after 100 calls" if growth > KEPT else ""
    return Outcome({"growth_over": max(growth, 0) / KEPT}, message=message)


_GROUPED: Rows = {
    "smoke": [{"n": 16, "m": 32768, "h": 8, "hk": 1, "d": 64}],
    "cpu": [{"n": 64, "m": 32768, "h": 16, "hk": 2, "d": 64}],
    "gpu": [{"n": 256, "m": 12288, "h": 16, "hk": 2, "d": 256, "b": 4}],
}


@check(
    "R08",
    "K and V are not expanded for grouped heads",
    level=2,
    cases=sweep("R08", _GROUPED, dtypes=two, smoke=one),
    alone=True,
)
@claiming("kappa")
def grouped(ctx: Context, case: Case) -> Outcome:
    """Nor copied: K and V are nearly all of the IO here; and their gradients in backward stay
    compact (BUG-048)."""
    asked = ask(case)
    found = [share(forward_memory(ctx, asked), asked, ctx.manifest.kappa)]
    if ctx.manifest.claims("backward") and math.isfinite(ctx.manifest.kappa_backward):
        memory = backward_memory(ctx, asked, case)
        # float32 sums of dk and dv, in the size of k and v
        sums = 4 * (asked.k.size + asked.v.size)
        extra = 2 * asked.q.nbytes + asked.k.nbytes + asked.v.nbytes
        limit = ctx.manifest.kappa_backward * (io_bytes(asked) + extra) + sums
        over = memory.workspace / limit
        message = f"backward: {memory.workspace} B; limit {limit:.0f} B" if over > 1 else ""
        found.append(Outcome({"backward_over": over}, message=message))
    return judge.all_of(found)


@check(
    "R09",
    "a broadcast mask or bias is not expanded",
    level=2,
    cases=sweep(
        "R09",
        {
            "smoke": [{"n": 1024, "b": 2, "h": 4, "d": 64}],
            "cpu": [{"n": 2048, "b": 2, "h": 4, "d": 64}],
            "gpu": [{"n": 4096, "b": 4, "h": 16, "d": 128}],
        },
        dtypes=one,
        needs=["mask"],
    ),
    alone=True,
)
@claiming("kappa")
def broadcast(ctx: Context, case: Case) -> Outcome:
    """One (Sq, Sk) mask for all heads, with grouped heads where claimed (BUG-013, BUG-082: mask
    and groups together fell back to the unfused path)."""
    params = dict(case.params)
    if ctx.manifest.claims("gqa"):
        params["hk"] = params["h"] // 2
    asked = ask(replace(case, params=params))
    n, rng = asked.q.shape[2], generator(case, 1)
    masked = asked.having(mask=rng.random((1, 1, n, n)) < 0.9)
    added = cast(rng.standard_normal((1, 1, n, n)), case.params["dtype"])
    plain = forward_memory(ctx, asked).workspace
    found = [_not_expanded(ctx, masked, plain, 1)]
    if ctx.manifest.claims("bias"):
        found.append(_not_expanded(ctx, asked.having(bias=added), plain, added.itemsize))
    return judge.all_of(found)


def _not_expanded(ctx: Context, asked: Attention, plain: int, item: int) -> Outcome:
    """Beyond what the same call needs without it, less than half of the expanded array."""
    memory, n = forward_memory(ctx, asked), asked.q.shape[2]
    expanded = asked.batch * asked.heads[0] * n * n * item
    over = (memory.workspace - plain) / (expanded / 2)
    message = f"{memory.workspace} B with it, {plain} B without" if over > 1 else ""
    return Outcome({"broadcast_over": max(over, 0.0)}, message=message)


_DECODE: Rows = {
    "smoke": [{"n": 1, "m": 32768, "h": 2, "d": 128}],
    "cpu": [{"n": 4, "m": 65536, "h": 2, "d": 128}],
    "gpu": [{"n": n, "m": 131072, "h": 8, "d": 128} for n in (1, 16)],
}


@check(
    "R10", "decode: split partials", level=2, cases=sweep("R10", _DECODE, dtypes=two), alone=True
)
@claiming("kappa")
def partials(ctx: Context, case: Case) -> Outcome:
    """Partial outputs of a split over the keys, and no upcast of a long K and V."""
    asked = ask(case)
    return share(forward_memory(ctx, asked), asked, ctx.manifest.kappa)


_SERVED: Rows = {
    "smoke": [{"n": 1024, "b": 2, "h": 8, "d": 128}],
    "gpu": [{"n": 8192, "b": 2, "h": 16, "d": 128}],
}


@check(
    "R11",
    "packed and paged: no padding, no gathering",
    level=4,
    cases=sweep("R11", _SERVED, dtypes=one, needs=["packed"]),
    alone=True,
)
@claiming("kappa")
def served(ctx: Context, case: Case) -> Outcome:
    """One long sequence beside short ones must not be padded to its length, nor pages be gathered
    before they are read: either lies above kappa."""
    asked, b, n = ask(case), case.params["b"], case.params["n"]
    lens = [n, *[1] * 7]
    q, k, v = (pack([x[0], x[1][:, :7]]) for x in (asked.q, asked.k, asked.v))
    packed = Attention(q, k, v, cu_seqlens_q=cumulative(lens), cu_seqlens_k=cumulative(lens))
    found = [share(forward_memory(ctx, packed), packed, ctx.manifest.kappa)]
    if ctx.manifest.claims("paged"):
        k, v, table = paged(generator(case, 1), asked.k, asked.v, [n] * b, 64)
        used = np.full(b, n, np.int32)
        pages = Attention(asked.q[:, :, :64], k, v, block_table=table, seqused_k=used)
        found.append(share(forward_memory(ctx, pages), pages, ctx.manifest.kappa))
    return judge.all_of(found)
