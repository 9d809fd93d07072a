"""The GPU suite: every cell checked, timed and held against its musts.

The rule kept here: a contender's time counts after its result was found right; a cell that cannot
run says why in its row, and the suite goes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from portattn.bench.gpu_cells import (
    EXTRA_MIB,
    HOST_MICROSECONDS,
    MEMORY_BOUND,
    OF_COPY,
    OVER_BEST,
    PORTABLE_OVER_FLASH,
    GpuCell,
)
from portattn.bench.gpu_contenders import (
    COPY,
    FLASH,
    PORTABLE,
    Absent,
    Inputs,
    contenders,
    mechanism,
    needed_bytes,
)
from portattn.bench.gpu_first_call import first_calls
from portattn.bench.gpu_reference import LIMIT, relative_error
from portattn.bench.gpu_timing import Device, Run, measure
from portattn.bench.timing import ratio
from portattn.contract import Backend
from portattn.machine import Machine

HOST_CALLS = 250
HOST_WARM = 20
LONG_ROUNDS = 2  # a call takes seconds; the check before was its warm-up

TIMED, WRONG, FAILED, ABSENT = "timed", "wrong", "failed", "absent"


def why_not(backend: Backend, machine: Machine) -> str:
    """What the suite needs and this machine lacks; empty where it can run."""
    if "cuda" not in backend.device_kinds:
        return f"a backend of CUDA devices; {backend.name!r} is one of {backend.device_kinds}"
    if not machine.cuda.devices:
        return f"a CUDA device: {machine.cuda.problem}"
    if not machine.findable("torch"):
        return "torch, whose tensors and kernels it times: it is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"a torch that sees the CUDA device; torch {torch.__version__} does not"
    reasons = backend.why_not(None, machine)
    if reasons:
        return f"backend {backend.name!r} to be ready: {'; '.join(map(str, reasons))}"
    return ""


def rows(
    cells: Sequence[GpuCell], backend: Backend, rounds: int, device: Device
) -> Iterator[dict[str, Any]]:
    """One row of the record for each cell, as it is done."""
    for cell in cells:
        start = time.perf_counter()
        row = described(cell)
        # A kernel that fails here may not take the cells after it with it: whatever it raises is
        # what this row has to say.
        try:
            row |= _first_call(cell, backend, device) or _timed(cell, backend, rounds, device)
        except Exception as error:  # noqa: BLE001
            row |= {"status": FAILED, "error": _text(error)}
        row["musts"] = musts(cell, row.get("measured", {}))
        row["wall_seconds"] = round(time.perf_counter() - start, 2)
        device.tidy()
        yield row


def described(cell: GpuCell) -> dict[str, Any]:
    """The part of a row that is known before anything runs."""
    return {
        "cell": cell.name,
        "kind": cell.kind,
        "dtype": "bfloat16",
        "head_dim": cell.head_dim,
        "batch": cell.batch,
        "seq_q": cell.seq_q,
        "seq_k": cell.seq_k,
        "heads_q": cell.heads_q,
        "heads_k": cell.heads_k,
        "causal": cell.causal,
        "status": TIMED,
    }


def musts(cell: GpuCell, measured: Mapping[str, float]) -> list[dict[str, Any]]:
    """What the cell must reach, what it got and whether that holds; None where not measured."""
    found = []
    for must in cell.musts:
        got = measured.get(must.measure)
        found.append(
            {
                "must": str(must),
                "measure": must.measure,
                "limit": must.limit,
                "at_most": must.at_most,
                "got": got,
                "ok": None if got is None else must.holds(got),
            }
        )
    return found


def measures(
    cell: GpuCell, seconds: Mapping[str, list[float]], backend: str, copy_bytes: int
) -> dict[str, float]:
    """The numbers that musts are about, out of seconds per call, round by round."""
    portable = f"{backend}-{PORTABLE}"
    found: dict[str, float] = {}
    if portable in seconds and FLASH in seconds:
        found[PORTABLE_OVER_FLASH] = ratio(seconds[portable], seconds[FLASH])
    if backend not in seconds:
        return found
    ours = seconds[backend]
    peers = {n: s for n, s in seconds.items() if n not in (backend, portable, COPY)}
    over = {name: ratio(ours, theirs) for name, theirs in peers.items()}
    found |= {f"over {name}": value for name, value in over.items()}
    if over:
        found[OVER_BEST] = min(over.values())
    if COPY in seconds:
        found[OF_COPY] = ratio(ours, seconds[COPY]) * cell.kv_bytes / copy_bytes
    if cell.kind == "host":
        found[HOST_MICROSECONDS] = statistics.median(ours) * 1e6
    return found


# ---- one cell ------------------------------------------------------------------------------------
def _first_call(cell: GpuCell, backend: Backend, device: Device) -> dict[str, Any] | None:
    return first_calls(cell, backend.name, device.name) if cell.kind == "first-call" else None


def _timed(cell: GpuCell, backend: Backend, rounds: int, device: Device) -> dict[str, Any]:
    needed, free = needed_bytes(cell, device), device.free_bytes()
    if needed > free:
        return {
            "status": "NOT_RUN",
            "error": f"needs {needed / 2**30:.1f} GiB of device memory; {free / 2**30:.1f} free",
        }
    inputs = Inputs.of(cell, device)
    runs: dict[str, Run] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, build in contenders(cell, backend, device).items():
        states[name], run = _admitted(name, build, cell, inputs, backend, device)
        if run is not None:
            runs[name] = run
    if cell.kind == "host":
        seconds = measure(runs, min(rounds, 3), device.host_clock, count=HOST_CALLS, warm=HOST_WARM)
    elif cell.kind == "long":
        seconds = measure(runs, min(rounds, LONG_ROUNDS), device.clock, count=1, warm=0)
    else:
        seconds = measure(runs, rounds, device.clock)
    for name in set(seconds) - {COPY}:
        seconds[name] = [s / len(inputs.copies) for s in seconds[name]]
    measured = measures(cell, seconds, backend.name, device.copy_bytes)
    if backend.name in runs and "extra_mib" in states[backend.name]:
        measured[EXTRA_MIB] = states[backend.name]["extra_mib"]
    medians = {n: statistics.median(s) for n, s in seconds.items() if s}
    row: dict[str, Any] = {
        "contenders": states,
        "copies": len(inputs.copies),
        "seconds": {n: [round(s, 9) for s in samples] for n, samples in seconds.items()},
        "median_seconds": {n: round(s, 9) for n, s in medians.items()},
        "ratio": {
            name.removeprefix("over "): round(value, 3)
            for name, value in measured.items()
            if name.startswith("over ") and name != OVER_BEST
        },
        "measured": {name: round(value, 3) for name, value in measured.items()},
    }
    if cell.kind in MEMORY_BOUND:
        weights = {n: device.copy_bytes if n == COPY else cell.kv_bytes for n in medians}
        row["tb_per_second"] = {n: round(weights[n] / s / 1e12, 3) for n, s in medians.items()}
    elif cell.kind != "host":
        row["tflops"] = {n: round(cell.flops / s / 1e12, 1) for n, s in medians.items()}
    if backend.name in runs:
        row["mechanism"] = mechanism(cell, backend.name, inputs)
    return row


def _admitted(
    name: str,
    build: Callable[[GpuCell, Inputs], Run],
    cell: GpuCell,
    inputs: Inputs,
    backend: Backend,
    device: Device,
) -> tuple[dict[str, Any], Run | None]:
    """What is to be said of a contender, and its call if that may be timed."""
    try:
        run = build(cell, inputs)
        if name == COPY:
            return {"state": TIMED, "by": "events"}, run
        state: dict[str, Any] = {"state": TIMED, "by": "host" if cell.kind == "host" else "events"}
        if cell.kind == "long":
            state["extra_mib"], result = _extra(name, run, cell, backend, device)
        else:
            result = run()
        error = relative_error(cell, inputs.copies[0], result, inputs.dout)
        if error < LIMIT and cell.kind in MEMORY_BOUND:
            run, state["by"] = _captured(run, device)
            if state["by"] == "graph":
                run().fill_(float("nan"))  # the replay has to write it again
                error = relative_error(cell, inputs.copies[0], run(), inputs.dout)
        state["error"] = float(f"{error:.3g}")
        if not error < LIMIT:
            return {**state, "state": WRONG}, None
        return state, run
    except Absent as reason:
        return {"state": ABSENT, "why": str(reason)}, None
    except Exception as problem:  # noqa: BLE001  (a peer's failure is a finding about the peer)
        return {"state": FAILED, "why": _text(problem)}, None


def _captured(run: Run, device: Device) -> tuple[Run, str]:
    """The call as a graph where it can be captured, and how it is timed."""
    try:
        return device.capture(run), "graph"
    except Exception as problem:  # noqa: BLE001  (any failure to capture has the same consequence)
        return run, f"events: capture failed: {_text(problem)}"


def _extra(
    name: str, run: Run, cell: GpuCell, backend: Backend, device: Device
) -> tuple[float, Any]:
    """MiB that one call held beyond its result. The backend's was there before, a peer's was not;
    nobody was asked for an LSE, so what a call keeps of one counts."""
    release = getattr(backend, "release", None)
    if release is not None:
        release()
    held, result = device.extra_bytes(run)
    if name != backend.name:
        held -= cell.q_bytes
    return round(held / 2**20, 1), result


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:3])[:300]}" if lines else type(error).__name__
