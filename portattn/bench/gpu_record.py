"""The GPU suite's record as JSON values, as a table for people and as a Markdown page.

The rule kept here: what is shown follows from the record's rows; a must that was not measured is
shown as such and never counts as held.
"""

from __future__ import annotations

import datetime
import html
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

import portattn
from portattn.bench.gpu_cells import GROUPS
from portattn.bench.gpu_contenders import COPY, FLASH_4

_UNITS = (
    ("tflops", "TFLOP/s", "{:.0f}"),
    ("tb_per_second", "TB/s of K and V (the copy's: read and written)", "{:.2f}"),
)
_WORDS = {True: "yes", False: "**no**", None: "not measured"}


def record(
    backend: str,
    suite: str,
    fingerprint: Mapping[str, Any],
    rounds: int,
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The whole record; one that was interrupted has the rows that were done."""
    return {
        "kind": "bench",
        "suite": suite,
        "version": portattn.__version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": backend,
        "fingerprint": dict(fingerprint),
        "rounds": rounds,
        "cells": list(rows),
        "summary": summary(rows),
    }


def versions() -> dict[str, Any]:
    """What the peers' kernels come from."""
    import torch

    from portattn.machine import Machine

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "torch": torch.__version__,
        "triton": Machine.here().version("triton"),
        "cudnn": cudnn and f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}",
        FLASH_4: Machine.here().version(FLASH_4),
    }


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How many musts hold, and the worst cell of each measure that a must is about."""
    rows = list(rows)
    musts = [(row["kind"], must) for row in rows for must in row["musts"]]
    states = [must["ok"] for _, must in musts]
    found: dict[str, Any] = {"musts that hold": f"{states.count(True)} of {len(states)}"}
    if states.count(None):
        found["musts not measured"] = states.count(None)
    values: dict[tuple[str, str, bool], list[float]] = {}
    for kind, must in musts:
        if must["got"] is not None:
            key = (kind, must["measure"], must["at_most"])
            values.setdefault(key, []).append(must["got"])
    for (kind, measure, at_most), got in values.items():
        if len(got) == 1:
            found[f"{kind}: {measure}"] = got[0]
            continue
        if "over" in measure:
            mean = math.exp(statistics.fmean(math.log(max(x, 1e-9)) for x in got))
            found[f"{kind}: {measure}, geometric mean"] = round(mean, 3)
        worst = ("highest", max(got)) if at_most else ("lowest", min(got))
        found[f"{kind}: {measure}, {worst[0]} cell"] = worst[1]
    copies = [r["tb_per_second"][COPY] for r in rows if COPY in r.get("tb_per_second", {})]
    if copies:
        found["copy, TB/s read and written"] = statistics.median(copies)
    return found


def table(rows: Iterable[Mapping[str, Any]], backend: str) -> Table:
    """A line for each must."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("cell")
    made.add_column(f"{backend}, ms", justify="right")
    made.add_column("must")
    made.add_column("got", justify="right")
    made.add_column("ok")
    colours = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]not measured[/]"}
    for row in rows:
        ours = row.get("median_seconds", {}).get(backend)
        first = (row["cell"], "-" if ours is None else f"{ours * 1e3:.3f}")
        for must in row["musts"]:
            made.add_row(*first, must["must"], _number(must["got"]), colours[must["ok"]])
            first = ("", "")
    return made


def remarks(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The notes of some rows, each once, with the cell or the number of cells that it is about."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in notes(row):
            about.setdefault(note, []).append(row["cell"])
    return [
        f"{note} ({cells[0] if len(cells) == 1 else f'{len(cells)} cells'})"
        for note, cells in about.items()
    ]


def markdown(made: Mapping[str, Any]) -> str:
    """The record as a page: what holds, then one table a group."""
    backend, rows = made["backend"], made["cells"]
    known = {k: v for k, v in made["fingerprint"].items() if v and k != "kernel_hash"}
    facts = (f"{k} {', '.join(v) if isinstance(v, list) else v}" for k, v in sorted(known.items()))
    lines = [
        f"# {_plain(backend)} on suite {_plain(made['suite'])}, {made['created'][:10]}",
        "",
        f'bfloat16, random normal input, {made["rounds"]} interleaved rounds, medians; "over" is '
        "the median over the rounds of time by time. Written by `portattn bench`.",
        "",
        _plain("; ".join(facts)),
        "",
        *_markdown(("measured", "value"), [(k, _number(v)) for k, v in made["summary"].items()]),
        "",
    ]
    for kind, about in GROUPS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        if chosen:
            lines += [f"## {kind}", "", *_group(chosen, about), ""]
    return "\n".join(lines).rstrip() + "\n"


def notes(row: Mapping[str, Any]) -> list[str]:
    """What has to be said about a row: why it did not run, and who was not timed as the rest."""
    found = [f"{row['status']}: {row['error']}"] if "error" in row else []
    for name, state in row.get("contenders", {}).items():
        if state["state"] == "wrong":
            found.append(f"{name} is wrong: relative error {state['error']}")
        elif state["state"] != "timed":
            found.append(f"{name} {state['state']}: {state['why']}")
        elif state["by"].startswith("events: "):
            found.append(f"{name} by {state['by']}")
    return [*found, *row.get("notes", ())]


def _group(rows: Sequence[Mapping[str, Any]], about: str) -> list[str]:
    names = list(dict.fromkeys(n for row in rows for n in row.get("median_seconds", {})))
    key, unit, form = next(
        (u for u in _UNITS if any(u[0] in row for row in rows)), ("", "ms", "{:.3f}")
    )
    lines = [_plain(f"{about}; {unit}" if names else about) + ".", ""]
    body = []
    for row in rows:
        scaled = {n: s * 1e3 for n, s in row.get("median_seconds", {}).items()}
        values = row.get(key, {}) if key else scaled
        cells = [form.format(values[n]) if n in values else "–" for n in names]
        musts = row["musts"]
        body.append(
            (
                row["cell"].removeprefix(f"{row['kind']} "),
                *cells,
                "; ".join(m["must"] for m in musts),
                "; ".join(_number(m["got"]) for m in musts),
                "; ".join(_WORDS[m["ok"]] for m in musts),
            )
        )
    lines += _markdown(("cell", *names, "must", "got", "ok"), body)
    listed = [f"- {_plain(remark)}" for remark in remarks(rows)]
    return [*lines, "", *listed] if listed else lines


def _markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(map(_plain, row))} |" for row in rows),
    ]


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}".rstrip("0").rstrip(".")


def _plain(value: Any) -> str:
    """One line that neither a table nor HTML takes for anything else."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "\\|")
