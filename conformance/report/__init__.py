"""`portattn conformance report`: records as one HTML page.

The rule kept here: one file that fetches nothing, and that says of an edited record that it was
edited. The page follows from the records alone; two runs write the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("report")
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", default="report.html", show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
)  # fmt: skip
@click.option("--catalogue", default="", hidden=True)
def command(records: tuple[Path, ...], output: Path, catalogue: str) -> None:
    """Write records as one self-contained HTML page; several stand side by side.

    Exit 2: one of the files is no record, or the page cannot be written.
    """
    from portattn.conformance import audit, identity, isolate, record, runner
    from portattn.conformance.report import facts
    from portattn.conformance.report.page import page

    known, suite = runner.catalogue_of(catalogue or isolate.CATALOGUE), identity.suite()
    found = []
    for path in records:
        try:
            made = record.read(path)
            wrong = audit.verify(made, known, suite)
        except record.RecordError as error:
            _stop(str(error))
        try:
            found.append(facts.read(made, wrong))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            _stop(f"{path}: the record has not the shape of one: {type(error).__name__}: {error}")
    text = page(found)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        _stop(f"{output}: {error.strerror}")
    click.echo(f"{output}: {len(found)} records, {len(text.encode()) / 1024:.0f} KiB")


def _stop(message: str) -> None:
    click.echo(f"error: {message}", err=True)
    sys.exit(2)
