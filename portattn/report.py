"""What the query prints for people.

The rule kept here: a reader sees first whether a backend is ready, then every reason against it;
nothing is cut off in a narrow terminal or a pipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from portattn.contract import Reason
from portattn.select import BackendInfo, Candidate, Decision


def console() -> Console:
    """A console for stdout; in a pipe it is wide enough for the tables unless COLUMNS says."""
    made = Console(highlight=False)
    if made.is_terminal or "COLUMNS" in os.environ:
        return made
    return Console(highlight=False, width=120)


def print_backends(infos: Iterable[BackendInfo]) -> None:
    """The table of `portattn backends` and, below it, every reason."""
    infos = tuple(infos)
    screen = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("backend", "ready", "device", "versions", "head dims", "dtypes", "evidence"):
        table.add_column(name, overflow="fold")
    for info in infos:
        versions = ", ".join(f"{p} {v}" for p, v in info.versions.items() if v) or "-"
        table.add_row(
            info.name,
            Text("yes", "green") if info.ready else Text("no", "red"),
            escape(info.device or "-"),
            escape(versions),
            info.head_dims or "-",
            ", ".join(info.dtypes) or "-",
            escape(str(info.evidence) if info.evidence else "none"),
        )
    screen.print(table)
    for info in infos:
        if info.features:
            screen.print(f"\n[bold]{escape(info.name)}[/] features:")
            _print_indented(screen, ", ".join(info.features))
        if info.reasons:
            screen.print(f"\n[bold]{escape(info.name)}[/] is not ready:")
            _print_reasons(screen, info.reasons)


def print_decision(decision: Decision) -> None:
    """The answer to one problem."""
    screen = console()
    screen.print(f"[bold]{escape(decision.problem.describe())}[/]")
    if decision.chosen:
        screen.print(f"[green]{escape(decision.chosen)}[/] would run it")
    else:
        screen.print("[red]no backend accepts[/]")
    if decision.note:
        screen.print(escape(decision.note))
    for candidate in decision.candidates:
        _print_candidate(screen, candidate)


def _print_candidate(screen: Console, candidate: Candidate) -> None:
    word = "[green]accepts[/]" if candidate.accepted else "[red]rejects[/]"
    screen.print(f"\n[bold]{escape(candidate.backend)}[/] {word}")
    plan = candidate.plan
    if plan is not None:
        tile = ", ".join(f"{k} {v}" for k, v in plan.tile)
        screen.print(f"  plan: {plan.mechanism}, {tile}" if tile else f"  plan: {plan.mechanism}")
        screen.print(
            f"  memory: {plan.shared_memory_bytes:,} B of shared memory a block, "
            f"at most {plan.workspace_bytes:,} B of workspace"
        )
        if plan.note:
            screen.print(f"  {escape(plan.note)}")
    _print_reasons(screen, candidate.reasons)
    if candidate.nearest is not None:
        screen.print(f"  nearest supported: {escape(candidate.nearest.describe())}")
    if candidate.evidence is not None:
        screen.print(f"  evidence: {escape(str(candidate.evidence))}")


def _print_reasons(screen: Console, reasons: Iterable[Reason]) -> None:
    for reason in reasons:
        _print_indented(
            screen, f"[yellow]{reason.code}[/] ({reason.source}): {escape(str(reason))}"
        )


def _print_indented(screen: Console, markup: str) -> None:
    screen.print(Padding(Text.from_markup(markup), (0, 0, 0, 2), expand=False))
