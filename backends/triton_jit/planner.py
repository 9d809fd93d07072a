"""Which mechanism and which tile a problem gets, or every reason why none.

The rule kept here: pure Python over the problem, the device's numbers and the shipped table; a
reason names what came, the limit and what fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portattn.backends.triton_jit import (
    backward_plan,
    config,
    hopper_policy,
    interpreted,
)
from portattn.backends.triton_jit.config import ITEM, Config, Limits, Tile
from portattn.contract import Plan, Reason
from portattn.machine import SHARED_MEMORY

if TYPE_CHECKING:
    from portattn.machine import Machine
    from portattn.problem import Problem

OLDEST = (7, 5)
"""The oldest compute capability that Triton 3 compiles for."""

BFLOAT16_SINCE = (8, 0)

GLUON = ((3, 6), (3, 7))
"""The Triton releases, first and the one after the last, whose Gluon the hopper mechanism speaks:
its names are experimental and move from release to release."""


@dataclass(frozen=True, slots=True)
class Target:
    """The numbers of the device that a plan is made for; ``name`` is empty where none was seen."""

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    limits: Limits
    name: str = ""


def target(problem: Problem | None, machine: Machine) -> Target:
    """The device of the problem's arrays, under the limits in force; a Hopper device where there is
    none to ask."""
    held = config.limits()
    devices = () if interpreted.on() else machine.cuda.devices
    index, name = 0, ""
    if problem is not None and problem.device and ":" in problem.device:
        index = int(problem.device.split(":")[1])
    if index < len(devices):
        device = devices[index]
        name = device.name
        capability, limit, count = device.capability, device.shared_memory, device.multiprocessors
    else:
        capability, limit, count = (9, 0), SHARED_MEMORY[(9, 0)], 4 if interpreted.on() else 0
    if held.shared_memory is not None:
        limit = min(limit, held.shared_memory)
    return Target(capability, limit, count, held, name)


def reasons(problem: Problem, on: Target) -> list[Reason]:
    """Everything that the planner has against ``problem`` on that device."""
    found = []
    if on.capability < OLDEST:
        found.append(
            Reason(
                "compute_capability",
                "device",
                "sm_{}{}".format(*on.capability),
                "sm_75 or newer",
                "Triton compiles for no older device; backend='numpy' takes host arrays",
            )
        )
    # torch holds no negative stride, and ends the process over one on a device (BUG-037).
    module = "numpy" if problem.device == "cpu" else "cupy"
    found += [
        Reason(
            "negative_strides",
            name,
            "negative strides",
            "strides of at least 0, as torch tensors have",
            f"give a contiguous copy, such as {module}.ascontiguousarray({name})",
        )
        for name in problem.negative_strides
    ]
    dtypes = interpreted.DTYPES if interpreted.on() else tuple(ITEM)
    if problem.dtype not in dtypes:
        hint = "cast to one of these; backend='numpy' takes float64 host arrays"
        if interpreted.on():
            hint = "Triton's interpreter takes what the kernels do; backend='numpy' takes it"
            if problem.dtype == "bfloat16":
                hint = "Triton's interpreter gets its products wrong; backend='numpy' takes it"
        found.append(Reason("dtype", "dtype", problem.dtype, " or ".join(dtypes), hint))
        return found
    if problem.dtype == "bfloat16" and on.capability < BFLOAT16_SINCE:
        found.append(
            Reason(
                "dtype",
                "dtype",
                problem.dtype,
                "float16 or float32 on sm_{}{}".format(*on.capability),
                "bfloat16 products need sm_80",
            )
        )
    if forward_tile(problem, on) is None:
        tiles = config.candidates(
            problem, on.capability, few=config.few_rows(problem), device=on.name
        )
        least = min((t.needs(config.is_masked(problem)) for t in tiles), default=None)
        found.append(_no_tile(problem, on, least))
    elif problem.backward and backward_tiles(problem, on) is None:
        least = min((_backward_bytes(problem, t) for t in _backward(problem)), default=None)
        found.append(_no_tile(problem, on, least))
    return found


def _no_tile(problem: Problem, on: Target, least: int | None) -> Reason:
    wide = max(problem.head_dim, problem.head_dim_v)
    field = "head_dim" if problem.head_dim == wide else "head_dim_v"
    if least is None:
        hint = "no tile holds a longer row; backend='numpy' takes host arrays"
        return Reason("head_dim", field, wide, f"at most {backward_plan.LARGEST}", hint)
    return Reason(
        "shared_memory",
        field,
        wide,
        f"{-(-least // 1024)} KiB of shared memory with the smallest tile; this device allows "
        f"{on.shared_memory // 1024} KiB",
        "a smaller head dim, or backend='numpy' with host arrays",
    )


def forward_tile(problem: Problem, on: Target) -> Tile | None:
    """The portable forward tile, or None."""
    few, masked = config.few_rows(problem), config.is_masked(problem)
    tiles = config.candidates(problem, on.capability, few=few, device=on.name)
    if few:
        rows = problem.seq_q * (problem.group if config.packs(problem) else 1)
        return config.rows_tile(tiles, rows, on.shared_memory, masked=masked)
    return next((t for t in tiles if t.needs(masked) <= on.shared_memory), None)


def backward_tiles(problem: Problem, on: Target) -> backward_plan.BackwardTiles | None:
    """The portable tiles of the backward kernels, or None."""
    limit = on.shared_memory
    return next((t for t in _backward(problem) if _backward_bytes(problem, t) <= limit), None)


def _backward(problem: Problem) -> tuple[backward_plan.BackwardTiles, ...]:
    dims = (config.padded(problem.head_dim), config.padded(problem.head_dim_v))
    return backward_plan.candidates(*dims, ITEM[problem.dtype])


def _backward_bytes(problem: Problem, tiles: backward_plan.BackwardTiles) -> int:
    return backward_plan.largest_shared(
        tiles,
        config.padded(problem.head_dim),
        config.padded(problem.head_dim_v),
        ITEM[problem.dtype],
        masked=problem.bias is not None or problem.mask is not None,
    )


def plan(problem: Problem, on: Target, triton: str | None) -> Plan:
    """How an accepted problem runs there."""
    hopper, why = hopper_tile(problem, on, triton)
    tile = forward_tile(problem, on)
    assert tile is not None
    pack, splits, keys = 1, 1, problem.seq_k
    if hopper is None and not problem.backward:
        pack = problem.group if config.packs(problem) else 1
        splits, keys = config.split(problem, tile, on.multiprocessors)
    made = Config(
        tile=tile,
        block_d=config.padded(problem.head_dim),
        block_dv=config.padded(problem.head_dim_v),
        pack=pack,
        splits=splits,
        split_keys=keys,
        tma=tma(on),
        hopper=hopper,
        backward=backward_tiles(problem, on) if problem.backward else None,
        limits=on.limits,
    )
    shape: tuple[tuple[str, int], ...]
    if isinstance(hopper, hopper_policy.ForwardTile):
        shape = (("block_q", hopper.block_q), ("block_k", hopper.block_k))
        shared = hopper.shared_bytes
    elif hopper is not None:
        shape = (("block_q", hopper.dq.block_q), ("block_k", hopper.dkdv.block_k))
        shared = hopper_policy.backward_bytes(hopper, problem)
    elif made.backward is not None:
        shape = (("block_q", made.backward.dq.block_q), ("block_k", made.backward.dkdv.block_k))
        shared = _backward_bytes(problem, made.backward)
    else:
        shape = (("block_q", tile.block_q), ("block_k", tile.block_k), ("splits", splits))
        shared = tile.needs(config.is_masked(problem))
    note = why or "inputs whose rows do not start at 16 bytes run on portable"
    return Plan(
        mechanism=made.mechanism,
        tile=shape,
        shared_memory_bytes=shared,
        workspace_bytes=workspace_bytes(problem, made),
        note=note,
        config=made,
    )


def tma(on: Target) -> bool:
    """Whether keys and values come by the tensor memory accelerator where they are aligned. The
    numbers are the same either way."""
    return config.family(on.capability) == "sm_90" and not interpreted.on()


def workspace_bytes(problem: Problem, made: Config) -> int:
    """What a call allocates beyond its inputs and outputs."""
    if problem.backward:
        # delta in float32 for each row
        rows = problem.heads_q * (problem.total_q or problem.batch * problem.seq_q)
        if made.mechanism == "hopper":
            flags = 0
            if problem.causal:
                flags += problem.heads_k * -(-problem.seq_k // made.hopper.dkdv.block_k)
                flags += problem.heads_q * -(-problem.seq_q // made.hopper.dq.block_q)
            return 4 * rows + 4 * problem.batch * flags
        # and whether it holds a NaN; sums over programs of what broadcasts
        return 8 * rows + _sums_bytes(problem)
    if made.mechanism == "hopper":
        rows = -(-problem.seq_q // made.hopper.block_q)
        return 4 * problem.batch * problem.heads_q * rows if problem.causal else 0
    return config.split_workspace(problem, made)


def _sums_bytes(problem: Problem) -> int:
    """Partial sums of a bias that broadcasts over positions, and of the sinks' gradient."""
    found = 0
    if problem.sinks is not None:
        found += 4 * problem.heads_q * problem.batch * -(-problem.seq_q // 4)
    if problem.bias is not None and 1 in (problem.bias.shape[-2:]):
        found += 4 * 512 * max(problem.seq_q, problem.seq_k)
    return found


def hopper_tile(problem: Problem, on: Target, triton: str | None) -> tuple[Any, str]:
    """The hopper mechanism's tile for a problem, or None and why portable runs instead."""
    if interpreted.on():
        return None, "interpreted"
    if on.limits.mechanism == "portable":
        return None, "held to portable"
    if on.capability != (9, 0):
        return None, "hopper needs sm_90"
    if triton is not None:
        release = tuple(int(x) for x in triton.split(".")[:2])
        if not GLUON[0] <= release < GLUON[1]:
            return None, f"hopper speaks the Gluon of Triton 3.6, not that of {triton}"
    forced = on.limits.mechanism == "hopper"
    why = hopper_policy.why_portable(problem, forced=forced)
    if why:
        return None, why
    pick = hopper_policy.backward_tile if problem.backward else hopper_policy.forward_tile
    tile = pick(problem, on.shared_memory)
    return tile, "" if tile is not None else "no hopper tile fits the shared memory"
