"""The engine of the suite: isolation, manifests, verdicts; held against targets that misbehave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from engine_kit import HERE, MANIFEST, cases_of, invoke, run_kit

from portattn.conformance import (
    levels,
    meters,
    placement,
)
from portattn.conformance.case import Case, check
from portattn.conformance.checks import CATALOGUE as REAL
from portattn.conformance.context import Context
from portattn.conformance.manifest import Manifest, ManifestError
from portattn.conformance.targets import SHIPPED, TargetError, load
from portattn.conformance.verdicts import Verdict, verdict_of

pytestmark = pytest.mark.usefixtures("own_evidence")


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
    made = run_kit(target, timeout_s=2.0 if target == "Hangs" else None, memory=1 << 30)
    cases = cases_of(made)
    assert cases["F01/trigger"]["verdict"] == verdict, cases["F01/trigger"]
    if cause is not None:
        assert cases["F01/trigger"]["cause"] == cause
    assert said in cases["F01/trigger"]["message"]
    assert "Traceback" not in cases["F01/trigger"]["message"]
    assert cases["F01/before"]["verdict"] == cases["F01/after"]["verdict"] == "PASS"
    assert made["failed"] == ([] if verdict == "PASS" else ["F01"])


def test_a_reused_output_buffer_is_seen_by_the_next_call() -> None:
    cases = cases_of(run_kit("Reuses"))
    assert cases["F01/before"]["verdict"] == "PASS"
    assert cases["F01/trigger"]["cause"] == "stale_output"
    assert "F01/before" in cases["F01/trigger"]["message"]


def test_the_worst_element_is_in_the_record() -> None:
    worst = cases_of(run_kit("WrongValue"))["F01/trigger"]["worst"]
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
    case = cases_of(run_kit(target, "cpu"))["K01/softcap"]
    assert case["verdict"] == verdict
    assert said in case["message"]


def test_an_error_of_the_suite_is_not_blamed_on_the_target() -> None:
    made = run_kit("Good", "gpu", selection=("E01",))
    case = cases_of(made)["E01/broken"]
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
    result = invoke("run", "--target", target, "--tier", "smoke")
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_missing_packages_are_named() -> None:
    for name in ("flash-attn", "xformers"):
        with pytest.raises(TargetError, match=rf"{name}.*not installed|CUDA device|torch is not"):
            load(name)
    assert len(SHIPPED) == 13


# ---- manifests -----------------------------------------------------------------------------------


def test_defaults_are_those_of_the_protocol() -> None:
    manifest = Manifest.parse(MANIFEST)
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
        Manifest.parse({**MANIFEST, **change})
    assert said in str(caught.value)


def test_every_complaint_is_reported_at_once() -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.parse({"name": "x", "array": "jax", "colour": 1})
    assert len(caught.value.problems) >= 5


def test_what_lies_outside_a_manifest() -> None:
    manifest = Manifest.parse({**MANIFEST, "causal_alignments": ["top_left"]})
    assert manifest.why_not(dtype="float32", head_dim=64, features=["causal"]) == ()
    assert len(manifest.why_not(dtype="float16", head_dim=65, features=["gqa"])) == 3
    assert "bottom_right" in manifest.why_not(alignment="bottom_right")[0]
    square = Manifest.parse({**MANIFEST, "causal_alignments": []})
    assert square.causal_alignments == ()
    assert Manifest.parse(square.to_json()) == square
    assert square.why_not(features=["causal"]) == ()
    assert square.why_not(features=["causal"], alignment="top_left")
    least = Manifest.parse({**MANIFEST, "min_sizes": [0, 0, 2]})
    assert least.why_not(sizes=(0, 0, 2)) == ()
    assert least.why_not(sizes=(5, 5, 1)) == ("fewer than 2 keys are not claimed",)


def test_square_causal_is_asked_of_who_takes_nothing_else() -> None:
    square = Manifest.parse({**MANIFEST, "causal_alignments": [], "min_sizes": [1, 1, 2]})
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
    made = run_kit("Simulated", "cpu", selection=("F01",))
    assert {case["verdict"] for case in cases_of(made).values()} == {"SIMULATED"}


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
    target = load(f"conformance_kit:{name}")
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
