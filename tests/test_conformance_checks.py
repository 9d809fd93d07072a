"""The catalogue: its shape, correct targets that it must not accuse, defects that it must name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from portattn.conformance import reference, targets
from portattn.conformance.case import GROUPS, TIERS, Case, Outcome
from portattn.conformance.checks import CATALOGUE
from portattn.conformance.context import Context, Decided
from portattn.conformance.manifest import FEATURES, Manifest
from portattn.conformance.mutants import arithmetic
from portattn.conformance.mutants.tiled import Tiled
from portattn.conformance.verdicts import FAILURES, Verdict

FULL = Manifest.parse(Tiled().manifest())
NARROW = Manifest.parse(
    {
        "name": "narrow",
        "version": "1",
        "array": "numpy",
        "device": "cpu",
        "dtypes": ["float16"],
        "head_dims": [64, 128],
        "features": ["causal"],
        "causal_alignments": ["top_left"],
    }
)
PROCESSES = ("D05",)  # starts a process of its own, which the engine's tests cover
SLOW = "R"  # memory: a Python target of small tiles takes minutes for it


def cases(manifest: Manifest, tier: str, ids: Iterable[str] = CATALOGUE) -> Iterator[Case]:
    for check_id in ids:
        check = CATALOGUE[check_id]
        if tier in check.tiers:
            yield from (case.seeded(0) for case in check.cases(manifest, tier))


def run(ctx: Context, case: Case) -> Outcome:
    """What the engine's worker makes of a case, without the process around it."""
    ctx.begin(case.id)
    try:
        return CATALOGUE[case.check].run(ctx, case)
    except Decided as decided:
        return Outcome(cause=decided.cause, message=str(decided))


def failures(target: Any, ids: Iterable[str], tier: str = "smoke") -> dict[str, Outcome]:
    """The cases that count against the target."""
    ctx = Context(target, Manifest.parse(target.manifest()))
    found = {case.id: run(ctx, case) for case in cases(ctx.manifest, tier, ids)}
    assert found, f"no case for {list(ids)}"
    return {name: outcome for name, outcome in found.items() if outcome.verdict in FAILURES}


# ---- the catalogue -------------------------------------------------------------------------------
def test_the_catalogue_is_whole() -> None:
    assert len(CATALOGUE) >= 108
    assert {check_id[0] for check_id in CATALOGUE} == set(GROUPS)
    for check_id, check in CATALOGUE.items():
        assert check_id == check.id and check_id[1:].isdigit()
        assert check.title
        assert set(check.needs) <= set(FEATURES)
    for group, count in {"X": 5, "R": 11, "C": 7, "P": 5, "D": 5}.items():
        assert sum(check_id[0] == group for check_id in CATALOGUE) == count
    assert {check.level for check in CATALOGUE.values()} == {None, 0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("manifest", [FULL, NARROW], ids=["full", "narrow"])
def test_cases_are_unique_json_and_grow_with_the_tier(manifest: Manifest) -> None:
    below: set[str] = set()
    for tier in TIERS:
        found = list(cases(manifest, tier))
        names = [case.id for case in found]
        assert len(names) == len(set(names)), [x for x in names if names.count(x) > 1][:5]
        assert below <= set(names)
        below = set(names)
        for case in found:
            assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_every_check_of_a_tier_has_a_case_for_the_whole_contract() -> None:
    for tier in TIERS:
        asked = {case.check for case in cases(FULL, tier)}
        assert asked == {x for x, check in CATALOGUE.items() if tier in check.tiers}


def test_a_narrow_manifest_is_only_asked_for_what_it_claims_or_may_refuse() -> None:
    for case in cases(NARROW, "cpu"):
        p = case.params
        beyond = p["dtype"] != "float16" or p["d"] not in (64, 128) or p["d"] != p["dv"]
        beyond |= p["h"] != p["hk"] or any(p.get(x) for x in ("window", "softcap", "scale"))
        beyond |= p.get("causal") == "bottom_right"
        level = CATALOGUE[case.check].level
        assert case.optional or not beyond or level in (1, 4), case


# ---- correct targets -----------------------------------------------------------------------------
QUICK = [x for x in CATALOGUE if x[0] not in SLOW + "T" and x not in PROCESSES]


@pytest.mark.parametrize("group", sorted({x[0] for x in QUICK}))
def test_the_correct_implementation_passes(group: str) -> None:
    assert failures(Tiled(), [x for x in QUICK if x[0] == group]) == {}


class LargeTiles(Tiled):
    """Memory is a question for tiles of a size that Python can afford."""

    block_q, block_k = 512, 512


def test_the_correct_implementation_passes_the_memory_checks_of_one_call() -> None:
    assert failures(LargeTiles(), ["R04", "R06", "R07"]) == {}


class Narrow(Tiled):
    """Takes what `NARROW` claims."""

    def manifest(self) -> dict[str, Any]:
        return NARROW.to_json()

    def validate(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        problem = super().validate(q, k, v, options)
        used = set(problem.features()) - {"causal"}
        used |= {"scale"} & set(options)
        if used or problem.dtype != "float16" or problem.head_dim not in (64, 128):
            raise NotImplementedError(f"got {problem.describe()}")
        if problem.causal == "bottom_right" and problem.seq_q != problem.seq_k:
            raise NotImplementedError("bottom_right")
        return problem


def test_a_narrow_target_refuses_and_does_not_fail() -> None:
    target = Narrow()
    ctx = Context(target, Manifest.parse(target.manifest()))
    seen: set[Verdict] = set()
    for case in cases(ctx.manifest, "smoke", [x for x in QUICK if x[0] in "FKEMBP"]):
        outcome = run(ctx, case)
        seen.add(outcome.verdict)
        assert outcome.verdict not in FAILURES, (case.id, outcome)
    assert {Verdict.PASS, Verdict.NOT_SUPPORTED} <= seen


@pytest.mark.parametrize("name", ["torch-math", "torch-flash", "jax"])
def test_a_correct_peer_is_not_accused(name: str) -> None:
    module = name.partition("-")[0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    target = targets.load(name)
    few = ["F01", "F03", "F10", "B07"]
    more = ["F06", "X02", "X04", "H04", "K01", "E11", "B01"]
    # each shape compiles for seconds in JAX
    found = failures(target, few if name == "jax" else few + more)
    assert found == {}, {x: (o.message, dict(o.numbers)) for x, o in found.items()}


# ---- defects, each by a check that names it ------------------------------------------------------
class IgnoresWindow(Tiled):
    """Claims no window, takes it, and drops it."""

    def manifest(self) -> dict[str, Any]:
        features = [x for x in FEATURES if x != "window"]
        return {**super().manifest(), "features": features}

    def validate(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        options.pop("window", None)
        return super().validate(q, k, v, options)


class CausalOffByOne(Tiled):
    def diagonal(self, head: Any) -> int:
        return super().diagonal(head) + 1


class WrongGroups(Tiled):
    def key_head(self, problem: Any, h: int) -> int:
        return h % problem.heads_k


class NoRescale(Tiled):
    def rescale(self, old: Any, new: Any) -> Any:
        return np.ones_like(old)


class TailUnwritten(Tiled):
    """Rows behind the last whole sixteen stay as they were."""

    def finish(self, head: Any, state: Any, i0: int, out: Any, lse: Any) -> None:
        whole = max(16, head.n_q // 16 * 16)
        super().finish(head, state, i0, out, lse)
        out[whole:] = 0


class SoftcapAfterMask(Tiled):
    def scores(self, head: Any, x: Any, seen: Any, i0: int, j0: int) -> Any:
        return self.capped(head, np.where(seen, self.added(head, x, i0, j0), -np.inf))


class Base2(Tiled):
    def logarithm(self, state: Any) -> Any:
        return super().logarithm(state) / np.log(2.0).astype(state.top.dtype)


class Tf32(Tiled):
    """The operands of q k^T, and of nothing else."""

    def product(self, head: Any, q: Any, k: Any) -> Any:
        return super().product(head, arithmetic.tf32(q), arithmetic.tf32(k))


class Truncates(Tiled):
    def rounded(self, x: Any, dtype: Any) -> Any:
        return arithmetic.truncated(x, dtype)


class NoDelta(Tiled):
    def delta(self, out: Any, dout: Any, dlse: Any) -> Any:
        return 0 * super().delta(out, dout, dlse)


class FiniteSentinel(Tiled):
    nothing = -5e4


class HiddenTimesZero(Tiled):
    def weigh(self, p: Any, x: Any, seen: Any) -> Any:
        return p @ x


class LowPrecisionSums(Tiled):
    """The accumulator is rounded to the input's dtype after each tile."""

    def fold(self, old: Any, new: Any) -> Any:
        state = super().fold(old, new)
        state.acc = np.asarray(state.acc.astype(np.float16)).astype(state.acc.dtype)
        return state


class ForgetsPadding(Tiled):
    """Columns behind the last key count in backward (BUG-002)."""

    def visible_again(self, head: Any, i0: int, j0: int) -> Any:
        i, j = self.places(i0, j0)
        seen = super().visible_again(head, i0, j0)
        return seen | ((i < head.n_q) & (j >= head.n_k))


class StaleScale(Tiled):
    """The first scale of a shape answers all later calls (BUG-072)."""

    def __init__(self) -> None:
        self.scales: dict[Any, float] = {}

    def scale(self, head: Any) -> float:
        return self.scales.setdefault(head.q.shape, head.problem.scale)


DEFECTS = [
    (IgnoresWindow, "K04"),
    (CausalOffByOne, "K01"),
    (CausalOffByOne, "K02"),
    (CausalOffByOne, "K03"),
    (WrongGroups, "M09"),
    (NoRescale, "F05"),
    (TailUnwritten, "F17"),
    (TailUnwritten, "X03"),
    (SoftcapAfterMask, "K09"),
    (Base2, "F13"),
    (Base2, "M10"),
    (Tf32, "P04"),
    (Tf32, "F01"),
    (Truncates, "F01"),
    (NoDelta, "B01"),
    (NoDelta, "B06"),
    (FiniteSentinel, "F07"),
    (HiddenTimesZero, "E10"),
    (LowPrecisionSums, "F12"),
    (ForgetsPadding, "B10"),
    (StaleScale, "C07"),
]


@pytest.mark.parametrize(
    ("defect", "check_id"),
    DEFECTS,
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_defect_is_named_by_the_check_that_claims_it(defect: Any, check_id: str) -> None:
    assert failures(defect(), [check_id])


def test_a_refused_claim_and_a_silent_extra_are_told_apart() -> None:
    ignoring = failures(IgnoresWindow(), ["K04"])
    assert all("window" in name for name in ignoring)
    assert not failures(IgnoresWindow(), ["K01"])


def test_the_manifest_decides_what_counts_as_exact() -> None:
    """tf32 is a defect where it is not declared, and within its bound where it is."""

    class Declared(Tf32):
        def manifest(self) -> dict[str, Any]:
            return {**super().manifest(), "qk_operand": "tf32"}

    assert failures(Tf32(), ["F01", "F03", "P04"])
    assert failures(Declared(), ["F01", "F03", "P04"]) == {}


def test_a_backend_s_limit_of_shared_memory_is_set_and_lifted() -> None:
    limits: list[int | None] = []

    class Limited(Tiled):
        def limit_shared_memory(self, size: int | None) -> None:
            limits.append(size)

    assert not failures(Limited(), ["H13"], "gpu")
    assert limits and set(limits) == {99 << 10, None}
    assert limits[-1] is None
    ctx = Context(Tiled(), FULL)
    for case in cases(FULL, "gpu", ["H13"]):
        assert case.optional and run(ctx, case).verdict == "NOT_SUPPORTED"


def test_chunks_of_rows_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(cases(FULL, "cpu", ["F10"]))
    ctx = Context(Tiled(), FULL)
    whole = run(ctx, case)
    monkeypatch.setattr(reference, "CHUNK", 1 << 10)
    monkeypatch.setattr(reference, "ROWS", 8)
    parts = run(ctx, case)
    assert parts.numbers == pytest.approx(whole.numbers, rel=1e-9)
