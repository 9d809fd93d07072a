"""The public calls: validate, select, run.

The rule kept here: everything about a call is checked before anything is launched, and the result
has the caller's array type, dtype and device. No kernel and no framework import lives here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from portattn import arrays, select
from portattn.arguments import check_result, wrong
from portattn.arrays import Array, recognise
from portattn.contract import Call
from portattn.problem import Problem

_OPERANDS = (
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "block_table",
)


class Gradients(NamedTuple):
    """What `attention_backward` returns; ``dbias`` and ``dsinks`` are None where the call had no
    bias or sinks. Each has the shape and dtype of what it is the gradient of."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bshd",
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    out: Any = None,
    precision: str = "ieee",
    backend: str | Sequence[str] = "auto",
    require_certified: bool | None = None,
) -> Any:
    """Exact softmax attention: ``out = softmax(scale * q @ k.T + ...) @ v``.

    Scores are formed in this order: scale times q·k, softcap, + bias, + ALiBi, then mask, causal
    and window hide keys, then sinks join the denominator. A row that sees no key is 0 with LSE
    -inf, never NaN. Query head h reads key head ``h // (Hq / Hk)``.

    Args:
        q: (B, Sq, Hq, D); ``layout="bhsd"``: (B, Hq, Sq, D); ``"thd"``: (Tq, Hq, D).
        k: (B, Sk, Hk, D) likewise; with ``block_table``: (num_blocks, block_size, Hk, D).
        v: as k, with its own head dim Dv.
        scale: factor on q·k; None: 1/sqrt(D).
        causal: False; True where query and key lengths agree; else "bottom_right" (the last query
            sees the last key, as with a cache) or "top_left" (the first sees the first).
        window: (left, right) keys before and after the query's own position, on the alignment of
            ``causal`` (bottom-right without it); None: unlimited.
        softcap: c > 0; scores become c * tanh(scores / c).
        bias: float, added to the scores; any shape that broadcasts to (B, Hq, Sq, Sk).
        mask: bool, True = attend; broadcasts likewise.
        alibi_slopes: float32 (Hq,) or (B, Hq); adds -slope * |i + Sk - Sq - j|.
        sinks: (Hq,) extra logits in the denominator, without a value.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), where each packed sequence starts; layout "thd".
            A bias or mask then broadcasts to (B, Hq, longest q, longest k), and a sequence uses
            its leading part.
        seqused_k: int32 (B,), keys in use per sequence; takes the place of Sk in every alignment.
        block_table: int32 (B, max_blocks), which block holds which keys; needs ``seqused_k``.
        return_lse: also return the natural log-sum-exp of each row, (B, Hq, Sq) or (Hq, Tq),
            float32 (float64 for float64 input).
        deterministic: bitwise equal over runs, the backward pass too.
        out: an array of the result's shape and dtype to fill; it is returned.
        precision: "ieee", or "tf32" for float32 input on hardware that has it.
        backend: "auto", a name, or names in order of preference; a name never falls back.
        require_certified: only a backend with a certificate for this machine; None: as the
            environment variable PORTATTN_REQUIRE_CERTIFIED says.

    Returns:
        ``out`` in q's layout with head dim Dv, or ``(out, lse)``. torch tensors that require grad
        get their gradient through this call.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what is
            wanted.
        portattn.Unsupported: no backend, or not the named one, takes the problem; every reason is
            in the message and in ``.reasons``.

    Source: Dao et al., FlashAttention (2022), sections 3.1 and 3.2; Milakov and Gimelshein, Online
    normalizer calculation for softmax (2018).
    """
    options: dict[str, Any] = {
        "layout": layout,
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k,
        "block_table": block_table,
        "deterministic": deterministic,
        "precision": precision,
        "backend": backend,
        "require_certified": require_certified,
    }
    if _needs_graph(q, k, v, bias, sinks):
        if out is not None:
            raise ValueError(
                wrong("out", "an array where a gradient or a traced graph is wanted", "None")
            )
        from portattn.torch import attention_with_grad

        result, lse = attention_with_grad(q, k, v, **options)
        return (result, lse) if return_lse else result
    del options["backend"], options["require_certified"]
    return _run(q, k, v, return_lse, out, backend, require_certified, options)


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    *,
    dlse: Any = None,
    backend: str | Sequence[str] = "auto",
    require_certified: bool | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of `attention`, with the scores recomputed from ``out`` and ``lse``.

    Args:
        q, k, v: as given to `attention`.
        out, lse: what it returned (``return_lse=True``).
        dout: gradient of ``out``, of its shape and dtype.
        dlse: gradient of ``lse``, of its shape and dtype, or None.
        options: the same options as the forward call's.

    Returns:
        `Gradients`: dq, dk, dv, and dbias, dsinks where the call had them; reduced over the axes
        that broadcast.

    Raises:
        TypeError, ValueError, portattn.Unsupported: as `attention`.

    Source: Dao et al., FlashAttention (2022), section 3.1 and appendix B.2.
    """
    _known(options, "attention_backward")
    return _backward(
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse=dlse,
        backend=backend,
        require_certified=require_certified,
        **options,
    )


def explain(q: Any, k: Any, v: Any, **options: Any) -> select.Decision:
    """What `attention` would do with these arrays and options, without running: the backend that
    would be chosen, its plan, and every other backend's reasons.

    torch tensors that require grad are asked about with their backward pass.
    """
    backend = options.pop("backend", "auto")
    require_certified = options.pop("require_certified", None)
    out = options.pop("out", None)
    return_lse = options.pop("return_lse", False)
    _known(options, "explain")
    problem, call = _describe(q, k, v, options, return_lse=return_lse)
    if out is not None:
        given = recognise(out, "out")
        _check_out(given, problem, call)
        problem = problem.with_results(out=given)
    if any(getattr(x, "requires_grad", False) for x in (q, k, v)):
        problem = problem.as_backward()
    return select.decide(problem, None, backend, require_certified)


def merge(outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bshd") -> tuple[Any, Any]:
    """Join partial results over disjoint key sets into the result over all keys.

    Args:
        outs: results of `attention` over each part of the keys, all of one shape.
        lses: their natural log-sum-exps. A part without visible keys (out 0, LSE -inf) changes
            nothing; of sinks, one part alone may have been given them.
        layout: that of ``outs``: "bshd", "bhsd" or "thd".

    Returns:
        ``(out, lse)`` in the arrays' own type.

    Source: Dao et al., Flash-Decoding (2023); Milakov and Gimelshein (2018), section 3.1.
    """
    from portattn.merging import merge as join

    return join(outs, lses, layout)


def _needs_graph(q: Any, *others: Any) -> bool:
    """Whether this is a torch call to differentiate, or to trace and not to run (torch.compile,
    torch.export, fake tensors); such a call is one operator of torch's."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return False
    grad, wanted = torch.is_grad_enabled(), False
    for x in (q, *others):
        if x is None:
            continue
        if getattr(x, "is_nested", False):
            return False  # a nested tensor has no operator; the plain call refuses it by name
        wanted = wanted or (grad and getattr(x, "requires_grad", False))
    if wanted:
        return True
    if torch.compiler.is_compiling() or type(q) not in (torch.Tensor, torch.nn.Parameter):
        return True
    # A dispatch mode (make_fx, fake tensors over real ones) records operators and would miss work
    # done on a tensor's memory; torch has no public question for it.
    return bool(q.is_meta or torch._C._len_torch_dispatch_stack() > 0)


def _forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    backend: str | Sequence[str] = "auto",
    require_certified: bool | None = None,
    **options: Any,
) -> Any:
    """`attention` without autograd."""
    return _run(q, k, v, return_lse, out, backend, require_certified, options)


def _run(
    q: Any,
    k: Any,
    v: Any,
    return_lse: bool,
    out: Any,
    backend: str | Sequence[str],
    require_certified: bool | None,
    options: dict[str, Any],
) -> Any:
    """The same, without a copy of the options: they are a good part of a short call's time."""
    problem, call = _describe(q, k, v, options, return_lse=return_lse)
    if out is not None:
        given = recognise(out, "out")
        _check_out(given, problem, call)
        call.out = given
        problem = problem.with_results(out=given)
    chosen, plan = select.choose(problem, backend, require_certified)
    shape = problem.out_shape
    if out is None:
        call.out = arrays.empty(call.q, shape, problem.dtype)
    if return_lse:
        call.lse = arrays.empty(call.q, problem.lse_shape, problem.accumulator)
    if 0 not in shape:
        chosen.run(problem, plan, call)
    result = out if out is not None else arrays.finish(call.out, call.q)
    if not return_lse:
        return result
    assert call.lse is not None
    return result, arrays.finish(call.lse, call.q)


def _backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    *,
    dlse: Any = None,
    backend: str | Sequence[str] = "auto",
    require_certified: bool | None = None,
    bias_grad: bool = True,
    **options: Any,
) -> Gradients:
    """`attention_backward`; without ``bias_grad`` the bias gradient, which can be as large as the
    scores, is not made."""
    problem, call = _describe(q, k, v, options)
    problem = problem.as_backward()
    for name, value, shape, dtype in (
        ("out", out, problem.out_shape, problem.dtype),
        ("lse", lse, problem.lse_shape, problem.accumulator),
        ("dout", dout, problem.out_shape, problem.dtype),
        ("dlse", dlse, problem.lse_shape, problem.accumulator),
    ):
        if value is None and name == "dlse":
            continue
        array = recognise(value, name)
        check_result(name, array, call.q, shape, dtype)
        setattr(call, name, array)
    problem = problem.with_results(out=call.out, lse=call.lse, dout=call.dout, dlse=call.dlse)
    backend_object, plan = select.choose(problem, backend, require_certified)
    for name, like in (("dq", call.q), ("dk", call.k), ("dv", call.v)):
        setattr(call, name, arrays.empty(call.q, like.shape, like.dtype))
    if call.bias is not None and bias_grad:
        call.dbias = arrays.empty(call.q, call.bias.shape, call.bias.dtype)
    if call.sinks is not None:
        call.dsinks = arrays.empty(call.q, call.sinks.shape, call.sinks.dtype)
    backend_object.run(problem, plan, call)
    return Gradients(
        *(
            None if made is None else arrays.finish(made, call.q)
            for made in (call.dq, call.dk, call.dv, call.dbias, call.dsinks)
        )
    )


def _describe(
    q: Any, k: Any, v: Any, options: dict[str, Any], **flags: Any
) -> tuple[Problem, Call]:
    """The problem and its arrays; everything is validated on the way. What was found valid once is
    remembered by all that it hangs on, unless that is in the arrays' numbers."""
    described = {"q": recognise(q, "q"), "k": recognise(k, "k"), "v": recognise(v, "v")}
    rest = dict(options)
    for name in _OPERANDS:
        value = rest.pop(name, None)
        if value is not None:
            described[name] = recognise(value, name)
    return _valid(described, rest, flags), Call(out=described["q"], **described)


def _valid(described: dict[str, Array], rest: dict[str, Any], flags: dict[str, Any]) -> Problem:
    """`Problem.from_arrays`, remembered."""
    if len(described) > 3:  # more than q, k and v
        for name in _VALUES:
            if name in described and described[name].device == "cpu":
                return Problem.from_arrays(**described, **rest, **flags)
    # True and 1, and 1 and 1.0, are equal and not the same option: the types are part of the key.
    numbers, window = (*rest.values(), *flags.values()), rest.get("window")
    key = (
        tuple(described),
        tuple([a[1:] for a in described.values()]),  # all but the array itself
        tuple(rest),
        tuple(flags),
        numbers,
        tuple(map(type, numbers)),
        tuple(map(type, window)) if isinstance(window, tuple) else None,
    )
    try:
        known = _VALID.get(key)
    except TypeError:  # an option that cannot be hashed, and is refused by name below
        return Problem.from_arrays(**described, **rest, **flags)
    if known is None:
        known = Problem.from_arrays(**described, **rest, **flags)
        if len(_VALID) >= _REMEMBERED:
            _VALID.clear()
        _VALID[key] = known
    return known


_VALUES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
_REMEMBERED = 1024
_VALID: dict[Any, Problem] = {}


def _known(options: dict[str, Any], function: str) -> None:
    for name in options:
        if name not in _OPTION_NAMES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


_OPTION_NAMES = frozenset(
    (*_OPERANDS, "layout", "scale", "causal", "window", "softcap", "deterministic", "precision")
)


def _check_out(out: Array, problem: Problem, call: Call) -> None:
    """``out=`` must fit, be writable, and share no memory with itself or with an input."""
    check_result("out", out, call.q, problem.out_shape, problem.dtype)
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.strides, strict=True)):
        raise ValueError(wrong("out", f"strides {out.strides}", "one place for each element"))
    if getattr(out.source, "requires_grad", False):
        raise ValueError(wrong("out", "a tensor that requires grad", "one that does not"))
    if out.device != "cpu":
        return
    import numpy

    view = arrays.as_numpy(out)
    if not view.flags.writeable:
        raise ValueError(wrong("out", "a read-only array", "a writable one"))
    inputs = ("q", "k", "v", *_OPERANDS)
    for name in inputs:
        array: Array | None = getattr(call, name)
        if array is None:
            continue
        other = arrays.as_numpy(array)
        if numpy.may_share_memory(view, other) and _overlap(view, other):
            raise ValueError(wrong("out", f"memory that {name} uses too", "memory of its own"))


def _overlap(a: Any, b: Any) -> bool:
    import numpy

    try:
        return bool(numpy.shares_memory(a, b, 100_000))  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True
