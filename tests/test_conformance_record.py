"""What a run of the suite leaves: its record, and what waivers make of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from engine_kit import CATALOGUE, cases_of, invoke, run_kit, wrong_in

from portattn.conformance import (
    audit,
    record,
    runner,
)
from portattn.conformance.case import Case, Outcome
from portattn.conformance.cli import cli
from portattn.conformance.waivers import Waiver, WaiverError
from portattn.conformance.waivers import read as read_waivers

pytestmark = pytest.mark.usefixtures("own_evidence")


# ---- the record ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good() -> Callable[[], dict[str, Any]]:
    """A complete record of Good at the cpu tier; every call gives a copy of its own."""
    text = json.dumps(run_kit("Good", "cpu", seed=3))
    return lambda: json.loads(text)


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
    assert wrong_in(record.read(path)) == []


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
def test_verify_says_what_iswrong_in(
    good: Callable[[], dict[str, Any]],
    edit: Callable[[dict[str, Any]], None],
    said: str,
    forged: bool,
) -> None:
    made = good()
    edit(made)
    if forged:  # whoever edits can compute a digest
        made["digest"] = record.digest_of({k: v for k, v in made.items() if k != "digest"})
    wrong = wrong_in(made)
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
    assert wrong_in(made) == []
    assert made["results"] == good()["results"]
    assert made["levels"] == good()["levels"]
    assert wrong_in(audit.merge(parts[:2])) == []
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
    assert wrong_in(made) == []
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
