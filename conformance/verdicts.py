"""Gates and levels: from numbers to verdicts, from verdicts to a level.

The rule kept here: pure functions of what stands in the record. The run and ``verify`` call the
same ones, so a record whose verdict does not follow from its numbers is found out.

Gates by the name of a number (anything else informs):

=====================  ====================================================================
``e1_prob``            worst error over the PROB bound; above 1: QUALITY_WARNING
``e1_det``             worst error over the DET bound; above 1: FAIL
``e2``                 rms of error over its model; above 1.5: QUALITY_WARNING, above 3: FAIL
``e3``                 bias over its own limit max(0.15, 6 sd/sqrt(n)); above 1: FAIL
``e4``                 error over that of a naive same-dtype run; above 2 with e1_prob > 1: FAIL
``*_over``             a measured value over its limit; above 1: FAIL
``*_warn``             likewise; above 1: QUALITY_WARNING
``*_bad``              a count of things that must not be; above 0: FAIL
``nondeterministic``   a count of differing runs or elements; above 0: NONDETERMINISTIC
=====================  ====================================================================

A prefix before e1_prob … e4 and a dot is allowed (``dq.e1_det``, ``lse.e1_prob``) and gates alike.
A gated number that is NaN fails. E1 to E4 are derived in ``bounds``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What is said of a case or of a check."""

    PASS = "PASS"
    QUALITY_WARNING = "QUALITY_WARNING"
    FAIL = "FAIL"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    NOT_RUN = "NOT_RUN"
    WAIVED = "WAIVED"
    OOM = "OOM"
    CRASH = "CRASH"
    TIMEOUT = "TIMEOUT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    HARNESS_ERROR = "HARNESS_ERROR"
    SIMULATED = "SIMULATED"


SEVERITY = (
    Verdict.PASS,
    Verdict.QUALITY_WARNING,
    Verdict.SIMULATED,
    Verdict.WAIVED,
    Verdict.NOT_SUPPORTED,
    Verdict.NOT_RUN,
    Verdict.NONDETERMINISTIC,
    Verdict.FAIL,
    Verdict.OOM,
    Verdict.TIMEOUT,
    Verdict.CRASH,
    Verdict.HARNESS_ERROR,
)
"""From best to worst; a check's verdict is the worst of its cases'."""

FAILURES = frozenset(
    (Verdict.FAIL, Verdict.OOM, Verdict.CRASH, Verdict.TIMEOUT, Verdict.NONDETERMINISTIC)
)
"""Verdicts that count against the target (exit status 1, unless waived)."""

GRANTING = frozenset((Verdict.PASS, Verdict.QUALITY_WARNING, Verdict.WAIVED))
"""Verdicts of a must-pass check that leave its level standing."""

CAUSES: Mapping[str, Verdict] = {
    "": Verdict.PASS,
    "failed": Verdict.FAIL,
    "claimed_but_refused": Verdict.FAIL,
    "raised": Verdict.FAIL,
    "wrong_type": Verdict.FAIL,
    "wrong_shape": Verdict.FAIL,
    "wrong_dtype": Verdict.FAIL,
    "wrong_device": Verdict.FAIL,
    "missing_lse": Verdict.FAIL,
    "out_ignored": Verdict.FAIL,
    "wrote_inputs": Verdict.FAIL,
    "stale_output": Verdict.FAIL,
    "forked": Verdict.FAIL,
    "narrow_claim": Verdict.QUALITY_WARNING,
    "rejected": Verdict.NOT_SUPPORTED,
    "not_run": Verdict.NOT_RUN,
    "oom": Verdict.OOM,
    "crash": Verdict.CRASH,
    "exited": Verdict.CRASH,
    "device_lost": Verdict.CRASH,
    "timeout": Verdict.TIMEOUT,
    "harness_error": Verdict.HARNESS_ERROR,
}
"""What decides where no number does, and what it amounts to."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Above ``warn``: QUALITY_WARNING; above ``fail``: the verdict ``worse``."""

    warn: float = math.inf
    fail: float = math.inf
    worse: Verdict = Verdict.FAIL

    def judge(self, value: float) -> Verdict:
        """The verdict of one number."""
        if math.isnan(value):
            return self.worse if self.fail < math.inf else Verdict.QUALITY_WARNING
        if value > self.fail:
            return self.worse
        return Verdict.QUALITY_WARNING if value > self.warn else Verdict.PASS


GATES: Mapping[str, Gate] = {
    "e1_prob": Gate(warn=1.0),
    "e1_det": Gate(fail=1.0),
    "e2": Gate(warn=1.5, fail=3.0),
    "e3": Gate(fail=1.0),
    "nondeterministic": Gate(fail=0.0, worse=Verdict.NONDETERMINISTIC),
}
SUFFIX_GATES: Mapping[str, Gate] = {
    "_over": Gate(fail=1.0),
    "_warn": Gate(warn=1.0),
    "_bad": Gate(fail=0.0),
}


def gate_of(name: str) -> Gate | None:
    """The gate of a number, by its name; None where it only informs."""
    plain = name.rpartition(".")[2]
    if plain in GATES:
        return GATES[plain]
    return next((gate for end, gate in SUFFIX_GATES.items() if plain.endswith(end)), None)


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst verdict; NOT_RUN where there is none at all."""
    ranked = sorted(verdicts, key=SEVERITY.index)
    return ranked[-1] if ranked else Verdict.NOT_RUN


def verdict_of(numbers: Mapping[str, float], cause: str = "") -> Verdict:
    """The verdict that ``numbers`` and ``cause`` amount to. Raises on an unknown cause."""
    if cause not in CAUSES:
        raise ValueError(f"cause={cause!r}; wanted: one of {', '.join(filter(None, CAUSES))}")
    found = [CAUSES[cause]]
    for name, value in numbers.items():
        gate = gate_of(name)
        if gate is not None:
            found.append(gate.judge(value))
        prefix, _, plain = name.rpartition(".")
        if plain == "e4" and value > 2:
            bound = numbers.get(f"{prefix}.e1_prob" if prefix else "e1_prob", 0.0)
            if not bound <= 1:
                found.append(Verdict.FAIL)
    return worst_of(found)
