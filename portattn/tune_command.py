"""`portattn tune`: measure a backend's tiles on the device at hand and keep the better ones.

The rule kept here: what is wrong with the question is said before anything runs, and nothing is
written before everything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from portattn import tuning
from portattn.machine import Machine
from portattn.registry import find_backends
from portattn.report import console
from portattn.tuning import Step, Tuned


@runtime_checkable
class Tunable(Protocol):
    """What a backend has besides `portattn.contract.Backend` if its tiles can be measured."""

    def tune(
        self,
        head_dims: Sequence[int],
        dtypes: Sequence[str],
        kinds: Sequence[str],
        report: Callable[[Step], None],
    ) -> Tuned:
        """Measure the tiles of these head dims, dtypes and kinds of call (none: every kind) on the
        current device; `ValueError` for what it cannot tune. Writes nothing."""


@click.command("tune")
@click.option("--backend", "name", default="triton", show_default=True, help="The one to tune.")
@click.option(
    "--head-dim",
    "head_dims",
    type=click.IntRange(min=1),
    multiple=True,
    default=(128,),
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    default=("bfloat16",),
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    help="A kind of call, as in the first part of a key (prefill, rows, ...); repeatable.  "
    "[default: every one]",
)
@click.option("--dry-run", is_flag=True, help="Measure and print; write nothing.")
@click.option("--reset", is_flag=True, help="Go back to the shipped tiles on the devices here.")
@click.pass_context
def cli(
    ctx: click.Context,
    /,
    name: str,
    head_dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    kinds: tuple[str, ...],
    dry_run: bool,
    reset: bool,
) -> None:
    """Measure tiles on this device and keep those that beat the shipped ones.

    Calls never measure anything; they use what this command wrote for the device, as long as the
    kernels and the compiler are those it was measured with. Every candidate must compute what the
    shipped tile computes. Exit status 0: done; 1: it could not be written; 2: nothing to tune.
    """
    if dry_run and reset:
        raise click.UsageError("--dry-run and --reset exclude each other")
    backend = _backend(name)
    machine = Machine.here()
    screen = console()
    if reset:
        _reset(name, backend, machine, screen)
        return
    against = backend.why_not(None, machine)
    if against:
        reasons = "".join(f"\n  {reason.code}: {reason}" for reason in against)
        raise click.UsageError(f"{name} cannot run here, so nothing can be measured:{reasons}")
    devices = _devices(backend, machine)
    try:
        if not dry_run:
            for device in devices:
                tuning.check_writable(name, device)
        tuned = _measure(name, backend, head_dims, dtypes, kinds)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"nothing was measured: {error}") from None
    _print(screen, tuned)
    better = sum(rows is not None for rows in tuned.entries.values())
    if dry_run:
        screen.print(f"{better} of {len(tuned.entries)} keys have a better tile; nothing written")
        return
    try:
        file = tuning.store(name, tuned.device, tuned.entries, tuned.meta)
    except OSError as error:
        raise click.ClickException(f"the tiles could not be written: {error}") from None
    where = f"; written to {file}" if file.exists() else "; the shipped tiles stay"
    screen.print(
        escape(f"{better} of {len(tuned.entries)} keys have a better tile{where}"), soft_wrap=True
    )


def _backend(name: str) -> Any:
    found = find_backends().get(name)
    if found is None:
        raise click.UsageError(f"no backend {name!r}; there are {', '.join(find_backends())}")
    if found.backend is None:
        raise click.UsageError(f"{name}: {found.broken}")
    if not isinstance(found.backend, Tunable):
        able = [n for n, f in find_backends().items() if isinstance(f.backend, Tunable)]
        raise click.UsageError(f"{name} has nothing to tune; these have: {', '.join(able) or '-'}")
    return found.backend


def _devices(backend: Any, machine: Machine) -> list[str]:
    """The devices here that a backend can have tiles for, each name once."""
    if "cuda" not in backend.device_kinds:
        return [machine.slug()]
    return list(dict.fromkeys(device.name for device in machine.cuda.devices))


def _reset(name: str, backend: Any, machine: Machine, screen: Console) -> None:
    devices = _devices(backend, machine)
    if not devices:
        raise click.UsageError(f"no device here to reset: {machine.cuda.problem}")
    for device in devices:
        try:
            gone = tuning.clear(name, device)
        except OSError as error:
            raise click.ClickException(f"the tiles could not be removed: {error}") from None
        word = "back to the shipped tiles" if gone else "the shipped tiles were in use"
        screen.print(escape(f"{name} on {device}: {word}"))


def _measure(
    name: str,
    backend: Any,
    head_dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    kinds: tuple[str, ...],
) -> Tuned:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"tuning {name}", total=None)

        def report(step: Step) -> None:
            progress.update(
                task, completed=step.done, total=step.total, description=step.text, refresh=True
            )

        tuned: Tuned = backend.tune(head_dims, dtypes, kinds, report)
        return tuned


def _print(screen: Console, tuned: Tuned) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", title=escape(tuned.device))
    for column in ("key", "case", "old", "new"):
        table.add_column(column, overflow="fold", no_wrap=column in ("old", "new"))
    for column in ("old ms", "new ms", "ratio", "tried", "skipped", "wrong"):
        table.add_column(column, justify="right")
    for found in tuned.results:
        table.add_row(
            found.key,
            escape(found.case),
            "x".join(map(str, found.old)),
            "x".join(map(str, found.new)) if found.new != found.old else "as shipped",
            f"{found.old_seconds * 1e3:.3f}",
            f"{found.new_seconds * 1e3:.3f}",
            f"{found.ratio:.2f}",
            str(found.tried),
            str(found.skipped),
            str(found.wrong),
        )
    screen.print(table)
