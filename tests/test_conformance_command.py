"""`portattn conformance run` and its like: what they take, and a run of some dtypes alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from engine_kit import CATALOGUE, HERE, MANIFEST, cases_of, invoke, wrong_in

from portattn.conformance import (
    audit,
    identity,
    record,
    runner,
    show,
)
from portattn.conformance.checks import CATALOGUE as REAL
from portattn.conformance.cli import LATER, cli
from portattn.conformance.manifest import Manifest
from portattn.conformance.runner import Options
from portattn.conformance.targets import SHIPPED

pytestmark = pytest.mark.usefixtures("own_evidence")


# ---- the command line ----------------------------------------------------------------------------
def test_exit_status_and_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    junit = tmp_path / "j.xml"
    result = invoke(
        "run", "--target", "conformance_kit:WrongValue", "--tier", "cpu", "-o", str(out),
        "--junit", str(junit),
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert [path.name for path in out.iterdir()] == ["good.json"]
    assert "F01/trigger" in result.output
    assert "portattn conformance replay F01/trigger" in result.output
    assert "level: none" in result.output
    tree = ET.parse(junit).getroot()
    assert len(tree.findall(".//testcase")) == 4
    assert [e.get("name") for e in tree.findall(".//testcase[failure]")] == ["F01/trigger"]
    assert [e.get("name") for e in tree.findall(".//testcase[skipped]")] == ["K01/softcap"]


def test_a_level_that_is_not_granted_is_status_1() -> None:
    common = ("run", "--target", "conformance_kit:Good", "--tier", "cpu")
    result = invoke(*common)
    assert result.exit_code == 0, result.output
    assert "L1 (head dim 256) is not granted: K01 NOT_SUPPORTED" in result.output
    assert invoke(*common, "--level", "L0").exit_code == 0
    assert invoke(*common, "--level", "1").exit_code == 1


def test_a_harness_error_is_status_2() -> None:
    result = invoke("run", "--target", "conformance_kit:Good", "--tier", "gpu", "--checks", "E01")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("run", "--backend", "numpy", "--target", "naive"),
        ("run", "--target", "naive", "--tier", "huge"),
        ("run", "--target", "naive", "--fraction", "3/2"),
        ("run", "--target", "naive", "--level", "L9"),
        ("run", "--target", "conformance_kit:Good", "--checks", "Z99"),
        ("replay", "F01/none", "--target", "conformance_kit:Good"),
        ("replay", "F01", "--target", "conformance_kit:Good"),
        ("replay", "a", "b", "c"),
    ],
)
def test_bad_arguments_are_status_2(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


def test_json_is_the_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "portattn.conformance.cli", "run", "--target",
         "conformance_kit:Good", "--tier", "smoke", "--catalogue", CATALOGUE, "--json"],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["schema"] == record.SCHEMA
    assert "3/3 cases" in done.stderr


def test_list_names_every_check_and_target() -> None:
    rows = json.loads(invoke("list", "--json").output)
    assert [row["id"] for row in rows] == ["F01", "K01", "M01", "E01"]
    assert rows[1]["level"] == "L1"
    lines = CliRunner().invoke(cli, ["list", "--targets"]).output.splitlines()
    assert [line.split()[0] for line in lines] == list(SHIPPED)
    assert "works here" in lines[0]
    told = json.loads(CliRunner().invoke(cli, ["list", "--targets", "--json"]).output)
    assert told["naive"] == {"spec": SHIPPED["naive"], "why_not": ""}


def test_a_broken_later_command_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LATER, "report", ("conformance_kit_that_is_not:command", "Draw."))
    helped = CliRunner().invoke(cli, ["--help"])
    assert helped.exit_code == 0
    assert "Draw." in helped.output
    summaries = helped.output.partition("Commands:")[2]
    assert "…" not in summaries and "..." not in summaries
    broken = CliRunner().invoke(cli, ["report", "x"])
    assert broken.exit_code == 2
    assert "report cannot be loaded" in broken.output


def test_help_names_exit_statuses_and_every_option() -> None:
    told = CliRunner().invoke(cli, ["run", "--help"]).output
    for status in ("0 ", "1 ", "2 ", "3 ", "130"):
        assert f"\n    {status}" in told, status
    assert "PORTATTN_DATA_DIR" in told
    commands = {name: cli.get_command(click.Context(cli), name) for name in ("run", "replay")}
    for command in commands.values():
        assert command is not None
        for option in command.params:
            hidden = isinstance(option, click.Option) and option.hidden
            assert hidden or not isinstance(option, click.Option) or option.help, option.name


# ---- a run of some dtypes ------------------------------------------------------------------------
TWO = "conformance_kit:TwoDtypes"


def test_dtypes_narrow_the_manifest_and_nothing_else() -> None:
    manifest = Manifest.parse({**MANIFEST, "dtypes": ["float32", "float16", "bfloat16"]})
    narrow = manifest.narrowed(["bfloat16", "float16"])
    assert narrow.dtypes == ("float16", "bfloat16")
    assert narrow.unasked_dtypes == ("float32",)
    assert Manifest.parse(narrow.to_json()) == narrow
    assert narrow.narrowed(["float16"]).unasked_dtypes == ("bfloat16", "float32")
    with pytest.raises(ValueError, match="does not claim dtype 'float64'"):
        manifest.narrowed(["float64"])
    # what is not asked is not taken for refused either
    assert [case.params["dtype"] for case in REAL["P05"].cases(narrow, "smoke")] == [
        "float16", "float64",
    ]  # fmt: skip


def test_a_run_of_one_dtype_says_so_everywhere(tmp_path: Path) -> None:
    common = ("run", "--target", TWO, "--tier", "cpu")
    out = tmp_path / "out"
    result = invoke(*common, "--dtype", "float32", "-o", str(out), "--level", "L0")
    assert result.exit_code == 0, result.output
    assert "level: L0 (core forward), for float32 only" in result.output
    path = out / "two.json"
    made = record.read(path)
    assert made["target"]["manifest"]["dtypes"] == ["float32"]
    assert made["target"]["manifest"]["unasked_dtypes"] == ["float16"]
    assert "level L0 for float32 only" in invoke("verify", str(path)).output
    assert "--dtype=float32" in record.replay_command(made, "F01/before")
    assert invoke("replay", "F01/after", "--target", TWO, "--dtype", "float32").exit_code == 0
    whole = runner.execute(runner.prepare(Options(TWO, "cpu", catalogue=CATALOGUE)))
    assert any("unasked_dtypes" in line for line in audit.diff(made, whole)["context"])
    with pytest.raises(record.RecordError, match="do not belong together"):
        audit.merge([made, whole])
    refused = invoke(*common, "--dtype", "float64")
    assert refused.exit_code == 2
    assert "claims float16, float32" in refused.output


def test_a_run_of_other_dtypes_is_not_taken_up(tmp_path: Path) -> None:
    def prepared(*dtypes: str) -> runner.Run:
        return runner.prepare(Options(TWO, "cpu", catalogue=CATALOGUE, dtypes=dtypes or None))

    journal = tmp_path / "two.journal.jsonl"
    runner.execute(prepared("float32"), journal)
    again: list[runner.Progress] = []
    runner.execute(prepared("float32"), journal, again.append)
    assert again[0].done == again[0].total
    for other in (("float16",), ()):
        with pytest.raises(runner.OtherDtypes, match="was begun for dtypes float32"):
            runner.execute(prepared(*other), journal)
    result = invoke("run", "--target", TWO, "--tier", "cpu", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "--fresh" in result.output


def test_fractions_of_a_restricted_run_merge() -> None:
    parts = [
        runner.execute(
            runner.prepare(
                Options(TWO, "cpu", fraction=(i, 2), catalogue=CATALOGUE, dtypes=("float32",))
            )
        )
        for i in (1, 2)
    ]
    made = audit.merge(parts)
    assert wrong_in(made) == []
    assert record.only_dtypes(made) == "float32"


def test_a_selection_says_in_one_line_that_it_grants_nothing() -> None:
    result = invoke("run", "--target", "conformance_kit:Good", "--tier", "cpu", "--checks", "F01")
    assert result.exit_code == 0
    assert result.output.count("grants no level") == 1
    assert "is not granted" not in result.output
    assert result.output.count("record: ") == 1
    assert "belong to another tier" in result.output


def test_the_worst_number_is_seen_whatever_its_gate() -> None:
    assert show.worst_ratio({"numbers": {"e1_det": 9.0, "e1_prob": 0.5}}) == 0.5
    assert show.worst_ratio({"numbers": {"e1_prob": 0.5, "e3": 0.7}}) == 0.7
    assert show.worst_ratio({"numbers": {"share_over": 1.2, "peak_bytes": 1e9}}) == 1.2
    assert show.worst_ratio({"numbers": {"different_bad": 3, "anything": 7}}) is None


def test_what_shows_records_makes_none_stale(tmp_path: Path) -> None:
    root = tmp_path / "conformance"
    shutil.copytree(Path(identity.__file__).parent, root)
    before = identity.hash_of(root)
    assert before == identity.suite()["hash"]

    def edit(name: str) -> str:
        path = root / name
        text = path.read_text()
        path.write_text(text + "\n# another line\n")
        found = identity.hash_of(root)
        path.write_text(text)
        return found

    for name in ("report/plots.py", "index.py", "show.py", "junit.py", "cli.py"):
        assert edit(name) == before, name
    for name in ("checks/forward.py", "bounds.py", "targets/flex.py", "audit.py"):
        assert edit(name) != before, name


def test_ctrl_c_keeps_what_was_answered_and_the_run_resumes(tmp_path: Path) -> None:
    arguments = [
        "run", "--target", "conformance_kit:Good", "--tier", "gpu", "--checks", "F01,M01",
        "--catalogue", CATALOGUE, "-o", str(tmp_path),
    ]  # fmt: skip
    command = [sys.executable, "-m", "portattn.conformance.cli", *arguments]
    listening = (  # a shell hands down to what it runs in the background that SIGINT is ignored
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('portattn.conformance.cli', run_name='__main__', alter_sys=True)"
    )
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    journal = tmp_path / "good.journal.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", listening, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not journal.exists() or len(journal.read_text().splitlines()) < 6:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    partial = record.read(tmp_path / "good.partial.json")
    kept = cases_of(partial)
    assert 5 <= len(kept) < 43
    assert not partial["complete"]
    assert audit.verify(partial, runner.catalogue_of(CATALOGUE), partial["suite"]) == []
    # a line that was cut while the machine went down is asked again
    journal.write_text(journal.read_text() + '["M01/slow-39", {"verd')
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert f"{len(kept)}/43 cases" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.json"]
    whole = record.read(tmp_path / "good.json")
    assert len(cases_of(whole)) == 43
    for case_id, case in kept.items():
        assert cases_of(whole)[case_id] == case


def test_a_journal_of_another_run_is_not_taken_up(tmp_path: Path) -> None:
    first = runner.prepare(Options("conformance_kit:Good", "smoke", catalogue=CATALOGUE))
    path = tmp_path / "j.jsonl"
    runner.execute(first, path)
    counted: list[int] = []
    options = Options("conformance_kit:Good", "smoke", seed=1, catalogue=CATALOGUE)
    runner.execute(runner.prepare(options), path, lambda at: counted.append(at.done))
    assert counted[0] == 0
    same = runner.prepare(options)
    counted.clear()
    runner.execute(same, path, lambda at: counted.append(at.done))
    assert counted == [3]


def test_only_whole_backend_runs_become_evidence(tmp_path: Path) -> None:
    result = invoke("run", "--backend", "numpy", "--tier", "cpu", "--checks", "F01")
    assert result.exit_code == 0, result.output
    data = tmp_path / "data"
    assert not (data / "evidence").exists()
    assert invoke("run", "--backend", "numpy", "--tier", "cpu").exit_code == 0
    evidence = data / "evidence" / "numpy.json"
    made = record.read(evidence)
    assert made["tier"] == "cpu"
    assert made["fingerprint"]["kernel_hash"]
    assert invoke("run", "--backend", "numpy", "--tier", "smoke").exit_code == 0
    assert record.read(evidence)["tier"] == "cpu"  # the weaker run does not replace it
    assert (data / "records" / "numpy-smoke.json").exists()
