"""The targets that ship: what they claim they do, what they do not claim they refuse."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from portattn import Unsupported
from portattn.conformance.context import Context, Decided
from portattn.conformance.manifest import Manifest
from portattn.conformance.placement import DTYPES
from portattn.conformance.targets import TargetError, load
from portattn.conformance.targets.naive import Naive

SQ, SK, HQ, HK, D = 7, 7, 4, 2, 16


@functools.cache
def _context(name: str) -> Context:
    package = {"torch": "torch", "flex": "torch", "jax": "jax"}.get(name.partition("-")[0], "numpy")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    target = load(name)
    return Context(target, Manifest.parse(target.manifest()), name)


def _arrays(dtype: str, *, group: bool, sq: int = SQ, sk: int = SK, dv: int = D) -> list[Any]:
    rng = np.random.default_rng(5)
    heads = HK if group else HQ
    shapes = ((2, HQ, sq, D), (2, heads, sk, D), (2, heads, sk, dv))
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def _options(dtype: str, sq: int = SQ, sk: int = SK) -> Mapping[str, dict[str, Any]]:
    rng = np.random.default_rng(6)
    mask = rng.random((2, 1, sq, sk)) < 0.7
    mask[..., 0] = True
    return {
        "scale": {"scale": 0.3},
        "causal": {"causal": True},
        "window": {"window": (2, 1)},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": rng.standard_normal((HQ, sq, sk)).astype(DTYPES[dtype])},
        "mask": {"mask": mask},
        "alibi_slopes": {"alibi_slopes": np.float32([0.5, 0.25, 0.125, 0.0625])},
        "sinks": {"sinks": np.float32([0.5, -1, 2, 0])},
        "seqused_k": {"seqused_k": np.int32([3, 7])},
    }


def _want(arrays: list[Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The formula in float64."""
    wide = {
        name: value if name == "alibi_slopes" else _wide(value) for name, value in options.items()
    }
    used = wide.pop("seqused_k", None)
    if used is not None:
        wide["mask"] = np.arange(arrays[1].shape[2]) < np.reshape(used, (-1, 1, 1, 1))
    return Naive().forward(*(x.astype(np.float64) for x in arrays), **wide)


def _wide(value: Any) -> Any:
    floats = isinstance(value, np.ndarray) and value.dtype.kind not in "bi"
    return value.astype(np.float64) if floats else value


TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-13}
SOME = {"flex": ("float32",), "jax": ("bfloat16",)}  # they compile for every call of a new kind
NAMES = ("naive", "numpy", "torch-math", "torch-flash", "flex", "jax")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # a peer's own warnings are not ours
def test_claims_are_kept_and_the_rest_refused(name: str) -> None:
    ctx = _context(name)
    every = ("float16", "bfloat16", "float32", "float64")
    for dtype in every if name in ("naive", "numpy") else SOME.get(name, every[1:3]):
        cases: list[tuple[list[Any], dict[str, Any]]] = [
            (_arrays(dtype, group=False), option) for option in _options(dtype).values()
        ]
        cases.append((_arrays(dtype, group=True), {}))
        cases.append((_arrays(dtype, group=False, dv=24), {}))
        short = _arrays(dtype, group=False, sq=5)
        cases += [(short, {"causal": name}) for name in ("top_left", "bottom_right")]
        cases.append((short, {"window": (2, 1)}))
        for arrays, options in cases:
            outside = ctx.outside_of(*arrays, options)
            if outside:
                with pytest.raises(Decided) as caught:
                    ctx.forward(*arrays, **options)
                assert caught.value.cause == "rejected", (options, str(caught.value))
                continue
            out, lse, _ = ctx.forward(*arrays, **options)
            want, want_lse = _want(arrays, options)
            assert np.abs(out - want).max() < TOLERANCE[dtype], (dtype, options)
            assert (lse is not None) == ctx.manifest.claims("return_lse")
            if lse is not None:
                assert np.abs(lse - want_lse).max() < 1e-5, (dtype, options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_gradients(name: str) -> None:
    ctx = _context(name)
    if not ctx.manifest.claims("backward"):
        pytest.skip(f"{name} claims no backward here")
    arrays = _arrays("float32", group=True)
    dout = np.random.default_rng(7).standard_normal(arrays[0].shape).astype(np.float32)
    plain = _arrays("float32", group=False)
    for given, options in (
        (arrays, {"causal": True}),
        (plain, {"bias": _options("float32")["bias"]["bias"]}),
    ):
        if ctx.outside_of(*given, options, backward=True):
            continue
        out, lse = _want(given, options)
        got = ctx.backward(*given, out, lse, dout, **options)
        wide = [x.astype(np.float64) for x in given]
        want = Naive().backward(
            wide[0], wide[1], wide[2], out, lse, dout.astype(np.float64),
            **{name: _wide(value) for name, value in options.items()},
        )  # fmt: skip
        for part in ("dq", "dk", "dv", "dbias"):
            found = getattr(got, part)
            if part in want and found is not None:
                assert np.abs(found - want[part]).max() < 1e-5, (part, options)
        assert (got.dbias is not None) == (
            "bias" in options and ctx.manifest.claims("backward_bias")
        )


def test_the_naive_gradients_are_the_derivative() -> None:
    rng = np.random.default_rng(8)
    q, k, v = (x.astype(np.float64) for x in _arrays("float64", group=True))
    dout = rng.standard_normal(q.shape)
    dlse = rng.standard_normal(q.shape[:3])
    options = {
        "causal": "bottom_right",
        "softcap": 2.0,
        "bias": rng.standard_normal((HQ, SQ, SK)),
        "sinks": rng.standard_normal(HQ),
    }
    target = Naive()

    def value(**moved: Any) -> float:
        given = {"q": q, "k": k, "v": v, **options, **moved}
        out, lse = target.forward(given.pop("q"), given.pop("k"), given.pop("v"), **given)
        return float((out * dout).sum() + (lse * dlse).sum())

    out, lse = target.forward(q, k, v, **options)
    grads = target.backward(q, k, v, out, lse, dout, dlse=dlse, **options)
    inputs = {"q": q, "k": k, "v": v, "bias": options["bias"], "sinks": options["sinks"]}
    for name, x in inputs.items():
        step = 1e-6 * rng.standard_normal(x.shape)
        moved = value(**{name: x + step}) - value(**{name: x - step})
        assert moved == pytest.approx(2 * float((grads["d" + name] * step).sum()), rel=1e-6)


def test_jax_gives_the_mean_of_v_for_an_empty_row() -> None:
    ctx = _context("jax")
    q, k, v = _arrays("float32", group=False)
    mask = np.ones((SQ, SK), bool)
    mask[3] = False
    out, _, _ = ctx.forward(q, k, v, mask=mask)
    assert ctx.manifest.empty_rows == "mean"
    assert np.abs(out[:, :, 3] - v.mean(2)).max() < 1e-6


@pytest.mark.parametrize("name", ["naive", "torch-math", "torch-flash"])
def test_arguments_that_mean_nothing_are_refused_before_the_peer(name: str) -> None:
    ctx = _context(name)
    q, k, v = _arrays("float32", group=False)
    for bad in (
        {"scale": float("nan")},
        {"causal": "centre"},
        {"v": v[:, :, :-1]},
        {"k": k[:, :3], "v": v[:, :3]},
        {"mask": np.ones((1, 3, SQ, SK), bool)},
        {"bias": np.ones((SQ, SK), bool)},
        {"q": q[:, :, :3], "causal": True},
    ):
        attempt = ctx.attempt(**{"q": q, "k": k, "v": v, **bad})
        assert attempt.refused, (bad, attempt)


def test_torch_kernels_that_are_not_here_say_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for name in ("torch-efficient", "torch-cudnn"):
        with pytest.raises(TargetError, match="CUDA"):
            load(name)


def test_a_backends_manifest_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from portattn.contract import Reason

    target = load("numpy")
    backend: Any = target.backend  # type: ignore[attr-defined]
    real = type(backend).why_not

    def picky(self: Any, problem: Any, machine: Any) -> Any:
        if problem is not None and (
            problem.dtype == "float64" or problem.head_dim > 96 or problem.sinks is not None
        ):
            return (Reason("no", "x", 1, 2),)
        return real(self, problem, machine)

    monkeypatch.setattr(type(backend), "why_not", picky)
    manifest = Manifest.parse(target.manifest())
    assert manifest.dtypes == ("float16", "bfloat16", "float32")
    assert manifest.max_head_dim == 96
    assert not manifest.claims("sinks")
    assert not manifest.claims("backward_sinks")
    assert manifest.claims("paged", "packed", "backward", "out")


def test_an_adapter_names_what_it_lacks() -> None:
    target = _context("torch-math").target
    with pytest.raises(Unsupported, match="no sinks, softcap"):
        target.forward(None, None, None, softcap=1.0, sinks=1)
