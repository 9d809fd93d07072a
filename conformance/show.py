"""What a run looks like: progress while it goes, a table and the level at its end.

The rule kept here: the same facts on a terminal, in a log and in a pipe; only the dress differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from portattn.conformance import record as records
from portattn.conformance.levels import LEVELS, UNASKED
from portattn.conformance.runner import Progress, Report
from portattn.conformance.verdicts import FAILURES, Verdict, gate_of

_STYLE = {
    Verdict.PASS: "green",
    Verdict.QUALITY_WARNING: "yellow",
    Verdict.SIMULATED: "cyan",
    Verdict.WAIVED: "magenta",
    Verdict.NOT_SUPPORTED: "dim",
    Verdict.NOT_RUN: "dim",
}
_PLAIN_SECONDS = 5.0  # between two lines of progress where there is no terminal
_SHOWN = 20  # failing cases that are told in full


@contextmanager
def progress(console: Console, title: str) -> Iterator[Report]:
    """A report function for `runner.execute` that draws a bar, or writes a line now and then."""
    if console.is_terminal:
        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
            transient=True,
        )
        with bar:
            task = bar.add_task(title, total=None, now="")

            def draw(at: Progress) -> None:
                now = at.case.id if at.case else ""
                bar.update(task, completed=at.done, total=at.total, now=escape(now))
                if _failed(at):
                    console.print(_failure_line(at), soft_wrap=True)

            yield draw
        return
    started = said = time.monotonic()
    first: int | None = None

    def write(at: Progress) -> None:
        nonlocal said, first
        now = time.monotonic()
        first = at.done if first is None else first
        if _failed(at):
            console.print(_failure_line(at), soft_wrap=True)
        if at.done < at.total and now - said < _PLAIN_SECONDS and at.case is not None:
            return
        said = now
        left = ""
        if at.done > first:
            seconds = (now - started) / (at.done - first) * (at.total - at.done)
            left = f", about {seconds:.0f} s left"
        console.print(f"{title}: {at.done}/{at.total} cases{left}", highlight=False)

    yield write


def _failed(at: Progress) -> bool:
    bad = (*FAILURES, Verdict.HARNESS_ERROR)
    return at.outcome is not None and at.outcome.verdict in bad


def _failure_line(at: Progress) -> str:
    assert at.case is not None and at.outcome is not None
    said = at.outcome.message or _numbers(at.outcome.numbers)
    return f"[red]{at.outcome.verdict}[/] {escape(at.case.id)} {escape(said[:200])}"


def summary(console: Console, record: Mapping[str, Any]) -> None:
    """The table, the failures with their replay commands, and the level."""
    target, manifest = record["target"], record["target"]["manifest"]
    only = records.only_dtypes(record)
    console.print(
        f"[bold]{escape(manifest['name'])}[/] {escape(manifest['version'])} "
        f"({escape(target['spec'])}) on {escape(records.device_of(record))}, tier "
        f"{record['tier']}, seed {record['seed']}" + (f", {only} only" if only else ""),
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("check", "left"), ("title", "left"), ("level", "left"), ("verdict", "left"),
        ("worst/limit", "right"), ("cases", "right"), ("seconds", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=name != "title")  # type: ignore[arg-type]
    absent, elsewhere = 0, 0
    for check_id, check in record["checks"].items():
        cases = check["cases"].values()
        if not cases:
            absent += record["tier"] in check["tiers"]
            elsewhere += record["tier"] not in check["tiers"]
            continue
        verdict = Verdict(check["verdict"])
        ratios = [ratio for case in cases if (ratio := worst_ratio(case)) is not None]
        table.add_row(
            check_id,
            escape(check["title"]),
            "" if check["level"] is None else f"L{check['level']}",
            f"[{_STYLE.get(verdict, 'red')}]{verdict}[/]",
            f"{max(ratios):.3g}" if ratios else "",
            str(len(cases)),
            f"{sum(case['seconds'] for case in cases):.1f}",
        )
    console.print(table)
    if elsewhere:
        console.print(f"{elsewhere} checks of the catalogue belong to another tier")
    if absent and record["selection"] is None:
        console.print(f"{absent} checks of the catalogue had no case in this run")
    _failures(console, record)
    _level(console, record)


def worst_ratio(case: Mapping[str, Any]) -> float | None:
    """The largest of a case's gated numbers over its limit (a warning's limit where it has one);
    None where no number of it has a limit above 0. A number without a gate has no limit; that of
    ``e1_det`` lies beyond ``e1_prob``'s and would hide it."""
    ratios = []
    for name, value in case["numbers"].items():
        gate = gate_of(name)
        limit = min(gate.warn, gate.fail) if gate else 0.0
        if 0 < limit < math.inf and name.rpartition(".")[2] != "e1_det":
            ratios.append(float(value) / limit)
    # NaN is worse than any number.
    return max(ratios, key=lambda x: (x != x, x)) if ratios else None


def _numbers(numbers: Mapping[str, Any]) -> str:
    """The gated numbers that are beyond their gates, in words; all where none is."""
    beyond = {
        name: gate
        for name, value in numbers.items()
        if (gate := gate_of(name)) is not None and gate.judge(float(value)) != Verdict.PASS
    }
    if not beyond:
        return records.text_of(dict(numbers))
    return ", ".join(
        f"{name} is {float(numbers[name]):.3g} (limit {min(gate.warn, gate.fail):g})"
        for name, gate in beyond.items()
    )


def _failures(console: Console, record: Mapping[str, Any]) -> None:
    failing = [
        (case_id, case)
        for check in record["checks"].values()
        for case_id, case in check["cases"].items()
        if Verdict(case["verdict"]) in (*FAILURES, Verdict.HARNESS_ERROR, Verdict.WAIVED)
    ]
    for case_id, case in failing[:_SHOWN]:
        verdict = Verdict(case["verdict"])
        console.print(
            f"[{_STYLE.get(verdict, 'red')}]{verdict}[/] {escape(case_id)}: "
            f"{escape(case['message'] or _numbers(case['numbers']))}",
            highlight=False,
            soft_wrap=True,
        )
        if case["worst"]:
            text = escape(records.text_of(case["worst"]))
            console.print(f"  worst: {text}", highlight=False, soft_wrap=True)
        command = records.replay_command(record, case_id)
        console.print(f"  {escape(command)}", highlight=False, soft_wrap=True)
    if len(failing) > _SHOWN:
        console.print(f"... and {len(failing) - _SHOWN} more, all in the record")


def _level(console: Console, record: Mapping[str, Any]) -> None:
    level = record["level"]
    text = f"{level} ({LEVELS[level]})" if level else "none"
    only = records.only_dtypes(record)
    suffix = f", for {only} only" if only else ""
    console.print(f"level: [bold]{text}[/]{suffix}", highlight=False)
    if record["selection"] is not None:
        console.print("a selection of checks grants no level")
        return
    following = next((name for name in LEVELS if record["levels"][name]), None)
    if following is not None:
        # A part of a run says so once; the checks that it leaves out go without saying.
        why = [reason for reason in record["levels"][following] if not reason.endswith(UNASKED)]
        more = f", and {len(why) - 6} more" if len(why) > 6 else ""
        console.print(
            f"{following} ({LEVELS[following]}) is not granted: {escape('; '.join(why[:6]))}{more}",
            highlight=False,
            soft_wrap=True,
        )
