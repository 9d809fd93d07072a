"""Launches without a GPU: what Triton makes of the first call's arguments, and what later calls
hand to the launcher that Triton made, are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

PROGRAM = r"""
import contextlib, inspect, json, threading, time, torch, triton
from triton.backends.nvidia import driver
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor
from portattn.arrays import recognise
from portattn.backends.triton_jit import config, dispatch, forward, hopper_backward
from portattn.backends.triton_jit import hopper_forward, launch, launch_backward, launch_hopper
from portattn.backends.triton_jit import launch_portable, planner
from portattn.contract import Call
from portattn.machine import Cuda, Device, Machine
from portattn.problem import Problem

said, beside = [], []
torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda device: 7


class Utils:
    @staticmethod
    def fill_tma_descriptor(*about):
        return ["map", *shown(about)]


triton.runtime.driver.set_active(type("Driver", (), {"utils": Utils}))


class Kernel:
    # records what Triton's own wrapper of a launcher makes of the arguments of a first launch
    def __init__(self, name, real):
        self.name, self.fn, self.arg_names, self.params = name, real.fn, real.arg_names, real.params

    def __getitem__(self, grid):
        def first(*args, **named):
            options = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
            for option in options:
                named.pop(option, None)
            bound = inspect.signature(self.fn).bind(*args, **named).arguments
            compiled = Compiled(self.name, bound)
            compiled.run.launch(*grid, 1, 1, 7, "function", *BASE, *bound.values())
            compiled.when = "later"
            return compiled

        return first

    def warmup(self, *args, grid, **named):
        beside.append([self.name, grid[0], named["FLAGS"]])


class Slow(Kernel):
    # where flags are to be looked after, it is compiled until what repairs is compiled beside it
    def __getitem__(self, grid):
        first = super().__getitem__(grid)

        def slow(*args, **named):
            end = time.monotonic() + 50
            while named["WITH_FLAGS"] and not beside and time.monotonic() < end:
                time.sleep(0.01)
            return first(*args, **named)

        return slow


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, name, bound):
        self.name, self.when, self.run = name, "first", Run()
        signature = {
            n: "tensordesc" if isinstance(x, TensorDescriptor | GluonDescriptor) else "i32"
            for n, x in bound.items()
        }
        boxes = [n for n, kind in signature.items() if kind == "tensordesc"]
        about = {"swizzle": 1, "elem_size": 2, "elem_type": 6, "fp4_padded": False}
        maps = [{**about, "block_size": [i]} for i in range(len(boxes))]
        self.run.launch = driver.wrap_handle_tensordesc(self.raw, signature, maps)

    def raw(self, *args):
        said.append((self.name, self.when, list(args[:3]), shown(args[3:])))


class Run:
    launch_cooperative_grid, launch_pdl = False, False
    global_scratch_size = profile_scratch_size = 0


BASE = (False, False, None, None, "metadata", None, None, None)


def shown(values):
    plain = (bool, int, float, str, type(None))
    found = []
    for x in values:
        if isinstance(x, torch.Tensor) or (isinstance(x, int) and x > 1 << 40):
            x = "address"
        elif isinstance(x, list | tuple | torch.Size):
            x = shown(x)
        elif not isinstance(x, plain):
            x = type(x).__name__
        found.append(x)
    return found


def stand_in(module, name):
    setattr(module, name, Kernel(name, getattr(module, name)))


launch_portable.forward_kernel = Kernel("forward", forward.forward_kernel)
launch_portable.combine_kernel = Kernel("combine", forward.combine_kernel)
hopper_forward.hopper_forward_kernel = Slow(
    "hopper_forward_kernel", hopper_forward.hopper_forward_kernel
)
hopper_backward.dq_kernel = Kernel("hopper dq", hopper_backward.dq_kernel)
hopper_backward.dkdv_kernel = Kernel("hopper dkdv", hopper_backward.dkdv_kernel)
for name in ("dq_kernel", "dkdv_kernel", "delta_kernel", "sums_kernel", "dbias_kernel"):
    stand_in(launch_backward, name)
dispatch._LATER = 0.01
card = Device(0, "NVIDIA H200", (9, 0), 232_448, 132, 1 << 37)
machine = Machine(cuda_state=Cuda("13.0", (card,)), packages={"triton": "3.6.0"}, imports={})
torch.cuda.get_device_properties = lambda device: type("P", (), {"multi_processor_count": 132})
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.Event = type("Event", (), {"record": lambda self: None})


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
call(300, 300, mechanism="hopper", backward=True, causal="bottom_right")
call(400, 400, mechanism="hopper", causal="bottom_right")
for thread in threading.enumerate():
    if thread.name == "portattn-compile":
        thread.join()
print(json.dumps([said, beside]))
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
def heard(fresh: Callable[..., Any]) -> list[Any]:
    return json.loads(fresh(PROGRAM).stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def said(heard: list[Any]) -> list[list[Any]]:
    return heard[0]  # type: ignore[no-any-return]


def test_what_repairs_is_compiled_once_beside_the_hopper_kernel(heard: list[Any]) -> None:
    """Two lengths and two launches of each, one compilation; its programs look after 32 tiles."""
    assert heard[1] == [["forward", 1, 256]]


BESIDE = """
import contextlib, threading, torch
from portattn.backends.triton_jit import dispatch
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.Event = type("Event", (), {"record": lambda self: None})
dispatch._LATER = 30.0
made = []
launch = dispatch.Launch(lambda *arrays, **options: made.append(options), 1, ())
before = set(threading.enumerate())
launch.compile_beside((), "cuda")
launch.start(())
for thread in set(threading.enumerate()) - before:
    thread.join()
assert made == [{}], made
"""


def test_a_launch_does_not_wait_for_what_has_not_begun_beside_it(fresh: Callable[..., Any]) -> None:
    fresh(BESIDE)


def test_every_launch_comes_twice(said: list[list[Any]]) -> None:
    kernels = [name for name, when, _, _ in said if when == "first"]
    assert set(kernels) == {
        "forward", "combine", "hopper_forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel",
        "hopper dkdv", "hopper dq",
    }  # fmt: skip
    assert sorted(kernels) == sorted(name for name, when, _, _ in said if when == "later")


def test_later_launches_have_the_arguments_of_the_first(said: list[list[Any]]) -> None:
    waiting: dict[str, list[Any]] = {}
    for name, when, grid, values in said:
        if when == "first":
            waiting[name] = [grid, values]
        else:
            assert [grid, values] == waiting.pop(name), name
    assert not waiting
