"""The engine of the suite: isolation, verdicts, records; held against targets that misbehave."""

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
import numpy as np
import pytest
from click.testing import CliRunner, Result

from portattn.conformance import (
    audit,
    identity,
    levels,
    meters,
    placement,
    record,
    runner,
    show,
)
from portattn.conformance.case import Case, Outcome, check
from portattn.conformance.checks import CATALOGUE as REAL
from portattn.conformance.cli import LATER, cli
from portattn.conformance.context import Context
from portattn.conformance.manifest import Manifest, ManifestError
from portattn.conformance.runner import Options
from portattn.conformance.targets import SHIPPED, TargetError, load
from portattn.conformance.verdicts import Verdict, verdict_of
from portattn.conformance.waivers import Waiver, WaiverError
from portattn.conformance.waivers import read as read_waivers

HERE = Path(__file__).parent
CATALOGUE = "conformance_kit:CATALOGUE"


@pytest.fixture(autouse=True)
def _kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PORTATTN_DATA_DIR", str(tmp_path / "data"))


def _run(target: str, tier: str = "smoke", **options: Any) -> dict[str, Any]:
    prepared = runner.prepare(
        Options(f"conformance_kit:{target}", tier, catalogue=CATALOGUE, **options)
    )
    return runner.execute(prepared)


def _cases(made: Mapping[str, Any]) -> dict[str, Any]:
    checks = made["checks"].values()
    return {case_id: case for entry in checks for case_id, case in entry["cases"].items()}


def _command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--catalogue", CATALOGUE])


# ---- isolation -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "verdict", "cause", "said"),
    [
        ("WrongValue", "FAIL", "", ""),
        ("WritesInputs", "FAIL", "wrote_inputs", "input k"),
        ("WrongShape", "FAIL", "wrong_shape", "(1, 2, 8, 8)"),
        ("WrongDtype", "FAIL", "wrong_dtype", "float64"),
        ("WrongType", "FAIL", "wrong_type", "builtins.str"),
        ("NotAPair", "FAIL", "wrong_type", "a pair"),
        ("MissingLse", "FAIL", "missing_lse", "lse"),
        ("Raises", "FAIL", "raised", "the kernel did not launch"),
        ("Refuses", "FAIL", "claimed_but_refused", "not this scale"),
        ("Exits", "CRASH", "exited", "SystemExit"),
        ("ExitsHard", "CRASH", "exited", "last words"),
        ("Segfaults", "CRASH", "crash", "SIGSEGV"),
        ("Killed", "CRASH", "crash", "SIGKILL"),
        ("Hangs", "TIMEOUT", "timeout", "2 s"),
        ("Prints", "PASS", "", ""),
        ("ClosesStdout", "PASS", "", ""),
        ("ClosesEverything", "CRASH", None, ""),
        ("Forks", "FAIL", "forked", "forked"),
        ("ForksAndDies", "CRASH", "exited", "status 5"),
        ("TooLarge", "OOM", "oom", "llocate"),
        ("Grows", "OOM", "oom", ""),
    ],
)
def test_a_fault_costs_its_case_alone(
    target: str, verdict: str, cause: str | None, said: str
) -> None:
    made = _run(target, timeout_s=2.0 if target == "Hangs" else None, memory=1 << 30)
    cases = _cases(made)
    assert cases["F01/trigger"]["verdict"] == verdict, cases["F01/trigger"]
    if cause is not None:
        assert cases["F01/trigger"]["cause"] == cause
    assert said in cases["F01/trigger"]["message"]
    assert "Traceback" not in cases["F01/trigger"]["message"]
    assert cases["F01/before"]["verdict"] == cases["F01/after"]["verdict"] == "PASS"
    assert made["failed"] == ([] if verdict == "PASS" else ["F01"])


def test_a_reused_output_buffer_is_seen_by_the_next_call() -> None:
    cases = _cases(_run("Reuses"))
    assert cases["F01/before"]["verdict"] == "PASS"
    assert cases["F01/trigger"]["cause"] == "stale_output"
    assert "F01/before" in cases["F01/trigger"]["message"]


def test_the_worst_element_is_in_the_record() -> None:
    worst = _cases(_run("WrongValue"))["F01/trigger"]["worst"]
    assert worst["index"] == [0, 1, 3, 2]
    assert worst["got"] - worst["want"] == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize(
    ("target", "verdict", "said"),
    [
        ("Good", "NOT_SUPPORTED", "no softcap"),
        ("ClaimsTooLittle", "QUALITY_WARNING", "claim too narrow"),
        ("RaisesOutside", "FAIL", "internal error 17"),
    ],
)
def test_refusals_must_agree_with_the_manifest(target: str, verdict: str, said: str) -> None:
    case = _cases(_run(target, "cpu"))["K01/softcap"]
    assert case["verdict"] == verdict
    assert said in case["message"]


def test_an_error_of_the_suite_is_not_blamed_on_the_target() -> None:
    made = _run("Good", "gpu", selection=("E01",))
    case = _cases(made)["E01/broken"]
    assert case["verdict"] == "HARNESS_ERROR"
    assert "KeyError" in case["message"]
    assert made["failed"] == []


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("conformance_kit:UnknownKey", "max_headdim"),
        ("conformance_kit:UnknownKey", "float8"),
        ("conformance_kit:NotADict", "list"),
        ("conformance_kit:ManifestRaises", "no idea"),
        ("conformance_kit:ManifestExits", "status 9"),
        ("conformance_kit:NoForward", "no method forward"),
        ("conformance_kit:Absent", "has no Absent"),
        ("no_such_module:X", "no_such_module"),
        ("nonsense", "unknown target"),
        ("backend:nonsense", "unknown backend"),
    ],
)
def test_a_target_that_cannot_be_used_ends_with_2(target: str, said: str) -> None:
    result = _command("run", "--target", target, "--tier", "smoke")
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_missing_packages_are_named() -> None:
    for name in ("flash-attn", "xformers"):
        with pytest.raises(TargetError, match=rf"{name}.*not installed|CUDA device|torch is not"):
            load(name)
    assert len(SHIPPED) == 13


# ---- manifests -----------------------------------------------------------------------------------
_MANIFEST: dict[str, Any] = {
    "name": "x",
    "version": "1",
    "array": "numpy",
    "device": "cpu",
    "dtypes": ["float32"],
    "max_head_dim": 64,
    "features": ["causal"],
}


def test_defaults_are_those_of_the_protocol() -> None:
    manifest = Manifest.parse(_MANIFEST)
    assert (manifest.acc, manifest.p_storage, manifest.qk_operand) == ("fp32", "input", "input")
    assert (manifest.kappa, manifest.kappa_backward, manifest.tile) == (0.25, 1.0, None)
    assert manifest.causal_alignments == ("top_left", "bottom_right")
    assert (manifest.empty_rows, manifest.layout) == ("zero", "bhsd")
    assert Manifest.parse(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"name": ""}, "name"),
        ({"array": "jax"}, "array='jax'"),
        ({"array": "numpy", "device": "cuda"}, "NumPy arrays live on the CPU"),
        ({"array": "cupy"}, "CuPy arrays live on a GPU"),
        ({"dtypes": []}, "at least one"),
        ({"dtypes": "float32"}, "a list"),
        ({"features": ["causal", "magic"]}, "magic"),
        ({"features": ["backward_bias"]}, "backward_bias"),
        ({"head_dims": [64]}, "not both"),
        ({"max_head_dim": 0}, "max_head_dim"),
        ({"max_head_dim": True}, "max_head_dim"),
        ({"tile": [64]}, "tile"),
        ({"kappa": -1}, "kappa"),
        ({"kappa": math.nan}, "kappa"),
        ({"acc": "fp8"}, "acc"),
        ({"causal_alignments": ["middle"]}, "middle"),
        ({"min_sizes": [1]}, "min_sizes"),
        ({"min_sizes": [0, 0, True]}, "min_sizes"),
        ({"unasked_dtypes": ["float32"]}, "in dtypes and in unasked_dtypes"),
        ({"empty_rows": "inf"}, "empty_rows"),
        ({"layout": "thd"}, "layout"),
    ],
)
def test_nonsense_in_a_manifest_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.parse({**_MANIFEST, **change})
    assert said in str(caught.value)


def test_every_complaint_is_reported_at_once() -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.parse({"name": "x", "array": "jax", "colour": 1})
    assert len(caught.value.problems) >= 5


def test_what_lies_outside_a_manifest() -> None:
    manifest = Manifest.parse({**_MANIFEST, "causal_alignments": ["top_left"]})
    assert manifest.why_not(dtype="float32", head_dim=64, features=["causal"]) == ()
    assert len(manifest.why_not(dtype="float16", head_dim=65, features=["gqa"])) == 3
    assert "bottom_right" in manifest.why_not(alignment="bottom_right")[0]
    square = Manifest.parse({**_MANIFEST, "causal_alignments": []})
    assert square.causal_alignments == ()
    assert Manifest.parse(square.to_json()) == square
    assert square.why_not(features=["causal"]) == ()
    assert square.why_not(features=["causal"], alignment="top_left")
    least = Manifest.parse({**_MANIFEST, "min_sizes": [0, 0, 2]})
    assert least.why_not(sizes=(0, 0, 2)) == ()
    assert least.why_not(sizes=(5, 5, 1)) == ("fewer than 2 keys are not claimed",)


def test_square_causal_is_asked_of_who_takes_nothing_else() -> None:
    square = Manifest.parse({**_MANIFEST, "causal_alignments": [], "min_sizes": [1, 1, 2]})
    for check_id in ("K01", "K02"):
        assert all(case.optional for case in REAL[check_id].cases(square, "gpu"))
    assert not any(case.optional for case in REAL["K03"].cases(square, "cpu"))
    assert not any(case.optional for case in REAL["E02"].cases(square, "cpu"))
    keys = {case.params["m"]: case.optional for case in REAL["F17"].cases(square, "smoke")}
    assert keys[1] and not keys[33]


# ---- verdicts and levels -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("numbers", "cause", "verdict"),
    [
        ({}, "", "PASS"),
        ({"e1_prob": 1.0, "e1_det": 0.9, "e2": 1.5, "e3": 1.0}, "", "PASS"),
        ({"e1_prob": 1.01, "e1_det": 0.9}, "", "QUALITY_WARNING"),
        ({"e1_prob": 2.0, "e1_det": 1.01}, "", "FAIL"),
        ({"e2": 1.51}, "", "QUALITY_WARNING"),
        ({"e2": 3.01}, "", "FAIL"),
        ({"e3": 1.01}, "", "FAIL"),
        ({"e4": 50.0, "e1_prob": 0.5}, "", "PASS"),
        ({"e4": 2.1, "e1_prob": 1.1, "e1_det": 0.5}, "", "FAIL"),
        ({"dq.e4": 2.1, "dq.e1_prob": 1.1, "e1_prob": 0.1}, "", "FAIL"),
        ({"lse.e1_det": math.nan}, "", "FAIL"),
        ({"e1_det": math.inf}, "", "FAIL"),
        ({"anything": 1e9}, "", "PASS"),
        ({"mismatch_bad": 1}, "", "FAIL"),
        ({"workspace_over": 1.1}, "", "FAIL"),
        ({"time_warn": 1.1}, "", "QUALITY_WARNING"),
        ({"nondeterministic": 1}, "", "NONDETERMINISTIC"),
        ({"e1_det": 9.0}, "narrow_claim", "FAIL"),
        ({}, "rejected", "NOT_SUPPORTED"),
        ({}, "oom", "OOM"),
    ],
)
def test_gates(numbers: dict[str, float], cause: str, verdict: str) -> None:
    assert verdict_of(numbers, cause) == verdict


def test_an_unknown_cause_is_an_error() -> None:
    with pytest.raises(ValueError, match="cause"):
        verdict_of({}, "because")


def _synthetic(
    verdicts: Mapping[str, str], level: int = 0, optional: bool = False, **change: Any
) -> dict[str, Any]:
    """A record by hand: one check per verdict, all of one level."""
    return {
        "tier": "cpu",
        "fractions": [[1, 1]],
        "selection": None,
        "complete": True,
        "simulated": False,
        "target": {"manifest": {"device": "cpu"}},
        "checks": {
            name: {
                "level": level,
                "tiers": ["cpu"],
                "verdict": verdict,
                "cases": {"x": {"verdict": verdict, "optional": optional}},
            }
            for name, verdict in verdicts.items()
        },
        **change,
    }


def test_a_level_needs_all_below_it() -> None:
    assert levels.granted(levels.grant(_synthetic({"F01": "PASS"}))) == "L5"
    why = levels.grant(_synthetic({"F01": "PASS", "B01": "NOT_SUPPORTED"}, level=3))
    assert levels.granted(why) == "L2"
    assert why["L3"] == ["B01 NOT_SUPPORTED"] == why["L5"]
    assert levels.granted(levels.grant(_synthetic({"F01": "FAIL"}))) is None


@pytest.mark.parametrize("verdict", ["NOT_SUPPORTED", "NOT_RUN", "FAIL", "SIMULATED", "OOM"])
def test_what_denies_a_level(verdict: str) -> None:
    assert levels.grant(_synthetic({"F01": verdict}))["L0"] == [f"F01 {verdict}"]


def test_an_optional_refusal_denies_nothing() -> None:
    refused = _synthetic({"K02": "NOT_SUPPORTED"}, optional=True)
    assert levels.granted(levels.grant(refused)) == "L5"
    assert levels.check_verdict(refused["checks"]["K02"]["cases"].values()) == "NOT_SUPPORTED"
    cases = [{"verdict": "NOT_SUPPORTED", "optional": True}, {"verdict": "PASS", "optional": True}]
    assert levels.check_verdict(cases) == "PASS"
    assert levels.check_verdict([]) == "NOT_RUN"
    assert levels.granted(levels.grant(_synthetic({"K02": "FAIL"}, optional=True))) is None


@pytest.mark.parametrize(
    "change",
    [
        {"tier": "smoke"},
        {"complete": False},
        {"selection": ["F01"]},
        {"fractions": [[1, 2]]},
        {"simulated": True},
    ],
)
def test_a_part_of_a_run_grants_nothing(change: dict[str, Any]) -> None:
    assert levels.granted(levels.grant(_synthetic({"F01": "PASS"}, **change))) is None


def test_simulators_are_never_supported() -> None:
    made = _run("Simulated", "cpu", selection=("F01",))
    assert {case["verdict"] for case in _cases(made).values()} == {"SIMULATED"}


# ---- the record ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def good() -> Callable[[], dict[str, Any]]:
    """A complete record of Good at the cpu tier; every call gives a copy of its own."""
    sys.path.insert(0, str(HERE))
    try:
        text = json.dumps(_run("Good", "cpu", seed=3))
    finally:
        sys.path.remove(str(HERE))
    return lambda: json.loads(text)


def _wrong(made: Mapping[str, Any]) -> list[str]:
    return audit.verify(made, runner.catalogue_of(CATALOGUE), identity.suite())


def test_two_runs_give_the_same_results(good: Callable[[], dict[str, Any]]) -> None:
    again = _run("Good", "cpu", seed=3, jobs=1)
    assert again["results"] == good()["results"]
    assert audit.diff(good(), again) == {
        "context": [],
        "level": [],
        "verdicts": [],
        "outputs": [],
        "cases": [],
    }
    other = _run("Good", "cpu", seed=4, jobs=1)
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
        result = _command("verify", str(path))
        assert result.exit_code == 1
        assert said in result.output, result.output
    hollow = dict.fromkeys(good()) | {"schema": good()["schema"]}
    path.write_text(json.dumps(hollow))
    result = _command("verify", str(path))
    assert result.exit_code == 1
    assert "has not the shape" in result.output


def test_another_suite_cannot_judge_completeness(good: Callable[[], dict[str, Any]]) -> None:
    suite = {"version": "9", "hash": "0"}
    wrong = audit.verify(good(), runner.catalogue_of(CATALOGUE), suite)
    assert len(wrong) == 1
    assert "completeness" in wrong[0]


def test_fractions_merge_to_the_whole(good: Callable[[], dict[str, Any]]) -> None:
    parts = [_run("Good", "cpu", seed=3, fraction=(i, 3)) for i in (1, 2, 3)]
    assert all(part["level"] is None for part in parts)
    assert sum(len(_cases(part)) for part in parts) == len(_cases(good()))
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
    bad = _run("WrongValue", "cpu", seed=3)
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
    result = _command(
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
    result = _command(*common)
    assert result.exit_code == 0, result.output
    assert "L1 (head dim 256) is not granted: K01 NOT_SUPPORTED" in result.output
    assert _command(*common, "--level", "L0").exit_code == 0
    assert _command(*common, "--level", "1").exit_code == 1


def test_a_harness_error_is_status_2() -> None:
    result = _command("run", "--target", "conformance_kit:Good", "--tier", "gpu", "--checks", "E01")
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
    result = _command(*arguments)
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
    result = _command("replay", str(path), "F01/before")
    assert result.exit_code == 0, result.output
    assert "the same, bit for bit" in result.output
    wrong = _command("replay", str(path), "F01/trigger", "--target", "conformance_kit:WrongValue")
    assert wrong.exit_code == 1
    assert "not the same" in wrong.output
    by_id = _command(
        "replay", "F01/trigger", "--target", "conformance_kit:Segfaults", "--tier", "cpu",
        "--seed", "3", "--json",
    )  # fmt: skip
    assert by_id.exit_code == 1
    told = json.loads(by_id.output)
    assert told["outcome"]["verdict"] == "CRASH"
    assert told["case"]["seed"] == _cases(good())["F01/trigger"]["seed"]
    assert _command("replay", str(path), "F01/none").exit_code == 2


def test_list_names_every_check_and_target() -> None:
    rows = json.loads(_command("list", "--json").output)
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
    manifest = Manifest.parse({**_MANIFEST, "dtypes": ["float32", "float16", "bfloat16"]})
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
    result = _command(*common, "--dtype", "float32", "-o", str(out), "--level", "L0")
    assert result.exit_code == 0, result.output
    assert "level: L0 (core forward), for float32 only" in result.output
    path = out / "two.json"
    made = record.read(path)
    assert made["target"]["manifest"]["dtypes"] == ["float32"]
    assert made["target"]["manifest"]["unasked_dtypes"] == ["float16"]
    assert "level L0 for float32 only" in _command("verify", str(path)).output
    assert "--dtype=float32" in record.replay_command(made, "F01/before")
    assert _command("replay", "F01/after", "--target", TWO, "--dtype", "float32").exit_code == 0
    whole = runner.execute(runner.prepare(Options(TWO, "cpu", catalogue=CATALOGUE)))
    assert any("unasked_dtypes" in line for line in audit.diff(made, whole)["context"])
    with pytest.raises(record.RecordError, match="do not belong together"):
        audit.merge([made, whole])
    refused = _command(*common, "--dtype", "float64")
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
    result = _command("run", "--target", TWO, "--tier", "cpu", "-o", str(tmp_path))
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
    result = _command("run", "--target", "conformance_kit:Good", "--tier", "cpu", "--checks", "F01")
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
    kept = _cases(partial)
    assert 5 <= len(kept) < 43
    assert not partial["complete"]
    assert audit.verify(partial, runner.catalogue_of(CATALOGUE), partial["suite"]) == []
    # a line that was cut while the machine went down is asked again
    journal.write_text(journal.read_text() + '["M01/slow-39", {"verd')
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert f"{len(kept)}/43 cases" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.json"]
    whole = record.read(tmp_path / "good.json")
    assert len(_cases(whole)) == 43
    for case_id, case in kept.items():
        assert _cases(whole)[case_id] == case


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
    result = _command("run", "--backend", "numpy", "--tier", "cpu", "--checks", "F01")
    assert result.exit_code == 0, result.output
    data = tmp_path / "data"
    assert not (data / "evidence").exists()
    assert _command("run", "--backend", "numpy", "--tier", "cpu").exit_code == 0
    evidence = data / "evidence" / "numpy.json"
    made = record.read(evidence)
    assert made["tier"] == "cpu"
    assert made["fingerprint"]["kernel_hash"]
    assert _command("run", "--backend", "numpy", "--tier", "smoke").exit_code == 0
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
    result = _command(*command)
    assert result.exit_code == 0, result.output
    made = record.read(tmp_path / "o" / "good.json")
    case = _cases(made)["F01/trigger"]
    assert case["verdict"] == "WAIVED"
    assert case["waived"]["verdict"] == "FAIL"
    assert case["waived"]["url"] == "https://example.org/issues/1"
    assert _wrong(made) == []
    file.write_text(_WAIVER.format(day="2020-01-01"))
    expired = _command(*command)
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


# ---- placement, context and meters ---------------------------------------------------------------
@pytest.mark.parametrize("dtype", sorted(placement.DTYPES))
@pytest.mark.parametrize("view", [v for v in placement.VIEWS if v != "fused"])
def test_views_hold_the_numbers_and_poison_between(view: str, dtype: str) -> None:
    x = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) % 2
    x = (x[:1].repeat(2, 0) if view == "broadcast" else x).astype(placement.DTYPES[dtype])
    laid = placement.lay(x, view)
    seen = placement.as_numpy(laid)
    assert placement.same_bits(np.ascontiguousarray(seen), x)
    assert seen.strides[0] == 0 or view != "broadcast"
    assert (view in ("contiguous", "misaligned")) == (
        seen.flags.c_contiguous and view != "broadcast"
    )
    assert (seen.ctypes.data - laid.buffer.ctypes.data) == laid.offset * x.itemsize
    if view in ("padded", "strided") and x.dtype.kind == "f":
        assert np.isnan(laid.buffer).sum() == laid.buffer.size - x.size


def test_fused_views_share_one_buffer() -> None:
    rng = np.random.default_rng(0)
    for layout, axis in (("bhsd", 1), ("bshd", 2), ("thd", 1)):
        lead = (7,) if layout == "thd" else (2, 7)
        parts = [rng.standard_normal((*lead, h, d)) for h, d in ((4, 8), (2, 8), (2, 6))]
        if layout == "bhsd":
            parts = [np.swapaxes(x, 1, 2) for x in parts]
        laid = placement.lay_fused(parts[0], parts[1], parts[2], layout)
        for part, one in zip(parts, laid, strict=True):
            assert one.buffer is laid[0].buffer
            assert (placement.as_numpy(one) == part).all()
            assert part.shape[axis] in (2, 4)


def _context(name: str = "Good", **change: Any) -> Context:
    sys.path.insert(0, str(HERE))
    try:
        target = load(f"conformance_kit:{name}")
    finally:
        sys.path.remove(str(HERE))
    manifest = Manifest.parse({**dict(target.manifest()), **change})
    return Context(target, manifest)


def test_the_context_compares_requests_with_the_manifest() -> None:
    ctx = _context(causal_alignments=["top_left"], features=["causal", "scale"])
    q = np.zeros((1, 4, 5, 8), np.float32)
    k = np.zeros((1, 2, 7, 8), np.float32)
    v = np.zeros((1, 2, 7, 6), np.float32)

    def outside(**options: Any) -> str:
        return "; ".join(ctx.outside_of(q, k, v, options, views=options.pop("views", None)))

    assert "gqa" in outside()
    assert "value_head_dim" in outside()
    assert "bottom_right" in outside(causal="bottom_right")
    assert "alignment" not in outside(causal="top_left")
    assert "bottom_right" in outside(window=(3, 3))
    assert "strides" in outside(views={"q": "strided"})
    assert "paged" in outside(block_table=1)
    with pytest.raises(ValueError, match="unknown option"):
        ctx.forward(q, k, v, causl=True)


def test_layouts_are_the_engines_business() -> None:
    ctx = _context()
    seen: list[tuple[int, ...]] = []
    original = ctx.target.forward

    def forward(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(q.shape)
        q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
        out, lse = original(q, k, v, **options)
        return np.swapaxes(out, 1, 2), lse

    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 9, 8)).astype(np.float32) for _ in range(3))
    want = ctx.forward(q, k, v)
    other = _context(layout="bshd", features=["scale", "return_lse", "strides"])
    other.target.forward = forward  # type: ignore[method-assign]
    for views in ("contiguous", "fused", "transposed", "strided", "misaligned", "padded"):
        got = other.forward(q, k, v, views=views)
        assert (got.out == want.out).all()
        assert got.lse is not None
        assert (got.lse == want.lse).all()
    assert set(seen) == {(1, 9, 2, 8)}


def test_attempts_tell_a_refusal_from_a_fault() -> None:
    ctx = _context("Raises")
    x = np.zeros((1, 2, 9, 8), np.float32)
    refused = ctx.attempt(x, x, x, softcap=1.0)
    assert refused.refused
    assert "no softcap" in str(refused.error)
    assert ctx.attempt(x, x, x).error is None
    fault = ctx.attempt(x, x, x, scale=0.125)
    assert not fault.refused
    assert "did not launch" in str(fault.error)


def test_a_hard_limit_ends_in_oom(fresh: Any) -> None:
    """In a process of its own: whatever else allocates under the limit would fail too."""
    fresh(
        "import re, numpy as np\n"
        "from portattn.conformance.context import Context, Decided\n"
        "from portattn.conformance.manifest import Manifest\n"
        "from portattn.conformance.targets import load\n"
        "target = load('conformance_kit:Good')\n"
        "ctx = Context(target, Manifest.parse(target.manifest()))\n"
        "x = np.zeros((1, 1, 3000, 8), np.float32)\n"
        "ctx.forward(x[:, :, :9], x[:, :, :9], x[:, :, :9])\n"
        "try:\n"
        "    ctx.forward(x, x, x, headroom=16 << 20)  # the scores alone are 36 MB\n"
        "except Decided as decided:\n"
        "    assert decided.cause == 'oom', decided.cause\n"
        "    assert re.search('MemoryError|llocate', str(decided)), decided\n"
        "else:\n"
        "    raise SystemExit('no limit')\n"
        "ctx.forward(x, x, x)\n",
        PYTHONPATH=str(HERE),
    )


def test_the_meter_counts_the_workspace() -> None:
    ctx = _context()
    x = np.zeros((1, 1, 1024, 8), np.float32)
    memory = ctx.forward(x, x, x, measure=True).raw.memory
    assert memory is not None
    assert 2 * 4 * 1024**2 <= memory.workspace <= 12 * 4 * 1024**2
    assert memory.left < 1 << 20


def test_what_a_target_keeps_for_its_next_call_is_its_workspace_and_no_leak() -> None:
    """Or a kernel could hide any table in a cache."""
    from conformance_kit import Good

    kept: list[Any] = []

    class Keeps(Good):
        def forward(self, *arrays: Any, **options: Any) -> Any:
            if not kept:
                kept.append(np.ones(4 << 20, np.uint8))
            return super().forward(*arrays, **options)

        def release(self) -> None:
            kept.clear()

    target = Keeps()
    ctx = Context(target, Manifest.parse(target.manifest()))
    x = np.zeros((1, 1, 8, 8), np.float32)
    for _ in range(2):
        memory = ctx.forward(x, x, x, measure=True).raw.memory
        assert memory is not None
        assert memory.workspace >= 4 << 20
        assert memory.left < 1 << 20


def test_memory_that_numpy_does_not_know_of_is_seen() -> None:
    import mmap

    with meters.NumpyMeter().watch() as watched, mmap.mmap(-1, 64 << 20) as area:
        for page in range(0, 64 << 20, 4096):
            area[page] = 1
    assert watched.memory is not None
    assert watched.memory.instrument == "resident"
    assert watched.memory.peak >= 60 << 20


def test_an_id_stands_once_in_a_catalogue() -> None:
    with pytest.raises(ValueError, match="check id"):
        check("Z01", "no such group", level=0, cases=lambda manifest, tier: [])
    with pytest.raises(ValueError, match="tiers"):
        check("F01", "no such tier", level=0, cases=lambda manifest, tier: [], tiers=("huge",))


def test_seeds_follow_from_the_run_and_the_id() -> None:
    a, b = Case("F01", "a"), Case("F01", "b")
    assert a.seeded(0).seed == Case("F01", "a").seeded(0).seed
    assert len({a.seeded(0).seed, a.seeded(1).seed, b.seeded(0).seed}) == 3
    assert Case.from_json(a.to_json()) == a
    assert Verdict.PASS == "PASS"
