"""C: errors. What is malformed or unknown is refused before anything runs, by an exception that
stands for a refusal, and the next call works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from portattn.conformance import judge
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks.helpers import Rows, call, judged, one, sweep
from portattn.conformance.context import Context
from portattn.conformance.generators import ask, cast, cumulative, pack
from portattn.conformance.reference import Attention

_ONE: Rows = {"smoke": [{"n": 17, "m": 17, "h": 4, "b": 2}]}


def refuses(ctx: Context, asked: Attention, requests: Mapping[str, Mapping[str, Any]]) -> Outcome:
    """Every request, the arguments of ``asked`` with some replaced, must raise; then ``asked``
    itself must be right. An exception that is no refusal (`context.REFUSALS`) is a warning."""
    given = {"q": asked.q, "k": asked.k, "v": asked.v, **asked.options}
    accepted, other = [], []
    for name, changes in requests.items():
        attempt = ctx.attempt(**{**given, **changes})
        if attempt.error is None:
            accepted.append(name)
        elif not attempt.refused:
            other.append(f"{name}: {type(attempt.error).__name__}")
    found = judged(ctx, asked)
    numbers = {**found.numbers, "accepted_bad": len(accepted), "other_error_warn": 2 * len(other)}
    message = found.message
    if accepted:
        message = f"accepted: {', '.join(accepted)}"
    elif other:
        message = f"raised, but neither ValueError, TypeError nor Unsupported: {', '.join(other)}"
    return replace(found, numbers=numbers, message=message)


@check("C01", "unknown options are not swallowed", level=0, cases=sweep("C01", _ONE, dtypes=one))
def unknown(ctx: Context, case: Case) -> Outcome:
    """An option that a target does not know changes the answer its caller expects (BUG-061:
    dropout applied, or dropped, without a word)."""
    requests: dict[str, dict[str, Any]] = {
        "dropout_p=0.5": {"dropout_p": 0.5},
        "is_causal=True": {"is_causal": True},
        "attn_mask=...": {"attn_mask": np.ones((1, 1, 17, 17), bool)},
    }
    return refuses(ctx, ask(case), requests)


@check("C02", "shapes that do not fit", level=0, cases=sweep("C02", _ONE, dtypes=one))
def shapes(ctx: Context, case: Case) -> Outcome:
    """Ranks, head dims, head counts, lengths and batches."""
    asked = ask(case)
    q, k, v = asked.q, asked.k, asked.v
    requests: dict[str, dict[str, Any]] = {
        "q of three axes": {"q": q[0]},
        "k of another head dim": {"k": k[..., :-1]},
        "v shorter than k": {"v": v[:, :, :-1]},
        "three key heads for four": {"k": k[:, :3], "v": v[:, :3]},
        "v of other heads than k": {"v": v[:, :2]},
        "k of another batch": {"k": np.concatenate([k, k]), "v": np.concatenate([v, v])},
        "head dim 0": {"q": q[..., :0], "k": k[..., :0]},
    }
    return refuses(ctx, asked, requests)


@check("C03", "mixed and foreign dtypes", level=0, cases=sweep("C03", _ONE, dtypes=one))
def dtypes(ctx: Context, case: Case) -> Outcome:
    """No silent promotion (BUG-050), nothing read as what it is not (BUG-099)."""
    asked = ask(case)
    requests: dict[str, dict[str, Any]] = {}
    for kind in ("float16", "float32", "float64"):
        if kind == case.params["dtype"]:
            continue
        for names in ("q", "k", "v", "qk", "kv"):
            changed = {name: getattr(asked, name).astype(kind) for name in names}
            requests[f"{names} {kind}"] = changed
    for kind in ("int32", "bool"):
        requests[f"all {kind}"] = {n: getattr(asked, n).astype(kind) for n in "qkv"}
    return refuses(ctx, asked, requests)


@check("C04", "option values that mean nothing", level=0, cases=sweep("C04", _ONE, dtypes=one))
def values(ctx: Context, case: Case) -> Outcome:
    """Negative windows taken as infinite (BUG-060), NaN scales, caps of 0; causal=True where the
    two alignments differ."""
    asked = ask(case)
    short = asked.q[:, :, :5]
    requests: dict[str, dict[str, Any]] = {
        "scale=nan": {"scale": float("nan")},
        "scale=inf": {"scale": float("inf")},
        "softcap=0": {"softcap": 0.0},
        "softcap=-1": {"softcap": -1.0},
        "causal='centre'": {"causal": "centre"},
        "window=(-1, -3)": {"window": (-1, -3)},
        "window=(-2, 0)": {"window": (-2, 0)},
        "window=(2.5, 0)": {"window": (2.5, 0)},
        "window=3": {"window": 3},
        "causal=True, Sq != Sk": {"q": short, "causal": True},
    }
    return refuses(ctx, asked, requests)


@check("C05", "masks and biases that do not fit", level=0, cases=sweep("C05", _ONE, dtypes=one))
def masks(ctx: Context, case: Case) -> Outcome:
    """Longer than Sk, of heads that are not there, of the other's dtype."""
    asked = ask(case)
    mask, added = np.ones((1, 1, 17, 17), bool), np.zeros((1, 1, 17, 17), np.float32)
    requests: dict[str, dict[str, Any]] = {
        "a mask longer than Sk": {"mask": np.ones((1, 1, 17, 18), bool)},
        "a mask of three heads": {"mask": np.ones((1, 3, 17, 17), bool)},
        "a mask of five axes": {"mask": mask[None]},
        "a float mask": {"mask": added},
        "a bool bias": {"bias": mask},
        "an integer bias": {"bias": added.astype(np.int32)},
        "a bias of three batches": {"bias": np.zeros((3, 1, 17, 17), np.float32)},
        "sinks of another count": {"sinks": np.zeros(3, np.float32)},
        "slopes of another count": {"alibi_slopes": np.zeros(3, np.float32)},
    }
    return refuses(ctx, asked, requests)


@check(
    "C06",
    "lengths and tables that lie",
    level=0,
    cases=sweep("C06", _ONE, dtypes=one, needs=["packed"]),
)
def tables(ctx: Context, case: Case) -> Outcome:
    """cu_seqlens that do not increase or do not end at T; seqused_k beyond Sk; page numbers that
    do not exist."""
    asked = ask(case)
    packed = asked.having(
        q=pack(list(asked.q)),
        k=pack(list(asked.k)),
        v=pack(list(asked.v)),
        cu_seqlens_q=cumulative([17, 17]),
        cu_seqlens_k=cumulative([17, 17]),
    )
    own = judged(ctx, packed)
    if ctx.manifest.device != "cpu":
        return own  # lengths on a device are data that a launch cannot look at
    bad = {
        "that decrease": np.asarray([0, 20, 17, 34], np.int32),
        "that end early": np.asarray([0, 17, 30], np.int32),
        "that start late": np.asarray([3, 17, 34], np.int32),
        "of int64": np.asarray([0, 17, 34], np.int64),
    }
    requests: dict[str, dict[str, Any]] = {
        f"cu_seqlens_q {name}": {"cu_seqlens_q": x, "layout": "thd"} for name, x in bad.items()
    }
    requests["no cu_seqlens_k"] = {"cu_seqlens_k": None, "layout": "thd"}
    given = {"q": packed.q, "k": packed.k, "v": packed.v, **packed.options}
    accepted = [
        name
        for name, changes in requests.items()
        if ctx.attempt(**{**given, **changes}).error is None
    ]
    if ctx.manifest.claims("seqused_k"):
        for used in ([17, 18], [-1, 3]):
            attempt = ctx.attempt(asked.q, asked.k, asked.v, seqused_k=np.asarray(used, np.int32))
            accepted += [f"seqused_k={used}"] * (attempt.error is None)
    message = f"accepted: {', '.join(accepted)}" if accepted else own.message
    after = judged(ctx, packed)
    numbers = {**judge.all_of([own, after]).numbers, "accepted_bad": len(accepted)}
    return replace(own, numbers=numbers, message=message)


@check("C07", "no option outlives its call", level=0, cases=sweep("C07", _ONE, dtypes=one))
def stale(ctx: Context, case: Case) -> Outcome:
    """Calls of one shape that differ in one option, in both orders: a plan cached without its
    scale answers the second with the first (BUG-072)."""
    asked = ask(case)
    rng = np.random.default_rng(case.seed)
    shown = rng.random((1, 1, 17, 17)) < 0.6
    shown[..., 0] = True
    variants: dict[str, dict[str, Any]] = {
        "scale": {"scale": 2.0},
        "softcap": {"softcap": 1.5},
        "window": {"window": (3, 2)},
        "causal": {"causal": True},
        "mask": {"mask": shown},
        "bias": {"bias": cast(rng.standard_normal((1, 1, 17, 17)), case.params["dtype"])},
        "value_head_dim": {"v": asked.v[..., : asked.v.shape[-1] // 2]},
    }
    variants = {n: c for n, c in variants.items() if _claimed(ctx, asked, n, c)}
    found = []
    for changes in variants.values():
        other = asked.having(**changes)
        found += [judged(ctx, other), judged(ctx, asked)]
    calls = [asked.having(**changes) for changes in variants.values()]
    for a, b in _pairs(calls):
        found.append(judge.forward(b, _second(ctx, a, b), ctx.manifest))
    return judge.all_of(found or [judged(ctx, asked)])


def _pairs(calls: list[Attention]) -> Iterator[tuple[Attention, Attention]]:
    for index, a in enumerate(calls):
        for b in calls[index + 1 :]:
            yield a, b
            yield b, a


def _second(ctx: Context, a: Attention, b: Attention) -> Any:
    call(ctx, a)
    return call(ctx, b)


def _claimed(ctx: Context, asked: Attention, name: str, changes: Mapping[str, Any]) -> bool:
    other = asked.having(**changes)
    del name
    return not ctx.outside_of(other.q, other.k, other.v, other.options)
