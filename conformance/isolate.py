"""Child processes: one target in each, one case at a time, and what their ends mean.

The rule kept here: a case that crashes, hangs, is killed or runs out of memory ends its child and
costs that case alone. A child is a new interpreter (never a fork: a driver does not survive one),
the leader of its own session, so that whatever it started ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portattn.conformance.case import Case, Outcome
from portattn.conformance.manifest import Manifest
from portattn.conformance.targets import TargetError

CATALOGUE = "portattn.conformance.checks:CATALOGUE"
LOAD_SECONDS = 300.0
TAIL_BYTES = 4096
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "PORTATTN_NUM_THREADS",
)


class Cancelled(Exception):
    """The run was interrupted while a child worked; the child is gone."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every child of a run has in common. ``memory`` (bytes beyond those in use after
    loading, CPU targets) bounds a target that would take the machine down with it. ``manifest`` is
    that of an earlier child, which spares later ones asking for it (some targets probe)."""

    spec: str
    catalogue: str = CATALOGUE
    threads: int = 1
    memory: int | None = None
    own_pages: bool = False
    manifest: Manifest | None = None

    def environment(self) -> dict[str, str]:
        """The child's environment: thread limits, the parent's import path, a stack on SIGSEGV."""
        env = {
            **os.environ,
            **dict.fromkeys(_THREAD_VARIABLES, str(self.threads)),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONHASHSEED": "0",
            "MALLOC_ARENA_MAX": "2",
        }
        if self.threads == 1:
            flags = os.environ.get("XLA_FLAGS", "")
            env["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
        if self.own_pages:
            # Every larger block is mapped on its own and unmapped when freed, so that the
            # resident set shows what is in use and not what the heap keeps for later.
            env["MALLOC_MMAP_THRESHOLD_"] = env["MALLOC_TRIM_THRESHOLD_"] = "131072"
        return env


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a child said of its target."""

    manifest: Manifest
    simulated: bool
    source: str
    packages: tuple[str, ...]
    states: tuple[str, ...]


class Child:
    """One child process. Not shared between threads."""

    def __init__(self, setup: Setup, cancelled: Callable[[], bool] = lambda: False):
        self.setup = setup
        self._cancelled = cancelled
        request_end, self._requests = os.pipe()
        self._answers, answer_end = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "portattn.conformance.worker",
                str(request_end), str(answer_end),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(request_end, answer_end),
            env=setup.environment(),
            start_new_session=True,
        )  # fmt: skip
        os.close(request_end)
        os.close(answer_end)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        for fd in (self._answers, self._output):
            os.set_blocking(fd, False)
        self._pending = b""
        self._tail: deque[bytes] = deque(maxlen=64)
        self.dead = False

    def load(self, timeout_s: float = LOAD_SECONDS) -> Loaded:
        """Load the target. Raises `TargetError` with the child's reason or the way it ended."""
        request = {
            "load": self.setup.spec,
            "catalogue": self.setup.catalogue,
            "memory": self.setup.memory,
            "manifest": known.to_json() if (known := self.setup.manifest) else None,
        }
        answer = self._ask(request, timeout_s)
        if isinstance(answer, Outcome):
            self.close()
            raise TargetError(f"loading {self.setup.spec!r} failed: {answer.message}")
        if "error" in answer:
            self.close()
            raise TargetError(answer["error"])
        return Loaded(
            Manifest.parse(answer["manifest"]),
            answer["simulated"],
            answer["source"],
            tuple(answer["packages"]),
            tuple(answer["states"]),
        )

    def run(self, case: Case, timeout_s: float) -> tuple[Outcome, float]:
        """One case: its outcome and its seconds. Afterwards ``dead`` says whether the child is
        still of use."""
        started = time.monotonic()
        answer = self._ask({"case": case.to_json()}, timeout_s)
        if isinstance(answer, Outcome):
            self.close()
            return answer, time.monotonic() - started
        if answer["restart"]:
            self.close()
        return Outcome.from_json(answer["outcome"]), float(answer["seconds"])

    def close(self) -> None:
        """End the child and everything it started; harmless when it has ended already."""
        if self.dead:
            return
        self.dead = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)
        assert self._process.stdout is not None
        self._process.stdout.close()

    # ---- the exchange --------------------------------------------------------------------------
    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | Outcome:
        """The answer, or the outcome that the child's end amounts to."""
        kills = _oom_kills()
        try:
            os.write(self._requests, (json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            return self._ended(kills)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            selector.register(self._output, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=0.1):
                    data = _read(key.fd)
                    if key.fd == self._output:
                        if data == b"":
                            selector.unregister(self._output)  # closed by the target
                        self._tail.append(data or b"")
                    elif data == b"":
                        return self._ended(kills)
                    else:
                        self._pending += data or b""
                line, newline, rest = self._pending.partition(b"\n")
                if newline:
                    self._pending = rest
                    answer: dict[str, Any] = json.loads(line)
                    return answer
                # A process that the target forked can hold the pipe open after the child's end.
                if self._process.poll() is not None:
                    self._pending += _read(self._answers) or b""
                    if b"\n" not in self._pending:
                        return self._ended(kills)
                if self._cancelled():
                    self.close()
                    raise Cancelled
                if time.monotonic() > deadline:
                    return Outcome(
                        cause="timeout", message=f"no answer within {timeout_s:g} s; killed"
                    )

    def _ended(self, kills_before: int) -> Outcome:
        """What the end of the child means."""
        try:
            status = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return Outcome(cause="crash", message="closed the suite's pipe and went on running")
        self._tail.append(_read(self._output) or b"")
        tail = b"".join(self._tail)[-TAIL_BYTES:].decode(errors="replace").strip()
        said = _last_words(tail)
        if status == -signal.SIGKILL and _oom_kills() > kills_before:
            return Outcome(cause="oom", message="killed by the system for want of memory")
        if status < 0:
            return Outcome(cause="crash", message=f"killed by {_signal(-status)}{said}")
        return Outcome(cause="exited", message=f"exited with status {status}{said}")


def run_alone(
    spec: str,
    case: Case,
    timeout_s: float,
    *,
    catalogue: str = CATALOGUE,
    threads: int = 1,
    manifest: Manifest | None = None,
) -> Outcome:
    """One case in a child of its own; ``manifest`` None asks the target for it."""
    child = Child(Setup(spec, catalogue, threads, manifest=manifest))
    try:
        child.load()
        return child.run(case, timeout_s)[0]
    finally:
        child.close()


def _read(fd: int) -> bytes | None:
    """What is there to read now; b"" at the end, None where nothing has come."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(tail: str) -> str:
    """The line of the output that says most: a Python file of a fault's stack, else the last."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    stack = next((x for x in lines if x.startswith("File ") and "conformance" not in x), None)
    chosen = stack or (lines[-1] if lines else "")
    return f" ({chosen[:200]})" if chosen else ""


def _oom_kills() -> int:
    """How often the system has killed a process here for want of memory (Linux, cgroup v2 or
    the whole machine)."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(key + " "):
                return int(line.split()[1])
    return 0
