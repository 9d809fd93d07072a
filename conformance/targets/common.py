"""What the adapters of peers share: the contract's validation, and refusals by name.

The rules kept here: an adapter takes exactly the keywords that it can express, and names every
other in an `Unsupported`. Arguments that mean nothing in the contract are refused before the peer
is called, as they are before a backend; some peers read past the end of arrays that do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portattn import Problem, Unsupported
from portattn.arrays import recognise

_ARRAYS = (
    "bias", "mask", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
    "block_table",
)  # fmt: skip


def understand(
    peer: str,
    known: tuple[str, ...],
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    layout: str,
) -> Problem:
    """The problem that the call states. Raises `Unsupported` where ``options`` holds anything but
    ``known``, and ValueError or TypeError for arguments that the contract refuses."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise Unsupported(f"{peer} has no {', '.join(unknown)}")
    given: dict[str, Any] = {"layout": layout, **options}
    for name in _ARRAYS:
        if given.get(name) is not None:
            given[name] = recognise(given[name], name)
    return Problem.from_arrays(recognise(q, "q"), recognise(k, "k"), recognise(v, "v"), **given)


def causal_at(peer: str, alignment: str, problem: Problem) -> bool:
    """Whether to call a peer with its causal flag, which is aligned at ``alignment``. Raises
    `Unsupported` where the problem wants the other and it makes a difference."""
    if problem.causal is None:
        return False
    equal = problem.seq_q == problem.seq_k and not problem.packed and not problem.seqused_k
    if not equal and problem.causal != alignment:
        raise Unsupported(f"{peer} aligns causal at {alignment}; asked for {problem.causal}")
    return True


def four_axes(x: Any) -> Any:
    """A mask or bias of fewer axes as one of four; None stays None."""
    return None if x is None else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
