"""The planner of the Triton backend: a plan within the limits, or every reason why none, for
devices that are not here.

The rule kept here: neither triton nor torch is needed; what is asked is the shipped table and,
where a boundary is at stake, a table made up for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import portattn
from portattn.arrays import contiguous_strides, recognise
from portattn.backends.triton_jit import BACKEND, config, planner
from portattn.backends.triton_jit.config import Tile
from portattn.contract import Plan, Reason
from portattn.machine import SHARED_MEMORY, SHARED_MEMORY_ANYWHERE, Machine, parse_arch
from portattn.problem import Problem

LIMITS = (49_152, 65_536, 101_376, 166_912, 232_448)
DEVICES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_99")
DTYPES = ("float16", "bfloat16", "float32")
DIMS = (8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 224, 256, 264, 320, 384, 448, 512)


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts without an interpreter and without limits, and leaves none behind."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PORTATTN_TRITON_MECHANISM", raising=False)
    yield
    config.hold(mechanism=None, shared_memory=None)


def machine(device: str = "sm_90", limit: int | None = None, triton: str = "3.6.0") -> Machine:
    pretended = Machine.pretend(device, limit)
    return dataclasses.replace(pretended, packages={"triton": triton, "torch": "2.9.0"})


def problem(head_dim: int = 128, dtype: str = "float16", **options: Any) -> Problem:
    shape = {"seq_q": 4096, "heads_q": 8} | options
    return Problem.from_numbers(head_dim=head_dim, dtype=dtype, **shape)


def answer(asked: Problem, on: Machine) -> Plan | tuple[Reason, ...]:
    """The plan, or the reasons."""
    return BACKEND.why_not(asked, on) or BACKEND.plan(asked, on)


def planned(asked: Problem, on: Machine) -> Plan:
    found = answer(asked, on)
    assert isinstance(found, Plan), found
    return found


def refused(asked: Problem, on: Machine) -> tuple[Reason, ...]:
    found = answer(asked, on)
    assert not isinstance(found, Plan)
    return found


# ---- a plan within the limits, or reasons --------------------------------------------------------
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_head_dim_has_a_plan_within_the_limit_or_reasons(
    device: str, limit: int, backward: bool
) -> None:
    on = machine(device, limit)
    shapes: tuple[dict[str, Any], ...] = (
        {},
        {"seq_q": 100},
        {"seq_q": 1, "seq_k": 9000, "heads_k": 1},
        {"seq_q": 4, "seq_k": 100_000, "heads_k": 1},
        {"causal": True, "mask": True},
    )
    for dim, dtype, shape in itertools.product(DIMS, DTYPES, shapes):
        found = answer(problem(dim, dtype, backward=backward, **shape), on)
        if isinstance(found, Plan):
            assert 0 < found.shared_memory_bytes <= limit, (dim, dtype, shape)
            assert found.mechanism in config.MECHANISMS
            assert found.workspace_bytes >= 0 and found.note and found.tile
        else:
            for reason in found:
                assert reason.code in ("shared_memory", "dtype", "head_dim"), (dim, dtype, shape)
                assert reason.field and reason.got and reason.limit and reason.hint
                if reason.code == "shared_memory":
                    needed, allowed = map(int, re.findall(r"(\d+) KiB", reason.limit))
                    assert needed > allowed == limit // 1024, reason


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", range(8, 513, 8))
def test_head_dims_of_a_hopper_device_all_have_a_plan(dim: int, dtype: str, backward: bool) -> None:
    found = answer(problem(dim, dtype, backward=backward), machine())
    if isinstance(found, Plan):
        assert found.shared_memory_bytes <= 232_448
    else:  # the widest rows of float32, backward, take more than any device has
        assert dim > 256 and backward and {r.code for r in found} == {"shared_memory"}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["sm_86", "sm_89", "sm_120"])
def test_head_dim_256_fits_101376_bytes(device: str, dtype: str, backward: bool) -> None:
    assert SHARED_MEMORY[parse_arch(device)] == 101_376
    for shape in ({}, {"seq_q": 60}, {"seq_q": 1, "seq_k": 5000, "heads_k": 2}):
        plan = planned(problem(256, dtype, backward=backward, **shape), machine(device))
        assert 0 < plan.shared_memory_bytes <= 101_376


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_bug_037_negative_strides_are_refused_by_name(backward: bool) -> None:
    """torch would end the process over them; the hint is a copy without."""

    class OnDevice:
        """What CuPy and Numba show of an array; there is nothing behind it."""

        def __init__(self, *shape: int, turned: int | None = None):
            steps = [4 * n for n in contiguous_strides(shape)]
            if turned is not None:
                steps[turned] *= -1
            self.__cuda_array_interface__ = {
                "shape": shape, "typestr": "<f4", "data": (0, False), "version": 3,
                "strides": tuple(steps),
            }  # fmt: skip

    def asked(**arrays: Any) -> Problem:
        arrays = {n: OnDevice(1, 2, 4, 8) for n in "qkv"} | arrays
        described = {n: recognise(x, n) for n, x in arrays.items()}
        made = Problem.from_arrays(**described, layout="bhsd")
        return made.as_backward() if backward else made

    planned(asked(), machine())
    for axis in range(4):
        turned = OnDevice(1, 2, 4, 8, turned=axis)  # an axis of one element is no exception
        found = refused(asked(k=turned, v=turned), machine())
        assert [(r.code, r.field) for r in found] == [("negative_strides", n) for n in "kv"]
        assert "cupy.ascontiguousarray(k)" in found[0].hint and "at least 0" in str(found[0])
    (reason,) = refused(asked(bias=OnDevice(4, 4, turned=0)), machine())
    assert reason.field == "bias"
    out = recognise(OnDevice(1, 2, 4, 8, turned=2), "out")
    (reason,) = refused(asked().with_results(out=out, lse=None), machine())
    assert reason.field == "out"
    wide = dataclasses.replace(asked(q=turned), dtype="float64")
    assert [r.code for r in refused(wide, machine())] == ["negative_strides", "dtype"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_small_limit_is_a_reason_with_numbers(backward: bool) -> None:
    (reason,) = refused(problem(512, "float32", backward=backward), machine("sm_89", 16_384))
    assert (reason.code, reason.field, reason.got) == ("shared_memory", "head_dim", 512)
    assert "KiB" in reason.limit and "16 KiB" in reason.limit
    assert reason.hint and "512" in str(reason)
    (reason,) = refused(
        problem(64, "float32", head_dim_v=512, backward=backward), machine("sm_89", 16_384)
    )
    assert (reason.field, reason.got) == ("head_dim_v", 512)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "field"), [((1024, 1024), "head_dim"), ((64, 513), "head_dim_v")])
def test_rows_beyond_512_have_no_tile(dims: tuple[int, int], field: str, backward: bool) -> None:
    asked = problem(dims[0], head_dim_v=dims[1], backward=backward)
    (reason,) = refused(asked, machine())
    assert (reason.code, reason.field, reason.got) == ("head_dim", field, max(dims))
    assert "512" in str(reason.limit) and reason.hint


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_float64_is_refused(backward: bool) -> None:
    (reason,) = refused(problem(dtype="float64", backward=backward), machine())
    assert (reason.code, reason.field, reason.got) == ("dtype", "dtype", "float64")
    assert all(name in reason.limit for name in DTYPES)
    assert "numpy" in reason.hint


def test_bfloat16_needs_sm_80() -> None:
    (reason,) = refused(problem(dtype="bfloat16"), machine("sm_75"))
    assert (reason.code, reason.field, reason.got) == ("dtype", "dtype", "bfloat16")
    assert "sm_75" in reason.limit and "float16" in reason.limit
    assert planned(problem(dtype="float16"), machine("sm_75")).mechanism == "portable"
    assert planned(problem(dtype="bfloat16"), machine("sm_80")).mechanism == "portable"


def test_older_devices_are_refused_by_name() -> None:
    codes = {r.code: r for r in refused(problem(dtype="bfloat16"), machine("sm_70"))}
    assert set(codes) == {"compute_capability", "dtype"}
    assert (codes["compute_capability"].got, codes["compute_capability"].field) == (
        "sm_70",
        "device",
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_bug_087_an_architecture_that_nobody_knows(backward: bool) -> None:
    """It gets what every device grants, and no kernel that was built for another."""
    on = machine("sm_99")
    assert on.cuda.devices[0].shared_memory == SHARED_MEMORY_ANYWHERE
    for dim in (16, 32, 64, 128, 256):
        found = answer(problem(dim, backward=backward), on)
        if isinstance(found, Plan):
            assert found.mechanism == "portable"
            assert found.shared_memory_bytes <= SHARED_MEMORY_ANYWHERE
        else:
            assert {r.code for r in found} == {"shared_memory"}
    assert isinstance(answer(problem(32, backward=backward), on), Plan)
    assert planned(problem(64, backward=backward), machine("sm_130")).mechanism == "portable"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_the_smallest_device_takes_common_head_dims(dim: int, dtype: str, backward: bool) -> None:
    """65,536 bytes, and no bfloat16: Turing."""
    for shape in ({}, {"seq_q": 100}, {"seq_q": 1, "seq_k": 5000}, {"seq_q": 70, "seq_k": 5000}):
        planned(problem(dim, dtype, backward=backward, **shape), machine("sm_75"))


def test_the_public_query_shows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = portattn.query(head_dim=256, dtype="bfloat16", device="sm_89", seq_q=4096)
    candidate = decision["triton"]
    assert candidate.accepted and candidate.plan is not None
    assert candidate.plan.mechanism == "portable"
    assert 0 < candidate.plan.shared_memory_bytes <= 101_376
    assert decision.chosen == "triton"
    refused = portattn.query(head_dim=1024, dtype="bfloat16", device="sm_89")["triton"]
    assert not refused.accepted and [r.field for r in refused.reasons] == ["head_dim"]


# ---- at the border of a tile's bytes -------------------------------------------------------------
def made_up(monkeypatch: pytest.MonkeyPatch, key: str, rows: list[Tile]) -> None:
    monkeypatch.setattr(config, "table", lambda: {"sm_80": {key: rows}, "sm_90": {key: rows}})


@pytest.mark.parametrize("border", [65_536, 65_584, 101_376])
def test_bug_039_the_border_of_a_tile(monkeypatch: pytest.MonkeyPatch, border: int) -> None:
    """65,584 is the layout of the report, 48 bytes over the device's limit."""
    large, small = Tile(64, 64, 4, 2, border, border), Tile(64, 32, 4, 1, 20_000, 20_000)
    made_up(monkeypatch, "prefill/2/256", [large, small])
    for limit, tile in ((border - 1, small), (border, large), (border + 1, large)):
        plan = planned(problem(256), machine("sm_80", limit))
        assert plan.config.tile == tile
        assert plan.shared_memory_bytes == tile.shared_bytes <= limit
        assert dict(plan.tile)["block_k"] == tile.block_k
    for limit in (19_999, 20_000):
        found = answer(problem(256), machine("sm_80", limit))
        assert isinstance(found, Plan) == (limit == 20_000)
    (reason,) = refused(problem(256), machine("sm_80", 19_999))
    assert reason.code == "shared_memory"
    assert "20 KiB" in reason.limit and "19 KiB" in reason.limit


def test_the_border_of_a_tile_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest tile that holds the rows, or the first of the widest that fit."""
    sizes = ((16, 64, 4, 2, 30_000), (16, 32, 4, 1, 10_000), (64, 64, 4, 2, 60_000))
    rows = [Tile(*size, size[-1]) for size in sizes]
    made_up(monkeypatch, "rows/2/128", rows)
    for queries, limit, tile in (
        (1, 60_000, rows[0]),
        (16, 60_000, rows[0]),
        (17, 60_000, rows[2]),
        (17, 59_999, rows[0]),
        (17, 29_999, rows[1]),
        (128, 60_000, rows[2]),
        (1, 30_000, rows[0]),
        (1, 29_999, rows[1]),
        (1, 10_000, rows[1]),
    ):
        plan = planned(problem(seq_q=queries, seq_k=config.LONG_KEYS), machine("sm_80", limit))
        assert plan.config.tile == tile, (queries, limit)
    refused(problem(seq_q=1, seq_k=config.LONG_KEYS), machine("sm_80", 9_999))


def shipped() -> Iterator[tuple[str, str, list[Tile]]]:
    for arch, kinds in config.table().items():
        for key, rows in kinds.items():
            yield arch, key, rows


@pytest.mark.parametrize(("arch", "key"), [(arch, key) for arch, key, _ in shipped()])
def test_the_borders_of_the_shipped_tiles(arch: str, key: str) -> None:
    kind, size, dim = key.split("/")
    shape = {
        "prefill": {},
        "rows": {"seq_q": 40, "seq_k": config.LONG_KEYS},
        "long": {"seq_q": 40, "seq_k": config.LONG_KEYS + 1},
    }[kind]
    asked = problem(int(dim), "float16" if size == "2" else "float32", **shape)
    rows = config.table()[arch][key]
    least = min(t.shared_bytes for t in rows)
    for border in sorted({t.shared_bytes for t in rows}):
        for limit in (border - 1, border, border + 1):
            found = answer(asked, machine(arch if arch != "sm_90" else "sm_100", limit))
            if limit < least:
                assert not isinstance(found, Plan)
                continue
            assert isinstance(found, Plan)
            assert found.shared_memory_bytes <= limit
            fitting = [t for t in rows if t.shared_bytes <= limit]
            wide = [t for t in fitting if t.block_q >= 40]
            if kind in ("rows", "long"):
                assert found.config.tile == (
                    wide[0] if wide else max(fitting, key=lambda t: t.block_q)
                )
            else:
                assert found.config.tile == fitting[0]


def test_the_table_is_filled_and_whole() -> None:
    """Bytes as the compiler reported them, for every head dim and kind, on both families."""
    for arch, key, rows in shipped():
        assert rows and all(t.shared_bytes > 0 for t in rows), f"{arch} {key}"
        for t in rows:
            assert t.block_q >= 16 and t.block_k >= 16 and t.num_warps in (4, 8)
        limit = SHARED_MEMORY[parse_arch(arch)]
        assert any(t.shared_bytes <= limit for t in rows), f"{arch} {key}"
    for arch, kinds in config.table().items():
        assert set(kinds) == {
            f"{kind}/{size}/{dim}"
            for kind in ("rows", "long", "prefill")
            for size in (2, 4)
            for dim in (16, 32, 64, 128, 256, 512)
        }, arch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_borders_of_backward_tiles(dim: int, dtype: str) -> None:
    """Each plan's own bytes are a border: there it stays, one byte below it changes."""
    asked, limit, seen = problem(dim, dtype, backward=True), 101_376, [101_377]
    while isinstance(found := answer(asked, machine("sm_89", limit)), Plan):
        assert found.shared_memory_bytes <= limit < seen[-1]
        seen.append(found.shared_memory_bytes)
        here = answer(asked, machine("sm_89", seen[-1]))
        if not isinstance(here, Plan):  # the forward pass needs more
            break
        assert here.config.backward == found.config.backward
        limit = seen[-1] - 1
    assert len(seen) > 1


def test_the_borders_of_hopper_tiles() -> None:
    for dim, backward in itertools.product((64, 128, 256), (False, True)):
        on, mechanisms = 232_448, []
        while on > 49_152:
            plan = planned(problem(dim, causal=True, backward=backward), machine("sm_90", on))
            assert plan.shared_memory_bytes <= on
            mechanisms.append(plan.mechanism)
            if plan.mechanism == "portable":
                assert "shared memory" in plan.note
                break
            on = plan.shared_memory_bytes - 1
        assert mechanisms[0] == "hopper" and mechanisms[-1] == "portable", (dim, backward)


@pytest.mark.parametrize(
    ("dim", "causal", "most"), [(64, False, 2048), (64, True, 2048), (128, True, 512)]
)
def test_few_keys_take_small_blocks(dim: int, causal: bool, most: int) -> None:
    asked = [problem(dim, seq_q=keys, seq_k=keys, causal=causal) for keys in (most, most + 1)]
    blocks = [planned(x, machine()).config.hopper.block_k for x in asked]
    assert blocks == [64, 128]


def test_few_keys_that_every_row_sees_take_large_blocks() -> None:
    assert planned(problem(128, seq_q=512), machine()).config.hopper.block_k == 128


# ---- what a plan may depend on -------------------------------------------------------------------
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
def test_plans_do_not_depend_on_the_batch(device: str, backward: bool) -> None:
    shapes: tuple[dict[str, Any], ...] = (
        {},
        {"seq_q": 1, "seq_k": 5000, "heads_k": 1},
        {"seq_q": 50},
    )
    for shape in shapes:
        plans = [
            planned(problem(batch=b, backward=backward, **shape), machine(device))
            for b in (1, 2, 64, 4096)
        ]
        assert len({p.config for p in plans}) == 1
        same = [dataclasses.replace(p, workspace_bytes=0) for p in plans]
        assert len(set(same)) == 1
        assert [p.workspace_bytes for p in plans] == sorted(p.workspace_bytes for p in plans)


def test_a_plan_with_another_tile_remembers_no_launch_of_the_first() -> None:
    made = planned(problem(128), machine("sm_80")).config
    made.memo["a way to lie"] = "a launch"
    assert dataclasses.replace(made, tile=Tile(16, 16, 4, 1, 1, 1)).memo == {}


def test_splits_depend_on_the_capacity_alone() -> None:
    """A graph captured at one used length stays right at another (BUG-077)."""

    def splits(**options: Any) -> tuple[int, int]:
        asked = problem(seq_q=1, heads_q=8, heads_k=1, **options)
        plan = planned(asked, machine())
        return plan.config.splits, plan.config.split_keys

    dense = splits(seq_k=4096)
    assert dense[0] > 1 and dense[0] * dense[1] >= 4096
    assert splits(seq_k=4096, seqused_k=True) == dense
    assert splits(seq_k=4096, seqused_k=True, block_size=16) == dense
    assert splits(seq_k=4096, batch=64) == dense
    assert splits(seq_k=256) == splits(seq_k=256, seqused_k=True) == (1, 256)
    assert splits(seq_k=131_072)[0] >= dense[0]
    for keys in (513, 1000, 4097, 70_001):
        count, each = splits(seq_k=keys)
        assert (count - 1) * each < keys <= count * each


def test_split_workspace_is_that_of_the_partial_results() -> None:
    asked = problem(seq_q=1, seq_k=5000, heads_k=1)
    plan = planned(asked, machine())
    made = plan.config
    rows = made.splits * made.tile.block_q
    assert plan.workspace_bytes == 4 * rows * (128 + 1)
    assert planned(problem(seq_q=1, seq_k=200), machine()).workspace_bytes == 0


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_backward_workspace_is_a_number_a_row_and_the_flags(causal: Any) -> None:
    """hopper: delta, and under a diagonal a flag for each tile; portable: also a NaN's mark."""
    asked = problem(seq_q=300, seq_k=500, heads_k=2, batch=3, causal=causal, backward=True)
    rows = 3 * 8 * 300
    BACKEND.force_mechanism("hopper")
    flags = 3 * (2 * -(-500 // 128) + 8 * -(-300 // 128)) if causal else 0
    assert planned(asked, machine()).workspace_bytes == 4 * (rows + flags)
    BACKEND.force_mechanism("portable")
    assert planned(asked, machine()).workspace_bytes == 8 * rows


@pytest.mark.parametrize("mechanism", [None, *config.MECHANISMS])
@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
def test_up_to_256_keys_run_the_tile_of_a_prefill(device: str, mechanism: str | None) -> None:
    """A row has the same bits in its prefill and in its decode step, whatever a caller forces."""
    BACKEND.force_mechanism(mechanism)
    for dim, dtype in itertools.product((16, 64, 128, 256, 512), DTYPES):
        tiles = set()
        for queries, keys, heads_k in itertools.product((1, 7, 200), (1, 40, 256), (1, 8)):
            asked = problem(dim, dtype, seq_q=queries, seq_k=keys, heads_k=heads_k)
            plan = planned(asked, machine(device))
            made = plan.config
            assert plan.mechanism == "portable" and made.hopper is None
            assert (made.splits, made.split_keys) == (1, keys)
            assert config.key_of(asked, few=config.few_rows(asked)).startswith("prefill/")
            tiles.add((made.tile, made.block_d))
        assert len(tiles) == 1, (dim, dtype)


@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
@pytest.mark.parametrize("longest", [1, 40, 5000, 100_000])
def test_packed_sequences_run_the_tile_of_a_prefill(device: str, longest: int) -> None:
    """Heads are not packed and keys not split: a sequence has the bits that it has alone."""
    for mechanism, heads_k in itertools.product((None, *config.MECHANISMS), (1, 8)):
        BACKEND.force_mechanism(mechanism)
        options: dict[str, Any] = {
            "seq_q": 1,
            "seq_k": longest,
            "heads_k": heads_k,
            "layout": "thd",
        }
        asked = problem(batch=3, **options)
        plan = planned(asked, machine(device))
        made = plan.config
        assert not config.few_rows(asked) and not config.packs(asked)
        assert (plan.mechanism, made.pack, made.splits) == ("portable", 1, 1)
        assert made.tile == planned(problem(seq_q=200), machine(device)).config.tile


def test_lengths_count_by_their_bucket() -> None:
    """201 lengths, one tile (BUG-096)."""
    for device, backward in itertools.product(("sm_80", "sm_90"), (False, True)):
        tiles = set()
        for n in range(1000, 1201):
            made = planned(problem(64, seq_q=n, backward=backward), machine(device)).config
            tiles.add((made.tile, made.hopper, made.backward, made.splits, made.tma))
        assert len(tiles) == 1


def test_descriptors_depend_on_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether keys come by the tensor memory accelerator is compiled in: no length may decide."""
    shapes: tuple[dict[str, Any], ...] = (
        {"seq_q": 1, "seq_k": 3},
        {"seq_q": 1, "seq_k": 100_000},
        {"seq_q": 300, "batch": 64},
        {"seq_q": 20_000},
    )
    for device in DEVICES:
        family = config.family(parse_arch(device))
        for shape in shapes:
            made = planned(problem(**shape), machine(device)).config
            assert made.tma == (family == "sm_90"), (device, shape)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not planned(problem(device="cpu"), machine()).config.tma


# ---- limits that a caller sets -------------------------------------------------------------------
def test_a_mechanism_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(causal=True)
    assert planned(asked, machine()).mechanism == "hopper"
    BACKEND.force_mechanism("portable")
    plan = planned(asked, machine())
    assert plan.mechanism == "portable" and "held" in plan.note
    by_choice = (problem(16), problem(seq_q=1, seq_k=5000))  # portable, where nothing is forced
    BACKEND.force_mechanism(None)
    assert {planned(p, machine()).mechanism for p in by_choice} == {"portable"}
    BACKEND.force_mechanism("hopper")
    assert {planned(p, machine()).mechanism for p in by_choice} == {"hopper"}
    # what hopper does not cover runs on portable all the same, and so do short keys
    assert planned(problem(softcap=3.0), machine()).mechanism == "portable"
    assert planned(problem(seq_q=config.ONE_TILE_KEYS), machine()).mechanism == "portable"
    assert planned(problem(seq_q=config.ONE_TILE_KEYS + 1), machine()).mechanism == "hopper"
    assert planned(asked, machine("sm_89")).mechanism == "portable"
    with pytest.raises(ValueError, match=r"mechanism.*'cutlass'.*portable, hopper"):
        BACKEND.force_mechanism("cutlass")
    assert config.limits().mechanism == "hopper"


def test_the_environment_forces_a_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTATTN_TRITON_MECHANISM", "portable")
    assert planned(problem(), machine()).mechanism == "portable"
    BACKEND.force_mechanism("hopper")  # what the process says goes first
    assert planned(problem(), machine()).mechanism == "hopper"
    BACKEND.force_mechanism(None)
    monkeypatch.setenv("PORTATTN_TRITON_MECHANISM", "hopper")
    assert planned(problem(16), machine()).mechanism == "hopper"
    assert planned(problem(16, seq_q=40), machine()).mechanism == "portable"
    monkeypatch.setenv("PORTATTN_TRITON_MECHANISM", "")
    assert planned(problem(16), machine()).mechanism == "portable"


@pytest.mark.parametrize("value", ["cutlass", "Hopper", "auto"])
def test_a_wrong_mechanism_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PORTATTN_TRITON_MECHANISM", value)
    with pytest.raises(ValueError, match=rf"PORTATTN_TRITON_MECHANISM.*{value}.*portable, hopper"):
        BACKEND.why_not(problem(), machine())


def test_shared_memory_can_be_limited() -> None:
    asked = problem(256, causal=True)
    assert planned(asked, machine()).mechanism == "hopper"
    BACKEND.limit_shared_memory(101_376)
    plan = planned(asked, machine())
    assert plan.mechanism == "portable" and plan.shared_memory_bytes <= 101_376
    assert plan.config.limits.shared_memory == 101_376
    BACKEND.limit_shared_memory(10**9)  # never more than the device has
    assert planned(asked, machine("sm_89")).shared_memory_bytes <= 101_376
    BACKEND.limit_shared_memory(None)
    assert planned(asked, machine()).mechanism == "hopper"


# ---- which mechanism, and why not the other ------------------------------------------------------
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 160, 192, 256])
def test_hopper_takes_what_it_covers(dim: int, dtype: str, backward: bool) -> None:
    for options in (
        {},
        {"causal": True},
        {"causal": "bottom_right", "seq_k": 6000},
        {"causal": "top_left", "seq_k": 6000},
        {"heads_k": 2, "batch": 3},
        {"layout": "bhsd", "return_lse": True, "window": (None, None)},
    ):
        plan = planned(problem(dim, dtype, backward=backward, **options), machine())
        assert plan.mechanism == "hopper", options
        assert "16 bytes" in plan.note


UNCOVERED: dict[str, dict[str, Any]] = {
    "packed": {"layout": "thd"},
    "paged": {"block_size": 16, "seqused_k": True},
    "seqused_k": {"seqused_k": True},
    "window": {"window": (100, 0)},
    "softcap": {"softcap": 20.0},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "ALiBi": {"alibi": True},
    "sinks": {"sinks": True},
    "float32": {"dtype": "float32"},
    "multiples of 8": {"head_dim": 68},
    "256": {"head_dim": 264},
    "pads": {"head_dim": 32},
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("words", UNCOVERED)
def test_the_note_says_why_hopper_does_not_run(words: str, backward: bool) -> None:
    found = answer(problem(**UNCOVERED[words], backward=backward), machine())
    assert isinstance(found, Plan), found
    assert found.mechanism == "portable"
    assert words in found.note


def test_the_note_names_every_feature_at_once() -> None:
    note = planned(problem(softcap=1.0, bias=True, sinks=True), machine()).note
    assert all(word in note for word in ("softcap", "bias", "sinks"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_q": 200}, "256 keys"),
        ({"seq_q": 1, "seq_k": 9000}, "few query rows"),
        ({"seq_q": 4096, "seq_k": 0}, "no keys"),
    ],
)
def test_the_note_of_forward_shapes(options: dict[str, Any], words: str) -> None:
    plan = planned(problem(**options), machine())
    assert plan.mechanism == "portable" and words in plan.note


def test_other_devices_say_so() -> None:
    for device in set(DEVICES) - {"sm_90"}:
        plan = planned(problem(32), machine(device))
        assert plan.mechanism == "portable" and "sm_90" in plan.note


def test_unequal_head_dims() -> None:
    assert planned(problem(128, head_dim_v=64), machine()).mechanism == "hopper"
    plan = planned(problem(128, head_dim_v=64, backward=True), machine())
    assert plan.mechanism == "portable" and "equal head dims" in plan.note


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("version", "mechanism"),
    [
        ("3.5.1", "portable"),
        ("3.6.0", "hopper"),
        ("3.6.1+git1234", "hopper"),
        ("3.7.0", "portable"),
        ("3.9.0", "portable"),
        ("4.0.0a1", "portable"),
    ],
)
def test_hopper_speaks_one_triton(version: str, mechanism: str, backward: bool) -> None:
    plan = planned(problem(causal=True, backward=backward), machine(triton=version))
    assert plan.mechanism == mechanism
    if mechanism == "portable":
        assert version in plan.note and "3.6" in plan.note


# ---- nothing heavy -------------------------------------------------------------------------------
def test_planning_imports_no_framework(fresh: Callable[..., Any]) -> None:
    fresh(
        "import sys\n"
        "from portattn.backends.triton_jit import BACKEND\n"
        "from portattn.machine import Machine\n"
        "from portattn.problem import Problem\n"
        "for backward in (False, True):\n"
        "    asked = Problem.from_numbers(head_dim=128, dtype='float16', seq_q=4096,\n"
        "                                 backward=backward)\n"
        "    assert not BACKEND.why_not(None, Machine.pretend('sm_90'))\n"
        "    assert not BACKEND.why_not(asked, Machine.pretend('sm_90'))\n"
        "    assert BACKEND.plan(asked, Machine.pretend('sm_90')).shared_memory_bytes\n"
        "BACKEND.why_not(asked, Machine.here())\n"
        "assert not {'triton', 'torch', 'numpy'} & set(sys.modules), set(sys.modules)",
        TRITON_INTERPRET=None,
    )


def test_the_kernels_are_among_the_files_of_a_certificate() -> None:
    names = {Path(f).name for f in BACKEND.kernel_files()}
    assert {
        "forward.py",
        "hopper_forward.py",
        "backward.py",
        "planner.py",
        "portable.json",
    } <= names


def test_an_interpreter_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under TRITON_INTERPRET=1 the arrays are on the host, hopper does not run, bfloat16 neither
    (BUG-097)."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on = dataclasses.replace(Machine.here(), packages={"triton": "3.6.0", "torch": "2.9.0"})
    assert BACKEND.device_kinds == ("cpu",)
    assert BACKEND.claims["simulated"] and BACKEND.claims["acc"] == "fp32"
    plan = planned(problem(64, "float32", device="cpu"), on)
    assert plan.mechanism == "portable" and plan.note == "interpreted"
    (reason,) = refused(problem(64, "bfloat16", device="cpu"), on)
    assert (reason.code, reason.got) == ("dtype", "bfloat16")
    assert "bfloat16" not in reason.limit and "interpreter" in reason.hint
    (reason,) = refused(problem(64, "float32", device="cuda:0"), on)
    assert reason.field == "device"
    missing = dataclasses.replace(on, packages={"torch": "2.9.0"})
    (reason,) = BACKEND.why_not(None, missing)
    assert reason.code == "package_missing" and "portattn[triton]" in reason.hint
    monkeypatch.delenv("TRITON_INTERPRET")
    assert BACKEND.device_kinds == ("cuda",) and "simulated" not in BACKEND.claims


def test_the_device_of_the_arrays_counts() -> None:
    """Two devices of different kinds: each problem is planned for its own."""
    first, second = (Machine.pretend(d).cuda.devices[0] for d in ("sm_89", "sm_90"))
    cuda = Machine.pretend().cuda
    both = dataclasses.replace(
        machine(),
        cuda_state=dataclasses.replace(cuda, devices=(first, dataclasses.replace(second, index=1))),
    )
    assert planned(problem(device="cuda:0"), both).mechanism == "portable"
    assert planned(problem(device="cuda:1"), both).mechanism == "hopper"
    assert planner.target(problem(device="cuda:1"), both).shared_memory == 232_448
