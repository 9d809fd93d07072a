"""The commands ``portattn conformance ...``.

The rule kept here: exit status 0: the level asked for is granted, or without one no check failed;
1: a check failed; 2: the harness or the target could not be used; 3: a waiver has expired. What a
target does wrong is an outcome and never a traceback of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from portattn.conformance import audit, identity, isolate, junit, record, runner, show, store
from portattn.conformance import waivers as waiver_files
from portattn.conformance.case import TIERS, Case, Outcome
from portattn.conformance.levels import LEVELS
from portattn.conformance.targets import SHIPPED, TargetError
from portattn.conformance.verdicts import FAILURES, Verdict

LATER = {
    "mutants": "portattn.conformance.mutants:command",
    "onnx": "portattn.conformance.onnx_cases:command",
    "report": "portattn.conformance.report:command",
    "index": "portattn.conformance.index:command",
}
"""Commands that live in modules of their own and are imported when they are called."""


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        there = [
            name
            for name, path in LATER.items()
            if importlib.util.find_spec(path.partition(":")[0]) is not None
        ]
        return sorted([*super().list_commands(ctx), *there])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in LATER and name in self.list_commands(ctx):
            module, _, attribute = LATER[name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        return super().get_command(ctx, name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Hold any attention kernel to the contract, and keep a record that others can verify."""


def _stop(message: str, status: int = 2) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(status)


def _fraction(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    part, slash, whole = value.partition("/")
    if slash and part.isdigit() and whole.isdigit() and 1 <= int(part) <= int(whole):
        return int(part), int(whole)
    raise click.BadParameter(f"{value!r}; wanted: i/n with 1 <= i <= n, such as 2/3")


def _level(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    name = value.upper() if value.upper().startswith("L") else f"L{value}"
    if name not in LEVELS:
        raise click.BadParameter(f"{value!r}; wanted: one of {', '.join(LEVELS)}")
    return name


def _spec(backend: str | None, target: str | None) -> str:
    if (backend is None) == (target is None):
        raise click.UsageError("wanted: either --backend NAME or --target T")
    return f"backend:{backend}" if backend is not None else str(target)


_target_options = (
    click.option("--backend", metavar="NAME", help="A portattn backend, out-of-tree ones too."),
    click.option("--target", metavar="T", help=f"{', '.join(SHIPPED)}, or package.module:object."),
    click.option("--tier", type=click.Choice(TIERS), default="cpu", show_default=True),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--catalogue", default=isolate.CATALOGUE, hidden=True),
)


def _with_target(command: Any) -> Any:
    for option in reversed(_target_options):
        command = option(command)
    return command


@cli.command()
@_with_target
@click.option("--level", callback=_level, help="Exit with 0 only where this level is granted.")
@click.option("--checks", help="Ids of checks or cases, separated by commas.")
@click.option("--fraction", default="1/1", callback=_fraction, help="Run part i of n: i/n.")
@click.option("--waivers", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--junit", "junit_file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False))
@click.option("--jobs", type=click.IntRange(min=1), help="Workers; default: one a core.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds a case.")
@click.option("--resume/--fresh", default=True, help="Take up an interrupted run (default).")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of the table.")
def run(
    backend: str | None,
    target: str | None,
    tier: str,
    seed: int,
    catalogue: str,
    level: str | None,
    checks: str | None,
    fraction: tuple[int, int],
    waivers: Path | None,
    junit_file: Path | None,
    output: Path | None,
    jobs: int | None,
    timeout: float | None,
    resume: bool,
    as_json: bool,
) -> None:
    """Run the catalogue against a target and keep the record.

    Ctrl-C keeps what was answered; the same command takes it up again.
    """
    spec = _spec(backend, target)
    selection = tuple(filter(None, checks.split(","))) if checks is not None else None
    talk = Console(stderr=True)
    try:
        options = runner.Options(
            spec, tier, seed, selection, fraction, jobs, timeout,
            waivers=waiver_files.read(waivers) if waivers else (), catalogue=catalogue,
        )  # fmt: skip
        prepared = runner.prepare(options)
    except (TargetError, waiver_files.WaiverError, ValueError) as error:
        _stop(str(error))
    where = store.places(prepared, output)
    if not resume:
        where.journal.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with show.progress(talk, prepared.loaded.manifest.name) as report:
            made = runner.execute(prepared, where.journal, report)
    except runner.Interrupted as interrupted:
        record.write(interrupted.partial, where.partial)
        talk.print(f"interrupted; kept in {where.partial}; the same command takes it up")
        sys.exit(130)
    files = store.keep(made, where, output)
    if junit_file is not None:
        junit.write(made, junit_file)
    if as_json:
        click.echo(json.dumps(made, sort_keys=True, indent=1))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 120  # a pipe has no width; the table wants one
        show.summary(console, made)
        for file in files:
            console.print(f"record: {file}", highlight=False, soft_wrap=True)
    sys.exit(status(made, level))


def status(made: Mapping[str, Any], level: str | None = None) -> int:
    """The exit status that a record amounts to."""
    if record.expired(made):
        for waiver in record.expired(made):
            click.echo(f"the waiver of {waiver.id} expired on {waiver.expires}", err=True)
        return 3
    if made["failed"]:
        return 1
    if any(check["verdict"] == Verdict.HARNESS_ERROR for check in made["checks"].values()):
        return 2
    return 1 if level is not None and made["levels"][level] else 0


@cli.command()
@click.argument("what", nargs=-1, required=True, metavar="[RECORD] CASE_ID")
@_with_target
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0)
@click.option("--json", "as_json", is_flag=True)
def replay(
    what: tuple[str, ...],
    backend: str | None,
    target: str | None,
    tier: str,
    seed: int,
    catalogue: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Run one case again, alone in a fresh process: that of a record, or by its id for a target."""
    before: Mapping[str, Any] | None = None
    try:
        if len(what) == 2:
            made = record.read(Path(what[0]))
            case_id = what[1]
            before = made["checks"].get(case_id.partition("/")[0], {}).get("cases", {}).get(case_id)
            if before is None:
                _stop(f"{what[0]} holds no case {case_id}")
            check_id, _, name = case_id.partition("/")
            case = Case(check_id, name, before["params"], before["seed"], before["optional"])
            given = backend is not None or target is not None
            spec = _spec(backend, target) if given else made["target"]["spec"]
        elif len(what) == 1:
            spec = _spec(backend, target)
            prepared = runner.prepare(
                runner.Options(spec, tier, seed, (what[0],), catalogue=catalogue)
            )
            if len(prepared.cases) != 1:
                _stop(f"{what[0]} is a check, not a case; its cases in tier {tier}: "
                      + (", ".join(case.id for case in prepared.cases) or "none"))  # fmt: skip
            case = prepared.cases[0]
        else:
            raise click.UsageError("wanted: RECORD CASE_ID, or CASE_ID with --target")
        outcome = isolate.run_alone(spec, case, timeout, catalogue=catalogue)
    except (TargetError, record.RecordError, ValueError) as error:
        _stop(str(error))
    _show_outcome(case, outcome, before, as_json)
    if outcome.verdict is Verdict.HARNESS_ERROR:
        sys.exit(2)
    sys.exit(1 if outcome.verdict in FAILURES else 0)


def _show_outcome(
    case: Case, outcome: Outcome, before: Mapping[str, Any] | None, as_json: bool
) -> None:
    now = record.case_entry(case, outcome, 0.0)
    if as_json:
        click.echo(json.dumps({"case": case.to_json(), "outcome": now}, sort_keys=True, indent=1))
        return
    lines = [
        f"[bold]{outcome.verdict}[/] {escape(case.id)} {escape(outcome.message)}",
        f"  params: {escape(record.text_of(dict(case.params)))} seed {case.seed}",
        *(f"  {escape(name)}: {value}" for name, value in sorted(now["numbers"].items())),
    ]
    if now["worst"]:
        lines.append(f"  worst: {escape(record.text_of(now['worst']))}")
    if before is not None:
        same = before["digests"] == now["digests"]
        lines.append(
            f"  the record says {before['verdict']}; inputs and output are "
            + ("the same, bit for bit" if same else "not the same")
        )
    console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)


@cli.command()
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--catalogue", default=isolate.CATALOGUE, hidden=True)
def verify(records: tuple[Path, ...], catalogue: str) -> None:
    """Compute digest, verdicts, level and completeness of records again. 1: something is wrong."""
    bad = False
    for path in records:
        try:
            made = record.read(path)
            wrong = audit.verify(made, runner.catalogue_of(catalogue), identity.suite())
        except record.RecordError as error:
            click.echo(str(error))
            bad = True
            continue
        for line in wrong:
            click.echo(f"{path}: {line}")
        if not wrong:
            click.echo(f"{path}: stands; level {made['level'] or 'none'}, {made['digest'][:16]}")
        bad = bad or bool(wrong)
    sys.exit(1 if bad else 0)


@cli.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def diff(a: Path, b: Path, as_json: bool) -> None:
    """What differs between two records. 1: a verdict, the level or the set of cases does."""
    try:
        found = audit.diff(record.read(a), record.read(b))
    except record.RecordError as error:
        _stop(str(error))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        for title, lines in found.items():
            for line in lines:
                click.echo(f"{title}: {line}")
        if not any(found.values()):
            click.echo("no difference")
    sys.exit(1 if found["verdicts"] or found["level"] or found["cases"] else 0)


@cli.command()
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
def merge(records: tuple[Path, ...], output: Path) -> None:
    """Join the records of the fractions of one run."""
    try:
        made = audit.merge([record.read(path) for path in records])
    except record.RecordError as error:
        _stop(str(error))
    record.write(made, output)
    click.echo(f"{output}: level {made['level'] or 'none'}, {made['digest'][:16]}")


@cli.command("list")
@click.option("--targets", is_flag=True, help="The targets that ship, instead of the checks.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--catalogue", default=isolate.CATALOGUE, hidden=True)
def list_(targets: bool, as_json: bool, catalogue: str) -> None:
    """The catalogue: every check with its level, tiers and the features that it needs."""
    if targets:
        click.echo(json.dumps(dict(SHIPPED), indent=1) if as_json else "\n".join(SHIPPED))
        return
    rows = [
        {
            "id": check.id,
            "title": check.title,
            "level": None if check.level is None else f"L{check.level}",
            "tiers": list(check.tiers),
            "needs": list(check.needs),
        }
        for check in runner.catalogue_of(catalogue).values()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table("check", "title", "level", "tiers", "needs", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            str(row["id"]), escape(str(row["title"])), str(row["level"] or ""),
            " ".join(row["tiers"] or ()), " ".join(row["needs"] or ()),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    cli(prog_name="portattn conformance")
