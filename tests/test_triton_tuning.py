"""Tuning of the Triton backend: what it would measure, which tile wins, and when that one counts.

The rule kept here: no device is needed; what a device would say is made up.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from portattn import tuning
from portattn.backends.triton_jit import config, overrides, planner, tune
from portattn.backends.triton_jit.config import Tile
from portattn.machine import SHARED_MEMORY, Cuda, Device, Machine

KEY, DEVICE = "prefill/2/128", "NVIDIA H200"
ROWS = [[128, 64, 8, 3, 181248, 181248], [64, 64, 4, 2, 82456, 99999]]

pytestmark = pytest.mark.usefixtures("own_evidence")
DEVICES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_120": (12, 0)}


def target(device: str) -> planner.Target:
    capability = DEVICES[device]
    limits = config.Limits(mechanism="portable")
    return planner.Target(capability, SHARED_MEMORY[capability], 100, limits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256, 512])
def test_a_job_starts_from_the_tile_that_the_planner_picks(
    device: str, dtype: str, head_dim: int
) -> None:
    on = target(device)
    found = tune.jobs((head_dim,), (dtype,), (), on)
    kinds = {key.split("/")[0] for key in config.table()["sm_90"]}
    assert {job.key.split("/")[0] for job in found} == kinds
    for job in found:
        assert job.problems
        for problem in job.problems:
            assert planner.forward_tile(problem, on) == job.seeds[0]
            assert config.few_rows(problem) == bool(job.block_q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_candidates_are_few_new_and_of_the_rows_asked_for(device: str, dtype: str) -> None:
    on = target(device)
    for job in tune.jobs((32, 128, 256), (dtype,), (), on):
        tiles = tune.candidates(job, on.shared_memory)
        shapes = [dataclasses.astuple(t)[:4] for t in (job.seeds[0], *tiles)]
        assert 0 < len(tiles) <= tune.MOST
        assert len(set(shapes)) == len(shapes)
        assert not job.block_q or {t.block_q for t in tiles} == {job.block_q}
        for tile in tiles:  # what `overrides` takes
            assert overrides._sound([*dataclasses.astuple(tile)[:4], 1, 1]), tile


def test_the_least_bytes_are_no_more_than_the_compiler_reports() -> None:
    for kinds in config.table().values():
        for key, tiles in kinds.items():
            _, size, dim = key.split("/")
            for tile in tiles:
                least = tune.least_bytes(tile, int(dim), int(size))
                assert least <= tile.shared_bytes or not tile.shared_bytes, (key, tile)


def test_head_dims_and_dtypes_of_one_key_are_one_job() -> None:
    on = target("sm_90")
    one = tune.jobs((128,), ("bfloat16",), ("prefill",), on)
    both = tune.jobs((96, 128), ("bfloat16", "float16"), ("prefill",), on)
    assert len(one) == len(both) == 1
    assert len(both[0].problems) == 4 * len(one[0].problems)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kind", "said"),
    [
        (128, "bfloat16", "small", "want one of long, prefill, rows"),
        (128, "bfloat16", "typo", "got typo"),
        (128, "float64", "prefill", "float16 or bfloat16 or float32"),
        (128, "int8", "prefill", "int8"),
        (5000, "float16", "prefill", "head_dim=5000"),
    ],
)
def test_what_cannot_be_tuned_is_said(head_dim: int, dtype: str, kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tune.jobs((head_dim,), (dtype,), (kind,), target("sm_90"))


@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_merged_winner_is_what_the_planner_finds(device: str, head_dim: int) -> None:
    on = target(device)
    limit = on.shared_memory
    for job in tune.jobs((head_dim,), ("float16",), (), on):
        shipped = config.table()[config.family(on.capability)][job.key]
        for tile in tune.candidates(job, limit):
            winner = dataclasses.replace(tile, shared_bytes=tile.shared_bytes or 4096)
            tiles = tune.merged(shipped, winner, job.block_q)
            if not job.block_q:
                assert tiles[0] == winner
                continue
            assert config.rows_tile(tiles, job.block_q, limit) == winner
            for rows in (1, 16, 32, 64, 128):  # other rows find what they found
                was, now = (config.rows_tile(t, rows, limit) for t in (shipped, tiles))
                if was is not None and was.block_q != job.block_q:
                    assert now == was


def test_overrides_hang_on_the_sources_and_refuse_what_is_no_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = overrides.now()
    assert set(now) == {"kernel_hash", "triton"}
    folder = Path(overrides.__file__).parent
    assert all((folder / name).exists() for name in overrides.SOURCES)
    entries = {KEY: ROWS, "rows/2/128": [[17, 64, 4, 2, 1, 1]]}
    tuning.store("triton", DEVICE, entries, now)
    assert overrides.rows(DEVICE, KEY) == ROWS
    assert overrides.rows(DEVICE, "rows/2/128") is None
    assert overrides.rows("", KEY) is None
    tuning.store("triton", DEVICE, {KEY: ROWS}, now | {"kernel_hash": "other"})
    assert overrides.rows(DEVICE, KEY) is None


@pytest.mark.parametrize(
    "row",
    [[64, 64, 4, 2, 9], [64, 64, 4, 2, 0, 9], [64, 64, 4, 2, 9, 8], [0, 64, 4, 2, 9, 9],
     [256, 64, 8, 2, 9, 9], [64, 8, 4, 2, 9, 9], [64, 64, 3, 2, 9, 9], [64, 64, 4, 0, 9, 9],
     [64, 64, 32, 2, 9, 9]],
)  # fmt: skip
def test_a_row_that_is_no_tile(row: list[int]) -> None:
    assert not overrides._sound(row)


def test_a_plan_uses_what_was_measured_on_its_device_alone() -> None:
    measured = {KEY: [[128, 32, 4, 2, 90000, 90000]]}
    tuning.store("triton", DEVICE, measured, overrides.now())
    problem = tune.Problem.from_numbers(head_dim=128, dtype="float16", seq_q=4096, softcap=30.0)
    tiles = {}
    for name in (DEVICE, "NVIDIA H100"):
        device = Device(0, name, (9, 0), SHARED_MEMORY[9, 0], 132)
        on = planner.target(problem, Machine(cuda_state=Cuda("580", (device,))))
        tiles[name] = planner.forward_tile(problem, on)
    shipped = config.table()["sm_90"][KEY][0]
    assert tiles["NVIDIA H100"] == shipped
    assert tiles[DEVICE] == Tile(128, 32, 4, 2, 90000, 90000)


class Case:
    """Stands for a device: 10 ms with the shipped tile; others by their shape."""

    base_seconds = 0.01

    def __init__(self, problem: Any, shipped: Tile, on: planner.Target) -> None:
        self.shipped = shipped

    def compare(self, tile: Tile) -> tuple[float, float] | None:
        if tile.num_stages == 1:
            raise RuntimeError("out of resource: shared memory")
        if tile.num_warps == 2:
            return None  # computes something else
        speed = {(128, 128, 8): 3.0, (128, 64, 8): 2.0, (64, 128, 4): 1.01}
        return 0.01, 0.01 / speed.get((tile.block_q, tile.block_k, tile.num_warps), 0.5)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    made = Device(0, DEVICE, (9, 0), SHARED_MEMORY[9, 0], 132)
    machine = Machine(
        cuda_state=Cuda("580", (made,)), packages={"triton": "3.6.0", "torch": "2.9"}, imports={}
    )
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: machine))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "_Case", Case)
    monkeypatch.setattr(
        tune,
        "measured",
        lambda tile, *_: dataclasses.replace(
            tile, shared_bytes=10**6 if tile.block_k == 128 else 150_000, masked_bytes=10**6
        ),
    )
    seeds = [Tile(64, 64, 4, 3, 115248, 9**6), Tile(128, 64, 4, 3, 115248, 9**6)]
    seeds.append(Tile(64, 32, 4, 1, 25088, 9**6))
    monkeypatch.setattr(config, "table", lambda: {"sm_90": {KEY: seeds}, "sm_80": {}})
    return made


def test_the_fastest_that_is_right_and_fits_wins(device: Device) -> None:
    steps: list[tuning.Step] = []
    tuned = tune.tune((128,), ("bfloat16",), ("prefill",), steps.append)
    (result,) = tuned.results
    assert result.new[:3] == (128, 64, 8)  # the one with 128 keys is faster and does not fit
    assert result.old == (64, 64, 4, 3)
    assert result.ratio == pytest.approx(2.0)
    assert result.skipped and result.wrong
    assert result.tried + result.skipped + result.wrong == steps[-1].total == steps[-1].done
    assert [s.done for s in steps] == list(range(len(steps)))
    assert tuned.device == device.name
    assert tuned.meta["driver"] == "580" and tuned.meta["torch"] == "2.9"
    rows = tuned.entries[KEY]
    assert rows is not None
    assert rows[0] == [*result.new, 150_000, 10**6]
    assert rows[1:] == [list(dataclasses.astuple(t)) for t in config.table()["sm_90"][KEY]]
    tuning.store("triton", tuned.device, tuned.entries, tuned.meta)
    assert tuning.lookup("triton", DEVICE, KEY, overrides.now) == rows


def test_what_is_faster_within_the_noise_does_not_win(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Case, "compare", lambda self, tile: (0.01, 0.0099))
    tuned = tune.tune((128,), ("bfloat16",), ("prefill",), lambda step: None)
    (result,) = tuned.results
    assert result.new == result.old
    assert result.ratio == 1.0
    assert tuned.entries == {KEY: None}


def test_a_lost_device_ends_the_tuning(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune.tune((128,), ("bfloat16",), ("prefill",), lambda step: None)


def test_the_compiler_says_what_a_tile_takes() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    (tile,) = config.table()["sm_80"]["prefill/2/64"][:1]
    blank = dataclasses.replace(tile, shared_bytes=0, masked_bytes=0)
    assert tune.measured(blank, "prefill/2/64", (8, 0)) == tile
