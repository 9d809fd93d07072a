"""Numba CUDA: kernels compiled from Python by numba-cuda.

The rule kept here: what stands in the way on this machine is said, all of it, without importing
the framework. This release ships no kernel of this backend, which is the first reason it gives.
"""

from __future__ import annotations

from portattn.contract import Call, Plan, Reason, Unsupported, cuda_reasons, device_reasons
from portattn.machine import Machine
from portattn.problem import Problem


class _Backend:
    name = "numba"
    device_kinds = ("cuda",)
    packages = ("numba-cuda", "numba")

    def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
        return (
            Reason(
                "no_kernel",
                "backend",
                self.name,
                "a release that ships its kernels",
                "this release has those of 'numpy' and 'triton'",
            ),
            *cuda_reasons(machine, "numba-cuda", "numba.cuda", "numba"),
            *device_reasons(problem, self.device_kinds),
        )

    def plan(self, problem: Problem, machine: Machine) -> Plan:
        raise Unsupported("no plan", {self.name: self.why_not(problem, machine)})

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        raise Unsupported("nothing to run", {self.name: self.why_not(problem, Machine.here())})

    def kernel_files(self) -> tuple[str, ...]:
        return (__file__,)


BACKEND = _Backend()
