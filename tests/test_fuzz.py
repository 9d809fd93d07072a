"""Any call at all gives the right result, or a `ValueError`, `TypeError` or `Unsupported`; and the
call after it works.

Right is what the float64 oracle says. The examples are the same in every run;
`HYPOTHESIS_PROFILE=search FUZZ_TIMES=20` looks beyond them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import portattn
from portattn.arrays import as_numpy, recognise

REFUSALS = (ValueError, TypeError, portattn.Unsupported)
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-4, "float64": 1e-11}
NUMPY_DTYPE = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
FAMILIES = ["numpy"] + (["torch"] if importlib.util.find_spec("torch") else [])
ORACLE_IGNORES = (
    "return_lse", "deterministic", "precision", "backend", "require_certified", "out",
)  # fmt: skip


def examples(n: int) -> settings:
    return settings(max_examples=n * int(os.environ.get("FUZZ_TIMES", "1")))


def numpy_dtype(name: str) -> Any:
    return NUMPY_DTYPE.get(name, np.dtype(name))


@dataclasses.dataclass
class Draw:
    """A call that is valid as drawn: its arrays and options by the names of the arguments."""

    arguments: dict[str, Any]
    dtype: str
    family: str
    layout: str

    def call(self, function: Callable[..., Any] = portattn.attention) -> Any:
        rest = {n: x for n, x in self.arguments.items() if n not in ("q", "k", "v")}
        given = {n: self.as_family(x) for n, x in rest.items()}
        q, k, v = (self.as_family(self.arguments.get(n)) for n in "qkv")
        return function(q, k, v, **given)

    def as_family(self, x: Any) -> Any:
        if self.family != "torch" or not isinstance(x, np.ndarray):
            return x
        import torch

        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        try:
            return torch.from_numpy(x.copy())
        except TypeError:  # a dtype that torch does not have
            return x


dims = st.integers(0, 40) | st.sampled_from([1, 15, 16, 17, 31, 32, 33])
heads = st.integers(1, 3)


@st.composite
def valid_calls(draw: Callable[..., Any], *, gradients: bool = False) -> Draw:
    """Arrays of small shapes in any layout, with any of the options."""
    dtypes = ["float32", "float64"] if gradients else list(TOLERANCE)
    dtype = draw(st.sampled_from(dtypes))
    layout = draw(st.sampled_from(["bshd", "bhsd", "thd"]))
    paged = draw(st.booleans()) and draw(st.booleans())
    batch = draw(st.integers(0 if layout != "thd" else 1, 3))
    heads_k = draw(heads)
    heads_q = heads_k * draw(heads)
    seq_q, seq_k, head_dim = draw(dims), draw(dims), max(1, draw(dims))
    head_dim_v = head_dim if draw(st.booleans()) else max(1, draw(dims))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape).astype(numpy_dtype(dtype))
        if draw(st.booleans()) or x.ndim != 4:
            return x
        return np.repeat(x, 2, 2)[:, :, ::2]  # strided in its third axis

    arguments: dict[str, Any] = {"layout": layout}
    longest_q, longest_k = seq_q, seq_k
    same = seq_q == seq_k
    if layout == "thd":
        lengths = [draw(dims) for _ in range(batch)]
        arguments["cu_seqlens_q"] = np.cumsum([0, *lengths], dtype=np.int32)
        longest_q = max(lengths)
        arguments["q"] = normal(sum(lengths), heads_q, head_dim)
    else:
        shape = (seq_q, heads_q) if layout == "bshd" else (heads_q, seq_q)
        arguments["q"] = normal(batch, *shape, head_dim)
    if paged:
        block, blocks, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(heads)
        arguments["k"] = normal(blocks, block, heads_k, head_dim)
        arguments["v"] = normal(blocks, block, heads_k, head_dim_v)
        table = rng.integers(0, blocks, (batch, columns)).astype(np.int32)
        used = rng.integers(0, block * columns + 1, batch).astype(np.int32)
        for row, count in zip(table, used, strict=True):
            row[-(-count // block) :] = -1
        arguments |= {"block_table": table, "seqused_k": used}
        longest_k, same = block * columns, False
    elif layout == "thd":
        lengths_k = lengths if draw(st.booleans()) else [draw(dims) for _ in range(batch)]
        arguments["cu_seqlens_k"] = np.cumsum([0, *lengths_k], dtype=np.int32)
        longest_k, same = max(lengths_k), lengths_k == lengths
        arguments["k"] = normal(sum(lengths_k), heads_k, head_dim)
        arguments["v"] = normal(sum(lengths_k), heads_k, head_dim_v)
    else:
        shape = (seq_k, heads_k) if layout == "bshd" else (heads_k, seq_k)
        arguments["k"] = normal(batch, *shape, head_dim)
        arguments["v"] = normal(batch, *shape, head_dim_v)
        if draw(st.booleans()) and draw(st.booleans()):
            arguments["seqused_k"] = rng.integers(0, seq_k + 1, batch).astype(np.int32)
            same = False

    dense = (batch, heads_q, longest_q, longest_k)
    alignments = [False, "top_left", "bottom_right"] + ([True] if same else [])
    options: dict[str, st.SearchStrategy[Any]] = {
        "scale": st.sampled_from([0, 1, -0.5, 0.1]) | st.floats(-1, 1),
        "causal": st.sampled_from(alignments),
        "window": st.tuples(*[st.none() | st.integers(0, 45)] * 2),
        "softcap": st.floats(0.1, 50),
        "bias": st.just("bias"),
        "mask": st.just("mask"),
        "alibi_slopes": st.sampled_from([(heads_q,), (batch, heads_q)]),
        "sinks": st.sampled_from([dtype, "float32"]),
        "return_lse": st.booleans(),
        "deterministic": st.booleans(),
        "backend": st.sampled_from(["auto", "numpy", ("triton", "numpy")]),
    }
    for name in draw(st.lists(st.sampled_from(sorted(options)), max_size=5, unique=True)):
        value = draw(options[name])
        if name in ("bias", "mask"):
            kept = draw(st.lists(st.booleans(), min_size=4, max_size=4))
            shape = tuple(n if keep else 1 for n, keep in zip(dense, kept, strict=True))
            shape = shape[draw(st.integers(0, 4)) :]
            value = rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.9]))
            if name == "bias":
                kind = numpy_dtype(draw(st.sampled_from([dtype, "float32"])))
                value = np.where(value, rng.standard_normal(shape), -np.inf).astype(kind)
            value = np.asarray(value)
        elif name == "alibi_slopes":
            value = rng.random(value).astype(np.float32)
        elif name == "sinks":
            value = rng.standard_normal(heads_q).astype(numpy_dtype(value))
        arguments[name] = value
    return Draw(arguments, dtype, draw(st.sampled_from(FAMILIES)), layout)


JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2.5, -0.0, float("nan"), float("inf"), 10**400, 1j, "", "auto",
    "numpy", "triton", "cupy", "bottom_right", "thd", "bhsd", "tf32", b"x", (), (1, 2), (-1, 0),
    (None, 3), (0, float("nan")), [0, 0], ("numpy", "triton"), {}, object(), np.float32(2),
    np.int64(3), np.bool_(True), [[1.0]], range(2),
]  # fmt: skip


@st.composite
def junk(draw: Callable[..., Any]) -> Any:
    """Anything: a value that some argument takes, or an array of some shape and dtype."""
    if draw(st.booleans()):
        return draw(st.sampled_from(JUNK))
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    dtype = draw(
        st.sampled_from(
            ["f2", "f4", "f8", ">f4", "i4", "i8", "u1", "?", "c8", "O", "U3", "M8[s]",
             ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
        )
    )  # fmt: skip
    return np.zeros(shape, np.dtype(dtype))


NAMES = (
    "q", "k", "v", "layout", "scale", "causal", "window", "softcap", "bias", "mask", "alibi_slopes",
    "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "return_lse",
    "deterministic", "out", "precision", "backend", "require_certified",
)  # fmt: skip


@st.composite
def any_calls(draw: Callable[..., Any]) -> Draw:
    """A valid call of which one or two arguments became something else, shapes included."""
    drawn: Draw = draw(valid_calls())
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)):
        old = drawn.arguments.get(name)
        changes: list[Any] = [junk()]
        if isinstance(old, np.ndarray):
            x = np.atleast_1d(old)
            changes.append(
                st.sampled_from([x[..., :-1], x[None], x.astype("f8"), x[::-1], x.T, x.ravel()])
            )
        drawn.arguments[name] = draw(st.one_of(changes))
    return drawn


def judge(drawn: Draw, result: Any, oracle: Callable[..., Any]) -> None:
    """The result against the oracle, in the caller's type."""
    a = drawn.arguments
    asked = {n: x for n, x in a.items() if n not in ORACLE_IGNORES and x is not None}
    want, want_lse = oracle(**asked)
    out, lse = result if a.get("return_lse") else (result, None)
    got = as_numpy(recognise(out, "out"))
    dtype = recognise(out, "out").dtype
    assert dtype == recognise(a["q"], "q").dtype
    assert recognise(out, "out").family == drawn.family
    assert got.shape == want.shape
    values = np.asarray(a["v"], np.float64)
    spread = float(np.abs(values).max(initial=0)) + 1e-300
    np.testing.assert_allclose(got.astype(float), want, rtol=0, atol=TOLERANCE[dtype] * spread)
    if lse is not None:
        sums = as_numpy(recognise(lse, "lse"))
        np.testing.assert_allclose(sums, want_lse, rtol=1e-5, atol=2e-4)


@pytest.fixture(scope="session")
def next_call_works() -> Callable[[], None]:
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
    want = portattn.attention(x, x, x, causal=True)

    def check() -> None:
        np.testing.assert_array_equal(portattn.attention(x, x, x, causal=True), want)

    return check


@examples(300)
@given(drawn=valid_calls())
def test_valid_calls_are_right(oracle, drawn: Draw) -> None:
    judge(drawn, drawn.call(), oracle)


@examples(500)
@given(drawn=any_calls())
def test_any_call_is_right_or_refused(oracle, next_call_works, drawn: Draw) -> None:
    try:
        result = drawn.call()
    except REFUSALS as error:
        event(type(error).__name__)
        assert str(error)
        next_call_works()
        return
    event("accepted")
    judge(drawn, result, oracle)


@examples(150)
@given(drawn=any_calls())
def test_explain_agrees_with_the_call(drawn: Draw) -> None:
    """The same refusal, or the same acceptance; and nothing is written."""
    try:
        drawn.call()
        outcome: Any = None
    except REFUSALS as error:
        outcome = error
    if outcome is None:
        assert drawn.call(portattn.explain).chosen == "numpy"
    elif isinstance(outcome, portattn.Unsupported):
        assert drawn.call(portattn.explain).chosen is None
    else:
        with pytest.raises(type(outcome)) as caught:
            drawn.call(portattn.explain)
        assert str(caught.value) == str(outcome)


@examples(150)
@given(drawn=valid_calls(gradients=True), seed=st.integers(0, 2**32 - 1))
def test_gradients_are_right(oracle_backward, drawn: Draw, seed: int) -> None:
    drawn.family = "numpy"
    drawn.arguments.pop("return_lse", None)
    a = drawn.arguments
    q, k, v = a["q"], a["k"], a["v"]
    options = {n: x for n, x in a.items() if n not in ("q", "k", "v")}
    out, lse = portattn.attention(q, k, v, return_lse=True, **options)
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = np.where(np.isfinite(lse), rng.standard_normal(lse.shape), 0).astype(lse.dtype)
    got = portattn.attention_backward(q, k, v, out, lse, dout, dlse=dlse, **options)._asdict()
    asked = {n: x for n, x in a.items() if n not in ORACLE_IGNORES}
    want = oracle_backward(dout=dout, dlse=dlse, **asked)
    assert {n for n, x in got.items() if x is not None} == set(want)
    tolerance = 1e-3 if out.dtype == np.float32 else 1e-10
    for name, expected in want.items():
        like = a[name[1:]]
        assert (got[name].shape, got[name].dtype) == (like.shape, like.dtype)
        near = tolerance * (1 + np.abs(expected).max(initial=0))
        if like.dtype != np.float64:
            near = max(near, 1e-3)
        np.testing.assert_allclose(
            got[name].astype(float), expected, rtol=0, atol=near, err_msg=name
        )


@examples(100)
@given(data=st.data(), drawn=valid_calls())
def test_splits_merge_into_the_whole(data: st.DataObject, drawn: Draw) -> None:
    """Dense keys cut anywhere; masks that depend on the position are left out."""
    a = drawn.arguments
    if drawn.layout == "thd" or "block_table" in a:
        drawn.arguments = a = {"layout": "bshd", **dict.fromkeys("qkv", np.ones((1, 2, 1, 3)))}
    axis = 1 if a["layout"] == "bshd" else 2
    n = a["k"].shape[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    kept = {name: a[name] for name in ("layout", "scale", "softcap") if name in a}
    whole = portattn.attention(a["q"], a["k"], a["v"], return_lse=True, **kept)
    parts = [
        portattn.attention(a["q"], k, v, return_lse=True, **kept)
        for k, v in zip(np.split(a["k"], cuts, axis), np.split(a["v"], cuts, axis), strict=True)
    ]
    out, lse = portattn.merge([o for o, _ in parts], [s for _, s in parts], layout=a["layout"])
    tolerance = 2 * TOLERANCE[out.dtype.name] * (1 + np.abs(a["v"].astype(float)).max(initial=0))
    np.testing.assert_allclose(out.astype(float), whole[0].astype(float), atol=tolerance)
    np.testing.assert_allclose(lse, whole[1], atol=1e-4)


QUERY_FIELDS = (
    "head_dim", "dtype", "batch", "seq_q", "seq_k", "heads_q", "heads_k", "head_dim_v", "layout",
    "scale", "causal", "window", "softcap", "bias", "mask", "alibi", "sinks", "seqused_k",
    "block_size", "return_lse", "deterministic", "precision", "backward", "device",
    "shared_memory", "backend",
)  # fmt: skip
QUERY_VALUES = [
    *JUNK,
    8,
    64,
    256,
    10**7,
    "float16",
    "bfloat16",
    "cpu",
    "cuda",
    "sm_89",
    "sm_1",
    65536,
]


@examples(300)
@given(
    fields=st.dictionaries(st.sampled_from(QUERY_FIELDS), st.sampled_from(QUERY_VALUES), max_size=4)
)
def test_any_query_is_answered_or_refused(fields: dict[str, Any]) -> None:
    try:
        decision = portattn.query(**({"head_dim": 64} | fields))
    except REFUSALS as error:
        assert str(error).split(":")[0] in (*QUERY_FIELDS, "q, k"), "the argument is named"
        return
    json.dumps(decision.to_json())
    assert str(decision)
    assert decision.chosen is None or decision[decision.chosen].accepted
    for candidate in decision.candidates:
        assert candidate.accepted == (not candidate.reasons)
        assert candidate.accepted == (candidate.plan is not None)
