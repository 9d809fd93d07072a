"""Defects of the call itself: what it keeps, what it writes, what it accepts, when it differs."""

# mypy: no-warn-return-any
# (NumPy types many operators as Any)

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from portattn.conformance.mutants.seeds import seeded
from portattn.conformance.mutants.tiled import Array, Head, State, Tiled
from portattn.problem import Problem


# ---- memory of earlier calls ---------------------------------------------------------------------
@seeded(0, "M04")
class OutputReused(Tiled):
    """Calls of one shape return the same output array."""

    def __init__(self) -> None:
        self.outputs: dict[Any, Array] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.outputs.setdefault((name, shape, dtype), np.empty(shape, dtype))


@seeded(0, "M04")
class OutputInScratch(Tiled):
    """The output is a view of a scratch buffer that the next call fills."""

    scratch = np.empty(1 << 22, np.uint8)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name != "out" or not size or size > self.scratch.size:
            return np.empty(shape, dtype)
        return self.scratch[:size].view(dtype).reshape(shape)


class PlanCache(Tiled):
    """Plans are cached under a key that leaves something out; not a mutant itself."""

    forgotten: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.plans: dict[Problem, Problem] = {}

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        problem = super().validate(q, k, v, options)
        plan = self.plans.setdefault(replace(problem, **self.forgotten), problem)
        return replace(problem, **{name: getattr(plan, name) for name in self.forgotten})


@seeded(0, "C07")
class PlanWithoutScale(PlanCache):
    """Plans are cached without their scale (BUG-072)."""

    forgotten: ClassVar[dict[str, Any]] = {"scale": 1.0}


@seeded(0, "C07")
class PlanWithoutSoftcap(PlanCache):
    """Plans are cached without their softcap."""

    forgotten: ClassVar[dict[str, Any]] = {"softcap": None}


@seeded(0, "C07")
class PlanWithoutWindow(PlanCache):
    """Plans are cached without their window."""

    forgotten: ClassVar[dict[str, Any]] = {"window": None}


@seeded(0, "C07")
class PlanWithoutCausal(PlanCache):
    """Plans are cached without causal."""

    forgotten: ClassVar[dict[str, Any]] = {"causal": None}


@seeded(0, "E11 E10")
class ScratchClearedByMultiplying(Tiled):
    """The accumulator is last call's times 0: a NaN in it stays for ever."""

    def __init__(self) -> None:
        self.left: dict[Any, Array] = {}

    def start(self, head: Head, sink: float | None = None) -> State:
        state = super().start(head, sink)
        old = self.left.get((state.acc.shape, state.acc.dtype))
        return state if old is None else State(old * 0, state.total, state.top)

    def attend(self, head: Head, i0: int) -> State:
        state = super().attend(head, i0)
        self.left[state.acc.shape, state.acc.dtype] = state.acc
        return state


@seeded(0, "C02 C04")
class BrokenByAnError(Tiled):
    """After a refused call the next one returns zeros."""

    broken = False

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        before, self.broken = self.broken, True
        problem = super().validate(q, k, v, options)
        self.broken = False
        return replace(problem, scale=0.0) if before else problem


# ---- what a call writes --------------------------------------------------------------------------
@seeded(0, "F01")
class QueriesScaledInPlace(Tiled):
    """q is multiplied by the scale where it lies."""

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array | None]:
        scale = self.validate(q, k, v, dict(options)).scale
        q *= q.dtype.type(scale)
        return super().forward(q, k, v, **{**options, "scale": 1.0})


@seeded(0, "K13 K12")
class CausalWrittenIntoTheMask(Tiled):
    """The causal limit is written into the caller's mask."""

    def visible(self, head: Head, i0: int, j0: int) -> Array:
        seen = super().visible(head, i0, j0)
        if head.mask is not None and head.problem.causal and len(head.mask) == head.n_q > 1:
            mask = head.mask[i0 : i0 + self.block_q, j0 : j0 + self.block_k]
            mask &= seen[: len(mask), : mask.shape[1]]
        return seen


@seeded(0, "E14")
class OutIgnored(Tiled):
    """out= is ignored and another array returned."""

    def forward(
        self, q: Array, k: Array, v: Array, *, out: Array | None = None, **options: Any
    ) -> tuple[Array, Array | None]:
        return super().forward(q, k, v, **options)


@seeded(0, "E14")
class OutAddedTo(Tiled):
    """The result is added to what out= holds."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def finish(self, head: Head, state: State, i0: int, out: Array, lse: Array) -> None:
        before = out[i0 : i0 + self.block_q].copy()
        super().finish(head, state, i0, out, lse)
        out[i0 : i0 + self.block_q] += before


# ---- when it differs -----------------------------------------------------------------------------
@seeded(0, "D01")
class TilesInAnyOrder(Tiled):
    """Tiles are summed in the order in which threads happen to finish."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        tiles = list(super().key_tiles(head, i0))
        return random.SystemRandom().sample(tiles, len(tiles))


@seeded(0, "D03")
class LockMissing(Tiled):
    """Calls of several threads share one accumulator."""

    def update(self, head: Head, state: State, q: Array, i0: int, j0: int) -> State:
        self.current = super().update(head, state, q, i0, j0)
        time.sleep(0)  # here another thread may come in between
        return self.current


@seeded(0, "D01")
class RowReadBeforeItIsWritten(Tiled):
    """A missing barrier: now and then a tile of rows is stored one tile of keys too early."""

    def key_tiles(self, head: Head, i0: int) -> Iterable[int]:
        tiles = list(super().key_tiles(head, i0))
        early = len(tiles) > 1 and random.SystemRandom().random() < 0.2
        return tiles[:-1] if early else tiles


@seeded(4, "D02")
class PartsByBatch(Tiled):
    """The split over the keys depends on how many batch items there are (BUG-075)."""

    def heads(self, problem: Problem, *given: Any) -> Iterator[Head]:
        self.split = 512 if problem.batch == 1 else 128
        return super().heads(problem, *given)


@seeded(4, "M11")
class PartsByQueries(Tiled):
    """Few query rows are split over the keys otherwise than many."""

    def heads(self, problem: Problem, *given: Any) -> Iterator[Head]:
        self.split = 128 if problem.seq_q < 16 else 512
        return super().heads(problem, *given)


# ---- what it accepts -----------------------------------------------------------------------------
@seeded(0, "C04")
class NegativeWindowUnlimited(Tiled):
    """A negative side of a window counts as unlimited (BUG-060)."""

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        if isinstance(options.get("window"), tuple):
            sides = (x if isinstance(x, int) and x >= 0 else None for x in options["window"])
            options["window"] = tuple(sides)
        return super().validate(q, k, v, options)


@seeded(0, "C03")
class MixedDtypesCast(Tiled):
    """k and v of another dtype than q are cast without a word (BUG-050)."""

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        return super().validate(q, k.astype(q.dtype), v.astype(q.dtype), options)


@seeded(0, "C04")
class CausalTrueGuessed(Tiled):
    """causal=True with unequal lengths is taken as bottom-right."""

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        if options.get("causal") is True:
            options["causal"] = "bottom_right"
        return super().validate(q, k, v, options)


@seeded(0, "C04")
class NanScaleAccepted(Tiled):
    """A scale that is not a number counts as not given."""

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        if options.get("scale") is not None and not np.isfinite(options["scale"]):
            options["scale"] = None
        return super().validate(q, k, v, options)


@seeded(0, "C02")
class LengthsCutToFit(Tiled):
    """k and v of unequal lengths are cut to the shorter one."""

    def forward(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array | None]:
        if k.ndim == v.ndim == 4 and "block_table" not in options:
            n = min(k.shape[2], v.shape[2])
            k, v = k[:, :, :n], v[:, :, :n]
        return super().forward(q, k, v, **options)


@seeded(0, "E02")
class EmptyKeysDivideByZero(Tiled):
    """A call without keys dies in the launch arithmetic (BUG-005)."""

    def query_tiles(self, head: Head) -> Iterable[int]:
        return range(0, head.n_q, self.block_q * head.n_k // head.n_k)


@seeded(0, "E01")
class EmptyQueriesRefused(Tiled):
    """A call without query rows is an error."""

    def validate(self, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Problem:
        if not q.size:
            raise ValueError("q is empty")
        return super().validate(q, k, v, options)


@seeded(0, "X05 E05")
class CrashOnOneKey(Tiled):
    """A single key ends the process."""

    def attend(self, head: Head, i0: int) -> State:
        if head.n_k == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().attend(head, i0)
