"""From inputs and outputs to numbers: how far an answer is from the truth, in units of what the
declared arithmetic allows.

The rule kept here: nothing is decided here; the numbers go to the gates of `verdicts`. An answer
that is not finite where it must be counts as infinitely wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from portattn.conformance import bounds
from portattn.conformance.bounds import LARGEST, ROUND_OFF, Forward, Precision
from portattn.conformance.case import Outcome
from portattn.conformance.placement import DTYPES
from portattn.conformance.reference import F64, Array, Attention, Rows, blocks
from portattn.conformance.verdicts import SEVERITY

if TYPE_CHECKING:
    from portattn.conformance.context import Gradients, Result
    from portattn.conformance.manifest import Manifest

ORACLE_ELEMENTS = 1 << 26  # score elements from which on query rows are sampled
SAMPLED = 64
ENOUGH = 256  # elements from which on E2 and E3 mean something


def sampled(asked: Attention) -> NDArray[np.intp] | None:
    """None, or the query rows to look at: both ends, tile edges and some in between."""
    n, keys = asked.q.shape[-2], asked.k.shape[-2]
    if asked.packed or asked.block_table is not None:
        return None
    if asked.batch * asked.heads[0] * n * keys <= ORACLE_ELEMENTS or n <= SAMPLED:
        return None
    edges = [x for x in (0, 1, 63, 64, 127, 128, 255, 256, n - 129, n - 128, n - 2, n - 1) if x < n]
    rest = np.random.default_rng(n).choice(n, SAMPLED - len(edges), replace=False)
    return np.unique([*edges, *rest])


def forward(
    asked: Attention,
    result: Result,
    manifest: Manifest,
    *,
    rows: NDArray[np.intp] | None = None,
    naive: bool = False,
    spread: bool = False,
) -> Outcome:
    """E1 of the output and of the LSE; with ``spread`` E2 and E3, with ``naive`` E4. ``rows``: the
    query rows to look at, by default those of `sampled`.

    E2 and E3 take roundings to be independent. That holds for data in general position; where
    weights are (nearly) equal, an implementation that stores P/L rounds all of them the same way,
    and only E1 may be asked. They are reported all the same, as rms and bias.
    """
    dtype = str(asked.q.dtype)
    precision = Precision.of(manifest, dtype)
    rows = sampled(asked) if rows is None else rows
    out, lse, statistics = _Worst(), _Worst(), _Spread()
    ours = theirs = 0.0
    for part in blocks(asked, rows):
        got = asked.queries(result.out, part.batch)[part.head, part.index]
        limits = Forward(part, precision)
        bound, lse_bound = limits.bound("prob")
        want, bound = _expected(part, bound, manifest, dtype)
        tainted = _tainted(part)
        ratio = excess(got, want, bound, dtype, tainted[:, None])
        det = None
        if ratio.max(initial=0.0) > 1:
            _, det_bound = _expected(part, limits.bound("det")[0], manifest, dtype)
            det = excess(got, want, det_bound, dtype, tainted[:, None])
        out.see(ratio, det, part, got, want, bound, manifest)
        whole = ~tainted & (part.total[:, 0] > 0)
        with np.errstate(all="ignore"):
            sigma = limits.spread()
            z, drift = ((got - part.out) / sigma)[whole], (limits.drift() / sigma)[whole]
        statistics.see(z, part.out[whole], (part.batch, part.head), drift)
        if naive:
            error = np.abs(got - part.out)[whole].max(initial=0.0)
            ours = max(ours, error)
            theirs = max(theirs, np.abs(untiled(part, dtype) - part.out)[whole].max(initial=0.0))
        if result.lse is not None and (part.total.all() or manifest.empty_rows == "zero"):
            got_lse = asked.row_numbers(result.lse, part.batch)[part.head, part.index]
            ratio = excess(got_lse, part.lse, lse_bound, "float32", tainted)
            det = None
            if ratio.max(initial=0.0) > 1:
                det = excess(got_lse, part.lse, limits.bound("det")[1], "float32", tainted)
            lse.see(ratio, det, part, got_lse, part.lse, lse_bound, manifest)
    numbers = out.numbers("") | lse.numbers("lse.") | statistics.numbers(gates=spread)
    if naive and theirs > 0:
        numbers["e4"] = float(ours / theirs)
    return _outcome(numbers, {"out": out, "lse": lse})


def backward(
    asked: Attention,
    dout: Array,
    gradients: Gradients,
    manifest: Manifest,
    dlse: Array | None = None,
    *,
    sums_in_dtype: bool = False,
) -> Outcome:
    """E1 of every gradient that the target gave, as ``dq.e1_prob`` and so on.
    ``sums_in_dtype``: see `bounds.Precision`."""
    precision = Precision.of(manifest, str(asked.q.dtype), sums_in_dtype=sums_in_dtype)
    numbers: dict[str, float] = {}
    found: dict[str, _Worst] = {}
    det: Mapping[str, tuple[F64, F64]] | None = None
    for name, (want, bound) in bounds.backward(asked, dout, dlse, precision, "prob").items():
        got = getattr(gradients, name)
        if got is None:
            continue
        dtype = bounds.dtype_of(asked, name)
        tainted = ~np.isfinite(want)
        ratio = excess(got, want, bound, dtype, tainted)
        worst = found[name] = _Worst()
        det_ratio = None
        if ratio.max(initial=0.0) > 1:
            det = det or bounds.backward(asked, dout, dlse, precision, "det")
            det_ratio = excess(got, want, det[name][1], dtype, tainted)
        worst.see(ratio, det_ratio, None, got, want, bound, manifest)
        numbers |= worst.numbers(f"{name}.")
    return _outcome(numbers, found)


def excess(
    got: Array, want: F64, bound: F64, dtype: str, tainted: NDArray[np.bool_] | bool = False
) -> F64:
    """|got - want| / bound; infinite where got is not finite without a right to be.

    An infinity is right where the true value, give or take its bound, lies beyond the dtype's
    range; where want is NaN so must got be; where a row is ``tainted`` by a NaN or inf in its
    visible input, NaN is as right as the formula's value.
    """
    got = np.asarray(got, np.float64)
    with np.errstate(all="ignore"):
        ratio = np.abs(got - want) / bound
        ratio = np.where(got == want, 0.0, ratio)
        overflows = np.isinf(got) & (np.sign(got) * want + bound >= LARGEST[dtype])
        ratio = np.where(overflows, 0.0, ratio)
        ratio = np.where(np.isnan(want), np.where(np.isfinite(got), np.inf, 0.0), ratio)
        # a bound that the taint made NaN says nothing; a number where NaN belongs stays wrong
        swallowed = np.isnan(want) & np.isfinite(got)
        ratio = np.where((np.isnan(got) | np.isnan(bound)) & tainted & ~swallowed, 0.0, ratio)
        return np.asarray(np.where(np.isnan(ratio), np.inf, ratio))


def limits(asked: Attention, manifest: Manifest) -> tuple[F64, F64]:
    """The PROB bounds of output and LSE, in their shapes; for comparing two answers."""
    precision = Precision.of(manifest, str(asked.q.dtype))
    out, lse = np.zeros(asked.out_shape), np.zeros(asked.lse_shape)
    for part in blocks(asked):
        bound, lse_bound = Forward(part, precision).bound("prob")
        asked.queries(out, part.batch)[part.head, part.index] = bound
        asked.row_numbers(lse, part.batch)[part.head, part.index] = lse_bound
    return out, lse


def exact(got: Array, want: Array, what: str = "out") -> Outcome:
    """Equality without a tolerance (0 and -0 are equal, NaN equals nothing)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    wrong = ~(got == want)
    if not wrong.any():
        return Outcome({f"{what}.different_bad": 0})
    at = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return Outcome(
        {f"{what}.different_bad": int(wrong.sum())},
        message=f"{what}{_text(at)} is {got[at]}, must be {want[at]} exactly",
        worst={
            "index": _plain(at),
            "tile": None,
            "got": float(got[at]),
            "want": float(want[at]),
            "bound": 0.0,
        },
    )


def same(a: Array, b: Array, what: str = "out", *, number: str = "bits_bad") -> Outcome:
    """Equal bits, NaN included; ``number`` names the count of differing elements."""
    name = number if number == "nondeterministic" else f"{what}.{number}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return Outcome.failed(f"{what}: {a.shape} {a.dtype} against {b.shape} {b.dtype}")
    kind = f"u{a.dtype.itemsize}"
    differ = np.ascontiguousarray(a).view(kind) != np.ascontiguousarray(b).view(kind)
    if not differ.any():
        return Outcome({name: 0})
    at = np.unravel_index(int(differ.argmax()), differ.shape)
    return Outcome(
        {name: int(differ.sum())},
        message=f"{what}{_text(at)}: {a[at]} against {b[at]}; {int(differ.sum())} elements differ",
        worst={
            "index": _plain(at),
            "tile": None,
            "got": float(a[at]),
            "want": float(b[at]),
            "bound": 0.0,
        },
    )


def within(got: Any, want: Any, bound: Any, what: str = "out") -> Outcome:
    """|got - want| <= bound (arrays), for expectations that do not come from the oracle; NaN
    fails."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    bound = np.broadcast_to(np.asarray(bound, np.float64), got.shape)
    ratio = excess(got, want, np.where(bound > 0, bound, 5e-324), "float64")
    worst = _Worst()
    worst.see(ratio, None, None, got, want, bound, None)
    name = f"{what}_over"
    return _outcome({name: float(ratio.max(initial=0.0))}, {what: worst})


def all_of(outcomes: Iterable[Outcome]) -> Outcome:
    """One outcome of several: of every number the largest, and the message of the worst."""
    numbers: dict[str, float] = {}
    worst = Outcome()
    for one in outcomes:
        for name, value in one.numbers.items():
            if name not in numbers or not value <= numbers[name]:  # NaN counts as larger
                numbers[name] = value
        graver = SEVERITY.index(one.verdict) - SEVERITY.index(worst.verdict)
        says_more = one.worst is not None and worst.worst is None and not worst.message
        if graver > 0 or (graver == 0 and says_more):
            worst = one
    return Outcome(numbers, worst.cause, worst.message, worst.worst)


def untiled(part: Rows, dtype: str) -> F64:
    """What a naive implementation gives that keeps scores, probabilities and output in
    ``dtype``, with float32 sums: the yardstick of E4."""
    kind = DTYPES[dtype]
    wide: Any = np.float64 if dtype == "float64" else np.float32

    def stored(x: Any) -> Any:
        return x.astype(kind).astype(wide)

    with np.errstate(all="ignore"):
        score = stored(part.q.astype(wide) @ part.k.astype(wide).T * wide(part.scale))
        if part.softcap is not None:
            score = stored(part.softcap * np.tanh(score / wide(part.softcap)))
        score = np.where(part.visible, stored(score + part.added.astype(wide)), -np.inf)
        power = np.where(part.visible, np.exp(score - part.top.astype(wide)), 0)
        total = power.sum(1, keepdims=True)
        if part.sink is not None:
            total = total + np.exp(part.sink - part.top.astype(wide))
        weight = stored(power / np.where(total == 0, 1, total))
        v = np.where(np.isfinite(part.v), part.v, 0).astype(wide)
        return np.asarray(stored(weight @ v), np.float64)


class _Worst:
    """The largest ratio seen, and where."""

    def __init__(self) -> None:
        self.prob = self.det = 0.0
        self.seen = False
        self.where: dict[str, Any] | None = None

    def see(
        self,
        ratio: F64,
        det: F64 | None,
        part: Rows | None,
        got: Array,
        want: Array,
        bound: Array,
        manifest: Manifest | None,
    ) -> None:
        self.seen = True
        if not ratio.size:
            return
        top = float(ratio.max())
        # where PROB holds, so does the wider DET: its ratio needs no computing
        self.det = max(self.det, top if det is None else float(det.max()))
        if top < self.prob or (self.where and top == self.prob):
            return
        self.prob = top
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        index = _plain(at)
        tile = None
        if part is not None:
            row = int(part.index[at[0]])
            index = [part.batch, part.head, row, *index[1:]]
            if manifest is not None and manifest.tile is not None:
                tile = [row // manifest.tile[0]]
        self.where = {
            "index": index,
            "tile": tile,
            "got": float(got[at]),
            "want": float(want[at]),
            "bound": float(bound[at]),
        }

    def numbers(self, prefix: str) -> dict[str, float]:
        if not self.seen:
            return {}
        return {f"{prefix}e1_prob": self.prob, f"{prefix}e1_det": self.det}


class _Spread:
    """E2 and E3 over the elements seen.

    Elements of a row share the error of its weights, and where rows attend alike those of a
    column share its roundings; so the standard error of the mean is the largest of the plain one
    and those clustered by row and by column (Cameron, Gelbach and Miller 2011).
    """

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.signed = self.drift = 0.0
        self.clusters = [np.zeros(3), np.zeros(3)]  # sums of s^2, s n and n^2 over clusters
        self.head: tuple[int, int] | None = None
        self.column: F64 | None = None  # of the head at hand, whose rows come in parts
        self.height = 0

    def see(self, z: F64, want: F64, head: tuple[int, int], drift: F64 | float = 0.0) -> None:
        """Errors in units of sigma of some rows of ``head``, (batch, head), and how far a declared
        truncation may push them towards zero."""
        if head != self.head:
            self._close()
            self.head = head
        self.count += z.size
        self.squares += float((z * z).sum())
        self.drift += float(np.sum(drift))
        signed = np.sign(want) * z
        self.signed += float(signed.sum())
        self._add(1, signed.sum(1), z.shape[1])
        self.column = signed.sum(0) + (0.0 if self.column is None else self.column)
        self.height += len(z)

    def _close(self) -> None:
        if self.column is not None:
            self._add(0, self.column, self.height)
        self.column, self.height = None, 0

    def _add(self, axis: int, s: F64, n: int) -> None:
        self.clusters[axis] += [float(s @ s), n * float(s.sum()), n * n * len(s)]

    def numbers(self, *, gates: bool) -> dict[str, float]:
        self._close()
        if self.count < ENOUGH:
            return {}
        mean, square = self.signed / self.count, self.squares / self.count
        errors = [max(square - mean * mean, 0.0) / self.count]
        for s2, sn, n2 in self.clusters:
            errors.append(max(s2 - 2 * mean * sn + mean**2 * n2, 0.0) / self.count**2)
        limit = max(0.15, 6 * max(errors) ** 0.5)
        seen = {"rms": square**0.5, "bias": mean}
        # Truncation only ever takes away: a bias in the other direction has no excuse.
        unexcused = min(0.0, mean + self.drift / self.count) if mean < 0 else mean
        return {**seen, "e2": square**0.5, "e3": abs(unexcused) / limit} if gates else seen


def _tainted(part: Rows) -> NDArray[np.bool_]:
    """Rows that see a NaN or an infinity in their input."""
    of_query = ~np.isfinite(part.q).all(1)
    tame = part.largest_k < np.inf and part.largest_v < np.inf
    if tame and np.isfinite(part.added.sum()):
        return np.asarray(of_query)
    keys: Any = ~(np.isfinite(part.k).all(1) & np.isfinite(part.v).all(1))
    seen = part.visible & (keys[None, :] | ~np.isfinite(part.added))
    return np.asarray(seen.any(1) | of_query)


def _expected(part: Rows, bound: F64, manifest: Manifest, dtype: str) -> tuple[F64, F64]:
    """Output and bound, empty rows as the target declares them."""
    empty = part.total == 0
    if manifest.empty_rows == "zero" or not empty.any():
        return part.out, bound
    if manifest.empty_rows == "nan" or not len(part.v):
        return part.out, np.where(empty, np.inf, bound)
    v = np.asarray(part.v, np.float64)
    mean, size = v.mean(0), np.abs(v).mean(0)
    slack = 4 * (ROUND_OFF[dtype] + len(v) ** 0.5 * ROUND_OFF["float32"])
    return np.where(empty, mean, part.out), np.where(empty, slack * size, bound)


def _outcome(numbers: dict[str, float], found: Mapping[str, _Worst]) -> Outcome:
    name, worst = max(found.items(), key=lambda item: item[1].prob)
    message = ""
    if worst.prob > 1 and worst.where:
        w = worst.where
        message = (
            f"{name}{_text(w['index'])} is {w['got']:.6g}, must be {w['want']:.6g} "
            f"within {w['bound']:.3g}"
        )
    return Outcome(numbers, message=message, worst=worst.where)


def _plain(at: Iterable[Any]) -> list[int]:
    return [int(x) for x in at]


def _text(at: Iterable[Any]) -> str:
    return "[" + ", ".join(str(int(x)) for x in at) + "]"
