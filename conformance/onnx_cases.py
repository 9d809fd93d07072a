"""The test cases of ONNX's Attention operator, run through portattn: `portattn conformance onnx`.

The rule kept here: a case is asked in the contract's own words, and where those cannot say what the
operator says, its rule is written out as a mask. What the contract has no answer for is listed with
the reason, and the rest of such a case is still held to what it expects.

The operator's words (its text, opset 25) beside the contract's:

=========================  =====================================================================
3-D inputs, *_num_heads    (B, S, H * D) seen as (B, S, H, D): layout "bshd"
4-D inputs                 layout "bhsd"
attn_mask, bool            mask; a shorter last axis is padded with False
attn_mask, float           bias; a shorter last axis is padded with -inf
past_key, past_value       k and v behind them in one array, which is present_key, present_value
nonpad_kv_seqlen           seqused_k
is_causal                  key j <= query i + offset; offset: the length of the past, or
                           nonpad_kv_seqlen - Sq, or else 0. "bottom_right" where that is Sk - Sq,
                           "top_left" where it is 0, a mask where it is neither
left_, right_window_size   window, on the same offset; -1 is None
softcap, 0 for none        softcap, None for none; before mask and bias in both (onnx#7865)
softmax_precision          float32 always (float64 for float64 inputs); a wider one is listed
qk_matmul_output           none: scores are never stored; listed
=========================  =====================================================================
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.markup import escape

import portattn
from portattn.conformance.bounds import ROUND_OFF
from portattn.conformance.targets import TargetError, need
from portattn.conformance.verdicts import Verdict

Array = np.ndarray[Any, np.dtype[Any]]

INPUTS = ("q", "k", "v", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("y", "present_key", "present_value", "qk_matmul_output")
DEFAULTS: Mapping[str, Any] = {
    "is_causal": 0,
    "kv_num_heads": None,
    "left_window_size": -1,
    "q_num_heads": None,
    "qk_matmul_output_mode": 0,
    "right_window_size": -1,
    "scale": None,
    "softcap": 0.0,
    "softmax_precision": None,
}

OLDEST = (1, 22)
"""onnx releases before this one expect the bias before the softcap (onnx#7865): the expected values
of two of their cases are cap * tanh((scores + bias) / cap), against the text that came after."""
_FLOAT64 = 11  # TensorProto.DOUBLE

NO_SCORES = "qk_matmul_output: the contract stores no scores"
NO_WIDER_SOFTMAX = "softmax_precision: the contract's softmax is in float32 for these inputs"
NO_MIXED_DTYPES = "q, k and v have one dtype in the contract"
NO_OTHER_MASK = "attn_mask: the contract's mask is bool, its bias of q's dtype or float32"


@dataclass(frozen=True, slots=True)
class OnnxCase:
    """One case: the operator's inputs, attributes and expected outputs, by the names above."""

    name: str
    opset: int
    attributes: Mapping[str, Any]
    inputs: Mapping[str, Array]
    wanted: Mapping[str, Array]
    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A case in the contract's words; ``reasons``: what of it the contract has no answer for."""

    q: Array
    k: Array
    v: Array
    options: Mapping[str, Any]
    reasons: tuple[str, ...]

    @property
    def askable(self) -> bool:
        """Does what is left of the case still have an answer?"""
        return set(self.reasons) <= {NO_SCORES, NO_WIDER_SOFTMAX}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case. ``ratio``: the worst error over its tolerance; None where nothing could
    be asked. ``options``: the contract's words that it was asked in."""

    name: str
    opset: int
    dtype: str
    verdict: Verdict
    ratio: float | None
    options: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "name": self.name,
            "opset": self.opset,
            "dtype": self.dtype,
            "verdict": str(self.verdict),
            "ratio": self.ratio,
            "options": list(self.options),
            "reasons": list(self.reasons),
            "message": self.message,
        }


def collect() -> list[OnnxCase]:
    """The operator's own cases that the installed ``onnx`` generates. Those that spell the operator
    out in others (``..._expanded``) hold the same numbers once more and are left out.

    Raises `TargetError` where onnx is not installed or older than `OLDEST`.
    """
    onnx = need("onnx", "onnx")
    if tuple(int(part) for part in onnx.__version__.split(".")[:2]) < OLDEST:
        raise TargetError(
            f"onnx {onnx.__version__} expects the bias before the softcap, which the operator's "
            f"text has put right since (onnx#7865); wanted: {'.'.join(map(str, OLDEST))} or newer"
        )
    node_cases = need("onnx.backend.test.case.node", "onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other operators' cases, which are made on the way
        made = node_cases.collect_testcases("Attention")
    found = []
    for case in made:
        (node, *more) = case.model.graph.node
        if more or node.op_type != "Attention":
            continue
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        (opset,) = (item.version for item in case.model.opset_import if not item.domain)
        for inputs, outputs in case.data_sets:
            found.append(
                OnnxCase(
                    case.name,
                    opset,
                    {**DEFAULTS, **attributes},
                    _named(INPUTS, node.input, inputs),
                    _named(OUTPUTS, node.output, outputs),
                    case.rtol,
                    case.atol,
                )
            )
    return found


def _named(
    names: Iterable[str], places: Iterable[str], arrays: Iterable[Array]
) -> dict[str, Array]:
    """Arrays by name; a place with an empty name has none."""
    there = [name for name, place in zip(names, places, strict=False) if place]
    return dict(zip(there, arrays, strict=True))


def ask(case: OnnxCase) -> Asked:
    """The case in the contract's words."""
    given, said = case.inputs, case.attributes
    q, k, v = given["q"], given["k"], given["v"]
    reasons = [
        f"attribute {name} is unknown to this runner" for name in sorted(set(said) - set(DEFAULTS))
    ]
    if "qk_matmul_output" in case.wanted:
        reasons.append(NO_SCORES)
    if _wider(said["softmax_precision"], q.dtype):
        reasons.append(NO_WIDER_SOFTMAX)
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        reasons.append(NO_MIXED_DTYPES)
    options: dict[str, Any] = {"layout": "bhsd"}
    if q.ndim == 3:
        options["layout"] = "bshd"
        q, k, v = (
            x.reshape(*x.shape[:2], said[heads], -1)
            for x, heads in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads"))
        )
    tokens = options["layout"].index("s")
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        k, v = (
            np.concatenate([_turned(given[name], options["layout"]), x], axis=tokens)
            for name, x in (("past_key", k), ("past_value", v))
        )
    if said["scale"] is not None:
        options["scale"] = said["scale"]
    if said["softcap"]:
        options["softcap"] = said["softcap"]
    used = given.get("nonpad_kv_seqlen")
    if used is not None:
        options["seqused_k"] = used.astype(np.int32)
    seq_q, seq_k = q.shape[tokens], k.shape[tokens]
    alignment = None  # of the operator's offset, in the contract's words
    if used is not None or past == seq_k - seq_q:
        alignment = "bottom_right"
    elif past == 0:
        alignment = "top_left"
    sides = (said["left_window_size"], said["right_window_size"])
    window = tuple(None if side < 0 else side for side in sides)
    if said["is_causal"] and alignment:
        options["causal"] = alignment
    visible = None
    if window != (None, None) and options.get("causal", "bottom_right") == alignment:
        options["window"] = window
    elif window != (None, None) or (said["is_causal"] and not alignment):
        visible = _frontier(seq_q, seq_k, past, bool(said["is_causal"]), window)
    given_mask = given.get("attn_mask")
    if given_mask is not None:
        kind = given_mask.dtype
        if kind != np.bool_ and kind not in (q.dtype, np.float32):
            reasons.append(NO_OTHER_MASK)
        elif kind == np.bool_:
            mask = _padded(given_mask, seq_k, False)
            visible = mask if visible is None else mask & visible
        else:
            options["bias"] = _padded(given_mask, seq_k, -np.inf)
    if visible is not None:
        options["mask"] = visible
    return Asked(q, k, v, options, tuple(reasons))


def _wider(precision: int | None, dtype: Any) -> bool:
    """Does the case want a softmax in float64 for inputs whose softmax is in float32 here?"""
    return precision == _FLOAT64 and dtype != np.float64


def _turned(x: Array, layout: str) -> Array:
    """Heads before tokens, as the operator's caches have them, from or into ``layout``."""
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def _padded(mask: Array, seq_k: int, value: float) -> Array:
    """The last axis filled up to ``seq_k``; one of length 1 broadcasts and is left alone."""
    missing = seq_k - mask.shape[-1]
    if missing <= 0 or mask.shape[-1] == 1:
        return mask
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=value)


def _frontier(
    seq_q: int, seq_k: int, offset: int, causal: bool, window: tuple[int | None, ...]
) -> Array:
    """The operator's causal rule and window for any offset, (Sq, Sk): True = attend."""
    ahead = np.arange(seq_k) - (np.arange(seq_q)[:, None] + offset)
    left, right = window
    visible = np.ones((seq_q, seq_k), bool)
    if causal:
        visible &= ahead <= 0
    if left is not None:
        visible &= -ahead <= left
    if right is not None:
        visible &= ahead <= right
    return visible


def tolerance(case: OnnxCase, dtype: str) -> float:
    """Relative tolerance of an output: the case's own, or 16 round-offs of the dtype where that is
    tighter (float32). Where the case's own is finer than the dtype's spacing (bfloat16), so that
    only equal bits would do, two units in the last place: both sides were rounded."""
    u = ROUND_OFF[dtype]
    return 4 * u if case.rtol < 2 * u else min(case.rtol, 16 * u)


def run(case: OnnxCase, backend: str = "numpy") -> Result:
    """Ask ``backend`` and hold what comes to what the case expects."""
    asked = ask(case)
    dtype = str(case.inputs["q"].dtype)
    words = tuple(name for name in asked.options if name != "layout")

    def result(
        verdict: Verdict, ratio: float | None, why: tuple[str, ...], said: str = ""
    ) -> Result:
        return Result(case.name, case.opset, dtype, verdict, ratio, words, why, said)

    if not asked.askable:
        return result(Verdict.NOT_SUPPORTED, None, asked.reasons)
    try:
        out = portattn.attention(asked.q, asked.k, asked.v, **asked.options, backend=backend)
    except portattn.Unsupported as error:
        why = [str(reason) for found in error.reasons.values() for reason in found]
        return result(Verdict.NOT_SUPPORTED, None, (*asked.reasons, *why))
    except (ValueError, TypeError) as error:
        text = f"refused: {type(error).__name__}: {error}"
        return result(Verdict.FAIL, None, asked.reasons, text)
    if case.inputs["q"].ndim == 3:
        out = out.reshape(*out.shape[:2], -1)
    layout = asked.options["layout"]
    ratio = _worst(out, case.wanted["y"], tolerance(case, dtype), case.atol)
    wrong = [] if ratio <= 1 else [f"y is off by {ratio:.3g} times its tolerance"]
    for name, array in (("present_key", asked.k), ("present_value", asked.v)):
        wanted = case.wanted.get(name)
        if wanted is not None and not np.array_equal(_turned(array, layout), wanted):
            wrong.append(f"{name} differs")
    verdict = Verdict.FAIL if wrong else Verdict.NOT_SUPPORTED if asked.reasons else Verdict.PASS
    return result(verdict, ratio, asked.reasons, "; ".join(wrong))


def _worst(got: Array, wanted: Array, rtol: float, atol: float) -> float:
    """The largest error over its tolerance; infinite for another shape or dtype, or a NaN."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    want = wanted.astype(np.float64)
    over = np.abs(got.astype(np.float64) - want) / (atol + rtol * np.abs(want))
    return float(np.max(np.nan_to_num(over, nan=np.inf), initial=0.0))


def opset() -> int:
    """The newest opset in which the installed ``onnx`` has the operator."""
    onnx = need("onnx", "onnx")
    return int(onnx.defs.get_schema("Attention").since_version)


def summary(results: list[Result], backend: str) -> dict[str, Any]:
    """Every result with its counts, as JSON values."""
    verdicts = Counter(str(item.verdict) for item in results)
    reasons = Counter(reason for item in results for reason in item.reasons)
    return {
        "onnx": need("onnx", "onnx").__version__,
        "opset": opset(),
        "portattn": portattn.__version__,
        "backend": backend,
        "cases": len(results),
        "verdicts": dict(sorted(verdicts.items())),
        "reasons": dict(sorted(reasons.items())),
        "results": [item.to_json() for item in results],
    }


@click.command("onnx")
@click.option("--backend", default="numpy", show_default=True, help="A backend for CPU arrays.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(backend: str, as_json: bool) -> None:
    """Run the cases of ONNX's Attention operator, as the installed onnx package makes them.

    Exit status 0: every case that the contract covers passes; 1: one fails; 2: onnx is not
    installed, or the backend answers no case.
    """
    from portattn.registry import find_backends

    if backend not in find_backends():
        raise click.UsageError(f"--backend {backend}: there is {', '.join(find_backends())}")
    try:
        results = [run(case, backend) for case in collect()]
    except TargetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    made = summary(results, backend)
    if as_json:
        click.echo(json.dumps(made, indent=1))
    else:
        _print(Console(), results, made)
    if made["verdicts"].get(Verdict.FAIL):
        sys.exit(1)
    sys.exit(0 if made["verdicts"].get(Verdict.PASS) else 2)


def _print(console: Console, results: list[Result], made: Mapping[str, Any]) -> None:
    """A line for each case, then the counts and what stands behind those that are not covered."""

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line(f"[bold]{'verdict':14}{'error/tol':>9}  {'dtype':9} case (what it was asked with)[/]")
    for item in results:
        ratio = "" if item.ratio is None else f"{item.ratio:.2f}"
        text = item.name.removeprefix("test_attention_")
        text += f" ({', '.join(item.options)})" if item.options else ""
        text += f": {item.message}" if item.message else ""
        line(f"{item.verdict:14}{ratio:>9}  {item.dtype:9} {escape(text)}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in made["verdicts"].items())
    line(
        f"onnx {made['onnx']}, Attention of opset {made['opset']}, backend {made['backend']}: "
        f"{made['cases']} cases: {counts}"
    )
    if made["reasons"]:
        line("not supported (a case may have more than one reason):")
    for reason, count in made["reasons"].items():
        line(f"  {count} {escape(reason)}")
    partly = [x for x in results if x.verdict is Verdict.NOT_SUPPORTED and x.ratio is not None]
    if partly:
        line(f"  {len(partly)} of these cases agree in their other outputs")
