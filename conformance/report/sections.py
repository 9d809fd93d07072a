"""The parts of one record's report, from its level down to every case.

The rule kept here: what matters is said first and in words; a colour never says anything alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from portattn.conformance.case import GROUPS
from portattn.conformance.levels import LEVELS
from portattn.conformance.record import only_dtypes, replay_command, text_of
from portattn.conformance.report import plots
from portattn.conformance.report.facts import (
    FEATURES,
    CaseFacts,
    Cell,
    CheckFacts,
    Facts,
    ranked,
)
from portattn.conformance.report.facts import matrix as matrix_of
from portattn.conformance.report.markup import Markup, element, join
from portattn.conformance.report.plots import number
from portattn.conformance.verdicts import SEVERITY, Verdict, gate_of

KINDS = {
    Verdict.PASS: ("pass", "✓"),
    Verdict.QUALITY_WARNING: ("warn", "!"),
    Verdict.SIMULATED: ("sim", "≈"),
    Verdict.WAIVED: ("waived", "w"),
    Verdict.NOT_SUPPORTED: ("none", "–"),
    Verdict.NOT_RUN: ("none", "○"),
}
"""Class and sign of each verdict; those not named here are failures."""

_PLACE = ("index", "tile", "got", "want", "bound")
_NEAREST = 8  # cases that hold, shown because they are nearest to a limit
_FAILING = 40  # failing cases told in full


def kind_of(verdict: Verdict) -> str:
    """The class that colours a verdict."""
    return KINDS.get(verdict, ("fail", "✗"))[0]


def sign_of(verdict: Verdict) -> str:
    """The sign that stands for a verdict where space is short."""
    return KINDS.get(verdict, ("fail", "✗"))[1]


def words(verdict: Verdict) -> str:
    """The verdict as words."""
    return str(verdict).replace("_", " ").lower()


def badge(verdict: Verdict) -> Markup:
    """The verdict with its sign and colour."""
    return element(
        "span",
        element("span", sign_of(verdict), aria_hidden="true"),
        f" {words(verdict)}",
        class_=f"badge {kind_of(verdict)}",
    )


def listed(names: Iterable[str], limit: int) -> str:
    """The first few of ``names``, and how many more there are."""
    all_of_them = list(names)
    more = len(all_of_them) - limit
    return "; ".join(all_of_them[:limit]) + (f"; and {more} more" if more > 0 else "")


# ---- level -------------------------------------------------------------------------------------
def summary(index: int, facts: Facts) -> Markup:
    """The level, why not the next, what the verdicts are, and whether the record stands."""
    record = facts.record
    level = record["level"]
    following = next((name for name in LEVELS if record["levels"][name]), None)
    granted = f"{level} – {LEVELS[level]}" if level else "no level"
    if only := only_dtypes(record):
        granted += f", for {only} only"
    why = None
    if following is not None:
        why = element(
            "p",
            element("strong", f"{following} ({LEVELS[following]}) is not granted: "),
            listed(record["levels"][following], 6),
            class_="why",
        )
    counts = Counter(case.verdict for case in facts.cases)
    present = [verdict for verdict in SEVERITY if counts[verdict]]
    total = sum(counts.values())
    told = ", ".join(f"{counts[verdict]} {words(verdict)}" for verdict in present)
    return join(
        (
            _integrity(facts),
            element(
                "div",
                element("div", level or "–", class_="seal " + ("granted" if level else "denied")),
                element(
                    "div",
                    element("p", "Level granted: ", element("strong", granted), class_="lead"),
                    why,
                ),
                class_="verdict",
            ),
            element("ol", *_ladder(record["levels"]), class_="ladder"),
            plots.bar([(kind_of(v), counts[v]) for v in present], f"{total} cases: {told}"),
            element(
                "ul",
                *(
                    element("li", badge(verdict), f" {counts[verdict]}")
                    for verdict in present
                ),
                element("li", f"{total} cases in {record['seconds']:.0f} s"),
                class_="counts",
            ),
        )
    )  # fmt: skip


def _integrity(facts: Facts) -> Markup | None:
    if not facts.wrong:
        return None
    return element(
        "div",
        element("strong", "Verification says:"),
        element("ul", *(element("li", line) for line in facts.wrong[:8])),
        f"and {len(facts.wrong) - 8} more" if len(facts.wrong) > 8 else None,
        class_="note",
        role="note",
    )


def _ladder(levels: Mapping[str, Sequence[str]]) -> list[Markup]:
    steps, below = [], set[str]()
    first = next((name for name in LEVELS if levels[name]), None)
    for name, meaning in LEVELS.items():
        reasons = levels[name]
        own = [reason for reason in reasons if reason not in below]
        below |= set(reasons)
        said = "granted" if not reasons else listed(own, 3) if own else f"not before {first}"
        steps.append(
            element(
                "li",
                element("b", f"{'✗' if reasons else '✓'} {name}"),
                f" {meaning}",
                element("small", said),
                class_="missing" if own else "waiting" if reasons else "granted",
            )
        )
    return steps


def fingerprint(index: int, facts: Facts) -> Markup:
    """Machine and versions, and what the target claims of itself."""
    record = facts.record
    parts: dict[str, Any] = dict(record["fingerprint"])
    parts["suite"] = " ".join(map(str, record["suite"].values()))
    manifest = {k: v for k, v in record["target"]["manifest"].items() if v is not None}
    return element(
        "div",
        element("div", element("h3", "Fingerprint"), _pairs(parts)),
        element("div", element("h3", "What the target claims"), _pairs(manifest)),
        class_="columns",
    )


def _pairs(parts: Mapping[str, Any]) -> Markup:
    rows = []
    for key, value in sorted(parts.items()):
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        rows.append(
            element("div", element("dt", key), element("dd", "none" if shown is None else shown))
        )
    return element("dl", *rows)


# ---- worst cases -------------------------------------------------------------------------------
def worst(index: int, facts: Facts) -> Markup:
    """Every failing case, then those nearest to a limit, each with its replay command."""
    order = ranked(facts.cases)
    failing = [case for case in order if case.failing or case.verdict is Verdict.WAIVED]
    rest: dict[str, CaseFacts] = {}  # a case a check
    for case in order:
        if case not in failing and case.ratio:
            rest.setdefault(case.check, case)
    parts = []
    if failing:
        parts += [_case_card(facts, case) for case in failing[:_FAILING]]
        if len(failing) > _FAILING:
            left = len(failing) - _FAILING
            parts.append(element("p", f"{left} more failing cases are among the checks below."))
    else:
        parts.append(element("p", "No case failed."))
    if rest:
        parts.append(element("h3", "Nearest to a limit"))
        parts += [_case_card(facts, case) for case in list(rest.values())[:_NEAREST]]
    return join(parts)


def _case_card(facts: Facts, case: CaseFacts) -> Markup:
    place = None
    if case.worst:
        known = {key: text_of(case.worst[key]) for key in _PLACE if case.worst.get(key) is not None}
        shown = [f"{key} {value}".replace('"', "") for key, value in known.items()]  # "nan"
        place = element("p", f"worst element: {', '.join(shown)}")
    waived = None
    if case.waived:
        told = ", ".join(f"{key} {value}" for key, value in case.waived.items() if value)
        waived = element("p", f"waived: {told}")
    return element(
        "div",
        element(
            "h4", badge(case.verdict), " ", element("code", case.id),
            element("span", f" {case.title}", class_="quiet"),
        ),
        element("p", case.message) if case.message else None,
        element("p", _numbers(case), class_="quiet"),
        place,
        waived,
        element(
            "div",
            _command(facts.replay(case)),
            element("button", "Copy", type="button", data_copy=True, hidden=True),
            class_="command",
        ),
        class_=f"case {kind_of(case.verdict)}",
    )  # fmt: skip


def _command(line: str) -> Markup:
    """A command line that breaks between its words only."""
    return element("code", join((element("span", word) for word in line.split(" ")), " "))


def _numbers(case: CaseFacts) -> str:
    shown = []
    for name, value in sorted(case.numbers.items()):
        gate = gate_of(name)
        if gate is None or (name.endswith("e1_det") and not case.numbers[_prob(name)] > 1):
            continue
        if value == 0 and gate.fail == 0:
            continue
        limit = min(gate.warn, gate.fail)
        shown.append(f"{name} {number(value)}" + (f" of {limit:g}" if limit not in (0, 1) else ""))
    return " · ".join(shown)


def _prob(name: str) -> str:
    return name.removesuffix("e1_det") + "e1_prob"


# ---- matrix ------------------------------------------------------------------------------------
def matrix(index: int, facts: Facts) -> Markup:
    """Head dim by dtype by feature."""
    rows = matrix_of(facts)
    if not rows:
        return element("p", "No case of this record has a head dim.")
    columns = [f for f in FEATURES if any(f in row for row in rows.values())]
    head = element(
        "thead",
        element(
            "tr",
            element("th", "head dim", scope="col"),
            *(element("th", FEATURES[f], scope="col") for f in columns),
        ),
    )
    bodies = []
    for dtype in dict.fromkeys(dtype for dtype, _ in rows):
        title = element("th", dtype, scope="rowgroup", colspan=len(columns) + 1)
        lines = [element("tr", title, class_="dtype")]
        for (its_dtype, dim), row in rows.items():
            if its_dtype == dtype:
                cells = [_cell(row.get(feature)) for feature in columns]
                lines.append(element("tr", element("th", dim, scope="row"), *cells))
        bodies.append(element("tbody", *lines))
    return join(
        (
            element(
                "p",
                "Each cell is the worst verdict of all cases with that dtype, head dim and "
                "feature, and the largest error over its bound among them: above 1 the bound is "
                "broken. A cell without a number holds exact or bitwise checks alone; an empty "
                "one no case looked at.",
            ),
            _legend(cell.verdict for row in rows.values() for cell in row.values()),
            element(
                "div",
                element("table", head, *bodies, class_="matrix"),
                class_="scroll",
                tabindex=0,
                role="region",
                aria_label="Verdicts by head dim, dtype and feature",
            ),
        )
    )


def _legend(verdicts: Iterable[Verdict]) -> Markup:
    present = sorted(set(verdicts), key=SEVERITY.index)
    return element("p", join((badge(verdict) for verdict in present), " "), class_="legend")


def _cell(cell: Cell | None) -> Markup:
    if cell is None:
        return element("td")
    told = f"{words(cell.verdict)}; {cell.cases} cases, the worst {cell.worst}"
    return element(
        "td",
        element("span", sign_of(cell.verdict), class_=cell.error is not None and "sign"),
        number(cell.error, 2),
        class_=kind_of(cell.verdict),
        title=told,
    )


# ---- checks ------------------------------------------------------------------------------------
def checks(index: int, facts: Facts) -> Markup:
    """Every check and, opened, every case; with a filter where scripts run."""
    record = facts.record
    present = sorted({check.verdict for check in facts.checks}, key=SEVERITY.index)
    groups = [g for g in GROUPS if any(check.id[:1] == g for check in facts.checks)]
    tools = element(
        "form",
        element(
            "label", "Find ",
            element("input", type="search", name="find", placeholder="H04, float16, d256 …"),
        ),
        element("label", "Verdict ", _choice("verdict", [(str(v), words(v)) for v in present])),
        element("label", "Group ", _choice("group", [(g, f"{g} {GROUPS[g]}") for g in groups])),
        element("output", role="status"),
        class_="tools", data_filter=f"list-{index}", hidden=True,
    )  # fmt: skip
    pattern = replay_command(record, "CASE_ID")
    head = element(
        "div",
        *(
            element("span", x)
            for x in ("check", "title", "level", "verdict", "worst", "cases", "s")
        ),
        class_="row head",
        aria_hidden="true",
    )
    return join(
        (
            element("p", "Run any case again with ", _command(pattern), "."),
            tools,
            element(
                "div", head, *(_check(check) for check in facts.checks), class_="checks",
                id=f"list-{index}",
            ),
            element(
                "p", f"tier {record['tier']}; worst: the largest number over its limit",
                class_="quiet",
            ),
        )
    )  # fmt: skip


def _choice(name: str, options: Sequence[tuple[str, str]]) -> Markup:
    made = [element("option", "all", value="")]
    made += [element("option", shown, value=value) for value, shown in options]
    return element("select", *made, name=name)


def _check(check: CheckFacts) -> Markup:
    level = "" if check.level is None else f"L{check.level}"
    row = (
        element("b", check.id),
        element("span", check.title, class_="title"),
        element("span", level, class_="level"),
        badge(check.verdict),
        element("span", number(check.ratio), class_="worst"),
        element("span", len(check.cases) or "–", class_="count"),
        element("span", f"{check.seconds:.1f}" if check.cases else "", class_="seconds"),
    )
    marks = {"data_verdict": str(check.verdict), "data_group": check.id[:1]}
    if not check.cases:
        return element("div", *row, class_="row check", **marks)
    lines = [_case_row(case) for case in check.cases]
    head = element(
        "tr", *(element("th", x, scope="col") for x in ("case", "verdict", "worst", "numbers", "s"))
    )
    table = element("table", element("thead", head), element("tbody", *lines))
    return element(
        "details",
        element("summary", *row, class_="row"),
        element("div", table, class_="scroll"),
        class_="check",
        **marks,
    )


def _case_row(case: CaseFacts) -> Markup:
    return element(
        "tr",
        element(
            "th", case.name, element("small", case.message) if case.message else None, scope="row"
        ),
        element("td", words(case.verdict), class_=kind_of(case.verdict)),
        element("td", number(case.ratio)),
        element("td", _numbers(case)),
        element("td", f"{case.seconds:.2f}"),
    )
