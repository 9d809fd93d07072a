"""Tiles measured on this machine: where they are kept, and when they count.

The rule kept here: a call reads what `portattn tune` wrote and measures nothing. What was written
counts only while everything that it hangs on is as it was; a file that cannot be read, or that
something else wrote, is as good as none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portattn.records import data_path

SCHEMA = 1
"""Of the file; one of another schema is ignored."""

Rows = list[list[int]]
"""Tiles as a backend writes them, whole numbers, the best first."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a backend's ``tune``: ``done`` of ``total``, and what is being measured."""

    done: int
    total: int
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """What tuning found for one key and one use of it (``case``): the shipped tile and the best,
    which may be the same. ``tried`` candidates were timed, ``skipped`` ones did not compile, fit or
    run, and ``wrong`` ones computed something else."""

    key: str
    case: str
    old: tuple[int, ...]
    new: tuple[int, ...]
    old_seconds: float
    new_seconds: float
    tried: int = 0
    skipped: int = 0
    wrong: int = 0

    @property
    def ratio(self) -> float:
        """How many times as fast the new tile is."""
        return self.old_seconds / self.new_seconds


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a backend's ``tune`` returns: the device by its name, what `store` takes, and every
    result. The value of an entry is None where the shipped tiles are the best."""

    device: str
    meta: Mapping[str, Any]
    entries: Mapping[str, Rows | None]
    results: tuple[Result, ...] = field(default=())


def slug(device: str) -> str:
    """A device's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def path(backend: str, device: str) -> Path:
    """The file of a backend's tiles for a device."""
    return Path(_path(backend, device))


def _path(backend: str, device: str) -> str:
    return f"{data_path()}{os.sep}tuned{os.sep}{backend}-{slug(device)}.json"


def lookup(
    backend: str, device: str, key: str, now: Callable[[], Mapping[str, Any]] | None = None
) -> Rows | None:
    """The tiles measured for ``key`` on ``device``, or None.

    ``now`` says what they hang on (the hash of the kernel sources, the compiler's version): they
    count only if the file's ``meta`` says the same. It is called only where there is a file.
    """
    if not device:
        return None
    name = _path(backend, device)
    record = _read(name, _stamp(name), backend)
    if record is None or key not in record["entries"]:
        return None
    if now is not None and not _same(record["meta"], now()):
        return None
    return [list(row) for row in record["entries"][key]]


def store(
    backend: str, device: str, entries: Mapping[str, Rows | None], meta: Mapping[str, Any]
) -> Path:
    """Write tiles for a device, all or nothing; None takes a key's away.

    Keys that are not among ``entries`` stay if they were measured with the same ``meta`` (the time
    apart, which is ``created``). The file goes when no key is left.
    """
    file = path(backend, device)
    record = _read(str(file), _stamp(str(file)), backend)
    hangs_on = {k: v for k, v in meta.items() if k != "created"}
    merged: dict[str, Rows | None] = {}
    if record is not None and _same(record["meta"], hangs_on):
        merged.update(record["entries"])
    merged.update(entries)
    kept = {key: rows for key, rows in sorted(merged.items()) if rows}
    if not kept:
        clear(backend, device)
        return file
    made = {"schema": SCHEMA, "backend": backend, "device": device, "meta": dict(meta)}
    text = json.dumps(made | {"entries": kept}, indent=1) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(temporary, file)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    return file


def clear(backend: str, device: str) -> bool:
    """Remove a device's tiles; whether there were any."""
    try:
        path(backend, device).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_writable(backend: str, device: str) -> None:
    """`OSError` if `store` could not write there."""
    folder = path(backend, device).parent
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")


def _same(meta: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(meta.get(name) == value for name, value in now.items())


def _stamp(name: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(name)  # noqa: PTH116
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@functools.lru_cache(maxsize=32)
def _read(name: str, stamp: tuple[int, int, int] | None, backend: str) -> dict[str, Any] | None:
    """A file as it was at ``stamp``: read once, and complained about once."""
    if stamp is None:
        return None
    try:
        record = json.loads(Path(name).read_text(encoding="utf-8"))
        why = _unsound(record, backend)
    except (OSError, ValueError, RecursionError) as error:
        record, why = None, f"{type(error).__name__}: {error}"
    if why:
        warnings.warn(
            f"portattn: {name} is ignored ({why}); the shipped tiles are used. "
            f"`portattn tune --backend {backend}` writes it anew, with --reset removes it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    made: dict[str, Any] = record
    return made


def _unsound(record: Any, backend: str) -> str:
    """What is wrong with a file's content; empty if nothing is."""
    if not isinstance(record, dict):
        return "no JSON object"
    if record.get("schema") != SCHEMA:
        return f"schema {record.get('schema')!r}, not {SCHEMA}"
    if record.get("backend") != backend:
        return f"of the backend {record.get('backend')!r}"
    entries = record.get("entries")
    if not isinstance(record.get("meta"), dict) or not isinstance(entries, dict):
        return "no meta or no entries"
    for key, rows in entries.items():
        if not isinstance(rows, list) or not rows or not all(_is_row(row) for row in rows):
            return f"the entry {key!r} is no list of tiles"
    return ""


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(type(n) is int and n >= 0 for n in row)
