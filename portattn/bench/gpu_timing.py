"""Interleaved timing on a device, and what a suite asks of the device it runs on.

The rule kept here: in each round every contender runs once, right after an untimed call of its
own, so that drift, clocks and caches hit all alike. Calls of one sample are queued back to back,
behind a kernel that waits, so that the host is ahead: the device's time is what counts, not the
host's, unless the host's is asked for.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Run = Callable[[], Any]
SAMPLE_SECONDS = 0.002  # a sample repeats a short call until it has run this long
MOST_CALLS = 50  # of one sample
COPY_BYTES = 2 << 30  # 1 GiB read and 1 GiB written


class Clock(Protocol):
    """Measures calls."""

    def seconds(self, run: Run, count: int) -> float:
        """Seconds of one call, of ``count`` of them in a row."""


class Device(Protocol):
    """Where a suite runs; the tests have one without a GPU."""

    name: str
    """As torch writes it: ``cuda``."""
    copy_bytes: int
    """Bytes read and written by the copy that bandwidth is held against."""
    clock: Clock
    host_clock: Clock

    @property
    def cache_bytes(self) -> int:
        """Of the last-level cache."""

    def capture(self, run: Run) -> Run:
        """``run`` as a graph; calling it replays, and returns the output of the capture."""

    def free_bytes(self) -> int:
        """What can still be allocated."""

    def tidy(self) -> None:
        """Give back what nothing refers to."""

    def extra_bytes(self, run: Run) -> tuple[int, Any]:
        """The most that one call held beyond what was held before, and its result."""


def measure(
    runs: Mapping[str, Run], rounds: int, clock: Clock, *, count: int = 0, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds per call of every contender, one number a round.

    ``count`` calls a sample (0: as many as a sample needs), after ``warm`` untimed ones.
    """
    counts = {name: count or _calls(run, clock) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        shift = turn % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            for _ in range(warm):
                runs[name]()
            seconds[name].append(clock.seconds(runs[name], counts[name]))
    return seconds


def _calls(run: Run, clock: Clock) -> int:
    run()
    once = max(clock.seconds(run, 1), 1e-9)
    return min(MOST_CALLS, max(1, math.ceil(SAMPLE_SECONDS / once)))


HOST_CYCLES = 700_000
"""Cycles for which the device waits for each call of a sample: some 0.4 ms, more than a call costs
the host."""
MOST_CYCLES = 20_000_000


class EventClock:
    """CUDA events."""

    def seconds(self, run: Run, count: int) -> float:
        """Seconds of one call on the device."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(min(MOST_CYCLES, HOST_CYCLES * count))
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count


class HostClock:
    """Wall time until the calls return; the device is waited for before and after, untimed."""

    def seconds(self, run: Run, count: int) -> float:
        """Seconds of one call on the host."""
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return spent / count


class Replay:
    """A captured graph; a call replays it and returns what the capture returned."""

    def __init__(self, run: Run) -> None:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile, load and allocate before the capture
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.run = run  # the graph reads the arrays of this closure
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = run()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


class CudaDevice:
    """The current CUDA device, through torch."""

    name = "cuda"
    copy_bytes = COPY_BYTES
    clock: Clock = EventClock()
    host_clock: Clock = HostClock()

    @property
    def cache_bytes(self) -> int:
        """Of the L2; where torch does not say, that of the largest there is."""
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(getattr(properties, "L2_cache_size", 0)) or 128 << 20

    def capture(self, run: Run) -> Run:
        """See `Replay`."""
        return Replay(run)

    def free_bytes(self) -> int:
        """As the driver says."""
        import torch

        self.tidy()
        return int(torch.cuda.mem_get_info()[0])

    def tidy(self) -> None:
        """Empty torch's cache too."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def extra_bytes(self, run: Run) -> tuple[int, Any]:
        """By torch's allocator."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before), result
