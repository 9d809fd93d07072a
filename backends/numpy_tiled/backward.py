"""Backward pass by recomputation from out and LSE, one owner for each gradient element.

The rule kept here: no two jobs write one element and no sum depends on who comes first, so the
gradients have the same bits on any number of threads; scores are recomputed, never stored. Jobs
own a tile of query rows (dq), a tile of keys or a page (dk, dv, summed over the group's heads and
all who share the page), a tile of the bias (dbias, summed over the axes that it was broadcast
along) or a head (dsinks).

With P = exp(S - lse) and D = rowsum(dout * out) - dlse: dS = P * (dout v^T - D), dv = P^T dout,
dq = scale * dS k, dk = scale * dS^T q; a softcap multiplies dS by 1 - tanh^2. (Dao et al.,
FlashAttention, 2022, appendix B.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from portattn.backends.numpy_tiled.config import Config
from portattn.backends.numpy_tiled.masking import Array, Bools, key_tiles
from portattn.backends.numpy_tiled.pool import Job
from portattn.backends.numpy_tiled.tile import (
    Cut,
    Rows,
    Scoring,
    Sequence,
    complete_scores,
    cut,
    flat,
    load,
    load_scaled_queries,
    product,
    trimmed,
)
from portattn.backends.numpy_tiled.workspace import Workspace
from portattn.problem import Problem

if TYPE_CHECKING:
    from portattn.backends.numpy_tiled.launch import Views


def gradient_jobs(
    problem: Problem, scoring: Scoring, views: Views, config: Config
) -> Iterator[Job]:
    """Every job of a call, the long ones first."""
    kinds: list[Iterator[Job]] = []
    if views.dq is not None:
        kinds.append(_query_jobs(problem, scoring, views, config))
    if views.dk is not None:
        of_keys = _page_jobs if problem.paged else _key_jobs
        kinds.append(of_keys(problem, scoring, views, config))
    if views.dbias is not None:
        kinds.append(_bias_jobs(problem, scoring, views, config))
    if views.dsinks is not None:
        kinds.append(
            partial(_sink_gradient, views, config, head) for head in range(problem.heads_q)
        )
    return chain.from_iterable(kinds)


# ---- one tile ------------------------------------------------------------------------------------
class RowData(NamedTuple):
    """What the backward pass knows of a tile's m rows: ``dout`` (m, Dv), the LSE, +inf for a row
    that saw nothing (its weights are 0), and D = rowsum(dout * out) - dlse."""

    dout: Array
    lse: Array
    delta: Array
    empty: Bools | None

    def part(self, at: slice) -> RowData:
        """The data of some of the rows."""
        empty = None if self.empty is None else self.empty[at]
        return RowData(self.dout[at], self.lse[at], self.delta[at], empty)


def load_rows(seq: Sequence, rows: Rows, ws: Workspace) -> RowData:
    """The rows' data in the accumulator's dtype."""
    assert seq.dout is not None and seq.lse is not None
    m, dim = rows.shape[0] * rows.shape[1], seq.dout.shape[-1]
    at = (slice(rows.h0, rows.h1), slice(rows.i0, rows.i1))
    dout = load(seq.dout[at], ws.array("dout", *rows.shape, dim)).reshape(m, dim)
    out = load(seq.out[at], ws.array("out", *rows.shape, dim)).reshape(m, dim)
    delta = np.einsum("ij,ij->i", dout, out)
    if seq.dlse is not None:
        delta -= seq.dlse[at].reshape(m)
    lse = load(seq.lse[at], ws.array("lse", *rows.shape)).reshape(m)
    nothing = lse == -np.inf
    if not nothing.any():
        return RowData(dout, lse, delta, None)
    lse[nothing] = np.inf
    return RowData(dout, lse, delta, nothing)


class Pulled(NamedTuple):
    """Weights P and score gradients dS of a tile (m, n), 0 where hidden."""

    weights: Array
    dscores: Array
    hidden: Callable[[], Bools] | None


def pull(
    scoring: Scoring,
    seq: Sequence,
    rows: Rows,
    j0: int,
    j1: int,
    part: Cut,
    q: Array,
    k: Array,
    v: Array,
    data: RowData,
    ws: Workspace,
    *,
    through_cap: bool = True,
) -> Pulled:
    """Recompute a tile. One of q (m, D) and k (n, D) carries the scoring's factor. dS is that of
    the scores before the softcap, or behind it for ``through_cap=False``."""
    m, n = len(q), j1 - j0
    shape = (*rows.shape, n)
    weights = np.matmul(q, k.T, out=ws.array("scores", m, n))
    tanh = None
    if scoring.softcap is not None and through_cap:
        tanh = ws.array("tanh", *shape)
    complete_scores(weights.reshape(shape), scoring, seq, rows, j0, j1, part, tanh)
    if part.hidden is not None:
        np.copyto(weights.reshape(shape), -np.inf, where=part.hidden)
    np.subtract(weights, data.lse[:, None], out=weights)
    scoring.weigh(weights, out=weights)
    dscores = np.matmul(data.dout, v.T, out=ws.array("dscores", m, n))
    np.subtract(dscores, data.delta[:, None], out=dscores)
    np.multiply(dscores, weights, out=dscores)
    if tanh is not None:
        tanh = tanh.reshape(m, n)
        np.multiply(tanh, tanh, out=tanh)
        np.subtract(1, tanh, out=tanh)
        np.multiply(dscores, tanh, out=dscores)
    cut_out = part.hidden
    if data.empty is not None:
        nothing = data.empty.reshape(*rows.shape, 1)
        cut_out = nothing if cut_out is None else cut_out | nothing
    if cut_out is None:
        return Pulled(weights, dscores, None)
    # 0 already, but for a NaN or inf: in the row's LSE, in dout, or in a hidden value
    np.copyto(weights.reshape(shape), 0, where=cut_out)
    np.copyto(dscores.reshape(shape), 0, where=cut_out)
    return Pulled(weights, dscores, partial(flat, cut_out, shape))


# ---- dq: a job owns a tile of query rows ---------------------------------------------------------
def _query_jobs(problem: Problem, scoring: Scoring, views: Views, config: Config) -> Iterator[Job]:
    for b in views.order():
        seq = views.sequence(b)
        length = seq.q.shape[1]
        block_q = config.rows_for(problem.heads_k, seq.group, length)
        for head_k in range(problem.heads_k):
            for rows in seq.row_tiles(head_k, head_k + 1, block_q, 0, length):
                yield partial(_query_gradient, scoring, seq, rows, config)


def _query_gradient(
    scoring: Scoring, seq: Sequence, rows: Rows, config: Config, ws: Workspace
) -> None:
    assert seq.dq is not None
    q = load_scaled_queries(seq, rows, scoring, ws)
    data = load_rows(seq, rows, ws)
    total = ws.array("dq", *q.shape)
    total.fill(0)
    for j0, j1 in key_tiles(
        seq.band, rows.i0, rows.i1, 0, seq.keys.length, config.block_k, config.edge_k
    ):
        part_rows, at = trimmed(seq, rows, j0, j1)
        part = cut(seq, part_rows, j0, j1, ws)
        if part is None:
            continue
        keys = seq.keys.key_tile(rows.k0, j0, j1, ws)
        values = seq.keys.value_tile(rows.k0, j0, j1, ws)
        tile = pull(scoring, seq, part_rows, j0, j1, part, q[at], keys, values, data.part(at), ws)
        gained = ws.array("product", part_rows.size, q.shape[1])
        product(tile.dscores, keys, tile.hidden, gained, ws)
        np.add(total[at], gained, out=total[at])
    np.multiply(total, ws.dtype.type(scoring.scale), out=total)
    into = seq.dq[rows.h0 : rows.h1, rows.i0 : rows.i1]
    np.copyto(into, total.reshape(into.shape), casting="unsafe")


# ---- dk, dv: a job owns a tile of keys -----------------------------------------------------------
User = tuple[Callable[[], Sequence], int, int]
"""A sequence that reads a tile of keys, as its keys [j0, j1)."""


def _key_jobs(problem: Problem, scoring: Scoring, views: Views, config: Config) -> Iterator[Job]:
    assert views.dk is not None and views.dv is not None
    for b in views.order():
        seq = views.sequence(b)
        dk, dv = views.key_part(views.dk, b), views.key_part(views.dv, b)
        length = dk.shape[1]
        for head_k in range(problem.heads_k):
            for j0 in range(0, length, config.block_k):
                j1 = min(j0 + config.block_k, length)
                used = max(j0, min(j1, seq.keys.length))  # keys behind it are not in use
                users: list[User] = [(partial(_itself, seq), j0, used)]
                into = (dk[head_k, j0:j1], dv[head_k, j0:j1])
                yield partial(_key_gradient, scoring, users, head_k, *into, config)


def _itself(seq: Sequence) -> Sequence:
    return seq


def _page_jobs(problem: Problem, scoring: Scoring, views: Views, config: Config) -> Iterator[Job]:
    assert views.dk is not None and views.dv is not None
    assert views.used is not None
    size = problem.block_size or 1
    users: dict[int, list[User]] = {}
    for b, used in enumerate(views.used):
        for n, page in enumerate(views.pages(b)):
            user = (partial(views.sequence, b), n * size, min((n + 1) * size, used))
            users.setdefault(page, []).append(user)
    for page in range(len(views.dk)):
        for head_k in range(problem.heads_k):
            into = (views.dk[page, :, head_k], views.dv[page, :, head_k])
            yield partial(_key_gradient, scoring, users.get(page, []), head_k, *into, config)


def _key_gradient(
    scoring: Scoring,
    users: list[User],
    head_k: int,
    into_k: Array,
    into_v: Array,
    config: Config,
    ws: Workspace,
) -> None:
    """dk and dv of one tile of keys, summed over ``users``; keys that none uses get 0."""
    dk, dv = ws.array("dk", *into_k.shape), ws.array("dv", *into_v.shape)
    dk.fill(0)
    dv.fill(0)
    for make, j0, j1 in users:
        if j1 > j0:
            used = slice(0, j1 - j0)
            _add_key_gradient(scoring, make(), j0, j1, head_k, dk[used], dv[used], config, ws)
    np.multiply(dk, ws.dtype.type(scoring.scale), out=dk)
    np.copyto(into_k, dk, casting="unsafe")
    np.copyto(into_v, dv, casting="unsafe")


def _add_key_gradient(
    scoring: Scoring,
    seq: Sequence,
    j0: int,
    j1: int,
    head_k: int,
    dk: Array,
    dv: Array,
    config: Config,
    ws: Workspace,
) -> None:
    keys = seq.keys.key_tile(head_k, j0, j1, ws)
    keys = np.multiply(keys, scoring.factor, out=ws.array("scaled_keys", *keys.shape))
    values = seq.keys.value_tile(head_k, j0, j1, ws)
    dim, dim_v = keys.shape[1], values.shape[1]
    i0, i1 = seq.band.seeing(j0, j1)
    for rows in seq.row_tiles(head_k, head_k + 1, config.block_q, i0, i1):
        part = cut(seq, rows, j0, j1, ws)
        if part is None:
            continue
        q = load(
            seq.q[rows.h0 : rows.h1, rows.i0 : rows.i1], ws.array("q", *rows.shape, dim)
        ).reshape(rows.size, dim)
        data = load_rows(seq, rows, ws)
        tile = pull(scoring, seq, rows, j0, j1, part, q, keys, values, data, ws)
        hidden = None if tile.hidden is None else partial(_turned, tile.hidden)
        gained = ws.array("product", j1 - j0, dim_v)
        product(tile.weights.T, data.dout, hidden, gained, ws)
        np.add(dv, gained, out=dv)
        gained = ws.array("product", j1 - j0, dim)
        product(tile.dscores.T, q, hidden, gained, ws)
        np.add(dk, gained, out=dk)


def _turned(hidden: Callable[[], Bools]) -> Bools:
    return hidden().T


# ---- dbias: a job owns a tile of the bias --------------------------------------------------------
def _bias_jobs(problem: Problem, scoring: Scoring, views: Views, config: Config) -> Iterator[Job]:
    assert views.dbias is not None
    batch, heads, queries, keys = views.dbias.shape
    for b in range(batch):
        for h in range(heads):
            for i0 in range(0, queries, config.block_q):
                for j0 in range(0, keys, config.block_k):
                    into = views.dbias[b, h, i0 : i0 + config.block_q, j0 : j0 + config.block_k]
                    owner = _BiasTile(
                        range(problem.batch) if batch == 1 else range(b, b + 1),
                        range(problem.heads_q) if heads == 1 else range(h, h + 1),
                        None if queries == 1 else (i0, i0 + len(into)),
                        None if keys == 1 else (j0, j0 + into.shape[1]),
                    )
                    yield partial(_bias_gradient, scoring, views, owner, into, config)


class _BiasTile(NamedTuple):
    """What one tile of the bias was added to; None: every query, or every key."""

    batch: range
    heads: range
    queries: tuple[int, int] | None
    keys: tuple[int, int] | None


def _bias_gradient(
    scoring: Scoring, views: Views, owner: _BiasTile, into: Array, config: Config, ws: Workspace
) -> None:
    total = np.zeros(into.shape)  # float64: the sum may run over a whole batch
    for b in owner.batch:
        seq = views.sequence(b)
        first, last = owner.queries or (0, seq.q.shape[1])
        last = min(last, seq.q.shape[1])
        for h in owner.heads:
            for i0 in range(first, last, config.block_q):
                rows = seq.rows_of(h, i0, min(i0 + config.block_q, last))
                _add_bias_gradient(scoring, seq, rows, owner, total, config, ws)
    np.copyto(into, total, casting="unsafe")


def _add_bias_gradient(
    scoring: Scoring,
    seq: Sequence,
    rows: Rows,
    owner: _BiasTile,
    total: Array,
    config: Config,
    ws: Workspace,
) -> None:
    q = load_scaled_queries(seq, rows, scoring, ws)
    data = load_rows(seq, rows, ws)
    first, last = owner.keys or (0, seq.keys.length)
    for j0, j1 in key_tiles(
        seq.band, rows.i0, rows.i1, first, min(last, seq.keys.length),
        config.block_k, config.edge_k,
    ):  # fmt: skip
        part = cut(seq, rows, j0, j1, ws)
        if part is None:
            continue
        keys = seq.keys.key_tile(rows.k0, j0, j1, ws)
        values = seq.keys.value_tile(rows.k0, j0, j1, ws)
        ds = pull(
            scoring, seq, rows, j0, j1, part, q, keys, values, data, ws, through_cap=False
        ).dscores
        if owner.queries is None:
            ds = ds.sum(axis=0, keepdims=True, dtype=np.float64)
        if owner.keys is None:
            total[: len(ds)] += ds.sum(axis=1, keepdims=True, dtype=np.float64)
        else:
            total[: len(ds), j0 - first : j1 - first] += ds


# ---- dsinks: a job owns a head -------------------------------------------------------------------
def _sink_gradient(views: Views, config: Config, head: int, ws: Workspace) -> None:
    """d sink = -sum over rows of exp(sink - lse) * D: the sink carries no value."""
    assert views.dsinks is not None and views.sinks is not None
    total, sink = 0.0, float(views.sinks[head])
    for b in range(views.problem.batch):
        seq = views.sequence(b)
        length = seq.q.shape[1]
        for i0 in range(0, length, config.block_q):
            i1 = min(i0 + config.block_q, length)
            data = load_rows(seq, seq.rows_of(head, i0, i1), ws)
            lse = data.lse.astype(np.float64)
            share = np.where(lse == np.inf, 0, np.exp(sink - lse))  # no sink, no key: no share
            total -= float(np.dot(share, data.delta))
    views.dsinks[head] = total
