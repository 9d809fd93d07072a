"""Records held against the catalogue and against one another: verify, diff, merge.

The rule kept here: a record is believed as far as it can be computed again, and two records are
joined only where they are parts of one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from portattn.conformance.case import Check
from portattn.conformance.manifest import Manifest
from portattn.conformance.record import RecordError, conclude, digest_of, select, text_of


def verify(
    record: Mapping[str, Any], catalogue: Mapping[str, Check], suite: Mapping[str, str]
) -> list[str]:
    """Everything that is wrong with a record; empty where it stands.

    Digest, verdicts of cases and checks, levels and failures are computed again; the cases are
    held against those that the catalogue generates for this manifest, tier, seed and fractions.
    """
    try:
        again = conclude(record)
        wrong = _inconsistent(record, again)
        if record["suite"].get("hash") != suite["hash"]:
            wrong.append(
                f"made by suite {record['suite']}, not this one ({suite['hash']}): completeness "
                "cannot be judged"
            )
        else:
            wrong += _incomplete(record, catalogue)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"the record has not the shape of one: {type(error).__name__}: {error}"]
    return wrong


def _inconsistent(record: Mapping[str, Any], again: Mapping[str, Any]) -> list[str]:
    wrong = []
    stated = digest_of({key: value for key, value in record.items() if key != "digest"})
    if stated != record["digest"]:
        wrong.append(f"edited: the digest is {record['digest']}, the content's is {stated}")
    for check_id, check in record["checks"].items():
        for case_id, case in check["cases"].items():
            if not case_id.startswith(f"{check_id}/"):
                wrong.append(f"{case_id} stands under {check_id}")
            wanted = again["checks"][check_id]["cases"][case_id]["verdict"]
            if case["verdict"] != wanted:
                wrong.append(f"{case_id}: says {case['verdict']}, its numbers say {wanted}")
        wanted = again["checks"][check_id]["verdict"]
        if check["verdict"] != wanted:
            wrong.append(f"{check_id}: says {check['verdict']}, its cases say {wanted}")
    wrong += [
        f"{key}: says {record[key]}, the verdicts say {again[key]}"
        for key in ("levels", "level", "failed", "results")
        if record[key] != again[key]
    ]
    fractions = [tuple(pair) for pair in record["fractions"]]
    twice = sorted({pair for pair in fractions if fractions.count(pair) > 1})
    wrong += [f"merged twice: fraction {i}/{n} is named more than once" for i, n in twice]
    return wrong


def _incomplete(record: Mapping[str, Any], catalogue: Mapping[str, Check]) -> list[str]:
    manifest = Manifest.parse(record["target"]["manifest"])
    missing_checks = sorted(set(catalogue) - set(record["checks"]))
    wrong = [f"{check_id} of the catalogue is not in the record" for check_id in missing_checks]
    unknown_checks = sorted(set(record["checks"]) - set(catalogue))
    wrong += [f"{check_id} is not in the catalogue" for check_id in unknown_checks]
    for check_id, check in record["checks"].items():
        known = catalogue.get(check_id)
        if known is None:
            continue
        stated = (check["title"], check["level"], tuple(check["tiers"]))
        if stated != (known.title, known.level, known.tiers):
            wrong.append(f"{check_id}: title, level or tiers are not the catalogue's")
    wanted = {
        case.id: case
        for fraction in record["fractions"]
        for case in select(
            catalogue, manifest, record["tier"], record["seed"], (fraction[0], fraction[1]),
            record["selection"],
        )
    }  # fmt: skip
    present = {
        case_id: case
        for check in record["checks"].values()
        for case_id, case in check["cases"].items()
    }
    if record["complete"]:
        absent = sorted(set(wanted) - set(present))
        wrong += [f"{case_id} is missing although the record is complete" for case_id in absent]
    for case_id, entry in present.items():
        if case_id not in wanted:
            wrong.append(f"{case_id} does not belong to this tier, fraction or selection")
        elif entry["seed"] != wanted[case_id].seed:
            wrong.append(f"{case_id}: seed {entry['seed']}, wanted {wanted[case_id].seed}")
        elif entry["params"] != json.loads(text_of(dict(wanted[case_id].params))):
            wrong.append(f"{case_id}: its params are not those that the catalogue generates")
    return wrong


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[str]]:
    """What differs between two records: ``context`` (suite, target, fingerprint, tier, seed),
    ``level``, ``verdicts``, ``outputs`` (equal inputs, other bits), ``cases`` (only in one)."""
    found: dict[str, list[str]] = {
        "context": [], "level": [], "verdicts": [], "outputs": [], "cases": [],
    }  # fmt: skip
    for key in ("suite", "target", "fingerprint", "tier", "seed"):
        found["context"] += _differences(key, a[key], b[key])
    if a["level"] != b["level"]:
        found["level"].append(f"{a['level']} -> {b['level']}")
    cases = [
        {
            case_id: case
            for check in r["checks"].values()
            for case_id, case in check["cases"].items()
        }
        for r in (a, b)
    ]
    for case_id in sorted(set(cases[0]) | set(cases[1])):
        one, other = cases[0].get(case_id), cases[1].get(case_id)
        if one is None or other is None:
            found["cases"].append(f"{case_id} only in the {'second' if one is None else 'first'}")
            continue
        if one["verdict"] != other["verdict"]:
            text = f"{case_id}: {one['verdict']} -> {other['verdict']}"
            found["verdicts"].append(text + (f" ({other['message']})" if other["message"] else ""))
        had, has = one["digests"], other["digests"]
        if had.get("inputs") == has.get("inputs") and had.get("output") != has.get("output"):
            found["outputs"].append(f"{case_id}: same inputs, other output")
    return found


def _differences(where: str, a: Any, b: Any) -> list[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return [
            line
            for key in sorted(set(a) | set(b))
            for line in _differences(f"{where}.{key}", a.get(key), b.get(key))
        ]
    return [] if a == b else [f"{where}: {a} -> {b}"]


def merge(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of several fractions of the same run. Raises `RecordError` where they are not
    that, overlap, or were merged before."""
    parts = list(records)
    if len(parts) < 2:
        raise RecordError("merge wants two records or more")
    first = parts[0]
    merged: dict[str, Any] = json.loads(text_of(first))
    for part in parts[1:]:
        for key in ("suite", "target", "tier", "seed", "selection", "simulated", "waivers"):
            if part[key] != first[key]:
                lines = _differences(key, first[key], part[key])
                raise RecordError(f"the records do not belong together: {'; '.join(lines)}")
        differing = [
            line
            for line in _differences("fingerprint", first["fingerprint"], part["fingerprint"])
            if not line.startswith("fingerprint.cores:")
        ]
        if differing:
            raise RecordError(f"the records are of different machines: {'; '.join(differing)}")
        again = [f"{i}/{n}" for i, n in part["fractions"] if [i, n] in merged["fractions"]]
        if again:
            raise RecordError(f"merged twice: fraction {', '.join(again)} is in both")
        merged["fractions"] += part["fractions"]
        for check_id, check in part["checks"].items():
            cases = merged["checks"][check_id]["cases"]
            overlap = sorted(set(cases) & set(check["cases"]))
            if overlap:
                raise RecordError(f"merged twice: {overlap[0]} is in both")
            cases.update(check["cases"])
        merged["seconds"] += part["seconds"]
        merged["created"] = max(merged["created"], part["created"])
    merged["fractions"].sort()
    merged["complete"] = all(part["complete"] for part in parts)
    return conclude(merged)
