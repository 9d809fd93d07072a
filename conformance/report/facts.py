"""What the report shows of a record, read once: cases, the matrix, the worst, memory over length.

The rule kept here: numbers and verdicts come from the record alone. What a case exercises follows
from its params and, where the params do not say it (a mask is no scalar), from its check's id.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from portattn.conformance.case import GROUPS
from portattn.conformance.levels import check_verdict
from portattn.conformance.record import conclude, replay_command
from portattn.conformance.verdicts import FAILURES, SEVERITY, Verdict, gate_of

FEATURES = {
    "forward": "forward",
    "backward": "backward",
    "causal": "causal",
    "window": "window",
    "softcap": "softcap",
    "scale": "scale",
    "bias": "bias",
    "mask": "mask",
    "alibi_slopes": "ALiBi",
    "sinks": "sinks",
    "seqused_k": "seqused_k",
    "gqa": "GQA",
    "value_head_dim": "Dv ≠ D",
    "strides": "strides",
    "packed": "packed",
    "paged": "paged",
}
"""The columns of the matrix, by the manifest's names; "forward" is the call without any of them."""

CHECK_FEATURES: Mapping[str, tuple[str, ...]] = {
    **{f"K{n:02}": ("mask",) for n in (5, 6, 10, 12, 13)},
    **{f"K{n:02}": ("bias",) for n in (7, 8, 16)},
    **{f"E{n:02}": ("mask",) for n in (3, 10)},
    **{f"E{n:02}": ("strides",) for n in (6, 7, 8, 9, 12)},
    "H08": ("strides",),
    "H10": ("strides",),
    "M08": ("mask",),
    "K11": ("seqused_k",),
    "K14": ("sinks",),
    "K15": ("alibi_slopes",),
    "F15": ("scale",),
    "M02": ("scale",),
    "M12": ("packed",),
    "M13": ("paged",),
}
"""What a check exercises that its params do not tell."""

BACKWARD = frozenset(("H07", "E15", "R05"))  # beside group B
REFUSALS = frozenset(("H12", "P05"))
"""Checks that pass when the target refuses; they say nothing of what it can do."""

BESIDE = frozenset("CRT")
"""Groups that say nothing of a head dim, a dtype or a feature: refusals, memory, traffic."""

ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_WORKSPACE = re.compile(r"workspace_(\d+)")


@dataclass(frozen=True, slots=True)
class CaseFacts:
    """One case. ``error``: its largest error over bound (the gates of E1 and of comparisons);
    ``ratio``: the largest of all its numbers over their limits; None where it has no such."""

    id: str
    check: str
    title: str
    verdict: Verdict
    optional: bool
    error: float | None
    ratio: float | None
    numbers: Mapping[str, float]
    params: Mapping[str, Any]
    message: str
    worst: Mapping[str, Any]
    waived: Mapping[str, Any]
    seconds: float

    @property
    def name(self) -> str:
        """The id without the check's."""
        return self.id.partition("/")[2]

    @property
    def failing(self) -> bool:
        """Does it count against the target, or was it not asked because of the harness?"""
        return self.verdict in FAILURES or self.verdict is Verdict.HARNESS_ERROR


@dataclass(frozen=True, slots=True)
class CheckFacts:
    """One check with its cases."""

    id: str
    title: str
    level: int | None
    verdict: Verdict
    cases: tuple[CaseFacts, ...]

    @property
    def ratio(self) -> float | None:
        """The largest number over its limit."""
        return largest(case.ratio for case in self.cases)

    @property
    def seconds(self) -> float:
        """Of all cases together."""
        return sum(case.seconds for case in self.cases)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix: a verdict over ``cases`` cases and the worst of them."""

    verdict: Verdict
    error: float | None
    cases: int
    worst: str


@dataclass(frozen=True, slots=True)
class Series:
    """Workspace bytes over lengths, and beside them kappa · IO at each length; kappa 1 where the
    target declares none, no guide where the params do not give the shapes."""

    case: CaseFacts
    label: str
    points: tuple[tuple[int, float], ...]
    kappa: float
    guide: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Facts:
    """A record as the report sees it. ``wrong``: what `audit.verify` said of it."""

    record: Mapping[str, Any]
    name: str
    checks: tuple[CheckFacts, ...]
    wrong: tuple[str, ...]

    @property
    def cases(self) -> Iterator[CaseFacts]:
        """All of them, in the record's order."""
        return (case for check in self.checks for case in check.cases)

    def replay(self, case: CaseFacts) -> str:
        """The command line that runs a case again."""
        return replay_command(self.record, case.id)


def read(record: Mapping[str, Any], wrong: Iterable[str] = ()) -> Facts:
    """The facts of a record: what its cases amount to, computed again; what the record says of
    itself is in ``wrong`` where it differs. Raises KeyError, TypeError, ValueError or
    AttributeError where it is no record."""
    for key in ("suite", "fingerprint", "target"):
        if not isinstance(record[key], Mapping):
            raise TypeError(f"{key} is {type(record[key]).__name__}; wanted: an object")
    digest = str(record["digest"])
    record = {**conclude(record), "digest": digest}
    order = list(GROUPS)
    found = []
    ids = sorted(record["checks"], key=lambda i: (order.index(i[0]) if i[0] in order else 99, i))
    for check_id in ids:
        check = record["checks"][check_id]
        cases = tuple(
            _case(check_id, check["title"], case_id, case)
            for case_id, case in sorted(check["cases"].items())
        )
        verdict = Verdict(check["verdict"])
        found.append(CheckFacts(check_id, check["title"], check["level"], verdict, cases))
    manifest = record["target"]["manifest"]
    return Facts(record, f"{manifest['name']} {manifest['version']}", tuple(found), tuple(wrong))


def _case(check: str, title: str, case_id: str, case: Mapping[str, Any]) -> CaseFacts:
    numbers = {name: float(value) for name, value in case["numbers"].items()}
    errors = (value for name, value in numbers.items() if is_error(check, name))
    return CaseFacts(
        id=case_id,
        check=check,
        title=title,
        verdict=Verdict(case["verdict"]),
        optional=bool(case["optional"]),
        error=largest(errors),
        ratio=over_limit(numbers),
        numbers=numbers,
        params=dict(case["params"]),
        message=str(case["message"]),
        worst=dict(case["worst"] or {}),
        waived=dict(case.get("waived") or {}),
        seconds=float(case["seconds"]),
    )


def is_error(check: str, name: str) -> bool:
    """Is the number an error over its bound? Those of memory and traffic are bytes over a limit."""
    plain = name.rpartition(".")[2]
    return check[:1] not in ("R", "T") and (plain == "e1_prob" or plain.endswith("_over"))


def over_limit(numbers: Mapping[str, float]) -> float | None:
    """The largest number over its limit, a warning's where it has one; counts that must be 0 have
    none, and E1's wide bound is left out beside the narrow one."""
    found = []
    for name, value in numbers.items():
        gate = gate_of(name)
        limit = min(gate.warn, gate.fail) if gate else 0.0
        if limit > 0 and name.rpartition(".")[2] != "e1_det":
            found.append(value / limit)
    return largest(found)


def largest(values: Iterable[float | None]) -> float | None:
    """The largest; NaN is larger than any number; None where there is none."""
    known = [value for value in values if value is not None]
    return max(known, key=lambda x: (x != x, x)) if known else None


# ---- the matrix --------------------------------------------------------------------------------
def features(case: CaseFacts) -> frozenset[str]:
    """What a case exercises, as columns of the matrix. Gradients are a column of their own."""
    if case.check[:1] == "B" or case.check in BACKWARD:
        return frozenset(("backward",))
    p = case.params
    found = {name for name in ("causal", "window", "softcap") if p.get(name) not in (None, False)}
    found |= {"scale"} if p.get("scale") is not None else set()
    found |= {"gqa"} if p.get("h") != p.get("hk") else set()
    found |= {"value_head_dim"} if p.get("d") != p.get("dv") else set()
    found |= set(CHECK_FEATURES.get(case.check, ()))
    return frozenset(found or ("forward",))


def matrix(facts: Facts) -> dict[tuple[str, int], dict[str, Cell]]:
    """By dtype and head dim, then by feature; only cells that a case looked at."""
    gathered: dict[tuple[str, int], dict[str, list[CaseFacts]]] = {}
    for case in facts.cases:
        dtype, dim = case.params.get("dtype"), case.params.get("d")
        if case.check[:1] in BESIDE or case.check in REFUSALS:
            continue
        if dtype not in ITEM or not isinstance(dim, int):
            continue
        row = gathered.setdefault((dtype, dim), {})
        for feature in features(case):
            row.setdefault(feature, []).append(case)
    dtypes = list(ITEM)
    return {
        key: {feature: _cell(row[feature]) for feature in FEATURES if feature in row}
        for key, row in sorted(gathered.items(), key=lambda kv: (dtypes.index(kv[0][0]), kv[0][1]))
    }


def _cell(cases: list[CaseFacts]) -> Cell:
    verdict = check_verdict({"verdict": c.verdict, "optional": c.optional} for c in cases)
    if all(c.verdict is Verdict.NOT_SUPPORTED for c in cases):
        verdict = Verdict.NOT_SUPPORTED
    return Cell(verdict, largest(c.error for c in cases), len(cases), ranked(cases)[0].id)


def ranked(cases: Iterable[CaseFacts]) -> list[CaseFacts]:
    """From worst to best: by verdict, then by the number nearest to its limit."""

    def badness(case: CaseFacts) -> tuple[int, float, str]:
        ratio = -1.0 if case.ratio is None else case.ratio
        return -SEVERITY.index(case.verdict), -math.inf if ratio != ratio else -ratio, case.id

    return sorted(cases, key=badness)


# ---- memory ------------------------------------------------------------------------------------
def memory(facts: Facts) -> list[Series]:
    """Every case that measured its workspace at more than one length."""
    manifest = facts.record["target"]["manifest"]
    found = []
    for case in facts.cases:
        points = sorted(
            (int(match[1]), value)
            for name, value in case.numbers.items()
            if (match := _WORKSPACE.fullmatch(name)) and math.isfinite(value)
        )
        if len(points) < 2:
            continue
        backward = "backward" in features(case)
        declared = manifest["kappa_backward" if backward else "kappa"]
        kappa = 1.0 if declared is None else float(declared)
        guide = None
        if {"b", "h", "hk", "d", "dv", "dtype"} <= set(case.params):
            guide = tuple(kappa * io_bytes(case.params, n, backward) for n, _ in points)
        label = f"{'backward' if backward else 'forward'}, {case.params.get('dtype', '')}"
        label += f", head dim {case.params.get('d', '?')}"
        label += ", causal" if case.params.get("causal") else ""
        found.append(Series(case, label, tuple(points), kappa, guide))
    return found


def io_bytes(params: Mapping[str, Any], n: int, backward: bool) -> float:
    """q, k, v, out and LSE at length n, in bytes; for backward dout, dq, dk and dv as well."""
    size = ITEM[params["dtype"]]
    q, out = params["h"] * params["d"], params["h"] * params["dv"]
    kv = params["hk"] * (params["d"] + params["dv"])
    lse = params["h"] * (8 if size == 8 else 4)
    rows = (q + out + kv) * size + lse + (backward and (q + out + kv) * size)
    return float(params["b"] * n * rows)
