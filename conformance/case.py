"""Cases, checks and outcomes: the words that the engine and the catalogue share.

The rule kept here: a verdict is never stored alone. It follows from an outcome's numbers and its
cause by the gates of `verdicts`, so that anyone can recompute it from the record.

How a check is written (``checks/forward.py`` and its like)::

    def _cases(manifest: Manifest, tier: str) -> Iterator[Case]:
        for dtype in manifest.dtypes:
            yield Case("F01", f"normal-{dtype}", {"dtype": dtype, "shape": [1, 2, 129, 129, 64]})

    @check("F01", "normal input", level=0, cases=_cases)
    def normal(ctx: Context, case: Case) -> Outcome:
        rng = np.random.default_rng(case.seed)
        ...
        out, lse, raw = ctx.forward(q, k, v, causal="bottom_right")
        return Outcome({"e1_prob": ..., "e1_det": ..., "e2": ...}, worst={...})

A check does not ask whether the target claims what the case needs: `Context.forward` compares the
request with the manifest, and the engine turns a refusal into NOT_SUPPORTED (outside the manifest)
or FAIL (inside it), and an accepted request outside the manifest into "claim too narrow".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from portattn.conformance.verdicts import Verdict, verdict_of

if TYPE_CHECKING:
    from portattn.conformance.context import Context
    from portattn.conformance.manifest import Manifest

TIERS = ("smoke", "cpu", "gpu")
GROUPS = {
    "F": "forward",
    "X": "exact probes",
    "H": "head dim",
    "B": "backward",
    "K": "masks",
    "E": "edges",
    "M": "metamorphic",
    "D": "determinism",
    "R": "memory",
    "T": "traffic",
    "C": "errors",
    "P": "dtypes",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One question to a target: everything that its answer depends on, as JSON values.

    ``params`` is free for the check (shapes, dtype, generator, options). ``seed`` is filled in by
    the runner from the run's seed and the id; a check draws everything from it. ``optional`` marks
    a request that the target may refuse without the check counting as NOT_SUPPORTED (it must still
    agree with its manifest). ``timeout_s`` overrides the run's limit for this case.
    """

    check: str
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    optional: bool = False
    timeout_s: float | None = None

    @property
    def id(self) -> str:
        """``"F01/normal-float32"``; unique in a run, stable over versions of the suite."""
        return f"{self.check}/{self.name}"

    def seeded(self, run_seed: int) -> Case:
        """This case with the seed that a run with ``run_seed`` gives it (32 bits)."""
        text = f"{run_seed}/{self.id}/{self.seed}".encode()
        return replace(self, seed=int.from_bytes(hashlib.sha256(text).digest()[:4], "big"))

    def to_json(self) -> dict[str, Any]:
        """The case as JSON values."""
        return {
            "check": self.check,
            "name": self.name,
            "params": dict(self.params),
            "seed": self.seed,
            "optional": self.optional,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """The inverse of `to_json`."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case.

    ``numbers``: measured values by name; those that `verdicts` knows gate the verdict, the rest
    inform. ``cause`` is empty, or one of `verdicts.CAUSES` where something other than a number
    decides (a refusal, a crash, a wrong dtype). ``worst``: ``index``, ``tile``, ``got``, ``want``,
    ``bound`` of the worst element. ``digests``: sha256 of ``inputs`` and ``output``; the engine
    fills them from the calls that went through the `Context` where a check leaves them empty.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    message: str = ""
    worst: Mapping[str, Any] | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Follows from ``numbers`` and ``cause`` alone."""
        return verdict_of(self.numbers, self.cause)

    @classmethod
    def failed(cls, message: str, **numbers: float) -> Outcome:
        """FAIL for a reason that is not a number; prefer a number (``..._bad``, ``..._over``)."""
        return cls(numbers, "failed", message)

    @classmethod
    def not_run(cls, message: str) -> Outcome:
        """NOT_RUN: this machine or target cannot answer the question; the message says why."""
        return cls(cause="not_run", message=message)

    @classmethod
    def not_supported(cls, message: str) -> Outcome:
        """NOT_SUPPORTED without a call, where the manifest already says no (say, no `traffic`)."""
        return cls(cause="rejected", message=message)

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values (numbers may be NaN or infinite; the record spells them)."""
        return {
            "verdict": str(self.verdict),
            "numbers": {name: _number(value) for name, value in self.numbers.items()},
            "cause": self.cause,
            "message": self.message,
            "worst": None if self.worst is None else dict(self.worst),
            "digests": dict(self.digests),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of `to_json`; the verdict is computed again, not read."""
        return cls(
            numbers={name: float(value) for name, value in data["numbers"].items()},
            cause=data["cause"],
            message=data["message"],
            worst=data["worst"],
            digests=data["digests"],
        )


def _number(value: Any) -> int | float:
    """A plain int or float, whatever NumPy scalar or bool came."""
    return int(value) if isinstance(value, (bool, int)) else float(value)


Cases = Callable[["Manifest", str], Iterable[Case]]
Run = Callable[["Context", Case], Outcome]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the catalogue: a question, its cases, and the level that rests on it.

    ``level`` is the lowest level that this check must pass for; None informs only. ``needs`` are
    features without which the check has no meaning: a target that claims fewer is asked all the
    same and must refuse (NOT_SUPPORTED). ``alone`` runs the check's cases in a child with no
    other worker busy (timing, memory, threads).
    """

    id: str
    title: str
    level: int | None
    cases: Cases
    run: Run
    needs: tuple[str, ...] = ()
    tiers: tuple[str, ...] = TIERS
    alone: bool = False

    @property
    def group(self) -> str:
        """The letter of its group, as in `GROUPS`."""
        return self.id[0]


def check(
    id: str,
    title: str,
    *,
    level: int | None,
    cases: Cases,
    needs: Iterable[str] = (),
    tiers: Iterable[str] = TIERS,
    alone: bool = False,
) -> Callable[[Run], Check]:
    """Make a `Check` of the decorated ``run(ctx, case) -> Outcome``; the name then is the Check."""
    if not id or id[0] not in GROUPS:
        raise ValueError(f"check id={id!r}; wanted: a letter of {''.join(GROUPS)}, then digits")
    unknown = set(tiers) - set(TIERS)
    if unknown:
        raise ValueError(f"check {id}: unknown tiers {sorted(unknown)}; known: {TIERS}")

    def decorate(run: Run) -> Check:
        return Check(id, title, level, cases, run, tuple(needs), tuple(tiers), alone)

    return decorate


def collect(*modules: Any) -> dict[str, Check]:
    """The catalogue of the checks defined in ``modules``, in order; a repeated id raises."""
    table: dict[str, Check] = {}
    for module in modules:
        for item in vars(module).values():
            if not isinstance(item, Check) or table.get(item.id) is item:
                continue
            if item.id in table:
                raise ValueError(f"two checks have the id {item.id}")
            table[item.id] = item
    return table
