"""`portattn bench`: a backend against its peers, as a table and as a JSON record.

The rule kept here: what is wrong with the question is said before anything runs.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

import portattn
from portattn.bench import gpu_record, gpu_suite
from portattn.bench.cells import Cell, cpu_suite
from portattn.bench.contenders import GEMM, PEERS, YARDSTICKS, Inputs, build
from portattn.bench.gpu_cells import GROUPS, h200_suite
from portattn.bench.gpu_timing import CudaDevice
from portattn.bench.timing import measure, ratio
from portattn.certificate import fingerprint
from portattn.contract import Backend
from portattn.machine import Machine
from portattn.registry import find_backends
from portattn.report import console

SUITES = {"cpu": "numpy", "h200": "triton"}  # and the backend that each is for first of all


@click.command("bench")
@click.option(
    "--suite",
    type=click.Choice(list(SUITES)),
    default="cpu",
    show_default=True,
    help="cpu: float32 on the host. h200: bfloat16 on a CUDA device, held against what an H200 "
    "has to reach.",
)
@click.option("--backend", help="The backend to time.  [default: numpy; triton for h200]")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(list(PEERS)),
    help="A peer of the cpu suite; repeatable. The h200 suite has all of its own.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    type=click.Choice(list(GROUPS)),
    help="Only this group of the h200 suite; repeatable.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Interleaved rounds a cell.",
)
@click.option("--only", default="", help="Only cells whose name has this text.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write the JSON record here; the h200 suite also writes it as .md.",
)
def cli(
    suite: str,
    backend: str | None,
    peers: tuple[str, ...],
    groups: tuple[str, ...],
    rounds: int,
    only: str,
    output: Path | None,
) -> None:
    """Time a backend against peers, interleaved in one process; report ratios.

    A number above 1 means that the backend is that many times as fast as the peer. "of sgemm" is
    the backend's rate of floating-point operations over that of a large float32 product of NumPy;
    "of copy" its rate of reading keys and values over the device's rate of copying. The peer
    tile-products is no attention but its products alone, in tiles, by NumPy's BLAS: what is left
    for everything else shows in the distance from there.
    """
    backend = backend or SUITES[suite]
    found = find_backends().get(backend)
    if found is None or found.backend is None:
        raise click.UsageError(f"unknown backend {backend!r}; there are {sorted(find_backends())}")
    if suite == "h200":
        if peers:
            raise click.UsageError("--peer is of the cpu suite")
        if output is not None and output.suffix == ".md":
            raise click.UsageError(f"--output {output}: want a .json; a .md comes with it")
        _gpu(suite, found.backend, groups, rounds, only, output)
    else:
        if groups:
            raise click.UsageError("--group is of the h200 suite")
        _cpu(found.backend, peers, rounds, only, output)


def _gpu(
    suite: str,
    backend: Backend,
    groups: tuple[str, ...],
    rounds: int,
    only: str,
    output: Path | None,
) -> None:
    cells = [c for c in h200_suite() if only in c.name and (not groups or c.kind in groups)]
    if not cells:
        raise click.UsageError(f"no cell of {groups or 'any group'} has {only!r} in its name")
    problem = gpu_suite.why_not(backend, Machine.here())
    if problem:
        raise click.UsageError(f"--suite {suite} needs {problem}")
    device = CudaDevice()
    known = {**fingerprint(backend, Machine.here()), **gpu_record.versions()}
    screen, rows = console(), []
    with screen.status(cells[0].name) as status:
        for row in gpu_suite.rows(cells, backend, rounds, device):
            rows.append(row)
            status.update(cells[min(len(rows), len(cells) - 1)].name)
            # After each cell: a run that is cut short leaves what it measured.
            record = gpu_record.record(backend.name, suite, known, rounds, rows)
            if output is not None:
                _write(record, output)
                output.with_suffix(".md").write_text(gpu_record.markdown(record), "utf-8")
    screen.print(gpu_record.table(rows, backend.name))
    for remark in gpu_record.remarks(rows):
        screen.print(remark, markup=False)
    for line, value in record["summary"].items():
        screen.print(f"{line}: {value}")
    if output is not None:
        screen.print(f"record: {output}, {output.with_suffix('.md')}")


def _cpu(
    found: Backend, peers: tuple[str, ...], rounds: int, only: str, output: Path | None
) -> None:
    backend = found.name
    cells = [c for c in cpu_suite() if only in c.name]
    if not cells:
        raise click.UsageError(f"no cell has {only!r} in its name")
    screen = console()
    rows = []
    for cell in cells:
        with screen.status(cell.name):
            rows.append(_row(cell, backend, peers, rounds))
    summary = _summary(rows, peers)
    record = {
        "kind": "bench",
        "version": portattn.__version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": backend,
        "fingerprint": {
            **fingerprint(found, Machine.here()),
            "torch": Machine.here().version("torch") if "torch-sdpa" in peers else None,
            "blas": _blas(),
        },
        "rounds": rounds,
        "cells": rows,
        "summary": summary,
    }
    screen.print(_table(rows, backend, peers))
    for line, value in summary.items():
        screen.print(f"{line}: {value}")
    if output is not None:
        _write(record, output)
        screen.print(f"record: {output}")


def _write(record: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def _row(cell: Cell, backend: str, peers: tuple[str, ...], rounds: int) -> dict[str, Any]:
    inputs = Inputs.of(cell, seed=cell.head_dim + cell.seq_k)
    names = [backend, *(p for p in peers if _fits(p, cell))]
    if cell.kind == "prefill":
        names.append("sgemm")
    runs = {name: build(name, cell, inputs) for name in dict.fromkeys(names)}
    _agree(cell, {n: r for n, r in runs.items() if n not in YARDSTICKS})
    seconds = measure(runs, rounds)
    ours = seconds[backend]
    row: dict[str, Any] = {
        "cell": cell.name,
        "kind": cell.kind,
        "head_dim": cell.head_dim,
        "seq_k": cell.seq_k,
        "causal": cell.causal,
        "seconds": {name: [round(s, 9) for s in samples] for name, samples in seconds.items()},
        "median_seconds": {n: round(statistics.median(s), 9) for n, s in seconds.items()},
        "ratio": {p: round(ratio(ours, seconds[p]), 3) for p in seconds if p in peers},
    }
    if {"tile-products", "torch-sdpa"} <= seconds.keys():
        products = ratio(seconds["tile-products"], seconds["torch-sdpa"])
        row["tile_products_over_torch_sdpa"] = round(products, 3)
    if "sgemm" in seconds:
        gemm = ratio(ours, seconds["sgemm"]) * cell.flops / (2.0 * GEMM**3)
        row["of_sgemm"] = round(gemm, 3)
        row["gflops"] = round(cell.flops / statistics.median(ours) / 1e9, 1)
    return row


def _fits(peer: str, cell: Cell) -> bool:
    # The naive product over a long cache is what the decode cells measure in torch already.
    return peer != "sgemm" and (cell.kind == "prefill" or peer not in ("naive-numpy", *YARDSTICKS))


def _agree(cell: Cell, runs: dict[str, Any]) -> None:
    """A contender that computes something else is not timed."""
    results = {name: np.array(run()) for name, run in runs.items()}
    first_name, first = next(iter(results.items()))
    for name, result in results.items():
        worst = float(np.abs(result - first).max())
        if not worst <= 1e-4:
            raise click.ClickException(
                f"{cell.name}: {name} and {first_name} differ by {worst:.3g}"
            )


def _summary(rows: list[dict[str, Any]], peers: tuple[str, ...]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    prefill = [r for r in rows if r["kind"] == "prefill"]
    for peer in peers:
        ratios = [r["ratio"][peer] for r in prefill if peer in r["ratio"]]
        if ratios:
            summary[f"prefill over {peer}, geometric mean"] = _mean(ratios)
            summary[f"prefill over {peer}, lowest cell"] = min(ratios)
        ratios = [r["ratio"][peer] for r in rows if r["kind"] == "decode" and peer in r["ratio"]]
        if ratios:
            summary[f"decode over {peer}, lowest cell"] = min(ratios)
    key = "tile_products_over_torch_sdpa"
    ratios = [r[key] for r in prefill if key in r]
    if ratios:
        summary["tile-products over torch-sdpa, geometric mean"] = _mean(ratios)
    for dim in sorted({r["head_dim"] for r in prefill}):
        share = [r["of_sgemm"] for r in prefill if r["head_dim"] == dim and r["seq_k"] == 4096]
        if share:
            summary[f"of sgemm at D={dim}, N=4096, lowest cell"] = min(share)
    for row in rows:
        if row["kind"] == "overhead":
            ours = next(iter(row["median_seconds"].values()))
            summary["one tiny call, microseconds"] = round(ours * 1e6, 1)
    return summary


def _mean(ratios: list[float]) -> float:
    """Geometric."""
    return round(math.exp(statistics.fmean(math.log(x) for x in ratios)), 3)


def _table(rows: list[dict[str, Any]], backend: str, peers: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell")
    table.add_column(f"{backend}, ms", justify="right")
    for peer in peers:
        table.add_column(f"over {peer}", justify="right")
    table.add_column("GFLOP/s", justify="right")
    table.add_column("of sgemm", justify="right")
    for row in rows:
        ratios = [f"{row['ratio'][p]:.2f}" if p in row["ratio"] else "-" for p in peers]
        table.add_row(
            row["cell"],
            f"{row['median_seconds'][backend] * 1e3:.3f}",
            *ratios,
            f"{row['gflops']:.0f}" if "gflops" in row else "-",
            f"{row['of_sgemm']:.2f}" if "of_sgemm" in row else "-",
        )
    return table


def _blas() -> list[str]:
    from threadpoolctl import threadpool_info

    found = (i for i in threadpool_info() if i["user_api"] == "blas")
    return sorted(
        f"{i['internal_api']} {i['version']} {i.get('architecture', '')} x{i['num_threads']}"
        for i in found
    )
