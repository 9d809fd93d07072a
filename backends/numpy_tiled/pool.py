"""Threads: a persistent pool over jobs, and a BLAS held to one thread inside it.

The rule kept here: BLAS threads never nest inside ours (nested they are a hundred times slower),
and the limit is counted, so that callers in several Python threads neither lift it for one another
nor leave it behind. The caller works too, so a busy or missing helper only costs time. A forked
child starts without threads and with the limit lifted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

Job = Callable[[Any], None]
"""What a pool runs: called with the workspace of its thread."""


class _BlasLimit:
    """``with BLAS:`` holds BLAS at one thread while anyone is inside. Every thread that calls BLAS
    enters: where its threads are OpenMP's, the limit is each thread's own."""

    def __init__(self) -> None:
        self._libraries: list[Any] | None = None
        self._of_thread = threading.local()
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._libraries is None:  # looks through all loaded libraries: milliseconds
                self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
            if self._inside == 0:
                self._before = _limit(x for x in self._libraries if not _per_thread(x))
            self._inside += 1
        own = self._of_thread.__dict__.setdefault("before", [])
        own.append(_limit(x for x in self._libraries if _per_thread(x)))

    def __exit__(self, *_: object) -> None:
        _restore(self._of_thread.before.pop())
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _restore(self._before)

    def after_fork(self) -> None:
        before, inside = self._before, self._inside
        self.reset()
        if inside:  # the threads that would have lifted the limit stayed in the parent
            _restore(before)


def _per_thread(library: Any) -> bool:
    return getattr(library, "threading_layer", "") == "openmp"


def _limit(libraries: Iterable[Any]) -> list[tuple[Any, int]]:
    before = [(library, library.num_threads) for library in libraries]
    _restore((library, 1) for library, _ in before)
    return before


def _restore(numbers: Iterable[tuple[Any, int]]) -> None:
    for library, number in numbers:
        # In newer versions of threadpoolctl the first thread to set a number owns the right to,
        # and the calls of all others silently do nothing. Our count takes the place of that.
        release = getattr(library, "clear_controlling_thread", None)
        if release is not None:
            release(force=True)
        library.set_num_threads(number)
        if release is not None:
            release(force=True)


class _Helpers:
    """Executors by size, made on first use and kept."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._executors: dict[int, ThreadPoolExecutor] = {}

    def submit(self, count: int, work: Callable[[], None], started: list[Future[None]]) -> None:
        """Ask ``count`` helpers to work; each future is in ``started`` as soon as it exists."""
        with self._lock:
            executor = self._executors.get(count)
            if executor is None:
                executor = ThreadPoolExecutor(count, thread_name_prefix="portattn")
                self._executors[count] = executor
        try:
            started.extend(executor.submit(work) for _ in range(count))
        except RuntimeError as error:
            # At interpreter shutdown no thread starts any more: the caller does the rest alone.
            if "shutdown" not in str(error):
                raise


BLAS = _BlasLimit()
_HELPERS = _Helpers()


def _after_fork() -> None:
    BLAS.after_fork()
    _HELPERS.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run_jobs(
    jobs: Iterator[Job],
    workspace: Callable[[], AbstractContextManager[Any]],
    threads: int,
    limit: AbstractContextManager[None] = BLAS,
) -> None:
    """Run every job, each on one of ``threads`` threads, the caller's among them, and each of these
    inside ``limit``.

    Jobs start in the order in which they come. The first exception stops the rest and is raised
    here, once no job runs any more; so is a KeyboardInterrupt.
    """
    queue = _Queue(jobs)

    def work() -> None:
        try:
            # NaN, inf and overflow are the caller's own; the contract says where they may show.
            # (errstate holds in this thread alone.)
            with workspace() as ws, np.errstate(all="ignore"), limit:
                for job in queue:
                    job(ws)
        except BaseException:
            queue.stop()
            raise

    if threads <= 1:
        work()
        return
    futures: list[Future[None]] = []
    try:
        _HELPERS.submit(threads - 1, work, futures)
        work()
    except BaseException:
        queue.stop()
        raise
    finally:
        failures = _join(futures, queue)
    if failures:
        raise failures[0]


def _join(futures: list[Future[None]], queue: _Queue) -> list[BaseException]:
    """Wait until no helper works on the queue any more; what went wrong in them."""
    # A helper that is still busy with another call's jobs has nothing to do here any more.
    running = [future for future in futures if not future.cancel()]
    try:
        outcomes = [future.exception() for future in running]
    except KeyboardInterrupt:
        queue.stop()
        wait(running)
        raise
    return [failure for failure in outcomes if failure is not None]


class _Queue:
    """An iterator that several threads share, and that can be told to end."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> _Queue:
        return self

    def __next__(self) -> Job:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._jobs)

    def stop(self) -> None:
        self._stopped = True
