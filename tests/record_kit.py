"""Records as a run would have made them, and the conformance command: shared by the tests of what
is made of records."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from click.testing import CliRunner, Result

from portattn.conformance import record
from portattn.conformance.case import Case, Check, Outcome
from portattn.conformance.cli import cli
from portattn.conformance.manifest import Manifest
from portattn.conformance.waivers import Waiver

HOSTILE = (
    "</script><script>alert('x')</script><img src=http://evil.test/a onerror=\"alert(1)\"> & {}"
)

MANIFEST = {
    "name": "kernel", "version": "1.0", "array": "numpy", "device": "cpu",
    "dtypes": ["float16", "float32"], "max_head_dim": 256,
    "features": ["causal", "gqa", "mask", "backward"],
}  # fmt: skip


def nothing(*_: Any) -> Any:
    """Cases and runs that no test here calls."""
    raise AssertionError("a record is read, not run")


def checks(*rows: tuple[str, str, int | None]) -> dict[str, Check]:
    """A catalogue of (id, title, level)."""
    return {id: Check(id, title, level, nothing, nothing) for id, title, level in rows}


SMALL = checks(
    ("F01", "normal input", 0), ("H04", "head dim 256", 1), ("H12", "refused", 0),
    ("K06", "bool mask", 0), ("R01", "no quadratic term", 2), ("B01", "dense", 3),
)  # fmt: skip
SHAPE = {"b": 1, "h": 2, "hk": 2, "n": 65, "m": 65, "d": 64, "dv": 64, "dtype": "float32"}


def answered(check: str, name: str, outcome: Outcome, **params: Any) -> tuple[Case, Outcome]:
    """A case with its outcome."""
    return Case(check, name, {**SHAPE, **params}, seed=7), outcome


def built(
    *answers: tuple[Case, Outcome],
    catalogue: Mapping[str, Check] = SMALL,
    manifest: Mapping[str, Any] = MANIFEST,
    spec: str = "my.kernels:fast",
    **more: Any,
) -> dict[str, Any]:
    """A record as a run would have made it."""
    given: dict[str, Any] = {
        "suite": {"version": "0", "hash": "0" * 16},
        "fingerprint": {"cpu": "a processor", "kernel_hash": "1" * 16, "numpy": "2.0"},
        "waivers": (),
    }
    return record.build(
        spec=spec, manifest=Manifest.parse(manifest), simulated=False, source="2" * 16, states=(),
        tier="cpu", seed=0, fraction=(1, 1), selection=None, catalogue=catalogue, complete=True,
        seconds=1.0,
        entries={c.id: record.case_entry(c, o, 0.01) for c, o in answers}, **(given | more),
    )  # fmt: skip


GOOD = (
    answered("F01", "a", Outcome({"e1_prob": 0.25, "e1_det": 0.2, "e2": 0.7, "e3": 0.1})),
    answered("H04", "b", Outcome({"e1_prob": 0.5, "e1_det": 0.4}), d=256, dv=256),
    answered("K06", "c", Outcome({"visible.different_bad": 0})),
    answered("R01", "d", Outcome({"workspace_1024": 1e5, "workspace_2048": 2e5, "c_over": 0.1})),
    answered("B01", "e", Outcome({"dq.e1_prob": 0.3, "dq.e1_det": 0.2}), dtype="float16"),
    answered("H12", "f", Outcome({"e1_prob": 0.1, "e1_det": 0.1}), d=320, dv=320),
)  # fmt: skip
BAD = (
    answered("F01", "a", Outcome({"e1_prob": 4.0, "e1_det": 2.5, "e2": float("nan")},
             message="out[0] is 3, must be 1", worst={"index": [0, 1], "got": 3, "want": 1})),
    answered("H04", "b", Outcome(cause="crash", message="signal 11"), d=256, dv=256),
    answered("K06", "c", Outcome({"out_over": float("inf")})),
)  # fmt: skip


def hostile() -> dict[str, Any]:
    """A record whose every text tries to leave its place."""
    names = {"name": HOSTILE, "version": HOSTILE}
    bad = Outcome(
        {f"{HOSTILE}.e1_prob": 2.0, "e1_prob": 3.0, "e1_det": 3.0, "workspace_64": 1.0,
         "workspace_128": 4.0},
        message=HOSTILE + "\0\x1b[31m\u202e\ud800", worst={"index": [HOSTILE], "got": HOSTILE},
    )  # fmt: skip
    return built(
        answered("F01", HOSTILE, bad),
        answered("R01", HOSTILE, bad, dtype="float32"),
        catalogue=checks(("F01", HOSTILE, 0), ("R01", HOSTILE, 2)),
        manifest={**MANIFEST, **names},
        spec=f"a:{HOSTILE}",
        fingerprint={"cpu": HOSTILE, HOSTILE: HOSTILE, "gpus": [HOSTILE]},
        suite={"version": HOSTILE, "hash": HOSTILE},
        waivers=(Waiver("R01", HOSTILE, date(2999, 1, 1), "*", HOSTILE),),
    )


def invoke(*arguments: Any) -> Result:
    """A conformance command in this process."""
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
