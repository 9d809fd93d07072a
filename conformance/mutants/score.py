"""How many seeded defects the suite catches, and whether it accuses the correct implementation.

The rule kept here: a mutant is caught where a check that its level rests on fails: nothing less (a
warning grants the level), nothing else (a crash of the harness, a case that took too long). The
checks that are expected to catch it are asked first, and the first that does ends the matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from portattn.conformance import identity, isolate, record, runner
from portattn.conformance.case import Case, Check
from portattn.conformance.isolate import Child, Loaded, Setup
from portattn.conformance.mutants.seeds import Mutant
from portattn.conformance.targets import TargetError
from portattn.conformance.verdicts import FAILURES, GRANTING, Verdict

SCHEMA = "portattn-mutants/1"
CATCHES = FAILURES - {Verdict.TIMEOUT}
"""A mutant that merely takes long has not been caught: the machine may be busy."""

TIMEOUT_S = 120.0
MUST = 4
"""The highest level that the correct implementation has to earn; it counts no traffic."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a scoring depends on. ``tier``: that of the correct implementation; mutants are asked
    cases of the cpu tier, those of the smoke tier first. ``thorough``: a mutant that the expected
    checks let pass is asked the rest of the catalogue as well."""

    tier: str = "cpu"
    seed: int = 0
    jobs: int = 2
    thorough: bool = False
    timeout_s: float = TIMEOUT_S
    catalogue: str = isolate.CATALOGUE


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one mutant: ``case`` caught it with ``verdict``; None where none did."""

    mutant: Mutant
    case: str | None
    verdict: Verdict | None
    message: str
    asked: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON values."""
        m = self.mutant
        return {
            "title": m.title,
            "family": m.family,
            "level": m.level,
            "expected": list(m.checks),
            "spec": m.spec,
            "case": self.case,
            "verdict": None if self.verdict is None else str(self.verdict),
            "message": self.message,
            "asked": self.asked,
            "seconds": round(self.seconds, 2),
        }


Report = Callable[[int, int, Finding], None]


# ---- mutants -------------------------------------------------------------------------------------
def findings(
    mutants: Iterable[Mutant], plan: Plan, report: Report = lambda done, total, finding: None
) -> list[Finding]:
    """Ask about every mutant, ``plan.jobs`` at a time; in the order of ``mutants``. Ctrl-C ends
    the children and passes on."""
    catalogue = runner.catalogue_of(plan.catalogue)
    todo = list(mutants)
    stop = threading.Event()
    found: dict[str, Finding] = {}
    with ThreadPoolExecutor(plan.jobs) as pool:
        waiting = {pool.submit(examine, m, catalogue, plan, stop.is_set) for m in todo}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    finding = future.result()
                    found[finding.mutant.id] = finding
                    report(len(found), len(todo), finding)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [found[m.id] for m in todo]


def examine(
    mutant: Mutant,
    catalogue: Mapping[str, Check],
    plan: Plan,
    cancelled: Callable[[], bool] = lambda: False,
) -> Finding:
    """Ask one mutant case after case until one catches it."""
    started = time.monotonic()
    asked, note = 0, ""

    def told(case: Case | None, verdict: Verdict | None, message: str) -> Finding:
        id = None if case is None else case.id
        return Finding(mutant, id, verdict, message, asked, time.monotonic() - started)

    with ExitStack() as stack:
        child: Child | None = None
        for check in _checks(mutant, catalogue, plan.thorough):
            own_pages = check.group == "R"
            if child is None or child.dead or child.setup.own_pages != own_pages:
                if child is not None:
                    child.close()
                try:
                    child, loaded = _loaded(mutant.spec, plan, cancelled, own_pages=own_pages)
                except TargetError as error:
                    return told(None, Verdict.HARNESS_ERROR, str(error))
                stack.callback(child.close)
            for case in check.cases(loaded.manifest, "cpu"):
                if child.dead:
                    break
                asked += 1
                outcome, _ = child.run(case.seeded(plan.seed), plan.timeout_s)
                if outcome.verdict in CATCHES:
                    return told(case, outcome.verdict, outcome.message)
                if outcome.verdict in (Verdict.HARNESS_ERROR, Verdict.TIMEOUT):
                    note = f"{case.id} ended as {outcome.verdict}: {outcome.message}"
    return told(None, None, note)


def _loaded(
    spec: str, plan: Plan, cancelled: Callable[[], bool], *, own_pages: bool
) -> tuple[Child, Loaded]:
    child = Child(Setup(spec, plan.catalogue, own_pages=own_pages), cancelled)
    return child, child.load()


def _checks(mutant: Mutant, catalogue: Mapping[str, Check], thorough: bool) -> Iterator[Check]:
    """Those expected to catch it, then, with ``thorough``, all others that its level rests on."""
    for name in mutant.checks:
        if _rests_on(mutant, catalogue[name]):
            yield catalogue[name]
    if mutant.checks and not thorough:
        return
    for check in catalogue.values():
        known = check.id in mutant.checks or "cpu" not in check.tiers
        if not known and _rests_on(mutant, check):
            yield check


def _rests_on(mutant: Mutant, check: Check) -> bool:
    if mutant.level is None:
        return True
    return check.level is not None and check.level <= mutant.level


# ---- the correct implementation ------------------------------------------------------------------
def judge_correct(
    spec: str, plan: Plan, report: runner.Report = lambda progress: None
) -> dict[str, Any]:
    """The record of the correct implementation, at the plan's tier. Raises `TargetError`."""
    options = runner.Options(
        spec, plan.tier, plan.seed, jobs=plan.jobs, timeout_s=plan.timeout_s,
        catalogue=plan.catalogue,
    )  # fmt: skip
    return runner.execute(runner.prepare(options), None, report)


def accusations(made: Mapping[str, Any]) -> list[str]:
    """What is held against the correct implementation: every case up to level `MUST` that does not
    let its level stand, and every failure of the rest."""
    found = []
    for check in made["checks"].values():
        must = check["level"] is not None and check["level"] <= MUST
        for case_id, case in check["cases"].items():
            verdict = Verdict(case["verdict"])
            refused = case["optional"] and verdict is Verdict.NOT_SUPPORTED
            if verdict in FAILURES or (must and verdict not in GRANTING and not refused):
                found.append(f"{case_id} {verdict}: {case['message']}".rstrip(": "))
    return found


# ---- the record ----------------------------------------------------------------------------------
def build(
    plan: Plan, found: Iterable[Finding], correct: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    """The canonical record of a scoring, digest included."""
    found = list(found)
    caught = sum(one.case is not None for one in found)
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "suite": dict(identity.suite()),
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(seconds, 1),
        "tier": plan.tier,
        "seed": plan.seed,
        "correct": None,
        "mutants": {one.mutant.id: one.to_json() for one in found},
        "caught": caught,
        "of": len(found),
        "survivors": [one.mutant.id for one in found if one.case is None],
    }
    if correct is not None:
        made["fingerprint"] = correct["fingerprint"]
        made["correct"] = {
            "spec": correct["target"]["spec"],
            "dtypes": correct["target"]["manifest"]["dtypes"],
            "level": correct["level"],
            "cases": sum(len(check["cases"]) for check in correct["checks"].values()),
            "accusations": accusations(correct),
            "results": correct["results"],
            "digest": correct["digest"],
        }
    made = record.canonical(made)
    return {**made, "digest": record.digest_of(made)}
