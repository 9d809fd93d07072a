"""ONNX's own Attention cases through portattn: which are covered, that they pass, and that the
runner would notice if they did not."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

import portattn
from portattn.conformance import onnx_cases
from portattn.conformance.onnx_cases import NO_SCORES, NO_WIDER_SOFTMAX, OnnxCase, Result
from portattn.conformance.verdicts import Verdict

onnx = pytest.importorskip("onnx", reason="onnx is not installed (pip install onnx)")

# What onnx 1.23 holds: the operator of opset 25.
SCORES = {
    f"test_attention_{name}"
    for name in (
        "4d_with_qk_matmul",
        "4d_with_qk_matmul_bias",
        "4d_with_qk_matmul_softcap",
        "4d_with_qk_matmul_softmax",
        "4d_with_past_and_present_qk_matmul",
        "4d_with_past_and_present_qk_matmul_bias",
        "4d_with_past_and_present_qk_matmul_bias_3d_mask",
        "4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
        "4d_with_past_and_present_qk_matmul_bias_4d_mask",
        "4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
        "3d_with_past_and_present_qk_matmul",
        "3d_with_past_and_present_qk_matmul_bias",
        "3d_with_past_and_present_qk_matmul_softcap",
        "3d_with_past_and_present_qk_matmul_softmax",
        "23_fullymasked_qk_matmul_output_mode3_zero",
        "24_fullymasked_qk_matmul_output_mode3_zero",
        "24_qk_matmul_output_mode3_softmax_precision",
        "local_window_gqa_rank4_mask",
    )
}
WIDER = {"test_attention_local_window_gqa_rank4_mask"}
COVERED = 75


@pytest.fixture(scope="module")
def cases() -> dict[str, OnnxCase]:
    return {case.name: case for case in onnx_cases.collect()}


@pytest.fixture(scope="module")
def results(cases: dict[str, OnnxCase]) -> list[Result]:
    return [onnx_cases.run(case) for case in cases.values()]


def test_every_covered_case_passes(results: list[Result]) -> None:
    failed = {item.name: item.message for item in results if item.verdict is Verdict.FAIL}
    assert not failed
    assert all(item.ratio is not None and item.ratio <= 1 for item in results)


def test_what_is_not_covered_is_listed_with_its_reason(results: list[Result]) -> None:
    if not onnx.__version__.startswith("1.23."):
        pytest.skip(f"the names are those of onnx 1.23, here is {onnx.__version__}")
    by_reason: dict[str, set[str]] = {}
    for item in results:
        for reason in item.reasons:
            by_reason.setdefault(reason, set()).add(item.name)
    assert by_reason == {NO_SCORES: SCORES, NO_WIDER_SOFTMAX: WIDER}
    listed = {item.name for item in results if item.verdict is Verdict.NOT_SUPPORTED}
    assert listed == SCORES | WIDER
    passed = [item for item in results if item.verdict is Verdict.PASS]
    assert (len(passed), len(results), onnx_cases.opset()) == (COVERED, COVERED + len(listed), 25)


def test_the_contract_is_asked_in_its_own_words(results: list[Result]) -> None:
    """Every option that the operator has a word for is used, and a mask stands in for causal or
    window only where no alignment says the operator's offset."""
    used = {option for item in results for option in item.options}
    assert used >= {"scale", "softcap", "causal", "window", "bias", "mask", "seqused_k"}
    by_name = {item.name: item.options for item in results}
    assert by_name["test_attention_4d_causal"] == ("causal",)
    assert by_name["test_attention_local_window"] == ("causal", "window")
    assert by_name["test_attention_local_window_with_past"] == ("mask",)


def test_alignments(cases: dict[str, OnnxCase]) -> None:
    """Offset 0 is the top left, that of a full cache the bottom right (ONNX's text, opset 25)."""
    causal = {
        name: onnx_cases.ask(cases[f"test_attention_{name}"]).options["causal"]
        for name in (
            "4d_causal",
            "4d_causal_with_past_and_present",
            "4d_gqa_causal_nonpad_decode",
        )
    }
    assert list(causal.values()) == ["top_left", "bottom_right", "bottom_right"]


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("4d_causal", {"is_causal": 0}),
        ("4d_causal_bf16", {"is_causal": 0}),
        ("local_window", {"left_window_size": 1}),
        ("local_window_with_past", {"left_window_size": 1}),
        ("4d_softcap", {"softcap": 3.0}),
        ("4d_scaled", {"scale": 0.02}),
        ("4d_gqa_scaled", {"scale": None}),
    ],
)
def test_a_wrong_answer_fails(
    cases: dict[str, OnnxCase], name: str, attributes: dict[str, Any]
) -> None:
    """The same inputs asked otherwise: the expected output is missed by more than its tolerance."""
    case = cases[f"test_attention_{name}"]
    changed = replace(case, attributes={**case.attributes, **attributes})
    assert onnx_cases.run(changed).verdict is Verdict.FAIL


def test_one_unit_in_the_last_place_passes_and_more_fails(cases: dict[str, OnnxCase]) -> None:
    for name, units in (("4d_causal_bf16", 8), ("4d_fp16", 8), ("4d", 64)):
        case = cases[f"test_attention_{name}"]
        right = onnx_cases.run(case)
        y = case.wanted["y"]
        off = np.array(y)
        off.flat[-1] *= 1 + units * np.asarray(onnx_cases.ROUND_OFF[str(y.dtype)], y.dtype)
        wrong = onnx_cases.run(replace(case, wanted={"y": off}))
        assert (right.verdict, wrong.verdict) == (Verdict.PASS, Verdict.FAIL), name
        assert right.ratio is not None
        assert right.ratio <= 1


def test_wrong_present_nan_and_shape_fail(cases: dict[str, OnnxCase]) -> None:
    case = cases["test_attention_4d_causal_with_past_and_present"]
    present = np.array(case.wanted["present_value"])
    present[0, 0, 0, 0] += 1
    result = onnx_cases.run(replace(case, wanted={**case.wanted, "present_value": present}))
    assert (result.verdict, result.message) == (Verdict.FAIL, "present_value differs")
    poisoned = np.array(case.inputs["v"])
    poisoned[0, 0, 0, 0] = np.nan
    result = onnx_cases.run(replace(case, inputs={**case.inputs, "v": poisoned}))
    assert result.verdict is Verdict.FAIL
    result = onnx_cases.run(replace(case, wanted={**case.wanted, "y": case.wanted["y"][:1]}))
    assert result.verdict is Verdict.FAIL


def test_what_the_runner_does_not_know_is_never_ignored(cases: dict[str, OnnxCase]) -> None:
    case = cases["test_attention_4d"]
    newer = replace(case, attributes={**case.attributes, "sink_size": 4})
    result = onnx_cases.run(newer)
    assert (result.verdict, result.ratio) == (Verdict.NOT_SUPPORTED, None)
    assert "sink_size" in result.reasons[0]
    mixed = replace(case, inputs={**case.inputs, "v": case.inputs["v"].astype(np.float16)})
    assert onnx_cases.run(mixed).reasons == (onnx_cases.NO_MIXED_DTYPES,)
    whole = np.zeros((4, 6), np.int32)
    integer = replace(case, inputs={**case.inputs, "attn_mask": whole})
    assert onnx_cases.run(integer).reasons == (onnx_cases.NO_OTHER_MASK,)


def test_the_operator_is_also_asked_where_no_case_does(cases: dict[str, OnnxCase]) -> None:
    """A window without causal on unequal lengths, float64: as onnx's reference has it."""
    reference = importlib.import_module("onnx.reference.ops.op_attention")
    rng = np.random.default_rng(0)
    case = cases["test_attention_4d"]
    for seq_q, seq_k, past in ((4, 7, 0), (7, 4, 0), (3, 3, 5), (5, 2, 4)):
        for options in (
            {"left_window_size": 1, "right_window_size": 2},
            {"left_window_size": 0, "is_causal": 1},
            {"right_window_size": 0, "softcap": 2.0},
            {"is_causal": 1},
        ):
            inputs = {
                name: rng.standard_normal((2, heads, length, 8))
                for name, heads, length in (
                    ("q", 4, seq_q), ("k", 2, seq_k), ("v", 2, seq_k),
                    ("past_key", 2, past), ("past_value", 2, past),
                )
                if length
            }  # fmt: skip
            y, *_ = reference._compute_attention(
                *(inputs[name] for name in "qkv"),
                past_key=inputs.get("past_key"),
                past_value=inputs.get("past_value"),
                **options,
            )
            asked = replace(
                case,
                inputs=inputs,
                attributes={**onnx_cases.DEFAULTS, **options},
                wanted={"y": y},
                atol=1e-14,
            )
            result = onnx_cases.run(asked)
            assert result.verdict is Verdict.PASS, (seq_q, seq_k, past, options, result)


def test_softcap_before_mask_and_bias() -> None:
    """BUG-054 (onnx#7865): a mask before the softcap gives 27.625 here."""
    q = k = np.zeros((1, 1, 2, 1), np.float32)
    v = np.array([1.0, 100.0], np.float32).reshape(1, 1, 2, 1)
    mask = np.array([[True, False]])
    out = portattn.attention(q, k, v, layout="bhsd", softcap=1.0, mask=mask, backend="numpy")
    assert (out == 1.0).all()
    bias = np.array([[0.0, 3.0]], np.float32)
    out = portattn.attention(q, k, v, layout="bhsd", softcap=1.0, bias=bias, backend="numpy")
    weight = 1 / (1 + np.exp(3.0))
    np.testing.assert_allclose(out, weight * 1 + (1 - weight) * 100, rtol=1e-6)


def test_an_onnx_that_contradicts_the_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "__version__", "1.21.0")
    result = CliRunner().invoke(onnx_cases.command)
    assert result.exit_code == 2
    assert "onnx#7865" in result.output


def test_command(monkeypatch: pytest.MonkeyPatch, cases: dict[str, OnnxCase]) -> None:
    """Table, JSON and exit status, with the cases that were already made."""
    some = [cases["test_attention_4d_causal"], cases["test_attention_4d_with_qk_matmul"]]
    monkeypatch.setattr(onnx_cases, "collect", lambda: some)
    told = CliRunner().invoke(onnx_cases.command)
    assert told.exit_code == 0
    assert "2 cases: 1 NOT_SUPPORTED, 1 PASS" in told.output
    assert f"1 {NO_SCORES}" in told.output
    made = json.loads(CliRunner().invoke(onnx_cases.command, ["--json"]).output)
    assert made["verdicts"] == {"NOT_SUPPORTED": 1, "PASS": 1}
    assert [item["name"] for item in made["results"]] == [case.name for case in some]

    bad = replace(some[0], attributes={**some[0].attributes, "is_causal": 0})
    monkeypatch.setattr(onnx_cases, "collect", lambda: [bad])
    failed = CliRunner().invoke(onnx_cases.command)
    assert failed.exit_code == 1
    assert "y is off by" in failed.output

    assert CliRunner().invoke(onnx_cases.command, ["--backend", "nix"]).exit_code == 2


def test_a_backend_that_answers_nothing_is_no_success(
    monkeypatch: pytest.MonkeyPatch, cases: dict[str, OnnxCase]
) -> None:
    names = [info.name for info in portattn.list_backends() if info.name != "numpy"]
    monkeypatch.setattr(onnx_cases, "collect", lambda: [cases["test_attention_4d_causal"]])
    for name in names:  # they take arrays of a CUDA device, and these lie in host memory
        silent = CliRunner().invoke(onnx_cases.command, ["--backend", name])
        assert silent.exit_code == 2, name
        assert "1 NOT_SUPPORTED" in silent.output


def test_attached_to_the_command_line() -> None:
    from portattn.conformance.cli import cli

    assert "onnx" in cli.list_commands(click.Context(cli))
    told = CliRunner().invoke(cli, ["onnx", "--help"])
    assert told.exit_code == 0
    assert "Exit status" in told.output
