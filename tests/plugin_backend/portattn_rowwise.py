"""A backend outside portattn: dense forward attention in NumPy, one query row at a time.

The rule kept here: what it does not do, it refuses by name; every optional part of the contract
that a problem uses and this file does not know is a reason.
"""

from __future__ import annotations

from portattn.contract import Call, Plan, Reason, device_reasons
from portattn.machine import Machine
from portattn.problem import Problem

KNOWN = ("gqa", "value_head_dim", "return_lse", "deterministic")


class Rowwise:
    """softmax(scale * K q) V for each row q, in float64."""

    name = "rowwise"
    device_kinds = ("cpu",)
    packages = ("numpy",)

    def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
        if problem is None:
            return ()
        unknown = [feature for feature in problem.features() if feature not in KNOWN]
        return (
            *(Reason("feature", name, "used", "not done here") for name in unknown),
            *device_reasons(problem, self.device_kinds),
        )

    def plan(self, problem: Problem, machine: Machine) -> Plan:
        return Plan("rows", (("block_q", 1),), workspace_bytes=8 * problem.seq_k)

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        import numpy as np

        from portattn.arrays import as_numpy

        q, k, v, out = (as_numpy(x) for x in (call.q, call.k, call.v, call.out))
        if problem.layout == "bshd":
            q, k, v, out = (x.swapaxes(1, 2) for x in (q, k, v, out))
        lse = None if call.lse is None else as_numpy(call.lse)
        for b, h, i in np.ndindex(q.shape[:3]):
            keys, values = k[b, h // problem.group], v[b, h // problem.group]
            score = problem.scale * (keys.astype(float) @ q[b, h, i].astype(float))
            top = score.max(initial=-np.inf)
            weight = np.exp(score - top)
            total = weight.sum()
            out[b, h, i] = weight @ values.astype(float) / total if len(keys) else 0.0
            if lse is not None:
                lse[b, h, i] = top + np.log(total) if len(keys) else -np.inf

    def kernel_files(self) -> tuple[str, ...]:
        return (__file__,)


BACKEND = Rowwise()
