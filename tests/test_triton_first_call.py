"""What the first call of a process waits for: modules of its own pass alone, and Triton's hash of
itself, which is remembered from process to process.

The rule kept here: what is remembered is what Triton computes, and no folder, file or release makes
a call fail or get another string.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is there for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from triton import knobs
from triton.runtime import cache

from portattn.backends.triton_jit import compiler_key

CALLS = """
import json, sys, torch, portattn
def ours():
    return sorted(m for m in sys.modules if "gluon" in m or "portattn.backends.triton_jit." in m)
q = torch.ones(1, 4, 1, 16)
portattn.attention(q, q, q, backend="triton", causal=True)
forward = ours()
q.requires_grad_()
portattn.attention(q, q, q, backend="triton", causal=True).sum().backward()
print(json.dumps([forward, ours()]))
"""
BACKWARD = {
    f"portattn.backends.triton_jit.{name}"
    for name in (
        "backward", "backward_keys", "backward_sums", "hopper_backward", "hopper_backward_dkdv",
        "hopper_backward_dq", "hopper_backward_keys", "hopper_backward_products",
        "hopper_backward_tiles", "launch_backward", "launch_gradients",
    )
}  # fmt: skip
GLUON = "triton.experimental.gluon"


# ---- imports -------------------------------------------------------------------------------------
def test_a_forward_call_imports_nothing_of_the_backward_pass(fresh: Callable[..., Any]) -> None:
    done = fresh(CALLS, TRITON_INTERPRET="1")
    forward, both = (set(names) for names in json.loads(done.stdout.splitlines()[-1]))
    assert "portattn.backends.triton_jit.launch_portable" in forward
    assert not forward & BACKWARD
    assert "portattn.backends.triton_jit.launch_backward" in both
    hopper = ("launch_hopper", "hopper_forward", "hopper_backward")
    assert both.isdisjoint(f"portattn.backends.triton_jit.{name}" for name in hopper)


def test_what_portable_imports_has_nothing_of_gluon(fresh: Callable[..., Any]) -> None:
    """Triton 3.6 imports it itself, on the first launch of any kernel."""
    fresh(
        "import sys\n"
        "from portattn.backends.triton_jit import launch, launch_gradients\n"
        f"assert not [m for m in sys.modules if m.startswith({GLUON!r})]",
        TRITON_INTERPRET=None,
    )


def test_hopper_s_forward_pass_imports_nothing_of_its_backward_pass(
    fresh: Callable[..., Any],
) -> None:
    """Every kernel waits for the one lock before its first launch, whichever module brings it."""
    done = fresh(
        "import json, sys\n"
        "from portattn.backends.triton_jit import launch, launch_hopper\n"
        "forward = sorted(sys.modules)\n"
        "from portattn.backends.triton_jit import hopper_backward, hopper_forward\n"
        "from portattn.backends.triton_jit import launch_backward, launch_portable\n"
        "kernels = [getattr(m, n) for m in (hopper_backward, hopper_forward, launch_backward,\n"
        "           launch_portable) for n in vars(m) if n.endswith('_kernel')]\n"
        "print(json.dumps([forward, len(kernels), all(k.run.alone for k in kernels)]))",
        TRITON_INTERPRET=None,
    )
    forward, kernels, alone = json.loads(done.stdout.splitlines()[-1])
    assert GLUON in forward and not set(forward) & BACKWARD
    assert kernels == 10 and alone


# ---- Triton's hash of itself ---------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache folder, which is not there yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert knobs.cache.dir == str(tmp_path / "cache")
    return tmp_path / "cache"


class Own:
    """Triton's function, and how often it was asked. The hash itself is computed once: it takes
    half a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.value = 0, str(cache.triton_key())
        # What is remembered hangs on the source of the function.
        source = compiler_key._source(cache.triton_key)
        monkeypatch.setattr(compiler_key, "_source", lambda own: source)

    def __call__(self) -> str:
        self.asked += 1
        return self.value


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Own:
    return Own(monkeypatch)


def remembered(folder: Path) -> Path:
    (file,) = folder.iterdir()  # and no temporary one beside it
    return file


def test_the_hash_is_computed_once_for_all_processes(folder: Path, own: Own) -> None:
    assert compiler_key.key(own) == own.value and own.asked == 1
    assert stat.S_IMODE(remembered(folder).stat().st_mode) & 0o400
    assert compiler_key.key(own) == own.value and own.asked == 1


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def other_letter(file: Path) -> None:
    text = file.read_text().rstrip()
    file.write_text(text[:-1] + ("0" if text[-1] != "0" else "1"))


def empty(file: Path) -> None:
    file.write_text("")


def no_text(file: Path) -> None:
    file.write_bytes(bytes(range(128, 256)))


def a_folder(file: Path) -> None:
    file.unlink()
    (file / "deeper").mkdir(parents=True)


@pytest.mark.parametrize("harm", [cut, other_letter, empty, no_text, a_folder])
def test_a_file_that_is_not_whole_counts_for_nothing(
    folder: Path, own: Own, harm: Callable[[Path], None]
) -> None:
    compiler_key.key(own)
    harm(remembered(folder))
    assert compiler_key.key(own) == own.value and own.asked == 2
    assert compiler_key.key(own) == own.value
    assert own.asked == (3 if harm is a_folder else 2), "it was written anew"
    remembered(folder)


def test_another_installation_is_hashed_itself(
    folder: Path, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version; a file fewer; a file more; and the first one's file was replaced by them."""
    compiler_key.key(own)
    files = list(compiler_key._files(compiler_key._root()))
    changes: tuple[tuple[str, Any], ...] = (
        ("triton.__version__", "3.6.0+other"),
        (f"{compiler_key.__name__}._files", lambda root: iter(files[:-1])),
        (f"{compiler_key.__name__}._files", lambda root: iter([*files, __file__])),
    )
    for asked, (name, value) in enumerate(changes, start=2):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            compiler_key.key(own)
            assert own.asked == asked
    compiler_key.key(own)
    assert own.asked == 5


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that counts as one of Triton's."""
    file = tmp_path / "module.py"
    file.write_text("a = 1\n")
    files = list(compiler_key._files(compiler_key._root()))
    monkeypatch.setattr(compiler_key, "_files", lambda root: iter([*files, str(file)]))
    yield file


def test_a_changed_file_is_hashed_again(folder: Path, own: Own, module: Path) -> None:
    compiler_key.key(own)
    was = module.stat()
    module.write_text("a = 10\n")
    os.utime(module, ns=(was.st_atime_ns, was.st_mtime_ns))
    compiler_key.key(own)
    assert own.asked == 2, "another size"
    os.utime(module, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    compiler_key.key(own)
    assert own.asked == 3, "another time"
    module.unlink()
    compiler_key.key(own)
    assert own.asked == 4, "gone: nothing is known"


def test_what_changes_while_it_is_hashed_is_not_remembered(
    folder: Path, own: Own, module: Path
) -> None:
    def installing() -> str:
        module.write_text("a = 100\n")
        return own()

    assert compiler_key.key(installing) == own.value
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("place", ["a file", "nowhere", "full", "no name"])
def test_a_folder_that_cannot_be_written_costs_the_hash_alone(
    folder: Path, own: Own, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "a file":
        folder.write_text("")
    elif place == "nowhere":
        monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/self/cache")
    elif place == "no name":
        monkeypatch.setenv("TRITON_CACHE_DIR", "")
    else:

        def replace(old: Path, new: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", replace)
    assert compiler_key.key(own) == own.value
    assert compiler_key.key(own) == own.value and own.asked == 2
    if place == "full":
        assert not list(folder.iterdir()), "nothing torn stayed behind"


def test_a_release_with_another_function_is_not_remembered(
    folder: Path, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_key, "KNOWN", frozenset())
    assert compiler_key.key(own) == own.value
    assert not folder.exists()


PROGRAM = """
import json, sys, time
import triton
from triton.runtime import cache
from portattn.backends.triton_jit import kernel_cache
own = cache.triton_key
kernel_cache.usable()
ours = cache.triton_key
kernel_cache.usable()
assert cache.triton_key is ours
key = cache.triton_key()
hashed = own.cache_info().currsize
assert key == own() and cache.get_cache_key.__globals__["triton_key"] is ours
print(json.dumps([triton.__version__, ours is own, hashed]))
"""


def test_triton_asks_for_the_remembered_one(folder: Path, fresh: Callable[..., Any]) -> None:
    """The same string, in a process that hashed nothing; a release that is not known is let be."""
    known = compiler_key._source(cache.triton_key) in compiler_key.KNOWN
    for expected in (1, 0 if known else 1):
        version, let_be, hashed = json.loads(fresh(PROGRAM).stdout.splitlines()[-1])
        assert version and not let_be and hashed == expected


@pytest.mark.parametrize(
    "before",
    [
        "cache.triton_key = lambda: 'theirs'",
        "cache.triton_key()",
        "del cache.triton_key",
    ],
)
def test_what_is_not_as_expected_stays(
    folder: Path, fresh: Callable[..., Any], before: str
) -> None:
    fresh(
        "from triton.runtime import cache\n"
        f"{before}\n"
        "was = vars(cache).get('triton_key')\n"
        "from portattn.backends.triton_jit import kernel_cache\n"
        "kernel_cache.usable()\n"
        "assert vars(cache).get('triton_key') is was\n"
    )
    assert not folder.exists()


AHEAD = """
import os, threading, time
from triton.runtime import cache
from portattn.backends.triton_jit import compiler_key
asked = []
def key(own):
    asked.append(threading.current_thread().name)
    time.sleep(0.5)
    return "the hash"
compiler_key.key = key
compiler_key.remember()
compiler_key.ask()
child = os.fork()
assert cache.triton_key() == "the hash"
if child == 0:
    os._exit(asked != ["portattn-triton-key", "MainThread"])
assert asked == ["portattn-triton-key"]
assert os.waitpid(child, 0)[1] == 0
"""


def test_who_asks_while_it_is_computed_waits_for_it(fresh: Callable[..., Any]) -> None:
    """A child that was forked meanwhile has no thread to wait for, and computes it itself."""
    fresh(AHEAD, PYTHONWARNINGS="ignore")


def test_a_hash_that_fails_ahead_fails_where_it_is_asked_for(fresh: Callable[..., Any]) -> None:
    fresh(
        "import pytest\n"
        "from triton.runtime import cache\n"
        "from portattn.backends.triton_jit import compiler_key\n"
        "def key(own):\n"
        "    raise RuntimeError('torn')\n"
        "compiler_key.key = key\n"
        "compiler_key.remember()\n"
        "compiler_key.ask()\n"
        "with pytest.raises(RuntimeError, match='torn'):\n"
        "    cache.triton_key()"
    )
