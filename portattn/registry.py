"""Where backends come from: the folders below `portattn.backends`, and the entry point group
`portattn.backends` of other distributions.

The rule kept here: this is the only file that knows where backends live, and it knows it as a
string. Adding an in-tree backend is adding a folder.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
from dataclasses import dataclass

from portattn.contract import Backend, Reason

IN_TREE = "portattn.backends"
ENTRY_POINTS = "portattn.backends"


@dataclass(frozen=True, slots=True)
class Found:
    """A backend, or the reason why what claims to be one cannot be loaded."""

    name: str
    origin: str
    backend: Backend | None
    broken: Reason | None = None


@functools.cache
def find_backends() -> dict[str, Found]:
    """Every backend by name, in-tree ones first; loaded once. `refresh` looks again."""
    found: dict[str, Found] = {}
    package = importlib.import_module(IN_TREE)
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            backend: Backend = importlib.import_module(f"{IN_TREE}.{module.name}").BACKEND
            found[backend.name] = Found(backend.name, module.name, backend)
    for entry in _entry_points():
        found.setdefault(entry.name, _load(entry))
    return found


def refresh() -> None:
    """Forget what was found, so that a newly installed backend is seen."""
    find_backends.cache_clear()


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """Those of our group. Most environments have none: a look at the texts says so in less than
    half the time that it takes to parse them all, which a first call would wait for."""
    every = importlib.metadata.distributions()
    if not any(ENTRY_POINTS in (dist.read_text("entry_points.txt") or "") for dist in every):
        return []
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda e: e.name)


def _load(entry: importlib.metadata.EntryPoint) -> Found:
    # Someone else's package: whatever goes wrong while it loads is reported as its own reason, and
    # the other backends stay usable.
    origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    try:
        backend = entry.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001
        reason = Reason(
            "plugin_broken",
            entry.value,
            f"{type(error).__name__}: {error}",
            "an importable BACKEND object",
            f"repair or uninstall {origin}",
            "probed",
        )
        return Found(entry.name, origin, None, reason)
    if not isinstance(backend, Backend) or backend.name != entry.name:
        reason = Reason(
            "plugin_invalid",
            entry.value,
            f"{type(backend).__name__} named {getattr(backend, 'name', None)!r}",
            f"an object with portattn.contract.Backend's members and the name {entry.name!r}",
            f"repair or uninstall {origin}",
            "probed",
        )
        return Found(entry.name, origin, None, reason)
    return Found(entry.name, origin, backend)
