"""Levels: what a target as a whole has earned, computed from the verdicts of the checks.

The rule kept here: a level is granted where every must-pass check of it and of all levels below
has passed. Not supported and not run deny it as a failure does; the reasons are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from portattn.conformance.verdicts import GRANTING, Verdict, worst_of

LEVELS = {
    "L0": "core forward",
    "L1": "head dim 256",
    "L2": "memory",
    "L3": "backward",
    "L4": "serving",
    "L5": "traffic",
}
UNASKED = " (not reached or not selected)"
FULL_TIER = {"cpu": "cpu", "cuda": "gpu"}
"""The tier that a level rests on, by the target's device; a smaller one grants nothing, and a check
that only another tier has (say, 2**31 elements on a GPU) is not asked for."""


def check_verdict(cases: Iterable[Mapping[str, Any]]) -> Verdict:
    """The worst verdict of a check's cases; an optional case that was refused does not count."""
    cases = list(cases)
    asked = [Verdict(case["verdict"]) for case in cases if not excused(case)]
    return worst_of(asked) if asked or not cases else Verdict.NOT_SUPPORTED


def excused(case: Mapping[str, Any]) -> bool:
    """An optional case that was refused, in agreement with the manifest."""
    return bool(case["optional"] and case["verdict"] == Verdict.NOT_SUPPORTED)


def grant(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """For each level the reasons why it is not granted; an empty list grants it."""
    device = record["target"]["manifest"]["device"]
    full = FULL_TIER[device]
    general = []
    if record["tier"] != full:
        general.append(f"tier {record['tier']} grants no level; run --tier {full}")
    if not whole(record):
        general.append("not the whole tier was run")
    if record["simulated"]:
        general.append("a simulator stood in for the hardware")
    why: dict[str, list[str]] = {}
    below: list[str] = []
    for number, name in enumerate(LEVELS):
        own = [
            f"{check_id} {check['verdict']}{_reason(record, check)}"
            for check_id, check in record["checks"].items()
            if check["level"] == number
            and full in check["tiers"]
            and Verdict(check["verdict"]) not in GRANTING
            and not (check["cases"] and all(map(excused, check["cases"].values())))
        ]
        why[name] = general + below + own
        below = below + own
    return why


def granted(why: Mapping[str, list[str]]) -> str | None:
    """The highest level without a reason against it."""
    return next((name for name in reversed(LEVELS) if not why[name]), None)


def whole(record: Mapping[str, Any]) -> bool:
    """Does the record hold all of its tier: run to the end, every fraction, no selection?"""
    pairs = {(i, n) for i, n in record["fractions"]}
    covered = sum(1 / n for _, n in pairs)
    return bool(record["complete"] and record["selection"] is None and covered > 1 - 1e-9)


def _reason(record: Mapping[str, Any], check: Mapping[str, Any]) -> str:
    """Why a check has no case at all."""
    if check["cases"]:
        return ""
    if record["tier"] not in check["tiers"]:
        return f" (not in tier {record['tier']})"
    return " (no case for this manifest)" if whole(record) else UNASKED
