"""The policy: which backend runs a problem, and how that is explained. The one policy file.

The rules kept here: a named backend runs or raises, it never falls back; ``auto`` takes the first
that accepts, in the order below, certified ones before others, and never one whose conformance run
failed on this machine as it is now.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from portattn import certificate
from portattn.arguments import DTYPE_BYTES, whole, wrong
from portattn.certificate import Evidence
from portattn.contract import Backend, Plan, Reason, Unsupported, plain
from portattn.machine import Machine
from portattn.problem import Problem
from portattn.registry import find_backends, refresh

# Preference where several accept; what is not named here (out-of-tree) comes after, by name.
ORDER = ("triton", "cupy", "numba", "numpy")

_FEATURE_OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "window": {"window": (16, 16)},
    "softcap": {"softcap": 30.0},
    "bias": {"bias": True},
    "mask": {"mask": True},
    "alibi_slopes": {"alibi": True},
    "sinks": {"sinks": True},
    "gqa": {"heads_q": 8, "heads_k": 2},
    "value_head_dim": {"head_dim_v": 32},
    "packed": {"layout": "thd"},
    "paged": {"block_size": 16},
    "seqused_k": {"seqused_k": True},
    "return_lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "tf32": {"precision": "tf32", "dtype": "float32"},
    "backward": {"backward": True},
}
_PLACE = re.compile(r"cpu|cuda(:\d+)?")  # anything else is an architecture to plan for
_LARGE_WORKSPACE = 64 << 20  # bytes; below, tiles that are cut to short lengths grow like squares
_HEAD_DIMS = (*range(1, 257), 288, 320, 384, 448, 512, 640, 768, 1024)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's answer to a problem. ``reasons`` is empty when it accepts; ``quadratic`` says
    that its workspace grows with the square of the lengths."""

    backend: str
    accepted: bool
    reasons: tuple[Reason, ...] = ()
    plan: Plan | None = None
    evidence: Evidence | None = None
    nearest: Problem | None = None
    quadratic: bool = False

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values."""
        return {
            "backend": self.backend,
            "accepted": self.accepted,
            "reasons": [r.to_json() for r in self.reasons],
            "plan": self.plan and self.plan.to_json(),
            "evidence": self.evidence and self.evidence.to_json(),
            "nearest": self.nearest and self.nearest.describe(),
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """Which backend would run ``problem`` (None: no backend accepts), and every answer given."""

    problem: Problem
    chosen: str | None
    candidates: tuple[Candidate, ...]
    note: str = ""

    def __getitem__(self, name: str) -> Candidate:
        for candidate in self.candidates:
            if candidate.backend == name:
                return candidate
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [f"{self.problem.describe()}: {self.chosen or 'no backend accepts'}"]
        if self.note:
            lines.append(f"  {self.note}")
        for c in self.candidates:
            if c.accepted and c.plan:
                tile = " ".join(f"{k}={v}" for k, v in c.plan.tile)
                lines.append(f"  {c.backend}: accepted, {c.plan.mechanism} {tile}".rstrip())
            lines += [f"  {c.backend}: {reason}" for reason in c.reasons]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON values."""
        problem = {
            f.name: plain(getattr(self.problem, f.name)) for f in dataclasses.fields(self.problem)
        }
        return {
            "problem": problem,
            "chosen": self.chosen,
            "note": self.note,
            "candidates": [c.to_json() for c in self.candidates],
        }


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of `list_backends`. ``head_dims``, ``dtypes`` and ``features`` are asked of the
    backend's own rules, machine aside; ``reasons`` is what stands against it on this machine."""

    name: str
    ready: bool
    device: str
    versions: dict[str, str | None]
    reasons: tuple[Reason, ...]
    evidence: Evidence | None
    head_dims: str = ""
    dtypes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """The line as JSON values."""
        data: dict[str, Any] = {
            f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)
        }
        data["reasons"] = [r.to_json() for r in self.reasons]
        data["evidence"] = self.evidence and self.evidence.to_json()
        return data


def list_backends(machine: Machine | None = None) -> tuple[BackendInfo, ...]:
    """Every backend that this installation knows, ready or not, in order of preference.

    Nothing is launched; frameworks and the driver are asked in child processes.
    """
    machine = machine or Machine.here()
    found = find_backends()
    infos = []
    for name in sorted(found, key=_preference):
        backend = found[name].backend
        if backend is None:
            broken = found[name].broken
            assert broken is not None
            infos.append(
                BackendInfo(name, False, "", {}, (broken,), None, origin=found[name].origin)
            )
            continue
        reasons = backend.why_not(None, machine)
        infos.append(
            BackendInfo(
                name=name,
                ready=not reasons,
                device=_device_text(backend, machine),
                versions={p: machine.version(p) for p in backend.packages},
                reasons=reasons,
                evidence=certificate.find_evidence(backend, machine),
                **_declared(backend, machine),
                origin=found[name].origin,
            )
        )
    return tuple(infos)


def query(
    *,
    head_dim: int,
    dtype: str = "float32",
    device: str | None = None,
    shared_memory: int | None = None,
    backend: str | Sequence[str] = "auto",
    **problem: Any,
) -> Decision:
    """Which backends would take a problem, without tensors.

    ``device`` ("sm_89") or ``shared_memory`` (bytes) plans for a CUDA device that is not here;
    ``device="cpu"`` and ``"cuda"`` ask about one kind only. The rest are the numbers and options
    of `Problem.from_numbers`: batch, seq_q, seq_k, heads_q, heads_k, head_dim_v, layout, causal,
    window, softcap, bias, mask, alibi, sinks, seqused_k, block_size, backward, ...
    """
    place, machine = device, Machine.here()
    if not isinstance(device, str | None):
        raise TypeError(wrong("device", repr(device), "'cpu', 'cuda' or one such as 'sm_89'"))
    if shared_memory is not None:
        shared_memory = whole("shared_memory", shared_memory, 1)
        if device == "cpu":
            raise ValueError(wrong("shared_memory", f"{shared_memory} with device 'cpu'", "None"))
    if device is not None and not _PLACE.fullmatch(device):
        place, machine = "cuda:0", Machine.pretend(device, shared_memory)
    elif shared_memory is not None:
        place, machine = "cuda:0", Machine.pretend(None, shared_memory)
    elif device == "cuda":
        place = "cuda:0"
    asked = Problem.from_numbers(head_dim=head_dim, dtype=dtype, device=place, **problem)
    return decide(asked, machine, backend)


def decide(
    problem: Problem,
    machine: Machine | None = None,
    backend: str | Sequence[str] = "auto",
    require_certified: bool | None = None,
) -> Decision:
    """Ask every backend (or the named ones) and say which would run."""
    machine = machine or Machine.here()
    certified_only = certificate.required(require_certified)
    names = _names(backend)
    asked = names if names is not None else tuple(sorted(find_backends(), key=_preference))
    candidates = [_ask(name, problem, machine) for name in asked]
    auto = names is None
    ranked = _ranked(candidates) if auto else candidates
    usable = [c for c in ranked if c.accepted and not _barred(c, auto, certified_only)]
    chosen = usable[0] if usable else None
    bars = [(c.backend, _barred(c, auto, certified_only)) for c in ranked if c.accepted]
    notes = [f"{name} is not chosen: {bar}" for name, bar in bars if bar]
    if chosen is not None and chosen.evidence is None:
        found = find_backends()[chosen.backend].backend
        tier = "gpu" if found is not None and "cuda" in found.device_kinds else "cpu"
        notes.append(
            f"{chosen.backend} has no conformance record on this machine; "
            f"`portattn conformance run --backend {chosen.backend} --tier {tier}` makes one"
        )
    elif chosen is not None and chosen.evidence and not chosen.evidence.certifies:
        notes.append(f"{chosen.backend}: evidence {chosen.evidence}")
    name = chosen.backend if chosen else None
    return Decision(problem, name, tuple(candidates), "; ".join(notes))


def choose(
    problem: Problem,
    backend: str | Sequence[str] = "auto",
    require_certified: bool | None = None,
) -> tuple[Backend, Plan]:
    """The backend that runs ``problem`` here, and its plan; `Unsupported` with every reason if
    none does. Answers are remembered per problem until the evidence changes."""
    if not isinstance(backend, str):
        backend = tuple(_names(backend) or ())
    certified_only = certificate.required(require_certified)
    return _chosen(problem, backend, certified_only, _evidence_stamp())


@functools.lru_cache(maxsize=4096)
def _chosen(
    problem: Problem, backend: str | tuple[str, ...], certified_only: bool, stamp: Any
) -> tuple[Backend, Plan]:
    del stamp  # part of the key: new evidence, new answer
    machine = Machine.here()
    names = _names(backend)
    auto = names is None
    # For auto, the cheap question first: a backend for another kind of device needs no probing.
    asked = _for_device(problem) if names is None else names
    candidates = [_ask(name, problem, machine, nearest=False) for name in asked]
    for candidate in _ranked(candidates) if auto else candidates:
        if candidate.accepted and not _barred(candidate, auto, certified_only):
            found = find_backends()[candidate.backend].backend
            assert found is not None and candidate.plan is not None
            return found, candidate.plan
    decision = decide(problem, machine, backend, certified_only)
    reasons: dict[str, tuple[Reason, ...]] = {}
    for c in decision.candidates:
        bar = _barred(c, auto, certified_only) if c.accepted else None
        reasons[c.backend] = c.reasons + ((bar,) if bar else ())
    who = "no backend takes" if auto else f"backend={backend!r} does not take"
    raise Unsupported(f"{who} {problem.describe()}", reasons)


def supported(problem: Problem, name: str, machine: Machine | None = None) -> tuple[Reason, ...]:
    """The reasons of one backend against one problem; empty means supported."""
    return _ask(name, problem, machine or Machine.here(), nearest=False).reasons


def forget() -> None:
    """Look at backends, machine and evidence afresh on the next question."""
    refresh()
    _chosen.cache_clear()


# ---- one backend ---------------------------------------------------------------------------------
def _ask(name: str, problem: Problem, machine: Machine, *, nearest: bool = True) -> Candidate:
    found = find_backends()[name]
    backend = found.backend
    if backend is None:
        return Candidate(name, False, (found.broken,) if found.broken else ())
    reasons = backend.why_not(problem, machine)
    if problem.backward and not reasons:
        # A gradient needs its forward pass too.
        reasons = backend.why_not(
            dataclasses.replace(problem, backward=False, return_lse=True), machine
        )
    evidence = None if machine.pretended else certificate.find_evidence(backend, machine)
    if reasons:
        other = _nearest(backend, problem, machine) if nearest else None
        return Candidate(name, False, reasons, None, evidence, other)
    plan = backend.plan(problem, machine)
    quadratic = _quadratic(backend, problem, plan, machine)
    return Candidate(name, True, (), plan, evidence, quadratic=quadratic)


def _quadratic(backend: Backend, problem: Problem, plan: Plan, machine: Machine) -> bool:
    """Whether a large workspace would at least triple with the lengths doubled."""
    if plan.workspace_bytes < _LARGE_WORKSPACE:
        return False
    lengths = ("seq_q", "seq_k", "total_q", "total_k", "num_blocks")
    doubled: dict[str, Any] = {n: 2 * getattr(problem, n) for n in lengths if getattr(problem, n)}
    longer = dataclasses.replace(problem, **doubled)
    if backend.why_not(longer, machine):
        return False
    return backend.plan(longer, machine).workspace_bytes >= 3 * plan.workspace_bytes


def _barred(candidate: Candidate, auto: bool, certified_only: bool) -> Reason | None:
    """Why an accepting backend still may not be chosen."""
    evidence = candidate.evidence
    backend = find_backends()[candidate.backend].backend
    if auto and getattr(backend, "claims", {}).get("simulated"):
        return Reason(
            "simulated",
            "backend",
            "a simulator stands in for the hardware",
            "hardware",
            f"backend={candidate.backend!r} insists",
        )
    run = f"portattn conformance run --backend {candidate.backend}"
    if auto and evidence is not None and evidence.quarantines:
        return Reason(
            "quarantined",
            "evidence",
            f"failed {', '.join(evidence.failed[:5])} on {evidence.date[:10]}",
            "no failed check",
            f"see {evidence.path}; `{run}` tries again; backend={candidate.backend!r} insists",
            "certified",
        )
    if auto and candidate.quadratic and candidate.plan is not None:
        return Reason(
            "quadratic_memory",
            "workspace_bytes",
            candidate.plan.workspace_bytes,
            "a workspace that does not grow with the square of the lengths",
            f"backend={candidate.backend!r} insists",
        )
    if certified_only and not (evidence is not None and evidence.certifies):
        return Reason(
            "not_certified",
            "evidence",
            str(evidence) if evidence else "none",
            "a certificate for this machine",
            f"`{run}` makes one",
            "certified",
        )
    return None


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(
        candidates,
        key=lambda c: (
            not (c.evidence is not None and c.evidence.certifies),
            _preference(c.backend),
        ),
    )


def _preference(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def _names(backend: object) -> tuple[str, ...] | None:
    """The backends that the caller names, or None for auto."""
    if backend == "auto":
        return None
    if isinstance(backend, bytes) or not isinstance(backend, Sequence):
        raise TypeError(wrong("backend", repr(backend), "'auto', a name or a sequence of names"))
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    known = find_backends()
    for name in names:
        if not isinstance(name, str) or name not in known:
            want = "'auto', or names among " + ", ".join(sorted(known))
            raise ValueError(wrong("backend", repr(name), want))
    if not names:
        raise ValueError(wrong("backend", "no name", "'auto' or at least one name"))
    return names


def _for_device(problem: Problem) -> tuple[str, ...]:
    kind = (problem.device or "cpu").split(":")[0]
    return tuple(
        name
        for name, found in sorted(find_backends().items(), key=lambda item: _preference(item[0]))
        if found.backend is not None and kind in found.backend.device_kinds
    )


def _evidence_stamp() -> int:
    """Changes when a record is written: records replace one another by renaming, which the folder
    shows in its modification time. One system call, for every call of `attention`."""
    try:
        return os.stat(certificate.evidence_path()).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


def _device_text(backend: Backend, machine: Machine) -> str:
    if "cuda" in backend.device_kinds:
        return ", ".join(str(d) for d in machine.cuda.devices) or "none"
    fingerprint = machine.fingerprint()
    return f"{fingerprint['cpu']}, {fingerprint['cores']} cores"


# ---- what a backend declares, asked of its own rules ---------------------------------------------
def _declared(backend: Backend, machine: Machine) -> dict[str, Any]:
    """Head dims, dtypes and features that the backend's rules accept, machine aside."""
    against_machine = set(backend.why_not(None, machine))
    if any(reason.code == "no_kernel" for reason in against_machine):
        return {"head_dims": "", "dtypes": (), "features": ()}

    def accepts(**options: Any) -> bool:
        options = {"dtype": "float16", "head_dim": 64, "seq_q": 128, **options}
        reasons = backend.why_not(Problem.from_numbers(**options), machine)
        return not set(reasons) - against_machine

    dtypes = tuple(d for d in DTYPE_BYTES if accepts(dtype=d))
    if not dtypes:
        return {"head_dims": "", "dtypes": (), "features": ()}
    dtype = "float16" if "float16" in dtypes else dtypes[0]
    dims = [d for d in _HEAD_DIMS if accepts(head_dim=d, dtype=dtype)]
    features = tuple(
        name for name, opts in _FEATURE_OPTIONS.items() if accepts(**{"dtype": dtype, **opts})
    )
    return {"head_dims": _ranges(dims), "dtypes": dtypes, "features": features}


def _ranges(dims: list[int]) -> str:
    """``1-256, 512`` out of the dims that are accepted; open at the end where all are."""
    if not dims:
        return ""
    if dims == list(_HEAD_DIMS):
        return "any"
    parts, start = [], dims[0]
    for i, dim in enumerate(dims):
        following = _HEAD_DIMS[_HEAD_DIMS.index(dim) + 1] if dim != _HEAD_DIMS[-1] else None
        if i + 1 == len(dims) or dims[i + 1] != following:
            parts.append(str(start) if start == dim else f"{start}-{dim}")
            start = dims[i + 1] if i + 1 < len(dims) else 0
    return ", ".join(parts)


# ---- the nearest supported problem ---------------------------------------------------------------
def _nearest(backend: Backend, problem: Problem, machine: Machine) -> Problem | None:
    """The problem with the fewest changes that the backend accepts; None where the machine itself
    is the obstacle or three changes do not suffice."""
    if backend.why_not(None, machine):
        return None
    frontier = [problem]
    for _ in range(3):
        following = []
        for candidate in frontier:
            for changed in _relaxations(candidate, backend.why_not(candidate, machine)):
                if not backend.why_not(changed, machine):
                    return changed
                following.append(changed)
        frontier = following[:64]
    return None


def _relaxations(problem: Problem, reasons: tuple[Reason, ...]) -> Iterator[Problem]:
    """Problems that differ in one field which a reason names."""
    for field in dict.fromkeys(r.field for r in reasons):
        if field == "dtype":
            for dtype in ("bfloat16", "float16", "float32"):
                if dtype != problem.dtype:
                    yield dataclasses.replace(problem, dtype=dtype)
        elif field in ("head_dim", "head_dim_v"):
            for dim in (512, 256, 192, 128, 96, 64, 32, 16, 8):
                if dim < problem.head_dim:
                    yield dataclasses.replace(problem, head_dim=dim, head_dim_v=dim)
        elif field == "precision":
            yield dataclasses.replace(problem, precision="ieee")
        elif field in ("backward", "deterministic", "return_lse", "inner_strided"):
            yield _with(problem, field, False)
        elif field in ("bias", "mask", "alibi", "sinks", "softcap", "window"):
            yield _with(problem, field, None)
        elif field == "alibi_slopes":
            yield dataclasses.replace(problem, alibi=None)
        elif field == "device":
            for device in ("cpu", "cuda:0"):
                yield dataclasses.replace(problem, device=device)
        elif field == "block_table":
            yield dataclasses.replace(problem, block_size=None, num_blocks=None)
        elif field == "layout" and problem.packed:
            yield dataclasses.replace(problem, layout="bshd", total_q=None, total_k=None)


def _with(problem: Problem, field: str, value: Any) -> Problem:
    changes: dict[str, Any] = {field: value}
    return dataclasses.replace(problem, **changes)
