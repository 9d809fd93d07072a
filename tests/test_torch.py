"""The torch face: gradients against float64 autograd of the formula, and what a compiler is told.

Case ids (BUG-...) are those of the collection of public reports that these tests were drawn from.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import portattn  # noqa: E402
from portattn.torch import ops  # noqa: E402

F64 = torch.float64


def formula(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: Any = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> tuple[Any, Any]:
    """CONTRACT's order of operations for layout bshd, dense, differentiable: the oracle."""
    length_q, length_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    i, j = torch.arange(length_q)[:, None], torch.arange(length_k)[None]
    corner = length_k - length_q
    if alibi_slopes is not None:
        slopes = alibi_slopes.reshape(-1, q.shape[2], 1, 1)
        scores = scores - slopes * (i + corner - j).abs()
    shift = 0 if causal == "top_left" else corner
    visible = torch.ones(length_q, length_k, dtype=torch.bool)
    if causal:
        visible = visible & (j <= i + shift)
    if window is not None:
        left, right = window
        if left is not None:
            visible = visible & (j >= i + shift - left)
        if right is not None:
            visible = visible & (j <= i + shift + right)
    if mask is not None:
        visible = visible & mask
    visible = visible.expand(scores.shape)
    logits = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    seen = torch.isfinite(logits).any(-1, keepdim=True)
    safe = torch.where(seen, logits, torch.zeros_like(logits))  # no 0 * NaN behind an empty row
    weights = torch.softmax(safe, -1)[..., :length_k].masked_fill(~visible, 0.0)
    lse = torch.where(seen[..., 0], torch.logsumexp(safe, -1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def tensors(*shapes: tuple[int, ...], dtype: Any = F64, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=F64).to(dtype) for s in shapes]


def gradients(function: Any, inputs: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """Results of ``function`` on leaves made of ``inputs``, and d(loss)/d(each of ``wanted``), for
    a loss that gives every element of out and every finite LSE its own weight."""
    leaves = {
        name: x.detach().clone().requires_grad_(name in wanted)
        if isinstance(x, torch.Tensor)
        else x
        for name, x in inputs.items()
    }
    out, lse = function(**leaves)
    w_out, w_lse = tensors(tuple(out.shape), tuple(lse.shape), seed=5)
    seen = torch.isfinite(lse)
    loss = (out.to(F64) * w_out).sum() + (lse.to(F64)[seen] * w_lse[seen]).sum()
    grads = torch.autograd.grad(loss, [leaves[name] for name in wanted])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}


def both(inputs: dict[str, Any], wanted: tuple[str, ...], atol: float, **options: Any) -> None:
    """portattn in the inputs' dtype agrees with the formula in float64, values and gradients."""
    got = gradients(lambda **x: portattn.attention(**x, return_lse=True, **options), inputs, wanted)
    exact = {
        name: x.to(F64) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    want = gradients(lambda **x: formula(**x, **options), exact, wanted)
    for name in ("out", "lse", *wanted):
        assert got[name].shape == want[name].shape, name
        if name in wanted:
            assert got[name].dtype == inputs[name].dtype, name
        torch.testing.assert_close(got[name].to(F64), want[name], rtol=0, atol=atol, msg=name)


# ---- gradients -----------------------------------------------------------------------------------
@pytest.mark.parametrize("alone", ["q", "k", "v", "bias", "sinks"])
def test_each_input_alone_may_require_grad_bug_068(alone: str) -> None:
    q, k, v, bias, sinks = tensors(
        (1, 64, 1, 16), (1, 64, 1, 16), (1, 64, 1, 16), (1, 1, 64, 64), (1,), dtype=torch.float32
    )
    both({"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}, (alone,), 1e-4)


@pytest.mark.parametrize("shape", [(1, 8, 16, 16), (1, 1, 16, 16), (2, 1, 1, 16), (16, 16)])
def test_gradient_of_a_broadcast_bias_is_reduced_bug_069(shape: tuple[int, ...]) -> None:
    q, k, v, bias = tensors(
        (2, 16, 8, 16), (2, 16, 8, 16), (2, 16, 8, 16), shape, dtype=torch.float32
    )
    both({"q": q, "k": k, "v": v, "bias": bias}, ("bias", "q"), 1e-5)


def test_gradient_of_expanded_keys_bug_069() -> None:
    q, k, v = tensors((2, 16, 8, 16), (2, 16, 1, 16), (1, 16, 8, 16))

    def expanded(function: Any) -> Any:
        return lambda q, k, v: function(q, k.expand(2, 16, 8, 16), v.expand(2, 16, 8, 16))

    call = expanded(lambda q, k, v: portattn.attention(q, k, v, return_lse=True))
    inputs = {"q": q, "k": k, "v": v}
    got, want = (gradients(f, inputs, ("k", "v")) for f in (call, expanded(formula)))
    for name in ("k", "v"):
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": -0.3},
        {"causal": "bottom_right"},
        {"causal": "top_left"},
        {"window": (2, 1)},
        {"causal": "bottom_right", "window": (3, None), "softcap": 2.0},
        {"softcap": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7)], ids=str)
def test_gradients_with_groups_and_a_wider_value(
    options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    sq, sk = lengths
    q, k, v, sinks = tensors((2, sq, 6, 8), (2, sk, 2, 8), (2, sk, 2, 12), (6,))
    both({"q": q, "k": k, "v": v, "sinks": sinks}, ("q", "k", "v", "sinks"), 1e-11, **options)
    both({"q": q, "k": k, "v": v}, ("q", "k", "v"), 1e-11, **options)


def test_gradients_with_mask_bias_and_alibi_and_empty_rows() -> None:
    q, k, v, bias = tensors((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (4, 6, 7))
    mask = torch.rand(2, 1, 6, 7, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1, :, 2] = False
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "alibi_slopes": slopes}
    both(inputs, ("q", "k", "v", "bias"), 1e-11)
    got = gradients(lambda **x: portattn.attention(**x, return_lse=True), inputs, ("q",))
    assert not got["out"][1, 2].any() and not got["q"][1, 2].any()
    assert (got["lse"][1, :, 2] == -torch.inf).all()


def test_bfloat16_gradients() -> None:
    q, k, v = tensors((2, 33, 4, 64), (2, 65, 2, 64), (2, 65, 2, 64), dtype=torch.bfloat16)
    both({"q": q, "k": k, "v": v}, ("q", "k", "v"), 0.06, causal="bottom_right")


def test_gradcheck_in_float64() -> None:
    q, k, v, bias = (
        x.requires_grad_() for x in tensors((1, 3, 4, 4), (1, 5, 2, 4), (1, 5, 2, 3), (4, 1, 5))
    )

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return portattn.attention(
            q, k, v, bias=bias, causal="bottom_right", softcap=3.0, return_lse=True
        )

    assert torch.autograd.gradcheck(call, (q, k, v, bias))


def test_only_inputs_out_and_lse_are_kept_for_backward() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((1, 256, 2, 8), (1, 256, 2, 8), (1, 256, 2, 8)))
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = portattn.attention(q, k, v, return_lse=True)
    known = {x.data_ptr(): x.nbytes for x in (q, k, v, out, lse)}
    assert {x.data_ptr() for x in kept} <= set(known)
    assert sum({x.data_ptr(): x.nbytes for x in kept}.values()) <= sum(known.values())


def test_gradient_through_lse_alone() -> None:
    q, k, v = tensors((1, 4, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    _, lse = portattn.attention(*leaves, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(formula(*exact)[1].sum(), exact[:2])
    torch.testing.assert_close(dq, want[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(dk, want[1], rtol=0, atol=1e-12)
    assert not dv.any()


@pytest.mark.parametrize("shapes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_gradients_of_nothing_are_zero(shapes: tuple[int, int, int]) -> None:
    batch, sq, sk = shapes
    q, k, v = (
        x.requires_grad_() for x in tensors((batch, sq, 2, 8), (batch, sk, 2, 8), (batch, sk, 2, 4))
    )
    out = portattn.attention(q, k, v)
    assert out.shape == (batch, sq, 2, 4)
    assert not out.any()
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


# ---- refusals ------------------------------------------------------------------------------------
def test_a_second_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((1, 3, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4)))
    out = portattn.attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(portattn.Unsupported, match="second derivative"):
        torch.autograd.grad(dq.sum(), k)


def test_out_is_refused_where_a_gradient_is_wanted() -> None:
    q, k, v = tensors((1, 3, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4))
    out = torch.empty_like(q)
    q.requires_grad_()
    with pytest.raises(ValueError, match=r"^out: "):
        portattn.attention(q, k, v, out=out)
    with torch.no_grad():
        assert portattn.attention(q, k, v, out=out) is out
    torch.testing.assert_close(out, portattn.attention(q, k, v).detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "bad",
    [
        {"scale": float("nan")},
        {"scale": "1"},
        {"softcap": 0.0},
        {"softcap": "x"},
        {"window": (-1, 0)},
        {"window": (2.5, 0)},
        {"window": 3},
        {"causal": "lower"},
        {"causal": 1},
        {"causal": True},
        {"layout": "sbhd"},
        {"layout": ["bshd"]},
        {"deterministic": 1},
        {"precision": "fp8"},
        {"precision": "tf32"},
        {"mask": torch.ones(3, 9, dtype=torch.bool)},
        {"mask": torch.ones(3, 5)},
        {"bias": torch.ones(3, 5, dtype=torch.bool)},
        {"bias": np.ones((3, 5))},
        {"sinks": torch.zeros(3)},
        {"seqused_k": torch.tensor([9], dtype=torch.int32)},
        {"backend": "no-such-backend"},
        {"backend": 3},
        {"backend": ()},
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_alike_with_and_without_gradients(bad: dict[str, Any]) -> None:
    q, k, v = tensors((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    with pytest.raises((TypeError, ValueError, portattn.Unsupported)) as plain:
        portattn.attention(q, k, v, **bad)
    with pytest.raises(plain.type) as recorded:
        portattn.attention(q.requires_grad_(), k, v, **bad)
    assert str(recorded.value).split(":")[0] == str(plain.value).split(":")[0]


def test_a_problem_without_a_backward_pass_is_refused_before_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose, asked = ops.select.choose, []

    def forward_only(problem: Any, *rest: Any) -> Any:
        asked.append(problem.backward)
        if problem.backward:
            raise portattn.Unsupported("no backend takes the backward pass")
        return choose(problem, *rest)

    monkeypatch.setattr(ops.select, "choose", forward_only)
    q, k, v = tensors((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4))
    portattn.attention(q, k, v)
    with pytest.raises(portattn.Unsupported, match="backward"):
        portattn.attention(q.requires_grad_(), k, v)
    assert asked == [False, True]


def test_slopes_that_require_grad_are_refused() -> None:
    q, k, v = tensors((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4))
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes"):
        portattn.attention(q.requires_grad_(), k, v, alibi_slopes=slopes)


# ---- the operator --------------------------------------------------------------------------------
def i32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"window": (1, 0)},
    "left": {"window": (2, None)},
    "right": {"window": (None, 1)},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": tensors((4, 6, 8), seed=7)[0]},
    "mask": {"mask": torch.ones(6, 8, dtype=torch.bool).tril()},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 1.0, 1.5, 2.0])},
    "sinks": {"sinks": tensors((4,), seed=8)[0]},
    "seqused": {"seqused_k": i32(3, 8)},
    "deterministic": {"deterministic": True},
    "backends": {"backend": ("numpy",)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_every_option_crosses_the_operator(name: str, layout: str) -> None:
    q, k, v = tensors((2, 6, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8))
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"layout": layout, **OPTIONS[name]}
    plain = portattn.attention(q, k, v, return_lse=True, **options)
    recorded = portattn.attention(q.requires_grad_(), k, v, return_lse=True, **options)
    for a, b in zip(plain, recorded, strict=True):
        assert torch.equal(a, b.detach())
    if name not in ("deterministic", "backends"):
        assert not torch.equal(plain[0], portattn.attention(q.detach(), k, v, layout=layout))


def test_packed_sequences_cross_the_operator_with_their_gradients() -> None:
    q, k, v = tensors((9, 4, 8), (11, 2, 8), (11, 2, 8))
    packed = {"layout": "thd", "cu_seqlens_q": i32(0, 4, 9), "cu_seqlens_k": i32(0, 6, 11)}
    plain = portattn.attention(q, k, v, causal="bottom_right", **packed)
    q.requires_grad_()
    recorded = portattn.attention(q, k, v, causal="bottom_right", **packed)
    assert torch.equal(plain, recorded.detach())
    want = [
        formula(q[None, a:b], k[None, c:d], v[None, c:d], causal="bottom_right")[0][0]
        for a, b, c, d in ((0, 4, 0, 6), (4, 9, 6, 11))
    ]
    torch.testing.assert_close(recorded, torch.cat(want), rtol=0, atol=1e-12)
    (got,) = torch.autograd.grad(recorded.square().sum(), q)
    (exact,) = torch.autograd.grad(torch.cat(want).square().sum(), q)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-11)


def test_paged_keys_cross_the_operator_with_their_gradients() -> None:
    q, pages, values = tensors((2, 3, 4, 8), (5, 4, 2, 8), (5, 4, 2, 8))
    pages[3] = torch.nan  # in no sequence: never read, no gradient
    table = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)
    used = i32(5, 7)
    options = {"causal": "bottom_right", "seqused_k": used, "block_table": table}
    plain = portattn.attention(q, pages, values, **options)
    leaves = [x.clone().requires_grad_() for x in (q, pages, values)]
    recorded = portattn.attention(*leaves, **options)
    assert torch.equal(plain, recorded.detach())
    got = torch.autograd.grad(recorded.square().sum(), leaves)

    exact = [x.clone().requires_grad_() for x in (q, pages, values)]
    loss = 0.0
    for b, n in enumerate(used.tolist()):
        k, v = (x[table[b].long()].flatten(0, 1)[None, :n] for x in exact[1:])
        loss = loss + formula(exact[0][b : b + 1], k, v, causal="bottom_right")[0].square().sum()
    for a, b in zip(got, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    assert not got[1][3].any() and not got[2][3].any()


def operator_arguments(**options: Any) -> tuple[Any, ...]:
    """The positional values of the operator for these options."""
    caught: list[tuple[Any, ...]] = []

    def catch(*arguments: Any) -> Any:
        caught.append(arguments)
        return None, None

    original, ops.attention_forward = ops.attention_forward, catch
    try:
        portattn.torch.attention_with_grad(**options)
    finally:
        ops.attention_forward = original
    return caught[0]


@pytest.mark.parametrize("name", ["scale", "causal", "bias", "sinks", "mask", "seqused"])
def test_opcheck(name: str) -> None:
    q, k, v = (
        x.requires_grad_() for x in tensors((2, 6, 4, 8), (2, 8, 2, 8), (2, 8, 2, 16), seed=2)
    )
    arguments = operator_arguments(q=q, k=k, v=v, **OPTIONS[name])
    torch.library.opcheck(ops.attention_forward, arguments)
    with torch.no_grad():
        out, lse = ops.attention_forward(*arguments)
        flat = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    backward = (*flat[:3], out, lse, torch.ones_like(out), None, True, *flat[3:])
    torch.library.opcheck(ops.attention_backward, backward)


def test_a_frozen_bias_costs_no_gradient_of_its_size() -> None:
    q, k, v = (x.requires_grad_() for x in tensors((1, 64, 4, 8), (1, 64, 4, 8), (1, 64, 4, 8)))
    made: list[Any] = []
    backward = portattn.api._backward

    def watched(*args: Any, **options: Any) -> Any:
        made.append(backward(*args, **options))
        return made[-1]

    for frozen in (True, False):
        bias = torch.zeros(1, 4, 64, 64, requires_grad=not frozen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(portattn.api, "_backward", watched)
            portattn.attention(q, k, v, bias=bias).sum().backward()
        assert (made[-1].dbias is None) == frozen
        assert (bias.grad is None) == frozen


def test_make_fx_records_the_operator() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    (q,) = tensors((1, 4, 2, 8))
    traced = make_fx(lambda x: portattn.attention(x, x, x))(q)
    other = q + 1
    assert torch.equal(traced(other), portattn.attention(other, other, other))


def test_meta_tensors_give_shapes_without_numbers() -> None:
    q = torch.empty(2, 5, 4, 8, device="meta")
    out, lse = portattn.attention(q, q, q, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 4, 5)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("kind", ["plain", "permuted", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_fake_results_look_like_the_real_ones_bug_071(layout: str, kind: str, dtype: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    length, batch = (1, 1) if kind == "one" else (100, 2)
    shapes = [(batch, 8, length, 64), (batch, 4, length, 64), (batch, 4, length, 128)]
    if layout == "bshd":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    q, k, v = tensors(*shapes, dtype=dtype)
    if kind == "permuted":
        q, k, v = (x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in (q, k, v))
    bias = torch.zeros(8, 1, length, dtype=torch.float32)
    options = {"layout": layout, "return_lse": True, "causal": True, "bias": bias}
    real = portattn.attention(q, k, v, **options)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        options["bias"] = mode.from_tensor(bias)
        fake = portattn.attention(*(mode.from_tensor(x) for x in (q, k, v)), **options)
    for a, b in zip(real, fake, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.device == b.device
        assert a.stride() == b.stride()


def test_fake_gradients_look_like_the_real_ones_bug_071() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = tensors((1, 8, 1, 64), (1, 4, 9, 64), (1, 4, 9, 128), dtype=torch.float32)
    bias = torch.zeros(1, 9)

    def grads(*inputs: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse = portattn.attention(*leaves[:3], bias=leaves[3], layout="bhsd", return_lse=True)
        return torch.autograd.grad(out.sum() + lse.sum(), leaves)

    real = grads(q, k, v, bias)
    with FakeTensorMode() as mode:
        fake = grads(*(mode.from_tensor(x) for x in (q, k, v, bias)))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# ---- compilers -----------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph_with_gradients(dynamic: bool) -> None:
    def model(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = portattn.attention(
            q * 2, k, v, causal="bottom_right", window=(5, None), sinks=sinks, softcap=9.0
        )
        return out.relu()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (7, 12):
        inputs = tensors((2, length, 4, 8), (2, length + 3, 2, 8), (2, length + 3, 2, 8), (4,))
        eager = [x.clone().requires_grad_() for x in inputs]
        traced = [x.clone().requires_grad_() for x in inputs]
        a, b = model(*eager), compiled(*traced)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        for x, y in zip(
            torch.autograd.grad(a.square().sum(), eager),
            torch.autograd.grad(b.square().sum(), traced),
            strict=True,
        ):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_compile_without_gradients_and_with_changing_options_bug_072() -> None:
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    compiled = torch.compile(portattn.attention, fullgraph=True, backend="aot_eager")
    variants: list[dict[str, Any]] = [
        {},
        {"scale": 2.0},
        {"softcap": 1.0},
        {"causal": True},
        {"window": (0, 0)},
    ]
    for first, second in itertools.permutations(variants, 2):
        torch._dynamo.reset()
        for options in (first, second):
            got = compiled(q, k, v, **options)
            assert torch.equal(got, portattn.attention(q, k, v, **options)), (first, second)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return portattn.attention(q, k, v, causal="bottom_right")

    q, k, v = tensors((1, 3, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    program = torch.export.export(Layer(), (q, k, v))
    names = [str(node.target) for node in program.graph.nodes]
    assert "portattn.attention_forward.default" in names
    assert torch.equal(program.module()(q, k, v), Layer()(q, k, v))
