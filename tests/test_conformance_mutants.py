"""The suite is tested too: the correct tiled implementation, its mutants, and their scoring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from portattn.conformance import generators, judge, record, targets
from portattn.conformance.checks import CATALOGUE
from portattn.conformance.cli import cli
from portattn.conformance.context import Context
from portattn.conformance.manifest import Manifest
from portattn.conformance.mutants import score, seeds
from portattn.conformance.mutants.catalogue import CORRECT, MUTANTS
from portattn.conformance.mutants.cli import advice, select, status
from portattn.conformance.mutants.score import Finding, Plan, examine
from portattn.conformance.mutants.seeds import Mutant
from portattn.conformance.mutants.tiled import Tiled
from portattn.conformance.reference import Attention
from portattn.conformance.verdicts import Verdict

DTYPES = ("float16", "bfloat16", "float32", "float64")
FAMILIES = {
    "softmax", "arithmetic", "masks", "routing", "calls", "memory", "backward", "serving",
}  # fmt: skip


@pytest.fixture
def ctx() -> Context:
    tiled = Tiled()
    return Context(tiled, Manifest.parse(tiled.manifest()), CORRECT)


def _random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    return generators.cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def _calls(dtype: str) -> Iterator[Attention]:
    """Everything at once; pages; packed sequences, one of them empty."""
    q, k, v = (_random((2, h, n, d), dtype, i) for i, (h, n, d) in enumerate(
        ((4, 131, 40), (2, 600, 40), (2, 600, 72))
    ))  # fmt: skip
    yield Attention(
        q, k, v, scale=0.3, causal="bottom_right", window=(500, None), softcap=4.0,
        bias=_random((1, 4, 1, 600), dtype, 5),
        mask=np.random.default_rng(6).random((2, 1, 131, 600)) < 0.7,
        alibi_slopes=np.abs(_random((2, 4), "float32", 7)), sinks=_random((4,), "float32", 8),
        seqused_k=np.asarray([600, 77], np.int32),
    )  # fmt: skip
    rng, used = np.random.default_rng(9), [100, 129]
    pages = generators.paged(rng, k[:, :, :129], v[:, :, :129], used, 16)
    yield Attention(
        q, pages[0], pages[1], causal="top_left", block_table=pages[2],
        seqused_k=np.asarray(used, np.int32),
    )  # fmt: skip
    q, k, v = (
        _random((100, 4, 64), dtype),
        _random((130, 2, 64), dtype, 1),
        _random((130, 2, 64), dtype, 2),
    )
    yield Attention(
        q, k, v, causal="bottom_right", cu_seqlens_q=generators.cumulative([40, 0, 60]),
        cu_seqlens_k=generators.cumulative([50, 10, 70]),
    )  # fmt: skip


# ---- the correct implementation ------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_correct_one_is_correct(ctx: Context, dtype: str) -> None:
    for asked in _calls(dtype):
        result = ctx.forward(asked.q, asked.k, asked.v, **asked.options)
        outcome = judge.forward(asked, result, ctx.manifest)
        assert outcome.verdict is Verdict.PASS, (outcome.message, dict(outcome.numbers))
        dout = _random(asked.out_shape, dtype, 3)
        dlse = _random(asked.lse_shape, "float64" if dtype == "float64" else "float32", 4)
        dlse = np.where(np.isfinite(result.lse), dlse, 0).astype(dlse.dtype)
        grads = ctx.backward(
            asked.q, asked.k, asked.v, result.out, result.lse, dout, dlse=dlse, **asked.options
        )
        outcome = judge.backward(asked, dout, grads, ctx.manifest, dlse)
        assert outcome.verdict is Verdict.PASS, (outcome.message, dict(outcome.numbers))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_correct_one_is_batch_invariant_to_the_bit(dtype: str) -> None:
    q, k, v = (_random((2, 2, 600, 80), dtype, i) for i in range(3))
    out, lse = Tiled().forward(q, k, v, causal="bottom_right", return_lse=True)
    assert lse is not None
    for i in (0, 63, 64, 511, 512, 599):
        step, its_lse = Tiled().forward(
            q[1:, :, i : i + 1], k[1:, :, : i + 1], v[1:, :, : i + 1], return_lse=True
        )
        assert its_lse is not None
        assert step[0, :, 0].tobytes() == out[1, :, i].tobytes()
        assert its_lse[0, :, 0].tobytes() == lse[1, :, i].tobytes()


def test_the_correct_one_refuses_what_it_does_not_claim() -> None:
    q = np.zeros((1, 1, 4, 513), np.float32)
    with pytest.raises(NotImplementedError, match="head_dim"):
        Tiled().forward(q, q, q)
    q = q[..., :8]
    with pytest.raises(NotImplementedError, match="precision"):
        Tiled().forward(q, q, q, precision="tf32")
    with pytest.raises(ValueError, match="window"):
        Tiled().forward(q, q, q, window=(-1, 0))


# ---- the catalogue -------------------------------------------------------------------------------
def test_there_are_enough_mutants_of_every_family() -> None:
    assert len(MUTANTS) >= 80
    assert {m.family for m in MUTANTS.values()} == FAMILIES
    assert len({m.title for m in MUTANTS.values()}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda m: m.id)
def test_a_mutant_says_what_it_is(mutant: Mutant) -> None:
    target = targets.load(mutant.spec)
    assert isinstance(target, Tiled)
    assert Manifest.parse(target.manifest()).features == Manifest.parse(Tiled().manifest()).features
    assert mutant.title and mutant.checks
    for name in mutant.checks:
        level = CATALOGUE[name].level
        assert mutant.level is None or (level is not None and level <= mutant.level)
    # An override of something that is no longer there would be no defect.
    bases = [c for c in type(target).__mro__[1:] if issubclass(c, Tiled)]
    own = {name for name in vars(type(target)) if not name.startswith("__")} - {"seed"}
    assert any(hasattr(base, name) for name in own for base in bases)


def test_an_id_that_stands_twice_is_refused() -> None:
    from portattn.conformance.mutants import softmax

    with pytest.raises(ValueError, match="RescaleMissing"):
        seeds.collect(softmax, softmax)


# ---- scoring -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    [
        "RescaleMissing", "WeightsTruncated", "WindowLeftExclusive", "KeyHeadModulo",
        "PlanWithoutScale", "CrashOnOneKey", "OutputsKept", "DeltaMissing", "LastPageWhole",
    ],
)  # fmt: skip
def test_a_mutant_is_caught_by_a_check_of_its_level(name: str) -> None:
    finding = examine(MUTANTS[name], CATALOGUE, Plan())
    assert finding.case is not None, finding.message
    check = finding.case.partition("/")[0]
    assert check in MUTANTS[name].checks
    wanted = Verdict.CRASH if name == "CrashOnOneKey" else Verdict.FAIL
    assert finding.verdict is wanted


def _of_correct(level: int | None, *checks: str) -> Mutant:
    return Mutant("Nothing", "Nothing is wrong", "none", level, checks, CORRECT)


def test_what_is_correct_survives_and_the_check_is_named() -> None:
    finding = examine(_of_correct(0, "X05", "K03"), CATALOGUE, Plan())
    assert finding.case is None and finding.verdict is None and finding.asked > 2
    made = score.build(Plan(), [finding], None, 1.0)
    assert made["survivors"] == ["Nothing"] and made["caught"] == 0 and status(made) == 1
    assert "X05 or K03 (level L0)" in advice(made["mutants"]["Nothing"])
    digest = made.pop("digest")
    assert digest == record.digest_of(made)


@pytest.mark.parametrize("check", ["R02", "R11"])
def test_larger_tiles_are_not_what_the_memory_checks_catch(check: str) -> None:
    spec = "portattn.conformance.mutants.memory:Large"
    (first, *_) = CATALOGUE[check].cases(Manifest.parse(Tiled().manifest()), "smoke")
    only = {check: replace(CATALOGUE[check], cases=lambda manifest, tier: [first])}
    finding = examine(replace(_of_correct(4, check), spec=spec), only, Plan())
    assert finding.asked == 1
    assert (finding.case, finding.message) == (None, "")


def test_a_check_above_the_level_is_not_asked() -> None:
    finding = examine(_of_correct(0, "R02"), CATALOGUE, Plan())
    assert (finding.case, finding.asked) == (None, 0)


def test_a_case_that_takes_too_long_catches_nothing() -> None:
    finding = examine(_of_correct(0, "F12"), CATALOGUE, Plan(timeout_s=0.001))
    assert finding.case is None
    assert "TIMEOUT" in finding.message


def test_a_mutant_that_does_not_load_is_a_fault_of_the_harness() -> None:
    lost = replace(_of_correct(0, "F01"), spec="portattn.conformance.mutants.softmax:Nowhere")
    finding = examine(lost, CATALOGUE, Plan())
    assert finding.verdict is Verdict.HARNESS_ERROR and "Nowhere" in finding.message
    assert status(score.build(Plan(), [finding], None, 1.0)) == 2


def test_findings_keep_the_order_and_report_each() -> None:
    todo = [_of_correct(0, "R02"), replace(_of_correct(0, "R03"), id="Other")]
    seen: list[tuple[int, int]] = []
    found = score.findings(todo, Plan(), lambda done, total, finding: seen.append((done, total)))
    assert [one.mutant.id for one in found] == ["Nothing", "Other"]
    assert seen == [(1, 2), (2, 2)]


def test_the_correct_one_is_accused_by_failures_and_by_lost_levels() -> None:
    def check(level: int | None, **verdicts: str) -> dict[str, Any]:
        cases = {
            name: {"verdict": v, "message": "", "optional": False} for name, v in verdicts.items()
        }
        return {"level": level, "cases": cases}

    made = {
        "checks": {
            "F01": check(0, good="PASS", warned="QUALITY_WARNING", bad="FAIL"),
            "M12": check(4, refused="NOT_SUPPORTED"),
            "B13": check(None, informs="NOT_SUPPORTED", crashed="CRASH"),
            "T01": check(5, traffic="NOT_SUPPORTED"),
        }
    }
    accused = [line.split()[0] for line in score.accusations(made)]
    assert accused == ["bad", "refused", "crashed"]
    made["checks"]["M12"]["cases"]["refused"]["optional"] = True
    assert [line.split()[0] for line in score.accusations(made)] == ["bad", "crashed"]


def test_selection_by_id_and_family() -> None:
    assert [m.id for m in select(MUTANTS, "DeltaMissing")] == ["DeltaMissing"]
    assert {m.family for m in select(MUTANTS, "memory,calls")} == {"memory", "calls"}
    assert len(select(MUTANTS, None)) == len(MUTANTS)
    with pytest.raises(ValueError, match="Nonsense"):
        select(MUTANTS, "Nonsense")


# ---- the command ---------------------------------------------------------------------------------
OWN = """
from dataclasses import replace

from portattn.conformance.checks import CATALOGUE as ALL
from portattn.conformance.mutants.softmax import DivisionMissing, RescaleMissing
from portattn.conformance.mutants.tiled import Tiled

CATALOGUE = {name: ALL[name] for name in ("X05", "F05")}


class Own(Tiled):
    def mutants(self):
        yield "no.rescale", RescaleMissing()
        yield "no division", DivisionMissing()


class WithSurvivor(Own):
    def mutants(self):
        yield "nothing is wrong", Tiled()
        yield from super().mutants()


class Accused(RescaleMissing, Own):
    pass


class OnlyMutants:
    def mutants(self):
        return [("no.rescale", RescaleMissing())]


class Twice:
    def mutants(self):
        return [("a.b", Tiled()), ("a/b", Tiled())]


thing = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_mutants.py").write_text(OWN)
    (tmp_path / "broken_mutants.py").write_text("raise OSError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_mutants"


def _command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["mutants", *arguments])


def _own(tmp_path: Path, name: str) -> tuple[Result, dict[str, Any]]:
    result = _command(
        "--target", name, "--tier", "smoke", "-o", str(tmp_path),
        "--catalogue", "own_mutants:CATALOGUE",
    )  # fmt: skip
    path = tmp_path / "mutants-foreign.json"
    return result, json.loads(path.read_text()) if path.exists() else {}


def test_the_command_prints_the_score_and_keeps_it(tmp_path: Path) -> None:
    result = _command("--only", "LseInBaseTwo,MaskInverted", "--skip-correct", "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "score: 2 of 2 mutants caught (100.0 %)" in result.output
    made = json.loads((tmp_path / "mutants.json").read_text())
    assert made["survivors"] == [] and made["correct"] is None
    assert made["mutants"]["MaskInverted"]["case"].startswith("K06/")
    digest = made.pop("digest")
    assert digest == record.digest_of(made)


def test_the_list_names_every_mutant() -> None:
    rows = json.loads(_command("--list", "--json").stdout)
    assert [row["id"] for row in rows] == list(MUTANTS)
    assert "LseInBaseTwo" in _command("--list").stdout


def test_mutants_of_ones_own(own: str, tmp_path: Path) -> None:
    result, made = _own(tmp_path, f"{own}:Own")
    assert result.exit_code == 0, result.output
    assert sorted(made["mutants"]) == ["no division", "no.rescale"]
    assert made["mutants"]["no.rescale"]["case"].startswith("F05/")
    assert made["correct"]["accusations"] == [] and made["correct"]["cases"] > 4
    assert "0 accusations" in result.output


def test_a_survivor_of_ones_own_fails_and_is_named(own: str, tmp_path: Path) -> None:
    result, made = _own(tmp_path, f"{own}:WithSurvivor")
    assert result.exit_code == 1
    assert made["survivors"] == ["nothing is wrong"]
    assert "survives nothing is wrong" in result.output
    assert "score: 2 of 3" in result.output


def test_a_correct_one_that_is_wrong_fails(own: str, tmp_path: Path) -> None:
    result, made = _own(tmp_path, f"{own}:Accused")
    assert result.exit_code == 1 and made["survivors"] == []
    assert any(line.startswith("F05/") for line in made["correct"]["accusations"])
    assert "accused though correct" in result.output


def test_mutants_without_a_correct_one(own: str, tmp_path: Path) -> None:
    result, made = _own(tmp_path, f"{own}:OnlyMutants")
    assert result.exit_code == 0, result.output
    assert made["correct"] is None and made["caught"] == made["of"] == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere_at_all:thing", "nowhere_at_all"),
        ("own_mutants", "package.module:object"),
        ("own_mutants:missing", "missing"),
        ("own_mutants:thing", "mutants"),
        ("own_mutants:Twice", "a/b"),
        ("broken_mutants:thing", "no licence"),
    ],
)
def test_mutants_that_cannot_be_used(own: str, spec: str, said: str) -> None:
    result = _command("--target", spec, "--skip-correct")
    assert result.exit_code == 2
    assert said in result.output and "Traceback" not in result.output


def test_an_unknown_mutant_is_an_error() -> None:
    result = _command("--only", "Nonsense", "--skip-correct")
    assert result.exit_code == 2 and "Nonsense" in result.output


def test_cases_can_be_replayed() -> None:
    """The case in the record is the one that a replay with the same seed runs."""
    mutant = MUTANTS["RescaleMissing"]
    finding: Finding = examine(mutant, CATALOGUE, Plan(seed=3))
    assert finding.case is not None
    arguments = ["replay", finding.case, "--target", mutant.spec, "--tier", "cpu", "--seed", "3"]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert json.loads(result.stdout)["outcome"]["verdict"] == str(finding.verdict)
