"""The policy: a name runs or raises, ``auto`` prefers evidence, and every answer is explained."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import portattn
from portattn import certificate, select
from portattn.contract import Call, Plan, Reason
from portattn.machine import Machine
from portattn.problem import Problem
from portattn.registry import Found


@dataclasses.dataclass
class Fake:
    """A backend that answers as told and fills the output with its number."""

    name: str
    number: float = 0.0
    device_kinds: tuple[str, ...] = ("cpu",)
    packages: tuple[str, ...] = ()
    max_head_dim: int = 64
    refuses: tuple[str, ...] = ()
    machine_reasons: tuple[Reason, ...] = ()
    source: Path = Path(__file__)
    asked: list[Problem | None] = dataclasses.field(default_factory=list)
    ran: int = 0

    def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
        self.asked.append(problem)
        if problem is None:
            return self.machine_reasons
        found = list(self.machine_reasons)
        if problem.head_dim > self.max_head_dim:
            found.append(Reason("head_dim", "head_dim", problem.head_dim, self.max_head_dim))
        used = set(problem.features()) | {problem.dtype}
        found += [
            Reason("feature", name, "used", "not here") for name in self.refuses if name in used
        ]
        return tuple(found)

    def plan(self, problem: Problem, machine: Machine) -> Plan:
        return Plan("fill", (("block_q", 16),), 0, 123)

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        self.ran += 1
        call.out.source[...] = self.number
        if call.lse is not None:
            call.lse.source[...] = self.number

    def kernel_files(self) -> tuple[str, ...]:
        return (str(self.source),)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``house(fake, ...)``: these are all the backends there are; their records lie in a folder
    of this test."""
    monkeypatch.setenv("PORTATTN_DATA_DIR", str(tmp_path))

    def build(*fakes: Fake) -> None:
        found = {f.name: Found(f.name, "test", f) for f in fakes}
        monkeypatch.setattr(select, "find_backends", lambda: found)
        select.forget()

    return build


@pytest.fixture(autouse=True)
def remember_nothing() -> Any:
    yield
    select.forget()


def record(
    fake: Fake, level: str | None = "L2", failed: tuple[str, ...] = (), **changes: Any
) -> None:
    """Write a conformance record of ``fake`` as the suite does: whole, by renaming."""
    folder = certificate.evidence_dir()
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "level": level,
        "created": "2026-03-04T05:06:07Z",
        "failed": list(failed),
        "fingerprint": certificate.fingerprint(fake, Machine.here()) | changes,
    }
    (folder / "partial").write_text(json.dumps(made))
    (folder / "partial").replace(folder / f"{fake.name}.json")


def run(**options: Any) -> float:
    """The number of the backend that ran."""
    x = np.ones((1, 2, 1, options.pop("head_dim", 8)), np.float32)
    return float(portattn.attention(x, x, x, **options).flat[0])


def problem(**numbers: Any) -> Problem:
    return Problem.from_numbers(**({"head_dim": 8, "device": "cpu"} | numbers))


def codes(error: portattn.Unsupported, name: str) -> list[str]:
    return [r.code for r in error.reasons[name]]


# ---- named ---------------------------------------------------------------------------------------
def test_a_named_backend_runs_or_raises(house) -> None:
    a, b = Fake("a", 1, refuses=("causal",)), Fake("b", 2)
    house(a, b)
    assert run(backend="a") == 1
    assert run(backend="b") == 2
    with pytest.raises(portattn.Unsupported) as caught:
        run(backend="a", causal=True)
    assert caught.value.reasons == {"a": (Reason("feature", "causal", "used", "not here"),)}
    assert b.ran == 1, "no fallback"


def test_names_in_order(house) -> None:
    house(Fake("a", 1, refuses=("causal",)), Fake("b", 2), Fake("c", 3))
    assert run(backend=("a", "c")) == 1
    assert run(backend=("a", "c"), causal=True) == 3
    assert run(backend=["c", "a"]) == 3
    with pytest.raises(portattn.Unsupported) as caught:
        run(backend=("a",), causal=True)
    assert set(caught.value.reasons) == {"a"}


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("x", ValueError),
        (("a", "x"), ValueError),
        ((), ValueError),
        (5, TypeError),
        (None, TypeError),
    ],
)
def test_names_that_do_not_exist(house, backend: Any, error: Any) -> None:
    house(Fake("a", 1))
    with pytest.raises(error, match=r"^backend: got .*; want "):
        run(backend=backend)
    with pytest.raises(error, match=r"^backend: got .*; want "):
        portattn.query(head_dim=8, backend=backend)
    assert run(backend="a") == 1, "the next call works"


# ---- auto ----------------------------------------------------------------------------------------
def test_auto_takes_the_first_in_order_of_preference(house) -> None:
    house(Fake("zeta", 9), Fake("numpy", 4), Fake("cupy", 2), Fake("triton", 1), Fake("alpha", 8))
    assert [c.backend for c in portattn.query(head_dim=8).candidates] == [
        "triton", "cupy", "numpy", "alpha", "zeta",
    ]  # fmt: skip
    assert run() == 1


def test_auto_passes_over_what_refuses(house) -> None:
    house(
        Fake("triton", 1, max_head_dim=4), Fake("cupy", 2, refuses=("softcap",)), Fake("numpy", 3)
    )
    assert run() == 2
    assert run(softcap=3.0) == 3


def test_auto_asks_only_backends_of_the_arrays_device(house) -> None:
    gpu, host = Fake("triton", 1, device_kinds=("cuda",)), Fake("numpy", 2)
    house(gpu, host)
    assert run() == 2
    assert not gpu.asked


def test_where_none_accepts_every_reason_is_given(house) -> None:
    lost = (Reason("driver_missing", "cuda", "no driver", "a device"),)
    house(
        Fake("triton", device_kinds=("cuda",), machine_reasons=lost),
        Fake("numpy", max_head_dim=4, refuses=("softcap", "causal")),
    )
    with pytest.raises(portattn.Unsupported, match="no backend takes") as caught:
        run(softcap=1.0, causal=True)
    assert codes(caught.value, "numpy") == ["head_dim", "feature", "feature"]
    assert "driver_missing" in codes(caught.value, "triton")
    assert "head_dim" in str(caught.value) and "no driver" in str(caught.value)


def test_an_answer_is_remembered_per_problem(house) -> None:
    fake = Fake("numpy", 1)
    house(fake)
    run(), run()
    assert len(fake.asked) == 1
    run(scale=2.0)
    assert len(fake.asked) == 2


# ---- evidence ------------------------------------------------------------------------------------
def test_certified_backends_come_first(house) -> None:
    first, second = Fake("triton", 1), Fake("numpy", 2)
    house(first, second)
    assert run() == 1
    record(second)
    assert run() == 2, "new evidence is seen without being told"
    record(first)
    assert run() == 1, "two certified ones: the order of preference"


def test_stale_evidence_is_not_preferred_and_is_named(house) -> None:
    first, second = Fake("triton", 1), Fake("numpy", 2)
    house(first, second)
    record(second, python="2.7")
    assert run() == 1
    decision = portattn.query(head_dim=8, backend="numpy")
    assert "python (2.7 -> " in decision.note


def test_a_failed_backend_is_quarantined_from_auto_alone(house) -> None:
    first, second = Fake("triton", 1), Fake("numpy", 2)
    house(first, second)
    record(first, None, failed=("F01", "K02"))
    assert run() == 2
    assert run(backend="triton") == 1, "a name insists"
    decision = portattn.query(head_dim=8)
    assert decision.chosen == "numpy"
    assert decision["triton"].accepted
    assert "triton is not chosen: " in decision.note and "F01, K02" in str(decision)
    assert decision["triton"].evidence.failed == ("F01", "K02")


def test_where_all_are_quarantined_nothing_runs(house) -> None:
    only = Fake("numpy", 1)
    house(only)
    record(only, None, failed=("F01",))
    with pytest.raises(portattn.Unsupported) as caught:
        run()
    assert codes(caught.value, "numpy") == ["quarantined"]
    (reason,) = caught.value.reasons["numpy"]
    assert "F01" in str(reason.got) and reason.source == "certified"
    assert "conformance run --backend numpy" in reason.hint
    assert "F01" in portattn.query(head_dim=8).note


def test_a_failure_that_is_stale_is_no_quarantine(house) -> None:
    only = Fake("numpy", 1)
    house(only)
    record(only, None, failed=("F01",), python="2.7")
    assert run() == 1


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_certificates_can_be_demanded(house, monkeypatch, how: str) -> None:
    first, second = Fake("triton", 1), Fake("numpy", 2)
    house(first, second)
    options = {"require_certified": True} if how == "argument" else {}
    if how == "variable":
        monkeypatch.setenv("PORTATTN_REQUIRE_CERTIFIED", "1")
    for backend in ("auto", "numpy", ("triton", "numpy")):
        with pytest.raises(portattn.Unsupported) as caught:
            run(backend=backend, **options)
        assert codes(caught.value, "numpy") == ["not_certified"]
    record(second)
    assert run(**options) == 2
    assert run(backend=("triton", "numpy"), **options) == 2
    with pytest.raises(portattn.Unsupported):
        run(backend="triton", **options)
    assert run(backend="triton", require_certified=False) == 1, "the argument decides"
    record(second, python="2.7")
    with pytest.raises(portattn.Unsupported, match="stale"):
        run(**options)


def test_a_choice_without_evidence_says_so(house) -> None:
    fake = Fake("numpy", 1)
    house(fake)
    note = portattn.query(head_dim=8).note
    assert "no conformance record" in note
    assert "portattn conformance run --backend numpy" in note
    record(fake)
    assert portattn.query(head_dim=8).note == ""


def test_the_list_shows_evidence(house) -> None:
    fake = Fake("numpy", 1)
    house(fake)
    record(fake, "L3")
    (info,) = portattn.list_backends()
    assert info.evidence is not None
    assert (info.evidence.level, info.evidence.date) == ("L3", "2026-03-04T05:06:07Z")
    assert info.to_json()["evidence"]["level"] == "L3"


# ---- memory --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("growth", "chosen"),
    [
        (lambda p: 4 * p.seq_q * p.seq_k, "numpy"),  # scores
        (lambda p: 1 << 40, "triton"),  # large, but of one size
        (lambda p: 4096 * p.seq_k, "triton"),  # linear
    ],
)
def test_auto_never_takes_quadratic_memory(house, growth: Callable[[Problem], int], chosen) -> None:
    class Hungry(Fake):
        def plan(self, problem: Problem, machine: Machine) -> Plan:
            return Plan("hungry", workspace_bytes=growth(problem))

    house(Hungry("triton", 1), Fake("numpy", 2))
    decision = portattn.query(head_dim=8, seq_q=1 << 16)
    assert decision.chosen == chosen
    assert ("quadratic" in decision.note or "square" in decision.note) == (chosen == "numpy")
    assert portattn.query(head_dim=8, seq_q=1 << 16, backend="triton").chosen == "triton"
    assert portattn.query(head_dim=8, seq_q=64).chosen == "triton", "small is small"


# ---- decisions -----------------------------------------------------------------------------------
def test_explain_tells_what_attention_would_do_and_runs_nothing(house) -> None:
    a, b = Fake("triton", 1, refuses=("causal",)), Fake("numpy", 2)
    house(a, b)
    x = np.ones((1, 2, 1, 8), np.float32)
    decision = portattn.explain(x, x, x, causal=True)
    assert decision.chosen == "numpy"
    assert not decision["triton"].accepted and decision["triton"].plan is None
    assert [r.field for r in decision["triton"].reasons] == ["causal"]
    assert decision["numpy"].plan == Plan("fill", (("block_q", 16),), 0, 123)
    assert decision.problem.causal == "bottom_right"
    assert a.ran == b.ran == 0
    with pytest.raises(KeyError):
        decision["cupy"]


def test_a_decision_reads_well_and_is_json(house) -> None:
    house(Fake("triton", 1, max_head_dim=64), Fake("numpy", 2, max_head_dim=999))
    decision = portattn.query(head_dim=256, causal=True)
    text = str(decision)
    assert "D=256" in text and "numpy: accepted, fill block_q=16" in text and "head_dim=256" in text
    data = json.loads(json.dumps(decision.to_json()))
    assert data["chosen"] == "numpy"
    assert data["candidates"][0]["reasons"][0]["limit"] == 64
    assert data["candidates"][0]["nearest"].startswith("B=1 Sq=1024 Sk=1024 H=1/1 D=64 ")
    assert data["candidates"][1]["plan"]["workspace_bytes"] == 123
    assert data["problem"]["head_dim"] == 256


@pytest.mark.parametrize(
    ("limits", "asked", "nearest"),
    [
        ({"max_head_dim": 64}, {"head_dim": 100}, {"head_dim": 64, "head_dim_v": 64}),
        ({"refuses": ("softcap",)}, {"softcap": 2.0}, {"softcap": None}),
        ({"refuses": ("alibi_slopes",)}, {"alibi": True}, {"alibi": None}),
        (
            {"refuses": ("mask", "window")},
            {"mask": True, "window": (1, 1)},
            {"mask": None, "window": None},
        ),
        ({"refuses": ("backward",)}, {"backward": True}, {"backward": False}),
        (
            {"max_head_dim": 64, "refuses": ("bias", "sinks")},
            {"head_dim": 65, "bias": True, "sinks": True},
            {"head_dim": 64, "bias": None, "sinks": None},
        ),
    ],
)
def test_the_nearest_supported_problem(house, limits, asked, nearest) -> None:
    fake = Fake("numpy", **limits)
    house(fake)
    found = portattn.query(**({"head_dim": 8} | asked))["numpy"].nearest
    assert found is not None
    assert not fake.why_not(found, Machine.here())
    assert {name: getattr(found, name) for name in nearest} == nearest


def test_there_is_no_nearest_problem_where_the_machine_is_the_obstacle(house) -> None:
    lost = (Reason("driver_missing", "cuda", "no driver", "a device"),)
    house(Fake("numpy", machine_reasons=lost))
    assert portattn.query(head_dim=999)["numpy"].nearest is None


def test_a_gradient_needs_its_forward_pass(house) -> None:
    house(Fake("numpy", refuses=("return_lse",)))
    assert not portattn.query(head_dim=8, backward=True)["numpy"].accepted


# ---- the query -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "device", "shared_memory"),
    [
        ({}, None, None),
        ({"device": "cpu"}, "cpu", None),
        ({"device": "cuda"}, "cuda:0", None),
        ({"device": "cuda:1"}, "cuda:1", None),
        ({"device": "sm_89"}, "cuda:0", 101_376),
        ({"device": "8.0"}, "cuda:0", 166_912),
        ({"device": "sm_90", "shared_memory": 65_536}, "cuda:0", 65_536),
        ({"shared_memory": 101_376}, "cuda:0", 101_376),
    ],
)
def test_where_the_query_asks_about(house, options, device, shared_memory) -> None:
    machines: list[Machine] = []

    class Watching(Fake):
        def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
            machines.append(machine)
            return ()

    house(Watching("triton"))
    assert portattn.query(head_dim=8, **options).problem.device == device
    if shared_memory is None:
        assert machines[0] is Machine.here()
    else:
        assert machines[0].cuda.devices[0].shared_memory == shared_memory


@pytest.mark.parametrize(
    ("options", "error", "argument"),
    [
        ({"device": "h200"}, ValueError, "device"),
        ({"device": ""}, ValueError, "device"),
        ({"device": 5}, TypeError, "device"),
        ({"device": "cuda:x"}, ValueError, "device"),
        ({"device": "cuda:-1"}, ValueError, "device"),
        ({"shared_memory": 0}, ValueError, "shared_memory"),
        ({"shared_memory": -4}, ValueError, "shared_memory"),
        ({"shared_memory": "99 KiB"}, TypeError, "shared_memory"),
        ({"shared_memory": True}, TypeError, "shared_memory"),
        ({"shared_memory": 4096, "device": "cpu"}, ValueError, "shared_memory"),
    ],
)
def test_the_query_refuses(options, error, argument: str) -> None:
    with pytest.raises(error, match=f"^{argument}: got .*; want "):
        portattn.query(head_dim=8, **options)


def test_the_query_knows_its_arguments() -> None:
    with pytest.raises(TypeError, match="head_dims"):
        portattn.query(head_dim=8, head_dims=8)
    with pytest.raises(TypeError, match="head_dim"):
        portattn.query()


# One value for each field of the query, that differs from its default, and what it must change.
FIELDS: dict[str, tuple[Any, Callable[[Problem], Any]]] = {
    "head_dim": (16, lambda p: (p.head_dim, p.head_dim_v)),
    "dtype": ("float16", lambda p: p.dtype),
    "batch": (3, lambda p: p.batch),
    "seq_q": (77, lambda p: (p.seq_q, p.seq_k)),
    "seq_k": (77, lambda p: p.seq_k),
    "heads_q": (4, lambda p: (p.heads_q, p.heads_k)),
    "heads_k": (1, lambda p: p.group),
    "head_dim_v": (32, lambda p: p.head_dim_v),
    "layout": ("thd", lambda p: p.layout),
    "scale": (2.0, lambda p: p.scale),
    "causal": (True, lambda p: p.causal),
    "window": ((3, 4), lambda p: p.window),
    "softcap": (30.0, lambda p: p.softcap),
    "bias": (True, lambda p: p.bias),
    "mask": (True, lambda p: p.mask),
    "alibi": (True, lambda p: p.alibi),
    "sinks": (True, lambda p: p.sinks),
    "seqused_k": (True, lambda p: p.seqused_k),
    "block_size": (16, lambda p: p.block_size),
    "return_lse": (True, lambda p: p.return_lse),
    "deterministic": (True, lambda p: p.deterministic),
    "precision": ("tf32", lambda p: p.precision),
    "backward": (True, lambda p: p.backward),
    "device": ("cpu", lambda p: p.device),
}


def test_the_table_of_fields_is_complete() -> None:
    numbers = set(inspect.signature(Problem.from_numbers).parameters)
    own = set(inspect.signature(portattn.query).parameters) - {"problem"}
    assert set(FIELDS) == (numbers | own) - {"backend", "shared_memory"}  # tested above


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_field_of_the_query_reaches_the_problem(house, field: str) -> None:
    house(Fake("numpy"))
    value, seen = FIELDS[field]
    plain = {"head_dim": 8, "heads_q": 2}
    before = portattn.query(**plain).problem
    after = portattn.query(**(plain | {field: value})).problem
    assert seen(after) != seen(before)


def test_the_query_and_the_call_ask_about_the_same_problem(house) -> None:
    house(Fake("numpy"))
    x = np.ones((2, 5, 4, 8), np.float32)
    options = {"causal": "top_left", "window": (1, None), "softcap": 3.0, "scale": 0.5}
    asked = portattn.query(head_dim=8, batch=2, seq_q=5, heads_q=4, device="cpu", **options)
    assert portattn.explain(x, x, x, **options).problem == asked.problem


def test_supported_is_the_short_answer(house) -> None:
    house(Fake("numpy", max_head_dim=4))
    assert [r.field for r in select.supported(problem(), "numpy")] == ["head_dim"]
    assert select.supported(problem(head_dim=4), "numpy") == ()


# ---- what a backend declares ---------------------------------------------------------------------
def test_the_list_asks_the_backends_own_rules(house) -> None:
    house(
        Fake("numpy", max_head_dim=96, refuses=("float64", "paged", "sinks")),
        Fake("triton", machine_reasons=(Reason("driver_missing", "cuda", "none", "a device"),)),
    )
    triton, host = portattn.list_backends()
    assert host.head_dims == "1-96"
    assert host.dtypes == ("float16", "bfloat16", "float32")
    assert {"paged", "sinks"} & set(host.features) == set()
    assert {"causal", "window", "packed", "backward", "gqa"} <= set(host.features)
    assert not triton.ready and triton.head_dims == "1-64", "what it could do elsewhere"


@pytest.mark.parametrize(
    ("dims", "text"),
    [([], ""), ([8], "8"), ([8, 9, 10, 64], "8-10, 64"), ([255, 256, 288, 512], "255-288, 512")],
)
def test_ranges_of_head_dims(dims: list[int], text: str) -> None:
    assert select._ranges(dims) == text
    assert select._ranges(list(select._HEAD_DIMS)) == "any"
