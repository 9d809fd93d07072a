"""Tuning: the file of measured tiles, when it counts, the command, and what the Triton backend
would measure.

The rule kept here: no device is needed; what a device would say is made up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from portattn import registry, tune_command, tuning
from portattn.__main__ import cli
from portattn.backends.triton_jit import BACKEND, config, overrides, planner, tune
from portattn.backends.triton_jit.config import Tile
from portattn.contract import Reason
from portattn.machine import SHARED_MEMORY, Cuda, Device, Machine

KEY, DEVICE = "prefill/2/128", "NVIDIA H200"
ROWS = [[128, 64, 8, 3, 181248, 181248], [64, 64, 4, 2, 82456, 99999]]
META = {"kernel_hash": "abc", "triton": "3.6.0", "created": "2026-01-01"}
NOW = {"kernel_hash": "abc", "triton": "3.6.0"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own."""
    monkeypatch.setenv("PORTATTN_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def keep(entries: Any = None, meta: Any = None) -> Path:
    return tuning.store("triton", DEVICE, entries or {KEY: ROWS}, meta or META)


def look(key: str = KEY, now: dict[str, Any] | None = None) -> Any:
    return tuning.lookup("triton", DEVICE, key, None if now is None else lambda: now)


# ---- the file ------------------------------------------------------------------------------------
def test_what_is_stored_is_found_for_its_backend_device_and_key_alone(folder: Path) -> None:
    assert look() is None
    file = keep()
    assert file == folder / "tuned" / "triton-nvidia-h200.json"
    assert look() == ROWS
    assert look("rows/2/128") is None
    assert tuning.lookup("cupy", DEVICE, KEY) is None
    assert tuning.lookup("triton", "NVIDIA A100", KEY) is None
    assert tuning.lookup("triton", "", KEY) is None
    record = json.loads(file.read_text())
    assert (record["schema"], record["device"], record["meta"]) == (tuning.SCHEMA, DEVICE, META)


def test_what_a_caller_does_to_the_rows_changes_nothing() -> None:
    keep()
    look().clear()
    look()[0][0] = 7
    assert look() == ROWS


@pytest.mark.parametrize("part", ["kernel_hash", "triton"])
def test_tiles_of_another_source_or_compiler_are_ignored(part: str) -> None:
    keep()
    assert look(now=NOW) == ROWS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert look(now=NOW | {part: "other"}) is None


def test_what_tiles_hang_on_is_asked_only_where_there_is_a_file() -> None:
    def never() -> dict[str, Any]:
        raise AssertionError

    assert tuning.lookup("triton", DEVICE, KEY, never) is None


def test_a_looked_up_file_is_read_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    reads = []
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, **k: reads.append(p) or real(p, **k))
    for _ in range(3):
        look()
    assert len(reads) == 1
    keep({KEY: ROWS[:1]})
    assert look() == ROWS[:1]


def test_storing_keeps_other_keys_of_the_same_source_and_drops_those_of_another() -> None:
    keep()
    keep({"rows/2/128": ROWS}, META | {"created": "later"})
    assert look() == look("rows/2/128") == ROWS
    keep({"long/2/128": ROWS}, META | {"kernel_hash": "new"})
    assert look() is None
    assert look("long/2/128") == ROWS


def test_none_takes_a_key_away_and_the_last_one_the_file() -> None:
    file = keep({KEY: ROWS, "rows/2/128": ROWS})
    keep({KEY: None})
    assert look() is None
    assert look("rows/2/128") == ROWS
    keep({"rows/2/128": None})
    assert not file.exists()


def test_clear_says_whether_there_was_anything(folder: Path) -> None:
    keep()
    assert tuning.clear("triton", DEVICE) is True
    assert tuning.clear("triton", DEVICE) is False
    assert look() is None


GOOD = {"schema": tuning.SCHEMA, "backend": "triton", "meta": META, "entries": {KEY: ROWS}}
BAD = {
    "empty": "",
    "cut off": json.dumps(GOOD)[:60],
    "not an object": "[1]",
    "deep": "[" * 100_000,
    "another schema": json.dumps(GOOD | {"schema": 2}),
    "another backend": json.dumps(GOOD | {"backend": "cupy"}),
    "no meta": json.dumps(GOOD | {"meta": None}),
    "no entries": json.dumps({k: v for k, v in GOOD.items() if k != "entries"}),
    "no rows": json.dumps(GOOD | {"entries": {KEY: []}}),
    "rows of text": json.dumps(GOOD | {"entries": {KEY: [["64"]]}}),
    "rows of truth": json.dumps(GOOD | {"entries": {KEY: [[True]]}}),
    "a number": json.dumps(GOOD | {"entries": {KEY: 3}}),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_file_that_makes_no_sense_is_ignored_with_one_warning(text: str) -> None:
    file = keep()
    file.write_text(text)
    with pytest.warns(RuntimeWarning, match="is ignored") as caught:
        assert look() is None
        assert look() is None
    assert len(caught) == 1
    assert str(file) in str(caught[0].message)
    keep()  # written anew
    assert look() == ROWS


def test_bytes_that_are_no_text_are_ignored() -> None:
    keep().write_bytes(b"\xff\xfe\x00{")
    with pytest.warns(RuntimeWarning, match="UnicodeDecodeError"):
        assert look() is None


@pytest.mark.parametrize("what", ["a folder there", "a file for a folder"])
def test_a_path_that_holds_no_file_is_no_error_at_call_time(folder: Path, what: str) -> None:
    if what == "a folder there":
        tuning.path("triton", DEVICE).mkdir(parents=True)
        with pytest.warns(RuntimeWarning, match="is ignored"):
            assert look() is None
    else:
        folder.mkdir()
        (folder / "tuned").write_text("")
        assert look() is None
        with pytest.raises(OSError):  # but storing there says so
            keep()


def test_a_store_that_fails_leaves_the_old_file_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = keep()

    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        keep({KEY: ROWS[:1]})
    assert look() == ROWS
    assert list(file.parent.iterdir()) == [file]


def test_a_read_only_folder_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.check_writable("triton", DEVICE)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="cannot be written"):
        tuning.check_writable("triton", DEVICE)


def test_devices_are_named_in_files_by_letters_and_digits() -> None:
    assert tuning.slug("NVIDIA GeForce RTX 4090 (x/../y)") == "nvidia-geforce-rtx-4090-x-y"


# ---- the command ---------------------------------------------------------------------------------
class Fake:
    """A backend that can be tuned without a device."""

    name = "fake"
    device_kinds = ("cpu",)
    packages = ()

    def __init__(self, entries: dict[str, Any] | None = None) -> None:
        self.entries = {KEY: ROWS, "rows/2/128": None} if entries is None else entries
        self.asked: Any = None
        self.against: tuple[Reason, ...] = ()

    def why_not(self, problem: Any, machine: Machine) -> tuple[Reason, ...]:
        return self.against

    def tune(
        self,
        head_dims: Sequence[int],
        dtypes: Sequence[str],
        kinds: Sequence[str],
        report: Callable[[tuning.Step], None],
    ) -> tuning.Tuned:
        self.asked = (tuple(head_dims), tuple(dtypes), tuple(kinds))
        if "nothing" in kinds:
            raise ValueError("kind: got nothing; want one of prefill, rows")
        for done in range(3):
            report(tuning.Step(done, 2, f"[{KEY}] step {done}"))
        old, new = (64, 64, 4, 2), (128, 64, 8, 3)
        results = (
            tuning.Result(KEY, "any rows", old, new, 3e-3, 2e-3, tried=9, skipped=2, wrong=1),
            tuning.Result("rows/2/128", "up to 16 rows", old, old, 1e-5, 1e-5),
        )
        return tuning.Tuned(Machine.here().slug(), META, self.entries, results)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    found = {**registry.find_backends(), "fake": registry.Found("fake", "here", made)}  # type: ignore[arg-type]
    monkeypatch.setattr(tune_command, "find_backends", lambda: found)
    return made


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(code="driver_missing", problem="no NVIDIA driver")
    machine = Machine(cuda_state=cuda, packages={"triton": "3.6.0", "torch": "2.9"}, imports={})
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: machine))


def run(*args: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli, ["tune", *args])


def test_the_command_prints_old_new_and_ratio_and_writes(fake: Fake) -> None:
    result = run("--backend", "fake")
    assert result.exit_code == 0, result.output
    assert fake.asked == ((128,), ("bfloat16",), ())
    for word in ("64x64x4x2", "128x64x8x3", "1.50", "as shipped", "1 of 2 keys", "written to"):
        assert word in result.output
    assert tuning.lookup("fake", Machine.here().slug(), KEY, lambda: NOW) == ROWS


def test_options_reach_the_backend(fake: Fake) -> None:
    args = "--backend fake --head-dim 64 --head-dim 256 --dtype float16 --kind rows --kind long"
    assert run(*args.split()).exit_code == 0
    assert fake.asked == ((64, 256), ("float16",), ("rows", "long"))


def test_a_dry_run_writes_nothing(fake: Fake, folder: Path) -> None:
    result = run("--backend", "fake", "--dry-run")
    assert result.exit_code == 0
    assert "nothing written" in result.output
    assert not folder.exists()


def test_nothing_better_leaves_no_file(fake: Fake) -> None:
    fake.entries = {KEY: None}
    result = run("--backend", "fake")
    assert result.exit_code == 0
    assert "the shipped tiles stay" in result.output
    assert not tuning.path("fake", Machine.here().slug()).exists()


def test_reset_removes_what_was_written(fake: Fake) -> None:
    run("--backend", "fake")
    fake.asked = None
    assert "back to the shipped tiles" in run("--backend", "fake", "--reset").output
    assert "were in use" in run("--backend", "fake", "--reset").output
    assert fake.asked is None
    assert tuning.lookup("fake", Machine.here().slug(), KEY) is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--backend nobody", "no backend 'nobody'"),
        ("--backend numpy", "numpy has nothing to tune; these have:"),
        ("--backend fake --kind nothing", "want one of prefill, rows"),
        ("--backend fake --dry-run --reset", "exclude each other"),
        ("--backend fake --head-dim 0", "--head-dim"),
    ],
)
def test_a_wrong_question_exits_2_and_says_why(fake: Fake, args: str, said: str) -> None:
    result = run(*args.split())
    assert result.exit_code == 2
    assert said in result.output


def test_without_a_device_the_command_exits_2_with_the_reasons(
    fake: Fake, without_cuda: None
) -> None:
    fake.against = BACKEND.why_not(None, Machine.here())
    assert fake.against
    result = run("--backend", "fake")
    assert result.exit_code == 2
    assert "driver_missing" in result.output
    assert fake.asked is None
    fake.device_kinds = ("cuda",)
    result = run("--backend", "fake", "--reset")
    assert result.exit_code == 2
    assert "no device here to reset: no NVIDIA driver" in result.output


def test_triton_without_a_device_exits_2(without_cuda: None) -> None:
    result = run("--backend", "triton")
    assert result.exit_code == 2
    assert "driver_missing" in result.output or "nothing to tune" in result.output


def test_a_folder_that_cannot_be_written_is_said_before_measuring(fake: Fake, folder: Path) -> None:
    folder.mkdir()
    (folder / "tuned").write_text("")
    result = run("--backend", "fake")
    assert result.exit_code == 1
    assert "nothing was measured" in result.output
    assert fake.asked is None


def test_a_write_that_fails_exits_1_after_the_table(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("disk is read-only")

    monkeypatch.setattr(os, "replace", refuse)
    result = run("--backend", "fake")
    assert result.exit_code == 1
    assert "128x64x8x3" in result.output
    assert "disk is read-only" in result.output


def test_help_lists_the_command() -> None:
    assert "tune" in CliRunner(env={"COLUMNS": "160"}).invoke(cli, ["--help"]).output
    assert "--dry-run" in run("--help").output


# ---- what the Triton backend measures ------------------------------------------------------------
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
    keep({KEY: ROWS, "rows/2/128": [[17, 64, 4, 2, 1, 1]]}, now)
    assert overrides.rows(DEVICE, KEY) == ROWS
    assert overrides.rows(DEVICE, "rows/2/128") is None
    assert overrides.rows("", KEY) is None
    keep({KEY: ROWS}, now | {"kernel_hash": "other"})
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
    keep({KEY: [[128, 32, 4, 2, 90000, 90000]]}, overrides.now())
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
