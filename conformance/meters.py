"""Memory meters: what a call allocated beyond what was there before it.

The rule kept here: a meter sees every thread of the process and says which instrument it is. On
a CPU the resident set stands beside the allocator's own count, so that memory which an allocator
does not know of (a native library's) shows as well.
"""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from portattn.conformance.manifest import Manifest

RSS_NOISE = 4 << 20
"""Resident bytes that come and go without an allocation of the target's (stacks, page tables)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one call. ``peak`` beyond what was in use before it, ``left`` still in use after
    it (its outputs among them), ``largest`` the largest single allocation or None where the
    instrument cannot tell, ``workspace`` the peak beyond outputs, ``instrument`` its name."""

    peak: int
    left: int
    largest: int | None
    instrument: str
    workspace: int

    def beyond(self, outputs: int) -> Memory:
        """The same with ``outputs`` bytes of outputs taken off the workspace."""
        return replace(self, workspace=max(0, self.peak - outputs))


class Watched:
    """Filled when the `Meter.watch` block ends."""

    memory: Memory | None = None


class Meter(Protocol):
    """An instrument."""

    instrument: str

    def watch(self) -> AbstractContextManager[Watched]:
        """``with meter.watch() as watched: call()``, then ``watched.memory``."""


class ResidentMeter:
    """The process's resident set, by its high-water mark in /proc (Linux)."""

    instrument = "resident"

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        watched = Watched()
        reset_high_water()
        before = status_bytes("VmRSS")
        yield watched
        peak, left = status_bytes("VmHWM") - before, status_bytes("VmRSS") - before
        watched.memory = Memory(max(peak, 0), left, None, self.instrument, max(peak, 0))


class NumpyMeter:
    """tracemalloc, which NumPy reports to, with the resident set beside it."""

    instrument = "tracemalloc"

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        watched = Watched()
        was_on = tracemalloc.is_tracing()
        with ResidentMeter().watch() as resident:
            if not was_on:
                tracemalloc.start()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                yield watched
                left, peak = (x - before for x in tracemalloc.get_traced_memory())
            finally:
                if not was_on:
                    tracemalloc.stop()
        memory = Memory(peak, left, None, self.instrument, peak)
        watched.memory = _larger(memory, resident.memory)


class TorchCpuMeter:
    """torch's CPU allocator as its profiler reports it, with the resident set beside it."""

    instrument = "torch-profiler"

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        from torch.profiler import ProfilerActivity, profile

        watched = Watched()
        with (
            ResidentMeter().watch() as resident,
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            yield watched
        steps = [
            (event.start_ns(), event.nbytes())
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        in_use = peak = largest = 0
        for _, size in sorted(steps):
            in_use += size
            peak, largest = max(peak, in_use), max(largest, size)
        memory = Memory(peak, in_use, largest, self.instrument, peak)
        watched.memory = _larger(memory, resident.memory)


class TorchCudaMeter:
    """torch's caching allocator; memory taken past it shows as a fall of the device's free
    memory that the allocator does not account for."""

    instrument = "torch-cuda"

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        import torch

        watched = Watched()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, outside = torch.cuda.memory_allocated(), _outside_torch(torch)
        history = _record(torch, True)
        try:
            yield watched
            torch.cuda.synchronize()
            largest = _largest_block(torch) if history else None
        finally:
            _record(torch, False)
        strays = max(0, _outside_torch(torch) - outside)
        peak = torch.cuda.max_memory_allocated() - before + strays
        left = torch.cuda.memory_allocated() - before + strays
        watched.memory = Memory(peak, left, largest, self.instrument, peak)


class CupyMeter:
    """CuPy's memory hooks: every allocation and release that goes through its pool."""

    instrument = "cupy-hooks"

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        import cupy

        watched = Watched()
        counter = _cupy_counter(cupy)
        with counter:
            yield watched
        watched.memory = Memory(
            counter.peak, counter.in_use, counter.largest, self.instrument, counter.peak
        )


class TargetMeter:
    """The target's own ``meter() -> (bytes in use, peak since the last call of meter)``."""

    instrument = "target"

    def __init__(self, meter: Any):
        self._meter = meter

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        watched = Watched()
        before = int(self._meter()[0])
        yield watched
        in_use, peak = (int(x) - before for x in self._meter())
        watched.memory = Memory(max(peak, 0), in_use, None, self.instrument, max(peak, 0))


def meter_for(target: Any, manifest: Manifest) -> Meter:
    """The target's own meter where it has one, else the one of its arrays and device."""
    meter = _meter_of(target, manifest)
    release = getattr(target, "release", None)
    return meter if release is None else ReleasingMeter(meter, release)


def _meter_of(target: Any, manifest: Manifest) -> Meter:
    own = getattr(target, "meter", None)
    if own is not None:
        return TargetMeter(own)
    if manifest.array == "cupy":
        return CupyMeter()
    if manifest.array == "torch":
        return TorchCudaMeter() if manifest.device == "cuda" else TorchCpuMeter()
    return NumpyMeter()


class ReleasingMeter:
    """A meter over a target that keeps buffers for its next call: they are freed before the call,
    so that they count as its workspace, and after it, so that they are no leak."""

    def __init__(self, meter: Meter, release: Callable[[], None]) -> None:
        self.instrument = meter.instrument
        self._meter, self._release = meter, release

    @contextmanager
    def watch(self) -> Iterator[Watched]:
        self._release()
        with self._meter.watch() as watched:
            yield watched
            self._release()


@contextmanager
def limit(manifest: Manifest, headroom: int) -> Iterator[None]:
    """Let no more than ``headroom`` bytes beyond the present use be allocated: address space on a
    CPU (new threads' stacks count: warm the target up first), the framework's pool on a GPU."""
    if manifest.device == "cpu":
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + headroom, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    elif manifest.array == "torch":
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        allowed = torch.cuda.memory_reserved() + headroom
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        import cupy

        pool = cupy.get_default_memory_pool()
        pool.free_all_blocks()
        pool.set_limit(size=pool.total_bytes() + headroom)
        try:
            yield
        finally:
            pool.set_limit(size=0)


def status_bytes(field: str) -> int:
    """A size of this process from /proc/self/status, in bytes; 0 where there is no such file."""
    return _kilobytes("/proc/self/status", field)


def available_bytes() -> int:
    """Memory that this machine could still give; 0 where that cannot be read."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _kilobytes(path: str, field: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(field + ":")), 0)


def reset_high_water() -> None:
    """Set the resident high-water mark back to the present use (Linux; elsewhere no effect)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # without it the mark only ever rises, which errs towards a larger peak


def _larger(counted: Memory, resident: Memory | None) -> Memory:
    """The allocator's count, or the resident one where that is larger by more than noise."""
    if resident is None or resident.peak <= 1.25 * counted.peak + RSS_NOISE:
        return counted
    return replace(counted, peak=resident.peak, workspace=resident.peak, instrument="resident")


def _outside_torch(torch: Any) -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def _record(torch: Any, on: bool) -> bool:
    """Turn the allocator's history on or off; False where this torch has none."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        return False
    record(enabled="all" if on else None, context=None, max_entries=100_000)
    return True


def _largest_block(torch: Any) -> int | None:
    traces = torch.cuda.memory._snapshot().get("device_traces", [])
    sizes = [event["size"] for trace in traces for event in trace if event["action"] == "alloc"]
    return max(sizes, default=0)


def _cupy_counter(cupy: Any) -> Any:
    """A hook object made here because its base class needs the framework."""

    class Counter(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "portattn-counter"

        def __init__(self) -> None:
            self.in_use = self.peak = self.largest = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.in_use += event["mem_size"]
            self.peak = max(self.peak, self.in_use)
            self.largest = max(self.largest, event["mem_size"])

        def free_postprocess(self, **event: Any) -> None:
            self.in_use -= event["mem_size"]

    return Counter()
