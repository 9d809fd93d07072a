"""The oracle against the definition written out in loops, and the bounds against correct emulated
kernels: every bound must hold, and none may be so wide that it says nothing."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from portattn.conformance import bounds, generators, judge, reference
from portattn.conformance.bounds import Forward, Precision
from portattn.conformance.case import Case
from portattn.conformance.context import Context, Gradients, Result
from portattn.conformance.manifest import Manifest
from portattn.conformance.mutants.tiled import Tiled
from portattn.conformance.placement import DTYPES
from portattn.conformance.reference import Attention

DTYPE_NAMES = ("float16", "bfloat16", "float32", "float64")


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def a_call(seed: int = 0, **options: Any) -> Attention:
    """A small float64 call with groups, unequal lengths and Dv != D."""
    q, k, v = arrays(seed, (2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6))
    return Attention(q, k, v, **options)


def ask(dtype: str, data: str, seed: int = 0, **shape: Any) -> tuple[Case, Attention]:
    case = Case("F01", data, generators.shape(dtype, data=data, **shape), seed=seed)
    return case, generators.ask(case)


class Emulated(Tiled):
    """The correct tiled implementation, in the arithmetic of various machines."""

    def __init__(self, block_q: int = 64, block_k: int = 64, p_storage: str = "input"):
        self.block_q, self.block_k, self.p_storage = block_q, block_k, p_storage

    def manifest(self) -> dict[str, Any]:
        return {**super().manifest(), "p_storage": self.p_storage}

    def stored(self, p: Any, dtype: Any) -> Any:
        return p if self.p_storage == "fp32" else super().stored(p, dtype)


def context(**how: Any) -> Context:
    target = Emulated(**how)
    return Context(target, Manifest.parse(target.manifest()))


def answer(ctx: Context, asked: Attention) -> Result:
    return ctx.forward(asked.q, asked.k, asked.v, **asked.options)


def gradients(ctx: Context, asked: Attention, dout: Any, result: Result, **more: Any) -> Gradients:
    return ctx.backward(
        asked.q, asked.k, asked.v, result.out, result.lse, dout, **asked.options, **more
    )


# ---- the oracle ----------------------------------------------------------------------------------
def by_hand(asked: Attention) -> tuple[Any, Any]:
    """CONTRACT.md's table, one score at a time."""
    batch, heads, rows, dim = asked.q.shape
    out, lse = np.zeros(asked.out_shape), np.zeros(asked.lse_shape)
    scale = dim**-0.5 if asked.scale is None else asked.scale
    for b in range(batch):
        used = asked.k.shape[2] if asked.seqused_k is None else int(asked.seqused_k[b])
        for h in range(heads):
            g = h // (heads // asked.k.shape[1])
            for i in range(rows):
                own = i if asked.causal == "top_left" else i + used - rows
                terms: list[tuple[float, Any]] = []
                for j in range(used):
                    left, right = asked.window or (None, None)
                    if asked.causal and j > own:
                        continue
                    if (left is not None and j < own - left) or (
                        right is not None and j > own + right
                    ):
                        continue
                    if (
                        asked.mask is not None
                        and not np.broadcast_to(asked.mask, (batch, heads, rows, asked.k.shape[2]))[
                            b, h, i, j
                        ]
                    ):
                        continue
                    s = scale * float(asked.q[b, h, i] @ asked.k[b, g, j])
                    if asked.softcap:
                        s = asked.softcap * math.tanh(s / asked.softcap)
                    if asked.bias is not None:
                        s += np.broadcast_to(asked.bias, (batch, heads, rows, asked.k.shape[2]))[
                            b, h, i, j
                        ]
                    if asked.alibi_slopes is not None:
                        slope = np.broadcast_to(asked.alibi_slopes, (batch, heads))[b, h]
                        s -= slope * abs(i + used - rows - j)
                    if s > -math.inf:
                        terms.append((s, asked.v[b, g, j]))
                total = sum(math.exp(s) for s, _ in terms)
                if asked.sinks is not None:
                    total += math.exp(asked.sinks[h])
                lse[b, h, i] = math.log(total) if total else -math.inf
                for s, value in terms:
                    out[b, h, i] += math.exp(s) / total * value
    return out, lse


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -0.7},
    "top-left": {"causal": "top_left"},
    "bottom-right": {"causal": "bottom_right"},
    "window": {"window": (1, 0)},
    "window-top-left": {"window": (2, 1), "causal": "top_left"},
    "softcap": {"softcap": 0.5},
    "bias": {"bias": np.where(np.eye(3, 5, dtype=bool), -np.inf, np.arange(5.0))},
    "mask": {"mask": np.random.default_rng(1).random((2, 1, 3, 5)) < 0.5},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 1.0, 0.1])},
    "sinks": {"sinks": np.array([0.0, 2.0, -1.0, 5.0])},
    "seqused": {"seqused_k": np.array([2, 4]), "causal": "bottom_right"},
    "all": {
        "softcap": 2.0,
        "causal": "bottom_right",
        "window": (2, None),
        "mask": np.random.default_rng(2).random((1, 4, 3, 5)) < 0.7,
        "bias": np.linspace(-1, 1, 5),
        "alibi_slopes": np.array([[0.5, 0.25, 1.0, 0.1], [1.0, 0.5, 2.0, 0.2]]),
        "sinks": np.array([0.0, 2.0, -1.0, 5.0]),
        "seqused_k": np.array([5, 3]),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_oracle_is_the_definition(name: str) -> None:
    asked = a_call(**OPTIONS[name])
    out, lse = reference.forward(asked)
    want_out, want_lse = by_hand(asked)
    np.testing.assert_allclose(out, want_out, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, atol=1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_oracle_gradients_are_differences(name: str) -> None:
    options = dict(OPTIONS[name])
    if name == "bias":
        options = {"bias": np.linspace(-1, 1, 15).reshape(3, 5)}
    asked = a_call(**options)
    empty = np.isneginf(reference.forward(asked)[1])
    dout, dlse = arrays(5, asked.out_shape, asked.lse_shape)
    dlse = np.where(empty, 0, dlse)
    found = reference.backward(asked, dout, dlse)

    def loss(**changed: Any) -> float:
        out, lse = reference.forward(asked.having(**changed))
        return float((out * dout).sum() + (np.where(empty, 0, lse) * dlse).sum())

    for gradient, value in found.items():
        source = gradient[1:]
        at = np.asarray(getattr(asked, source), np.float64)
        (toward,) = arrays(9, at.shape)
        step = 1e-5
        slope = (loss(**{source: at + step * toward}) - loss(**{source: at - step * toward})) / (
            2 * step
        )
        assert float((value * toward).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-7), gradient


def test_packed_and_paged_are_the_same_numbers() -> None:
    q, k, v = arrays(0, (3, 4, 5, 4), (3, 2, 9, 4), (3, 2, 9, 6))
    lens_q, lens_k = [5, 0, 3], [9, 4, 0]
    packed = Attention(
        generators.pack([q[b, :, :n] for b, n in enumerate(lens_q)]),
        generators.pack([k[b, :, :n] for b, n in enumerate(lens_k)]),
        generators.pack([v[b, :, :n] for b, n in enumerate(lens_k)]),
        causal="bottom_right",
        cu_seqlens_q=generators.cumulative(lens_q),
        cu_seqlens_k=generators.cumulative(lens_k),
    )
    pages = generators.paged(np.random.default_rng(3), k, v, lens_k, 4)
    in_pages = Attention(
        q, pages[0], pages[1], causal="bottom_right", block_table=pages[2],
        seqused_k=np.asarray(lens_k, np.int32),
    )  # fmt: skip
    out, lse = reference.forward(packed)
    paged_out, _ = reference.forward(in_pages)
    for b, (n, m) in enumerate(zip(lens_q, lens_k, strict=True)):
        alone = Attention(
            q[b : b + 1, :, :n], k[b : b + 1, :, :m], v[b : b + 1, :, :m], causal="bottom_right"
        )
        want, want_lse = reference.forward(alone)
        np.testing.assert_array_equal(packed.queries(out, b), want[0])
        np.testing.assert_array_equal(packed.row_numbers(lse, b), want_lse[0])
        whole = Attention(q[b : b + 1], k[b : b + 1, :, :m], v[b : b + 1, :, :m],
                          causal="bottom_right")  # fmt: skip
        np.testing.assert_array_equal(paged_out[b], reference.forward(whole)[0][0])
    dout = arrays(4, in_pages.out_shape)[0]
    dk = reference.backward(in_pages, dout)["dk"]
    used = Attention(q, k, v, causal="bottom_right", seqused_k=in_pages.seqused_k)
    want_dk = reference.backward(used, dout)["dk"]
    np.testing.assert_allclose(in_pages.keys(dk, 0)[:, :9], want_dk[0], atol=1e-14)
    assert np.isfinite(dk).all()


def test_hidden_nan_stays_out_and_visible_nan_reaches_its_rows() -> None:
    asked = a_call(mask=np.array([[True, True, False, True, True]] * 2 + [[True] * 5]))
    dout = arrays(5, asked.out_shape)[0]
    clean, k, v = reference.forward(asked), asked.k.copy(), asked.v.copy()
    grads = reference.backward(asked, dout)
    k[:, :, 2], v[:, :, 2] = np.nan, np.inf
    out, lse = reference.forward(asked.having(k=k, v=v))
    np.testing.assert_array_equal(out[:, :, :2], clean[0][:, :, :2])
    np.testing.assert_array_equal(lse[:, :, :2], clean[1][:, :, :2])
    assert np.isnan(out[:, :, 2]).all()
    poisoned = reference.backward(asked.having(k=k, v=v), dout)
    np.testing.assert_array_equal(poisoned["dq"][:, :, :2], grads["dq"][:, :, :2])


# Answers that stand in the public reports, by their ids.
def ramp(n: int, width: int = 1) -> np.ndarray[Any, Any]:
    return np.arange(float(n)).reshape(1, 1, n, 1) * np.ones(width)


def flat(n: int, m: int, v: Any, **options: Any) -> Attention:
    return Attention(np.zeros((1, 1, n, 1)), np.zeros((1, 1, m, 1)), v, **options)


LOWEST = np.full((3, 3), 1.0)
LOWEST[0] = np.finfo(np.float32).min
PUBLIC: dict[str, tuple[Attention, list[float]]] = {
    "BUG-007-bottom-right": (flat(2, 5, ramp(5), causal="bottom_right"), [1.5, 2.0]),
    "BUG-007-empty": (flat(5, 2, ramp(2), causal="bottom_right"), [0, 0, 0, 0, 0.5]),
    "BUG-007-top-left": (flat(2, 5, ramp(5), causal="top_left"), [0, 0.5]),
    "BUG-019": (flat(3, 3, ramp(3), bias=LOWEST), [1.0, 1.0, 1.0]),
    "BUG-044": (
        Attention(
            np.where(np.arange(128) == 64, 10.0, 0) * np.ones((1, 1, 1, 1)),
            np.where(np.arange(128) == 64, 1.0, 0) * ramp(32, 128),
            ramp(32),
        ),
        [30.296],
    ),
    "BUG-054": (
        flat(2, 2, np.array([1.0, 100.0]).reshape(1, 1, 2, 1), softcap=1.0,
             mask=np.array([True, False])),
        [1.0, 1.0],
    ),
    "BUG-056-left": (flat(4, 4, ramp(4), window=(1, 0)), [0, 0.5, 1.5, 2.5]),
    "BUG-056-right": (flat(4, 4, ramp(4), window=(0, 1)), [0.5, 1.5, 2.5, 3]),
    "BUG-056-open": (flat(4, 4, ramp(4), window=(None, 0)), [0, 0.5, 1.0, 1.5]),
    "BUG-058": (flat(8, 8, ramp(8), causal=True, window=(2, 0)), [0, 0.5, 1, 2, 3, 4, 5, 6]),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_oracle_gives_the_public_answers(name: str) -> None:
    asked, want = PUBLIC[name]
    out, _ = reference.forward(asked)
    np.testing.assert_allclose(out[0, 0, :, 0], want, atol=1e-3 if name == "BUG-044" else 1e-12)


def test_bug_022_and_063_lse() -> None:
    low = Attention(np.full((1, 1, 64, 128), 50.0), np.full((1, 1, 64, 128), -50.0), ramp(64))
    out, lse = reference.forward(low)
    assert out[0, 0, 0, 0] == pytest.approx(31.5)
    assert lse[0, 0, 0] == pytest.approx(-28280.11, rel=1e-6)
    assert reference.forward(flat(1, 8, ramp(8)))[1][0, 0, 0] == pytest.approx(math.log(8))


def test_sampled_rows_of_a_long_call_stay_below_two_gib() -> None:
    rng = np.random.default_rng(0)
    n, rows = 1 << 18, np.linspace(0, (1 << 18) - 1, 64).astype(np.intp)
    k, v = (rng.standard_normal((1, 1, n, 256), np.float32).astype(np.float16) for _ in range(2))
    q = np.zeros((1, 1, n, 256), np.float16)
    q[0, 0, rows] = rng.standard_normal((64, 256))
    asked = Attention(q, k, v, causal=True)
    precision = Precision.of(Manifest.parse(Tiled().manifest()), "float16")
    tracemalloc.start()
    seen = 0
    for part in reference.blocks(asked, rows[::2]):  # one chunk: its size counts
        bound, _ = Forward(part, precision).bound("prob")
        seen += len(part.index)
        assert np.isfinite(bound).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == 32
    assert peak < 2 << 30


def test_oracle_imports_no_backend() -> None:
    code = (
        "import sys, portattn.conformance.reference, portattn.conformance.bounds\n"
        "bad = [m for m in sys.modules if m.startswith(('portattn.backends', 'torch', 'jax'))]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- the bounds hold -----------------------------------------------------------------------------
CORRECT = [
    {"block_q": 64, "block_k": 64},
    {"block_q": 16, "block_k": 16},
    {"block_q": 128, "block_k": 32, "p_storage": "fp32"},
    {"block_q": 32, "block_k": 256},
]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("how", range(len(CORRECT)))
def test_correct_kernels_are_never_accused(how: int, dtype: str) -> None:
    ctx = context(**CORRECT[how])
    for seed, data in enumerate(generators.DATA):
        case, asked = ask(dtype, data, seed, n=65, m=113, h=2, hk=1, d=32)
        result = answer(ctx, asked)
        generic = data not in ("uniform",)
        outcome = judge.forward(asked, result, ctx.manifest, spread=generic)
        assert outcome.verdict == "PASS", (data, outcome)
        dout = generators.upstream(case, asked)
        back = judge.backward(asked, dout, gradients(ctx, asked, dout, result), ctx.manifest)
        assert back.verdict == "PASS", (data, back)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.0},
        {"softcap": 30.0, "causal": "bottom_right"},
        {"window": (9, 3), "causal": "top_left"},
        {"bias": "normal"},
        {"alibi_slopes": np.array([0.5, 0.1], np.float32)},
        {"sinks": np.array([3.0, -1.0], np.float32), "causal": "bottom_right"},
    ],
    ids=lambda x: "-".join(x),
)
def test_bounds_of_options_hold(options: dict[str, Any], dtype: str) -> None:
    ctx = context(block_q=32, block_k=16)
    for seed, data in enumerate(("normal", "q8", "outliers")):
        case, asked = ask(dtype, data, seed, n=49, m=33, h=2, d=32)
        given = dict(options)
        if "bias" in given:
            values = generators.generator(case, 1).standard_normal((1, 2, 49, 33))
            given["bias"] = generators.cast(2 * values, dtype)
        asked = asked.having(**given)
        result, dout = answer(ctx, asked), generators.upstream(case, asked)
        dlse = generators.generator(case, 2).standard_normal(asked.lse_shape)
        dlse = dlse.astype(np.float64 if dtype == "float64" else np.float32)
        assert judge.forward(asked, result, ctx.manifest).verdict == "PASS"
        found = gradients(ctx, asked, dout, result, dlse=dlse)
        outcome = judge.backward(asked, dout, found, ctx.manifest, dlse)
        assert outcome.verdict == "PASS", (data, outcome)
        assert outcome.numbers["dq.e1_prob"] > 1e-4  # nor is the bound empty


def test_float16_needs_the_storage_term() -> None:
    """On peaked scores most of P is subnormal in float16: without tau_p a correct one fails."""
    ctx = context()
    case, asked = ask("float16", "q8", 3, n=65, m=257, h=1, d=64)
    dout = generators.upstream(case, asked)
    found = gradients(ctx, asked, dout, answer(ctx, asked))
    declared = Precision.of(ctx.manifest, "float16")
    bare = Precision("float16", declared.u_acc, declared.u_p, 0.0, 0.0, declared.block_k)
    ratio = {}
    for name, precision in (("with", declared), ("without", bare)):
        limits = bounds.backward(asked, dout, None, precision, "prob")
        ratio[name] = max(
            float(judge.excess(getattr(found, x), *limits[x], "float16").max()) for x in limits
        )
    assert ratio["with"] <= 1 < 2 < ratio["without"], ratio


def test_det_is_wider_than_prob_and_both_shrink_with_the_unit_roundoff() -> None:
    _, asked = ask("float32", "normal", n=33, m=257, h=1, d=64)
    manifest = Manifest.parse(Tiled().manifest())
    narrow = Precision.of(manifest, "float32")
    truncating = Precision.of(Manifest.parse({**Tiled().manifest(), "acc": "fp32-rz"}), "float32")
    tf32 = Precision.of(Manifest.parse({**Tiled().manifest(), "qk_operand": "tf32"}), "float32")
    for part in reference.blocks(asked):
        prob, det = (Forward(part, narrow).bound(mode)[0] for mode in ("prob", "det"))
        assert (det >= prob).all()
        assert (Forward(part, truncating).bound("prob")[0] > prob).all()
        assert (Forward(part, tf32).bound("prob")[0] > 50 * prob).all()
        # the bound stays within a few hundred roundings of what is summed
        assert np.median(prob / Forward(part, narrow).mass) < 1000 * 2.0**-24


def test_emulated_defects_exceed_the_bounds() -> None:
    """What E1 to E3 are for: tf32 operands, a bfloat16 accumulator, truncation, a wrong scale."""
    ctx = context()
    _, asked = ask("float32", "normal", n=129, m=203, h=2, d=64)
    result = answer(ctx, asked)

    def measured(out: Any, dtype: str = "float32") -> dict[str, float]:
        _, call = (None, asked) if dtype == "float32" else ask(dtype, "normal", n=129, m=203)
        return dict(
            judge.forward(call, result._replace(out=out), ctx.manifest, spread=True).numbers
        )

    def tf32(x: Any) -> Any:
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    rounded = answer(ctx, asked.having(q=tf32(asked.q), k=tf32(asked.k)))
    assert measured(rounded.out)["e2"] > 3
    assert measured(result.out * (1 + 2.0**-12))["e2"] > 3
    _, half = ask("bfloat16", "normal", n=129, m=203)
    exact = reference.forward(half)[0].astype(np.float32)
    cut = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    seen = judge.forward(half, answer(ctx, half)._replace(out=cut), ctx.manifest, spread=True)
    assert seen.numbers["e3"] > 1
    assert seen.numbers["e1_prob"] < 1  # E1 alone would let it pass


def test_a_declared_truncation_excuses_a_drift_towards_zero_and_no_other() -> None:
    """Sums over many keys that are cut, 16 keys a step, shrink; that much, where it is declared."""
    _, asked = ask("float16", "normal", n=17, m=8192, h=2, d=64)
    result = answer(context(), asked)
    exact = reference.forward(asked)[0]
    step = 2.0**-24 * 8192 / 16  # the mean loss: half a unit in the last place at each step

    def e3(drift: float, **claims: Any) -> float:
        out = (exact * (1 + drift)).astype(np.float16).astype(np.float64)
        manifest = Manifest.parse({**Tiled().manifest(), **claims})
        return judge.forward(asked, result._replace(out=out), manifest, spread=True).numbers["e3"]

    plain, cut = {"p_storage": "input"}, {"p_storage": "input", "acc": "fp32-rz"}
    assert e3(0.0, **plain) <= 0.5 and e3(0.0, **cut) <= 0.5
    assert e3(-20 * step, **plain) > 1 and e3(-20 * step, **cut) > 1
    assert e3(-0.9 * step, **cut) < e3(-0.9 * step, **plain)
    assert e3(20 * step, **cut) > 1  # away from zero


def test_equal_weights_do_not_raise_e3() -> None:
    """All rows alike: their roundings are one draw, not a hundred."""
    for seed in range(12):
        _, asked = ask("bfloat16", "uniform", seed, n=129, m=113, h=2, d=32)
        ctx = context(p_storage="fp32")
        outcome = judge.forward(asked, answer(ctx, asked), ctx.manifest, spread=True)
        assert outcome.numbers["e3"] <= 1, (seed, outcome.numbers)


# ---- the judge -----------------------------------------------------------------------------------
def test_excess_knows_what_need_not_be_finite() -> None:
    want = np.array([1.0, 65519.0, 70000.0, np.nan, np.inf, 2.0, 2.0])
    got = np.array([np.nan, np.inf, np.inf, np.nan, np.inf, np.inf, np.nan])
    bound = np.full(7, 10.0)
    tainted = np.array([False] * 6 + [True])
    ratio = judge.excess(got, want, bound, "float16", tainted)
    assert np.isinf(ratio[0])  # NaN where a number is due
    assert ratio[1] == ratio[2] == 0  # beyond float16, give or take the bound
    assert ratio[3] == ratio[4] == 0
    assert np.isinf(ratio[5])  # an infinity out of nothing
    assert ratio[6] == 0  # a row that sees a NaN may be NaN
    assert np.isinf(judge.excess(np.ones(1), np.array([np.nan]), np.ones(1), "float32")[0])
    assert np.isinf(judge.excess(np.array([-np.inf]), np.array([7e4]), np.ones(1), "float16")[0])


def test_outcomes_are_combined_by_their_worst() -> None:
    fine = judge.exact(np.ones(3), np.ones(3))
    wrong = judge.exact(np.array([1.0, 2.0, np.nan]), np.ones(3))
    both = judge.all_of([fine, wrong, fine])
    assert fine.verdict == "PASS"
    assert both.verdict == "FAIL"
    assert both.numbers["out.different_bad"] == 2
    assert both.message == wrong.message and both.worst == wrong.worst
    nan = judge.within(np.array([np.nan]), np.zeros(1), 1.0)
    assert nan.verdict == "FAIL"


def test_empty_rows_are_judged_as_declared() -> None:
    _, asked = ask("float32", "normal", n=5, m=3, h=1, d=8)
    asked = asked.having(causal="bottom_right")
    ctx = context()
    result = answer(ctx, asked)
    mean = result.out.copy()
    mean[0, 0, :2] = asked.v[0, 0].astype(np.float64).mean(0)
    for declared, right in (("zero", result.out), ("mean", mean)):
        manifest = Manifest.parse({**Tiled().manifest(), "empty_rows": declared})
        other = mean if declared == "zero" else result.out
        assert judge.forward(asked, result._replace(out=right), manifest).verdict == "PASS"
        assert judge.forward(asked, result._replace(out=other), manifest).verdict == "FAIL"


def test_sampled_rows_give_the_same_numbers_for_those_rows() -> None:
    ctx = context()
    _, asked = ask("float32", "normal", n=129, m=65, h=2, d=32)
    result = answer(ctx, asked)
    rows = np.array([0, 64, 128])
    broken = result.out.copy()
    broken[0, 1, 64, 5] += 1
    few = judge.forward(asked, result._replace(out=broken), ctx.manifest, rows=rows)
    assert few.worst is not None and few.worst["index"] == [0, 1, 64, 5]
    assert few.worst["tile"] == [1]
    missed = judge.forward(asked, result._replace(out=broken), ctx.manifest, rows=rows[::2])
    assert missed.verdict == "PASS"


# ---- generators ----------------------------------------------------------------------------------
@pytest.mark.parametrize("data", generators.DATA)
def test_inputs_follow_from_the_seed(data: str) -> None:
    a, b, c = (ask("bfloat16", data, seed)[1] for seed in (1, 1, 2))
    assert a.q.dtype == DTYPES["bfloat16"]
    assert np.isfinite(a.q.astype(np.float32)).all()
    np.testing.assert_array_equal(a.v, b.v)
    assert (a.v != c.v).any()


def test_generators_are_what_they_are_called() -> None:
    lse = reference.forward(ask("float64", "negative", n=33, m=65)[1])[1]
    assert lse.min() > -105 and lse.max() < -90
    part = next(iter(reference.blocks(ask("float64", "ascending", n=9, m=300)[1])))
    blocks = part.score.reshape(9, 6, 50).max(-1)
    assert (np.diff(blocks, axis=1) > 0).all()
    uniform = next(iter(reference.blocks(ask("float64", "uniform", n=9, m=30)[1])))
    np.testing.assert_allclose(uniform.weight, 1 / 30)
