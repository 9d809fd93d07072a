"""The operators ``portattn::attention_forward`` and ``portattn::attention_backward``.

The rule kept here: what a compiler is told about a result (shape, dtype, device, strides) comes
from the same `Problem` as the result itself, and is found without touching a device. Options cross
the operator's schema as plain numbers and strings; both directions of that coding stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portattn import api, select
from portattn.arguments import ALIGNMENTS, check_causal, wrong
from portattn.contract import Unsupported
from portattn.problem import Problem

# name -> type in the schema, in order; `_options` is the way back
_SCHEMA = {
    "bias": "Tensor?",
    "mask": "Tensor?",
    "alibi_slopes": "Tensor?",
    "sinks": "Tensor?",
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "seqused_k": "Tensor?",
    "block_table": "Tensor?",
    "layout": "str",
    "scale": "float?",
    "causal": "str",
    "window_left": "int?",
    "window_right": "int?",
    "softcap": "float?",
    "deterministic": "bool",
    "precision": "str",
    "backend": "str",
    "require_certified": "bool?",
    "differentiated": "bool",
}
_OPERANDS = tuple(name for name, kind in _SCHEMA.items() if kind == "Tensor?")
_BIAS, _SINKS = _OPERANDS.index("bias"), _OPERANDS.index("sinks")
_ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in _SCHEMA.items())
_CAUSAL: dict[str, bool | str] = {"no": False, "yes": True, **{name: name for name in ALIGNMENTS}}


def encode_causal(causal: Any) -> str:
    """``causal`` as a string of the schema; `TypeError` or `ValueError` for what it cannot be."""
    check_causal(causal, same_lengths=True)
    if isinstance(causal, str):
        return causal
    return "yes" if causal else "no"


def encode_backend(backend: str | Sequence[str]) -> str:
    """A name as it is, several names as ``a,b,``: a comma never stands in a name."""
    if isinstance(backend, str):
        return backend
    names = tuple(backend) if isinstance(backend, Sequence) else (backend,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(wrong("backend", repr(backend), "a name or several names"))
    return "".join(f"{name}," for name in names)


def _options(values: tuple[Any, ...]) -> dict[str, Any]:
    """The keywords of `portattn.attention` from the schema's positional values."""
    options = dict(zip(_SCHEMA, values, strict=True))
    del options["differentiated"]
    options["causal"] = _CAUSAL[options["causal"]]
    options["window"] = (options.pop("window_left"), options.pop("window_right"))
    names = options["backend"]
    if "," in names:
        options["backend"] = tuple(names.split(",")[:-1])
    return options


# ---- forward -------------------------------------------------------------------------------------
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _options(values)
    if values[-1]:
        options["backend"] = _for_both_passes(q, k, v, options)
    out, lse = api._forward(q, k, v, return_lse=True, **options)
    return out, lse


def _for_both_passes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> str:
    """The backend that will also take the backward pass: a problem that none does is refused here,
    before the forward pass, and no result is differentiated by another backend than made it."""
    rest = {n: x for n, x in options.items() if n not in ("backend", "require_certified")}
    problem, _ = api._describe(q, k, v, rest)
    chosen, _ = select.choose(
        problem.as_backward(), options["backend"], options["require_certified"]
    )
    return chosen.name


attention_forward = torch.library.custom_op(
    "portattn::attention_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
)


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor's outside, for `Problem`: a fake tensor has no numbers to look at."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    family: str = "torch"

    def values(self) -> None:
        return None


def _outline(x: torch.Tensor | None) -> _Outline | None:
    if x is None:
        return None
    return _Outline(
        tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."), str(x.device)
    )


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _options(values)
    del options["backend"], options["require_certified"]
    for name in _OPERANDS:
        options[name] = _outline(options[name])
    lines: list[Any] = [_outline(x) for x in (q, k, v)]
    problem = Problem.from_arrays(*lines, return_lse=True, **options)
    accumulator = getattr(torch, problem.accumulator)
    return q.new_empty(problem.out_shape), q.new_empty(problem.lse_shape, dtype=accumulator)


attention_forward.register_fake(_fake_forward)


# ---- backward ------------------------------------------------------------------------------------
def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool,
    *values: Any,
) -> list[torch.Tensor]:
    made = api._backward(
        q, k, v, out, lse, dout, dlse=dlse, bias_grad=bias_grad, **_options(values)
    )
    return [grad for grad in made if grad is not None]


attention_backward = torch.library.custom_op(
    "portattn::attention_backward",
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
        f"bool bias_grad, {_ARGUMENTS}) -> Tensor[]"
    ),
)


def _fake_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool,
    *values: Any,
) -> list[torch.Tensor]:
    likes = (q, k, v, values[_BIAS] if bias_grad else None, values[_SINKS])
    return [x.new_empty(x.shape) for x in likes if x is not None]


attention_backward.register_fake(_fake_backward)


# ---- autograd ------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    operands, ctx.numbers = inputs[: 3 + len(_OPERANDS)], inputs[3 + len(_OPERANDS) :]
    ctx.save_for_backward(*operands, *output)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, *operands, out, lse = ctx.saved_tensors
    given: list[torch.Tensor | None] = [None] * (3 + len(_SCHEMA))
    if dout is None and dlse is None:
        return tuple(given)
    if dout is None:
        dout = torch.zeros_like(out)
    # The bias gradient can be as large as the scores, so it is only made where it is wanted.
    bias_grad = operands[_BIAS] is not None and ctx.needs_input_grad[3 + _BIAS]
    made = iter(
        attention_backward(q, k, v, out, lse, dout, dlse, bias_grad, *operands, *ctx.numbers)
    )
    there = {3 + _BIAS: bias_grad, 3 + _SINKS: operands[_SINKS] is not None}
    for place in (0, 1, 2, 3 + _BIAS, 3 + _SINKS):
        if there.get(place, True):
            given[place] = next(made)
    return tuple(given)


def _no_second(ctx: Any, *grads: Any) -> None:
    raise Unsupported(
        "portattn.attention has no second derivative; compute the first without create_graph=True"
    )


attention_forward.register_autograd(_gradients, setup_context=_save)
attention_backward.register_autograd(_no_second)
