"""The public calls: every argument has an effect or is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from api_kit import DENSE, PACKED, PAGED, TOLERANCE, attend, int32, normal

import portattn
from portattn import api

PARAMETERS = inspect.signature(portattn.attention).parameters
INF = np.inf


# For each argument: a valid call, and another value that must give another result.
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "q": (DENSE, normal(9, 2, 4, 4, 8)),
    "k": (DENSE, normal(9, 2, 4, 4, 8)),
    "v": (DENSE, normal(9, 2, 4, 4, 8)),
    "layout": (DENSE, "bhsd"),
    "scale": (DENSE, 2.0),
    "causal": (DENSE, True),
    "window": (DENSE, (1, 0)),
    "softcap": (DENSE, 0.3),
    "bias": (DENSE, normal(9, 4, 4)),
    "mask": (DENSE, np.eye(4, dtype=bool)),
    "alibi_slopes": (DENSE, np.float32([1, 2, 3, 4])),
    "sinks": (DENSE, np.float32([1, 2, 3, 4])),
    "cu_seqlens_q": (PACKED, int32(0, 2, 3, 7)),
    "cu_seqlens_k": (PACKED, int32(0, 3, 5, 9)),
    "seqused_k": (DENSE, int32(1, 3)),
    "block_table": (PAGED, int32([4, 1], [2, -1])),
}
# Those that change how, not what; each has its own test below.
OTHERWISE = {"return_lse", "deterministic", "out", "precision", "backend", "require_certified"}


def test_the_table_names_every_argument() -> None:
    """An argument that is new in the signature needs a row here, or a test of its own."""
    assert set(EFFECTS) | OTHERWISE == set(PARAMETERS)
    assert not set(EFFECTS) & OTHERWISE


@pytest.mark.parametrize("name", EFFECTS)
def test_every_argument_has_its_effect(name: str, oracle) -> None:
    base, value = EFFECTS[name]
    before, after = attend(base), attend(base, **{name: value})
    assert not np.allclose(before, after, atol=1e-3), f"{name} was ignored"
    for got, arguments in ((before, base), (after, base | {name: value})):
        np.testing.assert_allclose(got, oracle(**arguments)[0], atol=TOLERANCE["float32"])


@pytest.mark.parametrize("name", EFFECTS)
def test_options_that_differ_are_different_calls(name: str, oracle) -> None:
    """In the other order too: nothing of an earlier call stays."""
    base, value = EFFECTS[name]
    after, before = attend(base, **{name: value}), attend(base)
    np.testing.assert_array_equal(before, attend(base))
    np.testing.assert_array_equal(after, attend(base, **{name: value}))


def test_return_lse(oracle) -> None:
    out, lse = attend(DENSE, return_lse=True)
    np.testing.assert_array_equal(out, attend(DENSE))
    want, want_lse = oracle(**DENSE)
    np.testing.assert_allclose(out, want, atol=TOLERANCE["float32"])
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    assert (lse.dtype, lse.shape) == (np.float32, (2, 4, 4))


def test_deterministic_reaches_the_backend_and_holds() -> None:
    decision = portattn.explain(**DENSE, deterministic=True)
    assert decision.problem.deterministic
    runs = [attend(DENSE, deterministic=True).tobytes() for _ in range(3)]
    assert len(set(runs)) == 1


def test_tf32_is_refused_where_the_hardware_has_none() -> None:
    with pytest.raises(portattn.Unsupported) as caught:
        attend(DENSE, precision="tf32")
    (reason,) = [r for r in caught.value.reasons["numpy"] if r.field == "precision"]
    assert reason.hint or reason.limit


def test_a_named_backend_that_cannot_is_no_fallback() -> None:
    for backend in ("triton", "cupy", "numba"):
        with pytest.raises(portattn.Unsupported) as caught:
            attend(DENSE, backend=backend)
        assert set(caught.value.reasons) == {backend}
        assert {"device"} <= {r.field for r in caught.value.reasons[backend]}
    np.testing.assert_array_equal(attend(DENSE, backend="numpy"), attend(DENSE))


def test_a_certificate_can_be_demanded() -> None:
    with pytest.raises(portattn.Unsupported, match="conformance run"):
        attend(DENSE, require_certified=True)
    assert attend(DENSE, require_certified=False).shape == DENSE["q"].shape


# ---- wrong types, one argument at a time ---------------------------------------------------------
NOT_REFUSED_AS_TYPE = {"layout", "precision"}  # a name that does not exist is a ValueError


@pytest.mark.parametrize(
    "value", [object(), 3 + 4j, {}, b"x"], ids=["object", "complex", "{}", "b"]
)
@pytest.mark.parametrize("name", [n for n in PARAMETERS if n != "require_certified"])
def test_a_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    base = PAGED if name == "block_table" else PACKED if name.startswith("cu_") else DENSE
    with pytest.raises(ValueError if name in NOT_REFUSED_AS_TYPE else TypeError) as caught:
        attend(base, **{name: value})
    assert str(caught.value).startswith(f"{name}: got ")
    attend(base)  # the next call works


@pytest.mark.parametrize(
    "call", [portattn.explain, portattn.attention_backward, portattn.attention]
)
def test_an_unknown_keyword_is_named(call: Callable[..., Any]) -> None:
    arrays = list(DENSE.values()) + ([0, 0, 0] if call is portattn.attention_backward else [])
    with pytest.raises(TypeError, match="dropout_p"):
        call(*arrays, dropout_p=0.5)


def test_require_certified_is_a_flag() -> None:
    with pytest.raises(TypeError, match=r"^require_certified: got 'yes'"):
        attend(DENSE, require_certified="yes")


# ---- explain -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in PARAMETERS if n not in ("q", "k", "v")])
def test_explain_takes_every_argument_of_attention(name: str) -> None:
    values = {
        "return_lse": True,
        "deterministic": True,
        "out": np.empty((2, 4, 4, 8), np.float32),
        "precision": "tf32",
        "backend": "numpy",
        "require_certified": True,
    }
    base, value = EFFECTS[name] if name in EFFECTS else (DENSE, values[name])
    arguments = base | {name: value}
    decision = portattn.explain(**arguments)
    expected = name not in ("precision", "require_certified")
    assert (decision.chosen == "numpy") == expected
    with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
        portattn.explain(**(base | {name: object()}))


def test_explain_shows_the_plan_and_runs_nothing() -> None:
    out = np.full((2, 4, 4, 8), np.nan, np.float32)
    decision = portattn.explain(**DENSE, out=out)
    assert np.isnan(out).all()
    plan = decision["numpy"].plan
    assert plan is not None and plan.mechanism and plan.workspace_bytes > 0
    assert {c.backend for c in decision.candidates} >= {"numpy", "triton", "cupy", "numba"}


# ---- dtypes and layouts --------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom_right"}, {"window": (2, 1), "softcap": 5.0}], ids=str
)
def test_dtypes_and_layouts(inputs, oracle, dtype: str, layout: str, options: Any) -> None:
    arrays = inputs(B=2, Sq=5, Sk=9, Hq=4, Hk=2, D=16, Dv=12, dtype=dtype, layout=layout)
    out, lse = portattn.attention(*arrays, layout=layout, return_lse=True, **options)
    want, want_lse = oracle(*arrays, layout=layout, **options)
    assert out.dtype == arrays[0].dtype and out.shape == want.shape
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    np.testing.assert_allclose(out.astype(float), want, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(lse, want_lse, atol=min(TOLERANCE[dtype], 1e-5))


COMBINATIONS = [
    (a, b, c)
    for a in ("float16", "bfloat16", "float32")
    for b in ("float16", "bfloat16", "float32")
    for c in ("float16", "bfloat16", "float32")
]


@pytest.mark.parametrize("family", ["numpy", "torch"])
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids="-".join)
def test_mixed_dtypes_raise(dtypes: tuple[str, str, str], family: str) -> None:
    """One rule everywhere: nothing is promoted silently."""
    if family == "torch":
        torch = pytest.importorskip("torch")
        arrays = [torch.ones((1, 8, 1, 16), dtype=getattr(torch, dtype)) for dtype in dtypes]
    else:
        kinds = {"bfloat16": ml_dtypes.bfloat16}
        arrays = [np.ones((1, 8, 1, 16), kinds.get(dtype, dtype)) for dtype in dtypes]
    if len(set(dtypes)) == 1:
        assert str(portattn.attention(*arrays).dtype).endswith(dtypes[0])
    else:
        with pytest.raises(TypeError, match=f"q, k, v: got dtypes {', '.join(dtypes)}"):
            portattn.attention(*arrays)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.astype(">f4"),
        lambda x: x.astype("int32"),
        lambda x: x.astype("complex64"),
        lambda x: x.astype(bool),
        lambda x: x.astype(object),
        lambda x: x.astype("U4"),
        lambda x: x.astype(ml_dtypes.float8_e4m3fn),
        lambda x: np.ma.masked_array(x, x > 0),
        lambda x: x.tolist(),
        lambda x: x.astype("datetime64[s]"),
    ],
    ids=[
        "big-endian",
        "int32",
        "complex",
        "bool",
        "object",
        "text",
        "float8",
        "masked",
        "list",
        "datetime",
    ],
)
def test_other_numbers_raise(make: Callable[[np.ndarray], Any]) -> None:
    arrays = [make(x) for x in DENSE.values()]
    with pytest.raises(TypeError, match=r"^q: got .*; want "):
        portattn.attention(*arrays)


# ---- packed, paged, lengths in use ---------------------------------------------------------------
def test_packed_equals_separate_calls() -> None:
    out, lse = attend(PACKED, return_lse=True, causal="bottom_right")
    for a, b, c, d in ((0, 3, 0, 4), (3, 3, 4, 5), (3, 7, 5, 9)):
        alone, alone_lse = portattn.attention(
            PACKED["q"][None, a:b],
            PACKED["k"][None, c:d],
            PACKED["v"][None, c:d],
            causal="bottom_right",
            return_lse=True,
        )
        np.testing.assert_allclose(out[a:b], alone[0], atol=1e-6)
        np.testing.assert_allclose(lse[:, a:b], alone_lse[0], atol=1e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_pages_hold_the_keys_that_the_table_names(layout: str) -> None:
    """Poison lies in every page and row that is not in use."""
    k, v = np.full_like(PAGED["k"], np.nan), np.full_like(PAGED["v"], np.nan)
    k[4], k[0, :2], k[2, :3] = PAGED["k"][4], PAGED["k"][0, :2], PAGED["k"][2, :3]
    v[4], v[0, :2], v[2, :3] = PAGED["v"][4], PAGED["v"][0, :2], PAGED["v"][2, :3]
    q = PAGED["q"]
    rest = {"seqused_k": PAGED["seqused_k"], "block_table": PAGED["block_table"]}
    given = {
        "bshd": (q, {}),
        "bhsd": (q.swapaxes(1, 2), {}),
        "thd": (q.reshape(6, 4, 8), {"cu_seqlens_q": int32(0, 3, 6)}),
    }[layout]
    out = portattn.attention(given[0], k, v, layout=layout, **given[1], **rest)
    out = {"bshd": out, "bhsd": out.swapaxes(1, 2), "thd": out.reshape(2, 3, 4, 6)}[layout]
    for b, (pages, used) in enumerate((([4, 0], 6), ([2], 3))):
        key = PAGED["k"][pages].reshape(1, -1, 2, 8)[:, :used]
        value = PAGED["v"][pages].reshape(1, -1, 2, 6)[:, :used]
        alone = portattn.attention(q[b : b + 1], key, value)
        np.testing.assert_allclose(out[b], alone[0], atol=1e-6)


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("used", [0, 1, 3, 4])
def test_alignment_is_measured_on_the_keys_in_use(causal: Any, used: int) -> None:
    out, lse = attend(DENSE, seqused_k=int32(used, 4), causal=causal, return_lse=True)
    alone, alone_lse = portattn.attention(
        DENSE["q"][:1], DENSE["k"][:1, :used], DENSE["v"][:1, :used], causal=causal, return_lse=True
    )
    np.testing.assert_allclose(out[:1], alone, atol=1e-6)
    np.testing.assert_allclose(lse[:1], alone_lse, atol=1e-6)


@pytest.mark.parametrize(
    ("q", "k", "shape", "lse"),
    [
        ((0, 2, 4, 8), (0, 5, 2, 8), (0, 2, 4, 6), None),
        ((1, 0, 4, 8), (1, 5, 2, 8), (1, 0, 4, 6), None),
        ((1, 2, 4, 8), (1, 0, 2, 8), (1, 2, 4, 6), -INF),
    ],
)
def test_empty_axes(q, k, shape, lse) -> None:
    value = np.ones((*k[:3], 6), np.float32)
    out, sums = portattn.attention(
        np.ones(q, np.float32), np.ones(k, np.float32), value, return_lse=True
    )
    assert out.shape == shape and (out == 0).all()
    assert sums.shape == (shape[0], shape[2], shape[1])
    assert lse is None or (sums == lse).all()


# ---- out= ----------------------------------------------------------------------------------------
def test_out_is_filled_and_returned() -> None:
    out = np.full((2, 4, 4, 8), np.nan, np.float32)
    assert attend(DENSE, out=out) is out
    np.testing.assert_array_equal(out, attend(DENSE))
    result, lse = attend(DENSE, out=out, return_lse=True)
    assert result is out and lse.shape == (2, 4, 4)


def test_out_may_lie_in_strides() -> None:
    buffer = np.full((2, 8, 4, 16), 7, np.float32)
    out = buffer[:, ::2, :, 3:11]
    assert attend(DENSE, out=out) is out
    np.testing.assert_array_equal(out, attend(DENSE))
    assert (buffer[:, 1::2] == 7).all() and (buffer[..., 11:] == 7).all()


shared = normal(3, 2, 4, 4, 8)
read_only = np.empty((2, 4, 4, 8), np.float32)
read_only.flags.writeable = False
OUT_REFUSED: list[tuple[str, Any, type[Exception], str, dict[str, Any]]] = [
    ("shape", np.empty((2, 4, 4, 7), np.float32), ValueError, "(2, 4, 4, 8)", {}),
    ("rank", np.empty((4, 4, 8), np.float32), ValueError, "(2, 4, 4, 8)", {}),
    ("dtype", np.empty((2, 4, 4, 8)), TypeError, "float32", {}),
    ("kind", [[1.0]], TypeError, "list", {}),
    ("read-only", read_only, ValueError, "writable", {}),
    (
        "overlaps itself",
        np.broadcast_to(np.empty((2, 1, 4, 8), np.float32), (2, 4, 4, 8)),
        ValueError,
        "out",
        {},
    ),
    ("is q", shared, ValueError, "memory that q uses", {"q": shared}),
    ("is k", shared, ValueError, "memory that k uses", {"k": shared}),
    ("is v", shared, ValueError, "memory that v uses", {"v": shared[:]}),
    ("is bias", shared, ValueError, "memory that bias uses", {"bias": shared[0, 0, :, :4]}),
]


@pytest.mark.parametrize(
    ("out", "error", "words", "more"), [c[1:] for c in OUT_REFUSED], ids=[c[0] for c in OUT_REFUSED]
)
def test_out_is_refused(out: Any, error: Any, words: str, more: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        attend(DENSE, out=out, **more)
    assert str(caught.value).startswith("out: got ")
    assert words in str(caught.value)


def test_out_beside_an_input_in_one_buffer_is_fine() -> None:
    buffer = np.empty((2, 4, 4, 16), np.float32)
    buffer[..., ::2] = DENSE["q"]
    out = buffer[..., 1::2]
    want = attend(DENSE)
    assert attend(DENSE, q=buffer[..., ::2], out=out) is out
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_a_refused_call_leaves_out_alone() -> None:
    out = np.full((2, 4, 4, 8), 7, np.float32)
    with pytest.raises(ValueError, match="softcap"):
        attend(DENSE, out=out, softcap=-1)
    with pytest.raises(portattn.Unsupported):
        attend(DENSE, out=out, backend="triton")
    assert (out == 7).all()


# ---- attention_backward --------------------------------------------------------------------------
def backward(base: dict[str, Any], **more: Any) -> Any:
    options = {n: x for n, x in base.items() if n not in ("q", "k", "v")}
    out, lse = attend(base, return_lse=True)
    given = {"out": out, "lse": lse, "dout": np.ones_like(out)} | more
    return portattn.attention_backward(base["q"], base["k"], base["v"], **given, **options)


GRADIENT_CASES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "options": DENSE | {"causal": True, "window": (2, None), "softcap": 2.0, "scale": 0.7},
    "operands": DENSE
    | {
        "bias": normal(7, 4, 1, 4),
        "mask": np.tri(4, dtype=bool),
        "sinks": np.float32([1, -1, 0, 2]),
        "alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4]),
    },
    "packed": PACKED | {"causal": "bottom_right"},
    "paged": PAGED,
    "lengths": DENSE | {"seqused_k": int32(0, 3)},
}


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradients(case: str, oracle_backward) -> None:
    base = GRADIENT_CASES[case]
    out, lse = attend(base, return_lse=True)
    dout, dlse = normal(11, *out.shape), normal(12, *lse.shape)
    dlse = np.where(np.isfinite(lse), dlse, 0).astype(np.float32)
    got = backward(base, dout=dout, dlse=dlse)._asdict()
    want = oracle_backward(**base, dout=dout, dlse=dlse)
    assert {n for n, x in got.items() if x is not None} == set(want)
    for name, expected in want.items():
        like = base[name[1:]]
        assert (got[name].shape, got[name].dtype) == (like.shape, like.dtype)
        np.testing.assert_allclose(got[name], expected, atol=2e-5, err_msg=name)


BACKWARD_REFUSED = [
    ("out", ValueError, {"out": np.empty((2, 4, 4, 7), np.float32)}),
    ("out", TypeError, {"out": np.empty((2, 4, 4, 8))}),
    ("lse", ValueError, {"lse": np.empty((2, 4, 5), np.float32)}),
    ("lse", TypeError, {"lse": np.empty((2, 4, 4), np.float64)}),
    ("lse", TypeError, {"lse": None}),
    ("dout", ValueError, {"dout": np.empty((2, 4, 4), np.float32)}),
    ("dout", TypeError, {"dout": 1.0}),
    ("dout", TypeError, {"dout": np.empty((2, 4, 4, 8), np.float16)}),
    ("dlse", ValueError, {"dlse": np.empty((2, 4, 4, 1), np.float32)}),
    ("dlse", TypeError, {"dlse": "x"}),
]


@pytest.mark.parametrize(("argument", "error", "more"), BACKWARD_REFUSED)
def test_backward_refuses_by_name(argument: str, error: Any, more: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{argument}: got .*; want "):
        backward(DENSE, **more)


def test_every_option_of_the_forward_call_reaches_the_backward_call() -> None:
    """What changes the result changes a gradient, or is refused."""
    plain = {n: backward(b) for n, b in (("DENSE", DENSE), ("PACKED", PACKED), ("PAGED", PAGED))}
    for name, (base, value) in EFFECTS.items():
        kind = "PAGED" if base is PAGED else "PACKED" if base is PACKED else "DENSE"
        got = backward(base | {name: value})
        assert any(
            not np.allclose(a, b, atol=1e-4) for a, b in zip(got[:3], plain[kind][:3], strict=True)
        ), f"{name} was ignored"


def test_the_backward_pass_is_deterministic_on_request() -> None:
    base = {n: np.tile(x, (1, 40, 1, 1)) for n, x in DENSE.items()}
    runs = [backward(base, dout=base["q"]) for _ in range(3)]
    options = {"deterministic": True, "causal": True}
    asked = [backward(base | options, dout=base["q"]) for _ in range(3)]
    for made in (runs, asked):
        assert len({tuple(g.tobytes() for g in grads[:3]) for grads in made}) == 1


# ---- NaN and infinity in the input ---------------------------------------------------------------
@pytest.mark.parametrize("poison", [np.nan, INF, -INF])
@pytest.mark.parametrize(
    ("name", "place", "options", "seen_by"),
    [
        ("q", (0, 2, 1), {}, [(0, 2, 1)]),
        ("k", (0, 2, 1), {"causal": True}, [(0, 2, 1), (0, 3, 1)]),
        ("v", (0, 2, 1), {"causal": True}, [(0, 2, 1), (0, 3, 1)]),
        ("v", (0, 2, 1), {"window": (0, 0)}, [(0, 2, 1)]),
        ("k", (0, 2, 1), {"mask": np.array([1, 1, 0, 1], bool)}, []),
        ("v", (1, 3, 0), {"seqused_k": int32(4, 3)}, []),
        ("bias", (2, 1), {}, [(b, 2, h) for b in range(2) for h in range(4)]),
    ],
)
def test_poison_stays_in_the_rows_that_see_it(name, place, options, seen_by, poison) -> None:
    """There it is the formula's value or NaN; every other row keeps its bits."""
    if name == "bias" and poison == -INF:
        pytest.skip("a bias of -inf is a mask")
    base = DENSE | {"bias": np.zeros((4, 4), np.float32)} | options
    want = attend(base)
    changed = base[name].copy()
    changed[place] = poison
    got = attend(base, **{name: changed})
    touched = np.zeros((2, 4, 4), bool)
    for row in seen_by:
        touched[row] = True
    np.testing.assert_array_equal(got[~touched], want[~touched])
    if np.isnan(poison):
        assert np.isnan(got[touched]).all()


# ---- after an error ------------------------------------------------------------------------------
def test_the_call_after_an_error_is_unharmed() -> None:
    want = attend(DENSE)
    for change in ({"softcap": 0}, {"window": (-1, 0)}, {"k": 5}, {"backend": "triton"}):
        with pytest.raises((ValueError, TypeError, portattn.Unsupported)):
            attend(DENSE, **change)
        np.testing.assert_array_equal(attend(DENSE), want)


def test_the_signature_is_that_of_the_contract() -> None:
    assert list(PARAMETERS) == [
        "q", "k", "v", "layout", "scale", "causal", "window", "softcap", "bias", "mask",
        "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table",
        "return_lse", "deterministic", "out", "precision", "backend", "require_certified",
    ]  # fmt: skip
    assert list(inspect.signature(portattn.attention_backward).parameters)[:6] == [
        "q", "k", "v", "out", "lse", "dout",
    ]  # fmt: skip
    assert api.Gradients._fields == ("dq", "dk", "dv", "dbias", "dsinks")
