"""The index of evidence: every file by its machine, escaped, and from the files alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from record_kit import BAD, GOOD, built, hostile, invoke

from portattn.conformance import index, record

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence"


def bench(**more: Any) -> dict[str, Any]:
    """A benchmark as `portattn bench` writes it, in small."""
    return {
        "kind": "bench", "backend": "numpy", "created": "2026-01-02T03:04:05+00:00",
        "fingerprint": {"cpu": "a processor", "numpy": "2.0", "kernel_hash": "old"},
        "summary": {"prefill over torch-sdpa, geometric mean": 1.25}, **more,
    }  # fmt: skip


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """A folder with two machines."""
    folder = tmp_path / "evidence"
    here = index.kernel_hashes()["numpy"]
    parts = {"cpu": "a processor", "numpy": "2.0", "kernel_hash": here}
    record.write(built(*GOOD, spec="numpy", fingerprint=parts), folder / "one" / "numpy.json")
    old = {**parts, "kernel_hash": "0123456789abcdef"}
    record.write(built(*BAD, spec="backend:numpy", fingerprint=old), folder / "two" / "numpy.json")
    record.write(built(*GOOD), folder / "two" / "a kernel.json")
    (folder / "one" / "bench.json").write_text(json.dumps(bench()))
    return folder


def line_of(page_: str, *words: str) -> str:
    """The one line with all of ``words``."""
    (line,) = [line for line in page_.splitlines() if all(word in line for word in words)]
    return line


def test_the_index_lists_every_file_by_machine(evidence: Path) -> None:
    made = index.page(evidence)
    assert [x for x in made.splitlines() if x.startswith("## ")] == ["## one", "## two"]
    good = line_of(made, "| [numpy.json](one/numpy.json) |")
    assert "as in this checkout" in good and "| yes |" in good and "numpy 2.0" in good
    bad = line_of(made, "| [numpy.json](two/numpy.json) |")
    assert "**stale**: `0123456789abcdef` then" in bad and "| none |" in bad
    assert "a%20kernel.json" in line_of(made, "| [a kernel.json]")
    assert "F01, H04, K06" in line_of(made, "(two/numpy.json) failed")
    assert "L0 (core forward) is not granted" in line_of(made, "(two/numpy.json): ")
    assert "1.25" in line_of(made, "prefill over torch-sdpa, geometric mean")
    assert "**stale**" in line_of(made, "kernels: ")


def test_the_index_follows_from_the_files_alone(evidence: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(evidence, moved)
    assert index.page(evidence) == index.page(moved)


def test_the_index_says_what_cannot_be_believed(evidence: Path) -> None:
    path = evidence / "one" / "numpy.json"
    made = record.read(path)
    made["level"] = "L2"
    record.write(made, path)
    (evidence / "one" / "half.json").write_text('{"schema": ')
    (evidence / "one" / "list.json").write_text("[]")
    written = index.page(evidence)
    assert "**edited**" in line_of(written, "| [numpy.json](one/numpy.json) |")
    assert "half.json" in line_of(written, "half.json", "cannot be read")
    assert "not a JSON object" in line_of(written, "list.json", "cannot be read")


def test_the_index_escapes_what_files_say(tmp_path: Path) -> None:
    record.write(hostile(), tmp_path / "m|<b>" / "x.json")
    noise = bench(backend="`a`|b", summary={"a|b\n# c": "<script>"})
    (tmp_path / "m|<b>" / "y.json").write_text(json.dumps(noise))
    made = index.page(tmp_path)
    assert "<" not in made
    assert [x for x in made.splitlines() if x.startswith("#")][1] == r"## m\|&lt;b&gt;"
    columns = {x.replace(r"\|", "").count("|") for x in made.splitlines() if x.startswith("| ")}
    assert columns == {13, 3}


def test_index_check_compares_and_writes_nothing(evidence: Path) -> None:
    output = evidence / "README.md"
    assert invoke("index", evidence, "--check").exit_code == 1
    assert not output.exists()
    assert invoke("index", evidence).exit_code == 0
    assert invoke("index", evidence, "--check").exit_code == 0
    output.write_text(output.read_text("utf-8") + "more\n")
    assert invoke("index", evidence, "--check").exit_code == 1


def test_only_kernels_of_this_checkout_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from portattn import registry

    class Foreign:
        """Someone else's backend, installed here."""

        name = "foreign"

        def kernel_files(self) -> tuple[str, ...]:
            """Never asked."""
            raise AssertionError

    found = {**registry.find_backends(), "foreign": registry.Found("foreign", "x 1", Foreign())}  # type: ignore[arg-type]
    monkeypatch.setattr(index, "find_backends", lambda: found)
    assert set(index.kernel_hashes()) == {"numpy", "triton", "cupy", "numba"}


def test_the_committed_index_is_the_generated_one() -> None:
    written = (EVIDENCE / "README.md").read_text("utf-8")
    assert written == index.page(EVIDENCE), (
        "run `portattn conformance index docs/evidence` and commit docs/evidence/README.md"
    )
