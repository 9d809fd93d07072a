"""What all tests share: random inputs, the float64 oracle in the caller's layout, and fresh
processes.

The rule kept here: no test sees the evidence of the person who runs it, and none leaves any behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples in every run (`HYPOTHESIS_PROFILE=search` looks on)."""
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
    settings.register_profile("search", deadline=None, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked ``gpu`` runs where the driver sees a device, and says why it does not."""
    if item.get_closest_marker("gpu"):
        from portattn.machine import Machine

        cuda = Machine.here().cuda
        if not cuda.devices:
            pytest.skip(f"needs a CUDA device: {cuda.problem}")


@pytest.fixture(scope="session", autouse=True)
def no_evidence(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty data folder for the whole session, child processes included."""
    folder = tmp_path_factory.mktemp("portattn-data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PORTATTN_DATA_DIR", str(folder))
        patch.delenv("PORTATTN_REQUIRE_CERTIFIED", raising=False)
        yield folder


@pytest.fixture(scope="session")
def fresh() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``fresh(code, **environment)`` runs Python code in a new process; a value of None unsets the
    variable. The process must succeed unless ``check=False``."""

    def run(
        code: str, *, check: bool = True, timeout: float = 60, **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k not in environment}
        env |= {k: v for k, v in environment.items() if v is not None}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=ROOT,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def inputs() -> Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """``inputs(seed, B=, Sq=, Sk=, Hq=, Hk=, D=, Dv=, dtype=, layout=)`` draws normal q, k, v."""

    def draw(
        seed: int = 0,
        *,
        B: int = 1,
        Sq: int = 5,
        Sk: int | None = None,
        Hq: int = 1,
        Hk: int | None = None,
        D: int = 8,
        Dv: int | None = None,
        dtype: Any = "float32",
        layout: str = "bshd",
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if dtype == "bfloat16":
            from ml_dtypes import bfloat16 as dtype
        rng = np.random.default_rng(seed)
        Sk, Hk, Dv = Sq if Sk is None else Sk, Hk or Hq, Dv or D
        shapes = ((B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv))
        made = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        if layout == "bhsd":
            made = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in made]
        return made[0], made[1], made[2]

    return draw


def _oracle_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, bool]:
    """The call as the oracle takes it, and whether (B, S, H, D) had to be turned around."""
    from portattn.conformance.reference import Attention

    options = dict(options)
    turned = options.pop("layout", "bshd") == "bshd"
    if turned:
        q = q.swapaxes(1, 2)
        if options.get("block_table") is None:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return Attention(q, k, v, **options), turned


@pytest.fixture(scope="session")
def oracle() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """``oracle(q, k, v, **options)``: float64 ``(out, lse)`` in the layout of the call."""
    from portattn.conformance import reference

    def compute(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        asked, turned = _oracle_call(q, k, v, options)
        out, lse = reference.forward(asked)
        return (out.swapaxes(1, 2) if turned else out), lse

    return compute


@pytest.fixture(scope="session")
def oracle_backward() -> Callable[..., dict[str, np.ndarray]]:
    """``oracle_backward(q, k, v, dout, dlse=None, **options)``: float64 gradients by name."""
    from portattn.conformance import reference

    def compute(
        q: Any, k: Any, v: Any, dout: Any, dlse: Any = None, **options: Any
    ) -> dict[str, np.ndarray]:
        asked, turned = _oracle_call(q, k, v, options)
        grads = reference.backward(asked, dout.swapaxes(1, 2) if turned else dout, dlse)
        paged = options.get("block_table") is not None
        for name in ("dq", "dk", "dv") if turned else ():
            if name == "dq" or not paged:
                grads[name] = grads[name].swapaxes(1, 2)
        return grads

    return compute


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows and keys in every call of the NumPy backend."""
    from numpy_kit import force_small_tiles

    force_small_tiles(monkeypatch)


@pytest.fixture
def agrees(oracle: Callable[..., Any], oracle_backward: Callable[..., Any]) -> Callable[..., None]:
    """``agrees(q, k, v, **options)``: output, LSE and every gradient are those of the oracle."""
    from numpy_kit import agreement

    return agreement(oracle, oracle_backward)


@pytest.fixture
def own_evidence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Evidence stays in a folder of the test."""
    monkeypatch.setenv("PORTATTN_DATA_DIR", str(tmp_path / "data"))
