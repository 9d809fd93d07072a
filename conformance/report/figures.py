"""The drawn parts of one record's report: errors over bounds, bytes over lengths and over limits.

The rule kept here: a drawing has its limit in it, and its numbers stand beside it as text.
"""

from __future__ import annotations

from portattn.conformance.report import plots
from portattn.conformance.report.facts import CaseFacts, Facts, Series, is_error, largest
from portattn.conformance.report.facts import memory as memory_of
from portattn.conformance.report.markup import Markup, element, join
from portattn.conformance.report.plots import Mark, number
from portattn.conformance.report.sections import kind_of
from portattn.conformance.verdicts import FAILURES, GATES


# ---- errors ------------------------------------------------------------------------------------
def errors(index: int, facts: Facts) -> Markup:
    """Strip plots: error over bound, and beside it spread and bias."""
    rows = [
        (check.id, check.title, marks)
        for check in facts.checks
        if (marks := [_error_mark(case) for case in check.cases if case.error is not None])
    ]
    if not rows:
        return element("p", "No case of this record measured an error.")
    values = [mark.value for row in rows for mark in row[2]]
    worst = number(largest(values))
    parts = [
        element(
            "p",
            "A point a case: its largest error over the bound that theory allows it, output, LSE "
            "and gradients alike. The line at 1 is the bound.",
        ),
        plots.strips(
            rows, plots.scale_of(values, 1e-3, 10.0), {1.0: "fails"},
            f"Error over bound of {len(values)} cases by check; the largest is {worst}",
        ),
    ]  # fmt: skip
    parts.append(
        element(
            "div",
            _statistic(facts, "e2", "Spread (E2)", "rms of error over its expected spread: above "
                       "1.5 a warning, above 3 a failure; a narrower accumulator shows here"),
            _statistic(facts, "e3", "Bias (E3)", "mean signed error over its limit: truncation in "
                       "place of rounding shows here"),
            class_="columns",
        )
    )  # fmt: skip
    return join(parts)


def _error_mark(case: CaseFacts) -> Mark:
    assert case.error is not None
    kind = "fail" if not case.error <= 1 else "pass"
    if kind == "fail" and case.verdict not in FAILURES:
        kind = "warn"
    return Mark(case.error, f"{case.id}: {number(case.error)}", kind)


def _statistic(facts: Facts, name: str, title: str, meaning: str) -> Markup | None:
    gate = GATES[name]
    rows = []
    for check in facts.checks:
        marks = []
        for case in check.cases:
            value = case.numbers.get(name)
            if value is not None:
                verdict = gate.judge(value)
                told = "" if value <= 0.5 else f"{case.id}: {number(value)}"
                marks.append(Mark(value, told, kind_of(verdict)))
        if marks:
            rows.append((check.id, check.title, marks))
    if not rows:
        return None
    values = [mark.value for row in rows for mark in row[2]]
    limits = {gate.fail: "fails"} | ({gate.warn: "warns"} if gate.warn < gate.fail else {})
    worst = number(largest(values))
    plot = plots.strips(
        rows, plots.scale_of(values, 1e-2, 5.0), limits,
        f"{title} of {len(values)} cases by check; the largest is {worst}", "brief",
    )  # fmt: skip
    return element("div", element("h3", title), element("p", f"{meaning}."), plot)


# ---- memory ------------------------------------------------------------------------------------
def memory(index: int, facts: Facts) -> Markup:
    """Workspace over length with its guides, then every measured share of a limit."""
    series = memory_of(facts)
    shares = _shares(facts)
    if not series and shares is None:
        return element("p", "No case of this record measured memory or traffic.")
    plotted = None
    if series:
        told = (
            "Bytes needed beyond inputs and outputs, against N queries and N keys. Two guides: "
            "inputs and outputs, or the declared share of them, grow with N, a byte for every "
            "pair of query and key with N². A tiled kernel "
            "stays flat or runs beside the first; a table of scores runs beside the second."
        )
        plotted = element("div", *map(_over_length, series), class_="columns")
        plotted = join((element("p", told), plotted))
    return join((plotted, shares))


def _over_length(series: Series) -> Markup:
    lengths = [n for n, _ in series.points]
    measured = [value for _, value in series.points]
    curves: dict[str, list[float]] = {}
    if series.guide is not None and all(series.guide):
        curves["linear"] = list(series.guide)
    curves["quadratic"] = [float(n) ** 2 for n in lengths]
    curves["measured"] = measured
    told = ", ".join(f"{plots.size(y)} at {n:,}" for n, y in series.points)
    share = "" if series.kappa == 1 else f"{series.kappa:g} × "
    legend = [
        element("span", "workspace", class_="key measured"),
        element("span", f"{share}IO, ∝ N", class_="key linear") if "linear" in curves else None,
        element("span", "1 byte a pair, ∝ N²", class_="key quadratic"),
    ]
    return element(
        "figure",
        element("figcaption", element("b", series.case.check), f" {series.label}"),
        plots.over_length(lengths, curves, f"Workspace of {series.label}: {told}"),
        element("p", join(legend, " "), class_="keys"),
        element("p", told, class_="quiet"),
    )


def _shares(facts: Facts) -> Markup | None:
    rows = []
    for check in facts.checks:
        marks = [
            Mark(value, f"{case.id}: {name} {number(value)}", "pass" if value <= 1 else "fail")
            for case in check.cases
            for name, value in case.numbers.items()
            if name.endswith("_over") and not is_error(check.id, name)
        ]
        if marks:
            rows.append((check.id, check.title, marks))
    if not rows:
        return None
    values = [mark.value for row in rows for mark in row[2]]
    return join(
        (
            element("h3", "Measured over limit"),
            plots.strips(
                rows, plots.scale_of(values, 1e-3, 10.0), {1.0: "fails"},
                f"Memory and traffic over their limits, {len(values)} measurements by check",
            ),
        )
    )  # fmt: skip
