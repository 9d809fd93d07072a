"""Several records beside one another: what each was granted, where verdicts and numbers differ.

The rule kept here: records are told apart by a letter and a shape, not by colour alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from portattn.conformance.record import device_of
from portattn.conformance.report import plots
from portattn.conformance.report.facts import CheckFacts, Facts, largest
from portattn.conformance.report.markup import Markup, element, join
from portattn.conformance.report.plots import Mark, number
from portattn.conformance.report.sections import kind_of, sign_of, words
from portattn.conformance.verdicts import FAILURES, Verdict

SHAPES = ("circle", "diamond", "square", "triangle")


def title(index: int, records: Sequence[Facts]) -> str:
    """A letter and the name."""
    return f"{letter(index)} {records[index].name}"


def letter(index: int) -> str:
    """A, B, ... Z, then A1, B1, ..."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index % 26] + (str(index // 26) if index >= 26 else "")


def section(records: Sequence[Facts]) -> Markup:
    """The part that stands before the records."""
    return element(
        "article",
        element("div", element("h1", "Comparison"), class_="heading"),
        element("section", element("h2", "Records"), _overview(records)),
        element("section", element("h2", "Largest error over bound"), _errors(records)),
        element("section", element("h2", "Verdicts"), _verdicts(records)),
        element("section", element("h2", "Machines and versions"), _machines(records)),
        id="comparison",
    )


def _table(head: Sequence[Any], rows: Sequence[Markup], label: str, kind: str = "") -> Markup:
    top = element("tr", *(element("th", x, scope="col") for x in head))
    table = element("table", element("thead", top), element("tbody", *rows), class_=kind or None)
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def _overview(records: Sequence[Facts]) -> Markup:
    rows = []
    for index, facts in enumerate(records):
        record, counts = facts.record, Counter(case.verdict for case in facts.cases)
        failures = sum(counts[verdict] for verdict in FAILURES)
        name = element("a", title(index, records), href=f"#record-{index}")
        cells = (
            record["level"] or "none", record["tier"], device_of(record), record["created"][:10],
            sum(counts.values()), failures, counts[Verdict.QUALITY_WARNING],
            counts[Verdict.NOT_SUPPORTED], "no" if facts.wrong else "yes",
        )  # fmt: skip
        rows.append(
            element("tr", element("th", name, scope="row"), *(element("td", x) for x in cells))
        )
    head = (
        "record", "level", "tier", "device", "date", "cases", "failed", "warnings",
        "not supported", "stands",
    )  # fmt: skip
    return _table(head, rows, "The records")


def _by_id(records: Sequence[Facts]) -> dict[str, list[CheckFacts | None]]:
    tables = [{check.id: check for check in facts.checks} for facts in records]
    ids = dict.fromkeys(check.id for facts in records for check in facts.checks)
    return {check_id: [table.get(check_id) for table in tables] for check_id in ids}


def _errors(records: Sequence[Facts]) -> Markup:
    rows = []
    for check_id, found in _by_id(records).items():
        marks = []
        for index, check in enumerate(found):
            worst = largest(case.error for case in check.cases) if check else None
            if worst is not None:
                told = f"{title(index, records)}: {number(worst)}"
                marks.append(Mark(worst, told, f"series-{index % 4}", SHAPES[index % len(SHAPES)]))
        if marks:
            heading = next(check.title for check in found if check)
            rows.append((check_id, heading, marks))
    if not rows:
        return element("p", "None of these records measured an error.")
    values = [mark.value for row in rows for mark in row[2]]
    keys = [
        element("span", title(index, records),
                class_=f"key shape {SHAPES[index % len(SHAPES)]} series-{index % 4}")
        for index in range(len(records))
    ]  # fmt: skip
    return join(
        (
            element("p", "A mark a record: the worst case of the check. At 1 lies the bound."),
            element("p", join(keys, " "), class_="keys"),
            plots.strips(
                rows, plots.scale_of(values, 1e-3, 10.0), {1.0: "fails"},
                "Largest error over bound by check and record",
            ),
        )
    )  # fmt: skip


def _verdicts(records: Sequence[Facts]) -> Markup:
    rows = []
    differing = 0
    for check_id, found in _by_id(records).items():
        verdicts = [check.verdict if check and check.cases else None for check in found]
        differs = len(set(verdicts)) > 1
        differing += differs
        heading = next(check.title for check in found if check)
        cells = [
            element(
                "td",
                element("span", sign_of(v), aria_hidden="true", class_="sign"),
                f" {words(v)} {number(check.ratio)}",
                class_=kind_of(v),
            )
            if check is not None and (v := verdict) is not None
            else element("td", "not asked", class_="quiet")
            for check, verdict in zip(found, verdicts, strict=True)
        ]
        rows.append(
            element(
                "tr",
                element("th", element("b", check_id), f" {heading}", scope="row"),
                *cells,
                element("td", "differs" if differs else ""),
                data_same=not differs,
            )
        )
    head = ("check", *(title(index, records) for index in range(len(records))), "")
    only = element(
        "label", element("input", type="checkbox", data_differing="verdicts"),
        f" only the {differing} checks whose verdicts differ", class_="tools", hidden=True,
    )  # fmt: skip
    return join(
        (only, element("div", _table(head, rows, "Verdicts by check and record"), id="verdicts"))
    )


def _machines(records: Sequence[Facts]) -> Markup:
    tables: list[dict[str, Any]] = [
        {**facts.record["fingerprint"], "suite": facts.record["suite"].get("hash")}
        for facts in records
    ]
    rows = []
    for key in sorted({key for table in tables for key in table}):
        values = [table.get(key) for table in tables]
        shown = [", ".join(map(str, v)) if isinstance(v, list) else v for v in values]
        differs = any(value != values[0] for value in values)
        rows.append(
            element(
                "tr",
                element("th", key, scope="row"),
                *(element("td", "–" if v is None else v) for v in shown),
                element("td", "differs" if differs else ""),
            )
        )
    head = ("", *(title(index, records) for index in range(len(records))), "")
    return _table(head, rows, "Fingerprints of the records")
