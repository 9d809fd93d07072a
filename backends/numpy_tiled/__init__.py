"""NumPy: tiled attention on the host's cores, the whole contract in every dtype.

The rule kept here: this module decides and plans without importing NumPy; the arrays are touched
by `launch`, on the first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from portattn.backends.numpy_tiled import config
from portattn.contract import Call, Plan, Reason, device_reasons
from portattn.machine import Machine
from portattn.problem import Problem


class _Backend:
    name = "numpy"
    device_kinds = ("cpu",)
    packages = ("numpy", "ml_dtypes", "threadpoolctl")

    claims: Mapping[str, Any] = MappingProxyType({"p_storage": "fp32", "kappa": 0.3})
    """What the conformance suite cannot ask of `why_not`: weights are never rounded to the
    input's dtype, and a thread's tiles are this share of a call of 1024 tokens at most."""

    def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
        reasons = [*device_reasons(problem, self.device_kinds)]
        if problem is not None and problem.precision != "ieee":
            reasons.append(
                Reason(
                    "precision",
                    "precision",
                    problem.precision,
                    "ieee",
                    "a CPU has no tf32; leave precision out for true float32 products",
                )
            )
        return tuple(reasons)

    def plan(self, problem: Problem, machine: Machine) -> Plan:
        tiles = config.choose(problem)
        threads = config.thread_count()
        return Plan(
            mechanism="tiled",
            tile=(("block_q", tiles.block_q), ("block_k", tiles.block_k)),
            workspace_bytes=config.workspace_bytes(tiles, problem, threads),
            note=f"{threads} thread{'s' if threads > 1 else ''}",
            config=tiles,
        )

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        from portattn.backends.numpy_tiled.launch import run

        run(problem, plan.config or config.choose(problem), call)

    def release(self) -> None:
        """Free the tile buffers that threads keep between calls (see `Plan.workspace_bytes`)."""
        from portattn.backends.numpy_tiled import launch

        launch.release()

    def kernel_files(self) -> tuple[str, ...]:
        return tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))


BACKEND = _Backend()
