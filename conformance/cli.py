"""The commands ``portattn conformance ...``.

The rule kept here: exit status 0: the level asked for is granted, or without one no check failed;
1: a check failed; 2: the harness or the target could not be used; 3: a waiver has expired. What a
target does wrong is an outcome and never a traceback of ours.
"""

from __future__ import annotations

import importlib
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
from portattn.conformance.manifest import DTYPES, Manifest
from portattn.conformance.targets import SHIPPED, TargetError, why_not
from portattn.conformance.verdicts import FAILURES, Verdict

LATER = {
    "mutants": ("portattn.conformance.mutants:command", "Seed defects; each must be caught."),
    "onnx": ("portattn.conformance.onnx_cases:command", "Run the cases of ONNX's Attention."),
    "report": ("portattn.conformance.report:command", "Draw records as one HTML page."),
    "index": ("portattn.conformance.index:command", "Write the page that lists all evidence."),
}
"""Commands that live in modules of their own and are imported when they are called."""


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LATER])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in LATER:
            return super().get_command(ctx, name)
        path, _ = LATER[name]
        module, _, attribute = path.partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # noqa: BLE001  told, so that the other commands stay usable
            _stop(f"{name} cannot be loaded: {type(error).__name__}: {error}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The later ones by the summary that stands here: nothing is imported for --help."""
        rows = [(name, one.get_short_help_str(200)) for name, one in self.commands.items()]
        rows += [(name, summary) for name, (_, summary) in LATER.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


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
    click.option(
        "--target", metavar="T",
        help="A name of `list --targets`, or package.module:object for any other.",
    ),
    click.option(
        "--tier", type=click.Choice(TIERS), default="cpu", show_default=True,
        help="How much; each has the cases of the one before it. Levels rest on cpu, or gpu on "
        "CUDA.",
    ),
    click.option(
        "--dtype", "dtypes", multiple=True, metavar="NAME", type=click.Choice(DTYPES),
        help="Only this dtype of those that the target claims; may be repeated.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Draws other inputs."),
    click.option("--catalogue", default=isolate.CATALOGUE, hidden=True),
)  # fmt: skip


def _with_target(command: Any) -> Any:
    for option in reversed(_target_options):
        command = option(command)
    return command


@cli.command(short_help="Run the catalogue against a target; keep the record.")
@_with_target
@click.option(
    "--level",
    metavar="L0..L5",
    callback=_level,
    help="Exit with 0 only where this level is granted.",
)
@click.option("--checks", metavar="IDS", help="Only these checks or cases, separated by commas.")
@click.option(
    "--fraction",
    metavar="i/n",
    default="1/1",
    callback=_fraction,
    show_default=True,
    help="Every n-th case from the i-th on; `merge` joins the parts.",
)
@click.option(
    "--waivers",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file of failures that somebody answers for, until a day.",
)
@click.option(
    "--junit",
    "junit_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the outcomes as JUnit XML too.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder for the record (default: the user's data folder).",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Workers (default: one a core; on CUDA one).",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for one case (default: by tier).",
)
@click.option(
    "--resume/--fresh",
    default=True,
    show_default=True,
    help="Take up an interrupted run of the same command, or begin anew.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of the table.")
def run(
    backend: str | None,
    target: str | None,
    tier: str,
    dtypes: tuple[str, ...],
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

    The record is written to the user's data folder (PORTATTN_DATA_DIR moves it), or to DIR with
    -o; the last lines name the file. A whole run of a backend in all its dtypes lands in the data
    folder as its evidence too. Ctrl-C keeps what was answered; the same command takes it up again.

    \b
    Exit status:
      0    the level asked for is granted; without --level, no check failed
      1    a check failed, or the level is not granted
      2    the suite or the target could not be used
      3    a waiver has expired
      130  interrupted
    """
    spec = _spec(backend, target)
    selection = tuple(filter(None, checks.split(","))) if checks is not None else None
    talk = Console(stderr=True)
    try:
        options = runner.Options(
            spec, tier, seed, selection, fraction, jobs, timeout,
            waivers=waiver_files.read(waivers) if waivers else (), catalogue=catalogue,
            dtypes=dtypes or None,
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
        talk.print(
            f"interrupted; kept in {where.partial}; the same command takes it up", soft_wrap=True
        )
        sys.exit(130)
    except runner.OtherDtypes as error:
        _stop(str(error))
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
        console.print(f"record: {files[0]}", highlight=False, soft_wrap=True)
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


@cli.command(short_help="Run one case again, alone in a fresh process.")
@click.argument("what", nargs=-1, required=True, metavar="[RECORD] CASE_ID")
@_with_target
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for the case.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(
    what: tuple[str, ...],
    backend: str | None,
    target: str | None,
    tier: str,
    dtypes: tuple[str, ...],
    seed: int,
    catalogue: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Run one case again, alone in a fresh process: that of a record, or by its id for a target.

    Exit 1: the case fails; 2: it could not be run.
    """
    manifest = None
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
            manifest = None if given else Manifest.parse(made["target"]["manifest"])
        elif len(what) == 1:
            spec = _spec(backend, target)
            prepared = runner.prepare(
                runner.Options(
                    spec, tier, seed, (what[0],), catalogue=catalogue, dtypes=dtypes or None
                )
            )
            manifest = prepared.loaded.manifest
            if len(prepared.cases) != 1:
                _stop(f"{what[0]} is a check, not a case; its cases in tier {tier}: "
                      + (", ".join(case.id for case in prepared.cases) or "none"))  # fmt: skip
            case = prepared.cases[0]
        else:
            raise click.UsageError("wanted: RECORD CASE_ID, or CASE_ID with --target")
        outcome = isolate.run_alone(spec, case, timeout, catalogue=catalogue, manifest=manifest)
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


@cli.command(short_help="Compute all that a record concludes again.")
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
            click.echo(f"{path}: stands; level {_level_of(made)}, {made['digest'][:16]}")
        bad = bad or bool(wrong)
    sys.exit(1 if bad else 0)


def _level_of(made: Mapping[str, Any]) -> str:
    only = record.only_dtypes(made)
    return (made["level"] or "none") + (f" for {only} only" if only else "")


@cli.command(short_help="What differs between two records.")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The record to write.",
)
def merge(records: tuple[Path, ...], output: Path) -> None:
    """Join the records of the fractions of one run."""
    try:
        made = audit.merge([record.read(path) for path in records])
    except record.RecordError as error:
        _stop(str(error))
    record.write(made, output)
    click.echo(f"{output}: level {_level_of(made)}, {made['digest'][:16]}")


@cli.command("list", short_help="The checks of the catalogue, or the targets that ship.")
@click.option("--targets", is_flag=True, help="The targets that ship, instead of the checks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--catalogue", default=isolate.CATALOGUE, hidden=True)
def list_(targets: bool, as_json: bool, catalogue: str) -> None:
    """The catalogue: every check with its level, tiers and the features that it needs.

    With --targets the targets that ship, and whether each works on this machine, as far as can be
    told without importing it.
    """
    if targets:
        why = {name: why_not(name) for name in SHIPPED}
        if as_json:
            click.echo(
                json.dumps(
                    {name: {"spec": SHIPPED[name], "why_not": why[name]} for name in SHIPPED},
                    indent=1,
                )
            )
        else:
            for name, reason in why.items():
                click.echo(f"{name:16}{reason or 'works here'}")
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
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)


if __name__ == "__main__":
    cli(prog_name="portattn conformance")
