"""Interleaved timing: in each round every contender runs once, so that drift hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

SAMPLE_SECONDS = 0.15  # a sample repeats a short call until it has run this long
WARM_SECONDS = 0.1  # untimed before each sample: a core that has slept is slow at first
PAUSE_SECONDS = 0.1  # lets the worker threads of the previous contender stop spinning


def measure(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of every contender, one number a round."""
    repeats = {name: _repeats(run) for name, run in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(PAUSE_SECONDS)
            run, count = contenders[name], repeats[name]
            _warm_up(run)
            start = time.perf_counter()
            for _ in range(count):
                run()
            seconds[name].append((time.perf_counter() - start) / count)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast as theirs: the median over the rounds of time by time."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def _repeats(run: Callable[[], Any]) -> int:
    return max(1, int(SAMPLE_SECONDS / _warm_up(run)))


def _warm_up(run: Callable[[], Any]) -> float:
    """Call it until pools, caches, lazy imports and the core are warm; seconds of the last call."""
    start = time.perf_counter()
    while True:
        before = time.perf_counter()
        run()
        now = time.perf_counter()
        if now - start >= WARM_SECONDS:
            return max(now - before, 1e-7)
