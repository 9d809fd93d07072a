"""The command line as a user meets it: output, JSON, exit status."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from portattn.__main__ import cli


def run(*args, env=None):
    return CliRunner().invoke(cli, list(args), env=env)


def test_backends_lists_every_backend_with_every_reason():
    result = run("backends", "--json")
    assert result.exit_code == 0, result.output
    infos = {i["name"]: i for i in json.loads(result.output)}
    assert {"numpy", "triton", "cupy", "numba"} <= set(infos)
    assert infos["numpy"]["ready"] and infos["numpy"]["reasons"] == []
    assert infos["numpy"]["head_dims"] == "any"
    assert infos["numpy"]["dtypes"] == ["float16", "bfloat16", "float32", "float64"]
    assert "paged" in infos["numpy"]["features"] and "tf32" not in infos["numpy"]["features"]
    for name in ("triton", "cupy", "numba"):
        assert infos[name]["ready"] == (not infos[name]["reasons"])


def test_table_names_every_reason_in_a_narrow_terminal():
    for width in ("60", "200"):
        result = run("backends", env={"COLUMNS": width})
        assert result.exit_code == 0
        for word in ("numpy", "triton is not ready", "no_kernel", "features"):
            assert word in result.output


def test_query_of_the_issue_is_accepted_by_numpy():
    args = ["--head-dim", "256", "--dtype", "bfloat16", "--seq", "262144", "--causal", "--backward"]
    result = run("backends", *args)
    assert result.exit_code == 0, result.output
    assert "numpy would run it" in result.output and "workspace" in result.output
    decision = json.loads(run("backends", *args, "--json").output)
    assert decision["chosen"] == "numpy"
    by_name = {c["backend"]: c for c in decision["candidates"]}
    assert by_name["numpy"]["plan"]["workspace_bytes"] > 0
    assert by_name["triton"]["reasons"]
    assert decision["problem"]["causal"] == "bottom_right"


def test_exit_status_3_where_nobody_accepts_with_reason_and_nearest():
    result = run("backends", "--head-dim", "64", "--precision", "tf32", "--dtype", "float32")
    assert result.exit_code == 3
    decision = json.loads(
        run("backends", "--head-dim=64", "--precision=tf32", "--dtype=float32", "--json").output
    )
    numpy = next(c for c in decision["candidates"] if c["backend"] == "numpy")
    assert decision["chosen"] is None and not numpy["accepted"]
    assert [r["code"] for r in numpy["reasons"]] == ["precision"]
    assert numpy["nearest"] and "tf32" not in numpy["nearest"]


@pytest.mark.parametrize(
    "args, word",
    [
        (["--head-dim", "0"], "head_dim"),
        (["--head-dim", "64", "--dtype", "int8"], "dtype"),
        (["--head-dim", "64", "--heads-q", "6", "--heads-k", "4"], "heads"),
        (["--head-dim", "64", "--causal", "--seq-q", "4", "--seq-k", "8"], "bottom_right"),
        (["--head-dim", "64", "--window", "-1,0"], "window"),
        (["--head-dim", "64", "--window", "3"], "LEFT,RIGHT"),
        (["--head-dim", "64", "--backend", "nope"], "nope"),
        (["--head-dim", "64", "--device", "sm_banana"], "sm_banana"),
        (["--dtype", "float16"], "--head-dim"),
    ],
)
def test_wrong_questions_are_usage_errors(args, word):
    result = run("backends", *args)
    assert result.exit_code == 2
    assert word in result.output


def test_a_device_that_is_not_here():
    result = run("backends", "--head-dim", "256", "--device", "sm_89", "--json")
    decision = json.loads(result.output)
    by_name = {c["backend"]: c for c in decision["candidates"]}
    assert [r["code"] for r in by_name["numpy"]["reasons"]] == ["device"]
    assert result.exit_code == (0 if decision["chosen"] else 3)


def test_help_imports_no_command():
    code = (
        "import sys; from click.testing import CliRunner; from portattn.__main__ import cli;"
        "r = CliRunner().invoke(cli, ['--help']); assert 'conformance' in r.output, r.output;"
        "assert not [m for m in sys.modules if m.startswith(('portattn.conf', 'numpy', 'rich'))]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_as_module_and_version():
    for args in (["--version"], ["-h"]):
        done = subprocess.run(
            [sys.executable, "-m", "portattn", *args],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert done.returncode == 0 and done.stdout
