"""What is shipped: a source archive that builds, and a wheel with every module under its import
name, the marker for type checkers, and neither tests nor documents."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "portattn": "portattn",
    "backends": "portattn/backends",
    "conformance": "portattn/conformance",
}
SHIPPED_DATA = {".py", ".typed", ".json", ".cu", ".cuh", ".html", ".css", ".js"}


def build(source: Path, kind: str, into: Path) -> Path:
    """Build an ``sdist`` or a ``wheel`` as pip would, without isolation or network."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools 77 to build (an older one does not know SPDX licenses)")
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(into)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, made of a copy, so that nothing is left in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in (*FOLDERS, "tests", "docs"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, copy / folder, ignore=skipped)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, copy)
    return build(copy, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made of the source archive alone."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.11.4 on
        archive.extractall(folder, **safely)  # type: ignore[arg-type]
    (source,) = folder.iterdir()
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the wheel and the example plugin in it."""
    plugin = tmp_path_factory.mktemp("plugin") / "source"
    shutil.copytree(ROOT / "tests" / "plugin_backend", plugin)
    target = tmp_path_factory.mktemp("target")
    for file in (wheel, build(plugin, "wheel", tmp_path_factory.mktemp("plugin-wheel"))):
        with zipfile.ZipFile(file) as archive:
            archive.extractall(target)
    return target


def test_the_wheel_holds_every_module_under_its_import_name(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED_DATA and "__pycache__" not in path.parts
    }
    assert names == expected
    assert "portattn/py.typed" in names
    assert "portattn/backends/numpy_tiled/__init__.py" in names
    assert "portattn/conformance/reference.py" in names


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {n.split("/")[0] for n in archive.namelist() if ".dist-info/" in n}
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "Name: portattn\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    for extra in ("torch", "triton", "cupy", "numba", "test", "docs"):
        assert f"Provides-Extra: {extra}\n" in metadata
    core = {
        line.split()[1].split(">")[0].replace("_", "-")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    assert core == {"numpy", "ml-dtypes", "threadpoolctl", "rich", "click", "platformdirs"}
    assert "portattn = portattn.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert archive.read(f"{info}/top_level.txt").decode().split() == ["portattn"]


def test_what_is_installed_works(installed: Path, fresh, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "import numpy as np, portattn, portattn.conformance.reference\n"
        "x = np.ones((1, 3, 1, 4), 'float32')\n"
        "assert (portattn.attention(x, x, x, backend='numpy') == 1).all()\n"
        "assert (portattn.attention(x, x, x, backend='rowwise') == 1).all()\n"
        "names = [b.name for b in portattn.list_backends()]\n"
        "assert names == ['triton', 'cupy', 'numba', 'numpy', 'rowwise'], names\n"
        "for module in list(sys.modules.values()):\n"
        "    if module.__name__.startswith('portattn'):\n"
        "        assert module.__file__.startswith(os.environ['PYTHONPATH']), module.__file__\n"
    )
    fresh(f"import os; os.chdir({str(tmp_path)!r})\n" + code, PYTHONPATH=str(installed))


def test_the_source_archive_has_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert {"portattn/api.py", "backends/__init__.py", "conformance/reference.py"} <= names
