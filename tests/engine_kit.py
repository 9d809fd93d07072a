"""Runs of the engine on the targets of `conformance_kit`, for the tests of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from portattn.conformance import audit, identity, runner
from portattn.conformance.cli import cli
from portattn.conformance.runner import Options

HERE = Path(__file__).parent
CATALOGUE = "conformance_kit:CATALOGUE"
MANIFEST: dict[str, Any] = {
    "name": "x",
    "version": "1",
    "array": "numpy",
    "device": "cpu",
    "dtypes": ["float32"],
    "max_head_dim": 64,
    "features": ["causal"],
}


def run_kit(target: str, tier: str = "smoke", **options: Any) -> dict[str, Any]:
    prepared = runner.prepare(
        Options(f"conformance_kit:{target}", tier, catalogue=CATALOGUE, **options)
    )
    return runner.execute(prepared)


def cases_of(made: Mapping[str, Any]) -> dict[str, Any]:
    checks = made["checks"].values()
    return {case_id: case for entry in checks for case_id, case in entry["cases"].items()}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--catalogue", CATALOGUE])


def wrong_in(made: Mapping[str, Any]) -> list[str]:
    return audit.verify(made, runner.catalogue_of(CATALOGUE), identity.suite())
