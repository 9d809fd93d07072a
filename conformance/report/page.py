"""The page: a head, a comparison where there are several records, and a part for each record.

The rule kept here: one file, complete in itself. A content security policy forbids every fetch and
every script but the one that the page carries, which it names by its hash; without that script the
page says all it has to say, with it the lists can be filtered.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from portattn.conformance.levels import LEVELS
from portattn.conformance.record import device_of
from portattn.conformance.report import compare, figures, sections
from portattn.conformance.report.facts import Facts
from portattn.conformance.report.markup import Markup, element, join

PARTS = (
    ("summary", "Level", sections.summary),
    ("worst", "Worst cases", sections.worst),
    ("matrix", "Matrix", sections.matrix),
    ("errors", "Errors", figures.errors),
    ("memory", "Memory", figures.memory),
    ("checks", "Checks", sections.checks),
    ("fingerprint", "Machine", sections.fingerprint),
)


def page(records: Sequence[Facts]) -> str:
    """The HTML document. Raises KeyError, TypeError or ValueError where one is no record."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"Conformance of {', '.join(facts.name for facts in records)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the records", href="#main", class_="skip"),
        _top(records),
        element(
            "main",
            compare.section(records) if len(records) > 1 else None,
            *(_record(index, facts) for index, facts in enumerate(records)),
            id="main",
        ),
        _foot(records),
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _top(records: Sequence[Facts]) -> Markup:
    if len(records) == 1:
        links = [element("a", name, href=f"#{key}-0") for key, name, _ in PARTS]
    else:
        links = [element("a", "Comparison", href="#comparison")]
        links += [
            element("a", compare.title(index, records), href=f"#record-{index}")
            for index in range(len(records))
        ]
    return element(
        "header",
        element(
            "div", element("span", "portattn", class_="brand"), " conformance report", class_="kind"
        ),
        element("nav", *links, aria_label="Parts of the report"),
    )


def _record(index: int, facts: Facts) -> Markup:
    record = facts.record
    where = f"{device_of(record)}, tier {record['tier']}, seed {record['seed']}"
    return element(
        "article",
        element(
            "div",
            element("h1", facts.name),
            element("p", f"{record['target']['spec']} on {where}, {record['created']}"),
            class_="heading",
        ),
        *(
            element(
                "section",
                element("h2", name, id=f"{key}-{index}-title"),
                part(index, facts),
                id=f"{key}-{index}",
                aria_labelledby=f"{key}-{index}-title",
            )
            for key, name, part in PARTS
        ),
        id=f"record-{index}",
    )


def _foot(records: Sequence[Facts]) -> Markup:
    levels = ", ".join(f"{name} {meaning}" for name, meaning in LEVELS.items())
    digests = [
        element("li", f"{facts.name}: ", element("code", facts.record["digest"]))
        for facts in records
    ]
    return element(
        "footer",
        element("p", f"Levels, each resting on those below it: {levels}."),
        element("p", "Digests of the records that this page was made from:"),
        element("ul", join(digests)),
    )


def _asset(name: str) -> str:
    return files("portattn.conformance.report").joinpath(name).read_text("utf-8").strip()


def _hash(asset: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(asset.encode()).digest()).decode()}'"
