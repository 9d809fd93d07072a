"""Backends are found in folders and entry points; one that cannot be loaded is a reason, and the
others stay usable."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import portattn
from portattn import select
from portattn.contract import Backend, Plan, Reason
from portattn.registry import ENTRY_POINTS, find_backends

PLUGIN = Path(__file__).parent / "plugin_backend"
IN_TREE = {"numpy", "triton", "cupy", "numba"}


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str, str], None]]:
    """``install(name, value, code)`` puts a distribution with one entry point, and the module that
    it names, on the path, as pip would."""

    def write(name: str, value: str, code: str) -> None:
        module = value.partition(":")[0]
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {value}\n")
        importlib.invalidate_caches()
        select.forget()

    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    monkeypatch.undo()
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
    select.forget()


@pytest.fixture
def rowwise(install: Callable[[str, str, str], None]) -> str:
    """The example package, installed as its own pyproject says."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][ENTRY_POINTS].items()
    install(name, value, (PLUGIN / f"{value.partition(':')[0]}.py").read_text())
    return name


def named(name: str) -> Any:
    (info,) = [i for i in portattn.list_backends() if i.name == name]
    return info


# ---- in-tree -------------------------------------------------------------------------------------
def test_every_folder_is_a_backend_under_its_public_name() -> None:
    found = find_backends()
    assert set(found) >= IN_TREE
    for name, entry in found.items():
        assert entry.backend is not None
        assert entry.backend.name == name
        assert isinstance(entry.backend, Backend)
        assert all(Path(f).is_file() for f in entry.backend.kernel_files())
        assert set(entry.backend.device_kinds) <= {"cpu", "cuda"}


def test_they_are_loaded_once() -> None:
    assert find_backends() is find_backends()


def test_the_list_says_everything_of_each() -> None:
    for info in portattn.list_backends():
        assert info.ready == (not info.reasons)
        assert info.device
        data = info.to_json()
        assert set(data) == {
            "name", "ready", "device", "versions", "reasons", "evidence", "head_dims", "dtypes",
            "features", "origin",
        }  # fmt: skip
        assert all(set(r) >= {"code", "field", "got", "limit", "hint"} for r in data["reasons"])


def test_the_list_is_in_order_of_preference() -> None:
    names = [info.name for info in portattn.list_backends() if info.name in IN_TREE]
    assert names == [n for n in select.ORDER if n in names]
    assert names[-1] == "numpy", "a host backend comes last"


# ---- out of the tree -----------------------------------------------------------------------------
def test_an_entry_point_is_a_backend(rowwise: str) -> None:
    info = named(rowwise)
    assert info.ready
    assert info.origin == "portattn_rowwise 1.0"
    assert info.features == ("gqa", "value_head_dim", "return_lse", "deterministic")
    assert info.head_dims == "any"
    assert info.versions == {"numpy": np.__version__}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_it_runs_when_named(rowwise: str, inputs, oracle, layout: str) -> None:
    q, k, v = inputs(B=2, Sq=3, Sk=7, Hq=4, Hk=2, D=8, Dv=5, layout=layout)
    out, lse = portattn.attention(q, k, v, layout=layout, backend=rowwise, return_lse=True)
    want, want_lse = oracle(q, k, v, layout=layout)
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


def test_it_refuses_what_it_does_not_do(rowwise: str, inputs) -> None:
    with pytest.raises(portattn.Unsupported) as caught:
        portattn.attention(*inputs(), causal=True, softcap=1.0, backend=rowwise)
    assert [r.field for r in caught.value.reasons[rowwise]] == ["causal", "softcap"]
    assert set(caught.value.reasons) == {rowwise}, "a named backend never falls back"


def test_an_ordered_tuple_takes_the_first_that_accepts(rowwise: str, inputs) -> None:
    q, k, v = inputs()
    decision = portattn.explain(q, k, v, backend=("triton", rowwise))
    assert decision.chosen == rowwise
    assert [c.backend for c in decision.candidates] == ["triton", rowwise]


def test_it_stands_behind_the_backends_of_the_tree(rowwise: str) -> None:
    assert [info.name for info in portattn.list_backends()][-1] == rowwise
    assert portattn.query(head_dim=64)[rowwise].accepted


BROKEN = [
    ("raises", "raise RuntimeError('torn')", "plugin_broken", "RuntimeError: torn"),
    ("no module", "import portattn_no_such_module", "plugin_broken", "ModuleNotFoundError"),
    ("exits", "import sys; sys.exit(1)", "plugin_broken", "SystemExit"),
    ("no object", "", "plugin_broken", "AttributeError"),
    ("not a backend", "BACKEND = 5", "plugin_invalid", "int"),
    (
        "half a backend",
        "class B: name = 'torn'\nBACKEND = B()",
        "plugin_invalid",
        "B named 'torn'",
    ),
]


@pytest.mark.parametrize(
    ("code", "reason", "text"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_a_broken_one_is_a_reason(install, code: str, reason: str, text: str) -> None:
    install("torn", "portattn_torn:BACKEND", code)
    info = named("torn")
    assert not info.ready
    assert info.reasons[0].code == reason
    assert text in str(info.reasons[0].got)
    assert "portattn_torn 1.0" in info.reasons[0].hint
    assert {i.name for i in portattn.list_backends()} >= IN_TREE
    candidate = portattn.query(head_dim=64)["torn"]
    assert not candidate.accepted and candidate.reasons == info.reasons
    x = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(portattn.Unsupported, match="torn"):
        portattn.attention(x, x, x, backend="torn")


def test_one_that_claims_another_name_is_refused(install) -> None:
    code = (PLUGIN / "portattn_rowwise.py").read_text()
    install("faster", "portattn_faster:BACKEND", code)
    assert named("faster").reasons[0].code == "plugin_invalid"
    assert "named 'rowwise'" in str(named("faster").reasons[0].got)


def test_one_cannot_take_the_place_of_a_backend_of_the_tree(install) -> None:
    code = (PLUGIN / "portattn_rowwise.py").read_text().replace('"rowwise"', '"numpy"')
    install("numpy", "portattn_numpy:BACKEND", code)
    assert find_backends()["numpy"].origin == "numpy_tiled"


def test_an_unknown_name_lists_the_known_ones(inputs) -> None:
    for backend in ("tritn", ("numpy", "tritn"), "", ("auto",)):
        with pytest.raises(ValueError, match=r"backend: got .*cupy, numba"):
            portattn.attention(*inputs(), backend=backend)


# ---- the shapes that backends speak in -----------------------------------------------------------
def test_reasons_read_as_sentences() -> None:
    reason = Reason("smem", "head_dim", 256, "99 KiB", "numpy accepts it", "declared")
    text = str(reason)
    assert "head_dim" in text and "256" in text and "99 KiB" in text and "numpy accepts it" in text
    assert reason.to_json() == {
        "code": "smem",
        "field": "head_dim",
        "got": 256,
        "limit": "99 KiB",
        "hint": "numpy accepts it",
        "source": "declared",
    }


def test_unsupported_carries_all_reasons_and_survives_a_pickle() -> None:
    import pickle

    reason = Reason("a", "head_dim", (1, 2), None, "hint")
    error = portattn.Unsupported("refused", {"x": [reason], "y": ()})
    assert isinstance(error, NotImplementedError)
    assert error.reasons == {"x": (reason,), "y": ()}
    assert "head_dim" in str(error) and "hint" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reasons) == (str(error), error.reasons)


def test_a_plan_is_json_without_the_backends_own_part() -> None:
    plan = Plan("rows", (("block_q", 1),), 5, 6, "note", config=object())
    assert plan.to_json() == {
        "mechanism": "rows",
        "tile": {"block_q": 1},
        "shared_memory_bytes": 5,
        "workspace_bytes": 6,
        "note": "note",
    }
