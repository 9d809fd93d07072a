"""What a backend promises, and how it refuses.

The rule kept here: a request is honoured whole or refused before anything is launched, with every
reason at once. A reason carries what came, the limit and what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from portattn.arrays import Array
    from portattn.machine import Machine
    from portattn.problem import Problem

Source = Literal["declared", "probed", "certified"]


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a backend does not take a problem.

    ``code`` is stable and meant for programs; ``field`` names the argument or the part of the
    machine; ``source`` says how we know: ``declared`` (the backend's rule), ``probed`` (tried in a
    child process) or ``certified`` (a conformance record).
    """

    code: str
    field: str
    got: Any
    limit: Any
    hint: str = ""
    source: Source = "declared"

    def __str__(self) -> str:
        got = str(self.got)
        text = f"{self.field}: {got}" if " " in got else f"{self.field}={got}"
        if self.limit not in (None, ""):
            text += f"; needs {self.limit}"
        if self.hint:
            text += f"; {self.hint}"
        return text

    def to_json(self) -> dict[str, Any]:
        """The reason as JSON values, the fields under their own names."""
        return {
            "code": self.code,
            "field": self.field,
            "got": plain(self.got),
            "limit": plain(self.limit),
            "hint": self.hint,
            "source": self.source,
        }


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: tuples become lists, unknown objects their text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [plain(v) for v in value]
    return str(value)


class Unsupported(NotImplementedError):
    """No backend, or not the named one, takes the problem; nothing was launched.

    ``reasons`` maps each backend asked to its tuple of `Reason`.
    """

    def __init__(self, message: str, reasons: Mapping[str, Iterable[Reason]] | None = None):
        self.reasons: dict[str, tuple[Reason, ...]] = {
            name: tuple(why) for name, why in (reasons or {}).items()
        }
        lines = [message]
        for name, why in self.reasons.items():
            lines += [f"  {name}: {reason}" for reason in why]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:  # the default would repeat the reasons in the message
        return (_rebuild_unsupported, (str(self), self.reasons))


def _rebuild_unsupported(text: str, reasons: Mapping[str, Iterable[Reason]]) -> Unsupported:
    error = Unsupported(text)
    error.reasons = {name: tuple(why) for name, why in reasons.items()}
    return error


@dataclass(frozen=True, slots=True)
class Plan:
    """How a backend would run a problem, before anything runs.

    ``shared_memory_bytes`` is per thread block (0 on a CPU); ``workspace_bytes`` is the most that
    the call allocates beyond its inputs and outputs, all threads together.
    """

    mechanism: str
    tile: tuple[tuple[str, int], ...] = ()
    shared_memory_bytes: int = 0
    workspace_bytes: int = 0
    note: str = ""
    config: Any = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, without the backend's own ``config``."""
        return {
            "mechanism": self.mechanism,
            "tile": dict(self.tile),
            "shared_memory_bytes": self.shared_memory_bytes,
            "workspace_bytes": self.workspace_bytes,
            "note": self.note,
        }


@dataclass(slots=True)
class Call:
    """The arrays of one call, in the caller's layout; a backend reads the first group of fields
    and fills the rest in place.

    ``out`` is always there. ``lse`` is None where nobody asked for it. A backward call also has
    ``dout`` and fills every gradient that is not None; ``lse`` is an input then.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_k: Array | None = None
    block_table: Array | None = None
    # backward only
    dout: Array | None = None
    dlse: Array | None = None
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dbias: Array | None = None
    dsinks: Array | None = None


def device_reasons(problem: Problem | None, kinds: tuple[str, ...]) -> tuple[Reason, ...]:
    """The reason of a backend whose arrays live on ``kinds`` of device against a problem whose
    arrays live elsewhere; none where the problem leaves the device open."""
    if problem is None or problem.device is None or problem.device.split(":")[0] in kinds:
        return ()
    where = " or ".join(kinds)
    return (
        Reason("device", "device", problem.device, where, f"move the arrays to a {where} device"),
    )


def cuda_reasons(machine: Machine, package: str, module: str, extra: str) -> tuple[Reason, ...]:
    """Everything that keeps a CUDA framework from working here: package missing, package
    broken on import, no driver, no visible device, CUDA lost to a fork."""
    if machine.pretended:
        return ()
    found = []
    install = f'pip install "portattn[{extra}]"'
    if machine.version(package) is None and not machine.findable(module):
        found.append(Reason("package_missing", module, "not installed", package, install))
    else:
        error = machine.import_error(module)
        if error is not None:
            found.append(
                Reason(
                    "package_broken",
                    module,
                    error,
                    f"an importable {module}",
                    f"reinstall {package}; `python -c 'import {module}'` shows the failure",
                    "probed",
                )
            )
    cuda = machine.cuda
    if cuda.code:
        hint = {
            "driver_missing": "install the NVIDIA driver; backend='numpy' takes host arrays",
            "no_device": "no NVIDIA device is visible; backend='numpy' takes host arrays",
            "devices_hidden": "CUDA_VISIBLE_DEVICES hides every device; unset it or name one",
            "cuda_lost_in_fork": "CUDA was initialised before fork; start workers with 'spawn'",
        }.get(cuda.code, "see what nvidia-smi says")
        found.append(
            Reason(cuda.code, "cuda", cuda.problem, "a visible CUDA device", hint, "probed")
        )
    return tuple(found)


@runtime_checkable
class Backend(Protocol):
    """What ``BACKEND`` in ``backends/<name>/__init__.py`` (or an entry point) is.

    Importing the module that holds it imports no framework and calls no driver.
    """

    name: str
    """The name that callers write, as in ``backend="numpy"``."""

    device_kinds: tuple[str, ...]
    """Where its arrays live: ``("cpu",)`` or ``("cuda",)``."""

    packages: tuple[str, ...]
    """The distributions whose versions belong to its certificate, first the framework."""

    def why_not(self, problem: Problem | None, machine: Machine) -> tuple[Reason, ...]:
        """Every reason against ``problem`` on ``machine``; empty means supported. ``None`` asks
        about the machine alone."""

    def plan(self, problem: Problem, machine: Machine) -> Plan:
        """How an accepted problem would run. Only called where ``why_not`` is empty."""

    def run(self, problem: Problem, plan: Plan, call: Call) -> None:
        """Compute on the arrays' device and current stream, filling ``call`` in place; the
        backward pass where ``problem.backward``."""

    def kernel_files(self) -> tuple[str, ...]:
        """Paths of the sources whose hash a certificate carries."""
