"""CuPy: CUDA C++ compiled at run time and launched through CuPy's RawModule.

The rule kept here: what stands in the way on this machine is said, all of it, without importing
the framework. This release ships no kernel of this backend, which is the first reason it gives.
"""

from __future__ import annotations

from portattn.contract import Call, Plan, Reason, Unsupported, cuda_reasons, device_reasons
from portattn.machine import Machine
from portattn.problem import Problem


class _Backend:
    name = "cupy"
    device_kinds = ("cuda",)
    packages = ("cupy", "cuda-bindings")

    def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
        return (
            Reason(
                "no_kernel",
                "backend",
                self.name,
                "a release that ships its kernels",
                "this release has those of 'numpy' and 'triton'",
            ),
            *cuda_reasons(machine, "cupy", "cupy", "cupy"),
            *device_reasons(problem, self.device_kinds),
        )

    def plan(self, problem: Problem, machine: Machine) -> Plan:
        raise Unsupported("no plan", {self.name: self.why_not(problem, machine)})

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        raise Unsupported("nothing to run", {self.name: self.why_not(problem, Machine.here())})

    def kernel_files(self) -> tuple[str, ...]:
        return (__file__,)


BACKEND = _Backend()
