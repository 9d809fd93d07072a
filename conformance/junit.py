"""The record as JUnit XML, for machines that collect test results.

The rule kept here: a suite a check, a test a case; failures carry message, worst element and the
replay command; what was not supported, waived or not run is skipped with its reason.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portattn.conformance.record import replay_command, text_of
from portattn.conformance.verdicts import FAILURES, Verdict

_SKIPPED = (Verdict.NOT_SUPPORTED, Verdict.NOT_RUN, Verdict.WAIVED, Verdict.SIMULATED)


def document(record: Mapping[str, Any]) -> ET.Element:
    """The ``testsuites`` element."""
    root = ET.Element("testsuites", name=f"portattn conformance: {record['target']['spec']}")
    for check_id, check in record["checks"].items():
        if not check["cases"]:
            continue
        suite = ET.SubElement(root, "testsuite", name=f"{check_id} {check['title']}")
        counts = dict.fromkeys(("failures", "errors", "skipped"), 0)
        for case_id, case in check["cases"].items():
            test = ET.SubElement(
                suite, "testcase", classname=check_id, name=case_id, time=f"{case['seconds']:.3f}"
            )
            verdict = Verdict(case["verdict"])
            kind = (
                "failure" if verdict in FAILURES
                else "error" if verdict is Verdict.HARNESS_ERROR
                else "skipped" if verdict in _SKIPPED
                else ""
            )  # fmt: skip
            if kind:
                counts["skipped" if kind == "skipped" else kind + "s"] += 1
                said = ET.SubElement(test, kind, message=f"{verdict}: {_xml(case['message'])}")
                if kind != "skipped":
                    said.text = _xml(
                        f"numbers {text_of(case['numbers'])}\nworst {text_of(case['worst'])}\n"
                        f"{replay_command(record, case_id)}"
                    )
        suite.set("tests", str(len(check["cases"])))
        suite.set("time", f"{sum(case['seconds'] for case in check['cases'].values()):.3f}")
        for name, count in counts.items():
            suite.set(name, str(count))
    return root


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write the document to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = ET.ElementTree(document(record))
    ET.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _xml(text: str) -> str:
    """Without the control characters that XML cannot hold; a target may print anything."""
    return "".join(c if c >= " " or c in "\n\t" else "?" for c in text)
