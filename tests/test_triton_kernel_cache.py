"""Triton's cache of compiled kernels in folders that are read-only, full or torn (BUG-095): a small
kernel compiled ahead of time, so that no GPU is needed.

The rule kept here: each case is a process of its own, which must end with a kernel and, where the
folder cannot be used, with one warning.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is there for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from portattn.backends.triton_jit import kernel_cache

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double_kernel(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, tl.load(at) * 2)
"""
PROGRAM = """
import json, sys, warnings
sys.path.insert(0, {folder!r})
import triton
from kernel_of_a_test import double_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from portattn.backends.triton_jit import kernel_cache

kernel_cache.usable()
kernel_cache.usable()
hits = []
triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
{before}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        source = ASTSource(double_kernel, {{"x": "*fp32", "N": "constexpr"}}, {{(1,): 128}})
        made = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    assert len(made.asm["cubin"]) > 500 and made.metadata.shared == 0
told = [str(w.message) for w in caught if "cache" in str(w.message)]
print(json.dumps({{"hits": hits, "told": told, "files": sorted(made.metadata_group.values())}}))
"""


@pytest.fixture
def compile_in(tmp_path: Path, fresh: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """``compile_in(folder, before)``: compile twice in a process with that cache folder."""
    (tmp_path / "kernel_of_a_test.py").write_text(KERNEL)

    def run(folder: Path, before: str = "") -> dict[str, Any]:
        done = fresh(
            PROGRAM.format(folder=str(tmp_path), before=before),
            TRITON_CACHE_DIR=str(folder),
            TRITON_INTERPRET=None,
            TMPDIR=str(tmp_path),
        )
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    return run


def test_a_good_folder_is_used_and_used_again(tmp_path: Path, compile_in: Any) -> None:
    first, second = compile_in(tmp_path / "cache"), compile_in(tmp_path / "cache")
    assert (first["hits"], second["hits"]) == ([False, True], [True, True])
    assert not first["told"] and not second["told"]
    assert all(f.startswith(str(tmp_path / "cache")) for f in first["files"])


@pytest.mark.parametrize("place", ["a file", "under a file", "no permission", "nowhere"])
def test_bug_095_a_folder_that_cannot_be_written(
    tmp_path: Path, compile_in: Any, place: str
) -> None:
    folder = tmp_path / "cache"
    if place in ("a file", "under a file"):
        folder.write_text("")
    elif place == "no permission":
        folder.mkdir(mode=0o500)  # says nothing to root, who may write there all the same
    else:
        folder = Path("/proc/self/cache")
    found = compile_in(folder / "deeper" if place == "under a file" else folder)
    assert found["hits"] == [False, True]
    if place != "no permission":
        assert len(found["told"]) == 1 and "TRITON_CACHE_DIR" in found["told"][0]
        assert not any(Path(f).exists() for f in found["files"]), "the folder went with its process"


def test_bug_095_a_full_disk(tmp_path: Path, compile_in: Any) -> None:
    """The folder takes an entry's first files and no more."""
    before = (
        "from triton.runtime.cache import FileCacheManager\n"
        "real, calls = FileCacheManager.put, []\n"
        "def put(self, data, filename, binary=True):\n"
        f"    if self.cache_dir.startswith({str(tmp_path / 'cache')!r}):\n"
        "        calls.append(filename)\n"
        "        if len(calls) > 2:\n"
        "            raise OSError(28, 'No space left on device')\n"
        "    return real(self, data, filename, binary)\n"
        "FileCacheManager.put = put\n"
    )
    found = compile_in(tmp_path / "cache", before)
    assert found["hits"][0] is False
    assert len(found["told"]) == 1 and "No space left" in found["told"][0]
    assert compile_in(tmp_path / "cache")["hits"] == [False, True], "and nothing torn stayed behind"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


def other(path: Path) -> None:
    path.write_text("null")


@pytest.mark.parametrize("harm", [cut, empty, gone, other], ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["__grp__*.json", "double_kernel.json", "*.cubin"])
def test_bug_095_a_torn_entry_is_compiled_anew(
    tmp_path: Path, compile_in: Any, which: str, harm: Callable[[Path], None]
) -> None:
    compile_in(tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob(which)
    good = path.read_bytes()
    harm(path)
    found = compile_in(tmp_path / "cache")
    assert found["hits"] == [False, True] and not found["told"]
    assert path.read_bytes()[:100] == good[:100] and path.stat().st_size == len(good)


def test_a_manager_that_the_user_chose_stays(tmp_path: Path, fresh: Callable[..., Any]) -> None:
    fresh(
        "import triton\n"
        "from portattn.backends.triton_jit import kernel_cache\n"
        "kernel_cache.usable()\n"
        "assert triton.knobs.cache.manager_class.__module__ == 'triton.runtime.cache'",
        TRITON_CACHE_MANAGER="triton.runtime.cache:FileCacheManager",
    )


def test_bug_094_one_thread_launches_at_a_time() -> None:
    """Eight threads meet a kernel that is not compiled: one compiles it, the others find it."""

    class Kernel:
        device_caches: dict[int, str]

        def __init__(self) -> None:
            self.device_caches, self.compiled = {}, 0

        def run(self, *args: int, grid: tuple[int], warmup: bool) -> int:
            if 0 not in self.device_caches:
                time.sleep(0.02)
                self.device_caches[0] = "made"
                self.compiled += 1
            return sum(args) + grid[0]

    kernel = Kernel()
    kernel_cache.one_at_a_time(kernel)
    once = kernel.run
    kernel_cache.one_at_a_time(kernel)
    assert kernel.run is once
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: kernel.run(n, 1, grid=(5,), warmup=False), range(8)))
    assert found == [n + 6 for n in range(8)]
    assert kernel.compiled == 1
