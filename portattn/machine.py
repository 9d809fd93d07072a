"""The machine at hand: CPU, CUDA devices, package versions; read lazily, never at import.

The rule kept here: nothing that could initialise a driver or break this process happens in this
process. The driver is asked, and frameworks are imported, in child processes with a time limit.
A `Machine` can also be pretended, to plan for a device that is not here.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROBE_SECONDS = 60.0
_IMPORTED = "portattn: imported"

# Shared memory that one thread block may opt in to, in bytes, by compute capability (CUDA C++
# Programming Guide, table of technical specifications). 49,152 is what every device grants.
SHARED_MEMORY = {
    (7, 0): 98_304,
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}
SHARED_MEMORY_ANYWHERE = 49_152


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device. ``shared_memory`` is the opt-in limit of a thread block, in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int = 0
    memory: int = 0

    @property
    def arch(self) -> str:
        """As compilers write it: ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})"


@dataclass(frozen=True, slots=True)
class Cuda:
    """What the driver says: its CUDA version, its devices, and what stands in the way if anything
    does (``code`` and ``problem``)."""

    driver: str | None = None
    devices: tuple[Device, ...] = ()
    code: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """This machine, or a pretended one. The fields override what would be probed; None asks."""

    cuda_state: Cuda | None = None
    packages: Mapping[str, str] | None = field(default=None, hash=False)
    imports: Mapping[str, str] | None = field(default=None, hash=False)
    pretended: bool = False

    @staticmethod
    def here() -> Machine:
        """The machine that this process runs on."""
        return _HERE

    @staticmethod
    def pretend(device: str | None = None, shared_memory: int | None = None) -> Machine:
        """A machine with one CUDA device of that architecture (``sm_89``), or with a smaller
        shared-memory limit in bytes. Driver and packages are taken as given."""
        capability = (9, 0) if device is None else parse_arch(device)
        limit = shared_memory or SHARED_MEMORY.get(capability, SHARED_MEMORY_ANYWHERE)
        made = Device(0, "pretended device", capability, limit)
        return Machine(cuda_state=Cuda(driver="pretended", devices=(made,)), pretended=True)

    @property
    def cuda(self) -> Cuda:
        """The state of CUDA, probed once in a child process."""
        if self.cuda_state is not None:
            return self.cuda_state
        return _probe_cuda(os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid())

    def version(self, package: str) -> str | None:
        """The installed version of a distribution, or None; nothing is imported."""
        if self.packages is not None:
            return self.packages.get(package)
        return _version(package)

    def import_error(self, module: str) -> str | None:
        """Why importing ``module`` fails, tried once in a child process; None if it works."""
        if self.imports is not None:
            return self.imports.get(module)
        if module in sys.modules:
            return None
        return _import_error(module, tuple(sys.path))

    def findable(self, module: str) -> bool:
        """Whether a module of that name lies on the path; neither it nor its parents are
        imported."""
        if self.packages is not None:
            return module in self.packages
        return _findable(module)

    def fingerprint(self) -> dict[str, Any]:
        """What a certificate depends on, apart from the backend: flat, JSON values."""
        cuda = self.cuda
        return {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "cores": cores(),
            "python": platform.python_version(),
            "driver": cuda.driver,
            "gpus": [str(d) for d in cuda.devices],
        }

    def slug(self) -> str:
        """A short name for folders of evidence: the GPU's, else the CPU's with its cores."""
        devices = self.cuda.devices
        name = devices[0].name if devices else f"{cpu_name()} {cores()} cores"
        name = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*ghz", " ", name.lower())
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


_HERE = Machine()


def parse_arch(text: str) -> tuple[int, int]:
    """``sm_89`` or ``8.9`` as a compute capability; `ValueError` otherwise."""
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)[af]?", text.strip().lower())
    if match is None:
        raise ValueError(f"device: got {text!r}; want an architecture such as sm_89 or 8.9")
    return int(match[1]), int(match[2])


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _version(package: str) -> str | None:
    # A distribution can come under several names, one per CUDA major version.
    for name in {"cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x")}.get(package, (package,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _findable(module: str) -> bool:
    # importlib.util.find_spec("a.b") would import a; this walks the path instead.
    name, folders = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        if name in sys.modules:
            folders = getattr(sys.modules[name], "__path__", None)
            continue
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        if spec is None:
            return False
        folders = spec.submodule_search_locations
        if folders is None and name != module:
            return False
    return True


@functools.cache
def _import_error(module: str, path: tuple[str, ...]) -> str | None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path if p)}
    # The last line proves that the import came back: a package may end the process with status 0.
    code = f"import importlib, sys; importlib.import_module(sys.argv[1]); print({_IMPORTED!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, module],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"import did not end within {PROBE_SECONDS:.0f} s"
    if done.returncode == 0 and f"{_IMPORTED}\n" in done.stdout:
        return None
    if done.returncode < 0:
        return f"import was killed by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"import exited with status {done.returncode}"


@functools.cache
def _probe_cuda(visible: str | None, pid: int) -> Cuda:
    """Ask the driver in a child. Keyed by the variable that changes the answer, and by process."""
    del pid
    if _lost_in_fork():
        return Cuda(code="cuda_lost_in_fork", problem="CUDA initialised before fork")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("_cuda_probe.py"))],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PROBE_SECONDS,
            check=False,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Cuda(code="driver_error", problem=f"no answer within {PROBE_SECONDS:.0f} s")
    except ValueError:
        return Cuda(code="driver_error", problem=f"the probe ended with {done.returncode}")
    devices = tuple(
        Device(
            d["index"],
            d["name"],
            (d["capability"][0], d["capability"][1]),
            d["shared_memory"],
            d["multiprocessors"],
            d["memory"],
        )
        for d in found["devices"]
    )
    code, problem = found["code"], found["problem"]
    if code == "no_device" and visible is not None:
        code, problem = "devices_hidden", f"CUDA_VISIBLE_DEVICES={visible!r} leaves none"
    return Cuda(found["driver"], devices, code, problem)


# Whether this process was forked from one that had already used CUDA; such a context is dead.
_forked_with_cuda = False


def _lost_in_fork() -> bool:
    return _forked_with_cuda


def _cuda_in_use() -> bool:
    # A process that has initialised CUDA, by whatever framework, holds the driver's device files;
    # a fork inherits them. Looking is no driver call.
    try:
        return any(
            str(fd.readlink()).startswith("/dev/nvidia") for fd in Path("/proc/self/fd").iterdir()
        )
    except OSError:
        return False


def _after_fork() -> None:
    global _forked_with_cuda
    _forked_with_cuda = _forked_with_cuda or _cuda_in_use()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
