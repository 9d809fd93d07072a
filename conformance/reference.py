"""The float64 oracle: what `attention` means, written down once, without tiles and without a
backend.

The rule kept here: every mask is applied before anything is multiplied by it, so that a NaN in a
hidden key, value or row stays out of every visible result. Arrays are (B, H, S, D); packed ones
(T, H, D); paged keys and values (num_blocks, block_size, Hk, D). Query rows come in chunks, which
bounds the memory and changes no number: 262,144 keys with 64 sampled rows stay below 2 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]

CHUNK = 1 << 18  # float64 elements of one (rows, keys) array: 2 MiB, which caches hold
LONGEST = 1 << 23  # and where fewer than ROWS rows would be left: 64 MiB
ROWS = 64  # a product of fewer rows spends its time on converting the keys
TAME = 1e150  # magnitudes below it can be squared
WIDENED = 1 << 23  # elements of a head that are kept in float64 meanwhile: 64 MiB
SLICE = 1 << 13  # keys converted to float64 at a time: 16 MiB at head dim 256


@dataclass(frozen=True, eq=False)
class Attention:
    """One call: its arrays in NumPy and the contract's options under their own names."""

    q: Array
    k: Array
    v: Array
    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    bias: Array | None = None
    mask: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_k: Array | None = None
    block_table: Array | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of the call that differ from their defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self)[3:]}
        return {n: x for n, x in given.items() if x is not None and x is not False}

    @property
    def packed(self) -> bool:
        """Queries of all sequences lie behind one another."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key heads."""
        return self.q.shape[1], self.k.shape[2 if self.block_table is not None else 1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output, in the layout of q."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Sq); packed (Hq, T)."""
        return self.q.shape[1::-1] if self.packed else self.q.shape[:3]

    @property
    def factor(self) -> float:
        """The scale: 1/sqrt(head_dim) unless given."""
        return float(self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)

    def having(self, **changes: Any) -> Attention:
        """The same call with some arguments replaced."""
        return replace(self, **changes)

    def queries(self, x: Array, b: int) -> Array:
        """The (H, Lq, D) view of sequence ``b`` in an array shaped like q, out or dout."""
        if self.cu_seqlens_q is None:
            part: Array = x[b]
            return part
        return x[self.cu_seqlens_q[b] : self.cu_seqlens_q[b + 1]].swapaxes(0, 1)

    def row_numbers(self, x: Array, b: int) -> Array:
        """The (H, Lq) view of sequence ``b`` in an array shaped like lse."""
        starts = self.cu_seqlens_q
        part: Array = x[b] if starts is None else x[:, starts[b] : starts[b + 1]]
        return part

    def keys(self, x: Array, b: int) -> Array:
        """The (H, Lk, D) keys or values of sequence ``b``: a view, or gathered from the pages."""
        used = None if self.seqused_k is None else int(self.seqused_k[b])
        if self.block_table is not None:
            pages = self.block_table[b, : -(-(used or 0) // x.shape[1])]
            return x[pages].reshape(-1, *x.shape[2:])[:used].swapaxes(0, 1)
        if self.cu_seqlens_k is not None:
            part: Array = x[self.cu_seqlens_k[b] : self.cu_seqlens_k[b + 1]].swapaxes(0, 1)
        else:
            part = x[b]
        return part[:, :used]

    def add_keys(self, x: F64, b: int, head: int, part: F64) -> None:
        """Add ``part`` (Lk, D) into ``x``, shaped like k or v, where `keys` reads it."""
        if self.block_table is None:
            self.keys(x, b)[head] += part
            return
        at = np.arange(len(part))
        np.add.at(x, (self.block_table[b, at // x.shape[1]], at % x.shape[1], head), part)

    def extra(self, x: Array, b: int, head: int) -> Array:
        """The (Sq or 1, Sk or 1) part of a mask or bias for one head of one sequence."""
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        part: Array = x[b if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]
        return part


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys or values of a head, looked at once for all rows and all heads of its group."""

    values: Array  # (n, D) as stored, or in float64 where they are few
    largest: float  # magnitude; NaN where one is NaN

    @classmethod
    def of(cls, x: Array) -> Keys:
        """Widen, and measure."""
        if x.size <= WIDENED:
            x = np.asarray(x, np.float64)
        sizes = [0.0]
        for at in range(0, len(x), SLICE):
            piece = np.asarray(x[at : at + SLICE], np.float64)
            sizes += [piece.max(initial=0.0), -piece.min(initial=0.0)]
        return cls(x, float(np.max(sizes)))


@dataclass(frozen=True, eq=False)
class Rows:
    """Some query rows of one head of one sequence, in float64; m rows, n keys."""

    batch: int
    head: int
    head_k: int
    index: NDArray[np.intp]  # (m,) rows within the sequence
    q: F64  # (m, D)
    k: Array  # (n, D), see Keys
    v: Array  # (n, Dv)
    largest_k: float
    largest_v: float
    scale: float
    softcap: float | None
    added: F64  # (m, n) bias and ALiBi, 0 where hidden
    sink: float | None
    visible: NDArray[np.bool_]  # (m, n)
    product: F64  # (m, n) scale * q k^T, 0 where hidden
    score: F64  # (m, n) after softcap, bias and ALiBi; -inf where hidden
    top: F64  # (m, 1) row maximum, the sink included; 0 for an empty row
    total: F64  # (m, 1) sum of exp(score - top), the sink included; 0 for an empty row
    weight: F64  # (m, n) softmax
    sink_weight: F64  # (m, 1)
    out: F64  # (m, Dv)
    lse: F64  # (m,)


def visibility(asked: Attention, b: int, head: int, rows: Array, n: int) -> NDArray[np.bool_]:
    """(m, n): which keys each row may attend to. A bias of -inf hides as a mask does."""
    length = asked.queries(asked.q, b).shape[1]
    offset = 0 if asked.causal == "top_left" else n - length
    i, j = rows[:, None] + offset, np.arange(n)[None, :]
    seen = np.ones((len(rows), n), bool)
    if asked.causal:
        seen &= j <= i
    left, right = asked.window or (None, None)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    for given, hides in ((asked.mask, np.logical_not), (asked.bias, np.isneginf)):
        if given is not None:
            seen &= ~np.asarray(hides(_part(asked, given, b, head, rows, n)), bool)
    return seen


def attend(
    asked: Attention, b: int, head: int, rows: NDArray[np.intp], keys: Keys, values: Keys
) -> Rows:
    """The definition: scores = scale q k^T -> softcap -> + bias, + ALiBi -> masks -> sink ->
    softmax -> weighted sum of v. An empty row gives 0 and an LSE of -inf, or of its sink.
    ``keys`` and ``values`` are those of the head."""
    k, v = keys.values, values.values
    head_k = head // (asked.heads[0] // asked.heads[1])
    queries = asked.queries(asked.q, b)[head]
    q = np.asarray(queries[rows], np.float64)
    n = len(k)
    seen = visibility(asked, b, head, rows, n)
    with np.errstate(all="ignore"):  # NaN and inf in the input are part of the question
        product = np.where(seen, asked.factor * outer(q, k), 0.0)
        added = np.zeros_like(product)
        if asked.bias is not None:
            added += _part(asked, asked.bias, b, head, rows, n).astype(np.float64)
        if asked.alibi_slopes is not None:
            slope = float(
                np.broadcast_to(asked.alibi_slopes, (asked.batch, asked.heads[0]))[b, head]
            )
            added -= slope * np.abs(rows[:, None] + n - len(queries) - np.arange(n)[None, :])
        added = np.where(seen, added, 0.0)
        capped = (
            product if asked.softcap is None else asked.softcap * np.tanh(product / asked.softcap)
        )
        score = np.where(seen, capped + added, -np.inf)
        sink = None if asked.sinks is None else float(asked.sinks[head])
        top = score.max(1, keepdims=True, initial=-np.inf if sink is None else sink)
        top = np.where(np.isneginf(top), 0.0, top)
        power = np.where(seen, np.exp(score - top), 0.0)
        sink_power = np.zeros_like(top) if sink is None else np.exp(sink - top)
        total = power.sum(1, keepdims=True) + sink_power
        weight = power / np.where(total == 0, 1.0, total)
        lse = (top + np.log(total))[:, 0]
        return Rows(
            b, head, head_k, rows, q, k, v, keys.largest, values.largest, asked.factor,
            asked.softcap, added, sink, seen, product, score, top, total, weight,
            sink_power / np.where(total == 0, 1.0, total),
            weigh(weight, v, seen, largest=values.largest), lse,
        )  # fmt: skip


def blocks(asked: Attention, rows: NDArray[np.intp] | None = None) -> Iterator[Rows]:
    """Every head of every sequence, in chunks of rows; ``rows`` samples the query rows."""
    for b in range(asked.batch):
        length, n = asked.queries(asked.q, b).shape[1], asked.keys(asked.k, b).shape[1]
        chosen = np.arange(length) if rows is None else rows[rows < length]
        step = max(1, CHUNK // max(n, 1), min(ROWS, LONGEST // max(n, 1)))
        group = asked.heads[0] // asked.heads[1]
        for head in range(asked.heads[0]):
            if head % group == 0:
                k, v = (Keys.of(asked.keys(x, b)[head // group]) for x in (asked.k, asked.v))
            for start in range(0, len(chosen), step):
                yield attend(asked, b, head, chosen[start : start + step], k, v)


def forward(asked: Attention) -> tuple[F64, F64]:
    """Output and LSE of the whole call."""
    out, lse = np.zeros(asked.out_shape), np.zeros(asked.lse_shape)
    for part in blocks(asked):
        asked.queries(out, part.batch)[part.head, part.index] = part.out
        asked.row_numbers(lse, part.batch)[part.head, part.index] = part.lse
    return out, lse


@dataclass(frozen=True, eq=False)
class Pulled:
    """The backward pass at some rows: gradients of the scores."""

    dout: F64  # (m, Dv)
    dp: F64  # (m, n) dout v^T, 0 where hidden
    delta: F64  # (m, 1) sum(dout * out) - dlse
    dscore: F64  # (m, n) after the softcap: what the bias gets
    dproduct: F64  # (m, n) before the softcap: what q and k get, without the scale
    slope: F64 | float  # (m, n) derivative of the softcap


def pull(part: Rows, dout: Array, dlse: Array | None) -> Pulled:
    """dS = P (dP - D + dlse), then through the softcap (FlashAttention, algorithm 4)."""
    with np.errstate(all="ignore"):
        dout = np.asarray(dout, np.float64)
        dp = np.where(part.visible, outer(dout, part.v), 0.0)
        delta = np.where(part.total > 0, (dout * part.out).sum(1, keepdims=True), 0.0)
        delta = delta if dlse is None else delta - np.asarray(dlse, np.float64)[:, None]
        dscore = np.where(part.visible, part.weight * (dp - delta), 0.0)
        slope: F64 | float = 1.0
        if part.softcap is not None:
            slope = 1.0 - np.tanh(part.product / part.softcap) ** 2
        return Pulled(dout, dp, delta, dscore, dscore * slope, slope)


class Gradients:
    """float64 sums shaped like q, k, v, bias and sinks; reduced over groups and broadcasts."""

    def __init__(self, asked: Attention):
        self.asked = asked
        names = ("q", "k", "v", "bias", "sinks")
        given = {f"d{n}": getattr(asked, n) for n in names if getattr(asked, n) is not None}
        self.arrays: dict[str, F64] = {n: np.zeros(x.shape) for n, x in given.items()}

    def add(self, part: Rows, dq: F64, dk: F64, dv: F64, dbias: F64, dsink: float) -> None:
        """Add what some rows give: (m, D), (n, D), (n, Dv), (m, n) and a number."""
        asked, b, h = self.asked, part.batch, part.head
        asked.queries(self.arrays["dq"], b)[h, part.index] += dq
        asked.add_keys(self.arrays["dk"], b, part.head_k, dk)
        asked.add_keys(self.arrays["dv"], b, part.head_k, dv)
        if "dbias" in self.arrays:
            into = asked.extra(self.arrays["dbias"], b, h)
            wide = into.shape[1] > 1
            dbias = dbias if wide else dbias.sum(1, keepdims=True)
            columns = slice(dbias.shape[1] if wide else None)
            if into.shape[0] > 1:
                into[part.index, columns] += dbias
            else:
                into[:, columns] += dbias.sum(0, keepdims=True)
        if "dsinks" in self.arrays:
            self.arrays["dsinks"][h] += dsink


def backward(asked: Attention, dout: Array, dlse: Array | None = None) -> dict[str, F64]:
    """dq, dk, dv, and dbias and dsinks where those exist."""
    sums = Gradients(asked)
    for part in blocks(asked):
        b, h, at = part.batch, part.head, part.index
        rows = None if dlse is None else asked.row_numbers(dlse, b)[h, at]
        g = pull(part, asked.queries(dout, b)[h, at], rows)
        with np.errstate(all="ignore"):
            sums.add(
                part,
                part.scale * weigh(g.dproduct, part.k, part.visible, largest=part.largest_k),
                part.scale * weigh(g.dproduct.T, part.q, part.visible.T),
                weigh(part.weight.T, g.dout, part.visible.T),
                g.dscore,
                float(-(part.sink_weight * g.delta).sum()),
            )
    return sums.arrays


# ---- products that neither overflow the memory nor spread a hidden NaN ---------------------------
def outer(a: F64, b: Array, of: Callable[[F64], F64] = np.asarray) -> F64:
    """of(a) of(b)^T (m, n), with b (n, d) converted to float64 in slices."""
    a = of(a)
    out = np.empty((len(a), len(b)))
    for at in range(0, len(b), SLICE):
        piece = of(np.asarray(b[at : at + SLICE], np.float64))
        np.matmul(a, piece.T, out=out[:, at : at + SLICE])
    return out


def weigh(
    weight: F64,
    x: Array,
    seen: NDArray[np.bool_],
    of: Callable[[F64], F64] = np.asarray,
    *,
    largest: float = np.nan,
) -> F64:
    """Sum over j of weight_ij of(x_j), where a NaN or inf in x_j reaches only rows that see j.
    ``largest`` is the largest magnitude in x, where that is known."""
    out = np.zeros((len(weight), x.shape[1]))
    for at in range(0, len(x), SLICE):
        piece = of(np.asarray(x[at : at + SLICE], np.float64))
        if largest < TAME or np.isfinite(piece.sum()):  # one pass, where all is well
            out += weight[:, at : at + SLICE] @ piece
            continue
        finite = np.asarray(np.isfinite(piece).all(1))
        out += weight[:, at : at + SLICE] @ np.where(finite[:, None], piece, 0.0)
        for j in np.flatnonzero(~finite & seen[:, at : at + SLICE].any(0)):
            out += np.where(seen[:, at + j, None], weight[:, at + j, None] * piece[j], 0.0)
    return out


def _part(asked: Attention, x: Array, b: int, head: int, rows: Array, n: int) -> Array:
    """A mask or bias for some rows of one head, broadcast to (m, n)."""
    x = asked.extra(x, b, head)
    x = x[rows] if x.shape[0] > 1 else x
    return np.broadcast_to(x[:, :n], (len(rows), n))
