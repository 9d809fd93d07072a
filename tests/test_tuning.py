"""Tuning: the file of measured tiles, when it counts, and the command.

The rule kept here: no device is needed; what a device would say is made up.
"""

from __future__ import annotations

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
from portattn.backends.triton_jit import BACKEND
from portattn.contract import Reason
from portattn.machine import Cuda, Machine

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
