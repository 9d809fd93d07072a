"""A conformance record speaks for one fingerprint only; what changed since is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portattn import certificate
from portattn.certificate import Evidence
from portattn.machine import Cuda, Device, Machine

CARD = Device(0, "Card", (9, 0), 232_448)
THEN = Machine(cuda_state=Cuda("13.0", (CARD,)), packages={"libone": "1.0"}, imports={})


@dataclasses.dataclass
class Kernel:
    """As much of a backend as a certificate looks at."""

    source: Path
    name: str = "kernel"
    device_kinds: tuple[str, ...] = ("cuda",)
    packages: tuple[str, ...] = ("libone",)

    def kernel_files(self) -> tuple[str, ...]:
        return (str(self.source),)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    source = tmp_path / "kernel.py"
    source.write_text("first")
    return Kernel(source)


@pytest.fixture
def record(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """``record(level=, failed=)`` puts a record of `kernel` on `THEN` into the data folder."""
    monkeypatch.setenv("PORTATTN_DATA_DIR", str(tmp_path / "data"))

    def write(
        level: str | None = "L3", failed: tuple[str, ...] = (), **more: Any
    ) -> dict[str, Any]:
        made = {
            "level": level,
            "created": "2026-03-04T05:06:07Z",
            "failed": list(failed),
            "fingerprint": certificate.fingerprint(kernel, THEN),
            **more,
        }
        path = certificate.evidence_dir() / "kernel.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))
        return made

    return write


# ---- what a record says --------------------------------------------------------------------------
def test_no_record_is_no_evidence(kernel: Kernel, record) -> None:
    assert certificate.find_evidence(kernel, THEN) is None


def test_a_record_of_this_machine_certifies(kernel: Kernel, record) -> None:
    record()
    found = certificate.find_evidence(kernel, THEN)
    assert found == Evidence(
        backend="kernel",
        level="L3",
        date="2026-03-04T05:06:07Z",
        failed=(),
        stale=(),
        path=str(certificate.evidence_dir() / "kernel.json"),
    )
    assert found is not None and found.certifies and not found.quarantines
    assert str(found) == "L3 on 2026-03-04"
    assert found.to_json()["level"] == "L3"


CHANGES: list[tuple[str, Callable[[Kernel], Machine], str]] = [
    (
        "driver",
        lambda k: dataclasses.replace(THEN, cuda_state=Cuda("13.1", (CARD,))),
        "driver (13.0 -> 13.1)",
    ),
    (
        "gpu",
        lambda k: dataclasses.replace(
            THEN, cuda_state=Cuda("13.0", (Device(0, "Other", (8, 9), 101_376),))
        ),
        "gpus (['Card (sm_90)'] -> ['Other (sm_89)'])",
    ),
    (
        "library",
        lambda k: dataclasses.replace(THEN, packages={"libone": "1.1"}),
        "libone (1.0 -> 1.1)",
    ),
    ("library gone", lambda k: dataclasses.replace(THEN, packages={}), "libone (1.0 -> None)"),
]


@pytest.mark.parametrize(("change", "text"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_change_of_the_machine_is_named(kernel: Kernel, record, change, text: str) -> None:
    record()
    found = certificate.find_evidence(kernel, change(kernel))
    assert found is not None
    assert found.stale == (text,)
    assert not found.certifies
    assert text in str(found)


def test_a_change_of_the_kernel_source_is_named(kernel: Kernel, record) -> None:
    before = record()["fingerprint"]["kernel_hash"]
    kernel.source.write_text("second")
    found = certificate.find_evidence(kernel, THEN)
    assert found is not None
    (text,) = found.stale
    assert text.startswith(f"kernel_hash ({before} -> ")


@pytest.mark.parametrize("part", ["system", "cpu", "python", "driver", "gpus", "kernel_hash"])
def test_every_part_of_the_fingerprint_counts(kernel: Kernel, record, part: str) -> None:
    other = {**record()["fingerprint"], part: "another"}
    record(fingerprint=other)
    found = certificate.find_evidence(kernel, THEN)
    assert found is not None
    assert [s.split()[0] for s in found.stale] == [part]


def test_fewer_cores_compute_the_same(kernel: Kernel, record) -> None:
    record(fingerprint={**record()["fingerprint"], "cores": 4096})
    found = certificate.find_evidence(kernel, THEN)
    assert found is not None and found.certifies


def test_a_host_backend_does_not_age_with_the_gpu(kernel: Kernel) -> None:
    kernel.device_kinds = ("cpu",)
    parts = certificate.fingerprint(kernel, THEN)
    assert not {"driver", "gpus"} & set(parts)
    assert {"cpu", "python", "kernel_hash", "libone"} <= set(parts)


@pytest.mark.parametrize(
    ("level", "failed", "stale", "certifies", "quarantines"),
    [
        ("L3", (), (), True, False),
        ("L3", (), ("driver",), False, False),
        (None, (), (), False, False),  # a smoke run: nothing granted, nothing failed
        (None, ("F01",), (), False, True),
        ("L0", ("B03",), (), False, True),
        ("L0", ("B03",), ("driver",), False, False),  # it failed as it was then
    ],
)
def test_what_evidence_is_good_for(level, failed, stale, certifies, quarantines) -> None:
    found = Evidence("x", level, "2026-03-04", failed, stale, "")
    assert (found.certifies, found.quarantines) == (certifies, quarantines)
    assert (level or "no level") in str(found)
    assert all(name in str(found) for name in (*failed, *stale))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\udcff",
        "{}",
        '{"level": 3, "created": "", "failed": [], "fingerprint": {}}',
        '{"level": null, "created": "", "failed": null, "fingerprint": {}}',
        '{"level": null, "created": "", "failed": [], "fingerprint": []}',
    ],
)
def test_a_file_that_is_no_record_is_no_evidence(kernel: Kernel, record, text: str) -> None:
    record()
    path = certificate.evidence_dir() / "kernel.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert certificate.find_evidence(kernel, THEN) is None


def test_a_newer_record_takes_the_place_of_the_older(kernel: Kernel, record) -> None:
    record("L1")
    assert certificate.find_evidence(kernel, THEN).level == "L1"  # type: ignore[union-attr]
    record("L2", created="2026-03-05T05:06:07Z")
    assert certificate.find_evidence(kernel, THEN).level == "L2"  # type: ignore[union-attr]


def test_the_suites_own_records_are_read(kernel: Kernel, record) -> None:
    """The two sides speak through the file alone: this is the one place where they meet."""
    suite = pytest.importorskip("portattn.conformance.record")
    from portattn.conformance.case import Case, Outcome

    entry = suite.case_entry(Case("F01", "x"), Outcome.failed("wrong"), 0.1)
    check = {"title": "", "level": 0, "tiers": ["cpu"], "cases": {"F01/x": entry}}
    concluded = suite.conclude(
        {
            "schema": suite.SCHEMA,
            "suite": {},
            "target": {"spec": "kernel", "manifest": {"device": "cpu"}, "source": ""},
            "fingerprint": certificate.fingerprint(kernel, THEN),
            "created": "2026-03-04T05:06:07Z",
            "seconds": 0,
            "tier": "cpu",
            "seed": 0,
            "fractions": [[1, 1]],
            "selection": None,
            "complete": True,
            "simulated": False,
            "waivers": [],
            "checks": {"F01": check},
        }
    )
    suite.write(concluded, certificate.evidence_dir() / "kernel.json")
    found = certificate.find_evidence(kernel, THEN)
    assert found is not None
    assert (found.level, found.failed, found.stale) == (None, ("F01",), ())
    assert found.quarantines


# ---- where records lie, and when they are demanded -----------------------------------------------
def test_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PORTATTN_DATA_DIR", str(tmp_path))
    assert certificate.evidence_dir() == tmp_path / "evidence"
    monkeypatch.delenv("PORTATTN_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert certificate.data_dir().name == "portattn"
    assert tmp_path in certificate.data_dir().parents
    assert not list(tmp_path.iterdir()), "asking makes no folder"


@pytest.mark.parametrize(
    ("flag", "variable", "wanted"),
    [
        (None, None, False),
        (None, "", False),
        (None, "0", False),
        (None, "false", False),
        (None, "1", True),
        (None, "true", True),
        (True, None, True),
        (True, "0", True),
        (False, "1", False),
    ],
)
def test_when_certificates_are_demanded(monkeypatch, flag, variable, wanted: bool) -> None:
    if variable is None:
        monkeypatch.delenv("PORTATTN_REQUIRE_CERTIFIED", raising=False)
    else:
        monkeypatch.setenv("PORTATTN_REQUIRE_CERTIFIED", variable)
    assert certificate.required(flag) is wanted


def test_the_source_hash_is_that_of_names_and_contents(tmp_path: Path) -> None:
    def tree(folder: str, **files: str) -> str:
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
        return certificate.source_hash(tuple(str(tmp_path / folder / n) for n in files))

    one = tree("one", a="x", b="y")
    assert tree("moved", b="y", a="x") == one
    assert (
        len({one, tree("c", a="x", b="z"), tree("d", a="x", c="y"), tree("e", a="xb", b="y")}) == 4
    )
