"""What a run of the suite leaves: records, what the command says, dtypes left out, waivers."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from engine_kit import CATALOGUE, HERE, MANIFEST, cases_of, invoke, run_kit

from portattn.conformance import (
    audit,
    identity,
    record,
    runner,
    show,
)
from portattn.conformance.case import Case, Outcome
from portattn.conformance.checks import CATALOGUE as REAL
from portattn.conformance.cli import LATER, cli
from portattn.conformance.manifest import Manifest
from portattn.conformance.runner import Options
from portattn.conformance.targets import SHIPPED
from portattn.conformance.waivers import Waiver, WaiverError
from portattn.conformance.waivers import read as read_waivers

pytestmark = pytest.mark.usefixtures("kit")


# ---- the record ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good() -> Callable[[], dict[str, Any]]:
    """A complete record of Good at the cpu tier; every call gives a copy of its own."""
    sys.path.insert(0, str(HERE))
    try:
        text = json.dumps(run_kit("Good", "cpu", seed=3))
    finally:
        sys.path.remove(str(HERE))
    return lambda: json.loads(text)


def _wrong(made: Mapping[str, Any]) -> list[str]:
    return audit.verify(made, runner.catalogue_of(CATALOGUE), identity.suite())


def test_two_runs_give_the_same_results(good: Callable[[], dict[str, Any]]) -> None:
    again = run_kit("Good", "cpu", seed=3, jobs=1)
    assert again["results"] == good()["results"]
    assert audit.diff(good(), again) == {
        "context": [],
        "level": [],
        "verdicts": [],
        "outputs": [],
        "cases": [],
    }
    other = run_kit("Good", "cpu", seed=4, jobs=1)
    assert other["results"] != again["results"]


def test_the_file_is_what_was_built(good: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    record.write(good(), path)
    assert record.read(path) == good()
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    assert _wrong(record.read(path)) == []


def test_numbers_are_canonical() -> None:
    assert record.text_of({"b": 0.1 + 0.2, "a": [math.nan, -math.inf, -0.0, 3]}) == (
        '{"a":["nan","-inf",0.0,3],"b":0.3}'
    )
    entry = record.case_entry(Case("F01", "x"), Outcome({"e1_det": math.nan}), 0.0)
    assert entry["numbers"] == {"e1_det": "nan"}
    assert entry["verdict"] == Outcome.from_json(entry).verdict == "FAIL"


def _edit_number(made: dict[str, Any]) -> None:
    made["checks"]["F01"]["cases"]["F01/after"]["numbers"]["e1_det"] = 5.0


def _edit_verdict(made: dict[str, Any]) -> None:
    made["checks"]["K01"]["cases"]["K01/softcap"]["verdict"] = "PASS"


def _edit_level(made: dict[str, Any]) -> None:
    made["level"] = "L5"


def _drop_case(made: dict[str, Any]) -> None:
    del made["checks"]["F01"]["cases"]["F01/before"]


def _drop_check(made: dict[str, Any]) -> None:
    del made["checks"]["K01"]


def _other_seed(made: dict[str, Any]) -> None:
    made["checks"]["F01"]["cases"]["F01/before"]["seed"] = 1


def _easier(made: dict[str, Any]) -> None:
    made["checks"]["F01"]["cases"]["F01/before"]["params"]["seq"] = 1


def _demote(made: dict[str, Any]) -> None:
    made["checks"]["K01"]["level"] = None


def _twice(made: dict[str, Any]) -> None:
    made["fractions"] = [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_edit_number, "F01/after: says PASS, its numbers say FAIL"),
        (_edit_verdict, "K01/softcap: says PASS"),
        (_edit_level, "level: says L5"),
        (_drop_case, "F01/before is missing"),
        (_drop_check, "K01 of the catalogue is not in the record"),
        (_other_seed, "F01/before: seed 1"),
        (_easier, "params"),
        (_demote, "K01: title, level or tiers"),
        (_twice, "merged twice"),
    ],
)
@pytest.mark.parametrize("forged", [False, True])
def test_verify_says_what_is_wrong(
    good: Callable[[], dict[str, Any]],
    edit: Callable[[dict[str, Any]], None],
    said: str,
    forged: bool,
) -> None:
    made = good()
    edit(made)
    if forged:  # whoever edits can compute a digest
        made["digest"] = record.digest_of({k: v for k, v in made.items() if k != "digest"})
    wrong = _wrong(made)
    assert any(said in line for line in wrong), wrong
    assert any(line.startswith("edited") for line in wrong) != forged


def test_verify_reads_truncated_and_doubled_files(
    good: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    record.write(good(), path)
    text = path.read_text()
    doubled = text.replace('"F01/after": {', '"F01/before": {"verdict": "PASS"}, "F01/after": {', 1)
    for broken, said in (
        (text[: len(text) // 2], "not a complete JSON document"),
        (text[:-3], "truncated"),
        (doubled, "stands twice"),
        ("[]", "not a conformance record"),
        ("", "truncated"),
        ('{"schema": "portattn-conformance/1"}', "lacks"),
        (text.replace('"seed": 3', '"seed": NaN', 1), "NaN"),
    ):
        path.write_text(broken)
        result = invoke("verify", str(path))
        assert result.exit_code == 1
        assert said in result.output, result.output
    hollow = dict.fromkeys(good()) | {"schema": good()["schema"]}
    path.write_text(json.dumps(hollow))
    result = invoke("verify", str(path))
    assert result.exit_code == 1
    assert "has not the shape" in result.output


def test_another_suite_cannot_judge_completeness(good: Callable[[], dict[str, Any]]) -> None:
    suite = {"version": "9", "hash": "0"}
    wrong = audit.verify(good(), runner.catalogue_of(CATALOGUE), suite)
    assert len(wrong) == 1
    assert "completeness" in wrong[0]


def test_fractions_merge_to_the_whole(good: Callable[[], dict[str, Any]]) -> None:
    parts = [run_kit("Good", "cpu", seed=3, fraction=(i, 3)) for i in (1, 2, 3)]
    assert all(part["level"] is None for part in parts)
    assert sum(len(cases_of(part)) for part in parts) == len(cases_of(good()))
    made = audit.merge(parts)
    assert _wrong(made) == []
    assert made["results"] == good()["results"]
    assert made["levels"] == good()["levels"]
    assert _wrong(audit.merge(parts[:2])) == []
    with pytest.raises(record.RecordError, match="merged twice"):
        audit.merge([made, parts[1]])
    with pytest.raises(record.RecordError, match="two records"):
        audit.merge(parts[:1])
    other = {**parts[1], "seed": 9}
    with pytest.raises(record.RecordError, match="seed: 3 -> 9"):
        audit.merge([parts[0], other])
    elsewhere = {**parts[1], "fingerprint": {**parts[1]["fingerprint"], "cpu": "another"}}
    with pytest.raises(record.RecordError, match="another"):
        audit.merge([parts[0], elsewhere])
    # fewer cores compute the same thing
    audit.merge([parts[0], {**parts[1], "fingerprint": {**parts[1]["fingerprint"], "cores": 999}}])


def test_diff_names_what_changed(good: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    bad = run_kit("WrongValue", "cpu", seed=3)
    found = audit.diff(good(), bad)
    assert any("F01/trigger: PASS -> FAIL" in line for line in found["verdicts"])
    assert any("F01/trigger" in line for line in found["outputs"])
    assert any("WrongValue" in line for line in found["context"])
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, made in zip(paths, (good(), bad), strict=True):
        record.write(made, path)
    runner_ = CliRunner()
    assert runner_.invoke(cli, ["diff", str(paths[0]), str(paths[1])]).exit_code == 1
    same = runner_.invoke(cli, ["diff", str(paths[0]), str(paths[0])])
    assert (same.exit_code, same.output.strip()) == (0, "no difference")


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


def test_replay_of_a_record_and_by_id(good: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record.write(good(), path)
    result = invoke("replay", str(path), "F01/before")
    assert result.exit_code == 0, result.output
    assert "the same, bit for bit" in result.output
    wrong = invoke("replay", str(path), "F01/trigger", "--target", "conformance_kit:WrongValue")
    assert wrong.exit_code == 1
    assert "not the same" in wrong.output
    by_id = invoke(
        "replay", "F01/trigger", "--target", "conformance_kit:Segfaults", "--tier", "cpu",
        "--seed", "3", "--json",
    )  # fmt: skip
    assert by_id.exit_code == 1
    told = json.loads(by_id.output)
    assert told["outcome"]["verdict"] == "CRASH"
    assert told["case"]["seed"] == cases_of(good())["F01/trigger"]["seed"]
    assert invoke("replay", str(path), "F01/none").exit_code == 2


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
    assert _wrong(made) == []
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


# ---- waivers -------------------------------------------------------------------------------------
_WAIVER = """
[[waiver]]
id = "F01/trig*"
url = "https://example.org/issues/1"
expires = {day}
device = "*"
reason = "known"
"""


def test_a_waiver_speaks_until_its_day(tmp_path: Path) -> None:
    file = tmp_path / "waivers.toml"
    command = (
        "run", "--target", "conformance_kit:WrongValue", "--tier", "smoke", "-o",
        str(tmp_path / "o"), "--waivers", str(file),
    )  # fmt: skip
    file.write_text(_WAIVER.format(day="2999-01-01"))
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    made = record.read(tmp_path / "o" / "good.json")
    case = cases_of(made)["F01/trigger"]
    assert case["verdict"] == "WAIVED"
    assert case["waived"]["verdict"] == "FAIL"
    assert case["waived"]["url"] == "https://example.org/issues/1"
    assert _wrong(made) == []
    file.write_text(_WAIVER.format(day="2020-01-01"))
    expired = invoke(*command)
    assert expired.exit_code == 3
    assert "F01/trig*" in expired.output
    assert record.read(tmp_path / "o" / "good.json")["failed"] == ["F01"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[waiver]]\nid = "F01"\n', "missing"),
        ('[[waiver]]\nid = "F01"\nurl = ""\nexpires = 2030-01-01\ndevice = "*"\n', "url"),
        ('[[waiver]]\nid = "F01"\nurl = "u"\nexpires = "soon"\ndevice = "*"\n', "expires"),
        ("waive everything", "Expected"),
        ("[other]\nx = 1\n", "other"),
    ],
)
def test_a_bad_waiver_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text(text)
    with pytest.raises(WaiverError, match=said):
        read_waivers(file)


def test_waivers_are_for_a_device(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    file.write_text(
        json.dumps([{"id": "F*", "url": "u", "expires": "2030-01-01", "device": "H200"}])
    )
    (waiver,) = read_waivers(file)
    assert waiver.covers("F01/x", "NVIDIA H200 (sm_90)")
    assert not waiver.covers("F01/x", "NVIDIA H100 (sm_90)")
    assert not waiver.covers("K01/x", "NVIDIA H200 (sm_90)")
    assert Waiver.from_json(waiver.to_json()) == waiver
