"""Partial results over disjoint key sets join into the result over all keys; empty parts are the
identity and nothing turns into NaN on the way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import portattn

inf = float("inf")


def parts(oracle, inputs, cuts: list[int], dtype: str = "float32", layout: str = "bshd", **sizes):
    """The whole result and its parts over keys cut at ``cuts``, as the oracle has them."""
    sizes = {"B": 2, "Sq": 4, "Sk": 16, "Hq": 4, "Hk": 2, "D": 16, "Dv": 5} | sizes
    q, k, v = inputs(dtype=dtype, layout=layout, **sizes)
    axis = 1 if layout == "bshd" else 2
    accumulator = "float64" if dtype == "float64" else "float32"
    pieces = zip(np.split(k, cuts, axis), np.split(v, cuts, axis), strict=True)
    results = [oracle(q, key, value, layout=layout) for key, value in pieces]
    outs = [out.astype(q.dtype) for out, _ in results]
    lses = [lse.astype(accumulator) for _, lse in results]
    return oracle(q, k, v, layout=layout), outs, lses


@pytest.mark.parametrize("cuts", [[12], [16], [0], [1], [5, 5, 11], list(range(1, 16)), []])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_parts_join_into_the_whole(oracle, inputs, cuts: list[int], layout: str) -> None:
    (want, want_lse), outs, lses = parts(oracle, inputs, cuts, layout=layout)
    out, lse = portattn.merge(outs, lses, layout=layout)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "accumulator", "tolerance"),
    [
        ("float16", "float32", 2e-3),
        ("bfloat16", "float32", 2e-2),
        ("float32", "float32", 1e-6),
        ("float64", "float64", 1e-14),
    ],
)
def test_dtypes(oracle, inputs, dtype: str, accumulator: str, tolerance: float) -> None:
    (want, want_lse), outs, lses = parts(oracle, inputs, [3, 9], dtype)
    out, lse = portattn.merge(outs, lses)
    assert (out.dtype.name, lse.dtype.name) == (dtype, accumulator)
    np.testing.assert_allclose(out.astype(float), want, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, atol=min(tolerance, 1e-6))


def test_packed_rows(oracle, inputs) -> None:
    (want, want_lse), outs, lses = parts(oracle, inputs, [7], B=1)
    out, lse = portattn.merge([x[0] for x in outs], [x[0] for x in lses], layout="thd")
    np.testing.assert_allclose(out, want[0], atol=1e-6)
    np.testing.assert_allclose(lse, want_lse[0], atol=1e-6)


def test_the_order_of_merging_does_not_matter(oracle, inputs) -> None:
    _, (a, b, c), (x, y, z) = parts(oracle, inputs, [4, 9])
    whole = portattn.merge([a, b, c], [x, y, z])
    left = portattn.merge(
        [c, portattn.merge([a, b], [x, y])[0]], [z, portattn.merge([a, b], [x, y])[1]]
    )
    for one, other in zip(whole, left, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# ---- rows by hand: one row, one head, v of one column --------------------------------------------
def row(out: float, lse: float) -> tuple[np.ndarray, np.ndarray]:
    return np.full((1, 1, 1, 1), out, np.float32), np.full((1, 1, 1), lse, np.float32)


BY_HAND = [
    ("natural logs", [(0.0, 0.0), (1.0, math.log(3))], 0.75, math.log(4)),
    ("identity", [(5.0, 2.0), (0.0, -inf)], 5.0, 2.0),
    ("identity first", [(0.0, -inf), (5.0, 2.0)], 5.0, 2.0),
    ("empty", [(0.0, -inf), (0.0, -inf)], 0.0, -inf),
    ("empty alone", [(0.0, -inf)], 0.0, -inf),
    ("rubbish in an empty part", [(5.0, 2.0), (float("nan"), -inf)], 5.0, 2.0),
    ("infinity in an empty part", [(5.0, 2.0), (inf, -inf)], 5.0, 2.0),
    ("far apart", [(5.0, -3e38), (7.0, 3e38)], 7.0, 3e38),
    ("large", [(1.0, 28280.0), (3.0, 28280.0)], 2.0, 28280.0 + math.log(2)),
    ("very negative", [(1.0, -28280.0), (3.0, -28280.0)], 2.0, -28280.0 + math.log(2)),
    ("NaN", [(1.0, float("nan")), (3.0, 0.0)], float("nan"), float("nan")),
    ("NaN out", [(float("nan"), 0.0), (3.0, 0.0)], float("nan"), math.log(2)),
    ("a part of infinite weight", [(1.0, inf), (3.0, 0.0)], float("nan"), float("nan")),
]


@pytest.mark.parametrize("family", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("given", "out", "lse"), [case[1:] for case in BY_HAND], ids=[case[0] for case in BY_HAND]
)
def test_by_hand(given: Any, out: float, lse: float, family: str) -> None:
    """Without a warning, too: these are ordinary rows of a split."""
    outs, lses = zip(*(row(*g) for g in given), strict=True)
    if family == "torch":
        torch = pytest.importorskip("torch")
        outs, lses = [torch.tensor(x) for x in outs], [torch.tensor(x) for x in lses]
    got, got_lse = portattn.merge(outs, lses)
    np.testing.assert_allclose(float(got[0, 0, 0, 0]), out, rtol=1e-6)
    np.testing.assert_allclose(float(got_lse[0, 0, 0]), lse, rtol=1e-6)


# ---- other arrays --------------------------------------------------------------------------------
def test_torch_tensors_stay_torch(oracle, inputs) -> None:
    torch = pytest.importorskip("torch")
    (want, want_lse), outs, lses = parts(oracle, inputs, [3])
    out, lse = portattn.merge([torch.tensor(x) for x in outs], [torch.tensor(x) for x in lses])
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)


def test_jax_arrays_stay_jax(oracle, inputs) -> None:
    jax = pytest.importorskip("jax")
    (want, _), outs, lses = parts(oracle, inputs, [3])
    out, lse = portattn.merge(
        [jax.numpy.array(x) for x in outs], [jax.numpy.array(x) for x in lses]
    )
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_torch_gradients_flow_through() -> None:
    """Of equal maxima, of an empty part and of a row that is empty in every part."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    outs = [torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64) for _ in range(3)]
    lses[1][..., 0] = lses[0][..., 0]
    lses = [x.requires_grad_() for x in lses]

    def joined(*tensors: Any) -> Any:
        return portattn.merge(tensors[:3], tensors[3:])

    assert torch.autograd.gradcheck(joined, (*outs, *lses))
    empty = [torch.full((1, 1, 2), -inf, requires_grad=True) for _ in range(2)]
    zeros = [torch.zeros(1, 2, 1, 2, requires_grad=True) for _ in range(2)]
    out, _ = portattn.merge(zeros, empty)
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (*zeros, *empty))


# ---- what is refused -----------------------------------------------------------------------------
out, lse = row(0.0, 0.0)
REFUSED = [
    ("outs, lses", ValueError, ([], [])),
    ("outs, lses", ValueError, ([out, out], [lse])),
    ("outs, lses", TypeError, (5, [lse])),
    ("outs, lses", TypeError, (iter([out]), [lse])),
    (r"outs\[0\]", TypeError, (["x"], [lse])),
    (r"lses\[0\]", TypeError, ([out], [1.0])),
    (r"outs\[0\]", ValueError, ([out[0]], [lse])),
    (r"outs\[0\]", TypeError, ([out.astype("int32")], [lse])),
    (r"outs\[1\]", ValueError, ([out, np.zeros((1, 1, 1, 2), np.float32)], [lse, lse])),
    (r"outs\[1\]", TypeError, ([out, out.astype("float16")], [lse, lse])),
    (r"lses\[1\]", ValueError, ([out, out], [lse, lse[0]])),
    (r"lses\[1\]", TypeError, ([out, out], [lse, lse.astype("float64")])),
    (r"lses\[0\]", TypeError, ([out.astype("float64")], [lse])),
]


@pytest.mark.parametrize(("argument", "error", "given"), REFUSED)
def test_refused(argument: str, error: Any, given: Any) -> None:
    with pytest.raises(error, match=f"^{argument}: got .*; want "):
        portattn.merge(*given)


def test_the_layout_is_checked() -> None:
    with pytest.raises(ValueError, match="layout: got 'sbhd'"):
        portattn.merge([out], [lse], layout="sbhd")


def test_kinds_are_not_mixed() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"outs\[1\]: got an array of torch"):
        portattn.merge([out, torch.tensor(out)], [lse, lse])
