"""A-priori error bounds of tiled attention, element by element, each with its derivation.

The rule kept here: a tolerance is derived from the arithmetic that the target declares, never from
what some implementation happens to reach. `docs/conformance.md` has the short form.

Notation: u is the unit round-off (float32 2^-24, float16 and tf32 2^-11, bfloat16 2^-8); u_a of
the accumulator, u_p of the stored probabilities (0 where they stay in float32), u_o of the output,
u_m of a declared down-conversion of the operands of q k^T; tau the smallest subnormal; T tiles; N
keys that a row sees; s scores, m row maximum, P probabilities, L their sum, o output;
A = |scale| |q| |k|^T + |bias| + |ALiBi|; W = P |v|.

A sum of n rounded terms is off by at most gamma(n) = n u_a / (1 - n u_a) of the sum of magnitudes
(DET: Higham, Accuracy and Stability, section 3.1), and by more than 6 sqrt(n) u_a only with
negligible probability (PROB: Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4).

Score (E1, `Forward.score_error`). A score is a dot product of d terms, a scaling and one or two
additions: (gamma(d+3) + 2 u_m) A. The exponent's argument s - m is formed with two roundings of s
and, folded with log2(e), three of m - s: u_a (2|s| + 3(m-s)). exp itself is good to eps_exp = 4u_a.
A later tile rescales by exp(m_old - m_new): u_a max(m-s) and eps_exp per tile, T of them.
A softcap c tanh(x/c) shrinks the incoming error by its slope and adds its own, 8 u_a c (tanh from
one exp and one division is good to a few u_a in absolute terms, not relative to itself).

Output (E1, `Forward.bound`). P_j is multiplied by e^(+-eta_j) above and, through L, below:
sum P_j (e^eta_j - 1)(|v_j| + |o|); a sink is one more key with v = 0. Storage of P adds
pi = u_p W (PROB: min of that and 6 u_p sqrt(P^2 v^2), since roundings of different keys are
independent) and tau_p/2 per key that falls among the subnormals. The sums over keys add
gamma(N + 2T)(W + |o|), the last division and rescaling 4u_a|o|, the output's rounding
u_o(|o| + B) + tau_o. Results below the smallest normal float32 may be flushed to zero.

LSE: log L moves by sum P(e^eta - 1) + gamma(N); forming and storing it costs 8 u_a + 3 u_a |lse|.

Spread (E2, `Forward.spread`). The same roundings as independent and uniform in +-u: variance u^2/3
each; sigma_s = u_a(sqrt(d)/2 A + |s| + m - s) for a score.

Backward (`backward`). P is recomputed from s and the stored LSE, so its error is
G = P(e^(eta + E_lse + eps) - 1). dP = dO v^T is a dot product of Dv terms; D = sum dO o uses the
stored output. dS = P(dP - D): E_dS = G|dP - D| + (P + G)(gamma(Dv)|dO||v|^T + E_D + 2u_a|dP - D|).
P and dS are stored for the last products: u_p x + tau_p/2 each. The tau term is what makes a
correct float16 kernel pass on peaked scores, where most of P is subnormal. The softcap's slope
1 - t^2 is off by 2|t|(1 - t^2) E_x/c + 16 u_a |t| + 2 u_a.

Drift (E3, `Forward.drift`). Sums that are cut and not rounded lose u_a/2 of themselves at each
step, always towards zero: with `acc: "fp32-rz"` that much bias is no fault.

float64 targets are compared with a float64 oracle that errs as much as they may: bounds double.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from portattn.conformance.reference import (
    F64,
    Array,
    Attention,
    Gradients,
    Rows,
    blocks,
    outer,
    pull,
    weigh,
)

if TYPE_CHECKING:
    from portattn.conformance.manifest import Manifest

Mode = Literal["prob", "det"]
LAMBDA = 6.0
"""PROB: how many standard deviations; 6 leaves 2e-9 per rounding sequence."""

ROUND_OFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUBNORMAL = {
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
}
LARGEST = {
    "float64": float(np.finfo(np.float64).max),
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": 2.0**128 - 2.0**119,
}
TF32 = 2.0**-11


@dataclass(frozen=True)
class Precision:
    """The arithmetic that a target declares for one input dtype.

    ``sums_in_dtype``: it states that dk and dv are summed over query tiles in their own dtype.
    DET then has a rounding of the output for each tile; PROB stays, so that it shows as a warning.
    """

    dtype: str
    u_acc: float
    u_p: float
    tiny_p: float
    u_operand: float
    block_k: int | None
    sums_in_dtype: bool = False
    truncates: bool = False

    @classmethod
    def of(cls, manifest: Manifest, dtype: str, *, sums_in_dtype: bool = False) -> Precision:
        """What ``manifest`` says of ``dtype``."""
        wide = dtype == "float64" or manifest.acc == "fp64"
        half = dtype in ("float16", "bfloat16") and manifest.p_storage == "input"
        return cls(
            dtype=dtype,
            u_acc=2.0**-53 if wide else 2.0**-23 if manifest.acc == "fp32-rz" else 2.0**-24,
            u_p=ROUND_OFF[dtype] if half else 0.0,
            tiny_p=SUBNORMAL[dtype] if half else 0.0,
            u_operand=TF32 if dtype == "float32" and manifest.qk_operand == "tf32" else 0.0,
            block_k=None if manifest.tile is None else manifest.tile[1],
            sums_in_dtype=sums_in_dtype,
            truncates=manifest.acc == "fp32-rz" and not wide,
        )

    @property
    def eps_exp(self) -> float:
        """Relative error of exp."""
        return 4 * self.u_acc

    @property
    def flush(self) -> float:
        """Smallest normal number of the accumulator: what is below may become 0."""
        return 2.0**-1022 if self.u_acc < 2.0**-30 else 2.0**-126

    @property
    def oracle(self) -> float:
        """How often the bound is counted: twice where the oracle errs as much as the target."""
        return 2.0 if self.u_acc < 2.0**-30 and self.dtype == "float64" else 1.0

    def tiles(self, keys: int) -> int:
        """T: tiles along the keys, pessimistic where the target does not state them."""
        return -(-keys // self.block_k) if self.block_k else -(-keys // 32) + 4

    def gamma(self, terms: float | F64, mode: Mode) -> Any:
        """Relative error of a sum of ``terms`` roundings."""
        if mode == "det":
            return terms * self.u_acc / (1 - terms * self.u_acc)
        return np.minimum(terms, LAMBDA * np.sqrt(terms)) * self.u_acc


class Forward:
    """Bounds and spread of the output and LSE at some rows."""

    def __init__(self, part: Rows, precision: Precision):
        self.part, self.p = part, precision
        self.tiles = precision.tiles(len(part.k))
        self.keys = part.visible.sum(1, keepdims=True)
        self.score = np.where(np.isfinite(part.score), part.score, 0.0)
        with np.errstate(all="ignore"):
            self.far = np.where(part.weight > 0, part.top - self.score, 0.0)
            self.dots = np.where(part.visible, abs(part.scale) * outer(part.q, part.k, np.abs), 0.0)
            self.mass = weigh(part.weight, part.v, part.visible, np.abs, largest=part.largest_v)
            self.mass2 = weigh(
                part.weight**2, part.v, part.visible, np.square, largest=part.largest_v
            )

    @cached_property
    def magnitude(self) -> F64:
        """A (m, n)."""
        return self.dots + np.abs(self.part.added)

    def dot_error(self, mode: Mode) -> F64:
        """Error of scale q k^T (m, n)."""
        d = self.part.q.shape[1]
        return np.asarray((self.p.gamma(d + 3, mode) + 2 * self.p.u_operand) * self.dots)

    def score_error(self, mode: Mode) -> tuple[F64, F64]:
        """eta (m, n), and of the sink (m, 1): the error of an exponent, natural-log units."""
        part, p = self.part, self.p
        eta = self.dot_error(mode)
        if part.softcap is not None:
            nearest = np.maximum(np.abs(part.product) - eta, 0.0)
            slope = 1.0 - np.tanh(nearest / part.softcap) ** 2
            eta = eta * slope + 8 * p.u_acc * part.softcap
        eta = eta + p.gamma(part.q.shape[1] + 3, mode) * np.abs(part.added)
        eta += p.u_acc * (2 * np.abs(self.score) + 3 * self.far) + p.eps_exp
        sink_far = np.zeros_like(part.top)
        if part.sink is not None:
            sink_far = np.where(part.sink_weight > 0, part.top - part.sink, 0.0)
        t = self.tiles if mode == "det" else min(self.tiles, LAMBDA * self.tiles**0.5)
        reach = np.maximum(self.far.max(1, keepdims=True, initial=0.0), sink_far)
        rescale = p.u_acc * reach + t * p.eps_exp
        of_sink = p.u_acc * (2 * abs(part.sink or 0.0) + 3 * sink_far) + p.eps_exp + rescale
        return eta + rescale, of_sink

    def moved(self, mode: Mode) -> tuple[F64, F64]:
        """P (e^eta - 1) (m, n), and its row sum (m, 1) with the sink."""
        eta, of_sink = self.score_error(mode)
        part = self.part
        # beyond e^50 the bound says nothing anyway, and must not become inf * 0
        moved = part.weight * np.expm1(np.minimum(eta, 50.0))
        sink = part.sink_weight * np.expm1(np.minimum(of_sink, 50.0))
        return moved, moved.sum(1, keepdims=True) + sink

    def bound(self, mode: Mode, *, stored: bool = True) -> tuple[F64, F64]:
        """E1 of the output (m, Dv) and the bound of the LSE (m,); ``stored``: with the output's
        rounding."""
        part, p = self.part, self.p
        with np.errstate(all="ignore"):
            moved, moved_row = self.moved(mode)
            out = np.abs(part.out)
            bound = (
                weigh(moved, part.v, part.visible, np.abs, largest=part.largest_v) + out * moved_row
            )
            storage = p.u_p * self.mass
            if mode == "prob":
                storage = np.minimum(storage, LAMBDA * p.u_p * np.sqrt(self.mass2))
            bound += storage + self.underflow()
            bound += p.gamma(self.keys + 2 * self.tiles, mode) * (self.mass + out)
            bound += 4 * p.u_acc * out + p.flush
            lse_bound = (
                moved_row[:, 0]
                + p.gamma(self.keys[:, 0], mode)
                + 8 * p.u_acc
                + 3 * p.u_acc * np.abs(part.lse)
            )
            if p.dtype != "float64":  # the LSE is stored in float32 whatever accumulated it
                lse_bound += ROUND_OFF["float32"] * np.abs(part.lse)
            bound, lse_bound = p.oracle * bound, p.oracle * lse_bound
            return (rounded(bound, out, p.dtype) if stored else bound), lse_bound

    def underflow(self) -> F64 | float:
        """What is lost where P, relative to the row maximum, is subnormal in its storage."""
        part, tiny = self.part, self.p.tiny_p / 2 + self.p.flush
        total = np.where(part.total == 0, 1.0, part.total)
        if tiny < 1e-30:  # not float16: nothing that a matmul should be spent on
            largest = part.largest_v
            if not largest < np.inf:
                largest = float(np.abs(part.v[np.isfinite(part.v)]).max(initial=0))
            return np.asarray(tiny * largest * len(part.v) / total)
        return (
            tiny
            * weigh(
                part.visible.astype(np.float64),
                part.v,
                part.visible,
                np.abs,
                largest=part.largest_v,
            )
            / total
        )

    def spread(self) -> F64:
        """E2: sigma (m, Dv), the standard deviation of a correct implementation's error."""
        part, p = self.part, self.p
        d, u = part.q.shape[1], p.u_acc
        with np.errstate(all="ignore"):
            sigma = u * (0.5 * d**0.5 * self.magnitude + np.abs(self.score) + self.far)
            sigma += p.u_operand * self.dots / d**0.5
            spread = (part.weight * sigma) ** 2
            out2 = part.out**2
            variance = weigh(spread, part.v, part.visible, np.square, largest=part.largest_v)
            variance += out2 * spread.sum(1, keepdims=True)
            variance += p.u_p**2 / 3 * self.mass2
            if p.tiny_p > 1e-30:
                seen = part.visible.astype(np.float64)
                lost = p.tiny_p / np.where(part.total == 0, 1.0, part.total)
                variance += (
                    lost**2
                    / 12
                    * weigh(seen, part.v, part.visible, np.square, largest=part.largest_v)
                )
            variance += 2 / 3 * u**2 * (self.tiles + 16) * (out2 + self.mass2)
            variance *= p.oracle
            variance += (ROUND_OFF[p.dtype] ** 2) * out2 / 3 + SUBNORMAL[p.dtype] ** 2
            return np.asarray(np.sqrt(variance + p.flush**2))

    def drift(self) -> F64 | float:
        """E3: how far a truncating accumulator drags the output towards zero (m, Dv).

        Each step of a tensor core adds the products of 16 keys (8 of float32) and cuts the sum:
        u_a / 2 of the sum so far on average, which is at most about the final one.
        """
        if not self.p.truncates:
            return 0.0
        steps = self.keys / (8 if self.p.dtype == "float32" else 16)
        return np.asarray(steps * (self.p.u_acc / 2) * np.abs(self.part.out))


def rounded(bound: F64, want: F64, dtype: str) -> F64:
    """``bound`` with the rounding of the result to ``dtype`` added."""
    return np.asarray(bound + ROUND_OFF[dtype] * (np.abs(want) + bound) + SUBNORMAL[dtype])


def backward(
    asked: Attention, dout: Array, dlse: Array | None, p: Precision, mode: Mode
) -> dict[str, tuple[F64, F64]]:
    """(want, bound) of dq, dk, dv, and of dbias and dsinks where those exist."""
    want, sure, first, second = (Gradients(asked) for _ in range(4))
    group = asked.heads[0] // asked.heads[1]
    for part in blocks(asked):
        b, h, at = part.batch, part.head, part.index
        rows_dlse = None if dlse is None else asked.row_numbers(dlse, b)[h, at]
        with np.errstate(all="ignore"):
            g = pull(part, asked.queries(dout, b)[h, at], rows_dlse)
            error = _score_gradient_error(part, g, rows_dlse, p, mode)
            scale, seen = part.scale, part.visible
            rows = asked.queries(asked.q, b).shape[1] * group
            tiles = p.tiles(max(len(part.k), rows))
            more_q = p.gamma(len(part.k) + 2 * tiles, mode) * np.abs(g.dproduct)
            more_k = p.gamma(rows + 2 * tiles, mode)
            if p.sums_in_dtype and mode == "det":
                more_k = more_k + tiles * ROUND_OFF[p.dtype]
            # stored in the input's dtype for the last product; a kernel may store scale * dS
            kept = p.tiny_p / 2 * max(1.0, 1 / abs(scale) if scale else 1.0) * seen
            kept_ds = (p.u_p + 2 * p.u_operand) * np.abs(g.dproduct) + kept
            kept_bias = p.u_p * np.abs(g.dscore) + kept
            kept_p = (p.u_p + 2 * p.u_operand) * part.weight + p.tiny_p / 2 * seen
            summed = error.dscore + p.gamma(_count(asked) + tiles, mode) * np.abs(g.dscore)
            lost = np.abs(part.sink_weight * g.delta)
            of_sink = error.sink + p.gamma(rows * asked.batch + tiles, mode) * lost
            want.add(
                part,
                scale * weigh(g.dproduct, part.k, seen, largest=part.largest_k),
                scale * weigh(g.dproduct.T, part.q, seen.T),
                weigh(part.weight.T, g.dout, seen.T),
                g.dscore,
                float(-(part.sink_weight * g.delta).sum()),
            )
            by = abs(scale)
            sure.add(
                part,
                by * weigh(error.dproduct + more_q, part.k, seen, np.abs, largest=part.largest_k),
                by
                * weigh((error.dproduct + more_k * np.abs(g.dproduct)).T, part.q, seen.T, np.abs),
                weigh((error.weight + more_k * part.weight).T, g.dout, seen.T, np.abs),
                summed,
                float(of_sink.sum()),
            )
            if not (p.u_p or p.u_operand):
                continue
            first.add(
                part,
                by * weigh(kept_ds, part.k, seen, np.abs, largest=part.largest_k),
                by * weigh(kept_ds.T, part.q, seen.T, np.abs),
                weigh(kept_p.T, g.dout, seen.T, np.abs),
                kept_bias,
                0.0,
            )
            second.add(
                part,
                by**2 * weigh(kept_ds**2, part.k, seen, np.square, largest=part.largest_k),
                by**2 * weigh((kept_ds**2).T, part.q, seen.T, np.square),
                weigh((kept_p**2).T, g.dout, seen.T, np.square),
                kept_bias**2,
                0.0,
            )
    result = {}
    for name, value in want.arrays.items():
        storage = first.arrays[name]
        if mode == "prob":
            storage = np.minimum(storage, LAMBDA * np.sqrt(second.arrays[name]))
        bound = sure.arrays[name] + storage + 4 * p.u_acc * np.abs(value) + p.flush
        result[name] = (value, rounded(p.oracle * bound, value, dtype_of(asked, name)))
    return result


@dataclass(frozen=True, eq=False)
class _Errors:
    weight: F64
    dscore: F64
    dproduct: F64
    sink: F64


def _score_gradient_error(
    part: Rows, g: Any, dlse: Array | None, p: Precision, mode: Mode
) -> _Errors:
    """Errors of P, of dS after and before the softcap (m, n), and of the sink's dS (m, 1)."""
    bounds = Forward(part, p)
    eta, of_sink = bounds.score_error(mode)
    out_error, lse_error = bounds.bound(mode, stored=False)
    finite = np.where(np.isfinite(part.lse), part.lse, 0.0)
    late = (lse_error + 3 * p.u_acc * np.abs(finite) + p.eps_exp)[:, None]
    moved = part.weight * np.expm1(np.minimum(eta + late, 50.0))
    moved_sink = part.sink_weight * np.expm1(np.minimum(of_sink + late, 50.0))
    terms = g.dout * part.out
    size, u_o = np.abs(terms).sum(1, keepdims=True), ROUND_OFF[p.dtype]
    from_out = np.abs(g.dout) * (out_error + SUBNORMAL[p.dtype])
    if mode == "prob":
        independent = LAMBDA * np.sqrt((terms**2).sum(1, keepdims=True))
        of_delta = u_o * np.minimum(size, independent)
        of_delta += np.minimum(
            from_out.sum(1, keepdims=True), LAMBDA * np.sqrt((from_out**2).sum(1, keepdims=True))
        )
    else:
        of_delta = u_o * size + from_out.sum(1, keepdims=True)
    width = g.dout.shape[1]
    of_delta += p.gamma(width, mode) * size + p.u_acc * np.abs(g.delta)
    if dlse is not None:
        of_delta += p.u_acc * np.abs(np.asarray(dlse, np.float64))[:, None]
    dots = np.where(part.visible, outer(g.dout, part.v, np.abs), 0.0)
    apart = np.where(part.visible, np.abs(g.dp - g.delta), 0.0)
    within = (p.gamma(width, mode) + 2 * p.u_operand) * dots + of_delta + 2 * p.u_acc * apart
    dscore = np.where(part.visible, moved * apart + (part.weight + moved) * within, 0.0)
    dproduct = dscore
    if part.softcap is not None:
        t = np.abs(np.tanh(part.product / part.softcap))
        of_slope = 2 * t * g.slope * bounds.dot_error(mode) / part.softcap
        of_slope += p.u_acc * (16 * t + 2)
        dproduct = dscore * g.slope + (np.abs(g.dscore) + dscore) * of_slope
    sink = moved_sink * np.abs(g.delta) + (part.sink_weight + moved_sink) * of_delta
    return _Errors(moved, dscore, dproduct, sink)


def _count(asked: Attention) -> float:
    """How many score gradients one element of the bias gathers."""
    if asked.bias is None:
        return 1.0
    pairs = sum(
        asked.queries(asked.q, b).shape[1] * asked.keys(asked.k, b).shape[1]
        for b in range(asked.batch)
    )
    return max(1.0, float(pairs * asked.heads[0]) / max(int(asked.bias.size), 1))


def dtype_of(asked: Attention, gradient: str) -> str:
    """The dtype of a gradient: that of its argument."""
    return str(getattr(asked, gradient[1:]).dtype)
