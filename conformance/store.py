"""Where records are kept: as evidence in the user's data folder, or in a folder of one's own.

The rule kept here: evidence is a whole run of a backend in all of its dtypes, and a weaker run
does not replace a stronger one that still speaks for this machine. Everything else lands beside it,
under records/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portattn import certificate
from portattn.conformance import record
from portattn.conformance.case import TIERS
from portattn.conformance.levels import whole
from portattn.conformance.runner import Run
from portattn.conformance.targets import SHIPPED


@dataclass(frozen=True, slots=True)
class Places:
    """The files of one run."""

    final: Path
    partial: Path
    journal: Path


def places(run: Run, folder: Path | None) -> Places:
    """Where a run's files go: ``folder`` where one is given, else the user's data folder."""
    options = run.options
    i, n = options.fraction
    name = run.name + (f"-{i}of{n}" if n > 1 else "")
    if folder is not None:
        base = folder
    else:
        base = certificate.data_dir() / "records"
        name += f"-{options.tier}" + ("-selected" if options.selection is not None else "")
        if run.loaded.manifest.unasked_dtypes:
            name += "".join(f"-{dtype}" for dtype in run.loaded.manifest.dtypes)
    return Places(
        base / f"{name}.json", base / f"{name}.partial.json", base / f"{name}.journal.jsonl"
    )


def keep(made: Mapping[str, Any], where: Places, folder: Path | None) -> list[Path]:
    """Write a finished record, as evidence too where it is that, and clear what it took to make
    it. The files written, the best known first."""
    written = [where.final]
    record.write(made, where.final)
    if folder is None and (evidence := _as_evidence(made)) is not None:
        record.write(made, evidence)
        written.insert(0, evidence)
    for path in (where.partial, where.journal):
        path.unlink(missing_ok=True)
    return written


def _as_evidence(made: Mapping[str, Any]) -> Path | None:
    """The evidence file that this record may replace; None where it is no evidence or weaker."""
    kind, _, name = SHIPPED.get(made["target"]["spec"], made["target"]["spec"]).partition(":")
    if kind != "backend" or not whole(made) or record.only_dtypes(made):
        return None
    path = certificate.evidence_dir() / f"{name}.json"
    if not path.exists():
        return path
    try:
        old = record.read(path)
    except record.RecordError:
        return path  # what cannot be read is no evidence
    same = all(old[key] == made[key] for key in ("suite", "fingerprint"))
    weaker = TIERS.index(made["tier"]) < TIERS.index(old["tier"])
    return None if same and weaker else path
