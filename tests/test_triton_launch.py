"""Launches without a GPU: what the first call hands to Triton, and what the later ones hand to what
Triton returned, are the same arguments in the kernel's own order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

PROGRAM = r"""
import inspect, json, torch
from portattn.arrays import recognise
from portattn.backends.triton_jit import config, dispatch, forward, hopper_forward, hopper_policy
from portattn.backends.triton_jit import launch, launch_backward, launch_hopper
from portattn.backends.triton_jit import launch_portable, planner
from portattn.contract import Call
from portattn.machine import Cuda, Device, Machine
from portattn.problem import Problem

said = []


class Kernel:
    # records what it is launched with, bound to the parameters of the kernel it stands for
    def __init__(self, name, real):
        self.name, self.fn, self.arg_names = name, real.fn, real.arg_names

    def __getitem__(self, grid):
        def first(*args, **named):
            for option in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion"):
                named.pop(option, None)
            bound = inspect.signature(self.fn).bind(*args, **named).arguments
            said.append((self.name, "first", list(grid), shown(bound.values())))
            return Compiled(self.name, self.arg_names)

        return first


class Compiled:
    def __init__(self, name, arg_names):
        self.name, self.count = name, len(arg_names)

    def __getitem__(self, grid):
        def later(*args):
            assert len(args) == self.count, (self.name, len(args), self.count)
            said.append((self.name, "later", list(grid), shown(args)))

        return later


def shown(values):
    plain = (bool, int, float, str, type(None))
    return [x if isinstance(x, plain) else type(x).__name__ for x in values]


def stand_in(module, name):
    setattr(module, name, Kernel(name, getattr(module, name)))


launch_portable.forward_kernel = Kernel("forward", forward.forward_kernel)
launch_portable.combine_kernel = Kernel("combine", forward.combine_kernel)
stand_in(hopper_forward, "hopper_forward_kernel")
for name in ("dq_kernel", "dkdv_kernel", "delta_kernel", "sums_kernel", "dbias_kernel"):
    stand_in(launch_backward, name)
card = Device(0, "NVIDIA H200", (9, 0), 232_448, 132, 1 << 37)
machine = Machine(cuda_state=Cuda("13.0", (card,)), packages={"triton": "3.6.0"}, imports={})
torch.cuda.get_device_properties = lambda device: type("P", (), {"multi_processor_count": 132})


def call(sq, sk, hq=4, hk=2, mechanism=None, backward=False, **options):
    q = torch.zeros(1, hq, sq, 64, dtype=torch.float16)
    k = torch.zeros(1, hk, sk, 64, dtype=torch.float16)
    arrays = {n: recognise(x, n) for n, x in (("q", q), ("k", k), ("v", k))}
    problem = Problem.from_arrays(**arrays, layout="bhsd", **options)
    out = recognise(torch.zeros_like(q), "out")
    lse = recognise(torch.zeros(1, hq, sq), "lse")
    made = Call(out=out, lse=lse, **arrays)
    if backward:
        problem = problem.as_backward()
        made.dout, made.dq = out, recognise(torch.zeros_like(q), "dq")
        made.dk = made.dv = recognise(torch.zeros_like(k), "dk")
    config.hold(mechanism=mechanism)
    plan = planner.plan(problem, planner.target(problem, machine), "3.6.0").config
    for _ in range(2):
        launch.run(problem, plan, made)
    config.hold(mechanism=None)


call(300, 300)
call(1, 5000)
call(300, 300, mechanism="hopper", causal="bottom_right")
call(300, 300, mechanism="portable", backward=True, causal="bottom_right")
print(json.dumps(said))
"""


def test_no_argument_of_a_kernel_specializes() -> None:
    """What was compiled for one call is started for the next: only constants may be compiled in."""
    from portattn.backends.triton_jit import backward, backward_keys, backward_sums, forward

    kernels = (
        forward.forward_kernel, forward.combine_kernel, backward.dq_kernel,
        backward_keys.dkdv_kernel, backward_sums.delta_kernel, backward_sums.sums_kernel,
        backward_sums.dbias_kernel,
    )  # fmt: skip
    for kernel in kernels:
        for p in kernel.params:
            if p.is_constexpr or p.name.endswith("_desc"):
                continue
            number = p.annotation_type and not p.annotation_type.startswith("fp")
            assert p.do_not_specialize_on_alignment or p.annotation_type, (kernel, p.name)
            assert p.do_not_specialize or not number, (kernel, p.name)


@pytest.fixture(scope="module")
def said(fresh: Callable[..., Any]) -> list[list[Any]]:
    return json.loads(fresh(PROGRAM).stdout)  # type: ignore[no-any-return]


def test_every_launch_comes_twice(said: list[list[Any]]) -> None:
    kernels = [name for name, when, _, _ in said if when == "first"]
    assert set(kernels) == {
        "forward", "combine", "hopper_forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel",
    }  # fmt: skip
    assert sorted(kernels) == sorted(name for name, when, _, _ in said if when == "later")


def test_later_launches_have_the_arguments_of_the_first(said: list[list[Any]]) -> None:
    waiting: dict[str, list[Any]] = {}
    for name, when, grid, values in said:
        if when == "first":
            waiting[name] = [*(*grid, 1, 1)[:3], values]
        else:
            assert [*grid, values] == waiting.pop(name), name
    assert not waiting
