"""Whether a contender computed attention: its result against plain float32 products.

The rule kept here: a slice is enough to tell attention from anything else (first and last head,
first and last rows), and cheap at every length. The bound is a gate for timing, not a proof of
exactness; that is the conformance suite's.
"""

from __future__ import annotations

import math
from typing import Any

from portattn.bench.gpu_cells import GpuCell

LIMIT = 2e-2  # relative L2 error; bfloat16 results that are right stay below 1e-2
_ROWS = 64  # from either end


def relative_error(cell: GpuCell, copy: tuple[Any, Any, Any], result: Any, dout: Any) -> float:
    """The relative L2 error of the first copy's result: the output, or (dq, dk, dv)."""
    if cell.kind == "backward":
        return _backward_error(cell, copy, result, dout)
    return _forward_error(cell, copy, result)


def _forward_error(cell: GpuCell, copy: tuple[Any, Any, Any], out: Any) -> float:
    import torch

    q, k, v = copy
    n, group = cell.seq_q, cell.heads_q // cell.heads_k
    rows = sorted({*range(min(_ROWS, n)), *range(max(0, n - _ROWS), n)})
    index = torch.tensor(rows, device=q.device)
    pairs = []
    with torch.no_grad():
        for b, h in {(0, 0), (cell.batch - 1, cell.heads_q - 1)}:
            q_, k_, v_ = (x.float() for x in (q[b, h, index], k[b, h // group], v[b, h // group]))
            weights = torch.softmax(_scores(cell, q_, k_, index), -1)
            pairs.append((out[b, h, index].float(), weights @ v_))
    return _relative(pairs)


def _backward_error(cell: GpuCell, copy: tuple[Any, Any, Any], grads: Any, dout: Any) -> float:
    """One head, whole: every query row takes part in dk and dv. The worst of the three."""
    import torch

    leaves = [x[0, 0].float().requires_grad_() for x in copy]
    q, k, v = leaves
    with torch.enable_grad():
        index = torch.arange(cell.seq_q, device=q.device)
        out = torch.softmax(_scores(cell, q, k, index), -1) @ v
        wanted = torch.autograd.grad(out, leaves, dout[0, 0].float())
    errors = [_relative([(g[0, 0].float(), w)]) for g, w in zip(grads, wanted, strict=True)]
    return math.nan if any(math.isnan(e) for e in errors) else max(errors)


def _scores(cell: GpuCell, q: Any, k: Any, index: Any) -> Any:
    """Scores of the query rows ``index``; the lengths are equal where the cell is causal."""
    import torch

    scores = q @ k.T / math.sqrt(cell.head_dim)
    if not cell.causal:
        return scores
    hidden = torch.arange(cell.seq_k, device=q.device)[None, :] > index[:, None]
    return scores.masked_fill_(hidden, -math.inf)


def _relative(pairs: list[tuple[Any, Any]]) -> float:
    wrong = sum(float((got - want).square().sum()) for got, want in pairs)
    return math.sqrt(wrong / sum(float(want.square().sum()) for _, want in pairs))
