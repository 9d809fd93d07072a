"""A run: cases into batches, batches into children, outcomes into a journal and a record.

The rule kept here: nothing that was answered is lost. Every outcome goes to a journal before the
next is waited for; an interrupted run leaves the journal and a partial record, and the same run
started again takes up behind it.

Batches are cut from the catalogue's order alone, not from the number of workers, so that which
cases share a process (stale buffers, leaks and cached plans show only so) is the same every time.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from portattn.conformance import identity, isolate, meters, record
from portattn.conformance.case import Case, Check, Outcome
from portattn.conformance.isolate import Cancelled, Child, Loaded, Setup
from portattn.conformance.manifest import Manifest
from portattn.conformance.targets import TargetError
from portattn.conformance.waivers import Waiver
from portattn.machine import cores

BATCH = {"cpu": 64, "cuda": 256}  # cases that share a process; starting CUDA takes seconds
TIMEOUT = {"smoke": 120.0, "cpu": 180.0, "gpu": 300.0}  # seconds for one case


class Interrupted(Exception):
    """The run was stopped by the user; ``partial`` is the record of what was answered so far."""

    def __init__(self, partial: dict[str, Any]):
        super().__init__("interrupted")
        self.partial = partial


class OtherDtypes(Exception):
    """The journal is of the same run in other dtypes; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a run depends on. ``selection``: ids of checks or cases, None for all. ``jobs`` None:
    one worker a core for a CPU target, one for a GPU. ``dtypes`` None: all that are claimed."""

    spec: str
    tier: str
    seed: int = 0
    selection: tuple[str, ...] | None = None
    fraction: tuple[int, int] = (1, 1)
    jobs: int | None = None
    timeout_s: float | None = None
    memory: int | None = None
    waivers: tuple[Waiver, ...] = ()
    catalogue: str = isolate.CATALOGUE
    dtypes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after every case (``case`` None at the start): how far the run is."""

    done: int
    total: int
    case: Case | None = None
    outcome: Outcome | None = None
    seconds: float = 0.0


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """Cases for one child."""

    cases: tuple[Case, ...]
    alone: bool = False
    own_pages: bool = False


@dataclass
class Run:
    """A run prepared: the target is loaded once, its cases are known."""

    options: Options
    catalogue: Mapping[str, Check]
    loaded: Loaded
    cases: list[Case]
    suite: Mapping[str, str]
    fingerprint: Mapping[str, Any]
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    earlier_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The target's name, as a file name."""
        name = self.loaded.manifest.name
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)

    @property
    def key(self) -> dict[str, Any]:
        """What must be equal for one run to take up another."""
        options = self.options
        return {
            "spec": options.spec,
            "tier": options.tier,
            "seed": options.seed,
            "selection": None if options.selection is None else sorted(options.selection),
            "fraction": list(options.fraction),
            "suite": dict(self.suite),
            "fingerprint": dict(self.fingerprint),
            "manifest": self.loaded.manifest.to_json(),
        }

    def record(self, seconds: float, *, complete: bool) -> dict[str, Any]:
        """The record of what has been answered."""
        return record.build(
            suite=self.suite,
            spec=self.options.spec,
            manifest=self.loaded.manifest,
            simulated=self.loaded.simulated,
            source=self.loaded.source,
            states=self.loaded.states,
            fingerprint=self.fingerprint,
            tier=self.options.tier,
            seed=self.options.seed,
            fraction=self.options.fraction,
            selection=self.options.selection,
            catalogue=self.catalogue,
            entries=self.entries,
            complete=complete,
            seconds=self.earlier_seconds + seconds,
            waivers=self.options.waivers,
        )


def catalogue_of(path: str) -> Mapping[str, Check]:
    """The table of checks that ``module:NAME`` names."""
    import importlib

    module, _, name = path.partition(":")
    table: Mapping[str, Check] = getattr(importlib.import_module(module), name)
    return table


def prepare(options: Options) -> Run:
    """Load the target in a child, ask for its manifest and generate the cases. Raises
    `TargetError` where the target cannot be used and ValueError for an unknown selection, or a
    dtype that is not claimed."""
    catalogue = catalogue_of(options.catalogue)
    child = Child(_setup(options, 1, None))
    try:
        loaded = child.load()
    finally:
        child.close()
    if options.dtypes is not None:
        # All of the run, its children and its record see this manifest and no other.
        loaded = replace(loaded, manifest=loaded.manifest.narrowed(options.dtypes))
    cases = record.select(
        catalogue,
        loaded.manifest,
        options.tier,
        options.seed,
        options.fraction,
        options.selection,
    )
    for name in options.selection or ():
        if name not in catalogue and all(case.id != name for case in cases):
            raise ValueError(
                f"check {name!r} is unknown; `portattn conformance list` names them all"
            )
    return Run(
        options,
        catalogue,
        loaded,
        cases,
        identity.suite(),
        identity.fingerprint(options.spec, loaded),
    )


def execute(
    run: Run, journal: Path | None = None, report: Report = lambda progress: None
) -> dict[str, Any]:
    """Run all cases that the journal does not hold yet; the record. Raises `Interrupted` on
    Ctrl-C, with the partial record, after the journal is on the disk."""
    started = time.monotonic()
    done = _take_up(run, journal)
    todo = [case for case in run.cases if case.id not in run.entries]
    report(Progress(done, len(run.cases)))
    with _Journal(journal, run) as write, closing(_answers(run, todo)) as answers:
        try:
            for case, outcome, seconds in answers:
                run.entries[case.id] = record.case_entry(case, outcome, seconds)
                write(case.id, run.entries[case.id])
                done += 1
                report(Progress(done, len(run.cases), case, outcome, seconds))
        except KeyboardInterrupt:
            partial = run.record(time.monotonic() - started, complete=False)
            raise Interrupted(partial) from None
    return run.record(time.monotonic() - started, complete=True)


# ---- workers -------------------------------------------------------------------------------------
def batches(
    cases: Iterable[Case], catalogue: Mapping[str, Check], device: str = "cpu"
) -> list[Batch]:
    """Cut the cases, in their order, into batches of one kind and at most `BATCH` cases."""
    cut: list[Batch] = []
    current: list[Case] = []
    kind = (False, False)
    for case in cases:
        check = catalogue[case.check]
        its_kind = (check.alone, check.group == "R")
        if current and (its_kind != kind or len(current) == BATCH[device]):
            cut.append(Batch(tuple(current), *kind))
            current = []
        kind = its_kind
        current.append(case)
    if current:
        cut.append(Batch(tuple(current), *kind))
    return cut


Answer = tuple[Case, Outcome, float]


def _answers(run: Run, todo: list[Case]) -> Generator[Answer, None, None]:
    """The outcomes of all cases, as they come; shared batches first, then those that want the
    machine to themselves."""
    device = run.loaded.manifest.device
    cut = batches(todo, run.catalogue, device)
    jobs = run.options.jobs or (cores() if device == "cpu" else 1)
    yield from _parallel(run, [batch for batch in cut if not batch.alone], jobs)
    yield from _parallel(run, [batch for batch in cut if batch.alone], 1)


def _parallel(run: Run, work: list[Batch], jobs: int) -> Iterator[Answer]:
    jobs = min(jobs, len(work))
    if not jobs:
        return
    waiting: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    for batch in work:
        waiting.put(batch)
    answers: queue.SimpleQueue[Answer | BaseException | None]
    answers = queue.SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_work, args=(run, jobs, waiting, answers, stop), daemon=True)
        for _ in range(jobs)
    ]
    for thread in threads:
        thread.start()
    ended = 0
    try:
        while ended < jobs:
            try:
                answer = answers.get(timeout=0.5)  # a timeout, so that Ctrl-C gets through
            except queue.Empty:
                continue
            if answer is None:
                ended += 1
            elif isinstance(answer, BaseException):
                raise answer
            else:
                yield answer
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _work(
    run: Run,
    jobs: int,
    waiting: queue.SimpleQueue[Batch],
    answers: queue.SimpleQueue[Any],
    stop: threading.Event,
) -> None:
    """One worker: batches until there are none, each in a child of its own."""
    try:
        while not stop.is_set():
            try:
                batch = waiting.get_nowait()
            except queue.Empty:
                break
            for answer in _run_batch(run, batch, jobs, stop.is_set):
                answers.put(answer)
    except Cancelled:
        pass  # the main thread knows: it asked for it
    except BaseException as error:  # noqa: BLE001  handed to the main thread, which raises it
        answers.put(error)
    answers.put(None)


def _run_batch(
    run: Run, batch: Batch, jobs: int, cancelled: Callable[[], bool]
) -> Iterator[Answer]:
    """A batch in one child, and in another after each case that ends it."""
    limit = run.options.timeout_s or TIMEOUT[run.options.tier]
    setup = _setup(run.options, jobs, run.loaded.manifest, own_pages=batch.own_pages)
    child: Child | None = None
    try:
        for case in batch.cases:
            if cancelled():
                return
            if child is None or child.dead:
                child = Child(setup, cancelled)
                try:
                    child.load()
                except TargetError as error:
                    # It did load once; this case cannot be asked, the next may be.
                    yield case, Outcome.not_run(f"the target did not load again: {error}"), 0.0
                    continue
            yield case, *child.run(case, case.timeout_s or limit)
    finally:
        if child is not None:
            child.close()


def _setup(
    options: Options, jobs: int, manifest: Manifest | None, *, own_pages: bool = False
) -> Setup:
    threads = max(1, cores() // jobs)
    memory = options.memory or meters.available_bytes() // jobs or None
    return Setup(options.spec, options.catalogue, threads, memory, own_pages, manifest)


# ---- the journal ---------------------------------------------------------------------------------
class _Journal:
    """One JSON line a case behind a line that says which run it is; None writes nowhere."""

    def __init__(self, path: Path | None, run: Run):
        self._path, self._run = path, run
        self._file: TextIO | None = None

    def __enter__(self) -> Callable[[str, Mapping[str, Any]], None]:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            begun = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            self._file = begun.open("w")
            self._line(self._run.key)
            for case_id, entry in self._run.entries.items():
                self._line([case_id, entry])
            begun.replace(self._path)  # only now: the old journal may hold what this one will
        return lambda case_id, entry: self._line([case_id, entry])

    def _line(self, value: Any) -> None:
        if self._file is not None:
            self._file.write(record.text_of(value) + "\n")
            self._file.flush()

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()


def _refuse_other_dtypes(header: str, run: Run, journal: Path) -> None:
    """The same run of other dtypes is hours of work that a slip of a flag must not throw away."""
    try:
        begun = json.loads(header)
        theirs = [begun["manifest"].pop(name) for name in ("dtypes", "unasked_dtypes")]
        key = json.loads(record.text_of(run.key))
        ours = [key["manifest"].pop(name) for name in ("dtypes", "unasked_dtypes")]
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if begun == key and theirs != ours:
        raise OtherDtypes(
            f"{journal} was begun for dtypes {', '.join(theirs[0])}, this run is for "
            f"{', '.join(ours[0])}; give it another folder, or --fresh to begin anew"
        )


def _take_up(run: Run, journal: Path | None) -> int:
    """Fill ``run.entries`` from the journal of the same run, if there is one; how many cases."""
    if journal is None or not journal.exists():
        return 0
    lines = journal.read_text(errors="replace").splitlines()
    if not lines or lines[0] != record.text_of(run.key):
        _refuse_other_dtypes(lines[0] if lines else "", run, journal)
        return 0  # another run's: it is begun anew
    known = {case.id for case in run.cases}
    for line in lines[1:]:
        try:
            case_id, entry = json.loads(line)
        except ValueError:
            break  # the line that was being written when the machine went down
        if case_id in known:
            run.entries[case_id] = entry
            run.earlier_seconds += entry["seconds"]
    return len(run.entries)
