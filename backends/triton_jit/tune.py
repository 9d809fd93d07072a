"""Measuring the portable mechanism's forward tiles on the device at hand.

The rule kept here: a candidate wins only if it computes what the shipped tile computes, is faster
beyond the noise in the same rounds, and fits. One that does not compile, fit or run is counted and
left out. The time of a tile is that of a replayed graph: the device's, not the host's.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from portattn.backends.triton_jit import config, overrides, planner
from portattn.backends.triton_jit.config import Config, Tile
from portattn.contract import Call
from portattn.machine import Machine
from portattn.problem import Problem
from portattn.tuning import Result, Rows, Step, Tuned

MOST = 12
"""Candidates of one job besides the shipped tile."""

FASTER = 0.98
"""The share of the shipped tile's time that a winner takes at most."""

ROUNDS = 7
SAMPLE_SECONDS = 0.002
MOST_CALLS = 50
COLD_BYTES = 200 << 20
"""Keys and values that a call of few rows goes through before it reads the same ones again: more
than a cache holds."""

TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2, "float32": 1e-4}
"""Of the largest output: what two tiles may differ by."""


_UNKNOWN = {"shared_bytes": 0, "masked_bytes": 0}


@dataclass(frozen=True, slots=True)
class Job:
    """The tiles of one key that one choice of rows reads. ``block_q`` 0: free; else the rows of
    the tile, as the planner asks for them. The first of ``seeds`` is the shipped choice."""

    key: str
    block_q: int
    seeds: tuple[Tile, ...]
    problems: tuple[Problem, ...] = field(default=())

    @property
    def case(self) -> str:
        """For people."""
        return f"up to {self.block_q} rows" if self.block_q else "any rows"


def jobs(
    head_dims: Sequence[int], dtypes: Sequence[str], kinds: Sequence[str], on: planner.Target
) -> list[Job]:
    """What there is to measure, or `ValueError` with what there is instead."""
    found: dict[tuple[str, int], Job] = {}
    seen: set[str] = set()
    for dtype in dtypes:
        for head_dim in head_dims:
            for problem, rows in _workloads(head_dim, dtype, on):
                key = config.key_of(problem, few=config.few_rows(problem))
                kind = key.split("/")[0]
                seen.add(kind)
                if kinds and kind not in kinds:
                    continue
                seeds = _seeds(key, rows, on)
                if seeds:
                    job = found.setdefault((key, rows), Job(key, rows, seeds))
                    found[key, rows] = replace(job, problems=(*job.problems, problem))
    unknown = sorted(set(kinds) - seen)
    if unknown:
        raise ValueError(f"kind: got {', '.join(unknown)}; want one of {', '.join(sorted(seen))}")
    if not found:
        raise ValueError("the shipped table has no tile for any of these on this device")
    return list(found.values())


def _seeds(key: str, rows: int, on: planner.Target) -> tuple[Tile, ...]:
    shipped = config.table()[config.family(on.capability)].get(key, [])
    return tuple(
        t for t in shipped if t.shared_bytes <= on.shared_memory and rows in (0, t.block_q)
    )


def _workloads(head_dim: int, dtype: str, on: planner.Target) -> Iterator[tuple[Problem, int]]:
    """The problems that tiles are measured with, each with the rows of its tile (0: free)."""
    plain: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype, "layout": "bhsd"}
    heads = max(1, 2048 // config.padded(head_dim))
    asked = [
        (plain | {"batch": 2, "seq_q": 4096, "heads_q": heads, "causal": causal}, 0)
        for causal in (True, False)
    ]
    few = plain | {"heads_q": 32, "heads_k": 8}
    for seq_k in (2048, 8192, 65536):
        found: dict[int, dict[str, Any]] = {}
        for seq_q in (1, 32, 16, 8, 4):  # decoding, then as full as the tile can be
            numbers = few | {"seq_q": seq_q, "seq_k": seq_k}
            problem = Problem.from_numbers(**numbers)
            key = config.key_of(problem, few=True)
            tiles = config.table()[config.family(on.capability)].get(key, [])
            rows = seq_q * problem.group
            tile = config.rows_tile(tiles, rows, on.shared_memory)
            if tile is not None and tile.block_q >= rows:
                found.setdefault(tile.block_q, numbers)
        asked += [(numbers, rows) for rows, numbers in found.items()]
    for numbers, rows in asked:
        problem = Problem.from_numbers(**numbers)
        against = planner.reasons(problem, on)
        if against:
            raise ValueError("; ".join(map(str, against)))
        yield problem, rows


def candidates(job: Job, limit: int) -> list[Tile]:
    """The tiles to try besides the shipped choice: the other shipped ones, then what is one step
    from them in block_k, warps, stages and, where it is free, block_q; at most `MOST`."""
    _, size, dim = job.key.split("/")
    found: dict[tuple[int, int, int, int], Tile] = {}
    for tile in job.seeds:
        found.setdefault(_shape(tile), tile)
    for tile in job.seeds:
        for near in _near(tile, free=job.block_q == 0):
            if least_bytes(near, int(dim), int(size)) <= limit:
                found.setdefault(_shape(near), near)
    return list(found.values())[1 : MOST + 1]


def _near(tile: Tile, *, free: bool) -> Iterator[Tile]:
    for stages in (tile.num_stages + 1, tile.num_stages - 1):
        if 1 <= stages <= 5:
            yield replace(tile, num_stages=stages, **_UNKNOWN)
    for block_k in (2 * tile.block_k, tile.block_k // 2):
        if 16 <= block_k <= 128:
            yield replace(tile, block_k=block_k, **_UNKNOWN)
    for warps in (2 * tile.num_warps, tile.num_warps // 2):
        if 2 <= warps <= 8:
            yield replace(tile, num_warps=warps, **_UNKNOWN)
    if tile.block_k >= 32 and tile.num_stages < 5:  # the same bytes under way, in smaller steps
        half = tile.block_k // 2
        yield replace(tile, block_k=half, num_stages=tile.num_stages + 1, **_UNKNOWN)
    if tile.block_k <= 64 and tile.num_warps <= 4:
        yield replace(tile, block_k=2 * tile.block_k, num_warps=2 * tile.num_warps, **_UNKNOWN)
    if free:
        for block_q, warps in (
            (2 * tile.block_q, 2 * tile.num_warps),
            (2 * tile.block_q, tile.num_warps),
            (tile.block_q // 2, tile.num_warps),
        ):
            if 16 <= block_q <= overrides.WIDEST and warps <= 8:
                yield replace(tile, block_q=block_q, num_warps=warps, **_UNKNOWN)


def least_bytes(tile: Tile, head_dim: int, size: int) -> int:
    """Shared memory that a tile takes at least: its queries once, and a step of keys and of values
    for each stage but one. What takes more than there is need not be compiled."""
    steps = max(1, 2 * (tile.num_stages - 1))
    return size * head_dim * (tile.block_q + tile.block_k * steps)


def _shape(tile: Tile) -> tuple[int, int, int, int]:
    return tile.block_q, tile.block_k, tile.num_warps, tile.num_stages


def merged(tiles: Sequence[Tile], winner: Tile, block_q: int) -> list[Tile]:
    """The shipped tiles with ``winner`` where it is found first: at the front, or, where the
    planner asks for rows, before the first tile of as many."""
    rest = [t for t in tiles if _shape(t) != _shape(winner)]
    at = 0
    if block_q:
        at = next((i for i, t in enumerate(rest) if t.block_q >= block_q), len(rest))
    return [*rest[:at], winner, *rest[at:]]


def tune(
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    kinds: Sequence[str],
    report: Callable[[Step], None],
) -> Tuned:
    """Measure on torch's current CUDA device; see `portattn.tune_command.Tunable`."""
    import torch

    machine = Machine.here()
    index = torch.cuda.current_device()
    device = machine.cuda.devices[index]
    where = Problem.from_numbers(head_dim=16, dtype="float16", seq_q=1, device=f"cuda:{index}")
    on = planner.target(where, machine)
    on = replace(on, limits=replace(on.limits, mechanism="portable"))
    todo = jobs(head_dims, dtypes, kinds, on)
    lists = [candidates(job, on.shared_memory) for job in todo]
    total, done = sum(map(len, lists)), 0
    lines: dict[str, list[Tile]] = {}
    entries: dict[str, Rows | None] = {}
    results = []
    for job, tiles in zip(todo, lists, strict=True):

        def tried(tile: Tile, job: Job = job) -> None:
            nonlocal done
            report(Step(done, total, f"{job.key} {job.case}: {'x'.join(map(str, _shape(tile)))}"))
            done += 1

        result, winner = _best(job, tiles, on, tried)
        results.append(result)
        entries.setdefault(job.key, None)
        if winner is not None:
            shipped = config.table()[config.family(on.capability)][job.key]
            lines[job.key] = merged(lines.get(job.key, shipped), winner, job.block_q)
            entries[job.key] = [list(astuple(t)) for t in lines[job.key]]
    report(Step(total, total, "done"))
    meta = {
        **overrides.now(),
        "torch": machine.version("torch"),
        "driver": machine.cuda.driver,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return Tuned(device.name, meta, entries, tuple(results))


def _best(
    job: Job, tiles: Sequence[Tile], on: planner.Target, tried: Callable[[Tile], None]
) -> tuple[Result, Tile | None]:
    """The result of a job, and the tile that beats the shipped one if any does."""
    import torch

    old = job.seeds[0]
    cases = [_Case(problem, old, on) for problem in job.problems]
    scores: list[tuple[float, float, float, Tile]] = []
    skipped = wrong = 0
    for tile in tiles:
        tried(tile)
        try:
            pairs = [case.compare(tile) for case in cases]
        except Exception:  # noqa: BLE001 - the compiler, the driver and torch each have their own
            torch.cuda.synchronize()  # raises if the device is lost: then nothing more can be said
            skipped += 1
            continue
        sound = [pair for pair in pairs if pair is not None]
        if len(sound) < len(pairs):
            wrong += 1
            continue
        share = math.exp(statistics.fmean(math.log(new / was) for was, new in sound))
        scores.append((share, _mean(was for was, _ in sound), _mean(n for _, n in sound), tile))
    scores.sort(key=lambda score: score[0])
    timed = len(scores)
    for share, was, new, tile in scores:
        if share > FASTER:
            break
        try:
            won = tile if tile.shared_bytes else measured(tile, job.key, on.capability)
        except Exception:  # noqa: BLE001 - with some mask it does not compile
            won = None
        if won is None or won.shared_bytes > on.shared_memory:
            timed, skipped = timed - 1, skipped + 1
            continue
        counts = (timed, skipped, wrong)
        return Result(job.key, job.case, _shape(old), _shape(won), was, new, *counts), won
    base = _mean(case.base_seconds for case in cases)
    counts = (timed, skipped, wrong)
    return Result(job.key, job.case, _shape(old), _shape(old), base, base, *counts), None


def _mean(values: Any) -> float:
    return statistics.geometric_mean(values)


def measured(tile: Tile, key: str, capability: tuple[int, int]) -> Tile:
    """The tile with the shared memory that the compiler reports for it."""
    from portattn.backends.triton_jit import ahead

    kind, size, dim = key.split("/")
    dtype = "float16" if size == "2" else "float32"
    arch = 10 * capability[0] + capability[1]
    said = {
        name: int(ahead.forward(tile, dtype, int(dim), arch, flags).metadata.shared)
        for name, flags in ahead.VARIANTS.items()
        if name in ahead.variants(arch, dtype, kind)
    }
    return replace(tile, **ahead.table_bytes(said))


class _Case:
    """One problem's arrays, the shipped tile's output and its graph. A call of few rows reads
    other keys each time, so that they come from memory."""

    def __init__(self, problem: Problem, shipped: Tile, on: planner.Target) -> None:
        import torch

        self.problem, self.on = problem, on
        self.base: Config = planner.plan(problem, on, None).config
        dtype = getattr(torch, problem.dtype)
        p = problem
        random = torch.Generator("cuda").manual_seed(0)

        def draw(heads: int, length: int, width: int) -> Any:
            shape = (p.batch, heads, length, width)
            return torch.randn(shape, generator=random, device="cuda", dtype=dtype)

        size = p.batch * p.heads_k * p.seq_k * (p.head_dim + p.head_dim_v) * config.ITEM[p.dtype]
        copies = max(1, min(8, COLD_BYTES // size)) if config.few_rows(p) else 1
        q = draw(p.heads_q, p.seq_q, p.head_dim)
        self.out = torch.empty(
            (p.batch, p.heads_q, p.seq_q, p.head_dim_v), device="cuda", dtype=dtype
        )
        keys = [
            (draw(p.heads_k, p.seq_k, p.head_dim), draw(p.heads_k, p.seq_k, p.head_dim_v))
            for _ in range(copies)
        ]
        self.calls = [_call(q, k, v, self.out) for k, v in keys]
        self.run(shipped, self.calls[:1])
        self.expected = self.out.float()
        self.bound = TOLERANCE[p.dtype] * float(self.expected.abs().max())
        self.graph = self.capture(shipped)
        once = max(_seconds(self.graph, 1), 1e-9)
        self.count = min(MOST_CALLS, max(1, math.ceil(SAMPLE_SECONDS / once)))
        self.base_seconds = _seconds(self.graph, self.count) / copies

    def run(self, tile: Tile, calls: Sequence[Call]) -> None:
        """Calls with that tile, the keys split as the planner would."""
        from portattn.backends.triton_jit import launch

        splits, keys = self.base.splits, self.base.split_keys
        if config.few_rows(self.problem):
            splits, keys = config.split(self.problem, tile, self.on.multiprocessors)
        made = replace(self.base, tile=tile, splits=splits, split_keys=keys)
        for call in calls:
            launch.run(self.problem, made, call)

    def capture(self, tile: Tile) -> Any:
        """A graph of one call for each copy of the keys, run before, so that it is compiled."""
        import torch

        self.run(tile, self.calls)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(tile, self.calls)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def compare(self, tile: Tile) -> tuple[float, float] | None:
        """Seconds of a call with the shipped tile and with that one, in turns; None if the result
        is another."""
        self.out.fill_(float("nan"))
        self.run(tile, self.calls[:1])
        apart = float((self.out.float() - self.expected).abs().max())
        if not apart <= self.bound:
            return None
        graph = self.capture(tile)
        was: list[float] = []
        new: list[float] = []
        for _ in range(ROUNDS):
            for kept, replayed in ((was, self.graph), (new, graph)):
                replayed.replay()
                kept.append(_seconds(replayed, self.count) / len(self.calls))
        return statistics.median(was), statistics.median(new)


def _call(q: Any, k: Any, v: Any, out: Any) -> Call:
    from portattn.arrays import recognise

    named = {"q": q, "k": k, "v": v, "out": out}
    return Call(**{name: recognise(x, name) for name, x in named.items()})


def _seconds(graph: Any, count: int) -> float:
    """Seconds of one replay on the device, of ``count`` in a row."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
