"""How long the first call of a process takes: with no kernel compiled, and from the disk cache.

The rule kept here: each number comes from a process of its own. Importing the frameworks and
making the CUDA context are not counted; all that the first call itself does is, also asking the
driver which devices there are, which a process does once. Python's modules are compiled, as an
installer leaves them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from portattn.bench.gpu_cells import CACHED_SECONDS, COLD_SECONDS, GpuCell

SECONDS = 120  # before a child is given up
_PROGRAM = """
import contextlib, importlib, json, sys, time
import torch, portattn, portattn.api
from portattn.machine import Machine
from portattn.registry import find_backends
name, device, batch, heads_q, heads_k, seq, dim, causal = json.loads(sys.argv[1])
for package in find_backends()[name].backend.packages:
    with contextlib.suppress(ImportError):
        importlib.import_module(package)
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
make = lambda heads: torch.randn(batch, heads, seq, dim, device=device).bfloat16()
q, k, v = make(heads_q), make(heads_k), make(heads_k)
wait()
start = time.perf_counter()
Machine.here().cuda
asked = time.perf_counter()
out = portattn.attention(q, k, v, layout="bhsd", causal=causal, backend=name)
wait()
end = time.perf_counter()
print(json.dumps({"seconds": end - start, "driver_seconds": asked - start}))
"""


def first_calls(cell: GpuCell, backend: str, device: str) -> dict[str, Any]:
    """The part of a row that this cell adds: ``measured`` and what of it was the driver's."""
    with tempfile.TemporaryDirectory() as cache:
        _child(cell, backend, device, cache, "first")  # leaves the modules compiled
        cold = _child(cell, backend, device, cache, "kernels")
        cached = _child(cell, backend, device, cache, "kernels")
    return {
        "measured": {
            COLD_SECONDS: round(cold["seconds"], 3),
            CACHED_SECONDS: round(cached["seconds"], 3),
        },
        "notes": [
            f"of it, asking the driver for its devices: {cold['driver_seconds']:.3f} s cold, "
            f"{cached['driver_seconds']:.3f} s from the disk cache"
        ],
    }


def _child(cell: GpuCell, backend: str, device: str, cache: str, kernels: str) -> dict[str, float]:
    """What one process says, whose kernels stay in the folder ``kernels`` of ``cache``."""
    asked = [
        backend, device, cell.batch, cell.heads_q, cell.heads_k, cell.seq_q, cell.head_dim,
        cell.causal,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(asked)],
        env={
            # A checkout's folder, or an installation's, may not be written to.
            **{n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPYCACHEPREFIX": os.path.join(cache, "python"),  # noqa: PTH118
            "TRITON_CACHE_DIR": os.path.join(cache, kernels),  # noqa: PTH118
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
