"""Triton's hash of itself, remembered from process to process.

The rule kept here: what is remembered is the very string that Triton computes, for files that are
the same by path, size and times; in any doubt Triton computes it. Triton puts the hash of its own
files into the key of every compiled kernel, and reads a compiler of several hundred megabytes for
it in every process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import inspect
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KNOWN = frozenset({"7d2c8021b5b5b005dc2a4457bc365b3d78ac10d2613df98d5bb216e343fe1140"})
"""SHA-256 of the source of `triton_key` in the releases (3.6 to 3.9) whose files `_files` names:
what another one computes is not remembered."""

_FOLDERS = ("compiler", "backends", "language")
_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_asking: threading.Thread | None = None


def remember() -> None:
    """From here on Triton asks `key` for its hash. Reads and writes nothing yet. A hash that this
    process has already, and a function that somebody else put there, stay."""
    from triton.runtime import cache

    own = getattr(cache, "triton_key", None)
    code = getattr(getattr(own, "__wrapped__", None), "__code__", None)
    if own is None or getattr(code, "co_filename", None) != cache.__file__:
        return
    if own.cache_info().currsize:
        return

    @functools.lru_cache
    def known() -> str:
        return key(own)

    @functools.wraps(own)
    def triton_key() -> str:
        wait()
        return known()

    cache.triton_key = triton_key


def aside(name: str, question: Callable[[], object]) -> threading.Thread:
    """A thread that asks now what the first compilation will. What is wrong with the answer, that
    says, where a caller hears it."""

    def ask_it() -> None:
        with contextlib.suppress(Exception):
            question()

    thread = threading.Thread(target=ask_it, name=name, daemon=True)
    thread.start()
    return thread


def ask() -> None:
    """Ask for the hash aside; whoever asks meanwhile waits for it."""
    global _asking

    def question() -> str:
        from triton.runtime import cache

        return str(cache.triton_key())

    _asking = aside("portattn-triton-key", question)


def wait() -> None:
    """Until the hash that `ask` asked for is there; at once in a child that was forked meanwhile,
    which has no such thread."""
    if _asking is not None and _asking is not threading.current_thread():
        _asking.join()


def key(own: Callable[[], str]) -> str:
    """What ``own``, Triton's function, returns: from the file in Triton's cache folder, or, where
    that does not speak of the files as they are, computed and written there."""
    try:
        file, stamp = _file(), _stamp()
    except (OSError, ValueError, AttributeError):
        return own()
    if file is None:
        return own()
    found = _read(file, stamp)
    if found is None:
        found = own()
        with contextlib.suppress(OSError, ValueError, TypeError):
            # An installation that changed meanwhile may have been hashed half old, half new.
            if _source(own) in KNOWN and stamp == _stamp():
                _write(file, stamp, found)
    return found


def _root() -> str:
    from triton.runtime import cache

    return str(Path(cache.__file__).absolute().parents[1])


def _file() -> Path | None:
    """One file for each place where a Triton is installed, so that it does not pile up; beside the
    kernels, so that it is trusted as far as they are, and goes where they go."""
    from triton import knobs

    if not knobs.cache.dir:
        return None
    return Path(knobs.cache.dir, f"portattn-triton-key-{_digest(_root())[:16]}")


def _stamp() -> str:
    """A hash of all that Triton's depends on, contents by their sizes and times: a file that was
    changed with none of these is beyond it. The time of change (ctime) is among them because
    whoever makes images or packages may set the other one to a constant."""
    from triton import __version__

    parts = [__version__, sys.version, _root()]
    for path in _files(_root()):
        stat = os.stat(path)  # noqa: PTH116
        parts.append(f"{path}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}")
    return _digest("\n".join(parts))


def _files(root: str) -> Iterator[str]:
    """What `triton_key` reads, and the packages' own files, which decide what it finds."""
    yield os.path.join(root, "runtime", "cache.py")  # noqa: PTH118
    # As `triton_key` names it; in the folder lie other files, that it does not read.
    extension = importlib.machinery.EXTENSION_SUFFIXES[0].rpartition(".")[2]
    yield os.path.join(root, "_C", f"libtriton.{extension}")  # noqa: PTH118
    for folder in _FOLDERS:
        yield from _modules(os.path.join(root, folder))  # noqa: PTH118


def _modules(folder: str) -> Iterator[str]:
    """The modules of a package and of the packages below it, as `pkgutil.walk_packages` sees them:
    a folder counts if it has an ``__init__``."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    yield from (e.path for e in found if e.name.endswith(_SUFFIXES))
    for entry in found:
        if entry.name.isidentifier() and entry.name != "__pycache__" and entry.is_dir():
            inside = {f"__init__{suffix}" for suffix in _SUFFIXES}
            if not inside.isdisjoint(os.listdir(entry.path)):  # noqa: PTH208
                yield from _modules(entry.path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _source(function: Any) -> str:
    return _digest(inspect.getsource(function))


def _read(file: Path, stamp: str) -> str | None:
    """The key in ``file`` if it is whole and made for ``stamp``."""
    try:
        made_for, check, found = file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return found if made_for == stamp and check == _digest(found) else None


def _write(file: Path, stamp: str, found: str) -> None:
    """All or nothing. Not through `tempfile`, which keeps other users of a shared folder out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="ascii") as out:
            out.write(f"{stamp} {_digest(found)} {found}\n")
        os.replace(temporary, file)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
