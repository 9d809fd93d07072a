"""What the checks share: cases out of rows of shapes, and judged calls.

The rule kept here: a case follows from the manifest. Head dims are moved to the nearest claimed
one, every claimed dtype is asked, and a case that uses a feature which the target does not claim
is ``optional``: it must be refused, and being refused costs nothing. A check whose level rests on
the feature itself says ``must=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from portattn.conformance import judge, reference
from portattn.conformance.case import TIERS, Case, Cases, Outcome
from portattn.conformance.context import Context, Decided, Gradients, Result
from portattn.conformance.generators import LENGTHS, ask, shape
from portattn.conformance.manifest import Manifest
from portattn.conformance.reference import Array, Attention

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
Dtypes = Callable[[Manifest], Iterable[str]]


# ---- cases ---------------------------------------------------------------------------------------
def every(manifest: Manifest) -> Iterable[str]:
    """All claimed dtypes."""
    return manifest.dtypes


def one(manifest: Manifest) -> Iterable[str]:
    """One dtype, float32 where claimed: for what does not depend on it."""
    return ("float32",) if "float32" in manifest.dtypes else manifest.dtypes[:1]


def two(manifest: Manifest) -> Iterable[str]:
    """One wide dtype and one half dtype, where claimed."""
    halves = [x for x in ("bfloat16", "float16") if x in manifest.dtypes][:1]
    return dict.fromkeys([*one(manifest), *halves])


def half(manifest: Manifest) -> Iterable[str]:
    """One half dtype where claimed, for what is large."""
    halves = [x for x in ("float16", "bfloat16") if x in manifest.dtypes]
    return (halves or manifest.dtypes)[:1]


def unscaled(manifest: Manifest) -> Iterable[str]:
    """Dtypes in which scaling by a power of two is exact; float16 has subnormals nearby."""
    return [x for x in manifest.dtypes if x != "float16"]


def head_dim(manifest: Manifest, wanted: int) -> int:
    """The claimed head dim nearest to ``wanted``."""
    if manifest.head_dims is None:
        return min(wanted, manifest.max_head_dim or wanted)
    return min(manifest.head_dims, key=lambda d: (abs(d - wanted), d))


def sweep(
    check: str,
    rows: Rows,
    *,
    dtypes: Dtypes = every,
    smoke: Dtypes | None = None,
    needs: Sequence[str] = (),
    must: bool = False,
    fit: bool = True,
) -> Cases:
    """The cases of ``rows``: for each tier, from the smallest to the one run, the arguments of
    `generators.shape`; each for every dtype, the smoke tier's for those of ``smoke`` where given.
    ``needs`` are features that the check itself adds; ``fit`` moves head dims to claimed ones."""

    def cases(manifest: Manifest, tier: str) -> Iterator[Case]:
        seen = set()
        for stage in TIERS[: TIERS.index(tier) + 1]:
            kinds = smoke if smoke and stage == "smoke" else dtypes
            for row in rows.get(stage, ()):
                for dtype in kinds(manifest):
                    made = case_of(check, manifest, dtype, row, needs=needs, must=must, fit=fit)
                    if made.name not in seen:
                        seen.add(made.name)
                        yield made

    return cases


def case_of(
    check: str,
    manifest: Manifest,
    dtype: str,
    row: Mapping[str, Any],
    *,
    needs: Sequence[str] = (),
    must: bool = False,
    fit: bool = True,
) -> Case:
    """One case of one row."""
    row = dict(row)
    if fit:
        dims = {name: head_dim(manifest, row[name]) for name in ("d", "dv") if name in row}
        row |= {"d": head_dim(manifest, 64)} | dims
    params = shape(dtype, **row)
    optional = not must and not claimed(manifest, params, needs)
    return Case(check, label(params), params, optional=optional)


def claimed(manifest: Manifest, params: Mapping[str, Any], needs: Sequence[str] = ()) -> bool:
    """Does the manifest cover what the params and ``needs`` ask for?"""
    features = [x for x in ("scale", "causal", "window", "softcap") if params.get(x)]
    features += ["gqa"] * (params["h"] != params["hk"])
    features += ["value_head_dim"] * (params["d"] != params["dv"])
    causal = params.get("causal")
    return not manifest.why_not(
        dtype=params["dtype"],
        head_dim=params["d"],
        head_dim_v=params["dv"],
        features=[*features, *needs],
        alignment=causal if isinstance(causal, str) else None,
        sizes=(params["b"], params["n"], params["m"]),
    )


def label(params: Mapping[str, Any]) -> str:
    """A stable name: dtype, shape, and what else differs from the plainest call."""
    p = dict(params)
    text = f"{p.pop('dtype')}-b{p.pop('b')}h{p.pop('h')}n{p.pop('n')}m{p.pop('m')}d{p.pop('d')}"
    plain = {"hk": params["h"], "dv": params["d"], "data": "normal"}
    for name, value in p.items():
        if value != plain.get(name, object()):
            text += f"-{value}" if isinstance(value, str) else f"-{name}{_short(value)}"
    return text


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "_".join(_short(x) for x in value)
    return "" if value is True else str(value)


def tails(*, smoke: Sequence[int] = (1, 33, 65, 129), **fixed: Any) -> Rows:
    """Rows that walk the lengths around tile edges, the longest on a single head."""
    cpu = [n for n in LENGTHS if n not in smoke and n < 1000]
    long = [dict(fixed, n=n, h=1) for n in LENGTHS if n >= 1000]
    return {
        "smoke": [dict(fixed, n=n) for n in smoke],
        "cpu": [*(dict(fixed, n=n) for n in cpu), *long],
    }


# ---- judged calls --------------------------------------------------------------------------------
def call(ctx: Context, asked: Attention, **how: Any) -> Result:
    """The target's answer to ``asked``."""
    return ctx.forward(asked.q, asked.k, asked.v, **asked.options, **how)


def judged(
    ctx: Context, asked: Attention, *, naive: bool = False, spread: bool = False, **how: Any
) -> Outcome:
    """Call the target and measure its answer. ``naive`` and ``spread`` as in `judge.forward`."""
    result = call(ctx, asked, **how)
    return judge.forward(asked, result, ctx.manifest, naive=naive, spread=spread)


def differentiate(
    ctx: Context,
    asked: Attention,
    dout: Array,
    *,
    dlse: Array | None = None,
    result: Result | None = None,
    **how: Any,
) -> Gradients:
    """The target's gradients, from its own output and LSE."""
    result = result or call(ctx, asked)
    options = asked.options | ({} if dlse is None else {"dlse": dlse})
    return ctx.backward(asked.q, asked.k, asked.v, result.out, result.lse, dout, **options, **how)


def judged_backward(
    ctx: Context, asked: Attention, dout: Array, *, dlse: Array | None = None, **how: Any
) -> Outcome:
    """Differentiate and measure."""
    dout = where_defined(ctx, asked, dout)
    gradients = differentiate(ctx, asked, dout, dlse=dlse, **how)
    loose = states(ctx, "sums_in_dtype")
    return judge.backward(asked, dout, gradients, ctx.manifest, dlse, sums_in_dtype=loose)


def where_defined(ctx: Context, asked: Attention, dout: Array) -> Array:
    """``dout``, zero in empty rows where the target declares something else than 0 for them: what
    such a row sends back is then its own affair."""
    if ctx.manifest.empty_rows == "zero":
        return dout
    empty = np.isneginf(reference.forward(asked)[1])
    return np.where((empty.T if asked.packed else empty)[..., None], 0, dout).astype(dout.dtype)


def unless_refused(run: Callable[[], Outcome], what: str, *, gate: str = "") -> Outcome:
    """``run``, where the contract leaves a refusal open although the feature is claimed. The
    refusal is counted as ``{what}_refused``; with ``gate="_warn"`` it is a warning."""
    try:
        return run()
    except Decided as decided:
        if decided.cause != "claimed_but_refused":
            raise
        return Outcome({f"{what}_refused{gate}": 2}, message=str(decided))


def states(ctx: Context, what: str) -> bool:
    """Does the target say of itself, in an attribute ``states``, that it departs from the contract
    in this way? Then it is not accused of it, and has not passed either. Known: "nan_spreads"
    (hidden values are multiplied by 0, as unfused attention does), "sums_in_dtype" (dk and dv are
    summed over query tiles in their own dtype)."""
    return what in getattr(ctx.target, "states", ())


def measured(**how: Any) -> Callable[[Context, Case], Outcome]:
    """A check body: the case's call, judged."""

    def run(ctx: Context, case: Case) -> Outcome:
        return judged(ctx, ask(case), **how)

    return run


def compared(
    ctx: Context, a: Result, b: Result, one: Attention, other: Attention, what: str = "out"
) -> Outcome:
    """Two answers that must agree: within the sum of their bounds, output and LSE."""
    bound_a, lse_a = judge.limits(one, ctx.manifest)
    bound_b, lse_b = judge.limits(other, ctx.manifest)
    found = [judge.within(a.out, b.out, bound_a + bound_b, what)]
    if a.lse is not None and b.lse is not None:
        found.append(judge.within(a.lse, b.lse, lse_a + lse_b, "lse"))
    return judge.all_of(found)


def onehot(asked: Attention, start: int, width: int) -> Attention:
    """v such that output column c holds the weight of key start + c."""
    v = np.zeros((*asked.v.shape[:-1], width), asked.v.dtype)
    for c in range(min(width, v.shape[-2] - start)):
        v[..., start + c, c] = 1
    return asked.having(v=v)


def attended(ctx: Context, asked: Attention) -> Array:
    """(B, Hq, n, m): the weight that the target gives each key, read off through one-hot values
    a head dim at a time."""
    n, m, width = asked.q.shape[2], asked.k.shape[2], asked.v.shape[-1]
    weight = np.zeros((*asked.q.shape[:2], n, m))
    for start in range(0, m, width):
        part = call(ctx, onehot(asked, start, width)).out
        weight[..., start : start + width] = part[..., : m - start]
    return weight


def equal_scores(asked: Attention) -> Attention:
    """The same call with q = 0: every visible key weighs the same, exactly."""
    return asked.having(q=np.zeros_like(asked.q))
