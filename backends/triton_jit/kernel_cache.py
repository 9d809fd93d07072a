"""Triton's cache of compiled kernels, where its folder is read-only, full or torn.

The rule kept here: what is wrong with a folder costs a compilation and one warning, never the call.
Triton asks for its cache through one class for the whole process; the one here differs from
Triton's own only where that one raises, or hands out a kernel that is not whole.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import struct
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portattn.backends.triton_jit import compiler_key


def usable() -> None:
    """See to it that compiled kernels can be kept; before the first compilation of a process, and
    as often as one likes. A cache manager that the user chose (TRITON_CACHE_MANAGER) stays."""
    from triton import knobs

    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = _manager()
        compiler_key.remember()


def ask_ahead(capability: int) -> None:
    """Ask what the first compilation will: ptxas, a program of its own, for its version, and
    Triton for its hash of several hundred megabytes. While they answer, the caller imports what
    the first launch needs."""

    def version() -> str:
        from triton.backends.nvidia.compiler import get_ptxas_version

        return str(get_ptxas_version(capability))

    compiler_key.aside("portattn-ptxas", version)
    compiler_key.ask()


def one_at_a_time(*kernels: Any) -> None:
    """Let one thread launch a kernel at a time. Triton's first launch of it is no place for two:
    each compiles it, and the second finds a launcher whose function is not loaded yet
    (triton#11494)."""
    for kernel in kernels:
        if not getattr(kernel.run, "alone", False) and hasattr(kernel, "device_caches"):
            kernel.run = _alone(kernel.run)  # else done already, or interpreted


def _alone(original: Any) -> Any:
    lock = threading.RLock()

    def run(*args: Any, **options: Any) -> Any:
        with lock:
            return original(*args, **options)

    run.alone = True  # type: ignore[attr-defined]
    return run


@functools.cache
def _manager() -> Any:
    from triton.runtime.cache import FileCacheManager

    class CacheManager(FileCacheManager):  # type: ignore[misc]
        """Files in Triton's folder; in one of this process where that cannot be written to."""

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            try:
                super().__init__(key, override, dump)
            except OSError as error:
                if override or dump:
                    raise
                self.key = key
                self._leave(error)

        def get_group(self, filename: str) -> dict[str, str] | None:
            try:
                group = super().get_group(filename)
                return group if group and whole(filename, group) else None
            except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
                return None  # torn, or somebody else's: compiled and written anew

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            try:
                return str(super().put(data, filename, binary))
            except OSError as error:
                self._leave(error)
                return str(super().put(data, filename, binary))

        def _leave(self, error: OSError) -> None:
            folder = _temporary(os.getpid())
            _warn(str(error), folder)
            self.cache_dir = str(Path(folder, self.key))
            self.lock_path = str(Path(self.cache_dir, "lock"))
            Path(self.cache_dir).mkdir(parents=True, exist_ok=True)

    return CacheManager


@functools.cache
def _temporary(pid: int) -> str:
    folder = tempfile.mkdtemp(prefix="portattn-triton-")

    def remove() -> None:
        if os.getpid() == pid:  # not in a child that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _warn(problem: str, folder: str) -> None:
    if _warn.cache_info().currsize:
        return
    warnings.warn(
        f"Triton's cache folder cannot be used ({problem}): this process keeps its kernels in "
        f"{folder} and compiles them again in the next; TRITON_CACHE_DIR names another folder",
        RuntimeWarning,
        stacklevel=2,
    )


def whole(filename: str, group: Mapping[str, str]) -> bool:
    """Whether an entry's files are all there and end where they say: its metadata, and on NVIDIA
    the machine code. Raises, among others, `ValueError` where one cannot be read."""
    metadata = json.loads(Path(group[filename]).read_text())
    if metadata["target"]["backend"] != "cuda":
        return True
    code = [Path(path) for name, path in group.items() if name.endswith(".cubin")]
    return len(code) == 1 and _elf_is_whole(code[0].read_bytes())


def _elf_is_whole(data: bytes) -> bool:
    """Every section and segment of a 64-bit ELF file lies within it."""
    if data[:5] != b"\x7fELF\x02":
        return False
    segments, sections = struct.unpack_from("<QQ", data, 0x20)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", data, 0x36)
    ends = [segments + segment_size * segment_count, sections + section_size * section_count]
    if max(ends) > len(data):
        return False
    for at in range(sections, ends[1], section_size):
        (kind,) = struct.unpack_from("<I", data, at + 4)
        offset, size = struct.unpack_from("<QQ", data, at + 0x18)
        ends.append(0 if kind == 8 else offset + size)  # 8: takes no room in the file
    return bool(max(ends) <= len(data))
