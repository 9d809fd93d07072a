"""The record of a run: canonical JSON with a digest, built, written and read.

The rule kept here: everything that a record concludes can be computed again from what it holds.
Cases carry numbers and causes; their verdicts, the checks', the levels and the list of failures
follow, and `audit.verify` follows them again.

Canonical: keys sorted, floats of nine significant digits, NaN and infinities as texts. ``digest``
is the sha256 of the canonical text without that key. ``results`` is the sha256 of what does not
vary between two runs of one target: ids, seeds, verdicts, digests of inputs and outputs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from portattn.conformance import levels
from portattn.conformance.case import Case, Check, Outcome
from portattn.conformance.manifest import Manifest
from portattn.conformance.verdicts import FAILURES, Verdict
from portattn.conformance.waivers import Waiver, matching

SCHEMA = "portattn-conformance/1"
_KEYS = (
    "schema", "suite", "target", "fingerprint", "created", "seconds", "tier", "seed", "fractions",
    "selection", "complete", "simulated", "waivers", "checks", "levels", "level", "failed",
    "results", "digest",
)  # fmt: skip


class RecordError(ValueError):
    """The record cannot be used for what was asked; the message says what is wrong."""


# ---- canonical text ------------------------------------------------------------------------------
def canonical(value: Any) -> Any:
    """``value`` with floats of nine significant digits, and texts for NaN and the infinities."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.9g}") + 0.0  # + 0.0: no negative zero
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    return value


def text_of(value: Any) -> str:
    """The canonical text: one line, keys sorted."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: Any) -> str:
    """sha256 of the canonical text."""
    return hashlib.sha256(text_of(value).encode()).hexdigest()


# ---- building ------------------------------------------------------------------------------------
def case_entry(case: Case, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """What the record holds of one case."""
    numbers = {name: canonical(value) for name, value in outcome.numbers.items()}
    # The verdict is that of the numbers as they are written.
    written = Outcome.from_json({**outcome.to_json(), "numbers": numbers})
    return {
        **canonical(written.to_json()),
        "params": canonical(dict(case.params)),
        "seed": case.seed,
        "optional": case.optional,
        "seconds": round(seconds, 3),
    }


def build(
    *,
    suite: Mapping[str, str],
    spec: str,
    manifest: Manifest,
    simulated: bool,
    source: str,
    states: Iterable[str],
    fingerprint: Mapping[str, Any],
    tier: str,
    seed: int,
    fraction: tuple[int, int],
    selection: Iterable[str] | None,
    catalogue: Mapping[str, Check],
    entries: Mapping[str, Mapping[str, Any]],
    complete: bool,
    seconds: float,
    waivers: Iterable[Waiver] = (),
) -> dict[str, Any]:
    """The record of a run. ``entries``: `case_entry` by case id; checks without any are NOT_RUN."""
    by_check: dict[str, dict[str, Any]] = {check_id: {} for check_id in catalogue}
    for case_id, entry in entries.items():
        by_check[case_id.partition("/")[0]][case_id] = dict(entry)
    chosen = None if selection is None else sorted(selection)
    checks: dict[str, Any] = {}
    for check_id, check in catalogue.items():
        checks[check_id] = {
            "title": check.title,
            "level": check.level,
            "tiers": list(check.tiers),
            "cases": by_check[check_id],
        }
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "suite": dict(suite),
        "target": {
            "spec": spec,
            "manifest": manifest.to_json(),
            "source": source,
            "states": list(states),
        },
        "fingerprint": dict(fingerprint),
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(seconds, 1),
        "tier": tier,
        "seed": seed,
        "fractions": [list(fraction)],
        "selection": chosen,
        "complete": complete,
        "simulated": simulated,
        "waivers": [waiver.to_json() for waiver in waivers],
        "checks": checks,
    }
    return conclude(record)


def conclude(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with everything that follows from its cases computed anew: verdicts of cases and
    checks, levels, failures, digests."""
    concluded: dict[str, Any] = json.loads(text_of(record))
    waivers = [Waiver.from_json(entry) for entry in concluded["waivers"]]
    device, today = device_of(concluded), date.fromisoformat(concluded["created"][:10])
    for check in concluded["checks"].values():
        for case_id, case in check["cases"].items():
            case["verdict"] = str(Outcome.from_json(case).verdict)
            if concluded["simulated"] and case["verdict"] in ("PASS", "QUALITY_WARNING"):
                case["verdict"] = "SIMULATED"
            case.pop("waived", None)
            waiver = matching(waivers, case_id, device)
            if waiver and Verdict(case["verdict"]) in FAILURES and waiver.expires >= today:
                case["waived"] = {**waiver.to_json(), "verdict": case["verdict"]}
                case["verdict"] = "WAIVED"
        check["verdict"] = str(levels.check_verdict(check["cases"].values()))
    concluded["levels"] = levels.grant(concluded)
    concluded["level"] = levels.granted(concluded["levels"])
    concluded["failed"] = [
        check_id
        for check_id, check in sorted(concluded["checks"].items())
        if any(Verdict(case["verdict"]) in FAILURES for case in check["cases"].values())
    ]
    concluded["results"] = digest_of(
        {
            case_id: [case["seed"], case["verdict"], case["digests"]]
            for check in concluded["checks"].values()
            for case_id, case in check["cases"].items()
        }
    )
    concluded.pop("digest", None)
    concluded["digest"] = digest_of(concluded)
    return concluded


def device_of(record: Mapping[str, Any]) -> str:
    """The names of what the target ran on, for waivers and tables."""
    gpus = record["fingerprint"].get("gpus")
    if record["target"]["manifest"]["device"] == "cuda" and gpus:
        return ", ".join(map(str, gpus))
    return str(record["fingerprint"].get("cpu") or "cpu")


def expired(record: Mapping[str, Any]) -> list[Waiver]:
    """The waivers that cover a case of this record and whose day is past."""
    day, device = date.fromisoformat(record["created"][:10]), device_of(record)
    ids = [case_id for check in record["checks"].values() for case_id in check["cases"]]
    return [
        waiver
        for waiver in map(Waiver.from_json, record["waivers"])
        if waiver.expires < day and any(waiver.covers(case_id, device) for case_id in ids)
    ]


def replay_command(record: Mapping[str, Any], case_id: str) -> str:
    """The command line that runs one case of the record again."""
    dtypes = record["target"]["manifest"]["dtypes"] if only_dtypes(record) else ()
    return shlex.join(
        [
            "portattn", "conformance", "replay", case_id, "--target", record["target"]["spec"],
            "--tier", record["tier"], "--seed", str(record["seed"]),
            *(f"--dtype={name}" for name in dtypes),
        ]
    )  # fmt: skip


def only_dtypes(record: Mapping[str, Any]) -> str:
    """The dtypes that a restricted run asked for, as a text; empty where it asked for all."""
    manifest = record["target"]["manifest"]
    return " and ".join(manifest["dtypes"]) if manifest.get("unasked_dtypes") else ""


# ---- files ---------------------------------------------------------------------------------------
def write(record: Mapping[str, Any], path: Path) -> None:
    """Write the record whole or not at all, for people as well: indented, keys sorted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """The record in a file. Raises `RecordError` where it is not one."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from error
    try:
        record = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        end = "truncated" if error.pos >= len(text.rstrip()) else f"broken at byte {error.pos}"
        raise RecordError(f"{path}: not a complete JSON document ({end}: {error.msg})") from error
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise RecordError(f"{path}: not a conformance record (schema {SCHEMA!r} is missing)")
    missing = [key for key in _KEYS if key not in record]
    if missing:
        raise RecordError(f"{path}: the record lacks {', '.join(missing)}")
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object (merged twice?)")
    return table


def _no_constant(name: str) -> Any:
    raise ValueError(f"the number {name} is not JSON; a record spells it as a text")


def select(
    catalogue: Mapping[str, Check],
    manifest: Manifest,
    tier: str,
    seed: int,
    fraction: tuple[int, int] = (1, 1),
    selection: Iterable[str] | None = None,
) -> list[Case]:
    """The seeded cases of a run, in the catalogue's order. ``selection``: ids of checks or cases;
    ``fraction`` (i, n): every n-th case from the i-th on."""
    chosen = None if selection is None else set(selection)
    cases = [
        case.seeded(seed)
        for check in catalogue.values()
        if tier in check.tiers
        for case in check.cases(manifest, tier)
        if chosen is None or check.id in chosen or case.id in chosen
    ]
    ids = [case.id for case in cases]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ValueError(f"the catalogue generates the case {twice} twice")
    i, n = fraction
    return cases[i - 1 :: n]
