"""Forward pass over one tile of query rows: online softmax over tiles of keys.

The rule kept here: what happens to a row follows from that row, the keys that it sees, and the
tile borders; never from another row or a hidden key. So a NaN in one place, or other numbers in a
hidden one, leave all other rows with the same bits.

Rows whose scores are bounded by ``|q| max|k|`` to within `BOUND` need no running maximum: their
reference stays 0, which saves two of the five passes over the scores. All others take the guarded
way (Milakov and Gimelshein, 2018). Both ways share one state, and a row may go from the first to
the second at any tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from portattn.backends.numpy_tiled.config import FEW_ROWS, Config
from portattn.backends.numpy_tiled.masking import Array, Bools, key_tiles
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
    multiply,
    product,
    trimmed,
)
from portattn.backends.numpy_tiled.workspace import Workspace

BOUND = 21.0
"""Nats. Wide enough for normal inputs up to head dim 256; so narrow that a row in which one key
outweighs the rest by a float32 mantissa takes the guarded way, where its weight is exactly 1."""

MANY_KEYS = 64
"""A row over fewer keys takes the guarded way: it would be divided by about what one weight was
multiplied by, and lose a bit where that way is exact."""

STREAMED = 512
"""Keys from which on it matters how BLAS reads them."""

TINY = 2.0**-100
"""Sums below it, times e^-BOUND and a mantissa, are close to what float32 cannot hold."""

SHARED_TILES = 2
"""Row tiles over the same keys from which on one look at all of these pays."""

MOST_NORMS = 4096
"""Norms that a sequence's tiles remember at most, so that they do not grow with its length."""

_NO_ROWS: Array = np.empty(0, np.intp)


class Partial(NamedTuple):
    """Unnormalised result of some rows over some keys: ``acc`` (m, Dv), and for each row the
    reference ``top`` of its exponents and the sum ``total``; 0 where no key was seen."""

    acc: Array
    top: Array
    total: Array


def attend(
    scoring: Scoring,
    seq: Sequence,
    rows: Rows,
    first: int,
    last: int,
    config: Config,
    ws: Workspace,
) -> Partial:
    """The rows' result over the keys [first, last), in the thread's buffers."""
    tile = _RowTile(scoring, seq, rows, first, last, config, ws)
    result = tile.run()
    if not (tile.cut or tile.unguarded):
        return result
    size = np.abs(result.acc, out=ws.array("product", *result.acc.shape))
    largest = size.max(initial=0)
    if not largest < np.inf:  # a NaN counts; perhaps it is a hidden one behind a weight of 0
        tile.exact = True
        result = tile.run()
        size = np.abs(result.acc, out=size)
        largest = size.max()
    if not tile.unguarded or (largest < np.inf and size.min() >= TINY):
        return result
    # Without a running maximum, huge values overflow the sum, and minute ones leave the normal
    # range although their average is in it. Such rows are done again.
    good = ((size < np.inf) & ((size >= TINY) | (size == 0))).all(axis=1)
    if good.all():
        return result
    kept = Partial(*(x.copy() for x in result))
    tile.bounded = False
    result = tile.run()
    np.copyto(result.acc, kept.acc, where=good[:, None])
    np.copyto(result.top, kept.top, where=good)
    np.copyto(result.total, kept.total, where=good)
    return result


class _RowTile:
    """Online softmax of one tile of rows, and its state: ``acc``, ``top`` and ``total`` as in
    `Partial`."""

    def __init__(
        self,
        scoring: Scoring,
        seq: Sequence,
        rows: Rows,
        first: int,
        last: int,
        config: Config,
        ws: Workspace,
    ) -> None:
        self.scoring, self.seq, self.rows, self.ws = scoring, seq, rows, ws
        m = rows.size
        of_head = m // rows.heads_k
        few = of_head <= FEW_ROWS
        width = config.keys_for(of_head, copied=not (seq.keys.k_direct and seq.keys.v_direct))
        self.span = (seq.band, rows.i0, rows.i1, first, last, width, config.edge_k)
        self.acc = ws.array("acc", m, seq.keys.v.shape[-1])
        self.top, self.total = ws.array("top", m), ws.array("total", m)
        self.q = load_scaled_queries(seq, rows, scoring, ws)
        self.q_columns: Array | None = None
        if few and of_head > 1 and last - first > STREAMED:
            # BLAS streams the keys better as its left operand
            columns = self.q.reshape(rows.heads_k, of_head, -1).swapaxes(1, 2)
            self.q_columns = load(columns, ws.array("q_columns", *columns.shape))
        self.bounded = not few and seq.bias is None and seq.slopes is None
        """Whether norms may stand in for the running maximum."""
        self.exact = False
        """Whether a NaN or inf among hidden values is kept out of the products."""
        self.unguarded = False
        """Whether some row went without its maximum."""
        self.cut = False
        """Whether some key was hidden from some row."""

    def run(self) -> Partial:
        """All tiles of keys, one after another."""
        self.started = self.moved = False
        bound = _Bound(self.scoring, self.seq, self.rows, self.q) if self.bounded else None
        only_band = self.seq.mask is None and self.scoring.softcap is None
        covers = partial(self.seq.band.covers, self.rows.i0, self.rows.i1)
        for j0, j1 in key_tiles(*self.span):
            if bound and only_band and not self.moved and covers(j0, j1) and bound.holds(j0, j1):
                self._plain(j0, j1)
                continue
            rows, at = trimmed(self.seq, self.rows, j0, j1)
            part = cut(self.seq, rows, j0, j1, self.ws)
            if part is None:
                continue
            keys = self.seq.keys.keys_of(rows, j0, j1, self.ws)
            scores = self._scores(keys, at)
            safe = bound is not None and bound.rows(keys, j0, j1, part, at)
            shaped = scores.reshape(rows.h1 - rows.h0, rows.i1 - rows.i0, j1 - j0)
            complete_scores(shaped, self.scoring, self.seq, rows, j0, j1, part)
            hidden = None
            if part.hidden is not None:
                self.cut = True
                hidden = partial(flat, part.hidden, shaped.shape)
            fresh = not self.started and len(scores) == len(self.total)
            if not self.started and not fresh:
                self._clear()
            self.started = True
            shrink = self._weigh(scores, shaped, part, safe, hidden, at, fresh)
            values = self.seq.keys.values_of(rows, j0, j1, self.ws)
            self._add(scores, values, shrink, hidden if self.exact else None, at, fresh)
        if not self.started:
            self._clear()
        return Partial(self.acc, self.top, self.total)

    def _plain(self, j0: int, j1: int) -> None:
        """A tile in which every row sees every key and none needs its maximum: what the general way
        comes to there, without the questions. While one thread asks them, the others wait for
        Python."""
        keys, all_rows, fresh = self.seq.keys, slice(0, self.rows.size), not self.started
        scores = self._scores(keys.keys_of(self.rows, j0, j1, self.ws), all_rows)
        if fresh:
            self.started = self.unguarded = True
            self.top.fill(0)
        self.scoring.weigh(scores, out=scores)
        values = keys.values_of(self.rows, j0, j1, self.ws)
        self._add(scores, values, None, None, all_rows, fresh)

    def _scores(self, keys: Array, at: slice) -> Array:
        """(m, n) products of the rows ``at`` with their heads' keys."""
        heads, n, dim = keys.shape
        scores = self.ws.array("scores", at.stop - at.start, n)
        of_heads = scores.reshape(heads, -1, n)
        if self.q_columns is None:
            np.matmul(self.q[at].reshape(heads, -1, dim), keys.swapaxes(1, 2), out=of_heads)
        else:
            columns = self.ws.array("columns", heads, n, self.q_columns.shape[2])
            np.matmul(keys, self.q_columns, out=columns)
            np.copyto(of_heads, columns[:, :, at if heads == 1 else slice(None)].swapaxes(1, 2))
        return scores

    def _weigh(
        self,
        scores: Array,
        shaped: Array,
        part: Cut,
        safe: Bools | bool,
        hidden: Callable[[], Bools] | None,
        at: slice,
        fresh: bool,
    ) -> Array | None:
        """Scores become weights in place (``shaped`` is a view with the heads apart); the factor
        that the earlier sums of all rows shrink by, if they do. A safe row keeps the reference 0 as
        long as it has it, and has the bits that it would have without the others."""
        top, total = self.top[at], self.total[at]
        needy = _NO_ROWS
        if safe is not False:
            self.unguarded = True
            if fresh:
                top.fill(0)
            if safe is not True or self.moved:
                needy = np.flatnonzero(np.logical_not(safe) | (top != 0))
        if safe is False or len(needy) == len(scores):
            self.moved = True
            if part.hidden is not None:
                np.copyto(shaped, -np.inf, where=part.hidden)
            return self._weigh_guarded(scores, top, total, fresh)
        if len(needy):
            self.moved = True
            some, new, sums = scores[needy], top[needy], total[needy]
            if hidden is not None:
                np.copyto(some, -np.inf, where=hidden()[needy])
            shrink = self._weigh_guarded(some, new, sums, fresh)
            top[needy] = new
            if shrink is not None:
                total[needy] = sums * shrink
                acc = self.acc[at]
                acc[needy] *= shrink[:, None]
            scores[needy] = 0  # exp2 is slow for what it may meet there
        self.scoring.weigh(scores, out=scores)
        if part.edge is not None:
            bits = shaped.view(part.edge.keep.dtype)
            np.bitwise_and(bits, part.edge.keep, out=bits)
        elif part.hidden is not None:
            np.copyto(shaped, 0, where=part.hidden)
        if len(needy):
            scores[needy] = some
        return None

    def _weigh_guarded(self, scores: Array, top: Array, total: Array, fresh: bool) -> Array | None:
        """Move each row's reference to its maximum; exp of what the scores lie below it. In base e:
        exp2 takes ten to a hundred times as long for what underflows."""
        to_e = self.scoring.to_e
        new = scores.max(axis=1)
        old = None
        if not fresh:
            old = np.where(total == 0, -np.inf, top)
            np.maximum(new, old, out=new)
        np.copyto(new, 0, where=new == -np.inf)  # nothing seen so far
        np.subtract(scores, new[:, None], out=scores)
        if to_e != 1:
            np.multiply(scores, to_e, out=scores)
        np.exp(scores, out=scores)
        np.copyto(top, new)
        if old is None:
            return None
        np.subtract(old, new, out=old)
        np.multiply(old, to_e, out=old)
        shrink: Array = np.exp(old, out=old)
        return shrink

    def _add(
        self,
        weights: Array,
        values: Array,
        shrink: Array | None,
        hidden: Callable[[], Bools] | None,
        at: slice,
        fresh: bool,
    ) -> None:
        """Add the tile's weights and weighted values to the rows ``at``."""
        acc, total = self.acc[at], self.total[at]
        m, n = weights.shape
        heads = len(values)
        # Head by head: how BLAS sums a row hangs on where among the matrix's rows it stands.
        of_heads = weights.reshape(heads, -1, n)
        if fresh:
            self._sums(of_heads, total.reshape(heads, -1))
            self._product(weights, values, hidden, acc)
            return
        if shrink is not None:
            np.multiply(total, shrink, out=total)
            np.multiply(acc, shrink[:, None], out=acc)
        row_sums = self.ws.array("row_sums", m)
        self._sums(of_heads, row_sums.reshape(heads, -1))
        np.add(total, row_sums, out=total)
        gained = self.ws.array("product", *acc.shape)
        self._product(weights, values, hidden, gained)
        np.add(acc, gained, out=acc)

    def _sums(self, weights: Array, out: Array) -> None:
        """out (heads, m) = the sums of weights (heads, m, n). Of one head's rows by dot: matmul
        keeps the GIL where there are few."""
        ones = self.ws.ones(weights.shape[2])
        if len(weights) == 1:
            np.dot(weights[0], ones, out=out[0])
        else:
            np.matmul(weights, ones, out=out)

    def _product(
        self, weights: Array, values: Array, hidden: Callable[[], Bools] | None, out: Array
    ) -> None:
        """`product` for the rows of several key heads, with the values of each."""
        heads, n, dim = values.shape
        weights, out = weights.reshape(heads, -1, n), out.reshape(heads, -1, dim)
        if hidden is None or np.isfinite(values).all():
            multiply(weights, values, out, self.ws)
            return
        of_heads = hidden().reshape(weights.shape)
        for w, v, h, o in zip(weights, values, of_heads, out, strict=True):
            product(w, v, h.view, o, self.ws)

    def _clear(self) -> None:
        self.acc.fill(0)
        self.top.fill(0)
        self.total.fill(0)


class _Bound:
    """Which rows' scores a tile's norms hold within `BOUND`: Cauchy-Schwarz over the keys that the
    row sees there. NaN and inf are never within."""

    def __init__(self, scoring: Scoring, seq: Sequence, rows: Rows, q: Array) -> None:
        self._seq, self._rows = seq, rows
        self._limit = (BOUND / float(scoring.to_e)) ** 2
        self._many: Bools | None = None
        if seq.band.fewest(rows.i0, rows.i1) < MANY_KEYS:
            self._many = np.tile(seq.band.counts(rows.i0, rows.i1) >= MANY_KEYS, rows.shape[0])
        self._capped = scoring.softcap is not None and scoring.softcap <= BOUND
        # What holds for all rows and keys of the heads holds in each tile: one look at them serves
        # every tile. Where it does not hold, each tile is looked at for itself, so that it decides
        # only how long the answer takes.
        shared = seq.group * seq.q.shape[1] * rows.heads_k >= SHARED_TILES * rows.size
        self._recurs = shared and seq.band.low is None and seq.band.high is None
        if shared and scoring.softcap is None:
            known, name = seq.keys.norms2, ("always", rows.h0, rows.h1)
            always = known.get(name)
            if always is None:
                always = known[name] = self._in_all_tiles(scoring)
            if always:
                self._always = True
                return
        self._q2 = norms2(q)
        if scoring.softcap is not None:
            self._q2 *= scoring.cap**2
        self._largest = self._q2.reshape(rows.heads_k, -1).max(axis=1)
        self._always = False
        if shared:
            of_keys = [largest_key2(seq, head) for head in range(rows.k0, rows.k1)]
            self._always = bool((self._largest * of_keys <= self._limit).all())

    def _in_all_tiles(self, scoring: Scoring) -> bool:
        """Whether the largest norms of whole heads hold the scores of all their tiles."""
        rows = self._rows
        of_keys = np.max([largest_key2(self._seq, head) for head in range(rows.k0, rows.k1)])
        queries = np.max([largest_query2(self._seq, head) for head in range(rows.h0, rows.h1)])
        # A hair less than the limit: rounding must not let in here what a tile would not.
        return bool(queries * scoring.factor**2 * of_keys <= self._limit * (1 - 2.0**-12))

    def holds(self, j0: int, j1: int) -> bool:
        """Whether no row needs its maximum in a tile that hides nothing; False may mean that only
        `rows` knows."""
        if self._many is not None:
            return False
        if self._always or not self._seq.keys.k_direct:
            return self._always
        keys = self._seq.keys.k[self._rows.k0 : self._rows.k1, j0:j1]
        return bool((self._largest * self._keys2(keys, j0, j1) <= self._limit).all())

    def _keys2(self, keys: Array, j0: int, j1: int) -> Array:
        """The largest |k_j|^2 of the tile, for each head."""
        tile, known = (self._rows.k0, self._rows.k1, j0, j1), self._seq.keys.norms2
        largest: Array | None = known.get(tile)
        if largest is None:
            largest = norms2(keys).max(axis=1)
            if self._recurs and len(known) < MOST_NORMS:
                known[tile] = largest
        return largest

    def rows(self, keys: Array, j0: int, j1: int, part: Cut, at: slice) -> Bools | bool:
        """Bools (m,) for the rows ``at``; True or False for all of them."""
        safe = self._capped or self._within(keys, j0, j1, part, at)
        if safe is False or self._many is None:
            return safe
        many: Bools = self._many[at]
        return many if safe is True else safe & many

    def _within(self, keys: Array, j0: int, j1: int, part: Cut, at: slice) -> Bools | bool:
        if part.hidden is not None and (part.edge is None or not part.edge.single):
            return False
        if self._always:
            return True
        largest = self._keys2(keys, j0, j1)
        if (self._largest * largest <= self._limit).all():  # with hidden keys: the more without
            return True
        q2 = self._q2[at].reshape(self._rows.heads_k, self._rows.group, -1)
        largest = largest[:, None]
        if part.edge is not None:
            # Behind the last key (or before the first) that a row sees, no norm counts.
            k2 = norms2(keys)
            if part.edge.cuts_right:
                running = np.maximum.accumulate(k2, axis=1)
            else:
                running = np.maximum.accumulate(k2[:, ::-1], axis=1)[:, ::-1]
            largest = np.where(part.edge.sees_any, running[:, part.edge.last], 0)
        safe: Bools = q2 * largest[:, None] <= self._limit
        return safe.reshape(-1)


def largest_key2(seq: Sequence, head_k: int) -> Any:
    """The largest |k_j|^2 of a head's keys that some query sees; inf where BLAS cannot read them as
    they lie, for then it would cost another copy."""
    if not seq.keys.k_direct:
        return np.inf
    j0, j1 = seq.band.seen(0, seq.band.rows)
    return _largest_norm2(seq.keys.norms2, ("k", head_k), seq.keys.k[head_k, j0:j1])


def largest_query2(seq: Sequence, head: int) -> Any:
    """The largest |q_i|^2 of a head's rows; inf in half precision, where squares overflow."""
    if seq.q.itemsize < 4:
        return np.inf
    return _largest_norm2(seq.keys.norms2, ("q", head), seq.q[head])


def _largest_norm2(known: dict[Any, Any], name: tuple[str, int], x: Array) -> Any:
    """The largest norm of x's rows, NaN if one is; remembered for the head's other tiles."""
    largest = known.get(name)
    if largest is None:
        parts = [norms2(x[i : i + 4096]).max() for i in range(0, len(x), 4096)]
        largest = known[name] = np.max(parts, initial=0)
    return largest


def norms2(x: Array) -> Array:
    """|x_i|^2 of each row, along the last axis."""
    vecdot = getattr(np, "vecdot", None)  # NumPy 2.0 on; half the time of einsum
    squares: Array = np.einsum("...j,...j->...", x, x) if vecdot is None else vecdot(x, x)
    return squares


def write(scoring: Scoring, seq: Sequence, rows: Rows, result: Partial) -> None:
    """Normalise, let the sinks join, and store output and LSE in the caller's arrays."""
    acc, top, total = result
    heads, queries = rows.shape
    empty = total == 0
    if seq.sinks is not None:
        sinks = np.repeat(seq.sinks[rows.h0 : rows.h1].astype(acc.dtype), queries)
    if seq.lse is not None:
        lse = np.log(total)
        lse += top if scoring.to_e == 1 else top * scoring.to_e
        if seq.sinks is not None:
            np.logaddexp(lse, sinks, out=lse)
        seq.lse[rows.h0 : rows.h1, rows.i0 : rows.i1] = lse.reshape(heads, queries)
    if seq.sinks is not None:
        total = total + np.exp(sinks - top * scoring.to_e)
    if empty.any():
        acc[empty] = 0
        total = np.where(empty, 1, total)
    into = seq.out[rows.h0 : rows.h1, rows.i0 : rows.i1]
    if into.dtype == acc.dtype:
        np.divide(acc.reshape(into.shape), total.reshape(heads, queries, 1), out=into)
    else:
        np.divide(acc, total[:, None], out=acc)
        np.copyto(into, acc.reshape(into.shape), casting="unsafe")  # rounds to nearest even
