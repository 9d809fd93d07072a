"""``portattn conformance mutants``.

The rule kept here: exit status 0: every mutant is caught and the correct implementation is accused
of nothing; 1: one survives, or it is; 2: the harness or the mutants could not be used.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from portattn import certificate
from portattn.conformance import isolate, record, show
from portattn.conformance.case import TIERS
from portattn.conformance.mutants import foreign, score
from portattn.conformance.mutants.catalogue import CORRECT, MUTANTS
from portattn.conformance.mutants.seeds import Mutant
from portattn.conformance.targets import TargetError
from portattn.machine import cores

_SAID_EVERY = 25  # mutants between two lines of progress


@click.command("mutants")
@click.option("--target", metavar="T", help="Your own: package.module:object with mutants().")
@click.option("--only", help="Ids or families of mutants, separated by commas.")
@click.option(
    "--tier",
    type=click.Choice(TIERS[:2]),
    default="cpu",
    show_default=True,
    help="The tier that the correct implementation has to pass.",
)
@click.option("--thorough", is_flag=True, help="Ask survivors the whole catalogue.")
@click.option("--skip-correct", is_flag=True, help="Do not run the correct implementation.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), help="Workers; default: one a core.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the record; default: the user's data folder.",
)
@click.option("--list", "only_list", is_flag=True, help="Name the mutants and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of the table.")
@click.option("--catalogue", default=isolate.CATALOGUE, hidden=True)
def command(
    target: str | None,
    only: str | None,
    tier: str,
    thorough: bool,
    skip_correct: bool,
    seed: int,
    jobs: int | None,
    output: Path | None,
    only_list: bool,
    as_json: bool,
    catalogue: str,
) -> None:  # fmt: skip
    """Seed defects and demand that the suite catches each one.

    Every mutant is a correct tiled implementation with one thing wrong; a check that its level
    rests on must fail. The correct implementation must pass. With --target somebody's own mutants
    are asked about in place of the shipped ones.
    """
    talk, started = Console(stderr=True), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = score.Plan(
        tier, seed, jobs or cores(), thorough, catalogue=catalogue,
    )  # fmt: skip
    try:
        correct, mutants = (CORRECT, dict(MUTANTS)) if target is None else foreign.find(target)
        chosen = select(mutants, only)
        if only_list:
            _list(chosen, as_json)
            return
        passed = None
        if correct is not None and not skip_correct:
            with show.progress(talk, "correct") as report:
                passed = score.judge_correct(correct, plan, report)
        found = score.findings(chosen, plan, lambda *at: _progress(talk, *at))
    except (TargetError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    made = score.build(plan, found, passed, time.monotonic() - started)
    folder = output or certificate.data_dir() / "records"
    path = folder / ("mutants.json" if target is None else "mutants-foreign.json")
    record.write(made, path)
    if as_json:
        click.echo(json.dumps(made, sort_keys=True, indent=1))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 120
        summary(console, made)
        console.print(f"record: {path}", highlight=False, soft_wrap=True)
    sys.exit(status(made))


def status(made: Mapping[str, Any]) -> int:
    """The exit status that a record amounts to."""
    unusable = any(m["verdict"] == "HARNESS_ERROR" for m in made["mutants"].values())
    if unusable:
        return 2
    accused = made["correct"] is not None and bool(made["correct"]["accusations"])
    return 1 if made["survivors"] or accused else 0


def select(mutants: Mapping[str, Mutant], only: str | None) -> list[Mutant]:
    """The mutants that ``only`` names, by id or family; all for None."""
    if only is None:
        return list(mutants.values())
    names = set(filter(None, only.split(",")))
    known = set(mutants) | {m.family for m in mutants.values()}
    if names - known:
        raise ValueError(f"unknown mutant {sorted(names - known)[0]!r}; --list names them all")
    return [m for m in mutants.values() if m.id in names or m.family in names]


def summary(console: Console, made: Mapping[str, Any]) -> None:
    """A line for each family, the survivors with what to do, and the score."""
    families: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for mutant in made["mutants"].values():
        families[mutant["family"]].append(mutant)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("family")
    for name in ("mutants", "caught", "cases asked", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("caught by")
    for family, members in families.items():
        checks = sorted({m["case"].partition("/")[0] for m in members if m["case"]})
        table.add_row(
            family,
            str(len(members)),
            str(sum(m["case"] is not None for m in members)),
            str(sum(m["asked"] for m in members)),
            f"{sum(m['seconds'] for m in members):.0f}",
            " ".join(checks),
        )
    console.print(table)
    for name in made["survivors"]:
        mutant = made["mutants"][name]
        console.print(f"[red]survives[/] {escape(name)}: {escape(mutant['title'])}")
        console.print(f"  {escape(advice(mutant))}", highlight=False)
    correct = made["correct"]
    if correct is not None:
        for line in correct["accusations"]:
            console.print(f"[red]accused though correct[/] {escape(line)}", highlight=False)
        console.print(
            f"correct implementation: {correct['cases']} cases in {', '.join(correct['dtypes'])}, "
            f"tier {made['tier']}: {len(correct['accusations'])} accusations",
            highlight=False,
        )
    percent = 100 * made["caught"] / made["of"] if made["of"] else 100.0
    console.print(
        f"score: [bold]{made['caught']} of {made['of']}[/] mutants caught ({percent:.1f} %) in "
        f"{made['seconds']:.0f} s",
        highlight=False,
    )


def advice(mutant: Mapping[str, Any]) -> str:
    """What a survivor asks for."""
    if mutant["message"]:
        return str(mutant["message"])
    if not mutant["expected"]:
        return "no check of the catalogue tells it from a correct one: add one that does"
    level = "any level" if mutant["level"] is None else f"level L{mutant['level']}"
    return (
        f"add an input that shows it to {' or '.join(mutant['expected'])} ({level}); "
        "--thorough says whether another check does"
    )


def _progress(console: Console, done: int, total: int, finding: score.Finding) -> None:
    if finding.case is None:
        console.print(f"[red]survives[/] {escape(finding.mutant.id)}")
    if done % _SAID_EVERY == 0 or done == total:
        console.print(f"mutants: {done}/{total}", highlight=False)


def _list(mutants: Iterable[Mutant], as_json: bool) -> None:
    rows = [
        {"id": m.id, "family": m.family, "level": m.level, "checks": list(m.checks),
         "title": m.title, "spec": m.spec}
        for m in mutants
    ]  # fmt: skip
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table("family", "mutant", "level", "checks", "defect", box=None, pad_edge=False)
    for row in rows:
        level = "" if row["level"] is None else f"L{row['level']}"
        table.add_row(
            str(row["family"]), escape(str(row["id"])), level,
            " ".join(row["checks"]),  # type: ignore[arg-type]
            escape(str(row["title"])),
        )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
