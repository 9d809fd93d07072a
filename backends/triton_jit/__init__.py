"""Triton: kernels compiled from Python, portable to every GPU that Triton serves, and a second
mechanism for Hopper.

The rule kept here: this module decides and plans without importing Triton or torch; the arrays are
touched by `launch`, on the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from portattn.backends.triton_jit import config, interpreted, overrides, planner
from portattn.backends.triton_jit.config import Config
from portattn.contract import Call, Plan, Reason, Unsupported, cuda_reasons, device_reasons
from portattn.machine import Machine
from portattn.problem import Problem
from portattn.tuning import Step, Tuned


class _Backend:
    name = "triton"
    packages = ("triton", "torch")

    @property
    def device_kinds(self) -> tuple[str, ...]:
        """The host under Triton's interpreter (TRITON_INTERPRET=1), else CUDA devices."""
        return ("cpu",) if interpreted.on() else ("cuda",)

    @property
    def claims(self) -> Mapping[str, Any]:
        """What the conformance suite cannot ask of `why_not`: accumulators of tensor cores drop
        low bits; a sequence has the same bits alone and in a batch; and the partial results of a
        split are this share of a call of 1024 tokens at most."""
        claims = {"acc": "fp32-rz", "batch_invariant": True, "kappa": 0.5, "kappa_backward": 1.5}
        if interpreted.on():
            claims = {**claims, "acc": "fp32", "simulated": True}
        return MappingProxyType(claims)

    def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
        reasons = [*self._machine_reasons(machine), *device_reasons(problem, self.device_kinds)]
        if problem is not None:
            reasons += planner.reasons(problem, _device(problem, machine))
        return tuple(reasons)

    def plan(self, problem: Problem, machine: Machine) -> Plan:
        return planner.plan(problem, _device(problem, machine), machine.version("triton"))

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        from portattn.backends.triton_jit.launch import run

        made = plan.config
        if not isinstance(made, Config) or made.limits != config.limits():
            # A plan can be older than the limits that the process is held to now.
            machine = Machine.here()
            against = self.why_not(problem, machine)
            if against:
                raise Unsupported(f"backend={self.name!r} does not take it", {self.name: against})
            made = self.plan(problem, machine).config
        run(problem, made, call)

    def force_mechanism(self, name: str | None) -> None:
        """Hold this process to ``portable`` or ``hopper``; None lifts it. What hopper does not
        cover runs on portable all the same."""
        config.hold(mechanism=name)

    def limit_shared_memory(self, limit: int | None) -> None:
        """Plan as if a thread block could have so many bytes of shared memory and no more; None
        lifts it."""
        config.hold(shared_memory=limit)

    def held(self) -> dict[str, Any]:
        """What this process holds the planner to: evidence made so speaks for that alone."""
        held = config.limits()
        devices = Machine.here().cuda.devices
        return {
            "mechanism": held.mechanism,
            "shared_memory": held.shared_memory,
            "tuned": overrides.digest(devices[0].name) if devices else None,
        }

    def tune(
        self,
        head_dims: Sequence[int],
        dtypes: Sequence[str],
        kinds: Sequence[str],
        report: Callable[[Step], None],
    ) -> Tuned:
        """See `portattn.tune_command.Tunable`: the portable mechanism's forward tiles."""
        from portattn.backends.triton_jit.tune import tune

        return tune(head_dims, dtypes, kinds, report)

    def kernel_files(self) -> tuple[str, ...]:
        folder = Path(__file__).parent
        return tuple(str(p) for p in sorted((*folder.glob("*.py"), *folder.glob("tuned/*.json"))))

    def _machine_reasons(self, machine: Machine) -> tuple[Reason, ...]:
        if not interpreted.on():
            return cuda_reasons(machine, "triton", "triton", "triton")
        if machine.version("triton") is None or machine.version("torch") is None:
            return (
                Reason(
                    "package_missing",
                    "triton",
                    "not installed",
                    "triton and torch",
                    'pip install "portattn[triton]"',
                ),
            )
        return ()


def _device(problem: Problem | None, machine: Machine) -> planner.Target:
    return planner.target(problem, machine)


BACKEND = _Backend()
