"""How a defect is written down: a subclass of `Tiled` that gets one thing wrong.

The rule kept here: the class name is the mutant's id, its docstring the defect in one sentence, its
module the family. ``@seeded(level, "K04 K05")`` adds the level at which a run must fail because of
it, and the checks that are expected to say so, the likeliest first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from portattn.conformance.mutants.tiled import Tiled

Defect = TypeVar("Defect", bound=type[Tiled])


@dataclass(frozen=True, slots=True)
class Mutant:
    """One seeded defect. ``level`` None: any level; ``checks`` empty: the whole catalogue is
    asked. ``spec`` is what `portattn.conformance.targets.load` takes."""

    id: str
    title: str
    family: str
    level: int | None
    checks: tuple[str, ...]
    spec: str


def seeded(level: int | None, checks: str) -> Callable[[Defect], Defect]:
    """Mark a class as a mutant, to be caught at ``level`` or below by one of ``checks``; None where
    only checks that inform know of it."""

    def mark(defect: Defect) -> Defect:
        defect.seed = (level, tuple(checks.split()))
        return defect

    return mark


def collect(*families: ModuleType) -> dict[str, Mutant]:
    """The mutants of some modules, in their order; a repeated id raises."""
    table: dict[str, Mutant] = {}
    for module in families:
        for name, item in vars(module).items():
            if not isinstance(item, type) or item.__module__ != module.__name__:
                continue  # imported from elsewhere
            if not issubclass(item, Tiled) or "seed" not in vars(item):
                continue
            if name in table:
                raise ValueError(f"two mutants have the id {name}")
            table[name] = _mutant(name, item, module.__name__)
    return table


def _mutant(name: str, defect: Any, module: str) -> Mutant:
    level, checks = defect.seed
    title = " ".join((inspect.getdoc(defect) or "").split()).rstrip(".")
    family = module.rpartition(".")[2]
    return Mutant(name, title, family, level, checks, f"{module}:{name}")
